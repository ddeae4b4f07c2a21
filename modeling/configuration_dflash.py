"""Configuration of a DFlash drafter: every published spelling in, one layout out, checked once at construction."""

import copy
from dataclasses import fields
from itertools import chain

from transformers import PreTrainedConfig
from transformers.utils import logging

from .checks_dflash import (
    LAYER_TYPES,
    check_fields,
    check_layers,
    check_nested,
    check_parts,
    check_quantization,
    check_rope,
    check_rope_is_one_table,
    check_tokens,
    parts_by_sizes,
)
from .head_dflash import Head
from .heads_dflash import HEADS, head_fields
from .layouts_dflash import (
    NESTED_KEYS,
    canonical_config,
    default_target_layer_ids,
    fitting_target_layer_ids,
    nested_fields,
)
from .target_dflash import text_depth


logger = logging.get_logger(__name__)
# Keys of `dflash_config` that set a field in another form.
_IMPLIED_FIELDS = {"causal": "is_causal", "causal_head": "is_causal", "use_swa": "layer_types"}
# Of these and the heads' fields, those that engines read only nested are written only if they differ from the default.
_WRITTEN_TWICE = (
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "swa_window_size", "has_embed_tokens"),
)
# Keys of a file that would select other files, code or execution options; only the caller may set these.
_IGNORED = (
    *("model_type", "num_labels", "transformers_weights", "attn_implementation", "experts_implementation"),
    *("fusion_config", "distributed_config"),
)


class DFlashDraftConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DFlashDraftModel`].

    Args:
        block_size (`int`, defaults to 16): Slots of a block, including that of the known anchor.
        sample_from_anchor (`bool`): Whether slot `k` of a block predicts the token at `anchor + 1 + k`, the anchor's
            own slot included (DSpark), instead of the token at `anchor + k`.
        mask_token_id (`int`): Id whose embedding fills the unknown slots; must lie inside the target's embedding.
        target_layer_ids (`list[int]`): Id `i` means the output of the target's decoder layer `i`, -1 the input of the
            first. Default: the paper's rule for `num_target_layers` and `num_hidden_layers`.
        num_target_layers (`int`): Depth of the target.
        target_hidden_size (`int`): Width of one target feature. Default: `hidden_size`.
        layer_types (`list[str]`): `"full_attention"` or `"sliding_attention"` for each draft layer.
        sliding_window (`int`): Keys that a query of a sliding layer sees, itself included.
        is_causal (`bool`): Causality *inside* the block for all layers. Absent: sliding layers are causal, full layers
            bidirectional.
        draft_vocab_size (`int`): Size of a reduced vocabulary, for which the drafter has its own head.
        conv_kernel_size, conv_group_size (`int`): DFlash 2's convolution around every sublayer: taps, and channels
            that share a dynamic kernel. Absent: no convolution.
        selector_rank, selector_top_k (`int`): DFlash 2's path selector, see [`PathSelector`]. Absent: no selector. A
            head's fields are documented, checked and given defaults in its own file.
        output_multiplier, final_logit_softcapping (`float`): Draft logits are `cap * tanh(logits * multiplier / cap)`.
        input_embedding_scale (`float`): Multiplies the target's raw embeddings of a block.
        attention_sink_bias (`bool`): A learned logit per attention head that takes part in the softmax only.
        attention_value_scale (`float`): Multiplies the values.
        v_head_dim (`int`): Size of a head's values. Default: `head_dim`.
        backbone_rotary_base (`float`): Rotary base of the context's keys. Default: the block's rotary base.
        own_mask_embedding (`bool`): Whether the drafter has its own mask embedding instead of the target's.
        has_embed_tokens (`bool`): Whether the drafter has its own embedding table over the target's vocabulary.
        dflash_config (`dict`): The nested form of the keys above, as engines read it; derived from the fields.
            Unknown keys are kept for re-saving. JetSpec's `causal_head: true` is another name for `is_causal: true`.

    Heads are rotated partially if `rope_parameters` has `partial_rotary_factor`, or `rope_dim`, in channels. The
    remaining arguments are those of Qwen3. Saved files have `model_type: qwen3`, which inference engines know.

    Raises:
        `ValueError`: names key, value and remedy.
    """

    model_type = "dflash"
    has_no_defaults_at_init = True
    default_theta = 10_000.0
    ignore_keys_at_rope_validation = {"rope_dim"}  # the engines' key, next to upstream's `partial_rotary_factor`
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
    sample_from_anchor: bool = False
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    attention_sink_bias: bool = False
    attention_value_scale: float = 1.0
    v_head_dim: int | None = None
    backbone_rotary_base: float | None = None
    own_mask_embedding: bool = False
    has_embed_tokens: bool = False
    dflash_config: dict | None = None
    source_layout: str | None = None
    interleaved_rotary: bool = False  # layout of the file; rows are permuted on loading
    tie_word_embeddings: bool | None = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        for field, default in head_fields().items():
            value = kwargs.pop(field, None)
            setattr(self, field, default if value is None else value)
        if self.dtype is None:
            self.dtype = kwargs.get("torch_dtype")
        use_swa = self._read_nested()
        self._settle_defaults()
        check_fields(self)
        self._derive_fields(use_swa, kwargs.get("max_window_layers") or 0)
        check_rope_is_one_table(self.rope_parameters, kwargs.get("rope_scaling"))
        check_layers(self)
        check_tokens(self)
        check_parts(self)
        super().__post_init__(**kwargs)
        check_rope(self)
        check_quantization(self)

    def _read_nested(self) -> bool | None:
        """Set the fields from `dflash_config`; returns its `use_swa`, which is no field."""
        nested = self.__dict__["dflash_config"]
        check_nested(nested)
        nested = copy.deepcopy(nested)
        for key, field in nested_fields().items():
            if nested.get(key) is not None:
                setattr(self, field, nested.pop(key))
        # Here the top level wins: SGLang reads nothing else, vLLM reads it first.
        causal = nested.pop("causal", None)
        if self.is_causal is None:
            self.is_causal = causal
        elif causal not in (None, self.is_causal):
            logger.warning_once(
                f"is_causal={self.is_causal} and dflash_config.causal={causal} contradict each other: both say "
                "whether every layer is causal inside the block. is_causal wins, as in the engines; if few drafts are "
                f"accepted, load the drafter with `is_causal={causal}`."
            )
        if nested.get("causal_head"):
            if self.is_causal is not None and not self.is_causal:
                raise ValueError(
                    f"dflash_config.causal_head={nested['causal_head']!r} and is_causal={self.is_causal} contradict "
                    "each other: both say whether every layer is causal inside the block. Remove one."
                )
            self.is_causal = nested["causal_head"]
        use_swa = nested.pop("use_swa", None)
        self.dflash_config = nested
        return use_swa

    def _settle_defaults(self) -> None:
        """A null is a field's default, and a 0 of an optional part is none, as engines write it."""
        for key in ("final_logit_softcapping", *chain(*parts_by_sizes())):
            if getattr(self, key) == 0:
                setattr(self, key, None)
        for key in (
            *("sample_from_anchor", "output_multiplier", "input_embedding_scale", "attention_value_scale"),
            "attention_dropout",
        ):
            if getattr(self, key) is None:
                setattr(self, key, getattr(type(self), key))
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None

    def _derive_fields(self, use_swa: bool | None, first_sliding: int) -> None:
        """The fields that follow from others, unless they are set."""
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.v_head_dim = self.v_head_dim or self.head_dim
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        if self.layer_types is None:
            if not isinstance(first_sliding, int):
                raise ValueError(f"max_window_layers={first_sliding!r} must be a number; or set `layer_types`.")
            slides = bool(use_swa is None and self.use_sliding_window and self.sliding_window)
            self.layer_types = [LAYER_TYPES[slides and i >= first_sliding] for i in range(self.num_hidden_layers)]
        if use_swa and isinstance(self.layer_types, list | tuple) and "sliding_attention" not in self.layer_types:
            # Forces the window on every layer, even full ones, which stay bidirectional in the block.
            self.layer_types = ["sliding_attention"] * self.num_hidden_layers
            self.is_causal = bool(self.is_causal)
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        self.rope_parameters = copy.deepcopy(self.rope_parameters)

    @classmethod
    def for_target(cls, target_config, mask_token_id: int, num_hidden_layers: int = 5, block_size: int = 16, **kwargs):
        """
        A fresh drafter's configuration for a target: the target's width, vocabulary, rotary embedding and length, and
        Qwen3-style layers.

        Args:
            target_config (`PreTrainedConfig`): Configuration of the target; of a multimodal target, its text part.
            mask_token_id (`int`): An id inside the target's embedding that its text never uses.
            num_hidden_layers (`int`): Draft layers.
            block_size (`int`): Tokens of a block, anchor included.
            kwargs: Any other field of the configuration. By default, `target_layer_ids` follow the paper's rule, for
                as many target layers as the drafter has layers, or as fit.

        Raises:
            `ValueError`: the target's embedding and head, both shared by a drafter, have different widths.
        """
        text = target_config.get_text_config()
        width = getattr(text, "embedding_size", None) or getattr(text, "word_embed_proj_dim", None) or text.hidden_size
        narrow, wide = (getattr(text, f"{side}_embedding_size", width) for side in ("input", "output"))
        if narrow != wide:
            raise ValueError(
                f"{type(text).__name__} has input_embedding_size={narrow} and output_embedding_size={wide}, but a "
                "drafter shares the target's embedding and head, in one width: this target cannot have a drafter."
            )
        rope = copy.deepcopy(getattr(text, "rope_parameters", None)) or {}
        # Tables by layer type (Gemma): the drafter uses that of the full-attention layers, if they rotate at all.
        tables = [table for table in rope.values() if isinstance(table, dict)]
        rope = rope.get("full_attention") or (tables[0] if tables else rope)
        if rope.get("partial_rotary_factor") is not None or rope.get("rope_type") not in (None, "default"):
            plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta", cls.default_theta)}
            rope = plain if rope.get("rope_type") not in ("yarn", "llama3", "linear") else rope
            rope.pop("partial_rotary_factor", None)
        # Layers of several shapes (Gemma 4): the drafter uses the shape of the first.
        layer = (getattr(text, "per_layer_config", None) or [text])[0]
        heads = getattr(layer, "num_attention_heads", None) or max(text.hidden_size // 128, 1)
        head_dim = getattr(layer, "head_dim", None) or text.hidden_size // heads
        inner = getattr(layer, "intermediate_size", None) or 3 * width
        length = getattr(text, "max_position_embeddings", 0)
        ids = {  # in a wrapper, next to its text configuration
            name: next((getattr(c, name) for c in (text, target_config) if getattr(c, name, None) is not None), None)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        fields = {
            "vocab_size": text.vocab_size,
            "hidden_size": width,
            "target_hidden_size": text.hidden_size,
            "intermediate_size": inner[0] if isinstance(inner, list) else inner,  # Gemma 3n has one per layer
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or heads,
            "head_dim": head_dim,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": length if length > 0 else 32768,  # XLNet, which has no limit, says -1
            "rope_parameters": rope or None,
            "num_target_layers": text_depth(target_config),
            "num_hidden_layers": num_hidden_layers,
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            **ids,
        }
        if kwargs.get("target_layer_ids") is None:
            kwargs["target_layer_ids"] = fitting_target_layer_ids(fields["num_target_layers"], num_hidden_layers)
        return cls(**{**fields, **kwargs})

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As upstream, without a warning about `model_type: qwen3` in a drafter's folder."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return {**config_dict, "model_type": cls.model_type}, kwargs

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """
        As upstream, from any published layout.

        Raises:
            `ValueError`: names the file and the problem.
            `OSError`: the file is missing or not JSON.
        """
        try:
            return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        except OSError:
            raise
        except Exception as error:  # upstream's own validation raises many types
            raise ValueError(f"config.json of {pretrained_model_name_or_path}: {error}") from error

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As upstream, from any published layout; see `layouts_dflash`."""
        canonical = canonical_config({**config_dict, "model_type": config_dict.get("model_type", cls.model_type)})
        names = cls.field_names()
        # The caller's arguments override the file, including what is implied by its nested form.
        changes = {key: kwargs.pop(key) for key in list(kwargs) if key in names and key != "dtype"}
        nested = {k: v for k, v in canonical["dflash_config"].items() if _IMPLIED_FIELDS.get(k) not in changes}
        canonical |= {"dflash_config": nested, **changes}
        # Nor may a file replace a method.
        known = {
            key: value for key, value in canonical.items() if key in (*names, "rope_scaling") or not hasattr(cls, key)
        }
        return super().from_dict({key: value for key, value in known.items() if key not in _IGNORED}, **kwargs)

    @classmethod
    def field_names(cls) -> set[str]:
        """Names of all fields, including the heads'."""
        return {field.name for field in fields(cls)} | set(head_fields())

    @property
    def head(self) -> type[Head]:
        """Class of the drafter's head, which turns hidden states into tokens."""
        return next((head for head in HEADS if head.is_set(lambda field: getattr(self, field, None))), Head)

    @property
    def has_head(self) -> bool:
        """Whether anything but the draft logits chooses the tokens of a block."""
        return self.head is not Head

    @property
    def block_tokens(self) -> int:
        """Tokens of a drafted block, anchor included: the most that one forward of the target verifies."""
        return self.block_size + (self.sample_from_anchor and self.head.drafts_last_slot)

    @property
    def has_own_head(self) -> bool:
        """Whether the drafter has its own head, over a reduced vocabulary."""
        return self.draft_vocab_size is not None

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` is causal inside the block (context keys are always in the past)."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer_idx] == "sliding_attention"

    def by_layer_type(self, make) -> dict:
        """`{layer_type: make(window, is_causal)}`, for values shared by all layers of a type, such as masks."""
        made = {}
        for layer_idx, layer_type in enumerate(self.layer_types):
            if layer_type not in made:
                window = self.sliding_window if layer_type == "sliding_attention" else None
                made[layer_type] = make(window, self.layer_is_causal(layer_idx))
        return made

    def to_dict(self) -> dict:
        """The written form: nested and top-level keys, both rotary spellings, a model type that engines know."""
        output = super().to_dict()
        output["model_type"] = "qwen3"
        plain = not self.has_head and self.conv_kernel_size is not None
        output["architectures"] = ["DFlash2DraftModel" if plain else self.head.architecture]
        del output["source_layout"], output["interleaved_rotary"]
        for key in _written_nested():
            del output[key]
        output["dflash_config"] = copy.deepcopy(self.dflash_config)
        self.head.write(output, self)
        unsaid = {"is_causal": None, "draft_vocab_size": None, "v_head_dim": self.head_dim, "has_embed_tokens": False}
        for key, default in unsaid.items():
            if output[key] == default:
                del output[key]
        # Without this flag Qwen3Config drops the window.
        output["use_sliding_window"] = "sliding_attention" in self.layer_types
        # No `rope_scaling`: it is now an alias of `rope_parameters`, and vLLM sets these keys one after the other.
        at_top = ("rope_theta", "partial_rotary_factor")
        return output | {key: value for key, value in self.rope_parameters.items() if key in at_top}

    def to_diff_dict(self) -> dict:
        """The content of `config.json`, with the names that transformers 4 expects too."""
        output = super().to_diff_dict()
        if output.get("dtype") is not None:
            output["torch_dtype"] = output["dtype"]
        if self.rope_parameters["rope_type"] != "default":  # transformers 5.24 warns of `rope_scaling`, null too
            scaling = {key: value for key, value in self.rope_parameters.items() if key != "rope_theta"}
            output["rope_scaling"] = copy.deepcopy(scaling)
        return output


def _written_nested() -> dict:
    """The fields that are written only in `dflash_config`, and their defaults."""
    own = [key for key in NESTED_KEYS if key not in _WRITTEN_TWICE]
    return {key: getattr(DFlashDraftConfig, key) for key in own} | head_fields()


def _nested_keys(config: DFlashDraftConfig) -> dict:
    """
    The complete `dflash_config`: SGLang uses the object that remote code creates, and reads these keys only here. Keys
    with a field have the field's value; others are kept as they are, and may be changed in place.
    """
    nested = config.__dict__["dflash_config"]
    nested |= {key: getattr(config, key) for key in ("block_size", "mask_token_id", "target_layer_ids")}
    for key, default in _written_nested().items():
        value = getattr(config, key)
        nested.pop(key, None)
        if value != default:
            nested[key] = value
    if "causal_head" in nested:
        nested["causal_head"] = bool(config.is_causal)
    nested |= config.head.nested(config)
    return nested


def _set_nested_keys(config: DFlashDraftConfig, nested: dict | None) -> None:
    config.__dict__["dflash_config"] = {} if nested is None else nested


# Set here because in the class body it would become the field's default.
DFlashDraftConfig.dflash_config = property(_nested_keys, _set_nested_keys)  # type: ignore[assignment]
