"""What a drafter's configuration must satisfy; each error names key, value and rule."""

import math
from dataclasses import fields
from itertools import chain
from types import NoneType
from typing import get_args

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_hf.layouts.heads import require, spelling_of
from dflash_hf.modeling.configuration_dflash import LAYER_TYPES, parts_by_sizes
from dflash_hf.modeling.heads_dflash import HEADS


_DTYPES = ("float64", "float32", "bfloat16", "float16")
# Bounds far above any real drafter; a wrong size must not become an allocation.
_MOST_LAYERS = 1024
_LARGEST_SIZE = 2**24
_LARGEST_NUMBER = 1e18  # for thetas, factors and scales; torch does not take integers of arbitrary size
_LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "num_target_layers", "block_size"), _MOST_LAYERS),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), math.inf),
}
# Ids and a rate may be 0, a block has at least two tokens.
_OTHER_RULES = ("mask_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout")


def check_nested(nested):
    example = '{"target_layer_ids": [1, 9, 17], "mask_token_id": 151669}'
    require(isinstance(nested, dict), f"a dictionary such as {example}", dflash_config=nested)


def check_fields(config):
    """
    Sizes, numbers and switches, by the types that the fields are declared with, `None` only where they allow it; then
    the fields with rules of their own. Fields that every configuration has are upstream's, in other versions others.
    """
    upstream = {field.name for field in fields(PreTrainedConfig)}
    own = [field for field in fields(config) if field.name not in upstream]
    kinds_of = {field.name: get_args(field.type) or (field.type,) for field in own}
    kinds_of |= dict.fromkeys(chain(*parts_by_sizes()), (int, NoneType))
    for key, kinds in kinds_of.items():
        value, most = getattr(config, key), _LARGEST.get(key, _LARGEST_SIZE)
        if key in _OTHER_RULES or (value is None and NoneType in kinds):
            continue
        if bool in kinds:
            require(isinstance(value, bool), "true or false", **{key: value})
        elif float in kinds:
            require(_is_positive(value), "a positive number", **{key: value})
        elif int in kinds:
            require(_is_integer(value, least=1), "a positive integer", **{key: value})
            require(value <= most, f"at most {most}", **{key: value})
    require(config.block_size >= 2, "at least 2, the anchor and one drafted token", block_size=config.block_size)
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    grouped = groups is None or heads % groups == 0
    require(grouped, f"a multiple of num_key_value_heads={groups}", num_attention_heads=heads)
    whole = config.head_dim is not None or width % heads == 0
    require(whole, f"a multiple of num_attention_heads={heads}, or head_dim be set", hidden_size=width)
    rate, dtype = config.attention_dropout, config.dtype
    require(_is_number(rate) and 0 <= rate < 1, "a rate from 0 to below 1", attention_dropout=rate)
    known = isinstance(config.hidden_act, str) and config.hidden_act in ACT2FN
    require(known, "an activation of transformers, such as silu", hidden_act=config.hidden_act)
    config.dtype = None if dtype is None else str(dtype).removeprefix("torch.")
    require(config.dtype in (None, *_DTYPES), f"one of {_DTYPES}", dtype=dtype)


def check_parts(config):
    for part in parts_by_sizes():
        sizes = {key: getattr(config, key) for key in part}
        require(all(sizes.values()) or not any(sizes.values()), "set together, or not at all", **sizes)
    width, group, taps, size = config.hidden_size, config.conv_group_size, config.conv_kernel_size, config.block_size
    require(group is None or width % group == 0, f"a divisor of hidden_size={width}", conv_group_size=group)
    require(taps is None or taps <= size, f"at most block_size={size}", conv_kernel_size=taps)
    known, drafted = config.vocab_size, config.draft_vocab_size
    require(known is not None or not config.has_embed_tokens, "set for has_embed_tokens=True", vocab_size=known)
    fewer = drafted is None or (known is not None and drafted <= known)
    require(fewer, f"at most vocab_size={known}, the target's", draft_vocab_size=drafted)
    heads = [head for head in HEADS if head.is_set(lambda field: getattr(config, field))]
    if len(heads) > 1:
        raise ValueError(
            f"{' and '.join(next(iter(head.fields)) for head in heads)} are set, but a drafter has one head: "
            f"{heads[0].name} or {heads[1].name}; remove the fields of the other."
        )
    for head in heads:
        spelling_of(head).check(config)


