"""
Draft trees (DDTree, arXiv 2604.12989): the likeliest of all paths through the likely tokens of each slot are verified
in one forward. The target's choice after each node decides which path is accepted, so the text is the target's own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from dflash_hf.decoding.acceptance import Block
from dflash_hf.decoding.drafter import Drafter


MOST_BEAMS = 16  # paths kept at each depth if paths have states
# Log-probabilities are clamped away from 0 and -inf, so that a node stays likelier than its children in fp32.
_LEAST, _MOST = -20.0, -1e-3


class Tree(NamedTuple):
    """A draft that is a tree for each row; node 0 is the anchor, and nodes are sorted by the chance of their paths."""

    tokens: torch.LongTensor  # [R, n]
    depths: torch.LongTensor  # [R, n]   0 for the anchor
    ancestors: torch.BoolTensor  # [R, n, n]  whether a node sees another: an ancestor or itself
    parents: torch.LongTensor  # [R, n]  0 for the anchor, too
    log_probs: torch.Tensor  # [R, n]    of the path to a node; always below that of the path to its parent

    def first(self, size: int) -> "Tree":
        """The tree of the `size` likeliest nodes, the anchor included."""
        tables = (self.tokens, self.depths, self.ancestors[:, :, :size], self.parents, self.log_probs)
        return Tree(*(table[:, :size] for table in tables))

    @property
    def block(self) -> Block | None:
        """The same draft as a block, which is verified faster, if it is a single path in every row."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return Block(self.tokens) if bool((self.depths == places).all()) else None

    def agree(self, chosen: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
        """As [`Block.agree`]: the length of the accepted path `[R]`, and its nodes `[R, n]`, zeros past the end."""
        agrees = self.tokens == chosen.gather(1, self.parents)  # [R, n]
        agrees[:, 0] = True
        reached = (agrees[:, None] | ~self.ancestors).all(dim=-1)  # [R, n]
        # Siblings differ, so at most one node is reached at each depth; the others go past the end.
        size = chosen.shape[1]
        places = torch.where(reached, self.depths, size)
        nodes = torch.arange(size, device=chosen.device).expand_as(places)
        path = torch.zeros(len(chosen), size + 1, dtype=torch.long, device=chosen.device)
        return reached.sum(dim=1), path.scatter_(1, places, nodes)[:, :size]

    def children(self, row: int) -> dict[tuple[int, int], int]:
        """As [`Block.children`]."""
        nodes = zip(self.parents[row].tolist(), self.tokens[row].tolist(), strict=True)
        return {key: node for node, key in enumerate(nodes) if node}


def draft_tree(
    drafter: Drafter, anchors: torch.LongTensor, draws: list[int], nodes: int, top_k: int | None = None
) -> Tree:
    """
    The tree of the likeliest paths of a block. It is that of a best-first search over the whole vocabulary, or over
    the candidates of the drafter's head; where paths have states, at most `MOST_BEAMS` of each depth are extended.

    Args:
        drafter (`Drafter`): What drafts the block.
        anchors (`torch.LongTensor`): `[R]`, the last committed token of each row.
        draws (`list[int]`): The number of each row's next sample, for the noise.
        nodes (`int`): Tokens besides the anchor.
        top_k (`int`, *optional*): Likely tokens of each slot; 1 gives a single path. Default: `nodes`, beyond which
            none can be part of the tree. On SmolLM2 and its drafter, 8 lose 0.3 % of the expected tokens at 31 nodes,
            0.9 % at 63 and 2.6 % at 255, and save nothing.
    """
    top_k = top_k or nodes
    hidden = drafter.hidden_states(anchors)
    head = drafter.head
    beams = nodes
    if head.order == 0:
        extend = _independent(drafter, hidden, draws, top_k)
    elif head.order == 1 and head.top_k is not None:
        extend = _chained(drafter, drafter.in_vocabulary(anchors), hidden, draws, top_k)
    else:
        extend = _with_states(drafter, drafter.in_vocabulary(anchors), hidden, draws, top_k)
        beams = min(nodes, MOST_BEAMS)
    return grow_tree(anchors, extend, hidden.shape[1], nodes, beams)


def grow_tree(anchors: torch.LongTensor, extend: Callable, depth: int, nodes: int, beams: int) -> Tree:
    """
    At each depth the likeliest paths are extended in one batch; the likeliest of all paths found form the tree. A beam
    as wide as the tree has nodes finds the same tree as a best-first search.

    Args:
        anchors (`torch.LongTensor`): `[R]`.
        extend (`Callable`): From a slot and the numbers `[R, w]` of the paths that are kept among those of its last
            result (`None` at first): next tokens and their log-probabilities, both `[R, w, k]`.
        depth (`int`): Slots.
        nodes (`int`): Paths to choose.
        beams (`int`): Maximum number of paths kept at each depth.
    """
    totals = torch.zeros(len(anchors), 1, device=anchors.device)  # [R, w], log-probabilities of the paths kept
    kept = None
    levels = []
    count = 0
    prefixes = anchors.new_empty(len(anchors), 1, 0)  # [R, w, slot], the numbers of a path's prefixes
    for slot in range(depth):
        ids, log_probs = extend(slot, kept)
        k = ids.shape[-1]
        totals = (totals[..., None] + log_probs.nan_to_num(_LEAST).clamp(_LEAST, _MOST)).flatten(1)  # [R, w * k]
        totals, kept = totals.topk(min(beams, totals.shape[1]), dim=-1)  # [R, w]
        numbers = torch.arange(count, count + kept.shape[1], device=kept.device).expand_as(kept)
        prefixes = prefixes.gather(1, (kept // k)[..., None].expand(-1, -1, slot))
        prefixes = torch.cat([prefixes, numbers[..., None]], dim=-1)
        tokens = ids.expand(-1, len(log_probs[0]), -1).flatten(1).gather(1, kept)
        levels.append((tokens, totals, torch.nn.functional.pad(prefixes, (0, depth - slot - 1), value=-1)))
        count += kept.shape[1]
    tokens, log_probs, prefixes = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    return _tree_of_paths(anchors, tokens, log_probs, prefixes, min(nodes, count))


def _independent(drafter: Drafter, hidden: torch.Tensor, draws: list[int], top_k: int) -> Callable:
    """Slots that do not depend on each other."""
    logits = drafter.logits(hidden, draws)  # [R, D, V]
    best, ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    log_probs = best.float() - logits.float().logsumexp(dim=-1, keepdim=True)  # [R, D, k]
    device = drafter.context.offset.device
    return _of_tables(drafter.draft.target_ids(ids).to(device), log_probs.to(device))


def _of_tables(ids: torch.LongTensor, log_probs: torch.Tensor) -> Callable:
    """For [`grow_tree`]: the same next tokens after every path, `[R, D, k]` both."""

    def extend(slot: int, kept):
        width = 1 if kept is None else kept.shape[1]
        return ids[:, slot, None].expand(-1, width, -1), log_probs[:, slot, None].expand(-1, width, -1)

    return extend


def _chained(
    drafter: Drafter, anchors: torch.LongTensor, hidden: torch.Tensor, draws: list[int], top_k: int
) -> Callable:
    """Slots whose scores depend on the token before, one of a few candidates: all pairs are scored in one call."""
    head = drafter.head
    device = drafter.context.offset.device
    ids, logits = drafter.candidates(hidden, draws)  # [R, D, c]
    query, _ = head.step(None, anchors, hidden[:, 0])
    first = head.scores(query, ids[:, 0], logits[:, 0])[:, None, None]  # [R, 1, 1, c]
    query, _ = head.step(None, ids[:, :-1], hidden[:, 1:, None])  # [R, D - 1, c, q]
    later = head.scores(query, ids[:, 1:, None], logits[:, 1:, None])  # [R, D - 1, c, c]
    k = min(top_k, ids.shape[-1])
    of_first = first.log_softmax(dim=-1).to(device).topk(k, dim=-1)
    of_later = later.log_softmax(dim=-1).to(device).topk(k, dim=-1)
    ids = ids.to(device)
    order = None

    def extend(slot: int, kept):
        nonlocal order
        values, indices = of_first if slot == 0 else of_later
        best = values[:, max(slot - 1, 0)]  # [R, c, k]
        following = indices[:, max(slot - 1, 0)]
        if kept is not None:
            places = order.flatten(1).gather(1, kept)[..., None].expand(-1, -1, k)  # the candidates of these paths
            best = best.gather(1, places)  # [R, w, k]
            following = following.gather(1, places)
        order = following
        return ids[:, slot].gather(1, order.flatten(1)).view_as(order), best

    return extend


def _with_states(
    drafter: Drafter, anchors: torch.LongTensor, hidden: torch.Tensor, draws: list[int], top_k: int
) -> Callable:
    """Slots whose scores depend on the tokens before: each path carries the state of the drafter's head."""
    head = drafter.head
    rows = len(anchors)
    ids, logits = drafter.candidates(hidden, draws)  # [R, D, c]
    state = head.start(anchors)
    before = anchors[:, None]
    k = min(top_k, ids.shape[-1])
    device = drafter.context.offset.device

    def extend(slot: int, kept):
        nonlocal state, before
        if kept is not None:
            kept = kept.to(before.device)
            if state is not None:
                parents = kept // k + torch.arange(rows, device=kept.device)[:, None] * (len(state) // rows)
                state = state[parents.flatten()]
            before = before.gather(1, kept)
        width = before.shape[1]
        slot_hidden = hidden[:, slot].repeat_interleave(width, dim=0)  # [R * w, H]
        slot_ids = ids[:, slot].repeat_interleave(width, dim=0)  # [R * w, c]
        slot_logits = logits[:, slot].repeat_interleave(width, dim=0)
        query, state = head.step(state, drafter.in_vocabulary(before.flatten()), slot_hidden)
        best, order = head.scores(query, slot_ids, slot_logits).log_softmax(dim=-1).topk(k, dim=-1)
        tokens = slot_ids.gather(-1, order).view(rows, width, k)
        before = tokens.flatten(1)
        return tokens.to(device), best.view(rows, width, k).to(device)

    return extend


def _tree_of_paths(anchors, tokens, log_probs, prefixes, nodes: int) -> Tree:
    """
    The tree of the `nodes` likeliest paths, from the last token `[R, M]` of each, its log-probability, and the numbers
    of its prefixes, itself included, `[R, M, D]`. If a path is chosen, so are all of its prefixes.
    """
    paths = log_probs.shape[1]
    log_probs, chosen = log_probs.topk(nodes, dim=-1)  # [R, n], the likeliest first
    prefixes = prefixes.gather(1, chosen[..., None].expand(-1, -1, prefixes.shape[-1]))  # [R, n, D]
    tokens = torch.cat([anchors[:, None], tokens.gather(1, chosen)], dim=1)
    depths = torch.nn.functional.pad((prefixes >= 0).sum(dim=-1), (1, 0))  # [R, n + 1]
    # What each node sees, by the ranks of its prefixes; rank 0 is the anchor.
    ranks = prefixes.new_zeros(len(anchors), paths + 1)  # the last one is for prefixes past the end
    ranks = ranks.scatter(1, chosen, torch.arange(1, nodes + 1, device=chosen.device).expand_as(chosen))
    ranks = ranks.gather(1, prefixes.flatten(1) % (paths + 1)).view_as(prefixes)  # -1 is the last
    sees = torch.zeros(*depths.shape, nodes + 1, dtype=torch.bool, device=chosen.device)
    sees[:, 1:].scatter_(2, ranks, True)
    sees[:, :, 0] = True
    above = torch.nn.functional.pad(ranks, (1, 0))  # the anchor is at depth 0
    parents = torch.nn.functional.pad(above.gather(2, depths[:, 1:, None] - 1)[..., 0], (1, 0))
    return Tree(tokens, depths, sees, parents, torch.nn.functional.pad(log_probs, (1, 0)))


def probe_tree(block: torch.LongTensor) -> tuple[Tree, torch.LongTensor]:
    """
    For a probe of a target: a tree with the first three tokens of a block `[2, n]`, next to others that come before
    them, and the path of these.
    """
    anchors, second, third = block[:, :3].T
    ids = torch.stack([second + 1, second, third, anchors], dim=1).view(2, 2, 2)  # [R, slots, candidates]
    log_probs = torch.tensor([[-0.1, -0.2], [-0.5, -9.0]], device=block.device).expand(2, 2, 2)

    tree = grow_tree(anchors, _of_tables(ids, log_probs), depth=2, nodes=4, beams=4)
    return tree, torch.tensor([[0, 2, 4]] * 2, device=block.device)
