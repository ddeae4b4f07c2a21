"""
A target's own responses to many prompts: by continuous batching where its cache and the generation settings allow it,
otherwise by `generate`, batch by batch.
"""

import contextlib
import copy
import random
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dflash_hf.decoding.probe import capabilities_of
from dflash_hf.decoding.session import SlotSession
from dflash_hf.modeling.target_dflash import length_dependent_rope
from dflash_hf.synthetic.continuous_batch import BatchCache, NextToken, continuous_batch_responses
from dflash_hf.synthetic.prompt_queue import PromptQueue
from dflash_hf.synthetic.sampling import TokenSampler, sampler_supports
from dflash_hf.targets.features import input_device
from dflash_hf.targets.generation import eos_ids, forked_rng, generate_one, max_answer_tokens, without_token
from dflash_hf.targets.memory import free_memory
from dflash_hf.targets.unsafe_hooks import unsafe_hook


Prompts = PromptQueue | Iterable[tuple[Hashable, Sequence[int]]]  # number, or another key, and ids
_CONTINUOUS_BATCH_SIZE = 64
_GENERATE_BATCH_SIZE = 16


def supports_continuous_batch(target: PreTrainedModel, config: GenerationConfig) -> bool:
    """Whether a continuous batch decodes as `generate` does: its cache lives in slots, and the settings are plain."""
    if not sampler_supports(config) or _rope_depends_on_length(target):
        return False
    return not target.training and unsafe_hook(target) is None and capabilities_of(target).session is SlotSession


def _rope_depends_on_length(target: PreTrainedModel) -> bool:
    """Whether its rotary frequencies depend on the length of the sequence."""
    return bool(length_dependent_rope(target.config))


def _has_rotary_embedding(target: PreTrainedModel) -> bool:
    return bool(getattr(target.config.get_text_config(decoder=True), "rope_parameters", None))


def generate_responses(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    mask_token_id: int | None,
    batch_size: int | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """
    The target's own responses to prompts, which a drafter should be trained on.

    The mask token is suppressed: in the data it would mean both itself and an unknown token.

    Args:
        prompts (`Sequence[Sequence[int]]`): Prompt ids, chat template applied.
        max_new_tokens (`int`): Longest response.
        mask_token_id (`int`): The drafter's mask token; `None` if it is not known yet.
        batch_size (`int`, *optional*): Prompts that decode together; see
            [`~dflash_hf.synthetic.responses.stream_responses`].
        generation_config (`GenerationConfig`): Sampling, end-of-sequence ids. Default: the target's.
        seed (`int`): Seed for sampling.

    Returns:
        `list[list[int]]`: Responses in the order of `prompts`, each up to and including its end-of-sequence token.

    Raises:
        `ValueError`: a prompt is empty, a text, or fills the target's context.
    """
    text = next((prompt for prompt in prompts if isinstance(prompt, str)), None)
    if text:
        raise ValueError(f'prompts holds the text {text[:40]!r}; pass its ids, `tokenizer(text)["input_ids"]`.')
    lengths = [len(prompt) for prompt in prompts]
    if 0 in lengths:
        raise ValueError(
            f"prompts[{lengths.index(0)}] is empty; start it with the target's beginning-of-sequence token."
        )
    max_answer_tokens(target, max(lengths, default=0), max_new_tokens)
    config = without_token(generation_config or target.generation_config, mask_token_id)
    # Prompts of similar length next to each other.
    numbered = sorted(enumerate(prompts), key=lambda numbered_prompt: len(numbered_prompt[1]))
    response_of = dict(stream_responses(target, numbered, max_new_tokens, config, batch_size, seed))
    return [response_of[i] for i in range(len(prompts))]


def stream_responses(
    target: PreTrainedModel,
    prompts: Prompts,
    max_new_tokens: int,
    config: GenerationConfig,
    batch_size: int | None = None,
    seed: int = 0,
) -> Iterator[tuple]:
    """
    Yield responses as they finish, each up to and including its end-of-sequence token.

    Prompts are taken one by one as rows become free. A [`PromptQueue`] is asked again after each response, so that the
    caller may push further prompts while it holds one. Work is saved if consecutive prompts begin alike, and if a
    prompt continues a response that has just finished: what a row holds already is not read again.

    Args:
        target (`PreTrainedModel`): The target.
        prompts (`PromptQueue` or `Iterable`): A number (or another key) and the ids of each prompt.
        max_new_tokens (`int`): Longest response; shorter where the target's context is full.
        config (`GenerationConfig`): Sampling, end-of-sequence ids.
        batch_size (`int`, *optional*): Prompts that decode together. Default: 64 in a continuous batch, 16 with
            `generate`; see [`rows_that_fit`].
        seed (`int`): Seed for sampling. A response's samples depend on it and the prompt's key; with settings that
            only `generate` supports, also on the other prompts of the batch.

    Yields:
        The number of a prompt, and its response.

    Raises:
        `ValueError`: a prompt fills the target's context.
    """
    queue = prompts if isinstance(prompts, PromptQueue) else PromptQueue(prompts)
    if supports_continuous_batch(target, config):
        sampler = TokenSampler(config, seed)
        rows = batch_size or _CONTINUOUS_BATCH_SIZE
        yield from continuous_batch_responses(target, queue, max_new_tokens, sampler, eos_ids(config), rows)
    else:
        batch_size = batch_size or _GENERATE_BATCH_SIZE
        yield from _responses_by_generate(target, queue, max_new_tokens, config, batch_size, seed)


def _batches(target, prompts: PromptQueue, max_new_tokens: int, batch_size: int) -> Iterator[list[tuple]]:
    """
    Batches for `generate`: key, ids and maximum length of the response of each prompt. Rows that have finished are
    decoded on to the end of the longest, which a target may not survive where positions are learned, or frequencies
    depend on the length: then all rows of a batch have the same maximum.
    """
    needs_equal_maximum = not _has_rotary_embedding(target) or _rope_depends_on_length(target)
    while True:
        batch = []
        for key, ids in prompts.pop_up_to(batch_size):
            batch.append((key, ids, max_answer_tokens(target, len(ids), max_new_tokens)))
        if not batch:
            return
        if not needs_equal_maximum:
            yield batch
            continue
        for maximum in dict.fromkeys(maximum for _, _, maximum in batch):
            yield [prompt for prompt in batch if prompt[2] == maximum]


@torch.no_grad()
def _responses_by_generate(target, prompts: PromptQueue, max_new_tokens: int, config, batch_size: int, seed: int):
    """What [`stream_responses`] yields, by `generate`."""
    stop_ids = eos_ids(config)
    config = copy.deepcopy(config)
    if config.pad_token_id is None:
        config.pad_token_id = min(stop_ids, default=0)
    config.max_length = None
    config.num_return_sequences = None
    config.return_dict_in_generate = False  # one row of tokens for each prompt
    sampler = None
    if config.do_sample and sampler_supports(config):
        # `generate` decodes greedily, and `_SampledTokens` leaves it one choice: each row's own sampled token.
        sampler = TokenSampler(config, seed)
        config.do_sample = False
        config.temperature = None
        config.top_p = None
        config.top_k = None
    for batch in _batches(target, prompts, max_new_tokens, batch_size):
        config.max_new_tokens = max(maximum for _, _, maximum in batch)
        width = max(len(ids) for _, ids, _ in batch)
        # Left padding: new tokens must follow the prompt directly.
        padding = [width - len(ids) for _, ids, _ in batch]
        input_ids = torch.tensor([[config.pad_token_id] * pad + list(ids) for pad, (_, ids, _) in zip(padding, batch)])
        attention_mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        processors = LogitsProcessorList()
        if sampler is not None:
            processors.append(_SampledTokens(sampler, [key for key, _, _ in batch]))
        with _seeded(target, seed, batch[0][0]):
            output = target.generate(
                input_ids=input_ids.to(target.device),
                attention_mask=attention_mask.to(target.device),
                generation_config=config,
                logits_processor=processors,
            )  # [n, width + new]
        for (key, _, maximum), ids in zip(batch, output[:, width:].tolist(), strict=True):
            length = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), maximum)
            yield key, ids[: min(length, maximum)]


