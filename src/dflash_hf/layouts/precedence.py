"""
Which value is used where a `config.json` gives several for one field.

The rule for the published layout is stated at the top of `modeling/configuration_dflash.py`, and `merge_nested_keys`
there applies it: the caller's argument, then `dflash_config`, then the top level; a null counts as not set. Files of
other projects need these rules as well:

    field                    several values                      used               why
    keys in `KEY_NAMES`      under several names                 `dflash_config`;   projects differ only in the name
                                                                 in it, or else at
                                                                 the top level, the
                                                                 first name
    `is_causal`              at the top level and                top level, with a  SGLang reads nothing else, vLLM
                             `dflash_config.causal`              warning            reads it first
    `is_causal`              one of these and JetSpec's          none: an error     the drafter was trained with only
                             `dflash_config.causal_head`                            one of them
    `target_layer_ids`       itself and one of                   itself             files have the others for vLLM's
                             `ONE_BASED_LAYER_KEYS`                                 Eagle code
    `rope_parameters`        `rope_dim` and                      `rope_dim`         the factor may be a copy of the
                             `partial_rotary_factor`                                target's (`rotary`)
"""

from transformers.utils import logging

from dflash_hf.layouts.errors import require_key
from dflash_hf.modeling.configuration_dflash import merge_nested_keys


_logger = logging.get_logger(__name__)
# Keys that other projects write in `dflash_config` or at the top level: the name that the package reads, and all names
# in order of precedence.
KEY_NAMES: dict[str, tuple[str, ...]] = {
    "projector_type": ("projector_type",),
    "model_arch": ("model_arch",),
    "use_gemma_norm": ("use_gemma_norm",),
    "use_confidence_head": ("use_confidence_head",),
    "confidence_head_alpha": ("confidence_head_alpha",),
    # Slot k of a block predicts the token at anchor + 1 + k.
    "sample_from_anchor": ("sample_from_anchor", "shift_label", "query_zero_predicts_next"),
    "rope_is_neox_style": ("rope_is_neox_style", "is_neox_style"),
}
# Layer ids that count the embedding, entry 0 of `hidden_states`: they are one higher than `target_layer_ids`.
ONE_BASED_LAYER_KEYS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
# Keys that stay in `dflash_config` until the configuration is created, and the field that each determines.
_IMPLIED_FIELDS = {"causal": "is_causal", "causal_head": "is_causal", "use_swa": "layer_types"}


def first_not_none(*values):
    """The first value that is not `None`."""
    return next((value for value in values if value is not None), None)


def merge_keys(config: dict) -> dict:
    """
    A `config.json` with the keys of its `dflash_config` at the top level, if they have a field or are in `KEY_NAMES`,
    each under the name that is read here. All other keys stay in `dflash_config`.

    Raises:
        `ValueError`: `dflash_config` is not a dictionary.
    """
    merged = merge_nested_keys(config)
    nested = config.get("dflash_config") or {}
    for key, names in KEY_NAMES.items():
        value = first_not_none(*(nested.get(name) for name in names), *(config.get(name) for name in names))
        for name in names:
            merged.pop(name, None)
            merged["dflash_config"].pop(name, None)
        if value is not None:
            merged[key] = value
    return merged


def read_one_based_layer_ids(config: dict) -> None:
    """Set `target_layer_ids`, where it is not set, from layer ids that count the embedding; removes these keys."""
    for key in ONE_BASED_LAYER_KEYS:
        ids = config.pop(key, None)
        if ids is not None and config.get("target_layer_ids") is None:
            are_numbers = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
            require_key(are_numbers, "a list of layer numbers counted from 1; 0 is the embedding", key, ids)
            config["target_layer_ids"] = [i - 1 for i in ids]


def settled_causality(is_causal: bool | None, causal: bool | None, causal_head: bool | None) -> bool | None:
    """
    The field `is_causal`, by the values that files have for it.

    Args:
        is_causal (`bool`, *optional*): At the top level.
        causal, causal_head (`bool`, *optional*): In `dflash_config`; the second is JetSpec's.

    Raises:
        `ValueError`: `causal_head` contradicts the others.
    """
    if None not in (is_causal, causal) and causal != is_causal:
        _logger.warning_once(
            f"is_causal={is_causal} and dflash_config.causal={causal} contradict each other: is_causal wins, "
            f"as in the engines; if few drafts are accepted, load the drafter with `is_causal={causal}`."
        )
    is_causal = first_not_none(is_causal, causal)
    if not causal_head:
        return is_causal
    if is_causal is not None and not is_causal:
        raise ValueError(
            f"dflash_config.causal_head={causal_head!r} and is_causal={is_causal} contradict each other; remove one."
        )
    return causal_head


def without_keys_of_arguments(nested: dict, arguments: dict) -> dict:
    """`dflash_config` without the keys that determine a field which the caller gives as an argument."""
    return {key: value for key, value in nested.items() if _IMPLIED_FIELDS.get(key) not in arguments}
