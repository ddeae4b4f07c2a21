"""
Configuration of a DFlash drafter, in the one layout that is written.

A *slot* is a position of the drafter's block, and `block_size` (`B`) counts slots: slot 0 holds the *anchor*, the last
committed token, the others hold mask tokens. What one round verifies is counted in *tokens*, anchor included: at most
`max_block_tokens`. That is `B`, or `B + 1` if the anchor's slot also drafts a token (`sample_from_anchor`). So a block
drafts `max_block_tokens - 1` tokens, which inference engines call `num_speculative_tokens`.

Most keys of a `config.json` are fields at the top level. Those that may be nested in `dflash_config`, or are not
always written, are in one table, `config_keys`. An argument of `from_pretrained` or `from_dict` replaces what the file
says of its field, even by `None`. Any other field has the first of these values that is not null:

1. The value in the file's `dflash_config`, which engines read first (`merge_nested_keys`).
2. The value at the file's top level.
3. The field's default, or the value that follows from other fields (`derive_fields`).

The constructor takes the keys of a file as arguments, and follows the same order. Assigning `config.dflash_config`
later sets the fields of its keys, too.

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


# The version of this code, which every `config.json` that it writes has as `dflash_hf_version`.
VERSION = "0.3.0.dev0"

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
# Fields that equal another field unless they are set.
_EQUAL_BY_DEFAULT = {
    "num_key_value_heads": "num_attention_heads",
    "v_head_dim": "head_dim",
    "target_hidden_size": "hidden_size",
}
# Fields that no other field and no default gives.
_REQUIRED = ("mask_token_id", "target_layer_ids")
# Where a key is written, see `ConfigKey`.
TOP_LEVEL = "top level"
NESTED = "dflash_config"
BOTH = "both"


class ConfigKey(NamedTuple):
    """
    A key of `config.json` that may be nested in `dflash_config`, or is not always written.

    Attributes:
        field (`str`): The field of the configuration, and the key's name at the top level.
        nested_name (`str`, *optional*): The key's name in `dflash_config`. `None`: it is read at the top level only.
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
    # The token head decides whether this key is written, and where: Domino's nests it.
    ConfigKey("sample_from_anchor", "shift_label", TOP_LEVEL, always_written=True),
    ConfigKey("has_embed_tokens", "has_embed_tokens", TOP_LEVEL),
    ConfigKey("is_causal", None, TOP_LEVEL),
    ConfigKey("draft_vocab_size", None, TOP_LEVEL),
    ConfigKey("v_head_dim", None, TOP_LEVEL),
    ConfigKey("trained_length", None, TOP_LEVEL),
    ConfigKey("output_multiplier", "output_multiplier", NESTED),
    ConfigKey("final_logit_softcapping", "final_logit_softcapping", NESTED),
    ConfigKey("input_embedding_scale", "input_embedding_scale", NESTED),
    ConfigKey("attention_sink_bias", "attention_sink_bias", NESTED),
    ConfigKey("attention_value_scale", "attention_value_scale", NESTED),
    ConfigKey("backbone_rotary_base", "backbone_rotary_base", NESTED),
    ConfigKey("own_mask_embedding", "own_mask_embedding", NESTED),
)


def config_keys() -> tuple[ConfigKey, ...]:
    """All keys that may be nested or are not always written: those above, and the fields of optional parts."""
    return (*_KEYS, *(ConfigKey(field, field, NESTED) for field in part_fields()))


def part_fields() -> tuple[str, ...]:
    """Fields of a drafter's optional parts: DFlash 2's convolution, and a token head."""
    return (*CONVOLUTION_KEYS, *head_fields())


def sizes_of_parts() -> tuple[tuple[str, ...], ...]:
    """The fields of each optional part that are sizes. A file says 0 if the drafter lacks the part."""
    return (CONVOLUTION_KEYS, *(head.sizes for head in TOKEN_HEADS))


def merge_nested_keys(config: dict) -> dict:
    """
    A `config.json` with the keys of its `dflash_config` at the top level, under the names of their fields. They
    replace values that are there already, unless they are null. Keys without a field stay in `dflash_config`.

    Raises:
        `ValueError`: `dflash_config` is not a dictionary.
    """
    nested = config.get("dflash_config")
    if nested is None:
        nested = {}
    if not isinstance(nested, dict):
        raise ValueError(
            f"dflash_config={nested!r} must be a dictionary such as "
            '{"target_layer_ids": [1, 9, 17], "mask_token_id": 151669}; correct the drafter\'s configuration.'
        )
    merged = dict(config)
    other_keys = dict(nested)
    for key in config_keys():
        value = other_keys.pop(key.nested_name, None)
        if value is not None:
            merged[key.field] = value
    merged["dflash_config"] = other_keys
    return merged


class NestedForm(dict):
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


