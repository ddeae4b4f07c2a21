"""One answer of a target: what ends it, how long it may be, and `generate` for a single prompt."""

import copy
from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

from dflash_hf.targets.config_fields import positions_of


def eos_ids(generation_config: GenerationConfig) -> set[int]:
    """The ids that end a response."""
    eos = generation_config.eos_token_id
    if eos is None:
        return set()
    return {eos} if isinstance(eos, int) else set(eos)


def without_token(generation_config: GenerationConfig, token_id: int | None) -> GenerationConfig:
    """A configuration with which a token is never generated."""
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
    for name, tensor in getattr(ids, "inputs", {}).items():
        options[name] = tensor.to(target.device, target.dtype if tensor.is_floating_point() else None)
    return target.generate(
        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), return_dict_in_generate=True, **options
    )


def context_of(target: PreTrainedModel) -> int | None:
    """The most tokens of a prompt and its answer together; `None` if the target's configuration does not say."""
    return positions_of(target.config.get_text_config(decoder=True).to_dict())


def room_for_answer(target: PreTrainedModel, prompt: int, wanted: int | None) -> int | None:
    """
    Maximum number of tokens of an answer.

    Args:
        target (`PreTrainedModel`): The target.
        prompt (`int`): Tokens of the prompt.
        wanted (`int`, *optional*): Maximum number of new tokens.

    Raises:
        `ValueError`: there is no room for an answer, or `wanted` is less than 1.
    """
    if wanted is not None and wanted < 1:
        raise ValueError(f"max_new_tokens={wanted} must be at least 1.")
    limit = context_of(target)
    if limit is not None and prompt >= limit:
        raise ValueError(f"The prompt has {prompt} tokens; prompt and answer together may have at most {limit}.")
    if limit is None:
        return wanted
    return min(wanted or limit, limit - prompt)


def cut_at(ids: list[int], limit: int, generation_config: GenerationConfig) -> str:
    """Where an answer was cut off: at its maximum number of tokens, or before; empty if it has ended by itself."""
    if not ids or ids[-1] in eos_ids(generation_config):
        return ""
    if len(ids) == limit:
        return f"--max-new-tokens {limit}"
    return "the target's max_time" if generation_config.max_time else "the target's context limit"
