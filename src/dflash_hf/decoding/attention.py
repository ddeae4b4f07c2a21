"""
Attention of a few queries over slots: how candidates are verified and blocks are drafted.

Upstream's attention functions repeat keys and values for all query heads as soon as there is a mask of several
queries: in each layer and each round, so that a round costs more the longer the text is. FlashAttention and
FlexAttention take no such mask at all. [`attend_to_slots`] reads keys and values once and takes any mask. It is
registered under a name of its own. Verification runs on a clone of the target whose configuration has that name, and a
drafter's forward gets the name as an argument: other calls, and both models, keep the attention that they were loaded
with.
"""

import functools

import torch
from torch import nn
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf.modeling.modeling_dflash import additive_mask
from dflash_hf.targets.clones import with_own_config


SLOT_ATTENTION = "dflash_slots"


def attend_to_slots(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    An attention function in transformers' signature. Queries of all heads that share a key head are attended to as if
    they were queries of one head, so no key is repeated.

    Args:
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor`): `[R, heads, n, head_dim]`.
        key (`torch.Tensor`): `[R, kv_heads, K, head_dim]`.
        value (`torch.Tensor`): `[R, kv_heads, K, v_head_dim]`.
        attention_mask (`torch.Tensor`, *optional*): `[R, 1 or heads, n, K]`, added to the scores. `None`: the queries
            are the last `n` keys, and each attends to the keys up to its own or, if the layer is not causal, to all.
        dropout (`float`): Dropout probability.
        scaling (`float`, *optional*): Factor of the scores; default: `head_dim ** -0.5`.
        softcap (`float`, *optional*): Cap of the scores (Gemma 2).
        s_aux (`torch.Tensor`, *optional*): `[heads]`, attention sinks: scores of a key without a value (GPT-OSS).

    Returns:
        The output `[R, n, heads, v_head_dim]`, and `None` in place of attention weights.
    """
    if kwargs.get("position_bias") is not None:  # it differs from head to head
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    rows, heads, num_queries, _ = query.shape
    kv_heads = key.shape[1]
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    has_own_scores = softcap is not None or s_aux is not None
    if attention_mask is None and not has_own_scores:
        bias = _bias_of_last_keys(num_queries, key.shape[2]) if is_causal and num_queries > 1 else None
        grouped = {"enable_gqa": True} if heads > kv_heads else {}
        output = scaled_dot_product_attention(query, key, value, bias, dropout, scale=scaling, **grouped)
        return output.transpose(1, 2).contiguous(), None
    if attention_mask is None and is_causal:
        attention_mask = _causal_mask(num_queries, key)
    # [R, kv_heads, heads / kv_heads * n, head_dim]
    packed_query = query.reshape(rows, kv_heads, -1, query.shape[-1])
    packed_mask = None if attention_mask is None else _packed_mask(attention_mask, heads, kv_heads)
    if has_own_scores:
        sinks = None
        if s_aux is not None:
            sinks = s_aux.view(1, kv_heads, -1, 1).repeat_interleave(num_queries, dim=2)
        packed = _attend(packed_query, key, value, packed_mask, scaling, softcap, sinks)
    else:
        packed = scaled_dot_product_attention(packed_query, key, value, packed_mask, dropout, scale=scaling)
    grouped_output = packed.unflatten(2, (-1, num_queries))  # [R, kv_heads, heads / kv_heads, n, v_head_dim]
    return grouped_output.permute(0, 3, 1, 2, 4).reshape(rows, num_queries, heads, -1), None


@functools.lru_cache(maxsize=16)  # all layers of a forward ask for the same
def _bias_of_last_keys(num_queries: int, num_keys: int) -> CausalBias:
    """In place of a mask: the queries are the last keys. It has no values; torch chooses a kernel by its type."""
    with _disable_current_modes():  # under a mode, such as torch's counter of operations, it could not be created
        return causal_lower_right(num_queries, num_keys)


def _packed_mask(mask: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """A mask `[R, 1 or heads, n, K]` for packed queries: `[R, 1 or kv_heads, heads / kv_heads * n, K]`."""
    if mask.shape[1] > 1:
        return mask.reshape(mask.shape[0], kv_heads, -1, mask.shape[-1])
    group_size = heads // kv_heads
    if group_size == 1:
        return mask
    # All layers of a forward get the same mask: it is repeated once.
    repeated = getattr(mask, "_repeated_for_groups", {})
    if group_size not in repeated:
        repeated[group_size] = mask.repeat(1, 1, group_size, 1)
        mask._repeated_for_groups = repeated  # type: ignore[attr-defined]
    return repeated[group_size]


def _causal_mask(num_queries: int, key: torch.Tensor) -> torch.Tensor:
    """The additive mask `[1, 1, n, K]` of the last `n` of all keys."""
    num_keys = key.shape[2]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=key.device)
    return additive_mask(visible.tril(num_keys - num_queries), key.dtype)[None, None]


def _attend(query, key, value, mask, scaling, softcap, sinks) -> torch.Tensor:
    """Attention `[R, kv_heads, q, v_head_dim]` whose scores no kernel computes; `sinks`: `[1, kv_heads, q, 1]`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


ALL_ATTENTION_FUNCTIONS.register(SLOT_ATTENTION, attend_to_slots)


def takes_slot_masks(attention: str | None) -> bool:
    """
    Whether an attention implementation takes additive masks `[R, 1, n, K]`, as upstream makes them for it.

    FlashAttention reads a mask as a list of rows: on a GPU an index out of bounds ends the process. FlexAttention
    takes a function instead. Implementations that a user has registered get no masks from upstream, and are tried.
    """
    create = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(attention)
    return "flash" not in (attention or "") and create in (None, masking_utils.sdpa_mask, masking_utils.eager_mask)


def is_replaceable(attention: str | None) -> bool:
    """
    Whether [`attend_to_slots`] computes the same as an attention implementation. Of those that users register nobody
    knows; the `eager` function belongs to its model, and may do more.
    """
    return attention in ("sdpa", "flex_attention") or "flash" in (attention or "")


def with_slot_attention(model: PreTrainedModel) -> PreTrainedModel:
    """
    A clone of a model, with the same weights, that attends to slots by [`attend_to_slots`]; the model itself if its
    attention cannot be replaced, but takes masks of slots.

    Raises:
        `ValueError`: it cannot be replaced and takes none; the message is the reason.
    """
    attention = model.config.get_text_config()._attn_implementation
    try:
        if not is_replaceable(attention):
            raise ValueError("it is not one of upstream's")
        if not model._can_set_attn_implementation():
            raise ValueError(f"{type(model).__name__} does not look it up in transformers' attention interface")
        clone = with_own_config(model)
    except ValueError:
        if takes_slot_masks(attention):
            return model
        raise
    for module in clone.modules():  # parts of a model may have configurations of their own
        config = vars(module).get("config")
        if getattr(config, "_attn_implementation", None) == attention:
            config._attn_implementation = SLOT_ATTENTION
    return clone


def prefers_no_mask(model: PreTrainedModel) -> bool:
    """
    Whether a block of one row is best attended to without a mask: on a GPU with CUDA, in half precision. There torch's
    kernels without a mask (FlashAttention) let all processors share a long text, those with one do not.
    """
    has_cuda = model.device.type == "cuda" and torch.version.hip is None
    return has_cuda and model.dtype in (torch.float16, torch.bfloat16)
