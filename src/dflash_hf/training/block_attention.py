"""
Dense attention over blocks, group by group.

A mask over all pairs of `A*B` queries and `S + A*B` keys is mostly empty: no block sees another. Blocks lie in the
order of their anchors, so a group of neighbours sees no context beyond its last anchor, and no blocks but its own.
Each group attends to those keys alone. They are concatenated for one group at a time, in the backward pass again, so
that memory holds the keys of a single group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from dflash_hf.modeling.modeling_dflash import additive_mask
from dflash_hf.training.block_mask import BlockGroups


_PREFIX = "dflash_groups_"  # before the name of the implementation that computes each group


@contextmanager
def groups_as_masks(config) -> Iterator[None]:
    """
    A context in which the layers of a drafter take [`~dflash_hf.training.block_mask.BlockGroups`] in place of a mask.

    A layer reads the name of its attention implementation from the drafter's configuration, where another name stands
    inside of the context. It spans a whole run or evaluation, not one forward: layers that are recomputed attend in
    the backward pass, too.

    Args:
        config (`DFlashDraftConfig`): The drafter's own; restored at the end, also after an error.
    """
    name = config._attn_implementation
    if takes_groups(config):  # an evaluation during a run
        yield
        return
    ALL_ATTENTION_FUNCTIONS.register(f"{_PREFIX}{name}", partial(_attend_to_groups, name))
    config._attn_implementation = f"{_PREFIX}{name}"
    try:
        yield
    finally:
        config._attn_implementation = name


@contextmanager
def without_groups(config) -> Iterator[None]:
    """A context inside of [`groups_as_masks`], for a drafter that decodes: its layers take masks, as outside of it."""
    name = config._attn_implementation
    config._attn_implementation = name.removeprefix(_PREFIX)
    try:
        yield
    finally:
        config._attn_implementation = name


def takes_groups(config) -> bool:
    """Whether the layers of a drafter take groups, see [`groups_as_masks`]."""
    return config._attn_implementation.startswith(_PREFIX)


def _attend_to_groups(implementation: str, module, query, key, value, attention_mask, **kwargs):
    """
    An attention function in transformers' signature: that of `implementation` for a mask, and called once for each
    group of a [`~dflash_hf.training.block_mask.BlockGroups`].
    """
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
    if not isinstance(attention_mask, BlockGroups):
        return attend(module, query, key, value, attention_mask, **kwargs)

    def attend_group(query, context_key, context_value, own_key, own_value, visible):
        """The output `[N, G, heads, head_dim]` of a group's queries, from the keys of its context and its own."""
        keys = torch.cat([context_key, own_key], dim=2)
        values = torch.cat([context_value, own_value], dim=2)
        return attend(module, query, keys, values, additive_mask(visible, query.dtype), **kwargs)[0]

    length = attention_mask.length
    recompute = torch.is_grad_enabled() and len(attention_mask.groups) > 1
    outputs = []
    start = 0
    for context, visible in attention_mask.groups:
        end = start + visible.shape[2]
        own = slice(length + start, length + end)
        arguments = (
            query[:, :, start:end],
            key[:, :, :context],
            value[:, :, :context],
            key[:, :, own],
            value[:, :, own],
            visible,
        )
        if recompute:
            outputs.append(checkpoint(attend_group, *arguments, use_reentrant=False))
        else:
            outputs.append(attend_group(*arguments))
        start = end
    return torch.cat(outputs, dim=1), None  # [N, A*B, heads, head_dim]
