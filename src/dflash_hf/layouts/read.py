"""
Other projects' drafter layouts: their `config.json` keys and tensor names, turned into the published z-lab layout.

The rest of the code knows one layout only. Anything that is not a DFlash drafter, or has an unknown head, is rejected
here.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from dflash_hf.layouts.check import check_nested
from dflash_hf.layouts.heads import HEAD_SCHEMAS, UnknownHeadError, head_schemas, require
from dflash_hf.modeling.configuration_dflash import nested_fields
from dflash_hf.modeling.heads_dflash import TokenHead


logger = logging.get_logger(__name__)
# Its own defaults, and Qwen3's: a file may leave out keys that equal them.
_TORCHSPEC = {
    "num_target_layers": 5,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "mask_token_id": 151669,
}
_LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
)

# Further keys with several places, and spellings: the first that is set is read.
_READ_HERE = {
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

# Applied in this order to every tensor name.
_TENSOR_NAMES = {
    r"^(?:(?:logit_head|dflash_module|draft_model|model)\.)+": "",
    r"^encoder\.fc\.": "fc.",
    r"^encoder\.output_norm_enc\.": "hidden_norm.",
    r"^context_proj\.": "fc.",
    r"^context_norm\.": "hidden_norm.",
    r"^final_norm\.": "norm.",
}
# Recomputed, not loaded.
_ROTARY = r"(?:^|\.)rotary_emb\."


class SourceLayout(NamedTuple):
    """How one project writes a drafter, if not in the published layout."""

    matches: Callable[[dict], bool]  # whether a `config.json` is in this layout
    read: Callable[[dict], dict]  # converts its keys to the published keys
    copies: str = "$^"  # tensors (a regular expression) that copy the target's and are not loaded


def default_target_layer_ids(num_target_layers: int, num_features: int) -> list[int]:
    """
    The target layers whose outputs a drafter reads by default: evenly spaced from the second layer to the third last
    (DFlash, arXiv 2602.06036), `num_target_layers // 2` for a single feature.

    Args:
        num_target_layers (`int`): Depth of the target.
        num_features (`int`): Features to read; by default as many as the drafter has layers.

    Raises:
        `ValueError`: the target is too shallow for that many distinct layers.
    """
    if num_features == 1:
        return [num_target_layers // 2]
    ids = [round(1 + j * (num_target_layers - 4) / (num_features - 1)) for j in range(num_features)]
    if len(set(ids)) != len(ids) or max(ids) >= num_target_layers or min(ids) < 0:
        raise ValueError(
            f"target_layer_ids={ids}, by the default rule for num_target_layers={num_target_layers}, are not distinct "
            "layers of it; pass `target_layer_ids`, or train a drafter with fewer layers."
        )
    return ids


def fitting_target_layer_ids(num_target_layers: int, num_features: int) -> list[int]:
    """[`default_target_layer_ids`] of a fresh drafter; for a shallow target as many as fit, with a warning."""
    for fitting in range(num_features, 0, -1):
        try:
            ids = default_target_layer_ids(num_target_layers, fitting)
        except ValueError:  # too few layers
            continue
        if fitting < num_features:
            logger.warning(
                f"The paper's rule finds no {num_features} distinct layers in a target of {num_target_layers}: the "
                f"drafter reads target_layer_ids={ids}. Pass `target_layer_ids` to choose others."
            )
        return ids
    raise ValueError(f"num_target_layers={num_target_layers} must be at least 1.")


def is_drafter_config(config: dict) -> bool:
    """
    Whether a `config.json` is that of a DFlash drafter or of a head of its family. Published files say
    `model_type: qwen3`, like many targets, so the model type is ignored.
    """
    architectures = config.get("architectures")
    names = list(architectures) if isinstance(architectures, list) else []
    names.append(config.get("speculators_model_type"))
    families = re.compile("|".join(("MuseGlimmerAssistant", *_families())), re.IGNORECASE)
    return "dflash_config" in config or any(isinstance(name, str) and families.search(name) for name in names)


def canonical_config(config: dict) -> dict:
    """
    The published layout of a `config.json` of any layout; `source_layout` names the original one if tensors differ.

    Raises:
        `UnknownHeadError`: a drafter of another method, or with another head.
    """
    config = {key: value for key, value in config.items() if key not in ("source_layout", "interleaved_rotary")}
    config = _lift_nested_keys(config)
    _refuse_other_methods(config)
    if config.pop("rope_is_neox_style", None) is False:
        config["interleaved_rotary"] = True
    for schema in head_schemas():
        config = schema.read(config)
    for name, layout in SOURCE_LAYOUTS.items():
        if layout.matches(config):
            config = {**layout.read(config), "source_layout": name}
            break  # the first that recognises the file alone
    # Entry 0 of `hidden_states` is the embedding, so these ids are one higher.
    for key in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        ids = config.pop(key, None)
        if ids is not None and config.get("target_layer_ids") is None:
            numbers = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
            require(numbers, "a list of layer numbers counted from 1; 0 is the embedding", **{key: ids})
            config["target_layer_ids"] = [i - 1 for i in ids]
    config["rope_parameters"] = _shared_rope(config.get("rope_parameters"), config.get("layer_types"))
    return config


def tensor_names() -> dict[str, str]:
    """Renamings to the published names, of all layouts, then of the heads, as `key_mapping` of `from_pretrained`."""
    names = dict(_TENSOR_NAMES)
    for schema in head_schemas():
        names |= schema.tensor_names
    return names


def canonical_name(name: str, names: dict[str, str] | None = None) -> str:
    """The published name of a tensor of any layout; `names` (default: [`tensor_names`]) may hold more renamings."""
    for pattern, replacement in (names or tensor_names()).items():
        name = re.sub(pattern, replacement, name)
    return name


def is_left_out(name: str, source_layout: str | None, own_head: bool) -> bool:
    """
    Whether a tensor (by its published name) is not loaded: a rotary table, or a copy of the target's weights.

    Args:
        name (`str`): Published name.
        source_layout (`str`, *optional*): From [`canonical_config`].
        own_head (`bool`): The drafter has a head over a reduced vocabulary, so `lm_head` and `d2t` are its own.
    """
    if re.search(_ROTARY, name):
        return True
    if source_layout not in SOURCE_LAYOUTS or (own_head and name in ("lm_head.weight", "d2t")):
        return False
    return re.search(SOURCE_LAYOUTS[source_layout].copies, name) is not None


def _families() -> list[str]:
    """Names of the drafters that are read, the plain drafter's first."""
    return [schema.family for schema in (HEAD_SCHEMAS[TokenHead], *head_schemas())]


