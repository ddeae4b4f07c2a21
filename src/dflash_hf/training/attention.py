"""
Dense attention over blocks, group by group.

A mask over all pairs of `A*B` queries and `S + A*B` keys is mostly empty: no block sees another. Blocks lie in the
order of their anchors, so a group of neighbours sees no context beyond its last anchor, and no blocks but its own.
Each group attends to those keys alone, which are put together only while it does, also in the backward pass.
"""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from dflash_hf.modeling.cache_dflash import additive
from dflash_hf.training.blocks import BlockGroups


_PREFIX = "dflash_groups_"  # before the name of the implementation that computes each group


def attend_in_groups(config) -> None:
    """Let a drafter take [`~dflash_hf.training.blocks.BlockGroups`] in place of a mask, until [`restore`]."""
    name = config._attn_implementation
    if not name.startswith(_PREFIX):
        ALL_ATTENTION_FUNCTIONS.register(f"{_PREFIX}{name}", partial(grouped_attention, name))
        config._attn_implementation = f"{_PREFIX}{name}"


def restore(config) -> None:
    """Undo [`attend_in_groups`]."""
    config._attn_implementation = config._attn_implementation.removeprefix(_PREFIX)


def grouped_attention(implementation: str, module, query, key, value, attention_mask, **kwargs):
    """
    An attention function of transformers: as `implementation`, and for [`~dflash_hf.training.blocks.BlockGroups`]
    group by group.
    """
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
    if not isinstance(attention_mask, BlockGroups):
        return attend(module, query, key, value, attention_mask, **kwargs)

    def attend_group(query, seen, own, visible):
        """The output `[N, G, heads, head_dim]` for the queries of a group; keys and values of its context and own."""
        keys, values = (torch.cat(pair, dim=2) for pair in zip(seen, own, strict=True))
        return attend(module, query, keys, values, additive(visible, query.dtype), **kwargs)[0]

    length = attention_mask.length
    recompute = torch.is_grad_enabled() and len(attention_mask.groups) > 1
    outputs = []
    start = 0
    for context, visible in attention_mask.groups:
        end = start + visible.shape[2]
        seen = [states[:, :, :context] for states in (key, value)]
        own = [states[:, :, length + start : length + end] for states in (key, value)]
        arguments = (query[:, :, start:end], seen, own, visible)
        if recompute:
            outputs.append(checkpoint(attend_group, *arguments, use_reentrant=False))
        else:
            outputs.append(attend_group(*arguments))
        start = end
    return torch.cat(outputs, dim=1), None  # [N, A*B, heads, head_dim]
