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
        key (`str`): The key or file; a format of what was found.
        when (`Callable`): What is found in a drafter; nothing if it is false.
        says (`str`): What happens, and the remedy; a format of `value`, the key's value, `found` and the drafter `d`.
    """

    severity: str
    engines: tuple[str, ...]
    layout: str
    key: str
    when: Callable[[Drafter], Any]
    says: str

    def find(self, drafter: Drafter) -> Iterator[Finding]:
        """The finding in a drafter, if there is one."""
        layout, excluded = drafter.layout, self.layout.startswith("not ")
        concerned = layout == self.layout or (
            layout != "speculators" and (self.layout == "any" or excluded and self.layout != f"not {layout}")
        )
        if concerned and (found := self.when(drafter)):
            message = self.says.format(value=drafter.get(self.key), found=found, d=drafter)
            yield Finding(self.severity, self.engines, self.key.format(found=found), one_line(message))


def version_of(config: dict) -> str:
    """The version of the code beside the weights; drafters of 0.1 do not name it."""
    return str(config.get("dflash_hf_version") or FIRST_VERSION)


def is_older(version: str, than: str) -> bool:
    """Whether a version comes before another; one that cannot be read comes first."""
    numbers = [[int(part) for part in one.split(".")[:3] if part.isdecimal()] for one in (version, than)]
    return numbers[0] < numbers[1]


# ---------------------------------------------------------------------------------------------------------- conditions


def _not_mended(d: Drafter) -> str:
    """What the code beside the weights does wrong, if it is an older version of ours."""
    auto_map = d.config.get("auto_map")
    there = isinstance(auto_map, dict) and auto_map.get("AutoModel") == OUR_MODEL and not _missing_code(d)
    pairs = [(d.folder / name, ours) for name, ours in code_files().items()]
    if not there or all(path.is_file() and path.read_bytes() == ours.read_bytes() for path, ours in pairs):
        return ""
    return "; ".join(what for version, what in MENDED.items() if is_older(version_of(d.config), version))


def _missing_code(d: Drafter) -> str:
    """A file that auto_map names, or `custom_generate`, if it is not in the folder."""
    auto_map = d.config.get("auto_map")
    if not isinstance(auto_map, dict) or "AutoModel" not in auto_map:
        return ""
    files = [f"{str(name).split('.')[0]}.py" for name in auto_map.values() if "--" not in str(name)]
    missing = (name for name in (*files, "custom_generate/generate.py") if not (d.folder / name).is_file())
    return next(missing, "")


def _foreign_code(d: Drafter) -> str:
    """A value of auto_map that is not a file beside the weights and its class."""
    auto_map = d.config.get("auto_map") or {}
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    names = [one for value in values for one in (value if isinstance(value, list) else [value]) if one is not None]
    return next((one_line(repr(one), 80) for one in names if not re.fullmatch(r"\w+\.\w+", str(one))), "")


def _unknown_quantisation(d: Drafter) -> str:
    """A quantisation that transformers would skip, the codes taken for weights."""
    given = d.config.get("quantization_config")
    if given is None:
        return ""
    method = given.get("quant_method") if isinstance(given, dict) else None
    return "" if method in {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"} else one_line(repr(method), 60)


def _unknown_model_type(d: Drafter) -> bool:
    if d.config.get("model_type") in ("qwen3", _MUSE_TYPE):
        return False
    return str(d.config.get("model_type")) not in CONFIG_MAPPING_NAMES


def _differ(values: list) -> bool:
    return any(value != values[0] for value in values)


def _kind(rope: dict) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _differing_layer(d: Drafter) -> tuple | None:
    read = d.layers_as_read()
    both = enumerate(zip(read["vllm"], read["sglang"]))
    return next(((i, vllm, sglang) for i, (vllm, sglang) in both if vllm != sglang), None)


def _bidirectional_jetspec(d: Drafter) -> bool:
    causal = [one for read in d.layers_as_read().values() for _, one in read]
    return bool(d.nested.get("causal_head")) and not all(causal)


def _own_mask(d: Drafter) -> bool:
    return bool(d.get("own_mask_embedding")) or "mask_embedding" in d.shapes


def _has_mask_file(d: Drafter) -> bool:
    return (d.folder / MASK_EMBEDDING).is_file()


def _departs(key: str, d: Drafter):
    return d.departures.get(key)


def _not_nested(key: str, d: Drafter) -> bool:
    return not d.nested.get(key)


def _contradicts(key: str, d: Drafter):
    """The key's values in both places, if they are there and differ."""
    both = d.nested.get(key), d.config.get(key)
    return None not in both and both[0] != both[1] and both


