"""speculators: the draft layers are described in `transformer_layer_config`, or beside the other keys."""

from typing import Any

from dflash_hf.layouts.errors import require
from dflash_hf.layouts.rotary import without_partial_rotary
from dflash_hf.layouts.source_layout import LAYER_KEYS, SourceLayout, defaults_of


_LAYER_MODEL_TYPES = ("qwen3", "llama", "qwen2", "mistral", "gpt_oss")
_LAYER_KEYS_IGNORED = ("architectures", "transformers_version")
_KEYS_IGNORED = (
    "speculators_config",
    "speculators_version",
    "architectures",
    "auto_map",
    "model_type",
    "has_no_defaults",
)
_KEYS_READ_HERE = ("transformer_layer_config", "speculators_model_type", "sliding_window_non_causal")


def _detect(config: dict) -> bool:
    return "speculators_model_type" in config or "transformer_layer_config" in config


def _read(config: dict) -> dict:
    """Reads a nested or a flat configuration; both may leave out defaults."""
    layers: Any = config.get("transformer_layer_config")  # `require` checks its type
    if layers is None and "hidden_size" in config:
        layers = {}  # a flat file: its keys are at the top level
    require(isinstance(layers, dict), "a dictionary that describes the draft layers", transformer_layer_config=layers)
    model_type = layers.get("model_type", "qwen3")
    if model_type not in _LAYER_MODEL_TYPES:
        raise ValueError(f"transformer_layer_config has model_type={model_type!r}; it must name Qwen3-style layers.")
    result = defaults_of(model_type, LAYER_KEYS)
    result |= {key: value for key, value in layers.items() if key not in _LAYER_KEYS_IGNORED}
    is_dflash2 = config.get("speculators_model_type", "dflash") == "dflash2"
    if is_dflash2:
        result |= {"conv_kernel_size": 2, "conv_group_size": 16}
    # In speculators, sliding layers are causal in the block unless this says otherwise; full layers never are.
    if config.get("sliding_window_non_causal", is_dflash2):
        result["is_causal"] = False
    result |= {key: value for key, value in config.items() if key not in (*_KEYS_IGNORED, *_KEYS_READ_HERE)}
    result.setdefault("block_size", 8)
    result.setdefault("draft_vocab_size", 32000)
    return without_partial_rotary(result)


SPECULATORS = SourceLayout(
    "speculators",
    detect=_detect,
    read=_read,
    ignored_target_tensors=r"^(?:embed_tokens\.|lm_head\.weight$|verifier_|t2d$|d2t$)",
)
