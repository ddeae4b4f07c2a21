"""
Configuration of a DFlash drafter, in the one layout that is written.

A *slot* is a position of the drafter's block, and `block_size` (`B`) counts slots: slot 0 holds the *anchor*, the last
committed token, the others hold mask tokens. What one round verifies is counted in *tokens*, anchor included: at most
`max_block_tokens`. That is `B`, or `B + 1` if the anchor's slot drafts a token, too (`sample_from_anchor`). So a block
drafts `max_block_tokens - 1` tokens, which inference engines call `num_speculative_tokens`.
"""

import copy
from dataclasses import fields

from transformers import PreTrainedConfig

from .head_dflash import TokenHead
from .heads_dflash import TOKEN_HEADS, head_fields


VERSION = "0.3.0.dev0"  # of this code, in every `config.json` that it writes

LAYER_TYPES = ("full_attention", "sliding_attention")
CONVOLUTION_KEYS = ("conv_kernel_size", "conv_group_size")
# Keys that some projects nest in `dflash_config` and others keep at the top level. Nested ones win, as in the engines.
_SAME_NAME = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "conv_kernel_size",
    "conv_group_size",
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
    "attention_sink_bias",
    "attention_value_scale",
    "backbone_rotary_base",
    "own_mask_embedding",
    "has_embed_tokens",
)
# Key in `dflash_config` -> field of the configuration.
NESTED_KEYS = {"swa_window_size": "sliding_window", **{key: key for key in _SAME_NAME}}
# Those that are written at the top level. The others, and the token heads' fields, are written in `dflash_config`, and
# only if they differ from the default.
_TOP_LEVEL_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "swa_window_size",
    "has_embed_tokens",
)
# Keys of a file that are ignored: its version, and those that would select other files, code or execution options,
# which only the caller may select.
_IGNORED = (
    "model_type",
    "num_labels",
    "transformers_weights",
    "attn_implementation",
    "experts_implementation",
    "fusion_config",
    "distributed_config",
    "dflash_hf_version",
)


def part_keys() -> tuple[str, ...]:
    """Fields of a drafter's optional parts: DFlash 2's convolution, and a token head."""
    return (*CONVOLUTION_KEYS, *head_fields())


def parts_by_sizes() -> tuple[tuple[str, ...], ...]:
    """The fields of each optional part that are sizes. A file says 0 if it lacks the part."""
    return (CONVOLUTION_KEYS, *(head.sizes for head in TOKEN_HEADS))


def nested_fields() -> dict[str, str]:
    """Key in `dflash_config` -> field, for all keys that have one."""
    return {**NESTED_KEYS, **{field: field for field in head_fields()}}


class DFlashDraftConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DFlashDraftModel`].

    Args:
        block_size (`int`, defaults to 16): Slots of a block, including that of the anchor.
        sample_from_anchor (`bool`): Whether slot `k` of a block predicts the token at `anchor + 1 + k`, the anchor's
            own slot included (DSpark), instead of the token at `anchor + k`.
        mask_token_id (`int`): Id whose embedding fills all slots but the anchor's; a row of the target's embedding.
        target_layer_ids (`list[int]`): Id `i` means the output of the target's decoder layer `i`, -1 the input of the
            first. Default: the paper's rule for `num_target_layers` and `num_hidden_layers`.
        num_target_layers (`int`): Depth of the target.
        target_hidden_size (`int`): Width of one target feature. Default: `hidden_size`.
        layer_types (`list[str]`): `"full_attention"` or `"sliding_attention"` for each draft layer.
        sliding_window (`int`): Keys that a query of a sliding layer sees, itself included.
        is_causal (`bool`): Causality *inside* the block for all layers. Absent: sliding layers are causal, full layers
            bidirectional.
        draft_vocab_size (`int`): Size of a reduced vocabulary, for which the drafter has its own LM head.
        conv_kernel_size, conv_group_size (`int`): DFlash 2's convolution around every sublayer: taps, and channels
            that share a dynamic kernel. Absent: no convolution.
        selector_rank, selector_top_k (`int`): DFlash 2's path selector, see [`PathSelector`]. Absent: no selector. The
            fields of the other token heads are documented in their files.
        output_multiplier, final_logit_softcapping (`float`): Draft logits are `cap * tanh(logits * multiplier / cap)`.
        input_embedding_scale (`float`): Multiplies the target's raw embeddings of a block.
        attention_sink_bias (`bool`): A learned logit per attention head that takes part in the softmax only.
        attention_value_scale (`float`): Multiplies the values.
        v_head_dim (`int`): Size of a head's values. Default: `head_dim`.
        backbone_rotary_base (`float`): Rotary base of the context's keys. Default: the block's rotary base.
        own_mask_embedding (`bool`): Whether the drafter has its own mask embedding instead of the target's.
        has_embed_tokens (`bool`): Whether the drafter has its own embedding table over the target's vocabulary.
        trained_length (`int`): Tokens of the longest training text. Absent: unknown; the whole text is then seen.
        dflash_config (`dict`): The nested form of the keys above, as engines read it; derived from the fields.
            Unknown keys are kept for re-saving.

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
    trained_length: int | None = None
    dflash_config: dict | None = None
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
        self._read_nested(kwargs)
        self._derive_fields(kwargs)
        super().__post_init__(**kwargs)

    def _read_nested(self, kwargs: dict) -> None:
        """Set the fields from `dflash_config`, whose other keys are kept. `kwargs`: arguments without a field."""
        nested = copy.deepcopy(self.__dict__["dflash_config"])
        for key, field in nested_fields().items():
            if nested.get(key) is not None:
                setattr(self, field, nested.pop(key))
        if nested.get("shift_label") is not None:  # Domino's name of the field
            self.sample_from_anchor = nested.pop("shift_label")
        self.dflash_config = nested
        for sizes in parts_by_sizes():
            for key in sizes:
                if getattr(self, key) == 0:
                    setattr(self, key, None)

    def _derive_fields(self, kwargs: dict) -> None:
        """The fields that follow from others, unless they are set."""
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.v_head_dim = self.v_head_dim or self.head_dim
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        if self.layer_types is None:
            self.layer_types = [LAYER_TYPES[0]] * self.num_hidden_layers
        self.rope_parameters = copy.deepcopy(self.rope_parameters)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As upstream, without a warning about `model_type: qwen3` in a drafter's folder."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return {**config_dict, "model_type": cls.model_type}, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As upstream; a file can neither set a key of `_IGNORED` nor replace a method."""
        names = cls.field_names()
        # The caller's arguments override the file, its nested form included.
        changes = {key: kwargs.pop(key) for key in list(kwargs) if key in names and key != "dtype"}
        nested = config_dict.get("dflash_config") or {}
        nested = {key: value for key, value in nested.items() if nested_fields().get(key) not in changes}
        names = {*names, "rope_scaling"}
        accepted = {
            key: value
            for key, value in config_dict.items()
            if key not in _IGNORED and (key in names or not hasattr(cls, key))
        }
        return super().from_dict({**accepted, "dflash_config": nested, **changes}, **kwargs)

    @classmethod
    def field_names(cls) -> set[str]:
        """Names of all fields, including the heads'."""
        return {field.name for field in fields(cls)} | set(head_fields())

    @property
    def token_head_class(self) -> type[TokenHead]:
        """Class of the drafter's token head; [`TokenHead`] itself takes the argmax of the draft logits."""
        for head in TOKEN_HEADS:
            if head.is_set(lambda field: getattr(self, field, None)):
                return head
        return TokenHead

    @property
    def has_token_head(self) -> bool:
        """Whether the tokens of a block are chosen by a token head, rather than by the draft logits alone."""
        return self.token_head_class is not TokenHead

    @property
    def max_block_tokens(self) -> int:
        """Tokens of a whole block, anchor included: what one forward of the target verifies."""
        if self.sample_from_anchor and self.token_head_class.drafts_last_slot:
            return self.block_size + 1
        return self.block_size

    @property
    def has_own_lm_head(self) -> bool:
        """Whether the drafter has its own LM head, over a reduced vocabulary, instead of the target's."""
        return self.draft_vocab_size is not None

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` is causal inside the block (context keys are always in the past)."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer_idx] == "sliding_attention"

    def by_layer_type(self, make) -> dict:
        """
        Layer type -> `make(window, is_causal)`, for what all layers of a type share, such as a mask. `window`: tokens
        that a query sees, or `None`; `is_causal`: whether a slot sees only the slots before it and itself.
        """
        values = {}
        for layer_idx, layer_type in enumerate(self.layer_types):
            if layer_type not in values:
                window = self.sliding_window if layer_type == "sliding_attention" else None
                values[layer_type] = make(window, self.layer_is_causal(layer_idx))
        return values

    def to_dict(self) -> dict:
        """The written form: nested and top-level keys, both rotary spellings, a model type that engines know."""
        output = super().to_dict()
        output["model_type"] = "qwen3"
        architecture = self.token_head_class.architecture
        if self.conv_kernel_size is not None and not self.has_token_head:
            architecture = "DFlash2DraftModel"
        output["architectures"] = [architecture]
        for key in _written_nested():
            del output[key]
        output["dflash_config"] = copy.deepcopy(self.dflash_config)
        self.token_head_class.write_config(output, self)
        written_unless_default = {
            "is_causal": None,
            "draft_vocab_size": None,
            "v_head_dim": self.head_dim,
            "has_embed_tokens": False,
        }
        for key, default in written_unless_default.items():
            if output[key] == default:
                del output[key]
        if not self.trained_length:  # 0: a new drafter, not trained yet
            del output["trained_length"]
        # Without this flag Qwen3Config drops the window.
        output["use_sliding_window"] = "sliding_attention" in self.layer_types
        # No `rope_scaling`: it is now an alias of `rope_parameters`, and vLLM sets these keys one after the other.
        top_level = ("rope_theta", "partial_rotary_factor")
        return output | {key: value for key, value in self.rope_parameters.items() if key in top_level}

    def to_diff_dict(self) -> dict:
        """The content of `config.json`, with the names that transformers 4 expects too."""
        output = super().to_diff_dict()
        output["dflash_hf_version"] = VERSION
        if output.get("dtype") is not None:
            output["torch_dtype"] = output["dtype"]
        if self.rope_parameters["rope_type"] != "default":  # transformers 5.24 warns of `rope_scaling`, null too
            scaling = {key: value for key, value in self.rope_parameters.items() if key != "rope_theta"}
            output["rope_scaling"] = copy.deepcopy(scaling)
        return output


def _written_nested() -> dict:
    """The fields that are written in `dflash_config` and not at the top level, and their defaults."""
    keys = [key for key in NESTED_KEYS if key not in _TOP_LEVEL_KEYS]
    return {key: getattr(DFlashDraftConfig, key) for key in keys} | head_fields()


def _nested_keys(config: DFlashDraftConfig) -> dict:
    """
    Getter of `dflash_config`, complete even if no file was read: SGLang uses the object that remote code creates, and
    reads these keys only here. Keys that have a field get the field's value; others are kept, and may be changed in
    place.
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
    nested |= config.token_head_class.extra_nested_keys(config)
    return nested


def _set_nested_keys(config: DFlashDraftConfig, nested: dict | None) -> None:
    """Setter of `dflash_config`; fields are set from it at construction only."""
    config.__dict__["dflash_config"] = {} if nested is None else nested


# A property of a dataclass field: in the class body it would become the field's default.
DFlashDraftConfig.dflash_config = property(_nested_keys, _set_nested_keys)  # type: ignore[assignment]
