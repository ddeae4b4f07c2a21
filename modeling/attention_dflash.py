"""Attention of a draft layer, and the rotary tables and masks that it needs."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_dflash import DFlashDraftConfig


class DFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    """
    Rotary tables of the rotated part of a head. Their frequencies stay in fp32: rounded to bf16 they are wrong by
    several positions at 10k tokens.
    """

    @staticmethod
    def compute_default_rope_parameters(config, device=None, **kwargs) -> tuple[torch.Tensor, float]:
        """`theta ** (-2i / d)` over the `d` channels that are rotated; Qwen3's own always rotates the whole head."""
        rope = config.rope_parameters
        dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        pairs = torch.arange(0, dim, 2, dtype=torch.float, device=device)
        return 1.0 / rope["rope_theta"] ** (pairs / dim), 1.0

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32 and self.inv_freq.device.type != "meta":
            fresh = type(self)(self.config)
            self.inv_freq = fresh.inv_freq.to(self.inv_freq.device)
            self.original_inv_freq = self.inv_freq.clone()
        return self


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first `d` channels of `x` `[N, heads, T, head_dim]` by `cos`, `sin` `[N, T, d]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    dim = cos.shape[-1]
    if dim == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    rotated, rest = x[..., :dim], x[..., dim:]
    return torch.cat([rotated * cos + rotate_half(rotated) * sin, rest], dim=-1)


def visible_in_block(num_keys: int, block_size: int, window: int | None, causal: bool, device) -> torch.Tensor | None:
    """
    Which of the last `num_keys` keys each slot of a block sees, when the block's own keys are the last `block_size` of
    them. `None` when every slot sees everything.

    Returns:
        `torch.BoolTensor` `[block_size, num_keys]` or `None`.
    """
    if not causal and (window is None or num_keys <= window):
        return None
    key = torch.arange(num_keys, device=device) - (num_keys - block_size)  # 0 is the anchor, negative is context
    slot = torch.arange(block_size, device=device)[:, None]
    visible = key <= slot if causal else torch.ones(block_size, num_keys, dtype=torch.bool, device=device)
    if window is not None:
        visible = visible & (slot - key < window)
    return visible  # [block, keys]


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float mask from a boolean one: eager attention would *add* a boolean mask as 0 and 1, silently."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


class DFlashAttention(nn.Module):
    """Attention of a draft layer: queries from the block, keys and values from context and block."""

    def __init__(self, config: DFlashDraftConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False  # read by SDPA; causality inside the block comes from the mask
        self.causal_in_block = config.layer_is_causal(layer_idx)
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.v_head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.v_head_dim, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.value_dim, self.value_scale = config.v_head_dim, config.attention_value_scale
        if config.attention_sink_bias:
            self.attention_sink_bias = nn.Parameter(torch.empty(config.num_attention_heads))

    def keys_values(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """Keys `[N, kv_heads, T, head_dim]` and values `[N, kv_heads, T, v_head_dim]` of `states` `[N, T, H]`."""
        keys = self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        values = self.v_proj(states).unflatten(-1, (-1, self.value_dim)).transpose(1, 2)
        if self.value_scale != 1.0:
            values = values * self.value_scale
        return apply_rotary(keys, cos, sin), values

    def forward(self, hidden_states, context, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        block_size = hidden_states.shape[1]
        cos, sin = position_embeddings  # [N, C + B, head_dim]
        states = hidden_states if context is None else torch.cat([context, hidden_states], dim=1)  # [N, C + B, H]

        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)  # [N, heads, B, head_dim]
        query = apply_rotary(query, cos[:, -block_size:], sin[:, -block_size:])
        key, value = self.keys_values(states, cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        # A caller that keeps slots or trains hands over a 4-D mask; otherwise the block's keys are the last ones.
        if attention_mask is None or (torch.is_tensor(attention_mask) and attention_mask.dim() == 2):
            attention_mask = self._mask_from_padding(attention_mask, key.shape[2], block_size, query)

        if self.config.attention_sink_bias:
            key, value, attention_mask = self._with_sink(key, value, attention_mask, query)
        implementation = self.config._attn_implementation
        if isinstance(attention_mask, BlockMask):  # training; only flex attention reads it, in one dtype
            implementation = "flex_attention"
            query, key = query.to(value.dtype), key.to(value.dtype)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def _with_sink(self, key, value, attention_mask, query):
        """
        A sink is one more key whose score is the head's own constant and whose value is zero: it takes weight from the
        others and gives nothing. As a column of the mask it works with every attention function that takes one.
        """
        rows, heads, size, _ = query.shape
        seen = query.new_zeros(()) if attention_mask is None else attention_mask[..., : key.shape[2]]
        seen = seen.to(query.dtype).expand(rows, heads, size, key.shape[2])
        sink = self.attention_sink_bias.to(query.dtype)[None, :, None, None].expand(rows, heads, size, 1)
        pad = (0, 0, 0, 1)
        return (
            nn.functional.pad(key, pad),  # a key of zeros scores 0 before the mask is added
            nn.functional.pad(value, pad),
            torch.cat([seen, sink], dim=-1),  # [N, heads, B, keys + 1]
        )

    def _mask_from_padding(self, padding, num_keys, block_size, query):
        visible = visible_in_block(num_keys, block_size, self.sliding_window, self.causal_in_block, query.device)
        if padding is not None and not padding.all():
            real = padding[:, None, None, -num_keys:].bool()  # [N, 1, 1, keys]
            visible = real if visible is None else visible & real
        if visible is None:
            return None
        return additive(visible.expand(query.shape[0], 1, block_size, num_keys), query.dtype)
