"""
A drafter's folder as engines see it: `config.json`, and the headers of the weights. Needs no torch.

A drafter of plain layers or of DFlash 2, in the layout that this package writes, is recognised here, with all its
tensors. Whatever else there is, and what is wrong with it, is left to the model's own reader, which takes seconds.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_hf.files import read_json


CONVOLUTION = ("conv_kernel_size", "conv_group_size")
SELECTOR = ("selector_rank", "selector_top_k")
MASK_EMBEDDING = "mask_embedding.pt"
OUR_MODEL = "modeling_dflash.DFlashDraftModel"
LAYOUTS = {
    "DFlashDraftModel": "DFlash",
    "DFlash2DraftModel": "DFlash 2",
    "MuseGlimmerAssistantModel": "Muse",
    "Qwen3DSparkModel": "DSpark",
}


@dataclass(frozen=True)
class Finding:
    """
    A problem for an engine.

    Args:
        severity (`str`): `"error"`: it will not load, or not draft as trained. `"warning"`: check before serving.
        engines (`tuple[str, ...]`): The engines affected.
        key (`str`): Key of `config.json`, tensor or file.
        message (`str`): The problem and the remedy.
    """

    severity: str
    engines: tuple[str, ...]
    key: str
    message: str


@dataclass(frozen=True)
class Drafter:
    """
    A folder as the table sees it.

    Args:
        config (`dict`): `config.json`.
        folder (`Path`): Where it is.
        target (`dict`): The target's configuration; empty if it is unknown.
        shapes (`dict`): Shapes of its tensors, if they were compared with the configuration's.
        parsed (`DFlashDraftConfig`, *optional*): The configuration as this package reads it, for readers with own
            loaders.
        code_is_ours (`bool`): Whether the code beside the weights is byte for byte this package's.
    """

    config: dict
    folder: Path = Path()
    target: dict = field(default_factory=dict)
    shapes: dict = field(default_factory=dict)
    parsed: Any = None
    code_is_ours: bool = False

    @property
    def nested(self) -> dict:
        return self.config.get("dflash_config") or {}

    def get(self, key: str, default=None):
        """A key as SGLang and z-lab read it: nested first, then at the top level."""
        value = self.nested.get(key)
        value = self.config.get(key) if value is None else value
        return default if value is None else value

    @property
    def layout(self) -> str:
        """A name of `OLDEST`, or `"speculators"`."""
        if self.parsed is not None:
            return LAYOUTS.get(self.parsed.head.architecture, "DFlash")
        if "transformer_layer_config" in self.config:
            return "speculators"
        return "Domino" if self.get("gru_hidden_dim") else LAYOUTS.get(self.architecture, "DFlash")

    @property
    def architecture(self) -> str:
        return (self.config.get("architectures") or ["DFlashDraftModel"])[0]

    @property
    def ids(self) -> list[int]:
        return self.get("target_layer_ids", [])

    @property
    def rope(self) -> dict:
        return self.config.get("rope_parameters") or {}

    @property
    def scaling(self) -> dict:
        return self.config.get("rope_scaling") or {}

    @property
    def thetas(self) -> list[float]:
        """In rope_parameters, at the top level and in rope_scaling, as far as it is there."""
        tables = (self.rope, self.config, self.scaling)
        return [table["rope_theta"] for table in tables if table.get("rope_theta") is not None]

    @property
    def rope_kinds(self) -> list[str]:
        return [one.get("rope_type", one.get("type", "default")) for one in (self.rope, self.scaling) if one]

    @property
    def kinds(self) -> list[str]:
        """Of the layers; Qwen3Config fills them in."""
        return self.config.get("layer_types") or ["full_attention"] * self.config.get("num_hidden_layers", 0)

    @property
    def has_own_head(self) -> bool:
        """Whether it has its own head, over a reduced vocabulary."""
        return self.get("draft_vocab_size") not in (None, self.get("vocab_size"))

    @property
    def causal(self) -> list[bool]:
        """Of each layer, whether it is causal inside the block, as this package reads it."""
        return [self.parsed.layer_is_causal(i) for i in range(self.parsed.num_hidden_layers)]

    def layers_as_read(self) -> dict[str, list[tuple[int | None, bool]]]:
        """For vLLM and SGLang, `(window, causal inside the block)` of each layer."""
        config, nested, window = self.config, self.nested, self.config.get("sliding_window")
        sliding = [kind == "sliding_attention" for kind in self.kinds]
        top = config.get("is_causal", False if self.layout == "Muse" else None)  # both set it for a Muse assistant
        # vLLM: the top level, then the nested key, and a forced window.
        override = top if top is not None else nested.get("causal")
        forced = bool(nested.get("use_swa")) and not any(sliding)
        forced_window = nested.get("swa_window_size", window)
        vllm = [(forced_window if s or forced else None, s if override is None else bool(override)) for s in sliding]
        # SGLang: the top level only; nested keys for windows and causality are not read.
        sglang = [(window if s else None, s if top is None else bool(top)) for s in sliding]
        return {"vllm": vllm, "sglang": sglang}


# ------------------------------------------------------------------------------------------------- drafters as saved

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = {"F64", "F32", "F16", "BF16"}
# The keys of a file, by what their values must be, and those of `dflash_config` that have no field.
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "sliding_window", "block_size", "num_target_layers"),
    *("target_hidden_size", "draft_vocab_size", "max_window_layers", *CONVOLUTION, *SELECTOR),
}
_NUMBERS = {"rms_norm_eps", "initializer_range", "rope_theta", "output_multiplier", "final_logit_softcapping"}
_NUMBERS |= {"input_embedding_scale", "attention_value_scale"}
_SWITCHES = {"attention_bias", "attention_sink_bias", "use_sliding_window", "is_causal", "use_cache"}
_CHECKED = {"architectures", "model_type", "layer_types", "target_layer_ids", "mask_token_id", "rope_parameters"}
_CHECKED |= {"attention_dropout", "hidden_act", "dtype", "torch_dtype", "tie_word_embeddings", "rope_scaling"}
_FREE = {"auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "dflash_hf_version"}
_NULLS = {"sliding_window", "draft_vocab_size", "use_sliding_window", "is_causal"}  # may be null
_NESTED = {"target_layer_ids", "mask_token_id", "trained_with", "chat_template_kwargs", "num_anchors"}


def is_as_saved(folder: Path, config: dict) -> bool:
    """Whether a drafter is in the layout that this package writes, complete and valid, so that it loads."""
    try:
        return _is_valid(config) and _tensors(config) == _headers(folder)
    except Exception:  # whatever it is, it is something else
        return False


def _is_valid(config: dict) -> bool:
    """Whether every key is known and has a possible value."""
    nested = config["dflash_config"]
    known = _SIZES | _NUMBERS | _SWITCHES
    if config.keys() - known - _CHECKED - _FREE - {"dflash_config"} or nested.keys() - known - _NESTED:
        return False
    for key, value in (*config.items(), *nested.items()):
        if key not in known or value is None and key in _NULLS:
            continue
        kinds = (bool,) if key in _SWITCHES else (int,) if key in _SIZES else (int, float)
        if type(value) not in kinds or key not in _SWITCHES and not 0 < value < 2**24:
            return False
    get, layers = Drafter(config).get, config["num_hidden_layers"]
    ids, kinds, theta = get("target_layer_ids"), config["layer_types"], config["rope_theta"]
    mask, sizes = get("mask_token_id"), [get(key) for key in (*CONVOLUTION, *SELECTOR)]
    return (
        config["architectures"] == ["DFlash2DraftModel" if any(sizes) else "DFlashDraftModel"]
        and (not any(sizes) or None not in sizes)
        and config["model_type"] == "qwen3"
        and set(kinds) <= {"full_attention", "sliding_attention"}
        and len(kinds) == layers <= 64
        and ("sliding_attention" not in kinds or config["sliding_window"] is not None)
        and all(type(i) is int and 0 <= i < get("num_target_layers", 64) <= 1024 for i in ids)
        and len(ids) == len(set(ids)) > 0
        and type(mask) is int
        and 0 <= mask < config["vocab_size"]
        and 2 <= get("block_size") <= 1024
        and config["num_attention_heads"] % config["num_key_value_heads"] == 0
        and config["head_dim"] % 2 == 0
        and config.get("rope_parameters") in (None, {"rope_type": "default", "rope_theta": theta})
        and config.get("rope_scaling") is None
        and type(theta) in (int, float)
        and str(config.get("attention_dropout", 0.0)) == "0.0"
        and config["hidden_act"] == "silu"
        and str(config.get("tie_word_embeddings", False)) == "False"
        and {config.get("dtype"), config.get("torch_dtype")} <= {None, "float32", "float16", "bfloat16", "float64"}
        and get("draft_vocab_size", 1) <= config["vocab_size"]
        and get("conv_kernel_size", 1) <= get("block_size")
        and get("selector_top_k", 1) <= get("draft_vocab_size", config["vocab_size"])
    )


def _tensors(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a drafter that [`_is_valid`] knows."""
    get = Drafter(config).get
    width, inner, size, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads")
    )
    queries, keys = heads * size, config["num_key_value_heads"] * size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    for name, shape in {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}.items():
        layer[f"self_attn.{name}_proj.weight"] = shape
        if config.get("attention_bias"):
            layer[f"self_attn.{name}_proj.bias"] = shape[:1]
    if get("attention_sink_bias"):
        layer["self_attn.attention_sink_bias"] = (heads,)
    if taps := get("conv_kernel_size"):
        for name in ("attention_conv", "mlp_conv"):
            layer[f"{name}.base_kernel"] = (2, taps, width)
            layer[f"{name}.kernel_projection.weight"] = (2 * taps * (width // get("conv_group_size")), width)
    features = len(get("target_layer_ids")) * get("target_hidden_size", width)
    found = {"fc.weight": (width, features), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    found |= {f"layers.{i}.{name}": shape for i in range(config["num_hidden_layers"]) for name, shape in layer.items()}
    if rank := get("selector_rank"):
        for name in ("predecessor_codebook", "successor_codebook"):
            found[f"candidate_selector.{name}"] = (config["vocab_size"], rank)
        found["candidate_selector.hidden_projection.weight"] = (rank, width)
    reduced = get("draft_vocab_size", config["vocab_size"])
    if reduced != config["vocab_size"]:
        found |= {"lm_head.weight": (reduced, width), "d2t": (reduced,)}
    return found


def _headers(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in a folder's safetensors, if their dtypes are a drafter's."""
    from safetensors import safe_open

    if (folder / MASK_EMBEDDING).exists() or (folder / _SINGLE).exists() == (folder / _INDEX).exists():
        raise ValueError("for the model's own reader")
    names = {_SINGLE}
    if (folder / _INDEX).exists():
        names = set(read_json(folder / _INDEX)["weight_map"].values())
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        if Path(name).name != name:
            raise ValueError("for the model's own reader")
        with safe_open(folder / name, framework="np") as file:
            for key in file.keys():
                part = file.get_slice(key)
                if part.get_dtype() not in ({"I64"} if key == "d2t" else _FLOATS) or key in found:
                    raise ValueError("for the model's own reader")
                found[key] = tuple(part.get_shape())
    return found
