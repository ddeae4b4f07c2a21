"""
Configuration of a DFlash drafter, in the one layout that is written.

A *slot* is a position of the drafter's block, and `block_size` (`B`) counts slots: slot 0 holds the *anchor*, the last
committed token, the others hold mask tokens. What one round verifies is counted in *tokens*, anchor included: at most
`max_block_tokens`. That is `B`, or `B + 1` if the anchor's slot also drafts a token (`sample_from_anchor`). So a block
drafts `max_block_tokens - 1` tokens, which inference engines call `num_speculative_tokens`.

Most keys of a `config.json` are fields at the top level. Those that may be nested in `dflash_config`, or are not
always written, are in one table, `config_keys`. A file is read in this order:

1. `from_dict`: keys of `_IGNORED` are dropped, and the caller's arguments replace the file's keys, nested ones too.
2. The constructor sets the fields from the top level.
3. `_read_nested`: keys in `dflash_config` set their fields, and so win over the top level.
4. `_derive_fields`: fields that are still unset follow from others.

`to_dict` writes in this order: the fields at the top level, without those that are nested or have their default;
`dflash_config`; then the token head rewrites its own keys, as engines read them. `to_diff_dict` adds the names that
transformers 4 expects.
"""

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

from transformers import PreTrainedConfig

from .head_dflash import TokenHead
from .heads_dflash import TOKEN_HEADS, head_fields


VERSION = "0.3.0.dev0"  # of this code, in every `config.json` that it writes

LAYER_TYPES = ("full_attention", "sliding_attention")
CONVOLUTION_KEYS = ("conv_kernel_size", "conv_group_size")
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
# Where a key is written.
TOP_LEVEL = "top level"
NESTED = "dflash_config"
BOTH = "both"


class ConfigKey(NamedTuple):
    """
    A key of `config.json` that may be nested in `dflash_config`, or is not always written.

    Attributes:
        field (`str`): The field of the configuration, and the key's name at the top level.
        nested_name (`str`, *optional*): The key's name in `dflash_config`, where some projects write it. If a file has
            it in both places, the nested one wins, as in the engines. `None`: it is read at the top level only.
        written (`str`): Where it is written: `TOP_LEVEL`, `NESTED` or `BOTH`.
        always_written (`bool`): Whether it is written even if the field has its default.
    """

    field: str
    nested_name: str | None
    written: str
    always_written: bool = False


_KEYS = (
    ConfigKey("block_size", "block_size", BOTH, always_written=True),
    ConfigKey("mask_token_id", "mask_token_id", BOTH, always_written=True),
    ConfigKey("target_layer_ids", "target_layer_ids", BOTH, always_written=True),
    ConfigKey("num_target_layers", "num_target_layers", TOP_LEVEL, always_written=True),
    ConfigKey("sliding_window", "swa_window_size", TOP_LEVEL, always_written=True),
    ConfigKey("has_embed_tokens", "has_embed_tokens", TOP_LEVEL),
    ConfigKey("is_causal", None, TOP_LEVEL),
    ConfigKey("draft_vocab_size", None, TOP_LEVEL),
    ConfigKey("v_head_dim", None, TOP_LEVEL),
    ConfigKey("conv_kernel_size", "conv_kernel_size", NESTED),
    ConfigKey("conv_group_size", "conv_group_size", NESTED),
    ConfigKey("output_multiplier", "output_multiplier", NESTED),
    ConfigKey("final_logit_softcapping", "final_logit_softcapping", NESTED),
    ConfigKey("input_embedding_scale", "input_embedding_scale", NESTED),
    ConfigKey("attention_sink_bias", "attention_sink_bias", NESTED),
    ConfigKey("attention_value_scale", "attention_value_scale", NESTED),
    ConfigKey("backbone_rotary_base", "backbone_rotary_base", NESTED),
    ConfigKey("own_mask_embedding", "own_mask_embedding", NESTED),
)


def config_keys() -> tuple[ConfigKey, ...]:
    """All keys that may be nested or are not always written: those above, and the token heads' fields."""
    return (*_KEYS, *(ConfigKey(field, field, NESTED) for field in head_fields()))


def nested_fields() -> dict[str, str]:
    """Key in `dflash_config` -> field, for all keys that may be nested."""
    return {key.nested_name: key.field for key in config_keys() if key.nested_name is not None}


def part_fields() -> tuple[str, ...]:
    """Fields of a drafter's optional parts: DFlash 2's convolution, and a token head."""
    return (*CONVOLUTION_KEYS, *head_fields())


def sizes_of_parts() -> tuple[tuple[str, ...], ...]:
    """The fields of each optional part that are sizes. A file says 0 if the drafter lacks the part."""
    return (CONVOLUTION_KEYS, *(head.sizes for head in TOKEN_HEADS))


class DFlashDraftConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DFlashDraftModel`].

    Args:
        block_size (`int`, defaults to 16): Slots of a block, the anchor's included.
        sample_from_anchor (`bool`): Whether slot `k` of a block predicts the token at `anchor + 1 + k`, the anchor's
            own slot included (DSpark), instead of the token at `anchor + k`. Default: false.
        mask_token_id (`int`): Id whose embedding fills all slots but the anchor's; a row of the target's embedding.
        target_layer_ids (`list[int]`): Id `i` means the output of the target's decoder layer `i`, -1 the input of the
            first. Default: the paper's rule for `num_target_layers` and `num_hidden_layers`.
        num_target_layers (`int`): Depth of the target.
        target_hidden_size (`int`): Width of one target feature. Default: `hidden_size`.
        layer_types (`list[str]`): `"full_attention"` or `"sliding_attention"` for each draft layer.
        sliding_window (`int`): Keys that a query of a sliding layer sees, itself included.
        is_causal (`bool`): Causality *inside* the block for all layers. `None`, the default: sliding layers are
            causal, full layers bidirectional.
        draft_vocab_size (`int`): Size of a reduced vocabulary, for which the drafter has its own LM head.
        conv_kernel_size, conv_group_size (`int`): DFlash 2's convolution around every sublayer: taps, and channels
            that share a dynamic kernel. `None`: no convolution.
        selector_rank, selector_top_k (`int`): DFlash 2's path selector, see [`PathSelector`]. `None`: no selector. The
            fields of the other token heads are documented in their files.
        output_multiplier, final_logit_softcapping (`float`): Draft logits are `cap * tanh(logits * multiplier / cap)`.
        input_embedding_scale (`float`): Multiplies the target's raw embeddings of a block.
        attention_sink_bias (`bool`): A learned logit per attention head that takes part in the softmax only.
        attention_value_scale (`float`): Multiplies the values.
        v_head_dim (`int`): Size of a head's values. Default: `head_dim`.
        backbone_rotary_base (`float`): Rotary base of the context's keys. Default: the block's rotary base.
        own_mask_embedding (`bool`): Whether the drafter has its own mask embedding instead of the target's.
        has_embed_tokens (`bool`): Whether the drafter has its own embedding table over the target's vocabulary.
        trained_length (`int`): Tokens of the longest training text. 0: not trained yet. `None`: unknown; the drafter
            then attends to the whole text.
        dflash_config (`dict`): The nested form of the keys above, as engines read it; derived from the fields at each
            access. Keys without a field are kept for re-saving; to change one, assign a changed dictionary.

    Only part of each attention head's channels is rotated if `rope_parameters` has `partial_rotary_factor`, or
    `rope_dim`, in channels. The remaining arguments are those of Qwen3. Saved files have `model_type: qwen3`, which
    inference engines know.

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
        """
        Set the fields from `dflash_config`, whose other keys are kept.

        Args:
            kwargs (`dict`): The constructor's arguments without a field, for subclasses, which may change it.
        """
        nested = copy.deepcopy(_stored_nested(self))
        for key, field in nested_fields().items():
            if nested.get(key) is not None:
                setattr(self, field, nested.pop(key))
        if nested.get("shift_label") is not None:  # Domino's name of the field
            self.sample_from_anchor = nested.pop("shift_label")
        self.dflash_config = nested
        for sizes in sizes_of_parts():
            for key in sizes:
                if getattr(self, key) == 0:
                    setattr(self, key, None)

    def _derive_fields(self, kwargs: dict) -> None:
        """Set the fields that follow from others, unless they are set; `kwargs` as for `_read_nested`."""
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
            if head.is_configured(vars(self)):
                return head
        return TokenHead

    @property
    def has_token_head(self) -> bool:
        """Whether a token head chooses the tokens of a block, instead of the argmax of the draft logits."""
        return self.token_head_class is not TokenHead

    @property
    def max_block_tokens(self) -> int:
        """Tokens of a whole block, anchor included: what one forward of the target verifies."""
        if self.sample_from_anchor and self.token_head_class.drafts_last_slot:
            return self.block_size + 1
        return self.block_size

    def num_slots(self, num_tokens: int) -> int:
        """Slots of a block of `num_tokens` tokens, anchor included; one slot fewer if the anchor's also drafts."""
        return num_tokens - (self.max_block_tokens - self.block_size)

    @property
    def has_own_lm_head(self) -> bool:
        """Whether the drafter has its own LM head, over a reduced vocabulary, instead of the target's."""
        return self.draft_vocab_size is not None

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` is causal inside the block (the context always precedes the block)."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer_idx] == "sliding_attention"

    def map_layer_types(self, make: Callable) -> dict:
        """
        Layer type -> `make(window, is_causal)`, for what all layers of a type share, such as a mask. `window`:
        tokens that a query sees, or `None`; `is_causal`: whether a slot sees only the slots before it and itself.
        """
        values = {}
        for layer_idx, layer_type in enumerate(self.layer_types):
            if layer_type not in values:
                window = self.sliding_window if layer_type == "sliding_attention" else None
                values[layer_type] = make(window, self.layer_is_causal(layer_idx))
        return values

    def to_dict(self) -> dict:
        """The content of `config.json`; see the top of this file for what is written where."""
        output = super().to_dict()
        output["model_type"] = "qwen3"
        architecture = self.token_head_class.architecture
        if self.conv_kernel_size is not None and not self.has_token_head:
            architecture = "DFlash2DraftModel"
        output["architectures"] = [architecture]
        for key in config_keys():
            is_omitted = not key.always_written and _has_default(self, key.field)
            if key.written == NESTED or is_omitted:
                del output[key.field]
        output["dflash_config"] = copy.deepcopy(self.dflash_config)
        self.token_head_class.write_config(output, self)
        if not self.trained_length:  # 0: a new drafter, not trained yet
            del output["trained_length"]
        # Without this flag Qwen3Config drops the window.
        output["use_sliding_window"] = "sliding_attention" in self.layer_types
        # No `rope_scaling`: it is now an alias of `rope_parameters`, and vLLM sets these keys one after the other.
        top_level = ("rope_theta", "partial_rotary_factor")
        return output | {key: value for key, value in self.rope_parameters.items() if key in top_level}

    def to_diff_dict(self) -> dict:
        """The content of `config.json`, also with the names that transformers 4 expects."""
        output = super().to_diff_dict()
        output["dflash_hf_version"] = VERSION
        if output.get("dtype") is not None:
            output["torch_dtype"] = output["dtype"]
        if self.rope_parameters["rope_type"] != "default":  # transformers 5.24 warns of `rope_scaling`, null too
            scaling = {key: value for key, value in self.rope_parameters.items() if key != "rope_theta"}
            output["rope_scaling"] = copy.deepcopy(scaling)
        return output


