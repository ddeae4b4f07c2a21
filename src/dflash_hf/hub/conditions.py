"""
Conditions of the limits in `limits`: to which drafters a limit applies.

A condition is called with a [`~dflash_hf.hub.drafter_folder.DrafterFolder`] and returns a falsy value where it does
not hold. A dictionary that it returns holds details for the limit's message, by the names in its braces. Conditions
that compare one field are data, such as [`Comparison`]; the others are functions.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from dflash_hf._io.errors import one_line
from dflash_hf.hub.code_version import defects_of, is_current, uses_package_code, version_of
from dflash_hf.hub.drafter_folder import LAYOUT_OF_ARCHITECTURE, DrafterFolder, is_known_architecture
from dflash_hf.modeling.configuration_dflash import CONVOLUTION_KEYS
from dflash_hf.modeling.heads_dflash import PathSelector
from dflash_hf.modeling.modeling_dflash import MASK_EMBEDDING


Condition = Callable[[DrafterFolder], Any]
_MUSE_TYPE = "muse_glimmer_assistant"

# --------------------------------------------------------------------------------------------------------- comparisons

# Where a field is read. "anywhere": in dflash_config, else at the top level, as SGLang and z-lab's own code read it.
LOCATIONS = ("anywhere", "top level", "dflash_config")
RELATIONS = ("in", "not in", "above", "absent", "set", "not set")


@dataclass(frozen=True)
class Comparison:
    """
    A field of `config.json` in relation to values: `Comparison("hidden_act", "not in", (None, "silu"))`.

    Args:
        field (`str`): The field.
        relation (`str`): `"in"` or `"not in"` the values, `"above"` the first of them, `"absent"`, or `"set"` or
            `"not set"`: neither absent nor zero, empty or false.
        values (`tuple`): The values; an absent field has the value `None`.
        location (`str`): Where it is read: `"anywhere"` (in `dflash_config`, else at the top level), `"top level"` or
            `"dflash_config"`.

    Raises:
        `ValueError`: an unknown relation or location.
    """

    field: str
    relation: str
    values: tuple = ()
    location: str = "anywhere"

    def __post_init__(self):
        if self.relation not in RELATIONS:
            raise ValueError(f"relation={self.relation!r} is unknown; choose from {', '.join(RELATIONS)}.")
        if self.location not in LOCATIONS:
            raise ValueError(f"location={self.location!r} is unknown; choose from {', '.join(LOCATIONS)}.")

    def __call__(self, drafter: DrafterFolder) -> bool:
        value = self._value_in(drafter)
        if self.relation == "in":
            return value in self.values
        if self.relation == "not in":
            return value not in self.values
        if self.relation == "above":
            return isinstance(value, int | float) and value > self.values[0]
        if self.relation == "absent":
            return value is None
        return bool(value) == (self.relation == "set")

    def _value_in(self, drafter: DrafterFolder):
        """The field's value in its location; `None` if it is not there."""
        if self.location == "top level":
            return drafter.config.get(self.field)
        if self.location == "dflash_config":
            return drafter.nested.get(self.field)
        return drafter.get(self.field)


@dataclass(frozen=True)
class DiffersInTwoPlaces:
    """A field is in `dflash_config` and at the top level, with two values. Details: `nested`, `top`."""

    field: str

    def __call__(self, drafter: DrafterFolder) -> dict | None:
        nested = drafter.nested.get(self.field)
        top = drafter.config.get(self.field)
        if nested is None or top is None or nested == top:
            return None
        return {"nested": nested, "top": top}


@dataclass(frozen=True)
class IsNestedOnly:
    """A field is in `dflash_config` and not at the top level."""

    field: str

    def __call__(self, drafter: DrafterFolder) -> bool:
        return drafter.config.get(self.field) is None and drafter.nested.get(self.field) is not None


@dataclass(frozen=True)
class IsNotDefault:
    """A field does not have the value of a plain drafter. Details: its `value`, and the `default`."""

    field: str

    def __call__(self, drafter: DrafterFolder) -> dict | None:
        if self.field not in drafter.non_default:
            return None
        value, default = drafter.non_default[self.field]
        return {"value": value, "default": default}


