"""
Anchors, block inputs, positions, labels and masks of one training forward over `[context S | A blocks of B]`.

The mask, in four sentences. A block query sees context tokens `p < a`, *strictly*: when the block is drafted, the
target has not read its anchor yet. It sees every slot of its own block (slots `k' <= k` only, in a layer that is
causal in the block). It sees no other block. It sees no padding.
"""

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


_GOLDEN = -7046029254386353131  # 2**64 over the golden ratio, as int64: the increment of splitmix64


@dataclass
class Blocks:
    """The tensors of `A` blocks of `B` slots for each of `N` sequences."""

    input_ids: torch.LongTensor  # [N, A*B]       anchor token, then masks
    position_ids: torch.LongTensor  # [N, S + A*B]   context p at p, slot k at a + k
    labels: torch.LongTensor  # [N, A, T]      token at a + k, the anchor first
    counted: torch.BoolTensor  # [N, A, T]      tokens that the loss counts; never the anchor
    before: torch.LongTensor  # [N, A, T]      index of the token before, whose state predicts it, in the batch [N*S]


@dataclass
class BlockGroups:
    """The mask of [`block_mask`], cut into groups of neighbouring blocks; `G` queries of a group, `C` context keys."""

    length: int  # S
    groups: list[tuple[int, torch.BoolTensor]]  # C, and [N, 1, G, C + G]  which of these context and own keys are seen


def example_seeds(input_ids: torch.Tensor, attention_mask: torch.Tensor, seed: int, step: int) -> torch.LongTensor:
    """
    One seed per sequence, from its tokens, `seed` and `step` only: an example draws the same anchors however the batch
    is split, padded or distributed over ranks, other anchors at another step, and the same anchors after a resume.

    Args:
        input_ids (`torch.LongTensor`): `[N, S]`.
        attention_mask (`torch.Tensor`): `[N, S]`, nonzero at real tokens.

    Returns:
        `torch.LongTensor` `[N]`.
    """
    place = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device) * _GOLDEN  # [S]
    content = (_mix(input_ids.long() + place) * attention_mask.bool()).sum(1)  # [N], wraps
    return _mix(content + _mix(_mix(torch.tensor(seed, device=input_ids.device)) + step))


