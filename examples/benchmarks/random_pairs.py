"""Random pairs of real shapes, and an oracle's drafts that are right as often as a trained drafter's would be."""

import contextlib
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from transformers.generation import candidate_generator

from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.scripted_draft import slot_accuracy
from dflash_hf.layouts.configuration import DFlashDraftConfig


def _shape(
    hidden, intermediate, layers, heads, kv_heads, vocab, draft_layers=5, block_size=16, head_dim=128, experts=0
) -> dict:
    of_experts = {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": intermediate}
    return {
        "config_class": Qwen3MoeConfig if experts else Qwen3Config,
        "target": {
            **(of_experts if experts else {}),
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
        },
        "draft_layers": draft_layers,
        "block_size": block_size,
    }


SHAPES = {
    "tiny": _shape(64, 128, 4, 4, 2, 512, draft_layers=1, block_size=8, head_dim=16),
    "demo": _shape(128, 384, 6, 4, 4, 1024, draft_layers=2, head_dim=64),
    "100m": _shape(768, 2304, 12, 12, 4, 8192, draft_layers=2, head_dim=64),
    "qwen3-0.6b": _shape(1024, 3072, 28, 16, 8, 151936),
    "qwen3-4b": _shape(2560, 9728, 36, 32, 8, 151936),
    "qwen3-8b": _shape(4096, 12288, 36, 32, 8, 151936),
    "tiny-moe": _shape(64, 32, 4, 4, 2, 512, draft_layers=1, block_size=8, head_dim=16, experts=16),
    "qwen3-moe": _shape(2048, 768, 12, 32, 4, 151936, experts=128),  # Qwen3-30B-A3B with a quarter of its layers
}


@torch.no_grad()
def random_pair(name: str, dtype, device, num_prompts: int, prompt_length: int = 64, seed: int = 0):
    """
    A random pair of a shape, and prompts.

    The target's next token is almost certain in any precision: its residual stream is dominated by the embedding, and
    the head's row of a token holds the embedding of its predecessor in a random order of the vocabulary. All layers
    are computed as in a trained model.

    Returns:
        Target, drafter and `num_prompts` prompts of ids.
    """
    shape = SHAPES[name]
    config = shape["config_class"](
        **shape["target"],
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        dtype=dtype,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # never in fp32, which may not fit
        draft_config = DFlashDraftConfig.for_target(
            config,
            config.vocab_size - 1,
            num_hidden_layers=shape["draft_layers"],
            block_size=shape["block_size"],
        )
        draft = DFlashDraftModel(draft_config).to(dtype).eval()
    order = torch.randperm(config.vocab_size, device=device)
    embedding = target.get_input_embeddings().weight
    embedding.normal_(std=4.0)
    target.get_output_embeddings().weight[order.roll(-1)] = embedding[order]  # the successor of each token
    prompts = torch.randint(config.vocab_size - 1, (num_prompts, prompt_length)).tolist()
    return target, draft, prompts


def oracle_text(target, prompt: Sequence[int], max_new_tokens: int, block_size: int, tau: float, seed: int = 0):
    """The draft `[S]` of [`oracle_texts`] for one prompt."""
    return oracle_texts(target, [prompt], max_new_tokens, block_size, tau, seed)[0]


@torch.no_grad()
def oracle_texts(
    target, prompts: Sequence[Sequence[int]], max_new_tokens: int, block_size: int, tau: float, seed: int = 0
) -> list[torch.LongTensor]:
    """
    The drafts of an oracle: the target's own text after each prompt, wrong at random places.

    Args:
        target (`PreTrainedModel`): Writes the texts, in one batch.
        prompts (`Sequence[Sequence[int]]`): Ids, as many in each.
        max_new_tokens (`int`): That will be decoded with these drafts.
        block_size (`int`): Slots of the drafter's block, anchor included.
        tau (`float`): Tokens that a block commits on average.
        seed (`int`): Of the places.

    Returns:
        For each prompt `torch.LongTensor` `[S]`: the prompt, and the drafted token for each position after it; long
        enough for a block past the end.
    """
    ids = torch.tensor([list(prompt) for prompt in prompts], device=target.device)
    texts = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens + block_size + 1,
        min_new_tokens=max_new_tokens + block_size + 1,
        do_sample=False,
    )
    accuracy = slot_accuracy(tau, block_size)
    drafts = []
    for prompt, text in zip(prompts, texts, strict=True):
        random = torch.Generator().manual_seed(seed + sum(prompt))
        is_wrong = (torch.rand(len(text), generator=random) >= accuracy).to(text.device)
        is_wrong[: len(prompt)] = False
        drafts.append(torch.where(is_wrong, (text + 1) % target.config.get_text_config().vocab_size, text))
    return drafts


@contextlib.contextmanager
def native_oracle(texts: Sequence[torch.Tensor] | None, prompts: Sequence[Sequence[int]]):
    """Inside, transformers' own candidate generator drafts like a [`ScriptedDraft`]; no effect without texts."""
    generator = getattr(candidate_generator, "DFlashTokenCandidateGenerator", None)
    if texts is None or generator is None:
        yield
        return
    original = generator.get_candidates

    def get_candidates(self, input_ids, *args, **kwargs):
        candidates, logits = original(self, input_ids, *args, **kwargs)
        length = input_ids.shape[1]
        total = candidates.shape[1]
        if len(texts) == 1:  # without a look at the ids, for which the host would wait
            candidates[0, length:] = texts[0][length:total]
            return candidates, logits
        row = input_ids[0].tolist()
        for prompt, text in zip(prompts, texts, strict=True):
            if row[: len(prompt)] == list(prompt):
                candidates[0, length:] = text[length:total]
        return candidates, logits

    generator.get_candidates = get_candidates
    try:
        yield
    finally:
        generator.get_candidates = original