@dataclass(frozen=True)
class HeadIsNotOneOf:
    """
    It has a token head that is not among these `heads`, by their names. Details: the name of its `head`, the first
    field of the head as `head_field`, and the field's `value`.
    """

    heads: tuple[str, ...]

    def __call__(self, drafter: DrafterFolder) -> dict | None:
        head = drafter.token_head
        if head is None or head.name in self.heads:
            return None
        head_field = next(iter(head.fields))
        return {"head": head.name, "head_field": head_field, "value": drafter.get(head_field)}


def always(drafter: DrafterFolder) -> bool:
    """Every drafter of the limit's layouts."""
    return True


# ------------------------------------------------------------------------------------------- what it is, what it reads


def architecture_is_unknown(drafter: DrafterFolder) -> dict | None:
    """
    `architectures` is not one that engines or this package build. Details: the `architectures`, the architectures that
    are `known` to engines, and the `remedy`.
    """
    architectures = drafter.config.get("architectures")
    if is_known_architecture(architectures):
        return None
    names = ", ".join(LAYOUT_OF_ARCHITECTURE)
    return {"architectures": architectures, "known": names, "remedy": _remedy_for_layout(drafter)}


def is_in_other_layout(drafter: DrafterFolder) -> dict:
    """Every drafter of the limit's layouts, which others than the engine read. Details: the `remedy`."""
    return {"remedy": _remedy_for_layout(drafter)}


def weights_do_not_load(drafter: DrafterFolder) -> dict | None:
    """This package cannot load it. Details: the `load_error`."""
    if drafter.load_error is None:
        return None
    return {"load_error": drafter.load_error.rstrip(".")}


def weights_without_own_embeddings_do_not_load(drafter: DrafterFolder) -> dict | None:
    """This package cannot load it, and it has no embedding or LM head of its own. Details: the `load_error`."""
    if drafter.own_embeddings:
        return None
    return weights_do_not_load(drafter)


def _remedy_for_layout(drafter: DrafterFolder) -> str:
    """What to do about a layout that engines do not read."""
    if drafter.load_error is None:
        return "`dflash convert` writes a folder in z-lab's layout, for which engines can be checked"
    return f"this package cannot read it either: {drafter.load_error}".rstrip(".")


def model_type_is_unknown(drafter: DrafterFolder) -> bool:
    """`model_type` is one that the AutoConfig of transformers does not know."""
    model_type = drafter.config.get("model_type")
    if model_type in ("qwen3", _MUSE_TYPE):
        return False
    return str(model_type) not in CONFIG_MAPPING_NAMES


def model_type_is_of_another_layout(drafter: DrafterFolder) -> bool:
    """Only one of `model_type` and `architectures` says that it is a Muse assistant."""
    if model_type_is_unknown(drafter):
        return False
    has_muse_type = drafter.config.get("model_type") == _MUSE_TYPE
    return has_muse_type != (drafter.layout == "Muse")


def layer_ids_are_unsorted(drafter: DrafterFolder) -> bool:
    """`target_layer_ids` does not increase."""
    return list(drafter.target_layer_ids) != sorted(drafter.target_layer_ids)


def eagle_layer_ids_differ(drafter: DrafterFolder) -> bool:
    """vLLM's own key, in which 0 is the embedding, names other layers than `target_layer_ids`."""
    eagle_ids = drafter.config.get("eagle_aux_hidden_state_layer_ids")
    return eagle_ids not in (None, [], [i + 1 for i in drafter.target_layer_ids])


def reads_last_layer(drafter: DrafterFolder) -> bool:
    """It reads the output of the target's last layer."""
    return max(drafter.target_layer_ids, default=0) + 1 == drafter.get("num_target_layers")


def is_shorter_than_target(drafter: DrafterFolder) -> dict | None:
    """Its `max_position_embeddings` is below the target's, if this is known. Details: `target_length`."""
    length = drafter.get("max_position_embeddings")
    target_length = drafter.target.get("max_position_embeddings") or 0
    if length is None or length >= target_length:
        return None
    return {"target_length": target_length}


# ------------------------------------------------------------------------ attention: windows, and causality in a block


def has_sliding_layers(drafter: DrafterFolder) -> bool:
    """A layer has a sliding window."""
    return "sliding_attention" in drafter.layer_types


def windows_are_switched_off(drafter: DrafterFolder) -> bool:
    """Layers have sliding windows, and `use_sliding_window` is not true."""
    return has_sliding_layers(drafter) and drafter.config.get("use_sliding_window") is not True


