"""
What engines read from a drafter's folder, and what happens where they read it differently: one table of limits.

Engines do not report a wrong drafter: vLLM never reports a missing tensor, SGLang skips an unknown tensor, and a key
that they read differently only costs acceptance. Each row is read in the engine's source, at the version in `READ_IN`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from dflash_hf.hub.drafter import CONVOLUTION, MASK_EMBEDDING, OUR_MODEL, SELECTOR, Drafter, Finding
from dflash_hf.modeling.modeling_dflash import code_files
from dflash_hf.names import ENGINES, SERVERS
from dflash_hf.terminal import one_line


READ_IN = {"vllm": "0.33.0", "sglang": "0.5.23", "transformers": "5.24.0"}
# The oldest versions of vLLM and SGLang that serve a drafter.
OLDEST = {
    "DFlash": ("0.21", "0.5.12"),
    "DFlash, with sliding layers": ("0.26", "0.5.14"),
    "Muse": ("0.26", "0.5.14"),
    "DFlash 2": ("0.30", "0.5.20"),
    "DSpark": ("0.33", "0.5.23"),
    "Domino": ("0.33", "0.5.23"),
}
# What older code beside the weights does wrong, by the version that mends it.
MENDED = {"0.1.1": "transformers 5.24 fails with a KeyError"}
FIRST_VERSION = "0.1.0"  # of drafters that name no version

_MUSE_TYPE = "muse_glimmer_assistant"
_V2_RUNNER = "for which vLLM needs its V2 model runner: do not set VLLM_USE_V2_MODEL_RUNNER=0."
SERVED_HEADS = ("path selector", "Markov head", "Domino head")  # that engines have


@dataclass(frozen=True)
class Limit:
    """
    A row of the table.

    Args:
        severity, engines: As in [`Finding`].
        layout (`str`): The layout concerned, `"any"` of the published ones, or `"not NAME"`.
        key (`str`): The key or file; a format of `match`.
        when (`Callable`): The condition: a function of a drafter whose result, the `match`, is false where the drafter
            is as it should be.
        says (`str`): What happens, and the remedy; a format of `value`, the key's value, `match` and `drafter`.
    """

    severity: str
    engines: tuple[str, ...]
    layout: str
    key: str
    when: Callable[[Drafter], Any]
    says: str

    def find(self, drafter: Drafter) -> Iterator[Finding]:
        """The finding in a drafter, if there is one."""
        if not self._concerns(drafter.layout):
            return
        match = self.when(drafter)
        if match:
            message = self.says.format(value=drafter.get(self.key), match=match, drafter=drafter)
            yield Finding(self.severity, self.engines, self.key.format(match=match), one_line(message))

    def _concerns(self, layout: str) -> bool:
        """Whether the row is about drafters of a layout; only its own rows are about speculators'."""
        if layout == self.layout:
            return True
        if layout == "speculators":
            return False
        if self.layout.startswith("not "):
            return self.layout != f"not {layout}"
        return self.layout == "any"


def version_of(config: dict) -> str:
    """The version of the code beside the weights; drafters of 0.1 do not name it."""
    return str(config.get("dflash_hf_version") or FIRST_VERSION)


def is_older(version: str, than: str) -> bool:
    """Whether a version comes before another; one that cannot be read comes first."""
    return _version_numbers(version) < _version_numbers(than)


def _version_numbers(version: str) -> list[int]:
    """Major, minor and patch number, as far as they are numbers."""
    return [int(part) for part in version.split(".")[:3] if part.isdecimal()]


# ---------------------------------------------------------------------------------------------------------- conditions

# Each is a function of a drafter, whose result is false where no limit is met. Where it is more than true or false,
# the message shows it.


# What it is.


def _model_type_is_unknown(drafter: Drafter) -> bool:
    model_type = drafter.config.get("model_type")
    if model_type in ("qwen3", _MUSE_TYPE):
        return False
    return str(model_type) not in CONFIG_MAPPING_NAMES


def _model_type_is_of_another_layout(drafter: Drafter) -> bool:
    if _model_type_is_unknown(drafter):
        return False
    has_muse_type = drafter.config.get("model_type") == _MUSE_TYPE
    return has_muse_type != (drafter.layout == "Muse")


def _vocab_size_is_missing(drafter: Drafter) -> bool:
    return "vocab_size" not in drafter.config


def _max_position_embeddings_is_missing(drafter: Drafter) -> bool:
    return "max_position_embeddings" not in drafter.config


# What it reads of the target, and its blocks.


