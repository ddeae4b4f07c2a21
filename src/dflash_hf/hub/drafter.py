"""
A drafter's folder as engines see it: `config.json`, and the headers of the weights. Needs no torch.

A drafter of plain layers or of DFlash 2, in the layout that this package writes, is recognised here, with all its
tensors. Whatever else there is, and what is wrong with it, is left to the model's own reader, which takes seconds.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_hf.files import read_json


CONVOLUTION = ("conv_kernel_size", "conv_group_size")
SELECTOR = ("selector_rank", "selector_top_k")
MASK_EMBEDDING = "mask_embedding.pt"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
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
    def kinds(self) -> list[str]:
        """Of the layers; Qwen3Config fills them in."""
        return self.config.get("layer_types") or ["full_attention"] * self.config.get("num_hidden_layers", 0)

    @property
    def speculators_kinds(self) -> list[str]:
        """Of the layers, in speculators' layout."""
        return self.config["transformer_layer_config"].get("layer_types") or []

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

# What the keys of such a file hold: values of one type, anything, or one of these JSON values.
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"), int),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "block_size"), int),
    **dict.fromkeys(("mask_token_id", "num_target_layers", "target_hidden_size", "draft_vocab_size"), int),
    **dict.fromkeys(("sliding_window", "max_window_layers", *CONVOLUTION, *SELECTOR), int),
    **dict.fromkeys(("rms_norm_eps", "initializer_range", "rope_theta"), float),
    **dict.fromkeys(("use_sliding_window", "is_causal", "use_cache"), bool),
    **dict.fromkeys(("auto_map", "transformers_version", "dflash_hf_version", "trained_with"), object),
    **dict.fromkeys(("chat_template_kwargs", "num_anchors", "bos_token_id", "eos_token_id", "pad_token_id"), object),
    **dict.fromkeys(("architectures", "target_layer_ids", "layer_types", "rope_parameters", "dflash_config"), object),
    **dict.fromkeys(("attention_bias", "tie_word_embeddings"), ("false",)),
    **dict.fromkeys(("dtype", "torch_dtype"), ('"float32"', '"float16"', '"bfloat16"')),
    **{
        "model_type": ('"qwen3"',),
        "hidden_act": ('"silu"',),
        "attention_dropout": ("0.0",),
        "rope_scaling": ("null",),
    },
}
_NULLABLE = {"sliding_window", "draft_vocab_size", "use_sliding_window", "is_causal"}
# Shapes of the tensors of a layer: width h, inner size i, size of a head d, of all queries q and of all keys k.
_LAYER = {
    **dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), "h"),
    **dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), "d"),
    **dict.fromkeys(("self_attn.k_proj.weight", "self_attn.v_proj.weight"), "kh"),
    **{"self_attn.q_proj.weight": "qh", "self_attn.o_proj.weight": "hq", "mlp.down_proj.weight": "hi"},
    **dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "ih"),
}


def is_as_saved(folder: Path, config: dict) -> bool:
    """Whether a drafter is in the layout that this package writes, complete and valid, so that it loads."""
    try:
        return _is_valid(config) and _tensors(config) == _headers(folder)
    except Exception:  # whatever it is, it is something else
        return False


def _is_valid(config: dict) -> bool:
    """Whether every key is known and has a possible value."""
    if not all(_is_possible(*item) for item in (*config.items(), *config["dflash_config"].items())):
        return False
    get, vocabulary = Drafter(config).get, config["vocab_size"]
    ids, kinds, sizes = get("target_layer_ids"), config["layer_types"], [get(key) for key in (*CONVOLUTION, *SELECTOR)]
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return (
        config["architectures"] == ["DFlash2DraftModel" if any(sizes) else "DFlashDraftModel"]
        and (None not in sizes or not any(sizes))
        and all(type(i) is int and 0 <= i < get("num_target_layers", 64) for i in ids)
        and len(ids) == len(set(ids)) > 0
        and len(kinds) == config["num_hidden_layers"] <= 64
        and set(kinds) <= {"full_attention", "sliding_attention"}
        and ("sliding_attention" not in kinds or config["sliding_window"] is not None)
        and config["num_attention_heads"] % config["num_key_value_heads"] == config["head_dim"] % 2 == 0
        and config.get("rope_parameters") in (None, rope)
        and get("target_hidden_size", config["hidden_size"]) == config["hidden_size"]  # else engines depart from it
        and get("mask_token_id") < vocabulary
        and 2 <= get("block_size") <= 1024
        and get("conv_kernel_size", 1) <= get("block_size")
        and get("selector_top_k", 1) <= get("draft_vocab_size", vocabulary) <= vocabulary
    )


def _is_possible(key: str, value) -> bool:
    kind = _KINDS[key]
    if kind is object or value is None and key in _NULLABLE:
        return True
    if isinstance(kind, tuple):
        return json.dumps(value) in kind
    return type(value) in (kind, int if kind is float else kind) and (kind is bool or 0 < value < 2**24)


def _tensors(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a drafter that [`_is_valid`] knows."""
    get, names = Drafter(config).get, ("hidden_size", "intermediate_size", "head_dim")
    sizes = dict(zip("hid", map(get, names), strict=True))
    sizes |= {"q": get("num_attention_heads") * sizes["d"], "k": get("num_key_value_heads") * sizes["d"]}
    width, vocabulary, taps, rank = sizes["h"], get("vocab_size"), get("conv_kernel_size"), get("selector_rank")
    layer = {name: tuple(sizes[letter] for letter in letters) for name, letters in _LAYER.items()}
    for name in ("attention_conv", "mlp_conv") if taps else ():
        layer[f"{name}.base_kernel"] = (2, taps, width)
        layer[f"{name}.kernel_projection.weight"] = (2 * taps * (width // get("conv_group_size")), width)
    features = len(get("target_layer_ids")) * get("target_hidden_size", width)
    found = {"fc.weight": (width, features), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    found |= {f"layers.{i}.{name}": shape for i in range(get("num_hidden_layers")) for name, shape in layer.items()}
    if rank:
        books = ("predecessor_codebook", "successor_codebook")
        found |= {f"candidate_selector.{name}": (vocabulary, rank) for name in books}
        found["candidate_selector.hidden_projection.weight"] = (rank, width)
    if Drafter(config).has_own_head:
        found |= {"lm_head.weight": (get("draft_vocab_size"), width), "d2t": (get("draft_vocab_size"),)}
    return found


def _headers(folder: Path) -> dict[str, tuple[int, ...]]:
    """
    Names and shapes of all tensors in a folder's safetensors.

    Raises:
        `ValueError`: there is something beside them that the model's own reader knows.
    """
    from safetensors import safe_open

    if (folder / MASK_EMBEDDING).exists() or (folder / _SINGLE).exists() == (folder / _INDEX).exists():
        raise ValueError("for the model's own reader")
    index = folder / _INDEX
    names = set(read_json(index)["weight_map"].values()) if index.exists() else {_SINGLE}
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        with safe_open(folder / name, framework="np") as file:
            for key in file.keys():
                part = file.get_slice(key)
                known = part.get_dtype() in ({"I64"} if key == "d2t" else {"F64", "F32", "F16", "BF16"})
                if not known or key in found or Path(name).name != name:
                    raise ValueError("for the model's own reader")
                found[key] = tuple(part.get_shape())
    return found
