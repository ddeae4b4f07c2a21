"""
A drafter's `config.json` in any layout, turned into the published one, z-lab's, which the rest of the code knows.

Anything that is not a DFlash drafter, or has an unknown layout, head or method, is rejected here.
"""

import re

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dflash_hf.layouts.all_layouts import SOURCE_LAYOUTS, layout_of
from dflash_hf.layouts.check import check_nested
from dflash_hf.layouts.heads import HEAD_SCHEMAS, UnknownDrafterError, head_schemas, require
from dflash_hf.layouts.rotary import shared_rope
from dflash_hf.modeling.configuration_dflash import nested_fields
from dflash_hf.modeling.heads_dflash import TokenHead


# Keys without a field that files have in `dflash_config` or at the top level, by the spelling that is read here. Of
# several spellings, the first that is set is read.
_KEYS_WITHOUT_FIELD = {
    "projector_type": "projector_type",
    "model_arch": "model_arch",
    "use_gemma_norm": "use_gemma_norm",
    "use_confidence_head": "use_confidence_head",
    "confidence_head_alpha": "confidence_head_alpha",
    # Slot k of a block predicts the token at anchor + 1 + k.
    "sample_from_anchor": "sample_from_anchor",
    "shift_label": "sample_from_anchor",
    "query_zero_predicts_next": "sample_from_anchor",
    "rope_is_neox_style": "rope_is_neox_style",
    "is_neox_style": "rope_is_neox_style",
}
# Layer ids in which entry 0 of `hidden_states`, the embedding, is counted: they are one higher than ours.
_IDS_COUNTING_THE_EMBEDDING = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


def is_drafter_config(config: dict) -> bool:
    """
    Whether a `config.json` is that of a DFlash drafter or of a head of its family. Published files say
    `model_type: qwen3`, like many targets, so the model type is ignored.
    """
    architectures = config.get("architectures")
    names = list(architectures) if isinstance(architectures, list) else []
    names.append(config.get("speculators_model_type"))
    of_other_layouts = _architectures_of_layouts()
    families = re.compile("|".join(_families()), re.IGNORECASE)
    for name in names:
        if isinstance(name, str) and (name in of_other_layouts or families.search(name)):
            return True
    return "dflash_config" in config


def canonical_config(config: dict) -> dict:
    """
    The published layout of a `config.json` of any layout; `source_layout` names the layout of the file.

    Raises:
        `UnknownDrafterError`: a drafter in an unknown layout, of another method, or with another head.
        `ValueError`: a key has an invalid value.
    """
    # 1. One level: keys of `dflash_config` win over the same keys at the top level.
    config = {key: value for key, value in config.items() if key not in ("source_layout", "interleaved_rotary")}
    config = _lift_nested_keys(config)
    # 2. Other methods and heads are rejected before anything is read.
    _refuse_other_drafters(config)
    layout = layout_of(config)
    # 3. The keys of heads, in the order of `TOKEN_HEADS`; then those of the layout.
    if config.pop("rope_is_neox_style", None) is False:
        config["interleaved_rotary"] = True
    for schema in head_schemas():
        config = schema.read(config)
    config = {**layout.read(config), "source_layout": layout.name}
    # 4. What every layout may have: ids that count the embedding, and a rotary table for each type of layer.
    _read_ids_counting_the_embedding(config)
    config["rope_parameters"] = shared_rope(config.get("rope_parameters"), config.get("layer_types"))
    return config


def _read_ids_counting_the_embedding(config: dict) -> None:
    """Take layer ids that count the embedding, only where `target_layer_ids` is not set."""
    for key in _IDS_COUNTING_THE_EMBEDDING:
        ids = config.pop(key, None)
        if ids is not None and config.get("target_layer_ids") is None:
            are_numbers = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
            require(are_numbers, "a list of layer numbers counted from 1; 0 is the embedding", **{key: ids})
            config["target_layer_ids"] = [i - 1 for i in ids]


def _families() -> list[str]:
    """Names of the drafters that are read, the plain drafter's first."""
    return [schema.family for schema in (HEAD_SCHEMAS[TokenHead], *head_schemas())]


def _architectures_of_layouts() -> set[str]:
    """Names in `architectures` that only files of one project have."""
    return {name for layout in SOURCE_LAYOUTS for name in layout.architectures}


def _refuse_other_drafters(config: dict) -> None:
    """
    Refuse other layouts and methods by the names that they give themselves: some have a plain drafter's tensors.
    Layers of another kind have tensors that the model lacks, which are refused when the weights are read.
    """
    families = "|".join(_families())
    kinds = [schema.speculators_model_type for schema in (HEAD_SCHEMAS[TokenHead], *head_schemas())]
    # Any target's name may come first, but that of Gemma 4, whose drafters have its own layers.
    drafters = rf"(?!Gemma4)\w*(?:{families})(?:DraftModel|Model|Speculator|ForCausalLM)?"
    # A target's name says nothing of the method.
    names = [*map(re.escape, _architectures_of_layouts()), *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()]
    accepted = {
        "architectures": "|".join([drafters, *names]),
        "projector_type": f"{families}|causal_v5",
        "model_arch": families,
        "speculators_model_type": "|".join(filter(None, kinds)),
    }
    for key, pattern in accepted.items():
        value = config.get(key) or []
        for name in value if isinstance(value, list) else [value]:
            if not re.fullmatch(pattern, str(name), re.IGNORECASE):
                raise UnknownDrafterError(
                    f"{key}={name!r} cannot be loaded here: the drafters that are read are {', '.join(_families())}. "
                    "Decode with the code that it was published with, or train a drafter for its target."
                )
    gemma = config.get("use_gemma_norm", False)
    require(not gemma, "false, as in all drafters that are read", use_gemma_norm=gemma)


def _lift_nested_keys(config: dict) -> dict:
    """
    A file with the keys of its `dflash_config` that are read here, or have a field, at the top level, where they win;
    a null says nothing. Unknown keys stay nested, and those that do not win over the top level (`causal`).
    """
    nested = {} if config.get("dflash_config") is None else config["dflash_config"]
    check_nested(nested)
    lifted_keys = {**nested_fields(), **_KEYS_WITHOUT_FIELD}
    stays_nested = {key: value for key, value in nested.items() if key not in lifted_keys}
    lifted = {key: value for key, value in config.items() if key not in _KEYS_WITHOUT_FIELD}
    # Nested keys come after those at the top level, and a key's first spelling after its others: the last one wins.
    for table, names in ((config, _KEYS_WITHOUT_FIELD), (nested, lifted_keys)):
        for key, name in reversed(names.items()):
            if table.get(key) is not None:
                lifted[name] = table[key]
    return {**lifted, "dflash_config": stays_nested}
