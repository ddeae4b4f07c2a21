"""
Attention of a single query per row. PyTorch's kernel for CPUs is made for many queries: in half precision, matrix
products are 1.5 to 6 times as fast for one.
"""

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


SINGLE_QUERIES = "single_queries"  # name of an attention implementation; upstream asks some whether they are "flash"
_NOT_HERE = ("softcap", "position_bias", "cache")  # upstream's function supports them, or says that it does not


def use_single_queries(target: PreTrainedModel) -> None:
    """
    Let a target, which nobody else uses, attend by [`single_query_attention`] from now on; nothing changes where
    PyTorch's kernel is as fast: on accelerators, in fp32, or with another attention.
    """
    text = target.config.get_text_config(decoder=True)  # which may attend in another way than a wrapper's images
    swaps = target._supports_attention_backend and text._attn_implementation == "sdpa"
    if swaps and target.device.type == "cpu" and target.dtype in (torch.bfloat16, torch.float16):
        text._attn_implementation = SINGLE_QUERIES


def single_query_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Attention as transformers calls it, `[R, 1, heads, head_dim]`. Scores are rounded to the dtype of the states, as by
    transformers' eager attention. More queries, and what only sdpa supports, are left to it.

    Args:
        query (`torch.Tensor`): `[R, heads, n, head_dim]`.
        key, value (`torch.Tensor`): `[R, key heads, slots, head_dim]`; contiguous, or they are copied.
        attention_mask (`torch.Tensor`, *optional*): `[R, 1 or heads, n, slots]`, added to the scores; a boolean one,
            of remote code, is left to sdpa.
    """
    rows, heads, queries, size = query.shape
    boolean = attention_mask is not None and attention_mask.dtype == torch.bool  # it would be added as 0 and 1
    if queries > 1 or boolean or any(kwargs.get(name) is not None for name in _NOT_HERE):
        given = {"dropout": dropout, "scaling": scaling, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    grouped = (rows, key.shape[1], -1)  # the query heads of each key head
    query = query.reshape(*grouped, size) * (size**-0.5 if scaling is None else scaling)
    scores = query @ key.transpose(2, 3)
    if attention_mask is not None:
        shared = attention_mask.shape[1] == 1
        scores += attention_mask if shared else attention_mask.reshape(*grouped, attention_mask.shape[-1])
    return (scores.softmax(-1) @ value).view(rows, 1, heads, -1), None


AttentionInterface.register(SINGLE_QUERIES, single_query_attention)
AttentionMaskInterface.register(SINGLE_QUERIES, sdpa_mask)
