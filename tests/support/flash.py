"""A stand-in for FlashAttention, which needs a GPU: it takes no mask but that of padding, as the real one."""

import torch
from transformers.integrations.sdpa_attention import repeat_kv


def flash_attention(
    module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs,
):
    """
    An attention function in transformers' signature, for `[R, heads, n, head_dim]`. The queries are the last of the
    keys; `attention_mask` is `[R, keys]`, 0 for padding.

    Raises:
        `IndexError`: a mask with other dimensions. On a GPU the real one would end the process.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise IndexError(f"FlashAttention got a mask of shape {list(attention_mask.shape)}")
    groups = query.shape[1] // key.shape[1]
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    key_index = torch.arange(num_keys)
    query_index = torch.arange(num_keys - num_queries, num_keys)[:, None]
    visible = key_index <= query_index
    if is_causal is False:
        visible = torch.ones_like(visible)
    if sliding_window is not None:
        visible = visible & (query_index - key_index < sliding_window)
    visible = visible[None, None]
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, -num_keys:].bool()
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    return (weights @ value).transpose(1, 2).contiguous(), None


def load_with_flash(target, monkeypatch, name: str = "flash_attention_2") -> None:
    """Make a target one that was loaded with FlashAttention, until the test ends."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, flash_attention)
    target.config._attn_implementation = name
