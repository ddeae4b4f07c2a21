"""Rotary settings in the files of other projects."""

from transformers.utils import logging

from dflash_hf.layouts.errors import require


logger = logging.get_logger(__name__)


def shared_rope(rope, layer_types):
    """
    The table that all layers share, from `rope_parameters` with a table for each layer type; tables of types that no
    layer has are ignored.

    Raises:
        `ValueError`: the tables differ.
    """
    kinds = {"full_attention", "sliding_attention"}
    if not isinstance(rope, dict) or not rope or set(rope) - kinds:
        return rope
    present = rope
    if isinstance(layer_types, list) and set(rope) & set(map(str, layer_types)):
        present = layer_types
    tables = [table for kind, table in rope.items() if kind in present]
    require(all(table == tables[0] for table in tables), "the same table for each layer type", rope_parameters=rope)
    return tables[0]


def without_partial_rotary(config: dict) -> dict:
    """
    A configuration without `partial_rotary_factor`. Some projects copy the key from the target, but train drafters
    with Qwen3's rotary module, which ignores it and rotates whole heads.
    """
    if _has_factor(config):
        logger.warning_once(
            "partial_rotary_factor is ignored: it was copied from the target's configuration, but drafters of this "
            "layout are trained with whole heads rotated, whatever it says."
        )
    return _without_factor(config)


def _has_factor(table: dict) -> bool:
    """Whether a dictionary or one in it has the key."""
    if "partial_rotary_factor" in table:
        return True
    return any(_has_factor(value) for value in table.values() if isinstance(value, dict))


def _without_factor(table: dict) -> dict:
    """A dictionary and all dictionaries in it, without the key."""
    result = {}
    for key, value in table.items():
        if key != "partial_rotary_factor":
            result[key] = _without_factor(value) if isinstance(value, dict) else value
    return result


def with_rotary_width(rope: dict, head_dim: int) -> dict:
    """
    Valid `rope_parameters` with both spellings of the rotated width of a head, in channels and as a share.

    `rope_dim` wins: it is the trained width, while `partial_rotary_factor` may be copied from the target. Both are
    written: engines read `rope_dim` first, and SGLang under transformers 5.23 drops a factor without `rope_dim`.
    """
    rope = dict(rope)
    if "rope_dim" in rope:
        rope["partial_rotary_factor"] = rope.pop("rope_dim") / head_dim
    share = rope.get("partial_rotary_factor", 1.0)
    if share != 1.0:
        rope["rope_dim"] = int(head_dim * share)
    return rope
