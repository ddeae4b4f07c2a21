"""
The rules for a drafter's configuration, in the order in which they are checked. The checks change nothing; each error
names key, value and rule.

1. [`check_given`]: the fields as file and caller give them. Nothing has been computed from them yet.
2. [`check_derived`]: the fields once those that follow from others are set, before transformers, whose errors name no
   remedy, reads them.
3. [`check_rope`]: `rope_parameters` in transformers' form, in which older files' keys are merged.
4. [`check_rotary_table`]: the rotary table itself, once `rope_parameters` have the rotated width in both spellings.

`DFlashDraftConfig` calls them while it is created, see `configuration.py`. That `dflash_config` is a dictionary is
checked before all of them, when its keys are merged (`merge_nested_keys`).
"""

import math
from dataclasses import fields
from itertools import chain
from types import NoneType
from typing import get_args

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_hf.layouts.errors import require, require_key
from dflash_hf.layouts.head_schemas import schema_of
from dflash_hf.modeling.configuration_dflash import LAYER_TYPES, sizes_of_parts
from dflash_hf.modeling.heads_dflash import TOKEN_HEADS


_DTYPES = ("float64", "float32", "bfloat16", "float16")
# Far above the sizes of any real drafter: a wrong size must not become an allocation.
_MAX_LAYERS = 1024
_MAX_SIZE = 2**24
_MAX_NUMBER = 1e18  # limits thetas, factors and scales: torch does not take integers of arbitrary size
_MAX_OF_FIELD = {
    **dict.fromkeys(("num_hidden_layers", "num_target_layers", "block_size"), _MAX_LAYERS),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), math.inf),
}
_MIN_OF_FIELD = {"trained_length": 0}  # all other integers are at least 1
# Fields with a rule of their own (`_check_sizes`, `_check_tokens`), and ids that the drafter does not use.
_NOT_CHECKED_BY_TYPE = ("attention_dropout", "mask_token_id", "bos_token_id", "eos_token_id", "pad_token_id")


def check_given(config, rope_scaling=None) -> None:
    """
    The first stage.

    Args:
        config (`DFlashDraftConfig`): Its fields as given.
        rope_scaling (*optional*): The key by which older files call `rope_parameters`, which is not a field.
    """
    _check_types(config)
    _check_sizes(config)
    _check_one_rope("rope_parameters", config.rope_parameters)
    _check_one_rope("rope_scaling", rope_scaling or None)  # files write 0 or `[]` for none


def check_derived(config) -> None:
    """The second stage: what needs fields that follow from others, such as `layer_types`."""
    _check_layers(config)
    _check_target_layers(config)
    _check_tokens(config)
    _check_parts(config)
    _check_head(config)
    _check_quantization(config)


def check_rope(config) -> None:
    """The third stage: `rope_parameters` have a known type and a positive base, and rotate an even part of a head."""
    rope = config.rope_parameters
    size = config.head_dim
    theta = rope.get("rope_theta")
    require(_is_positive(theta), "a positive number", rope_theta=theta)
    kind = rope.get("rope_type")
    kinds = ["default", *ROPE_INIT_FUNCTIONS]
    require(kind in kinds, f"one of {kinds}", rope_type=kind)
    part = rope.get("partial_rotary_factor", 1.0)
    if "rope_dim" in rope:
        require(_is_positive(rope["rope_dim"]), "a number of channels", rope_dim=rope["rope_dim"])
        part = rope["rope_dim"] / size
    rotated = int(size * part) if _is_positive(part) and part <= 1 else 0
    rule = f"a share that rotates an even number of the head_dim={size} channels"
    require(rotated > 0 and rotated % 2 == 0, rule, partial_rotary_factor=part)


def check_rotary_table(config) -> None:
    """The fourth stage: `rope_parameters` give a finite rotary table."""
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind == "default":
        return
    try:
        table, scale = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
        is_usable = bool(table.isfinite().all()) and math.isfinite(scale)
    except Exception as error:  # upstream's functions validate nothing and fail in many ways
        raise ValueError(f"rope_parameters={rope} give no rotary table: {error!r}; correct them.") from error
    require(is_usable, "values of which a finite rotary table is made", rope_parameters=rope)


def _check_types(config) -> None:
    """
    Sizes, numbers and switches by the declared types of their fields, of which some allow `None`. Fields of
    `PreTrainedConfig`, which differ between versions, are left to upstream.
    """
    upstream = {field.name for field in fields(PreTrainedConfig)}
    own = [field for field in fields(config) if field.name not in upstream]
    kinds_of = {field.name: get_args(field.type) or (field.type,) for field in own}
    kinds_of |= dict.fromkeys(chain(*sizes_of_parts()), (int, NoneType))
    for key, kinds in kinds_of.items():
        value = getattr(config, key)
        minimum = _MIN_OF_FIELD.get(key, 1)
        maximum = _MAX_OF_FIELD.get(key, _MAX_SIZE)
        if key in _NOT_CHECKED_BY_TYPE or (value is None and NoneType in kinds):
            continue
        if bool in kinds:
            require_key(isinstance(value, bool), "true or false", key, value)
        elif float in kinds:
            require_key(_is_positive(value), "a positive number", key, value)
        elif int in kinds:
            rule = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
            require_key(_is_integer(value, minimum), rule, key, value)
            require_key(value <= maximum, f"at most {maximum}", key, value)