def responses_with_images(target, prompts: Iterable, max_new_tokens: int, config, seed: int = 0) -> Iterator[tuple]:
    """As [`stream_responses`], for [`~dflash_hf.data.images.ImagePrompt`]s, by `generate` and one at a time."""
    config = copy.deepcopy(config)
    config.max_length = None
    config.num_return_sequences = None
    for key, prompt in prompts:
        config.max_new_tokens = max_answer_tokens(target, len(prompt), max_new_tokens)
        with _seeded(target, seed, key):
            output = generate_one(target, prompt, generation_config=config)
        yield key, output.sequences[0, len(prompt) :].tolist()


@contextlib.contextmanager
def _seeded(target, seed: int, key) -> Iterator[None]:
    """Seed torch's generators by a prompt's key, and restore them afterwards."""
    with forked_rng(target.device):
        torch.manual_seed(random.Random(f"{seed} {key}").getrandbits(63))
        yield


class _SampledTokens(LogitsProcessor):
    """Replaces scores by those of which greedy decoding chooses the tokens that a [`TokenSampler`] samples."""

    def __init__(self, sampler: TokenSampler, keys: list):
        self.sampler = sampler
        self.generators = [sampler.generator(key) for key in keys]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = self.sampler(scores, self.generators)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


@torch.no_grad()
def rows_that_fit(target: PreTrainedModel, config: GenerationConfig, length: int, num_responses: int) -> int:
    """
    How many prompts decode together: 128 on a CPU, 256 elsewhere; at most half of all, since a batch that is never
    full is slow; and as many as half of the free memory holds. With `generate`, 16.

    Args:
        target (`PreTrainedModel`), config (`GenerationConfig`): The model and its generation settings.
        length (`int`): Tokens of a typical sequence, prompt and response.
        num_responses (`int`): Number of responses wanted.
    """
    if not supports_continuous_batch(target, config):
        return _GENERATE_BATCH_SIZE
    cache = BatchCache(target, 1)
    device = input_device(target)
    cache.step({0: NextToken(id=0, slot=max_answer_tokens(target, 1, length))})  # allocates its buffers
    # Of a target on several devices, each holds about as many layers; an offloaded one's weights are on none.
    devices = {parameter.device for parameter in target.parameters() if not parameter.is_meta} or {device}
    rows_in_memory = int(len(devices) * min(map(free_memory, devices)) / 2 / cache.nbytes)
    maximum = 128 if device.type == "cpu" else 256
    return max(1, min(maximum, num_responses // 2, rows_in_memory))
