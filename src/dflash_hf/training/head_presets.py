"""What `--head NAME` of `dflash train` sets: the configuration of a published kind of drafter, and its loss."""

from typing import NamedTuple

from dflash_hf.layouts.head_schemas import schema_of
from dflash_hf.modeling.heads_dflash import TOKEN_HEADS


class HeadPreset(NamedTuple):
    """The settings that a value of `--head` stands for."""

    draft_config: dict  # configuration fields of the drafter
    loss_type: str | None  # None: the run's


def head_presets() -> dict[str, HeadPreset]:
    """The values of `--head`: all of `TOKEN_HEADS` that have a `preset`, and JetSpec, which is a mask and a loss."""
    presets = {}
    for head in TOKEN_HEADS:
        if head.preset:
            presets[schema_of(head).family.lower()] = HeadPreset(head.preset, head.preset_loss_type)
    presets["jetspec"] = HeadPreset({"is_causal": True}, "kl")
    return presets
