"""A drafter's folder as engines see it: `config.json`, and the headers of the weights."""

from dataclasses import dataclass, field
from pathlib import Path

from dflash_hf.modeling.head_dflash import TokenHead
from dflash_hf.modeling.heads_dflash import TOKEN_HEADS


# The name by which limits call the layout of an architecture.
LAYOUT_OF_ARCHITECTURE = {
    "DFlashDraftModel": "DFlash",
    "DFlash2DraftModel": "DFlash 2",
    "MuseGlimmerAssistantModel": "Muse",
    "Qwen3DSparkModel": "DSpark",
}
UNKNOWN_LAYOUT = "unknown"  # the layout of any other architecture


def is_known_architecture(architectures) -> bool:
    """Whether a value of `architectures` is a list of one name: of a class that engines build, or of a head here."""
    names = [*LAYOUT_OF_ARCHITECTURE, *(head.architecture for head in TOKEN_HEADS)]
    return architectures in [[name] for name in names]


@dataclass(frozen=True)
class DrafterFolder:
    """
    A drafter's folder as the conditions of limits see it.

    Args:
        config (`dict`): `config.json`.
        folder (`Path`): Where it is.
        target (`dict`): The target's configuration; empty if it is unknown.
        shapes (`dict`): Shapes of its tensors.
        non_default (`dict`): What it has beyond a plain drafter, from
            [`~dflash_hf.pairs.configs.non_default_fields`]: its value and a plain drafter's, by field.
        token_head (`type[TokenHead]`, *optional*): The class of its token head; `None` if it has none.
        load_error (`str`, *optional*): Why this package cannot load it; `None` if it can, or if this is not known.
    """

    config: dict
    folder: Path = Path()
    target: dict = field(default_factory=dict)
    shapes: dict = field(default_factory=dict)
    non_default: dict = field(default_factory=dict)
    token_head: type[TokenHead] | None = None
    load_error: str | None = None

    @property
    def nested(self) -> dict:
        """The fields in `dflash_config`."""
        return self.config.get("dflash_config") or {}

    def get(self, key: str, default=None):
        """A field as SGLang and z-lab's own code read it: in `dflash_config`, else at the top level."""
        value = self.nested.get(key)
        if value is None:
            value = self.config.get(key)
        return default if value is None else value

    @property
    def layout(self) -> str:
        """The name of its layout, one of `ALL_LAYOUTS` in [`~dflash_hf.hub.limits`]."""
        if "transformer_layer_config" in self.config:
            return "speculators"
        architectures = self.config.get("architectures")
        if architectures and not is_known_architecture(architectures):
            return UNKNOWN_LAYOUT
        if self.get("gru_hidden_dim"):
            return "Domino"
        return LAYOUT_OF_ARCHITECTURE.get(self.architecture, "DFlash")

    @property
    def architecture(self) -> str:
        """The first of `architectures`, which engines build."""
        return (self.config.get("architectures") or ["DFlashDraftModel"])[0]

    @property
    def target_layer_ids(self) -> list[int]:
        """Ids of the target's layers whose outputs the drafter reads, counted from 0."""
        return self.get("target_layer_ids", [])

    @property
    def rope_parameters(self) -> dict:
        """The rotary embedding as transformers 5 writes it; empty if absent."""
        return self.config.get("rope_parameters") or {}

    @property
    def rope_scaling(self) -> dict:
        """The rotary embedding as transformers wrote it before version 5; empty if absent."""
        return self.config.get("rope_scaling") or {}

    @property
    def thetas(self) -> list[float]:
        """The values of `rope_theta` in rope_parameters, at the top level and in rope_scaling, where present."""
        tables = (self.rope_parameters, self.config, self.rope_scaling)
        return [table["rope_theta"] for table in tables if table.get("rope_theta") is not None]

    @property
    def layer_types(self) -> list[str]:
        """The type of attention of each layer; full attention if the field is absent."""
        return self.config.get("layer_types") or ["full_attention"] * self.config.get("num_hidden_layers", 0)

    @property
    def speculators_layer_types(self) -> list[str]:
        """The type of attention of each layer, in speculators' layout."""
        return self.config["transformer_layer_config"].get("layer_types") or []

    @property
    def has_own_lm_head(self) -> bool:
        """Whether the drafter has its own LM head, over a reduced vocabulary."""
        return self.get("draft_vocab_size") not in (None, self.get("vocab_size"))

    @property
    def own_embeddings(self) -> set[str]:
        """Names of the tensors that replace the target's embedding and LM head."""
        if self.layout == "speculators":
            return set()
        own = {"embed_tokens.weight"}
        if not self.has_own_lm_head:
            own.add("lm_head.weight")
        return own & self.shapes.keys()

    def layers_in_vllm(self) -> list[tuple[int | None, bool]]:
        """
        `(window, causal inside the block)` of each layer, as vLLM reads them: causality at the top level, then in
        `dflash_config`; the window in `dflash_config`, then at the top level. `use_swa` gives all layers the window.
        """
        nested = self.nested
        is_causal = self._top_level_causality
        if is_causal is None:
            is_causal = nested.get("causal")
        window = nested.get("swa_window_size", self.config.get("sliding_window"))
        slides = [kind == "sliding_attention" for kind in self.layer_types]
        window_is_forced = bool(nested.get("use_swa")) and not any(slides)
        return [
            (window if layer_slides or window_is_forced else None, _is_causal(layer_slides, is_causal))
            for layer_slides in slides
        ]

    def layers_in_sglang(self) -> list[tuple[int | None, bool]]:
        """`(window, causal inside the block)` of each layer, as SGLang reads them: at the top level only."""
        is_causal = self._top_level_causality
        window = self.config.get("sliding_window")
        slides = [kind == "sliding_attention" for kind in self.layer_types]
        return [(window if layer_slides else None, _is_causal(layer_slides, is_causal)) for layer_slides in slides]

    @property
    def _top_level_causality(self) -> bool | None:
        """`is_causal` at the top level; both engines set it to false for a Muse assistant without the key."""
        default = False if self.layout == "Muse" else None
        return self.config.get("is_causal", default)


def _is_causal(layer_slides: bool, is_causal: bool | None) -> bool:
    """Causality of a layer: as the configuration says, else sliding layers are causal and full layers are not."""
    return layer_slides if is_causal is None else bool(is_causal)