def _refuse_other_methods(config: dict) -> None:
    """
    Other methods of drafting by the names that they give themselves: some have a plain drafter's tensors. Layers of
    another kind have tensors without a place, which are refused when the weights are read.
    """
    families = "|".join(_families())
    kinds = [schema.speculators_model_type for schema in (HEAD_SCHEMAS[TokenHead], *head_schemas())]
    # Any target's name may come first, but that of Gemma 4, whose drafters have its own layers.
    drafters = rf"(?!Gemma4)\w*(?:{families})(?:DraftModel|Model|Speculator|ForCausalLM)?"
    targets = "|".join(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())  # says nothing of the method
    accepted = {
        "architectures": f"{drafters}|MuseGlimmerAssistantModel|{targets}",
        "projector_type": f"{families}|causal_v5",
        "model_arch": families,
        "speculators_model_type": "|".join(filter(None, kinds)),
    }
    for key, pattern in accepted.items():
        value = config.get(key) or []
        for name in value if isinstance(value, list) else [value]:
            if not re.fullmatch(pattern, str(name), re.IGNORECASE):
                raise UnknownHeadError(
                    f"{key}={name!r} cannot be loaded here: the drafters that are read are {', '.join(_families())}. "
                    "Decode with the code that it was published with, or train a drafter for its target."
                )
    gemma = config.get("use_gemma_norm", False)
    require(not gemma, "false, as in all drafters that are read", use_gemma_norm=gemma)


def _defaults(model_type: str, keys: tuple[str, ...]) -> dict:
    """What transformers' configuration of a type says where a file says nothing."""
    default = CONFIG_MAPPING[model_type]()
    result = {key: getattr(default, key) for key in keys if getattr(default, key, None) is not None}
    return {**result, "rope_theta": default.rope_parameters["rope_theta"]}


def _from_speculators(config: dict) -> dict:
    """Nested layer configuration, or a flat one, which may leave out Qwen3's defaults."""
    layers = config.pop("transformer_layer_config", None)
    if layers is None and "hidden_size" in config:
        layers = {}  # its keys lie beside the others
    require(isinstance(layers, dict), "a dictionary that describes the draft layers", transformer_layer_config=layers)
    model_type = layers.get("model_type", "qwen3")
    if model_type not in ("qwen3", "llama", "qwen2", "mistral", "gpt_oss"):
        raise ValueError(f"transformer_layer_config has model_type={model_type!r}; it must name Qwen3-style layers.")
    result = _defaults(model_type, _LAYER_KEYS)
    result |= {key: value for key, value in layers.items() if key not in ("architectures", "transformers_version")}
    kind = config.pop("speculators_model_type", "dflash")
    if kind == "dflash2":
        result |= {"conv_kernel_size": 2, "conv_group_size": 16}
    # In speculators, sliding layers are causal in the block unless this says otherwise; full layers never are.
    if config.pop("sliding_window_non_causal", kind == "dflash2"):
        result["is_causal"] = False
    ignored = (
        "speculators_config",
        "speculators_version",
        "architectures",
        "auto_map",
        "model_type",
        "has_no_defaults",
    )
    result |= {key: value for key, value in config.items() if key not in ignored}
    result.setdefault("block_size", 8)
    result.setdefault("draft_vocab_size", 32000)
    return _rotate_whole_heads(result)