def _check_sizes(config) -> None:
    """Fields with rules beyond their types; sizes are known to be positive integers."""
    block_size = config.block_size
    require(block_size >= 2, "at least 2, the anchor and one drafted token", block_size=block_size)
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    require(heads % kv_heads == 0, f"a multiple of num_key_value_heads={kv_heads}", num_attention_heads=heads)
    if config.head_dim is None:
        width = config.hidden_size
        rule = f"a multiple of num_attention_heads={heads}, or head_dim must be set"
        require(width % heads == 0, rule, hidden_size=width)
    rate = config.attention_dropout
    require(_is_number(rate) and 0 <= rate < 1, "a rate from 0 to below 1", attention_dropout=rate)
    activation = config.hidden_act
    is_activation = isinstance(activation, str) and activation in ACT2FN
    require(is_activation, "an activation of transformers, such as silu", hidden_act=activation)
    require(config.dtype in (None, *_DTYPES), f"one of {_DTYPES}", dtype=config.dtype)


def _check_one_rope(key: str, rope) -> None:
    """`rope_parameters`, or `rope_scaling`, is one table for all layers."""
    example = '{"rope_type": "default", "rope_theta": 10000.0}'
    is_one_table = rope is None or (isinstance(rope, dict) and not rope.keys() & {*LAYER_TYPES})
    require_key(is_one_table, f"one dictionary for all layers, such as {example}", key, rope)


def _check_layers(config) -> None:
    """Each draft layer has a type, and sliding layers have a window."""
    types = config.layer_types
    number = config.num_hidden_layers
    are_types = isinstance(types, list | tuple) and all(kind in LAYER_TYPES for kind in types)
    rule = f"a list that names one of {LAYER_TYPES} for each of the num_hidden_layers={number}"
    require(are_types and len(types) == number, rule, layer_types=types)
    has_window = config.sliding_window is not None or "sliding_attention" not in types
    rule = "the number of keys that a query of a sliding layer attends to"
    require(has_window, rule, sliding_window=config.sliding_window)


def _check_target_layers(config) -> None:
    """`target_layer_ids` are distinct layers of the target."""
    ids = config.target_layer_ids
    depth = config.num_target_layers
    require(ids is not None, "set, or num_target_layers for the default rule", target_layer_ids=ids)
    are_integers = isinstance(ids, list | tuple) and all(_is_integer(i, minimum=-1) for i in ids)
    are_distinct = are_integers and 0 < len(ids) == len({*ids})
    require(are_distinct, "distinct layer numbers, counted from 0; -1 is the embedding", target_layer_ids=ids)
    require(max(ids) < _MAX_LAYERS, f"below {_MAX_LAYERS}, more layers than any target has", target_layer_ids=ids)
    require(depth is None or max(ids) < depth, f"below num_target_layers={depth}", target_layer_ids=ids)


def _check_tokens(config) -> None:
    """The mask token is a row of the target's embedding."""
    token = config.mask_token_id
    size = config.vocab_size
    is_inside = _is_integer(token, minimum=0) and (size is None or token < size)
    rule = f"an id inside the target's embedding (vocab_size={size}) that text never uses"
    require(is_inside, rule, mask_token_id=token)


def _check_parts(config) -> None:
    """The sizes of an optional part are set together, and fit those of the drafter and its target."""
    for part in sizes_of_parts():
        sizes = {key: getattr(config, key) for key in part}
        require(all(sizes.values()) or not any(sizes.values()), "set together, or not at all", **sizes)
    width = config.hidden_size
    group = config.conv_group_size
    require(group is None or width % group == 0, f"a divisor of hidden_size={width}", conv_group_size=group)
    kernel = config.conv_kernel_size
    block_size = config.block_size
    require(kernel is None or kernel <= block_size, f"at most block_size={block_size}", conv_kernel_size=kernel)
    vocabulary = config.vocab_size
    if config.has_embed_tokens:
        require(vocabulary is not None, "set for has_embed_tokens=True", vocab_size=vocabulary)
    reduced = config.draft_vocab_size
    if reduced is not None:
        is_smaller = vocabulary is not None and reduced <= vocabulary
        require(is_smaller, f"at most vocab_size={vocabulary}, the target's", draft_vocab_size=reduced)


def _check_head(config) -> None:
    """At most one token head is set, with valid fields."""
    heads = [head for head in TOKEN_HEADS if head.is_configured(vars(config))]
    if len(heads) > 1:
        raise ValueError(
            f"{' and '.join(next(iter(head.fields)) for head in heads)} are set, but a drafter has one head: "
            f"{heads[0].name} or {heads[1].name}; remove the fields of the other."
        )
    for head in heads:
        schema_of(head).check(config)


def _check_quantization(config) -> None:
    """`quantization_config` names its method. Whether that can be read is checked with the weights."""
    value = getattr(config, "quantization_config", None)
    method = value.get("quant_method") if isinstance(value, dict) else getattr(value, "quant_method", None)
    names_method = value is None or isinstance(method, str)
    require(names_method, "a dictionary that names its quant_method", quantization_config=value)


def _is_integer(value, minimum: int) -> bool:
    return type(value) is int and value >= minimum


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value) -> bool:
    return _is_number(value) and 0 < value < _MAX_NUMBER