def check_quantization(config):
    value = getattr(config, "quantization_config", None)
    method = value.get("quant_method") if isinstance(value, dict) else getattr(value, "quant_method", None)
    named = value is None or isinstance(method, str)
    require(named, "a dictionary that names its quant_method", quantization_config=value)


def check_rope_is_one_table(rope_parameters, rope_scaling):
    """Before upstream reads them: older files say `rope_scaling`, in which nothing (`0`, `[]`) is none."""
    example = '{"rope_type": "default", "rope_theta": 10000.0}'
    for key, rope in {"rope_parameters": rope_parameters, "rope_scaling": rope_scaling or None}.items():
        one = rope is None or (isinstance(rope, dict) and not rope.keys() & {*LAYER_TYPES})
        require(one, f"one dictionary for all layers, such as {example}", **{key: rope})


def check_rope(config):
    rope, size = config.rope_parameters, config.head_dim
    theta, kind, known = rope.get("rope_theta"), rope.get("rope_type"), ["default", *ROPE_INIT_FUNCTIONS]
    require(_is_positive(theta), "a positive number", rope_theta=theta)
    require(kind in known, f"one of {known}", rope_type=kind)
    if "rope_dim" in rope:  # the trained width; other fields may be copied from the target
        require(_is_positive(rope["rope_dim"]), "a number of channels", rope_dim=rope["rope_dim"])
        rope["partial_rotary_factor"] = rope.pop("rope_dim") / size
    part = rope.get("partial_rotary_factor", 1.0)
    rotated = int(size * part) if _is_positive(part) and part <= 1 else 0
    even = f"a share that rotates an even number of the head_dim={size} channels"
    require(rotated > 0 and rotated % 2 == 0, even, partial_rotary_factor=part)
    if part != 1.0:  # engines read it first; SGLang under transformers 5.23 drops the factor alone
        rope["rope_dim"] = rotated
    if kind != "default":
        try:
            table, scale = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
            usable = bool(table.isfinite().all()) and math.isfinite(scale)
        except Exception as error:  # upstream's functions validate nothing and fail in many ways
            raise ValueError(f"rope_parameters={rope} give no rotary table: {error!r}; correct them.") from error
        require(usable, "values of which a finite rotary table is made", rope_parameters=rope)


def check_layers(config):
    types, number = config.layer_types, config.num_hidden_layers
    listed = isinstance(types, list | tuple) and len(types) == number and all(one in LAYER_TYPES for one in types)
    require(
        listed, f"a list that names one of {LAYER_TYPES} for each of the num_hidden_layers={number}", layer_types=types
    )
    sees = config.sliding_window is not None or "sliding_attention" not in types
    require(sees, "the number of keys that sliding layers see", sliding_window=config.sliding_window)
    ids, depth = config.target_layer_ids, config.num_target_layers
    require(ids is not None, "set, or num_target_layers for the default rule", target_layer_ids=ids)
    integers = isinstance(ids, list | tuple) and all(_is_integer(i, least=-1) for i in ids)
    distinct = integers and 0 < len(ids) == len({*ids})
    require(distinct, "distinct layer numbers, counted from 0; -1 is the embedding", target_layer_ids=ids)
    require(max(ids) < _MOST_LAYERS, f"below {_MOST_LAYERS}, more layers than any target has", target_layer_ids=ids)
    require(depth is None or max(ids) < depth, f"below num_target_layers={depth}", target_layer_ids=ids)
    config.target_layer_ids = list(ids)


def check_tokens(config):
    value, size = config.mask_token_id, config.vocab_size
    inside = _is_integer(value, least=0) and (size is None or value < size)
    rule = f"an id inside the target's embedding (vocab_size={size}) that text never uses"
    require(inside, rule, mask_token_id=value)


def _is_integer(value, least: int) -> bool:
    return type(value) is int and value >= least


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value) -> bool:
    return _is_number(value) and 0 < value < _LARGEST_NUMBER
