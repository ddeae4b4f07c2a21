"""Tiny targets of many families, tiny drafters, and drafters that are right or wrong on purpose."""

import pytest
import torch
from support import families
from torch.nn.attention.flex_attention import flex_attention
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.integrations import flex_attention as upstream_flex

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.modeling.generation_dflash import DFlashCandidateGenerator
from dflash_hf.modeling.tree_dflash import independent_paths, likeliest_tree


VOCAB = 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "use_cache": True,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = ["sliding_attention", "full_attention"] * 2

FAMILIES = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "layer_types": SLIDING}),
    "gemma4": (
        "gemma4_text",
        {
            "sliding_window": 8,
            "layer_types": SLIDING,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 0,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {"sliding_window": 8, "layer_types": SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral_sliding": ("mistral", {"sliding_window": 8}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 4,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **MOE,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_inner": 48}),
}


def make_target(family: str = "qwen3", dtype=torch.float32, attn: str | None = "sdpa", seed: int = 0, **overrides):
    """A random target whose greedy text is diverse; the caller asserts that it is."""
    more = {**families.SLOTS, **families.REPLAY, **families.STEP, **families.CROP, **families.NONE}
    model_type, special = FAMILIES[family] if family in FAMILIES else (family, more[family])
    fields = {**COMMON, **special, **overrides}
    if family == "gpt2":
        for alias in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
            fields.pop(alias)
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**fields)
    if dtype == torch.float64:  # the grouped matrix product of experts knows no fp64
        config._experts_implementation = "eager"
    target = AutoModelForCausalLM.from_config(config, attn_implementation=attn).to(dtype).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20.0)
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    return target.requires_grad_(False)


def make_draft(target, block_size: int = 4, seed: int = 1, num_hidden_layers: int = 2, **overrides):
    """A random drafter for a target."""
    torch.manual_seed(seed)
    fields = {"target_layer_ids": [0, 2, 3], "intermediate_size": 48, **overrides}
    config = DFlashDraftConfig.for_target(
        target.config,
        target.config.get_text_config().vocab_size - 1,
        num_hidden_layers=num_hidden_layers,
        block_size=block_size,
        **fields,
    )
    return DFlashDraftModel(config).to(target.dtype).eval()


@pytest.fixture
def oracle(monkeypatch):
    """`oracle(texts, pads, error_rate)`: from now on drafters draft `texts` `[R, columns]` with random errors."""

    def install(texts, pads, error_rate=0.3, seed=0):
        random = torch.Generator().manual_seed(seed)
        original = DFlashCandidateGenerator.draft

        def draft(self, anchors, start, *args, **kwargs):
            block = original(self, anchors, start, *args, **kwargs)
            for row in range(block.shape[0]):
                known = texts[row % len(texts), pads[row % len(pads)] + int(start[row]) + 1 :][: block.shape[1] - 1]
                block[row, 1 : 1 + len(known)] = known
            wrong = (torch.rand(block.shape, generator=random) < error_rate).to(block.device)
            wrong[:, 0] = False
            return torch.where(wrong, (block + 1) % self.config.vocab_size, block)

        def tree(self, anchors, start, *args):
            return known_tree(self, anchors, start, args, texts, pads, error_rate, random)

        monkeypatch.setattr(DFlashCandidateGenerator, "draft", draft)
        monkeypatch.setattr(DFlashCandidateGenerator, "tree", tree)

    return install


def known_tree(generator, anchors, start, args, texts, pads, error_rate, random):
    """A tree in which the known token of each slot is among the likely ones, in some place, or is not."""
    paths = generator.paths
    slots, top_k, vocab_size = len(paths.levels), paths.top_k, generator.config.vocab_size
    generator._hidden_states(anchors, start, *args)  # writes the drafter's context
    ids = torch.zeros(len(anchors), slots, top_k, dtype=torch.long)
    for row in range(len(anchors)):
        known = texts[row % len(texts), pads[row % len(pads)] + int(start[row]) + 1 :][:slots]
        for slot in range(slots):
            token = int(known[slot]) if slot < len(known) else 0
            wrong = float(torch.rand((), generator=random)) < error_rate
            place = 0 if wrong else -int(torch.randint(3, (), generator=random).clamp(max=top_k - 1))
            ids[row, slot] = (token + wrong + torch.arange(place, place + top_k)) % vocab_size
    log_probs = (
        torch.linspace(-0.5, -4.0, top_k).expand(ids.shape)
        - 0.1 * torch.rand(ids.shape[:2], generator=random)[..., None]
    )
    tokens, totals = independent_paths(ids.to(anchors.device), log_probs.to(anchors.device), paths)
    return likeliest_tree(anchors, tokens, totals, paths)


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """Flex attention by its definition; compiled, it is tested where there is a CUDA device."""

    def attend(query, key, value, training=False, **arguments):
        assert query.dtype == key.dtype == value.dtype  # kernels take one, of half precision where they can
        return flex_attention(query, key, value, **arguments)

    monkeypatch.setattr(upstream_flex, "compile_friendly_flex_attention", attend)


@pytest.fixture(scope="session")
def target():
    return make_target()


@pytest.fixture
def draft(target):
    return make_draft(target)