def layers_are_of_two_kinds(drafter: DrafterFolder) -> bool:
    """Some layers have sliding windows, some do not."""
    return _differ(drafter.layer_types)


def causality_is_not_the_default(drafter: DrafterFolder) -> bool:
    """`is_causal` differs from what engines assume without it: sliding layers are causal, full layers are not."""
    is_causal = drafter.config.get("is_causal")
    if is_causal is None:
        return False
    return any(bool(is_causal) != (kind == "sliding_attention") for kind in drafter.layer_types)


def causality_is_not_nested(drafter: DrafterFolder) -> bool:
    """`is_causal` differs from what engines assume without it, and `causal` in `dflash_config` is not the same."""
    return causality_is_not_the_default(drafter) and drafter.nested.get("causal") != drafter.config["is_causal"]


def causal_contradicts_is_causal(drafter: DrafterFolder) -> dict | None:
    """`causal` in `dflash_config` and `is_causal` at the top level differ. Details: `is_causal`."""
    is_causal = drafter.config.get("is_causal")
    if is_causal is None or drafter.nested.get("causal") in (None, is_causal):
        return None
    return {"is_causal": is_causal}


def causal_head_is_read_as_bidirectional(drafter: DrafterFolder) -> bool:
    """JetSpec's key says that layers are causal, and an engine reads a layer as bidirectional."""
    if not drafter.nested.get("causal_head"):
        return False
    layers = drafter.layers_in_vllm() + drafter.layers_in_sglang()
    return not all(is_causal for _, is_causal in layers)


def layer_is_read_differently(drafter: DrafterFolder) -> dict | None:
    """Engines read a layer differently. Details: its number `layer`; (window, causal) as `vllm`, `sglang` read it."""
    layers = zip(drafter.layers_in_vllm(), drafter.layers_in_sglang(), strict=True)
    for i, (vllm, sglang) in enumerate(layers):
        if vllm != sglang:
            return {"layer": i, "vllm": vllm, "sglang": sglang}
    return None


def speculators_layers_slide(drafter: DrafterFolder) -> bool:
    """A layer has a sliding window, in speculators' layout."""
    return "sliding_attention" in drafter.speculators_layer_types


def speculators_full_layers_become_causal(drafter: DrafterFolder) -> bool:
    """Sliding layers are causal in speculators' layout, and there are full layers as well."""
    has_full_layers = "full_attention" in drafter.speculators_layer_types
    return has_full_layers and drafter.config.get("sliding_window_non_causal") is False


# ---------------------------------------------------------------------------------------------------- rotary embedding


def rope_differs_by_layer_type(drafter: DrafterFolder) -> bool:
    """`rope_parameters` has a table for each type of layer."""
    return any(isinstance(value, dict) for value in drafter.rope_parameters.values())


def theta_is_missing(drafter: DrafterFolder) -> bool:
    """`rope_theta` is nowhere."""
    return not drafter.thetas


def thetas_differ(drafter: DrafterFolder) -> dict | None:
    """`rope_theta` has two values. Details: `thetas`."""
    if not _differ(drafter.thetas):
        return None
    return {"thetas": drafter.thetas}


def theta_is_in_rope_parameters_only(drafter: DrafterFolder) -> bool:
    """`rope_theta` is not at the top level, where readers before transformers 5 expect it."""
    return bool(drafter.thetas) and not _differ(drafter.thetas) and "rope_theta" not in drafter.config


def rope_types_differ(drafter: DrafterFolder) -> dict | None:
    """`rope_parameters` and `rope_scaling` are of two types. Details: `rope_parameters`."""
    parameters = drafter.rope_parameters
    scaling = drafter.rope_scaling
    if not parameters or not scaling or _rope_type(parameters) == _rope_type(scaling):
        return None
    return {"rope_parameters": parameters}


def yarn_is_in_rope_parameters_only(drafter: DrafterFolder) -> bool:
    """YaRN is not in `rope_scaling`, where readers before transformers 5 expect it."""
    return drafter.rope_parameters.get("rope_type") == "yarn" and not drafter.rope_scaling


def has_mscale(drafter: DrafterFolder) -> bool:
    """YaRN has factors of its own for attention."""
    return bool({"mscale", "mscale_all_dim"} & {*drafter.rope_parameters, *drafter.rope_scaling})


