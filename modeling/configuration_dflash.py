"""Configuration of a DFlash drafter: every published spelling in, one layout out, checked once at construction."""

import copy

from transformers import PreTrainedConfig


# Keys that some publishers nest in `dflash_config` and others keep at the top level. Nested wins, as in the engines.
_NESTED_KEYS = {
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "target_layer_ids": "target_layer_ids",
    "num_target_layers": "num_target_layers",
    "causal": "is_causal",
    "swa_window_size": "sliding_window",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """
    The target layers whose outputs a drafter reads by default: evenly spaced from the second layer to the third last
    (DFlash, arXiv 2602.06036), `num_target_layers // 2` for a drafter of one layer.

    Args:
        num_target_layers (`int`): Depth of the target.
        num_draft_layers (`int`): Depth of the drafter.

    Raises:
        `ValueError`: the target is too shallow for that many distinct layers.
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    ids = [round(1 + j * (num_target_layers - 4) / (num_draft_layers - 1)) for j in range(num_draft_layers)]
    if len(set(ids)) != len(ids) or max(ids) >= num_target_layers or min(ids) < 0:
        raise ValueError(
            f"The default rule gives target_layer_ids={ids} for num_target_layers={num_target_layers} and "
            f"num_hidden_layers={num_draft_layers}, which are not distinct layers. Pass `target_layer_ids` yourself, "
            "or train a drafter with fewer layers."
        )
    return ids


class DFlashDraftConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DFlashDraftModel`].

    Args:
        block_size (`int`, defaults to 16): Tokens of a block, the known anchor included.
        mask_token_id (`int`): Id whose embedding fills the unknown slots; must lie inside the target's embedding.
        target_layer_ids (`list[int]`): Id `i` means the output of the target's decoder layer `i`. Default: the
            paper's rule for `num_target_layers` and `num_hidden_layers`.
        num_target_layers (`int`): Depth of the target.
        target_hidden_size (`int`): Width of one target feature. Default: `hidden_size`.
        layer_types (`list[str]`): `"full_attention"` or `"sliding_attention"` for each draft layer.
        sliding_window (`int`): Keys that a query of a sliding layer sees, itself included.
        is_causal (`bool`): Causality *inside* the block for all layers. Absent: sliding layers are causal, full layers
            bidirectional.
        dflash_config (`dict`): The nested form of the keys above; unknown keys in it are kept for re-saving.

    The remaining arguments are those of Qwen3. Saved files name `model_type: qwen3`, which inference engines know.

    Raises:
        `ValueError`: names key, value and remedy.
    """

    model_type = "dflash"
    has_no_defaults_at_init = True
    default_theta = 10_000.0
    base_model_fsdp_plan = {"layers.*": "free_full_weight", "norm": "keep_full_weight"}

    vocab_size: int | None = None
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    use_sliding_window: bool | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    dflash_config: dict | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        if not isinstance(self.dflash_config, dict | None):
            raise ValueError(
                f"dflash_config={self.dflash_config!r} must be a dictionary such as "
                '{"target_layer_ids": [1, 9, 17], "mask_token_id": 151669}.'
            )
        nested = copy.deepcopy(self.dflash_config or {})
        for key, field in _NESTED_KEYS.items():
            if nested.get(key) is not None:
                setattr(self, field, nested.pop(key))
        use_swa = nested.pop("use_swa", None)
        self.dflash_config = nested

        self._check_sizes()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.layer_types is None:
            window_everywhere = use_swa or (use_swa is None and self.use_sliding_window and self.sliding_window)
            kind = "sliding_attention" if window_everywhere else "full_attention"
            self.layer_types = [kind] * self.num_hidden_layers
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        self.rope_parameters = copy.deepcopy(self.rope_parameters)
        self._check_layers()
        self._check_tokens()
        super().__post_init__(**kwargs)

    @classmethod
    def for_target(cls, target_config, mask_token_id: int, num_hidden_layers: int = 5, block_size: int = 16, **kwargs):
        """
        A fresh drafter's configuration for a target: its width, vocabulary, rotary embedding and length, Qwen3-style
        layers.

        Args:
            target_config (`PreTrainedConfig`): Configuration of the target; of a multimodal one, its text part is used.
            mask_token_id (`int`): An id inside the target's embedding that its text never uses.
            num_hidden_layers (`int`): Draft layers.
            block_size (`int`): Tokens of a block, anchor included.
            kwargs: Any other field of the configuration, e.g. `target_layer_ids`.
        """
        text = target_config.get_text_config()
        rope = copy.deepcopy(getattr(text, "rope_parameters", None)) or {}
        # Per-layer-type rotary tables (Gemma): the drafter takes the one of the full-attention layers.
        rope = rope.get("full_attention", rope)
        if rope.get("partial_rotary_factor") is not None or rope.get("rope_type") not in (None, "default"):
            plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta", cls.default_theta)}
            rope = plain if rope.get("rope_type") not in ("yarn", "llama3", "linear") else rope
            rope.pop("partial_rotary_factor", None)
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        fields = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": getattr(text, "intermediate_size", None) or 3 * text.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": head_dim,
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "max_position_embeddings": getattr(text, "max_position_embeddings", 32768),
            "rope_parameters": rope or None,
            "num_target_layers": text.num_hidden_layers,
            "num_hidden_layers": num_hidden_layers,
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "bos_token_id": text.bos_token_id,
            "eos_token_id": text.eos_token_id,
            "pad_token_id": text.pad_token_id,
        }
        return cls(**{**fields, **kwargs})

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As upstream; a drafter's folder says `model_type: qwen3`, which is no reason to warn."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return {**config_dict, "model_type": cls.model_type}, kwargs

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` is causal inside the block (context keys are always in the past)."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer_idx] == "sliding_attention"

    def to_dict(self) -> dict:
        """The written form: nested and top-level keys, all three rotary spellings, a model type that engines know."""
        output = super().to_dict()
        output["model_type"] = "qwen3"
        output["architectures"] = output.get("architectures") or ["DFlashDraftModel"]
        nested = {**self.dflash_config, "block_size": self.block_size, "mask_token_id": self.mask_token_id}
        nested["target_layer_ids"] = self.target_layer_ids
        output["dflash_config"] = nested
        if self.is_causal is None:
            output.pop("is_causal", None)
        # Qwen3Config drops the window of a reader that does not find this flag.
        output["use_sliding_window"] = "sliding_attention" in self.layer_types
        rope = copy.deepcopy(self.rope_parameters)
        if rope:
            output["rope_theta"] = rope["rope_theta"]
            scaled = rope.get("rope_type", "default") != "default"
            output["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None
        return output

    def to_diff_dict(self) -> dict:
        """What `config.json` holds; engines of different ages read `dtype` or `torch_dtype`."""
        output = super().to_diff_dict()
        if output.get("dtype") is not None:
            output["torch_dtype"] = output["dtype"]
        return output

    def _check_sizes(self):
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "vocab_size",
            "num_target_layers",
            "target_hidden_size",
            "sliding_window",
        ):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(
                    f"{key}={value!r} must be a positive integer; correct it in the drafter's config.json."
                )
        if not isinstance(self.block_size, int) or isinstance(self.block_size, bool) or self.block_size < 2:
            raise ValueError(
                f"block_size={self.block_size!r} must be an integer of at least 2: the anchor and one drafted token."
            )
        if self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}."
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                "pass `head_dim`."
            )

    def _check_layers(self):
        if len(self.layer_types) != self.num_hidden_layers or any(t not in _LAYER_TYPES for t in self.layer_types):
            raise ValueError(
                f"layer_types={self.layer_types} must name one of {_LAYER_TYPES} for each of the "
                f"num_hidden_layers={self.num_hidden_layers} draft layers."
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError(
                f"sliding_window=None, but layer_types={self.layer_types} holds sliding layers; set `sliding_window` to "
                "the number of keys they see."
            )
        ids = self.target_layer_ids
        if ids is None:
            raise ValueError(
                "target_layer_ids is missing: set it in `dflash_config` or at the top level, or set `num_target_layers` "
                "for the default rule."
            )
        integers = isinstance(ids, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if not integers or not ids or len(set(ids)) != len(ids) or min(ids) < 0:
            raise ValueError(f"target_layer_ids={ids!r} must be a list of distinct layer numbers, counted from 0.")
        if self.num_target_layers is not None and max(ids) >= self.num_target_layers:
            raise ValueError(
                f"target_layer_ids={ids} reach past the last layer of a target with "
                f"num_target_layers={self.num_target_layers}: the highest id is {self.num_target_layers - 1}."
            )
        self.target_layer_ids = list(ids)

    def _check_tokens(self):
        value = self.mask_token_id
        if value is None:
            raise ValueError(
                "mask_token_id is missing: set it in `dflash_config` or at the top level to an id inside the target's "
                "embedding that text never uses."
            )
        inside = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not inside or (self.vocab_size is not None and value >= self.vocab_size):
            raise ValueError(
                f"mask_token_id={value!r} lies outside the vocabulary (vocab_size={self.vocab_size}); choose an id inside "
                "the target's embedding, or resize that embedding first."
            )