def _layer_ids_are_unsorted(drafter: Drafter) -> bool:
    return list(drafter.ids) != sorted(drafter.ids)


def _eagle_layer_ids_differ(drafter: Drafter) -> bool:
    """vLLM's own key, in which 0 is the embedding."""
    eagle_ids = drafter.config.get("eagle_aux_hidden_state_layer_ids")
    return eagle_ids not in (None, [], [i + 1 for i in drafter.ids])


def _reads_the_last_layer(drafter: Drafter) -> bool:
    return max(drafter.ids, default=0) + 1 == drafter.get("num_target_layers")


def _contradicts(key: str, drafter: Drafter):
    """The key's values in both places, if they are there and differ."""
    nested_value = drafter.nested.get(key)
    top_value = drafter.config.get(key)
    if nested_value is None or top_value is None or nested_value == top_value:
        return False
    return nested_value, top_value


def _missing(key: str, drafter: Drafter) -> bool:
    return drafter.get(key) is None


def _only_nested(key: str, drafter: Drafter) -> bool:
    return drafter.config.get(key) is None and drafter.nested.get(key) is not None


# Attention: windows, and causality inside the block.


def _windows_are_switched_off(drafter: Drafter) -> bool:
    return "sliding_attention" in drafter.kinds and drafter.config.get("use_sliding_window") is not True


def _layers_are_of_two_kinds(drafter: Drafter) -> bool:
    return _differ(drafter.kinds)


def _causal_contradicts_is_causal(drafter: Drafter) -> bool:
    if drafter.config.get("is_causal") is None:
        return False
    return drafter.nested.get("causal") not in (None, drafter.config["is_causal"])


def _causal_head_is_read_as_bidirectional(drafter: Drafter) -> bool:
    causal = []
    for layers in drafter.layers_as_read().values():
        causal += [is_causal for _, is_causal in layers]
    return bool(drafter.nested.get("causal_head")) and not all(causal)


def _layer_that_engines_read_differently(drafter: Drafter) -> tuple | None:
    """The first such layer: its number, and `(window, causal)` as vLLM and as SGLang read it."""
    layers = drafter.layers_as_read()
    for i, (vllm, sglang) in enumerate(zip(layers["vllm"], layers["sglang"])):
        if vllm != sglang:
            return i, vllm, sglang
    return None


def _speculators_layers_slide(drafter: Drafter) -> bool:
    return "sliding_attention" in drafter.speculators_kinds


def _speculators_full_layers_become_causal(drafter: Drafter) -> bool:
    has_full_layers = "full_attention" in drafter.speculators_kinds
    return has_full_layers and drafter.config.get("sliding_window_non_causal") is False


# Rotary embedding.


def _rope_differs_by_layer_type(drafter: Drafter) -> bool:
    return any(isinstance(value, dict) for value in drafter.rope.values())


def _theta_is_missing(drafter: Drafter) -> bool:
    return not drafter.thetas


def _thetas_differ(drafter: Drafter) -> bool:
    return _differ(drafter.thetas)


def _theta_is_in_rope_parameters_only(drafter: Drafter):
    return drafter.thetas and not _differ(drafter.thetas) and "rope_theta" not in drafter.config


def _rope_types_differ(drafter: Drafter):
    return drafter.rope and drafter.scaling and _rope_type(drafter.rope) != _rope_type(drafter.scaling)


def _yarn_is_in_rope_parameters_only(drafter: Drafter) -> bool:
    return drafter.rope.get("rope_type") == "yarn" and not drafter.scaling


def _has_mscale(drafter: Drafter) -> set:
    return {"mscale", "mscale_all_dim"} & {*drafter.rope, *drafter.scaling}


def _rotary_pairs_are_interleaved(drafter: Drafter) -> bool:
    return False in (drafter.get("rope_is_neox_style"), drafter.get("is_neox_style"))


def _rope_type(rope: dict) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


# Activation, vocabulary and embedding.


def _activation_is_not_silu(drafter: Drafter) -> bool:
    return drafter.get("hidden_act", "silu") != "silu"


def _vocabulary_is_reduced(drafter: Drafter) -> bool:
    return drafter.has_own_head


def _target_looks_like_gemma(drafter: Drafter) -> bool:
    return drafter.get("vocab_size") == 262144 or str(drafter.target.get("model_type")).startswith("gemma")


# Heads.


def _always(drafter: Drafter) -> bool:
    return True


def _dflash2_key_in_another_layout(drafter: Drafter) -> str:
    """A key of DFlash 2's convolution or path selector that is set."""
    return next((key for key in (*CONVOLUTION, *SELECTOR) if drafter.get(key)), "")


