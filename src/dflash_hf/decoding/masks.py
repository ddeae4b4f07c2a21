"""The masks of candidates over slots: what each candidate attends to, before the anchor and after it."""

from typing import NamedTuple

import torch

from dflash_hf.decoding.slots import SlotCache
from dflash_hf.modeling.modeling_dflash import additive_mask


class LayerMaskRule(NamedTuple):
    """
    Which earlier tokens a layer attends to; by default all.

    Attributes:
        window (`int`, *optional*): Only keys of the last `window` tokens, the query's own included.
        chunk (`int`, *optional*): Only keys in the query's own chunk of `chunk` tokens.
    """

    window: int | None = None
    chunk: int | None = None


def verification_mask(
    cache: SlotCache, indices: torch.LongTensor, rule: LayerMaskRule, dtype: torch.dtype, candidates
) -> torch.Tensor:
    """
    The mask of a forward of the target over candidates.

    Args:
        cache (`SlotCache`): With room for the candidates.
        indices (`torch.LongTensor`): `[R, n]`, of the candidates in their rows, consecutive.
        rule (`LayerMaskRule`): The rule of the layers that take this mask.
        dtype (`torch.dtype`): Of the mask: floating, since eager attention would add a boolean one as 0 and 1.
        candidates (`Block` or `Tree`): With `ancestors`, a candidate attends to these, and windows and chunks count
            its `depths`.

    Returns:
        `torch.Tensor` `[R, 1, n, K]`, to be added to the scores.
    """
    # Transformers keeps the keys of chunked attention in a sliding-window layer whose window is the chunk.
    ring = cache.ring_of(rule.window or rule.chunk)
    key_indices = indices_in_slots(cache, ring, indices[:, -1:])  # [R or 1, K]
    if candidates.ancestors is None:
        key = key_indices[:, None]  # [R or 1, 1, K]
        query = indices[:, :, None]  # [R, n, 1]
        visible = is_within(key, query, *rule) & (key <= query)
    else:
        visible = _visible_in_tree(key_indices, indices, rule, candidates)
    if ring is not None:
        visible = visible & (key_indices[:, None] >= 0)
    return additive_mask(visible, dtype)[:, None]


def indices_in_slots(cache: SlotCache, ring, last: torch.LongTensor) -> torch.LongTensor:
    """
    `[R or 1, K]`, the index of the token in each slot after those up to index `last` `[R, 1]` were written; negative:
    none.
    """
    if ring is None:
        return torch.arange(cache.num_attended, device=last.device)[None]
    return ring.indices(cache.num_attended_of(ring), last)


def is_within(
    key: torch.LongTensor, query: torch.LongTensor, window: int | None, chunk: int | None = None
) -> torch.BoolTensor:
    """Whether indices `key` are within the window and the chunk of indices `query`; both are broadcast."""
    visible = torch.ones_like(query - key, dtype=torch.bool)
    if window is not None:
        visible = visible & (query - key < window)
    if chunk is not None:
        visible = visible & (query // chunk == key // chunk)
    return visible


def _visible_in_tree(key_indices, indices, rule: LayerMaskRule, tree) -> torch.BoolTensor:
    """`[R, n, K]`: a node attends to the tokens before the anchor, its ancestors and itself."""
    rows, size = indices.shape
    start = indices[:, :1, None]  # [R, 1, 1]
    key = key_indices[:, None]  # [R or 1, 1, K]
    node = (key - start).expand(rows, 1, -1)  # the node that a key belongs to, if any
    is_node = (node >= 0) & (node < size)
    node = node.clamp(0, size - 1)
    visible = (key < start) | (is_node & tree.ancestors.gather(2, node.expand(-1, size, -1)))
    # Windows and chunks count tokens of a node's own path, on which its index is the anchor's plus its depth.
    depth = tree.depths[:, None].gather(2, node)  # [R, 1, K]
    path_index_of_key = torch.where(is_node, start + depth, key)
    path_index_of_query = start + tree.depths[:, :, None]
    return visible & is_within(path_index_of_key, path_index_of_query, *rule)
