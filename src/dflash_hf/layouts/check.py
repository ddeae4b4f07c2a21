"""What a drafter's configuration must satisfy; each error names key, value and remedy."""

import math
from dataclasses import fields
from itertools import chain
from types import NoneType
from typing import get_args

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_hf.layouts.heads import spelling_of
from dflash_hf.modeling.configuration_dflash import LAYER_TYPES, parts_by_sizes
from dflash_hf.modeling.heads_dflash import HEADS


_DTYPES = ("float64", "float32", "bfloat16", "float16")
# Bounds far above any real drafter; a wrong size must not become an allocation.
_MOST_LAYERS = 1024
_LARGEST_SIZE = 2**24
_LARGEST_NUMBER = 1e18  # for thetas, factors and scales; torch does not take integers of arbitrary size
# Ids and a rate may be 0, a block has at least two tokens.
_OTHER_RULES = ("mask_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "block_size")


def check_nested(nested):
    if not isinstance(nested, dict):
        raise ValueError(
            f"dflash_config={nested!r} must be a dictionary such as "
            '{"target_layer_ids": [1, 9, 17], "mask_token_id": 151669}.'
        )


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
        value = getattr(config, key)
        if key in _OTHER_RULES or not {bool, int, float} & {*kinds} or (value is None and NoneType in kinds):
            continue
        if bool in kinds:
            rule, fits = "true or false", isinstance(value, bool)
        elif float in kinds:
            rule, fits = "a positive number", _is_positive(value)
        else:
            rule, fits = "a positive integer", type(value) is int and value > 0
        if not fits:
            raise ValueError(f"{key}={value!r} must be {rule}; correct it in the drafter's config.json.")
        most = _MOST_LAYERS if key in ("num_hidden_layers", "num_target_layers") else _LARGEST_SIZE
        if int in kinds and value > most and key not in ("max_position_embeddings", "sliding_window"):
            raise ValueError(f"{key}={value} is larger than any drafter's ({most}); correct it in config.json.")
    if type(config.block_size) is not int or not 2 <= config.block_size <= _MOST_LAYERS:
        raise ValueError(
            f"block_size={config.block_size!r} must be an integer from 2, the anchor and one drafted token, to "
            f"{_MOST_LAYERS}."
        )
    if config.num_key_value_heads and config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} must be a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}."
        )
    if config.head_dim is None and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={config.num_attention_heads}; "
            "pass `head_dim`."
        )
    rate = config.attention_dropout
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate < 1:
        raise ValueError(f"attention_dropout={rate!r} must be a rate from 0 to below 1; 0.0 is none.")
    if not isinstance(config.hidden_act, str) or config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act={config.hidden_act!r} is not an activation of transformers, such as silu.")
    dtype = str(config.dtype).removeprefix("torch.")
    if config.dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype={config.dtype!r} must be one of {_DTYPES}.")
    config.dtype = None if config.dtype is None else dtype


def check_parts(config):
    for part in parts_by_sizes():
        values = {key: getattr(config, key) for key in part}
        if None in values.values() and any(values.values()):
            said = " and ".join(f"{key}={value}" for key, value in values.items())
            raise ValueError(f"{said} belong together: set all of them, or none.")
    if config.conv_group_size is not None and config.hidden_size % config.conv_group_size:
        raise ValueError(
            f"conv_group_size={config.conv_group_size} must divide hidden_size={config.hidden_size} into whole groups."
        )
    if config.conv_kernel_size is not None and config.conv_kernel_size > config.block_size:
        raise ValueError(
            f"conv_kernel_size={config.conv_kernel_size} reaches out of a block of {config.block_size} tokens."
        )
    if config.has_embed_tokens and config.vocab_size is None:
        raise ValueError("has_embed_tokens=True needs vocab_size, the number of rows of the drafter's own table.")
    value = config.draft_vocab_size
    if value is not None and (config.vocab_size is None or value > config.vocab_size):
        raise ValueError(
            f"draft_vocab_size={value} needs a vocab_size of at least that, not {config.vocab_size}: draft tokens are "
            "looked up by the target's ids."
        )
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
    if value is not None and not isinstance(method, str):
        raise ValueError(f"quantization_config={value!r} must be a dictionary that names its quant_method.")


