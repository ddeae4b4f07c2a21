"""The masks of drafts over slots: what each drafted token attends to, before the draft and in it."""

from typing import NamedTuple

import torch

from dflash_hf.decoding.slots import SlotCache
from dflash_hf.modeling.modeling_dflash import additive_mask


class MaskRule(NamedTuple):
    """
    Which earlier tokens a layer attends to; by default all.

    Attributes:
        window (`int`, *optional*): Only keys less than so many tokens back.
        chunk (`int`, *optional*): Only keys in the query's own chunk of that many tokens.
    """

    window: int | None = None
    chunk: int | None = None


def verification_mask(
    cache: SlotCache, slots: torch.LongTensor, rule: MaskRule, dtype: torch.dtype, draft
) -> torch.Tensor:
    """
    The mask of a forward of the target over a draft.

    Args:
        cache (`SlotCache`): With room for the draft.
        slots (`torch.LongTensor`): `[R, n]`, the draft's tokens in their rows, consecutive.
        rule (`MaskRule`): That of the layers.
        dtype (`torch.dtype`): Of the mask: floating, since eager attention would add a boolean one as 0 and 1.
        draft (`Block` or `Tree`): With `ancestors`, a token attends to these of its draft, and windows and chunks
            count its `depths`.

    Returns:
        `torch.Tensor` `[R, 1, n, view]`, to be added to the scores.
    """
    ring = cache.ring_of(rule.window or rule.chunk)
    tokens = tokens_in_slots(cache, ring, slots[:, -1:])
    if draft.ancestors is None:
        key = tokens[:, None]  # [R or 1, 1, view]
        query = slots[:, :, None]  # [R, n, 1]
        visible = in_window(key, query, *rule) & (key <= query)
    else:
        visible = _visible_in_tree(tokens, slots, rule, draft)
    if ring is not None:
        visible = visible & (tokens[:, None] >= 0)
    return additive_mask(visible, dtype)[:, None]


def tokens_in_slots(cache: SlotCache, ring, last: torch.LongTensor) -> torch.LongTensor:
    """`[R or 1, view]`, the token in each slot after those up to `last` `[R, 1]` were written; negative: none."""
    if ring is None:
        return torch.arange(cache.view, device=last.device)[None]
    return ring.tokens(cache.view_of(ring), last)


def in_window(
    key: torch.LongTensor, query: torch.LongTensor, window: int | None, chunk: int | None = None
) -> torch.BoolTensor:
    """Whether tokens `key` are in the window and in the chunk of tokens `query`; both are broadcast."""
    visible = torch.ones_like(query - key, dtype=torch.bool)
    if window is not None:
        visible = visible & (query - key < window)
    if chunk is not None:
        visible = visible & (query // chunk == key // chunk)
    return visible


def _visible_in_tree(tokens, slots, rule: MaskRule, draft) -> torch.BoolTensor:
    """`[R, n, view]`: a node attends to the tokens before the draft, its ancestors and itself."""
    rows, size = slots.shape
    start = slots[:, :1, None]  # [R, 1, 1]
    key = tokens[:, None]  # [R or 1, 1, view]
    node = (key - start).expand(rows, 1, -1)  # the node of a key, if it is one of the draft
    is_drafted = (node >= 0) & (node < size)
    node = node.clamp(0, size - 1)
    visible = (key < start) | is_drafted & draft.ancestors.gather(2, node.expand(-1, size, -1))
    depth = draft.depths[:, None].gather(2, node)  # [R, 1, view]
    key_position = torch.where(is_drafted, start + depth, key)
    query_position = start + draft.depths[:, :, None]
    return visible & in_window(key_position, query_position, *rule)
