"""DSpark drafters of DeepSpec, SpecForge, ModelOpt and Automodel, with copies of the target's embedding and head."""

from dflash_hf.layouts.head_schemas import is_dspark
from dflash_hf.layouts.rotary import without_partial_rotary
from dflash_hf.layouts.source_layout import SourceLayout


def _detect(config: dict) -> bool:
    """DSpark drafters, except those with their own embedding; files of speculators are matched before."""
    return is_dspark(config) and not config.get("has_embed_tokens")


def _read(config: dict) -> dict:
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_dim" in rope:  # only this package writes it: the factor is the drafter's own
        return config
    return without_partial_rotary(config)


DEEPSPEC = SourceLayout(
    "deepspec",
    detect=_detect,
    read=_read,
    ignored_target_tensors=r"^(?:embed_tokens\.|lm_head\.weight$|t2d$|d2t$)",
)
