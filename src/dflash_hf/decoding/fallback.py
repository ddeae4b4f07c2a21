"""
Why a call decodes without its drafter, by the target's own `generate`. Each reason completes a log line.

Drafters without the package have a list of their own, `_fallback_reasons` in `modeling/candidates_dflash.py`, since
upstream's loop drafts fewer calls. A new reason that concerns the target may also belong there.
"""

from collections.abc import Iterator

import torch

from dflash_hf.decoding.arguments import MULTIMODAL_ARGUMENTS, extra_arguments
from dflash_hf.decoding.call import GenerateCall
from dflash_hf.decoding.slots import cached_length
from dflash_hf.modeling.target_dflash import length_dependent_rope
from dflash_hf.targets.unsafe_hooks import unsafe_hook


def fallback_reason(call: GenerateCall, synced_gpus: bool = False) -> str | None:
    """Why a call decodes without the drafter; `None` if it drafts."""
    return next((reason for reason in _reasons(call, synced_gpus) if reason is not None), None)


def _reasons(call: GenerateCall, synced_gpus: bool) -> Iterator[str | None]:
    """
    The reasons; the first is reported. Their order matters: arguments come before the target, since probing
    a target runs it; hooks come before the probe, since they would see its tokens; the probe comes before the cache,
    since it decides which caches can be rolled back.
    """
    yield from _argument_reasons(call, synced_gpus)
    yield from _model_reasons(call)
    past_length = cached_length(call.cache)
    mask = call.model_kwargs.get("attention_mask")
    if past_length > 0 and mask is not None and mask.shape[1] <= past_length:
        yield f"the cache already holds all {mask.shape[1]} columns of attention_mask"
    yield _cache_reason(call)
    yield _rope_reason(call, past_length)


def _argument_reasons(call: GenerateCall, synced_gpus: bool) -> Iterator[str | None]:
    target = call.target
    name = type(target).__name__
    positions = call.model_kwargs.get("position_ids")
    mask = call.model_kwargs.get("attention_mask")
    is_offloaded = target.device.type == "meta"
    if call.prompt.device.type != target.device.type and not is_offloaded:
        yield f"input_ids are on {call.prompt.device}, but {name} is on {target.device}"
    if torch.is_grad_enabled():  # by a caller who bypasses the decorator of `generate`
        yield "gradients are recorded"
    if not call.model_kwargs.get("use_cache", True):
        yield "use_cache=False"
    if synced_gpus:
        yield "the ranks of a sharded target must run the same number of forwards"
    if positions is not None and positions.shape[-1] == 0:
        yield "the prompt is empty"
    if mask is not None and (mask.dim() != 2 or bool((mask.long().diff(dim=1) < 0).any())):
        yield "attention_mask leaves out tokens that are not padding on the left"
    if MULTIMODAL_ARGUMENTS is None:
        names = sorted(extra_arguments(call))
        if names:
            yield f"transformers no longer says whether each forward needs {', '.join(names)}, or the prompt's alone"
    for output in ("attentions", "hidden_states"):
        if call.config.return_dict_in_generate and getattr(call.config, f"output_{output}"):
            yield f"{output.replace('_', ' ')} of each token are requested"
    if call.rows > 1:
        yield call.selector.lockstep_reason()


def _model_reasons(call: GenerateCall) -> Iterator[str | None]:
    target = call.target
    name = type(target).__name__
    if target.training:
        yield f"{name} is in training mode; call its `eval()`"
    for module in call.draft.modules():
        dropout = getattr(module, "attention_dropout", 0) or getattr(module, "p", 0)
        if module.training and dropout:
            yield "the dropout of the drafter is in training mode, and draws random numbers; call `eval()`"
            break
    yield unsafe_hook(target)
    mask = call.model_kwargs.get("attention_mask")
    yield call.capabilities.fallback_reason(name, call.draft.config.target_layer_ids, mask)


def _cache_reason(call: GenerateCall) -> str | None:
    """Why the tokens of a cache cannot be moved into slots: it is static, offloaded, or quantised; or `None`."""
    cache = call.cache
    if call.capabilities.session.cache_class.can_adopt(cache) and not cache.offloading:
        return None
    kind = " of ".join(type(part).__name__ for part in (cache, *cache.layers[:1]))
    offloaded = ", offloaded to the CPU" if cache.offloading else ""
    return (
        f"the cache is a {kind}{offloaded}, whose tokens cannot be moved into slots, unlike those of a `DynamicCache` "
        "that is not offloaded"
    )


def _rope_reason(call: GenerateCall, past_length: int) -> str | None:
    """Why rotary frequencies that depend on the length of the text rule out drafting, or `None`."""
    tables = length_dependent_rope(call.target.config)
    if not tables:
        return None
    text_config = call.target.config.get_text_config(decoder=True)
    positions = call.model_kwargs.get("position_ids")
    length = call.prompt_length if positions is None else int(positions.max()) + 1
    end = length + call.selector.max_new_tokens
    if "dynamic" in tables and end >= text_config.max_position_embeddings:
        return (
            f"the text may reach {text_config.max_position_embeddings} tokens, beyond which its rotary frequencies "
            "depend on its length"
        )
    if "longrope" in tables:
        threshold = tables["longrope"]["original_max_position_embeddings"]
        if (past_length or length) <= threshold < end:
            return f"the text may cross {threshold} tokens, where its rotary frequencies change"
    return None
