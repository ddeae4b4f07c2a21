"""
The attention mask of blocks over the keys `[context S | A blocks of B]`.

It is one rule, in four sentences. A block query sees context tokens `p < a`, *strictly*: when the block is drafted,
the target has not read its anchor yet. It sees every slot of its own block (slots `k' <= k` only, in a layer that is
causal in the block). It sees no other block. It sees no padding.

[`BlockMaskRule`] is the rule for one query and one key; the functions evaluate it for the three kinds of attention: a
dense mask over all pairs, groups of neighbouring blocks (`block_attention.py`), and flex attention.
"""

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


@dataclass
class BlockMaskRule:
    """
    Which keys a query of a block sees, in the layers of one type.

    Args:
        anchors (`torch.LongTensor`): `[N, A]`.
        attention_mask (`torch.Tensor`): `[N, S]`, nonzero at real tokens.
        block_size (`int`): Slots `B` of a block.
        window (`int`, *optional*): In a sliding layer, keys more than `window - 1` positions back are hidden.
        causal (`bool`): Whether slots see only earlier slots and themselves.
    """

    anchors: torch.LongTensor
    attention_mask: torch.Tensor
    block_size: int
    window: int | None = None
    causal: bool = False

    def __post_init__(self):
        self.batch_size, self.num_anchors = self.anchors.shape
        self.length = self.attention_mask.shape[1]  # S
        self.num_queries = self.num_anchors * self.block_size
        self.num_keys = self.length + self.num_queries
        self.is_real = self.attention_mask.bool()

    def visible(self, row: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.BoolTensor:
        """
        Whether a query sees a key, for indices that broadcast.

        Every query sees its own block, even that of an invalid anchor, so no row is empty and none can become NaN.
        """
        # Flex attention evaluates whole tiles, with queries and keys past the end: indices stay inside their tensors.
        block = query // self.block_size
        slot = query % self.block_size
        key_block = (key - self.length) // self.block_size  # of a key that is a slot
        key_slot = (key - self.length) % self.block_size
        anchor = self.anchors[row, block.clamp(max=self.num_anchors - 1)]
        in_context = (key < anchor) & self.is_real[row, key.clamp(max=self.length - 1)]
        in_own_block = (key >= self.length) & (key_block == block)
        if self.causal:
            in_own_block = in_own_block & (key_slot <= slot)
        if self.window is not None:
            in_context = in_context & (anchor + slot - key < self.window)
            in_own_block = in_own_block & (slot - key_slot < self.window)
        return in_context | in_own_block


@dataclass
class BlockGroups:
    """
    The mask of [`block_mask`], cut into groups of neighbouring blocks. A group of `G` queries sees the first `C` keys
    of the context and its own `G` keys. It is stored as the pair of `C` and its mask `[N, 1, G, C + G]`.
    """

    length: int  # S
    groups: list[tuple[int, torch.BoolTensor]]


def block_mask(
    anchors: torch.LongTensor,
    attention_mask: torch.Tensor,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
) -> torch.BoolTensor:
    """The dense mask `[N, 1, A*B, S + A*B]`, true where visible; arguments as those of [`BlockMaskRule`]."""
    rule = BlockMaskRule(anchors, attention_mask, block_size, window, causal)
    row = torch.arange(rule.batch_size, device=anchors.device)[:, None, None, None]
    query = torch.arange(rule.num_queries, device=anchors.device)[:, None]
    key = torch.arange(rule.num_keys, device=anchors.device)
    return rule.visible(row, query, key)


def block_groups(
    anchors: torch.LongTensor,
    attention_mask: torch.Tensor,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
    queries: int = 512,
) -> BlockGroups:
    """The mask for groups of about `queries` queries; other arguments as those of [`BlockMaskRule`]."""
    rule = BlockMaskRule(anchors, attention_mask, block_size, window, causal)
    device = anchors.device
    row = torch.arange(rule.batch_size, device=device)[:, None, None, None]
    blocks_per_group = max(queries // block_size, 1)
    groups = []
    for first in range(0, rule.num_anchors, blocks_per_group):
        last = min(first + blocks_per_group, rule.num_anchors)
        query = torch.arange(first * block_size, last * block_size, device=device)
        context = int(anchors[:, first:last].max())  # no block of the group sees a later key
        key = torch.cat([torch.arange(context, device=device), rule.length + query])
        groups.append((context, rule.visible(row, query[:, None], key)))
    return BlockGroups(rule.length, groups)


def flex_mask(
    anchors: torch.LongTensor,
    attention_mask: torch.Tensor,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
) -> BlockMask:
    """The mask for flex attention, which skips empty tiles; arguments as those of [`BlockMaskRule`]."""
    rule = BlockMaskRule(anchors, attention_mask, block_size, window, causal)
    on_cuda = anchors.device.type == "cuda"  # uncompiled, all pairs of a batch exist at once

    def visible(row, head, query, key):  # torch takes a function of these four, not a method
        return rule.visible(row, query, key)

    return create_block_mask(
        visible,
        B=rule.batch_size,
        H=None,
        Q_LEN=rule.num_queries,
        KV_LEN=rule.num_keys,
        device=anchors.device,
        _compile=on_cuda,
    )