def _not_nested(key: str, drafter: Drafter) -> bool:
    return not drafter.nested.get(key)


def _has_markov_rank(drafter: Drafter):
    return drafter.get("markov_rank")


def _has_no_markov_rank(drafter: Drafter) -> bool:
    return not drafter.get("markov_rank")


def _markov_head_is_not_vanilla(drafter: Drafter):
    return drafter.get("markov_rank") and drafter.get("markov_head_type", "vanilla") != "vanilla"


def _first_domino_slot_is_not_1(drafter: Drafter) -> bool:
    return drafter.get("pure_draft_prefix_len") != 1


def _projector_type_is_not_domino(drafter: Drafter) -> bool:
    return drafter.get("projector_type") != "domino"


# Files beside the weights.


def _mask_file_is_missing(drafter: Drafter) -> bool:
    has_own_mask = bool(drafter.get("own_mask_embedding")) or "mask_embedding" in drafter.shapes
    return has_own_mask and not _has_mask_file(drafter)


def _has_mask_file(drafter: Drafter) -> bool:
    return (drafter.folder / MASK_EMBEDDING).is_file()


def _auto_map_names_no_model(drafter: Drafter) -> bool:
    return "AutoModel" not in (drafter.config.get("auto_map") or ())


def _missing_code(drafter: Drafter) -> str:
    """A file that auto_map names, or `custom_generate`, if it is not in the folder."""
    auto_map = drafter.config.get("auto_map")
    if not isinstance(auto_map, dict) or "AutoModel" not in auto_map:
        return ""
    files = [f"{str(name).split('.')[0]}.py" for name in auto_map.values() if "--" not in str(name)]
    files.append("custom_generate/generate.py")
    return next((name for name in files if not (drafter.folder / name).is_file()), "")


def _not_mended(drafter: Drafter) -> str:
    """What the code beside the weights does wrong, if it is an older version of this package's."""
    auto_map = drafter.config.get("auto_map")
    if not isinstance(auto_map, dict) or auto_map.get("AutoModel") != OUR_MODEL or _missing_code(drafter):
        return ""
    for name, current in code_files().items():
        published = drafter.folder / name
        if not published.is_file() or published.read_bytes() != current.read_bytes():
            break
    else:  # byte for byte this package's, whatever version is named
        return ""
    return "; ".join(what for version, what in MENDED.items() if is_older(version_of(drafter.config), version))


def _foreign_code(drafter: Drafter) -> str:
    """A value of auto_map that is not a file beside the weights and its class."""
    auto_map = drafter.config.get("auto_map") or {}
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    for value in values:
        for name in value if isinstance(value, list) else [value]:
            if name is not None and not re.fullmatch(r"\w+\.\w+", str(name)):
                return one_line(repr(name), 80)
    return ""


def _unknown_quantisation(drafter: Drafter) -> str:
    """A quantisation that transformers would skip, the codes taken for weights."""
    quantization = drafter.config.get("quantization_config")
    if quantization is None:
        return ""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method in {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}:
        return ""
    return one_line(repr(method), 60)


# The target, and fields beyond a plain drafter's.


def _is_shorter_than_the_target(drafter: Drafter) -> bool:
    target_length = drafter.target.get("max_position_embeddings") or 0
    return drafter.get("max_position_embeddings", 1e9) < target_length


def _is_not_default(key: str, drafter: Drafter):
    """The field's value and a plain drafter's, if they differ."""
    return drafter.non_default.get(key)


def _differ(values: list) -> bool:
    return any(value != values[0] for value in values)


# ----------------------------------------------------------------------------------------------------------- the table