class NestedKeys:
    """
    The attribute `dflash_config` of a configuration, as a descriptor. The configuration stores only the keys that have
    no field, so that no value is stored twice.
    """

    def __get__(self, config, owner=None) -> NestedForm | None:
        """
        The nested form of all keys, a new dictionary at each access. It is complete even if no file was read, since
        SGLang uses the object that remote code creates, and reads these keys only here.
        """
        if config is None:  # the dataclass asks the class for the field's default
            return None
        nested = config.other_nested_keys
        for key in config_keys():
            if key.written != TOP_LEVEL and (key.always_written or not config.has_default(key.field)):
                nested[key.nested_name] = getattr(config, key.field)
        if "causal_head" in nested:  # JetSpec's name of `is_causal`, which is written if the file had it
            nested["causal_head"] = bool(config.is_causal)
        return NestedForm(nested | config.token_head_class.extra_nested_keys(config))

    def __set__(self, config, nested: dict | None) -> None:
        """Sets the fields of its keys, unless they are null, and replaces the keys that have no field."""
        values = copy.deepcopy(merge_nested_keys({"dflash_config": nested}))
        vars(config)["dflash_config"] = values.pop("dflash_config")
        for field, value in values.items():
            setattr(config, field, value)


class DFlashDraftConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DFlashDraftModel`].

    Args:
        block_size (`int`, defaults to 16): Slots of a block, the anchor's included.
        sample_from_anchor (`bool`): Whether slot `k` of a block predicts the token at `anchor + 1 + k`, the anchor's
            own slot included (DSpark), instead of the token at `anchor + k`. Default: false.
        mask_token_id (`int`): Id whose embedding fills all slots but the anchor's; a row of the target's embedding.
            Required.
        target_layer_ids (`list[int]`): Id `i` means the output of the target's decoder layer `i`, -1 the input of the
            first. Required.
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
            access. Assigning a dictionary sets the fields of its keys; its other keys are kept for re-saving.

    Only part of each attention head's channels is rotated if `rope_parameters` has `partial_rotary_factor`, or
    `rope_dim`, in channels. The remaining arguments are those of Qwen3. Saved files have `model_type: qwen3`, which
    inference engines know.

    Raises:
        `ValueError`: a required field is missing, or `dflash_config` is not a dictionary. No other value is checked
            here: the package's subclass of the same name checks all of them.
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
    tie_word_embeddings: bool | None = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    # The last field: the constructor assigns them in this order, and this one sets others.
    dflash_config: dict | None = NestedKeys()  # type: ignore[assignment]

    def __post_init__(self, **arguments):
        """`arguments`: those of the constructor that the class does not declare, such as a token head's fields."""
        self.set_part_fields(arguments)
        self.derive_fields()
        for field in _REQUIRED:
            if getattr(self, field) is None:
                raise ValueError(f"{field}=None must be set: give the value with which the drafter was trained.")
        super().__post_init__(**arguments)

    def set_part_fields(self, arguments: dict) -> None:
        """
        Set the fields of optional parts. Those of token heads, which the heads declare, are removed from `arguments`;
        what `dflash_config` says of them wins.
        """
        for field, default in head_fields().items():
            value = arguments.pop(field, None)
            if vars(self).get(field) is None:
                setattr(self, field, default if value is None else value)
        for sizes in sizes_of_parts():
            for field in sizes:
                if getattr(self, field) == 0:
                    setattr(self, field, None)

    def derive_fields(self) -> None:
        """Set the fields that follow from others, unless they are set."""
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        for field, other_field in _EQUAL_BY_DEFAULT.items():
            setattr(self, field, getattr(self, field) or getattr(self, other_field))
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        self.rope_parameters = copy.deepcopy(self.rope_parameters)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Replaces the model type, since upstream would warn of the `model_type: qwen3` in a drafter's folder."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return {**config_dict, "model_type": cls.model_type}, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """
        Applies the order at the top of this file to the file's content and the caller's arguments. A file can neither
        set a key of `_IGNORED` nor replace a method.
        """
        names = cls.field_names()
        arguments = {key: kwargs.pop(key) for key in list(kwargs) if key in names and key != "dtype"}
        accepted = {
            key: value
            for key, value in merge_nested_keys(config_dict).items()
            if key not in _IGNORED and (key in names or key == "rope_scaling" or not hasattr(cls, key))
        }
        return super().from_dict({**accepted, **arguments}, **kwargs)

    @classmethod
    def field_names(cls) -> set[str]:
        """Names of all fields, including the heads'."""
        return {field.name for field in fields(cls)} | set(head_fields())

    @property
    def other_nested_keys(self) -> dict:
        """A copy of the keys of `dflash_config` that have no field."""
        return dict(vars(self)["dflash_config"])

    def has_default(self, field: str) -> bool:
        """Whether a field has the value that it has in drafters whose file lacks it."""
        if field in _EQUAL_BY_DEFAULT:
            default = getattr(self, _EQUAL_BY_DEFAULT[field])
        elif field in head_fields():
            default = head_fields()[field]
        else:
            default = getattr(DFlashDraftConfig, field)
        return getattr(self, field) == default

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
            is_omitted = not key.always_written and self.has_default(key.field)
            if key.written == NESTED or is_omitted:
                del output[key.field]
        output["dflash_config"] = copy.deepcopy(self.dflash_config)
        self.token_head_class.write_config(output, self)
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
