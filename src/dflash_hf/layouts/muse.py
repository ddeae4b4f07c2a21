"""transformers' own `MuseGlimmerAssistantModel`."""

from dflash_hf.layouts.source_layout import LAYER_KEYS, SourceLayout, defaults_of


_KEYS_WITH_DEFAULTS = (*LAYER_KEYS, "sliding_window", "mask_token_id", "target_layer_ids")
_MAX_LAYERS = 1000  # `layer_types` of more layers are not filled in; the number itself is checked later


def _read(config: dict) -> dict:
    """Reads flat keys and transformers' defaults. Attention in the block is bidirectional; there is no key for it."""
    result = defaults_of("muse_glimmer_assistant", _KEYS_WITH_DEFAULTS)
    result |= {key: value for key, value in config.items() if value is not None}
    if "rope_parameters" in result and config.get("rope_theta") is None:
        del result["rope_theta"]
    layers = result["num_hidden_layers"]
    if "layer_types" not in result and isinstance(layers, int) and 0 < layers < _MAX_LAYERS:
        result["layer_types"] = ["sliding_attention"] * layers
    result.setdefault("is_causal", False)
    return result


MUSE = SourceLayout(
    "muse",
    architectures=("MuseGlimmerAssistantModel",),
    read=_read,
    tensor_names={r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."},
)
