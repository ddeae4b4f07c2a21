"""What one call of `generate` asks for, settled once, before the prompt is read."""

import inspect
from dataclasses import dataclass

import torch
from transformers import DynamicCache
from transformers.generation import MaxLengthCriteria
from transformers.generation import utils as generation_utils
from transformers.utils import logging

from .compile_dflash import is_compilable
from .probe_dflash import TargetFacts, facts_of
from .sessions_dflash import cache_argument, cached_columns


logger = logging.get_logger(__name__)

# Arguments that a round sets itself, and those that only the prompt has.
_OWN_ARGUMENTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache"}
_OWN_ARGUMENTS |= {"output_attentions", "output_hidden_states", "past_key_values", "cache_params"}
_PROMPT_ARGUMENTS = {"mm_token_type_ids", "logits_to_keep", "cache_position"}
# Settings of other kinds of assistants, and the value of each where the user sets none.
_OTHER_ASSISTANTS = {
    "assistant_lookbehind": 10,
    "assistant_ensemble_weight": None,
    "assistant_early_exit": None,
    "prompt_lookup_num_tokens": None,
}


@dataclass
class Call:
    """
    One call of `generate` with a drafter.

    Args:
        facts (`TargetFacts`, *optional*): What is known of the target.
        plain_reason (`str`, *optional*): Why this call decodes without the drafter, if it does.
        rows (`int`): Of the prompt.
        past (`int`): Columns of the prompt that a cache holds already, padding included.
        max_new (`int`): The most tokens to generate.
        temperature (`float`): At which drafts are drawn; 0 takes the likeliest tokens.
        generators (`list[torch.Generator]`, *optional*): One for each sampled row.
        compile (`str` or `bool`): As in [`DFlashDecodingConfig`]; `False` where rounds cannot be compiled.
        look_ahead (`int`): Rounds that are started before the host reads what they committed.
    """

    facts: TargetFacts | None
    plain_reason: str | None
    rows: int
    past: int
    max_new: int
    temperature: float
    generators: list[torch.Generator] | None
    compile: str | bool
    look_ahead: int


def plan_call(target, draft, input_ids, stopping_criteria, generation_config, model_kwargs, synced_gpus: bool) -> Call:
    """
    Settle what this call does.

    Raises:
        `ValueError`: a setting of the drafter cannot be followed.
    """
    config = draft.decoding_config
    config.check(draft.config.block_tokens)
    generators = config.generators if generation_config.do_sample else None
    if generators is not None:
        config.check_generators(len(input_ids), input_ids.device)

    embeds = model_kwargs.get("inputs_embeds")
    new = input_ids.shape[1] if embeds is None else max(input_ids.shape[1], embeds.shape[1])
    past = cached_columns(model_kwargs.get(cache_argument(target)))
    mask = model_kwargs.get("attention_mask")
    columns = max(past + new if mask is None or mask.dim() != 2 else mask.shape[1], new)
    # A criterion of the caller's takes the place of the configuration's limit.
    limits = [criterion.max_length for criterion in stopping_criteria if isinstance(criterion, MaxLengthCriteria)]
    max_new = max(min(limits, default=generation_config.max_length) - input_ids.shape[1], 1)

    reason = _reason_before_probing(generation_config, model_kwargs, synced_gpus)
    facts = None if reason else facts_of(target)
    reason = (
        reason
        or facts.why_plain(draft.config.target_layer_ids, mask)
        or _rope_reason(target, model_kwargs, past, columns, max_new)
    )
    if reason is not None and generators is not None:
        raise ValueError(f"decoding_config.generators cannot be followed: {reason}; set it to None to decode plainly.")

    free = facts is not None and facts.session_class is not None and facts.session_class.rollback_is_free
    listing = generation_config.return_dict_in_generate and generation_config.output_hidden_states
    compilable = free and not listing and generators is None and is_compilable(target)
    return Call(
        facts=facts,
        plain_reason=reason,
        rows=len(input_ids),
        past=past,
        max_new=max_new,
        temperature=draft_temperature(draft, generation_config),
        generators=generators,
        compile=config.compile if compilable else False,
        look_ahead=config.rounds_ahead(input_ids.device) if free else 1,
    )


def warn_of_ignored_settings(generation_config) -> None:
    """Warn once of settings that only other kinds of assistants follow."""
    ignored = {name: getattr(generation_config, name, None) for name in _OTHER_ASSISTANTS}
    ignored = {k: v for k, v in ignored.items() if v is not None and v != _OTHER_ASSISTANTS[k]}
    if ignored:
        settings = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
        logger.warning_once(f"A DFlash drafter does not follow {settings}; see `draft.decoding_config` for its own.")