def _from_muse(config: dict) -> dict:
    """Flat keys with transformers' defaults. There is no causality key: attention in the block is bidirectional."""
    keys = (*_LAYER_KEYS, "sliding_window", "mask_token_id", "target_layer_ids")
    result = _defaults("muse_glimmer_assistant", keys)
    result |= {key: value for key, value in config.items() if value is not None}
    if "rope_parameters" in result and config.get("rope_theta") is None:
        del result["rope_theta"]
    layers = result["num_hidden_layers"]
    if "layer_types" not in result and isinstance(layers, int) and 0 < layers < 1000:
        result["layer_types"] = ["sliding_attention"] * layers
    result.setdefault("is_causal", False)
    return result


def _counts_features(config: dict) -> bool:
    """Whether `num_target_layers` counts the features instead of the target's layers: then an id exceeds it."""
    ids = config.get("target_layer_ids")
    number = config.get("num_target_layers")
    integers = isinstance(ids, list) and all(type(i) is int for i in ids)
    return config.get("model_type") == "dflash" and integers and len(ids) == number and max(ids, default=-1) >= number


def _from_torchspec(config: dict) -> dict:
    """`num_target_layers` is the number of features; the target's depth has a separate key, if any."""
    result = {**_TORCHSPEC, **config}
    num_features = result["num_target_layers"]
    depth = result.pop("target_num_hidden_layers", None)
    result["num_target_layers"] = depth
    are_integers = type(num_features) is int and type(depth) is int
    if result.get("target_layer_ids") is None and are_integers and 0 < num_features <= depth:
        result["target_layer_ids"] = default_target_layer_ids(depth, num_features)
    return result


def _lift_nested_keys(config: dict) -> dict:
    """
    A file with the keys of its `dflash_config` that are read here, or have a field, at the top level, where they win;
    a null says nothing. Unknown keys stay nested, and those that do not win over the top level (`causal`).
    """
    nested = {} if config.get("dflash_config") is None else config["dflash_config"]
    check_nested(nested)
    lifted_keys = {**nested_fields(), **_READ_HERE}
    stays_nested = {key: value for key, value in nested.items() if key not in lifted_keys}
    lifted = {key: value for key, value in config.items() if key not in _READ_HERE}
    # Nested keys come after those at the top level, and a key's first spelling after its others: the last one wins.
    for table, names in ((config, _READ_HERE), (nested, lifted_keys)):
        for key, name in reversed(names.items()):
            if table.get(key) is not None:
                lifted[name] = table[key]
    return {**lifted, "dflash_config": stays_nested}


def _shared_rope(rope, layer_types):
    """The one of several tables by layer type that a drafter's layers share; tables of absent types are ignored."""
    kinds = {"full_attention", "sliding_attention"}
    if not isinstance(rope, dict) or not rope or set(rope) - kinds:
        return rope
    present = rope
    if isinstance(layer_types, list) and set(rope) & set(map(str, layer_types)):
        present = layer_types
    tables = [table for kind, table in rope.items() if kind in present]
    require(all(table == tables[0] for table in tables), "the same table for each layer type", rope_parameters=rope)
    return tables[0]


def _rotate_whole_heads(config: dict) -> dict:
    """
    Drop `partial_rotary_factor`, which is the target's: Qwen3's rotary module, with which these drafters are trained,
    rotates whole heads whatever the key says.
    """

    def without_factor(table: dict) -> dict:
        result = {}
        for key, value in table.items():
            if key != "partial_rotary_factor":
                result[key] = without_factor(value) if isinstance(value, dict) else value
        return result

    result = without_factor(config)
    if result != config:
        logger.warning_once(
            "partial_rotary_factor is ignored: it was copied from the target's configuration, but drafters of this "
            "layout are trained with whole heads rotated, whatever it says."
        )
    return result


# The first layout that recognises a file reads it.
SOURCE_LAYOUTS = {
    "speculators": SourceLayout(
        lambda config: "speculators_model_type" in config or "transformer_layer_config" in config,
        _from_speculators,
        r"^(?:embed_tokens\.|lm_head\.weight$|verifier_|t2d$|d2t$)",
    ),
    "muse": SourceLayout(lambda config: config.get("architectures") == ["MuseGlimmerAssistantModel"], _from_muse),
    "torchspec": SourceLayout(
        lambda config: "target_num_hidden_layers" in config or _counts_features(config),
        _from_torchspec,
        r"^embed_tokens\.",
    ),
    "with copies": SourceLayout(
        lambda config: config.get("source_layout") == "with copies",  # as set by its head
        lambda config: config if "rope_dim" in str(config.get("rope_parameters")) else _rotate_whole_heads(config),
        r"^(?:embed_tokens\.|lm_head\.weight$|t2d$|d2t$)",
    ),
    "automodel": SourceLayout(lambda config: "Qwen3DFlash" in str(config.get("architectures")), _rotate_whole_heads),
}
