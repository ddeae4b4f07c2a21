"""A single answer of a target: what ends it, how long it may be, and `generate` for one prompt."""

import contextlib
import copy
from collections.abc import Iterator, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

from dflash_hf.targets.config_fields import stated_context_length


def eos_ids(generation_config: GenerationConfig) -> set[int]:
    """The end-of-sequence ids, each of which ends a response."""
    eos = generation_config.eos_token_id
    if eos is None:
        return set()
    return {eos} if isinstance(eos, int) else set(eos)


@contextlib.contextmanager
def forked_rng(device: torch.device, enabled: bool = True) -> Iterator[None]:
    """
    Restore torch's random generators, that of the CPU and that of a device, at the end of the block, so that a seed
    which is set inside holds for the block alone.

    Args:
        device (`torch.device`): The device on which the block samples.
        enabled (`bool`): Whether to restore anything.
    """
    is_mps = device.type == "mps"  # it has one device, and functions without an argument for it
    mps_state = torch.mps.get_rng_state() if is_mps and enabled else None
    devices = [] if is_mps or device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, enabled, device_type=device.type if devices else None):
            yield
    finally:
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


def without_token(generation_config: GenerationConfig, token_id: int | None) -> GenerationConfig:
    """A copy of a configuration that also suppresses a token, if one is given."""
    config = copy.deepcopy(generation_config)
    if token_id is not None:
        config.suppress_tokens = [*(config.suppress_tokens or []), token_id]
    return config


def generate_one(target: PreTrainedModel, ids: Sequence[int], **options):
    """
    The output of `generate` for one prompt.

    Args:
        target (`PreTrainedModel`): The target.
        ids (`Sequence[int]`): The prompt; a [`~dflash_hf.data.images.ImagePrompt`] brings the images among its ids.
        options: Further arguments of `generate`.
    """
    input_ids = torch.tensor([list(ids)], device=target.device)
    options |= image_inputs(target, ids)
    return target.generate(
        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), return_dict_in_generate=True, **options
    )


def image_inputs(target: PreTrainedModel, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """What a forward of the target takes besides ids: of an `ImagePrompt` its images, else nothing."""
    inputs = getattr(ids, "inputs", {})
    return {
        name: tensor.to(target.device, target.dtype if tensor.is_floating_point() else None)
        for name, tensor in inputs.items()
    }


def context_length_of(target: PreTrainedModel) -> int | None:
    """The context length of a target, in tokens of prompt and answer; `None` if its configuration does not say."""
    return stated_context_length(target.config.get_text_config(decoder=True).to_dict())


def max_answer_tokens(target: PreTrainedModel, prompt_length: int, max_new_tokens: int | None) -> int | None:
    """
    The most tokens that an answer can have: as many as were requested, and as the context length leaves.

    Args:
        target (`PreTrainedModel`): The target.
        prompt_length (`int`): Tokens of the prompt.
        max_new_tokens (`int`, *optional*): The requested maximum.

    Returns:
        `int`, or `None` if nothing limits it.

    Raises:
        `ValueError`: the prompt fills the context, or `max_new_tokens` is less than 1.
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    limit = context_length_of(target)
    if limit is None:
        return max_new_tokens
    if prompt_length >= limit:
        raise ValueError(
            f"The prompt has {prompt_length} tokens; prompt and answer together may have at most {limit}."
        )
    return min(max_new_tokens or limit, limit - prompt_length)


def cut_reason(ids: list[int], limit: int, generation_config: GenerationConfig, limit_name: str | None = None) -> str:
    """
    What cut an answer off: a maximum number of tokens or of seconds; empty if nothing did.

    Args:
        ids (`list[int]`): The tokens of the answer.
        limit (`int`): The requested maximum of its tokens.
        generation_config (`GenerationConfig`): The target's.
        limit_name (`str`, *optional*): How the user wrote the limit. Default: `"max_new_tokens=64"`, as in Python.
    """
    if not ids or ids[-1] in eos_ids(generation_config):
        return ""
    if len(ids) == limit:
        return limit_name or f"max_new_tokens={limit}"
    return "the target's max_time" if generation_config.max_time else "the target's context limit"
