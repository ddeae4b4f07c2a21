"""A drafter's folder as engines see it: `config.json`, and the headers of the weights."""

from dataclasses import dataclass, field
from pathlib import Path


# The name by which limits call the layout of an architecture.
LAYOUT_OF_ARCHITECTURE = {
    "DFlashDraftModel": "DFlash",
    "DFlash2DraftModel": "DFlash 2",
    "MuseGlimmerAssistantModel": "Muse",
    "Qwen3DSparkModel": "DSpark",
}


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
    """

    config: dict
    folder: Path = Path()
    target: dict = field(default_factory=dict)
    shapes: dict = field(default_factory=dict)
    non_default: dict = field(default_factory=dict)

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
        """The name by which limits call it: of `ALL_LAYOUTS` in [`~dflash_hf.hub.limits`]."""
        if "transformer_layer_config" in self.config:
            return "speculators"
        if self.get("gru_hidden_dim"):
            return "Domino"
        return LAYOUT_OF_ARCHITECTURE.get(self.architecture, "DFlash")

    @property
    def architecture(self) -> str:
        """The first of `architectures`, which engines build."""
        return (self.config.get("architectures") or ["DFlashDraftModel"])[0]

    @property
    def target_layer_ids(self) -> list[int]:
        """The target's layers whose outputs it reads, counted from 0."""
        return self.get("target_layer_ids", [])

    @property
    def rope_parameters(self) -> dict:
        """The rotary embedding as transformers 5 writes it; empty if it is not there."""
        return self.config.get("rope_parameters") or {}

    @property
    def rope_scaling(self) -> dict:
        """The rotary embedding as transformers wrote it before 5; empty if it is not there."""
        return self.config.get("rope_scaling") or {}

    @property
    def thetas(self) -> list[float]:
        """`rope_theta` in rope_parameters, at the top level and in rope_scaling, as far as it is there."""
        tables = (self.rope_parameters, self.config, self.rope_scaling)
        return [table["rope_theta"] for table in tables if table.get("rope_theta") is not None]

    @property
    def layer_types(self) -> list[str]:
        """The type of attention of each layer; Qwen3Config fills them in."""
        return self.config.get("layer_types") or ["full_attention"] * self.config.get("num_hidden_layers", 0)

    @property
    def speculators_layer_types(self) -> list[str]:
        """The type of attention of each layer, in speculators' layout."""
        return self.config["transformer_layer_config"].get("layer_types") or []

    @property
    def has_own_lm_head(self) -> bool:
        """Whether it has its own head, over a reduced vocabulary."""
        return self.get("draft_vocab_size") not in (None, self.get("vocab_size"))

    @property
    def own_embeddings(self) -> set[str]:
        """Tensors in place of the target's embedding and head."""
        if self.layout == "speculators":
            return set()
        own = {"embed_tokens.weight"}
        if not self.has_own_lm_head:
            own.add("lm_head.weight")
        return own & self.shapes.keys()

    def layers_as_read(self) -> dict[str, list[tuple[int | None, bool]]]:
        """For vLLM and SGLang, `(window, causal inside the block)` of each layer."""
        nested = self.nested
        window = self.config.get("sliding_window")
        sliding = [kind == "sliding_attention" for kind in self.layer_types]
        causal_by_default = False if self.layout == "Muse" else None  # both set it for a Muse assistant
        is_causal = self.config.get("is_causal", causal_by_default)
        # vLLM: the top level, then the nested key, and a forced window.
        vllm_is_causal = nested.get("causal") if is_causal is None else is_causal
        vllm_window = nested.get("swa_window_size", window)
        window_is_forced = bool(nested.get("use_swa")) and not any(sliding)
        vllm = []
        # SGLang: the top level only; nested keys for windows and causality are not read.
        sglang = []
        for slides in sliding:  # where nothing says whether a layer is causal, sliding layers are
            vllm_layer_window = vllm_window if slides or window_is_forced else None
            vllm_layer_is_causal = slides if vllm_is_causal is None else bool(vllm_is_causal)
            vllm.append((vllm_layer_window, vllm_layer_is_causal))
            sglang_layer_window = window if slides else None
            sglang_layer_is_causal = slides if is_causal is None else bool(is_causal)
            sglang.append((sglang_layer_window, sglang_layer_is_causal))
        return {"vllm": vllm, "sglang": sglang}
