"""
Reads a drafter's `config.json` in any layout: `canonical_config` returns it in the published layout.

Drafters in unknown layouts, with unknown heads or of other methods are rejected here.
"""

import re
from collections.abc import Callable

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from dflash_hf.layouts.all_layouts import SOURCE_LAYOUTS, layout_of
from dflash_hf.layouts.errors import UnknownDrafterError, require
from dflash_hf.layouts.head_schemas import HEAD_SCHEMAS, head_schemas
from dflash_hf.layouts.precedence import merge_keys, read_one_based_layer_ids
from dflash_hf.layouts.rotary import shared_rope
from dflash_hf.modeling.heads_dflash import TokenHead


_logger = logging.get_logger(__name__)


def is_drafter_config(config: dict) -> bool:
    """
    Whether a `config.json` describes a drafter: DFlash, or one of its family (DSpark, Domino, ...). The model type is
    ignored, because published files say `qwen3`, as many targets do.
    """
    architectures = config.get("architectures")
    names = list(architectures) if isinstance(architectures, list) else []
    names.append(config.get("speculators_model_type"))
    names_of_layouts = _architectures_of_layouts()
    families = re.compile("|".join(_families()), re.IGNORECASE)
    for name in names:
        if isinstance(name, str) and (name in names_of_layouts or families.search(name)):
            return True
    return "dflash_config" in config


def canonical_config(config: dict) -> dict:
    """
    Convert a `config.json` in any layout to the published layout; `source_layout` names the layout of the file.

    Raises:
        `UnknownDrafterError`: a drafter in an unknown layout, of another method, or with another head.
        `ValueError`: a key has an invalid value.
    """
    # 1. Nested keys are merged into the top level; two fields are set by this function only.
    config = {key: value for key, value in config.items() if key not in ("source_layout", "interleaved_rotary")}
    config = merge_keys(config)
    # 2. Other methods and heads are rejected before anything is read.
    _reject_unknown_drafters(config)
    layout = layout_of(config)
    # `dflash check -v` shows this line.
    _logger.info_once(f"The drafter's config.json is read in the layout {layout.name!r}.")
    # 3. The keys of heads, in the order of `TOKEN_HEADS`; then those of the layout.
    if config.pop("rope_is_neox_style", None) is False:
        config["interleaved_rotary"] = True
    for schema in head_schemas():
        config = schema.read(config)
    config = {**layout.read(config), "source_layout": layout.name}
    # 4. Keys that files of every layout may have: one-based layer ids, and a rotary table for each type of layer.
    read_one_based_layer_ids(config)
    config["rope_parameters"] = shared_rope(config.get("rope_parameters"), config.get("layer_types"))
    return config


def _families() -> list[str]:
    """Names of the families of drafters that can be read, plain DFlash first."""
    return [schema.family for schema in (HEAD_SCHEMAS[TokenHead], *head_schemas())]


def _architectures_of_layouts() -> set[str]:
    """Names in `architectures` that only one project writes."""
    return {name for layout in SOURCE_LAYOUTS for name in layout.architectures}


def _reject_unknown_drafters(config: dict) -> None:
    """
    Reject unknown layouts and methods by the names in the file, because some have exactly the tensors of a plain
    drafter. Drafters with other layers have tensors that the model lacks, and are rejected when weights are read.
    """
    families = [family.lower() for family in _families()]
    kinds = [schema.speculators_model_type for schema in (HEAD_SCHEMAS[TokenHead], *head_schemas())]
    # A drafter's class: the name may begin with that of any target except Gemma 4, whose drafters have other layers.
    suffixes = "DraftModel|Model|Speculator|ForCausalLM"
    drafter_class = re.compile(rf"(?!Gemma4)\w*(?:{'|'.join(families)})(?:{suffixes})?", re.IGNORECASE)
    # Some projects write the target's class, which does not tell the method.
    other_classes = {*_architectures_of_layouts(), *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    other_classes = {name.lower() for name in other_classes}
    is_accepted: dict[str, Callable[[str], bool]] = {
        "architectures": lambda name: bool(drafter_class.fullmatch(name)) or name.lower() in other_classes,
        "projector_type": lambda name: name.lower() in (*families, "causal_v5"),
        "model_arch": lambda name: name.lower() in families,
        "speculators_model_type": lambda name: name.lower() in kinds,
    }
    for key, accepts in is_accepted.items():
        value = config.get(key) or []
        for name in value if isinstance(value, list) else [value]:
            if not accepts(str(name)):
                raise UnknownDrafterError(
                    f"{key}={name!r} cannot be loaded here: the drafters that are read are {', '.join(_families())}. "
                    "Decode with the code that it was published with, or train a drafter for its target."
                )
    gemma = config.get("use_gemma_norm", False)
    require(not gemma, "false, as in all drafters that are read", use_gemma_norm=gemma)