def check_rope_is_one_table(rope_parameters, rope_scaling):
    """Before upstream reads them: older files say `rope_scaling`, in which nothing (`0`, `[]`) is none."""
    for key, rope in {"rope_parameters": rope_parameters, "rope_scaling": rope_scaling or None}.items():
        if rope is not None and (not isinstance(rope, dict) or rope.keys() & {*LAYER_TYPES}):
            raise ValueError(
                f"{key}={rope!r} must be one dictionary for all layers, such as "
                '{"rope_type": "default", "rope_theta": 10000.0}; correct it in the drafter\'s config.json.'
            )


def check_rope(config):
    rope = config.rope_parameters
    if not _is_positive(rope.get("rope_theta")):
        raise ValueError(f"rope_theta={rope.get('rope_theta')!r} must be a positive number.")
    if rope.get("rope_type") not in ("default", *ROPE_INIT_FUNCTIONS):
        raise ValueError(f"rope_type={rope.get('rope_type')!r} must be one of {['default', *ROPE_INIT_FUNCTIONS]}.")
    if "rope_dim" in rope:  # the trained width; other fields may be copied from the target
        if not _is_positive(rope["rope_dim"]):
            raise ValueError(f"rope_dim={rope['rope_dim']!r} must be a number of channels, or be removed.")
        rope["partial_rotary_factor"] = rope.pop("rope_dim") / config.head_dim
    part = rope.get("partial_rotary_factor", 1.0)
    if not _is_positive(part) or part > 1 or int(config.head_dim * part) % 2 or int(config.head_dim * part) == 0:
        raise ValueError(
            f"partial_rotary_factor={part!r} must rotate an even number of the head_dim={config.head_dim} channels."
        )
    if part != 1.0:  # engines read it first; SGLang under transformers 5.23 drops the factor alone
        rope["rope_dim"] = int(config.head_dim * part)
    if rope["rope_type"] != "default":
        try:
            table, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device="cpu")
            usable = bool(table.isfinite().all()) and math.isfinite(scale)
        except Exception as error:  # upstream's functions validate nothing and fail in many ways
            raise ValueError(f"rope_parameters={rope} give no rotary table: {error!r}; correct them.") from error
        if not usable:
            raise ValueError(f"rope_parameters={rope} give a rotary table that is not finite; correct them.")


def check_layers(config):
    types = config.layer_types
    listed = isinstance(types, list | tuple) and len(types) == config.num_hidden_layers
    if not listed or any(one not in LAYER_TYPES for one in types):
        raise ValueError(
            f"layer_types={types} must name one of {LAYER_TYPES} for each of the "
            f"num_hidden_layers={config.num_hidden_layers} draft layers."
        )
    if "sliding_attention" in types and config.sliding_window is None:
        raise ValueError(
            f"sliding_window=None, but layer_types={types} has sliding layers; set `sliding_window` to "
            "the number of keys they see."
        )
    ids = config.target_layer_ids
    if ids is None:
        raise ValueError(
            "target_layer_ids is missing: set it in `dflash_config` or at the top level, or set `num_target_layers` "
            "for the default rule."
        )
    integers = isinstance(ids, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not integers or not ids or len(set(ids)) != len(ids) or min(ids) < -1:
        raise ValueError(
            f"target_layer_ids={ids!r} must be a list of distinct layer numbers, counted from 0; -1 is the embedding."
        )
    if max(ids) >= _MOST_LAYERS:
        raise ValueError(f"target_layer_ids={ids} name layers that no target has ({_MOST_LAYERS} at most).")
    if config.num_target_layers is not None and max(ids) >= config.num_target_layers:
        raise ValueError(
            f"target_layer_ids={ids} reach past the last layer of a target with "
            f"num_target_layers={config.num_target_layers}: the highest id is {config.num_target_layers - 1}."
        )
    config.target_layer_ids = list(ids)


def check_tokens(config):
    value = config.mask_token_id
    if value is None:
        raise ValueError(
            "mask_token_id is missing: set it in `dflash_config` or at the top level to an id inside the target's "
            "embedding that text never uses."
        )
    inside = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not inside or (config.vocab_size is not None and value >= config.vocab_size):
        raise ValueError(
            f"mask_token_id={value!r} lies outside the vocabulary (vocab_size={config.vocab_size}); choose an id "
            "inside the target's embedding, or resize that embedding first."
        )


def _is_positive(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST_NUMBER