def sample_anchors(
    loss_mask: torch.Tensor,
    num_anchors: int,
    generator: torch.Generator | None = None,
    seeds: torch.LongTensor | None = None,
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """
    Draw anchors uniformly without replacement among positions `a >= 1` with `loss_mask[a]` and `loss_mask[a + 1]`: a
    block needs a context before the anchor and a supervised token after it.

    Args:
        loss_mask (`torch.Tensor`): `[N, S]`, nonzero at tokens of responses.
        num_anchors (`int`): Number of anchors `A`.
        generator (`torch.Generator`): Draws the seeds if `seeds` is not given.
        seeds (`torch.LongTensor`): `[N]`; the anchors of a sequence depend on its seed only.

    Returns:
        `anchors` `[N, A]`, ascending, 0 if there is no position left, and `valid` `[N, A]`, false there.
    """
    length = loss_mask.shape[1]
    device = loss_mask.device
    if seeds is None:
        seeds = torch.randint(2**62, (loss_mask.shape[0],), generator=generator).to(device)
    response = loss_mask.bool()
    eligible = torch.zeros_like(response)  # [N, S]
    eligible[:, 1:-1] = response[:, 1:-1] & response[:, 2:]

    # The A largest of independent uniform keys are a uniform sample without replacement.
    place = torch.arange(1, length + 1, device=device) * _GOLDEN
    keys = _mix(seeds[:, None] + place) & 0x7FFFFFFFFFFFFFFF  # [N, S], non-negative
    keys = keys.masked_fill(~eligible, -1)
    keys, picked = keys.topk(min(num_anchors, length), dim=1)  # [N, min(A, S)]
    picked = picked.masked_fill(keys < 0, length).sort(dim=1).values
    picked = torch.nn.functional.pad(picked, (0, num_anchors - picked.shape[1]), value=length)  # [N, A]
    valid = picked < length
    return picked.masked_fill(~valid, 0), valid


def build_blocks(
    input_ids: torch.LongTensor,
    loss_mask: torch.Tensor,
    anchors: torch.LongTensor,
    valid: torch.BoolTensor,
    block_size: int,
    mask_token_id: int,
    anchor_first: bool = False,
    unbroken: bool = False,
) -> Blocks:
    """
    Inputs, positions and labels of the blocks at `anchors`.

    Slot `k` predicts the token at `a + k`, without a shift; slot 0 is the known anchor and predicts nothing. In an
    anchor-first block slot `k` predicts the token at `a + 1 + k`, so the block has one more token.

    Args:
        input_ids (`torch.LongTensor`): `[N, S]`.
        loss_mask (`torch.Tensor`): `[N, S]`, nonzero at tokens that may be labels.
        anchors, valid: `[N, A]`, from [`sample_anchors`].
        block_size (`int`): Slots `B` of a block.
        mask_token_id (`int`): Fills slots 1..B-1.
        anchor_first (`bool`): `sample_from_anchor` of the drafter.
        unbroken (`bool`): Whether a block counts only up to its first token that may not be a label.
    """
    rows, length = input_ids.shape
    num_anchors = anchors.shape[1]
    tokens = block_size + 1 if anchor_first else block_size
    token = torch.arange(tokens, device=input_ids.device)  # [T]
    place = anchors[..., None] + token  # [N, A, T], index a + k into the sequence
    inside = place.clamp(max=length - 1).flatten(1)  # [N, A*T]

    def at(values):
        """The entries `[N, A, T]` of values `[N, S]` at the tokens of the blocks."""
        return values.gather(1, inside).view(place.shape)  # [N, A, T]

    counted = at(loss_mask).bool() & valid[..., None] & (place < length) & (token > 0)
    if unbroken:
        counted = counted & (counted | (token == 0)).long().cumprod(-1).bool()

    block_ids = input_ids.new_full((rows, num_anchors, block_size), mask_token_id)
    block_ids[..., 0] = input_ids.gather(1, anchors)
    context = torch.arange(length, device=input_ids.device).expand(rows, length)
    first = length * torch.arange(rows, device=input_ids.device)[:, None, None]  # index of each sequence's first token
    return Blocks(
        input_ids=block_ids.flatten(1),
        position_ids=torch.cat([context, place[..., :block_size].flatten(1)], dim=1),  # runs past the end
        labels=at(input_ids),
        counted=counted,
        before=first + (place - 1).clamp(0, length - 1),
    )


def by_token(hidden: torch.Tensor, block_size: int, anchor_first: bool = False) -> torch.Tensor:
    """
    The hidden state that predicts each token of a block, `[N, A, T, H]`, from those of its slots, `[N, A*B, H]`; the
    anchor's entry predicts nothing.
    """
    hidden = hidden.unflatten(1, (-1, block_size))
    return torch.nn.functional.pad(hidden, (0, 0, 1, 0)) if anchor_first else hidden


def block_mask(
    anchors: torch.LongTensor,
    attention_mask: torch.Tensor,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
) -> torch.BoolTensor:
    """
    Which keys `[context S | A blocks of B]` each block query sees; see the four sentences at the top of this module.

    Every query sees its own block, even that of an invalid anchor, so no row is empty and none can become NaN.

    Args:
        anchors (`torch.LongTensor`): `[N, A]`.
        attention_mask (`torch.Tensor`): `[N, S]`, nonzero at real tokens.
        block_size (`int`): Slots `B` of a block.
        window (`int`): In a sliding layer, keys more than `window - 1` positions back are hidden.
        causal (`bool`): Whether slots see only earlier slots and themselves.

    Returns:
        `torch.BoolTensor` `[N, 1, A*B, S + A*B]`, true where visible.
    """
    visible, rows, _, queries, keys = _mask_rule(anchors, attention_mask, block_size, window, causal)
    row = torch.arange(rows, device=anchors.device)
    query = torch.arange(queries, device=anchors.device)
    key = torch.arange(keys, device=anchors.device)
    return visible(row[:, None, None, None], None, query[:, None], key)  # [N, 1, A*B, S + A*B]


def block_groups(
    anchors, attention_mask, block_size: int, window=None, causal=False, queries: int = 512
) -> BlockGroups:
    """The mask of [`block_mask`], with the same arguments, for groups of about `queries` queries."""
    visible, rows, _, total, _ = _mask_rule(anchors, attention_mask, block_size, window, causal)
    length = attention_mask.shape[1]
    device = anchors.device
    row = torch.arange(rows, device=device)[:, None, None, None]
    size = max(queries // block_size, 1) * block_size  # queries of a group
    groups = []
    for start in range(0, total, size):
        query = torch.arange(start, min(start + size, total), device=device)
        context = int(anchors[:, start // block_size : (start + size) // block_size].max())  # keys before any anchor
        key = torch.cat([torch.arange(context, device=device), length + query])
        groups.append((context, visible(row, None, query[:, None], key)))
    return BlockGroups(length, groups)


def flex_mask(anchors, attention_mask, block_size: int, window=None, causal=False) -> BlockMask:
    """The mask of [`block_mask`], with the same arguments, for flex attention, which skips empty tiles."""
    on_cuda = anchors.device.type == "cuda"  # uncompiled, all pairs of a batch exist at once
    rule = _mask_rule(anchors, attention_mask, block_size, window, causal)
    return create_block_mask(*rule, device=anchors.device, _compile=on_cuda)


def _mask_rule(anchors, attention_mask, block_size: int, window: int | None, causal: bool) -> tuple:
    """The rule of the mask for one query and key, and the numbers of rows, heads, queries and keys."""
    rows, num_anchors = anchors.shape
    length = attention_mask.shape[1]
    queries = num_anchors * block_size
    real = attention_mask.bool()

    def visible(row, head, query, key):
        """Whether a query sees a key, for indices that broadcast."""
        # Flex attention evaluates whole tiles, with queries and keys past the end: indices stay inside their tensors.
        slot = query % block_size
        own_slot = (key - length) % block_size  # of the key, if it is a slot of this block
        anchor = anchors[row, (query // block_size).clamp(max=num_anchors - 1)]
        place = key.clamp(max=length - 1)
        context = (key < anchor) & real[row, place]
        own_block = (key >= length) & ((key - length) // block_size == query // block_size)
        if causal:
            own_block = own_block & (own_slot <= slot)
        if window is not None:
            context = context & (anchor + slot - key < window)
            own_block = own_block & (slot - own_slot < window)
        return context | own_block

    return visible, rows, None, queries, length + queries


def _mix(z: torch.LongTensor) -> torch.LongTensor:
    """The finaliser of splitmix64 on int64, which wraps: stateless random bits, equal on every device."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)