def _missing(key: str, d: Drafter) -> bool:
    return d.get(key) is None


def _only_nested(key: str, d: Drafter) -> bool:
    return d.config.get(key) is None and d.nested.get(key) is not None


# ----------------------------------------------------------------------------------------------------------- the table

_error, _warning = partial(Limit, "error"), partial(Limit, "warning")
_V, _S, _HF, _VS, _ALL = ("vllm",), ("sglang",), ("transformers",), SERVERS, ENGINES
_TWICE = ("block_size", "mask_token_id", "target_layer_ids")
_UNREAD = "{found[0]!r} is not read; it drafts as with {found[1]!r}, or not at all."
# fmt: off
LIMITS: tuple[Limit, ...] = (
    # engines, layout, key, when, what happens

    # What it is.
    _error(_VS, "any", "model_type", _unknown_model_type,
           "{value!r} is unknown to the engines' AutoConfig; write 'qwen3'."),
    _error(_ALL, "any", "model_type", lambda d: not _unknown_model_type(d)
           and (d.config.get("model_type") == _MUSE_TYPE) != (d.layout == "Muse"),
           "{value!r} does not match {d.architecture}; save or convert the drafter again."),
    _error(_VS, "not Muse", "vocab_size", lambda d: "vocab_size" not in d.config,
           "is missing: engines use their default instead of the target's; write the target's vocab_size."),
    _error(_VS, "any", "max_position_embeddings", lambda d: "max_position_embeddings" not in d.config,
           "is missing: engines use their default; write at least the length that will be served."),

    # What it reads of the target, and its blocks.
    _error(_VS, "any", "target_layer_ids", lambda d: list(d.ids) != sorted(d.ids),
           "{value} must increase: engines concatenate features in the order of the target's layers."),
    _error(_V, "any", "eagle_aux_hidden_state_layer_ids",
           lambda d: d.config.get("eagle_aux_hidden_state_layer_ids") not in (None, [], [i + 1 for i in d.ids]),
           "{value} is what vLLM reads first and must be target_layer_ids + 1; remove it."),
    _warning(_VS, "any", "target_layer_ids", lambda d: max(d.ids, default=0) + 1 == d.get("num_target_layers"),
             "{value} has the target's last layer: engines read it before the final norm. Compare tau."),
    *(_error(_ALL, "any", key, partial(_contradicts, key),
             "is {found[0]} in dflash_config and {found[1]} at the top; readers differ.") for key in _TWICE),
    *(_error(_ALL, "any", key, partial(_missing, key),
             "is missing, so every reader uses its own default; write it in dflash_config.") for key in _TWICE),
    *(_warning(_HF, "any", key, partial(_only_nested, key),
               "is in dflash_config only; transformers' own DFlash decoding reads the top level.") for key in _TWICE),

    # Attention: windows, and causality inside the block.
    _error(_VS, "not Muse", "use_sliding_window",
           lambda d: "sliding_attention" in d.kinds and d.config.get("use_sliding_window") is not True,
           "must be true, or Qwen3Config drops the windows."),
    _warning(_V, "any", "layer_types", lambda d: _differ(d.kinds), f"mixes full and sliding layers, {_V2_RUNNER}"),
    _warning(_ALL, "any", "causal", lambda d: d.config.get("is_causal") is not None
             and d.nested.get("causal") not in (None, d.config["is_causal"]),
             "{value} in dflash_config contradicts is_causal={d.config[is_causal]}, which engines use. Compare tau."),
    _error(_VS, "any", "causal_head", _bidirectional_jetspec,
           "is JetSpec's key, which engines do not read: they draft bidirectionally. Save the drafter again."),
    _error(_VS, "any", "is_causal", _differing_layer,
           "layer {found[0]}: vLLM reads (window, causal) = {found[1]}, SGLang {found[2]}; write layer_types, "
           "sliding_window and is_causal at the top level."),
    _warning(_ALL, "speculators", "sliding_window", lambda d: "sliding_attention" in d.speculators_kinds,
             "was counted from the anchor in training, for every slot, and not in the block; engines and this package "
             "count it from each slot. Compare tau."),
    _warning(_V, "speculators", "sliding_window_non_causal", lambda d: "full_attention" in d.speculators_kinds
             and d.config.get("sliding_window_non_causal") is False,
             "is false, which vLLM applies to full layers too: they were trained bidirectionally in the block. "
             "`dflash convert` keeps them so."),

    # Rotary embedding.
    _error(_VS, "any", "rope_parameters", lambda d: any(isinstance(one, dict) for one in d.rope.values()),
           "differs by layer type; vLLM rotates the context of all layers with one table. Write one."),
    _error(_VS, "any", "rope_theta", lambda d: not d.thetas,
           "is missing: vLLM uses 1000000, others 10000; write it."),
    _error(_ALL, "any", "rope_theta", lambda d: _differ(d.thetas),
           "is {d.thetas} in rope_parameters, top level and rope_scaling; write one."),
    _warning(_VS, "any", "rope_theta", lambda d: d.thetas and not _differ(d.thetas) and "rope_theta" not in d.config,
             "is in rope_parameters only; readers before transformers 5 fall back to 10000. Write both."),
    _error(_ALL, "any", "rope_scaling", lambda d: d.rope and d.scaling and _kind(d.rope) != _kind(d.scaling),
           "{value} and rope_parameters={d.rope} are of two types; write one in both."),
    _warning(_VS, "any", "rope_scaling", lambda d: d.rope.get("rope_type") == "yarn" and not d.scaling,
             "is missing next to rope_parameters; readers before transformers 5 lose YaRN. Write both."),
    _warning(_VS, "any", "rope_parameters", lambda d: {"mscale", "mscale_all_dim"} & {*d.rope, *d.scaling},
             "has mscale, which engines turn into an attention factor in different ways; compare tau."),
    _warning(_VS, "any", "rope_is_neox_style",
             lambda d: False in (d.get("rope_is_neox_style"), d.get("is_neox_style")),
             "is false, which few readers support. `dflash convert` writes the same drafter in the usual order."),

    # Activation, vocabulary and embedding.
    _error(_VS, "any", "hidden_act", lambda d: d.get("hidden_act", "silu") != "silu",
           "{value!r} is not supported; engines only have silu."),
    *(_error(engines, layout, "draft_vocab_size", lambda d: d.has_own_head,
             "{value} is a reduced vocabulary, which is not supported: `dflash convert DRAFT OUTPUT --share-head` "
             "writes a drafter without it.")
      for engines, layout in ((_V, "DFlash 2"), (_S, "any"))),  # vLLM takes draft ids for the target's
    _warning(_V, "any", "vocab_size",
             lambda d: d.get("vocab_size") == 262144 or str(d.target.get("model_type")).startswith("gemma"),
             "looks like Gemma, whose embeddings are scaled: vLLM feeds raw values. Compare tau before serving."),

    # Heads: DFlash 2's path selector with its convolution, DSpark's Markov head, Domino's.
    _warning(_V, "DFlash 2", "architectures", lambda d: True,
             f"DFlash2DraftModel drafts through a path selector, {_V2_RUNNER}"),
    _error(_VS, "not DFlash 2", "architectures",
           lambda d: next((key for key in (*CONVOLUTION, *SELECTOR) if d.get(key)), ""),
           "{d.architecture} has no {found}; engines need DFlash2DraftModel to build it."),
    *(_error(engines, "DFlash 2", key, partial(_not_nested, key),
             "{value} in dflash_config must be a positive integer; it is read nowhere else.")
      for engines, keys in ((_V, CONVOLUTION), (_VS, SELECTOR)) for key in keys),
    _error(_V, "not DSpark", "architectures", lambda d: d.get("markov_rank"),
           "{d.architecture} has no Markov head in vLLM; it needs Qwen3DSparkModel."),
    _error(_V, "DSpark", "markov_rank", lambda d: not d.get("markov_rank"),
           "0: vLLM needs a Markov head for anchor-first drafters, SGLang none."),
    _error(_V, "DSpark", "markov_head_type",
           lambda d: d.get("markov_rank") and d.get("markov_head_type", "vanilla") != "vanilla",
           "{value!r}: vLLM has only the vanilla Markov head, SGLang all."),
    _error(_V, "Domino", "gru_hidden_dim", lambda d: True, "vLLM has no Domino head; SGLang serves it."),
    _error(_S, "Domino", "pure_draft_prefix_len", lambda d: d.get("pure_draft_prefix_len") != 1,
           "{value} is not 1, the only value that SGLang supports."),
    _error(_S, "Domino", "projector_type", lambda d: d.get("projector_type") != "domino",
           "{value!r}: SGLang needs 'domino'. Save the drafter again."),
    _warning(_S, "Domino", "projector_type", lambda d: True,
             "is drafted greedily by SGLang, on one GPU, in bfloat16."),

    # Files beside the weights.
    _error(_VS, "any", MASK_EMBEDDING, lambda d: _own_mask(d) and not _has_mask_file(d),
           "is missing: engines skip the tensor mask_embedding and feed the target's. Save the drafter again."),
    _warning(_S, "any", MASK_EMBEDDING, _has_mask_file,
             "is read from a local folder only: SGLang ignores it if the drafter is named by repository."),
    _warning(_HF, "not Muse", "auto_map", lambda d: "AutoModel" not in (d.config.get("auto_map") or ()),
             "names no AutoModel: without this package the folder loads as a Qwen3 model with random weights."),
    _warning(_HF, "not Muse", "{found}", _missing_code,
             "is not in the folder, which does not load without this package; publish it, or save it again."),
    _warning(_HF, "not Muse", "dflash_hf_version", _not_mended,
             "the code beside the weights is older than this package's: {found}. `dflash publish --code-only REPO` "
             "replaces it; a folder is saved again."),
    _error(_HF, "any", "auto_map", _foreign_code,
           "{found} is not a file beside the weights and its class: others may change their code. Save it again."),
    _error(_ALL, "any", "quantization_config", _unknown_quantisation, "quant_method {found} is unknown."),

    # The target, with which `misfits` compares the rest.
    _warning(_V, "any", "max_position_embeddings",
             lambda d: d.get("max_position_embeddings", 1e9) < (d.target.get("max_position_embeddings") or 0),
             "{value} is below the target's {d.target[max_position_embeddings]}; vLLM before 0.33 reads past its "
             "rotary table. Raise it."),

    # Fields beyond a plain drafter's, which engines do not read.
    *(_error(_VS, "any", key, partial(_departs, key), _UNREAD)
      for key in ("target_hidden_size", "v_head_dim", "backbone_rotary_base")),
    _error(_V, "not DFlash 2", "input_embedding_scale", partial(_departs, "input_embedding_scale"), _UNREAD),
    _error(_S, "any", "input_embedding_scale", partial(_departs, "input_embedding_scale"), _UNREAD),
)
# fmt: on
