"""What makes up the layout of another project, and what several of them need."""

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import CONFIG_MAPPING


# Keys that describe the layers, for which a file may rely on defaults of its own project.
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


def _unchanged(config: dict) -> dict:
    return config


@dataclass(frozen=True)
class SourceLayout:
    """
    How a project writes a drafter, where that differs from the published layout.

    A layout is one such object, and its place in [`~dflash_hf.layouts.all_layouts.SOURCE_LAYOUTS`]. Regular
    expressions are those of `re.sub`.

    Args:
        name (`str`): Its name in `source_layout` of a configuration.
        architectures (`tuple[str, ...]`): Names that only this project writes into `architectures`. A file with one
            of them is a drafter, and is in this layout unless `detect` says otherwise.
        detect (`Callable[[dict], bool]`, *optional*): Whether a `config.json` is in this layout. Default: its only
            architecture is one of `architectures`.
        read (`Callable[[dict], dict]`): A new dictionary with the published keys, from a `config.json` in this
            layout. Keys that are nested in `dflash_config` and have a field already are at the top level.
        tensor_names (`dict[str, str]`): Regular expressions of tensor names, and what replaces each match. They are
            applied in order, after the prefixes that trainers add (`model.`, `draft_model.` and others) are removed.
        target_copies (`str`, *optional*): Regular expression of the tensors, by their published names, that copy the
            target's weights; they are not loaded.
    """

    name: str
    architectures: tuple[str, ...] = ()
    detect: Callable[[dict], bool] | None = None
    read: Callable[[dict], dict] = _unchanged
    tensor_names: dict[str, str] = field(default_factory=dict)
    target_copies: str | None = None

    def matches(self, config: dict) -> bool:
        """Whether a `config.json` is in this layout."""
        if self.detect is not None:
            return self.detect(config)
        return config.get("architectures") in [[name] for name in self.architectures]


def defaults_of(model_type: str, keys: tuple[str, ...]) -> dict:
    """What transformers' configuration of a model type says where a file says nothing."""
    default = CONFIG_MAPPING[model_type]()
    result = {key: getattr(default, key) for key in keys if getattr(default, key, None) is not None}
    return {**result, "rope_theta": default.rope_parameters["rope_theta"]}