def _reason_before_probing(generation_config, model_kwargs, synced_gpus: bool) -> str | None:
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if not model_kwargs["use_cache"]:
        return "use_cache=False"
    if synced_gpus:
        return "the ranks of a sharded target must run the same number of forwards"
    if positions is not None and positions.shape[-1] == 0:
        return "the prompt is empty"
    if mask is not None and (mask.dim() != 2 or bool((mask.long().diff(dim=1) < 0).any())):
        return "attention_mask leaves out tokens that are not padding on the left"
    if generation_config.return_dict_in_generate and generation_config.output_attentions:
        return "attentions of each token are asked for"
    return None


def _rope_reason(target, model_kwargs, past: int, columns: int, max_new: int) -> str | None:
    """Why rotary frequencies that depend on the length of the text rule out drafting, if they do."""
    text = target.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    layers = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    kinds = {parameters.get("rope_type"): parameters for parameters in layers}
    if not kinds.keys() & {"longrope", "dynamic"}:
        return None
    positions = model_kwargs.get("position_ids")
    length = columns if positions is None else int(positions.max()) + 1
    if "dynamic" in kinds and length + max_new >= text.max_position_embeddings:
        return (
            f"the text may reach {text.max_position_embeddings} tokens, from where its rotary frequencies depend on "
            "its length"
        )
    if "longrope" in kinds:
        threshold = kinds["longrope"]["original_max_position_embeddings"]
        if (past or length) <= threshold < length + max_new:
            return f"the text may cross {threshold} tokens, where its rotary frequencies change"
    return None


def usable_cache(target, cache, session_class, implementation: str | None):
    """
    The cache to prefill: the one that `generate` made, or a dynamic one in place of a static one, since the slots of
    a drafted call have fixed shapes anyway.

    Raises:
        `ValueError`: the tokens of the cache cannot be moved into slots: it is quantised, offloaded, or a static one
            that the caller passed.
    """
    if session_class.takes(cache) and not cache.offloading:
        return cache
    from_caller = getattr(cache, "_is_user_defined", False)
    if cache.is_compileable and not from_caller and not cache.offloading:
        return DynamicCache(config=target.config.get_text_config(decoder=True))
    argument = "past_key_values is" if from_caller else f"cache_implementation={implementation!r} makes"
    kind = f"a {type(cache).__name__} of {type(cache.layers[0]).__name__}" if cache.layers else type(cache).__name__
    raise ValueError(
        f"{argument} {kind}{', offloaded to the CPU' * cache.offloading}, which a drafter cannot decode with: pass a "
        "`DynamicCache` that is not offloaded, leave `past_key_values` and `cache_implementation` out, or drop "
        "`assistant_model`."
    )


def prompt_arguments(target, model_kwargs: dict) -> dict:
    """Arguments of the prompt's forward that a drafter needs otherwise than `generate` gives them."""
    if "logits_to_keep" in model_kwargs and getattr(target.config.get_text_config(), "num_kv_shared_layers", False):
        # An index, not a count: given a count, Gemma 4 drops all other tokens before the layers that share keys.
        return {"logits_to_keep": torch.tensor([-1])}
    return {}


def extra_arguments(target, generation_config, model_kwargs: dict) -> dict:
    """
    Arguments of `generate` that every forward of the target gets, such as adapter names or a request for hidden
    states; see `block_arguments`.
    """
    accepted = inspect.signature(target.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    skip = _OWN_ARGUMENTS | _PROMPT_ARGUMENTS
    prompt_only = getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())
    extra = {
        key: value[:, -1:] if key == "token_type_ids" and value is not None else value
        for key, value in model_kwargs.items()
        if key not in skip and key not in prompt_only and (takes_any or key in accepted)
    }
    if generation_config.return_dict_in_generate and generation_config.output_hidden_states:
        extra["output_hidden_states"] = generation_config.output_hidden_states
    return extra


def draft_temperature(draft, generation_config) -> float:
    """The temperature at which a drafter samples its tokens; 0 if it takes the likeliest."""
    if not generation_config.do_sample:
        return 0.0
    temperature = draft.decoding_config.draft_temperature
    if temperature is None:
        temperature = 1.0 if generation_config.temperature is None else generation_config.temperature
        return float(temperature) if draft.config.head.samples else 0.0
    return float(temperature)