_error = partial(Limit, "error")
_warning = partial(Limit, "warning")
_V = ("vllm",)
_S = ("sglang",)
_HF = ("transformers",)
_VS = SERVERS
_ALL = ENGINES
# Keys that are read in dflash_config and at the top level.
_TWICE = ("block_size", "mask_token_id", "target_layer_ids")
_CONTRADICTS = "is {match[0]} in dflash_config and {match[1]} at the top; readers differ."
_MISSING = "is missing, so every reader uses its own default; write it in dflash_config."
_ONLY_NESTED = "is in dflash_config only; transformers' own DFlash decoding reads the top level."
_REDUCED = (
    "{value} is a reduced vocabulary, which is not supported: `dflash convert DRAFT OUTPUT --share-head` writes a "
    "drafter without it."
)
_NOT_NESTED = "{value} in dflash_config must be a positive integer; it is read nowhere else."
_UNREAD = "{match[0]!r} is not read; it drafts as with {match[1]!r}, or not at all."
# fmt: off
LIMITS: tuple[Limit, ...] = (
    # engines, layout, key, when, what happens

    # What it is.
    _error(_VS, "any", "model_type", _model_type_is_unknown,
           "{value!r} is unknown to the engines' AutoConfig; write 'qwen3'."),
    _error(_ALL, "any", "model_type", _model_type_is_of_another_layout,
           "{value!r} does not match {drafter.architecture}; save or convert the drafter again."),
    _error(_VS, "not Muse", "vocab_size", _vocab_size_is_missing,
           "is missing: engines use their default instead of the target's; write the target's vocab_size."),
    _error(_VS, "any", "max_position_embeddings", _max_position_embeddings_is_missing,
           "is missing: engines use their default; write at least the length that will be served."),

    # What it reads of the target, and its blocks.
    _error(_VS, "any", "target_layer_ids", _layer_ids_are_unsorted,
           "{value} must increase: engines concatenate features in the order of the target's layers."),
    _error(_V, "any", "eagle_aux_hidden_state_layer_ids", _eagle_layer_ids_differ,
           "{value} is what vLLM reads first and must be target_layer_ids + 1; remove it."),
    _warning(_VS, "any", "target_layer_ids", _reads_the_last_layer,
             "{value} has the target's last layer: engines read it before the final norm. Compare tau."),
    *(_error(_ALL, "any", key, partial(_contradicts, key), _CONTRADICTS) for key in _TWICE),
    *(_error(_ALL, "any", key, partial(_missing, key), _MISSING) for key in _TWICE),
    *(_warning(_HF, "any", key, partial(_only_nested, key), _ONLY_NESTED) for key in _TWICE),

    # Attention: windows, and causality inside the block.
    _error(_VS, "not Muse", "use_sliding_window", _windows_are_switched_off,
           "must be true, or Qwen3Config drops the windows."),
    _warning(_V, "any", "layer_types", _layers_are_of_two_kinds, f"mixes full and sliding layers, {_V2_RUNNER}"),
    _warning(_ALL, "any", "causal", _causal_contradicts_is_causal,
             "{value} in dflash_config contradicts is_causal={drafter.config[is_causal]}, which engines use. "
             "Compare tau."),
    _error(_VS, "any", "causal_head", _causal_head_is_read_as_bidirectional,
           "is JetSpec's key, which engines do not read: they draft bidirectionally. Save the drafter again."),
    _error(_VS, "any", "is_causal", _layer_that_engines_read_differently,
           "layer {match[0]}: vLLM reads (window, causal) = {match[1]}, SGLang {match[2]}; write layer_types, "
           "sliding_window and is_causal at the top level."),
    _warning(_ALL, "speculators", "sliding_window", _speculators_layers_slide,
             "was counted from the anchor in training, for every slot, and not in the block; engines and this package "
             "count it from each slot. Compare tau."),
    _warning(_V, "speculators", "sliding_window_non_causal", _speculators_full_layers_become_causal,
             "is false, which vLLM applies to full layers too: they were trained bidirectionally in the block. "
             "`dflash convert` keeps them so."),

    # Rotary embedding.
    _error(_VS, "any", "rope_parameters", _rope_differs_by_layer_type,
           "differs by layer type; vLLM rotates the context of all layers with one table. Write one."),
    _error(_VS, "any", "rope_theta", _theta_is_missing,
           "is missing: vLLM uses 1000000, others 10000; write it."),
    _error(_ALL, "any", "rope_theta", _thetas_differ,
           "is {drafter.thetas} in rope_parameters, top level and rope_scaling; write one."),
    _warning(_VS, "any", "rope_theta", _theta_is_in_rope_parameters_only,
             "is in rope_parameters only; readers before transformers 5 fall back to 10000. Write both."),
    _error(_ALL, "any", "rope_scaling", _rope_types_differ,
           "{value} and rope_parameters={drafter.rope} are of two types; write one in both."),
    _warning(_VS, "any", "rope_scaling", _yarn_is_in_rope_parameters_only,
             "is missing next to rope_parameters; readers before transformers 5 lose YaRN. Write both."),
    _warning(_VS, "any", "rope_parameters", _has_mscale,
             "has mscale, which engines turn into an attention factor in different ways; compare tau."),
    _warning(_VS, "any", "rope_is_neox_style", _rotary_pairs_are_interleaved,
             "is false, which few readers support. `dflash convert` writes the same drafter in the usual order."),

    # Activation, vocabulary and embedding.
    _error(_VS, "any", "hidden_act", _activation_is_not_silu,
           "{value!r} is not supported; engines only have silu."),
    # vLLM takes draft ids for the target's.
    _error(_V, "DFlash 2", "draft_vocab_size", _vocabulary_is_reduced, _REDUCED),
    _error(_S, "any", "draft_vocab_size", _vocabulary_is_reduced, _REDUCED),
    _warning(_V, "any", "vocab_size", _target_looks_like_gemma,
             "looks like Gemma, whose embeddings are scaled: vLLM feeds raw values. Compare tau before serving."),

    # Heads: DFlash 2's path selector with its convolution, DSpark's Markov head, Domino's.
    _warning(_V, "DFlash 2", "architectures", _always,
             f"DFlash2DraftModel drafts through a path selector, {_V2_RUNNER}"),
    _error(_VS, "not DFlash 2", "architectures", _dflash2_key_in_another_layout,
           "{drafter.architecture} has no {match}; engines need DFlash2DraftModel to build it."),
    *(_error(_V, "DFlash 2", key, partial(_not_nested, key), _NOT_NESTED) for key in CONVOLUTION),
    *(_error(_VS, "DFlash 2", key, partial(_not_nested, key), _NOT_NESTED) for key in SELECTOR),
    _error(_V, "not DSpark", "architectures", _has_markov_rank,
           "{drafter.architecture} has no Markov head in vLLM; it needs Qwen3DSparkModel."),
    _error(_V, "DSpark", "markov_rank", _has_no_markov_rank,
           "0: vLLM needs a Markov head for anchor-first drafters, SGLang none."),
    _error(_V, "DSpark", "markov_head_type", _markov_head_is_not_vanilla,
           "{value!r}: vLLM has only the vanilla Markov head, SGLang all."),
    _error(_V, "Domino", "gru_hidden_dim", _always, "vLLM has no Domino head; SGLang serves it."),
    _error(_S, "Domino", "pure_draft_prefix_len", _first_domino_slot_is_not_1,
           "{value} is not 1, the only value that SGLang supports."),
    _error(_S, "Domino", "projector_type", _projector_type_is_not_domino,
           "{value!r}: SGLang needs 'domino'. Save the drafter again."),
    _warning(_S, "Domino", "projector_type", _always,
             "is drafted greedily by SGLang, on one GPU, in bfloat16."),

    # Files beside the weights.
    _error(_VS, "any", MASK_EMBEDDING, _mask_file_is_missing,
           "is missing: engines skip the tensor mask_embedding and feed the target's. Save the drafter again."),
    _warning(_S, "any", MASK_EMBEDDING, _has_mask_file,
             "is read from a local folder only: SGLang ignores it if the drafter is named by repository."),
    _warning(_HF, "not Muse", "auto_map", _auto_map_names_no_model,
             "names no AutoModel: without this package the folder loads as a Qwen3 model with random weights."),
    _warning(_HF, "not Muse", "{match}", _missing_code,
             "is not in the folder, which does not load without this package; publish it, or save it again."),
    _warning(_HF, "not Muse", "dflash_hf_version", _not_mended,
             "the code beside the weights is older than this package's: {match}. `dflash publish --code-only REPO` "
             "replaces it; a folder is saved again."),
    _error(_HF, "any", "auto_map", _foreign_code,
           "{match} is not a file beside the weights and its class: others may change their code. Save it again."),
    _error(_ALL, "any", "quantization_config", _unknown_quantisation, "quant_method {match} is unknown."),

    # The target, with which `incompatibilities` compares the rest.
    _warning(_V, "any", "max_position_embeddings", _is_shorter_than_the_target,
             "{value} is below the target's {drafter.target[max_position_embeddings]}; vLLM before 0.33 reads past "
             "its rotary table. Raise it."),

    # Fields beyond a plain drafter's, which engines do not read.
    _error(_VS, "any", "target_hidden_size", partial(_is_not_default, "target_hidden_size"), _UNREAD),
    _error(_VS, "any", "v_head_dim", partial(_is_not_default, "v_head_dim"), _UNREAD),
    _error(_VS, "any", "backbone_rotary_base", partial(_is_not_default, "backbone_rotary_base"), _UNREAD),
    _error(_V, "not DFlash 2", "input_embedding_scale", partial(_is_not_default, "input_embedding_scale"), _UNREAD),
    _error(_S, "any", "input_embedding_scale", partial(_is_not_default, "input_embedding_scale"), _UNREAD),
)
# fmt: on
