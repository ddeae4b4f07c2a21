"""TorchSpec: `num_target_layers` counts the features that the drafter reads, not the target's layers."""

from dflash_hf.layouts.source_layout import SourceLayout
from dflash_hf.layouts.target_layers import default_target_layer_ids


# Defaults of TorchSpec and of Qwen3; a file may leave out keys with these values.
_DEFAULTS = {
    "num_target_layers": 5,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "mask_token_id": 151669,
}


def _detect(config: dict) -> bool:
    """Whether the file has a key for the target's depth, or a layer id that is not below `num_target_layers`."""
    if "target_num_hidden_layers" in config:
        return True
    ids = config.get("target_layer_ids")
    if config.get("model_type") != "dflash" or not isinstance(ids, list) or not all(type(i) is int for i in ids):
        return False
    num_features = config.get("num_target_layers")
    return len(ids) == num_features and max(ids, default=-1) >= num_features


def _read(config: dict) -> dict:
    result = {**_DEFAULTS, **config}
    num_features = result["num_target_layers"]
    depth = result.pop("target_num_hidden_layers", None)
    result["num_target_layers"] = depth
    are_integers = type(num_features) is int and type(depth) is int
    if result.get("target_layer_ids") is None and are_integers and 0 < num_features <= depth:
        result["target_layer_ids"] = default_target_layer_ids(depth, num_features)
    return result


TORCHSPEC = SourceLayout(
    "torchspec",
    detect=_detect,
    read=_read,
    tensor_names={
        r"^context_proj\.": "fc.",
        r"^context_norm\.": "hidden_norm.",
        r"^final_norm\.": "norm.",
    },
    ignored_target_tensors=r"^embed_tokens\.",
)