def _has_default(config: DFlashDraftConfig, field: str) -> bool:
    if field == "v_head_dim":
        default = config.head_dim
    elif field in head_fields():
        default = head_fields()[field]
    else:
        default = getattr(DFlashDraftConfig, field)
    return getattr(config, field) == default


class _NestedForm(dict):
    """
    What `config.dflash_config` returns: a snapshot. Changing it would not change the configuration, so every change in
    place is an error; a copy is an ordinary dictionary.
    """

    def _refuse_change(self, *args, **kwargs):
        raise TypeError(
            "A change of `config.dflash_config` in place would not change the configuration: set a field, such as "
            "`config.block_size`, or assign other keys: `config.dflash_config = {**config.dflash_config, key: value}`."
        )

    __setitem__ = _refuse_change
    __delitem__ = _refuse_change
    __ior__ = _refuse_change
    clear = _refuse_change
    pop = _refuse_change
    popitem = _refuse_change
    setdefault = _refuse_change
    update = _refuse_change

    def copy(self):
        return dict(self)

    def __reduce__(self):
        """Copies and pickles are dictionaries."""
        return dict, (dict(self),)


def _stored_nested(config: DFlashDraftConfig) -> dict:
    """`dflash_config` as it was assigned."""
    return config.__dict__["dflash_config"]


def _nested_form(config: DFlashDraftConfig) -> dict:
    """
    `config.dflash_config`: a new dictionary at each access, complete even if no file was read, since SGLang uses the
    object that remote code creates, and reads these keys only here. Keys that have a field get the field's value; the
    others are those that were assigned or read from a file.
    """
    nested = dict(_stored_nested(config))
    for key in config_keys():
        if key.nested_name is None or key.written == TOP_LEVEL:
            continue
        nested.pop(key.nested_name, None)
        if key.always_written or not _has_default(config, key.field):
            nested[key.nested_name] = getattr(config, key.field)
    if "causal_head" in nested:  # JetSpec's name of `is_causal`
        nested["causal_head"] = bool(config.is_causal)
    return _NestedForm(nested | config.token_head_class.extra_nested_keys(config))


def _set_nested_form(config: DFlashDraftConfig, nested: dict | None) -> None:
    """
    Stores the dictionary as it is. Keys with a field set it at construction only; later, reading overrides them with
    the field's value.
    """
    config.__dict__["dflash_config"] = {} if nested is None else nested


# Assigned after the class because `dflash_config` is a dataclass field: in the class body, the property would become
# its default.
DFlashDraftConfig.dflash_config = property(_nested_form, _set_nested_form)  # type: ignore[assignment]
