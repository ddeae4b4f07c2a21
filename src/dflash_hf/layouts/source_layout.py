"""The description of a layout, and helpers for several layouts."""

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import CONFIG_MAPPING


# Keys that describe the layers; files may leave them out where they equal defaults of their project.
LAYER_KEYS = (
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


def unchanged(config: dict) -> dict:
    """Reads a `config.json` that has the published keys already."""
    return config


@dataclass(frozen=True)
class SourceLayout:
    """
    How a project writes a drafter, where that differs from the published layout. To add a layout, create such an
    object and add it to [`~dflash_hf.layouts.all_layouts.SOURCE_LAYOUTS`]. Regular expressions are those of `re.sub`.

    Args:
        name (`str`): Its name in `source_layout` of a configuration.
        architectures (`tuple[str, ...]`): Names that only this project writes into `architectures`. A file with one
            of them is a drafter, and is in this layout unless `detect` says otherwise.
        detect (`Callable[[dict], bool]`, *optional*): Whether a `config.json` is in this layout. Default: its only
            architecture is one of `architectures`.
        read (`Callable[[dict], dict]`): A new dictionary with the published keys, from a `config.json` in this
            layout. Nested keys that have a field have been merged into the top level.
        tensor_names (`dict[str, str]`): Regular expressions of tensor names, and what replaces each match. They are
            applied in order, after the prefixes that trainers add (`model.`, `draft_model.` and others) are removed.
        ignored_target_tensors (`str`, *optional*): Regular expression, for published names, of the tensors that are
            copies of the target's weights, which are not loaded.
    """

    name: str
    architectures: tuple[str, ...] = ()
    detect: Callable[[dict], bool] | None = None
    read: Callable[[dict], dict] = unchanged
    tensor_names: dict[str, str] = field(default_factory=dict)
    ignored_target_tensors: str | None = None

    def matches(self, config: dict) -> bool:
        """Whether a `config.json` is in this layout."""
        if self.detect is not None:
            return self.detect(config)
        return config.get("architectures") in [[name] for name in self.architectures]


def defaults_of(model_type: str, keys: tuple[str, ...]) -> dict:
    """The default values of `keys`, and of `rope_theta`, in transformers' configuration of a model type."""
    default = CONFIG_MAPPING[model_type]()
    result = {key: getattr(default, key) for key in keys if getattr(default, key, None) is not None}
    return {**result, "rope_theta": default.rope_parameters["rope_theta"]}