def rotary_pairs_are_interleaved(drafter: DrafterFolder) -> bool:
    """Rotary pairs are neighbours, as in GPT-J, under either name of the key."""
    return False in (drafter.get("rope_is_neox_style"), drafter.get("is_neox_style"))


def _rope_type(rope: dict) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


# ------------------------------------------------------------------------------------- vocabulary, embedding and heads


def vocabulary_is_reduced(drafter: DrafterFolder) -> bool:
    """It has its own head, over a part of the vocabulary."""
    return drafter.has_own_lm_head


def target_looks_like_gemma(drafter: DrafterFolder) -> bool:
    """Its target is of the Gemma family, by its type or by the size of the vocabulary."""
    return drafter.get("vocab_size") == 262144 or str(drafter.target.get("model_type")).startswith("gemma")


def has_dflash2_field(drafter: DrafterFolder) -> dict | None:
    """A field of DFlash 2's convolution or path selector is set. Details: its name `dflash2_field`."""
    for field in (*CONVOLUTION_KEYS, *PathSelector.sizes):
        if drafter.get(field):
            return {"dflash2_field": field}
    return None


def markov_head_is_not_vanilla(drafter: DrafterFolder) -> bool:
    """There is a Markov head that is not of the vanilla type."""
    return bool(drafter.get("markov_rank")) and drafter.get("markov_head_type", "vanilla") != "vanilla"


# -------------------------------------------------------------------------------------------- files beside the weights


def has_own_mask_embedding(drafter: DrafterFolder) -> bool:
    """It was trained with its own embedding of the mask token."""
    return bool(drafter.get("own_mask_embedding")) or "mask_embedding" in drafter.shapes


def has_mask_file(drafter: DrafterFolder) -> bool:
    """The file with its own embedding of the mask token is there."""
    return (drafter.folder / MASK_EMBEDDING).is_file()


def mask_file_is_missing(drafter: DrafterFolder) -> bool:
    """It has its own embedding of the mask token, and the file that engines read it from is not there."""
    return has_own_mask_embedding(drafter) and not has_mask_file(drafter)


def auto_map_names_no_model(drafter: DrafterFolder) -> bool:
    """`auto_map` does not name code of a model."""
    return "AutoModel" not in (drafter.config.get("auto_map") or ())


def code_file_is_missing(drafter: DrafterFolder) -> dict | None:
    """A file that `auto_map` names, or `custom_generate`, is not in the folder. Details: its name `file`."""
    auto_map = drafter.config.get("auto_map")
    if not isinstance(auto_map, dict) or "AutoModel" not in auto_map:
        return None
    files = [f"{str(name).split('.')[0]}.py" for name in auto_map.values() if "--" not in str(name)]
    files.append("custom_generate/generate.py")
    for file in files:
        if not (drafter.folder / file).is_file():
            return {"file": file}
    return None


def code_has_known_defects(drafter: DrafterFolder) -> dict | None:
    """The code beside the weights is this package's, of a version with known defects. Details: `defects`."""
    if not uses_package_code(drafter.config) or code_file_is_missing(drafter):
        return None
    defects = defects_of(version_of(drafter.config))
    if not defects or is_current(drafter.folder):
        return None
    return {"defects": "; ".join(defects)}


def code_is_foreign(drafter: DrafterFolder) -> dict | None:
    """A value of `auto_map` is not a file beside the weights and its class. Details: the value, as `code`."""
    auto_map = drafter.config.get("auto_map") or {}
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    for value in values:
        names = value if isinstance(value, list) else [value]
        for name in names:
            if name is not None and not re.fullmatch(r"\w+\.\w+", str(name)):
                return {"code": one_line(repr(name), 80)}
    return None


def quantization_is_unknown(drafter: DrafterFolder) -> dict | None:
    """A quantisation that transformers ignores, so that it takes the codes for weights. Details: its `method`."""
    quantization = drafter.config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method in {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}:
        return None
    return {"method": one_line(repr(method), 60)}


def is_quantized(drafter: DrafterFolder) -> dict | None:
    """It is quantised. Details: its `method`."""
    quantization = drafter.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return None if method is None else {"method": one_line(repr(method), 60)}


def _differ(values: list) -> bool:
    return any(value != values[0] for value in values)
