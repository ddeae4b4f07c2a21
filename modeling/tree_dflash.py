"""
Draft trees (DDTree, arXiv 2604.12989): the likeliest of all paths through the likely tokens of each slot are verified
in one forward. The target's choice after each node decides which path is accepted, so the text is the target's own.
"""

import functools
from typing import NamedTuple

import torch


MOST_NODES = 128
TOP_K = 8  # likely tokens per slot
MOST_BEAMS = 16  # paths kept at each depth if paths have states
# Log-probabilities are clamped away from 0 and -inf, so that a node stays likelier than its children in fp32.
_LEAST, _MOST = -20.0, -1e-3


def bounded(log_probs: torch.Tensor) -> torch.Tensor:
    """Treat NaN as unlikely: `topk` ranks it highest."""
    return log_probs.nan_to_num(_LEAST).clamp(_LEAST, _MOST)


class Paths(NamedTuple):
    """
    Every path that can be among the `n` likeliest, whatever the probabilities. A path takes one of the likely tokens
    of each slot down to its last; paths with likelier tokens instead, and their prefixes, rank before it.
    """

    cells: torch.LongTensor  # [M, D]     of each slot, its index in the flattened `[D, k]`; D * k past the end
    last: torch.LongTensor  # [M]         the cell of the last slot
    ancestors: torch.LongTensor  # [M, D] the prefixes of each path, itself included; -1 past the end
    levels: tuple[slice, ...]  # D        the paths that end in each slot
    top_k: int
    nodes: int  # n, or the number of paths if that is smaller


@functools.lru_cache(maxsize=16)
def every_path(nodes: int, depth: int, top_k: int, device: torch.device) -> Paths:
    """
    Args:
        nodes (`int`): Number of paths to choose, `n`.
        depth (`int`): Slots, `D`.
        top_k (`int`): Likely tokens per slot, `k`.
        device (`torch.device`): Device on which they are chosen.
    """
    level: list[tuple[tuple[int, ...], tuple[int, ...], int, int]] = [((), (), 1, 0)]
    found, levels = [], []
    for slot in range(depth):
        longer = []
        for cells, ancestors, alternatives, likelier in level:
            for rank in range(top_k):
                these = alternatives * (rank + 1)  # paths of the same length that are no less likely in any slot
                if likelier + these > nodes:
                    break
                number = len(found) + len(longer)
                longer.append(((*cells, slot * top_k + rank), (*ancestors, number), these, likelier + these))
        levels.append(slice(len(found), len(found) + len(longer)))
        found, level = found + longer, longer
    rest = [depth - len(path[0]) for path in found]
    tables = (
        [path[0] + (depth * top_k,) * missing for path, missing in zip(found, rest, strict=True)],
        [path[0][-1] for path in found],
        [path[1] + (-1,) * missing for path, missing in zip(found, rest, strict=True)],
    )
    with torch.inference_mode(False):  # for calls in any mode
        cells, last, ancestors = (torch.tensor(table, device=device) for table in tables)
    return Paths(cells, last, ancestors, tuple(levels), top_k, min(nodes, len(found)))


def independent_paths(
    ids: torch.LongTensor, log_probs: torch.Tensor, paths: Paths
) -> tuple[torch.LongTensor, torch.Tensor]:
    """
    Log-probabilities of paths if slots are independent.

    Args:
        ids (`torch.LongTensor`): `[R, D, k]`, the likeliest tokens of each slot, in descending order.
        log_probs (`torch.Tensor`): `[R, D, k]`, their log-probabilities.
        paths (`Paths`): The paths through them.

    Returns:
        The last token of each path and its log-probability, both `[R, M]`.
    """
    each = torch.nn.functional.pad(bounded(log_probs).flatten(1), (0, 1))  # [R, D * k + 1]
    return ids.flatten(1)[:, paths.last], each[:, paths.cells].sum(dim=-1)


def chained_paths(
    ids: torch.LongTensor, first: torch.Tensor, transitions: torch.Tensor, paths: Paths
) -> tuple[torch.LongTensor, torch.Tensor]:
    """
    Log-probabilities of paths if the probabilities of a slot depend on the previous token.

    Args:
        ids (`torch.LongTensor`): `[R, D, c]`, candidates of each slot.
        first (`torch.Tensor`): `[R, c]`, log-probabilities in the first slot.
        transitions (`torch.Tensor`): `[R, D - 1, c, c]`, in each later slot, for every candidate of the previous slot.
        paths (`Paths`): The paths through the likeliest of them.

    Returns:
        As [`independent_paths`].
    """
    rows, top_k = len(ids), paths.top_k
    candidates: torch.LongTensor | None = None
    totals = first.new_zeros(rows, 1)
    tokens, log_probs = [], []
    for slot, level in enumerate(paths.levels):
        scores = first[:, None] if slot == 0 else transitions[:, slot - 1]  # [R, 1 or c, c]
        best, order = bounded(scores).topk(top_k, dim=-1)
        places = (paths.last[level] - slot * top_k).expand(rows, -1)  # [R, m], among the likeliest
        if slot > 0:
            parents = (paths.ancestors[level, slot - 1] - paths.levels[slot - 1].start).expand(rows, -1)  # [R, m]
            places = places + top_k * candidates.gather(1, parents)
            totals = totals.gather(1, parents)
        candidates = order.flatten(1).gather(1, places)  # [R, m]
        totals = totals + best.flatten(1).gather(1, places)
        tokens.append(ids[:, slot].gather(1, candidates))
        log_probs.append(totals)
    return torch.cat(tokens, dim=1), torch.cat(log_probs, dim=1)


class DraftTree(NamedTuple):
    """A tree of drafted tokens for each row; node 0 is the anchor, and every node comes after its parent."""

    tokens: torch.LongTensor  # [R, n + 1]
    depths: torch.LongTensor  # [R, n + 1]   0 for the anchor
    parents: torch.LongTensor  # [R, n + 1]  0 for the anchor, too
    ancestors: torch.BoolTensor  # [R, n + 1, n + 1]  whether a node sees another: an ancestor or itself
    depth: int  # D, maximum number of slots in a path
    log_probs: torch.Tensor  # [R, n + 1]    of the path to a node; always below that of the path to its parent

    def prefix(self, size: int, depth: int) -> "DraftTree":
        """The tree of its `size` likeliest nodes, the anchor included, none deeper than `depth`."""
        tables = (self.tokens, self.depths, self.parents, self.ancestors[:, :, :size], self.log_probs)
        tokens, depths, parents, ancestors, log_probs = (table[:, :size] for table in tables)
        return DraftTree(tokens, depths, parents, ancestors, depth, log_probs)

    def to(self, device: torch.device) -> "DraftTree":
        """The tree on another device. Dynamo of torch 2.8 does not trace `_asdict`."""
        tables = (self.tokens, self.depths, self.parents, self.ancestors, self.log_probs)
        tokens, depths, parents, ancestors, log_probs = (table.to(device) for table in tables)
        return DraftTree(tokens, depths, parents, ancestors, self.depth, log_probs)

    def walk(self, tokens: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
        """
        The path that the target accepts.

        Args:
            tokens (`torch.LongTensor`): `[R, n + 1]`, the target's token after each node.

        Returns:
            The nodes on the path, `[R, D + 1]`, the anchor first and zeros past the end, and their number, `[R]`.
        """
        agrees = self.tokens == tokens.gather(1, self.parents)  # [R, n + 1]
        agrees[:, 0] = True
        reached = (agrees[:, None] | ~self.ancestors).all(dim=-1)  # [R, n + 1]
        # Siblings differ, so at most one node is reached at each depth; the others go past the end.
        places = torch.where(reached, self.depths, self.depth + 1)
        nodes = torch.arange(tokens.shape[1], device=tokens.device).expand_as(places)
        path = torch.zeros(len(tokens), self.depth + 2, dtype=torch.long, device=tokens.device)
        return path.scatter_(1, places, nodes)[:, : self.depth + 1], reached.sum(dim=1)

    def child(self, node: int, token: int, row: int = 0) -> int | None:
        """The child of a node of a row that holds a token."""
        found = (self.parents[row] == node) & (self.tokens[row] == token)
        found[0] = False
        return int(found.nonzero()[0]) if found.any() else None


def likeliest_tree(
    anchors: torch.LongTensor, tokens: torch.LongTensor, log_probs: torch.Tensor, paths: Paths
) -> DraftTree:
    """
    The tree of the likeliest paths, the result of a best-first search.

    Args:
        anchors (`torch.LongTensor`): `[R]`.
        tokens (`torch.LongTensor`): `[R, M]`, the last token of each path.
        log_probs (`torch.Tensor`): `[R, M]`; a path's is below that of each of its prefixes.
        paths (`Paths`): The paths, of which `n` are chosen.
    """
    return _tree_of(anchors, tokens, log_probs, paths.ancestors.expand(len(anchors), -1, -1), paths.nodes)


def beam_tree(anchors: torch.LongTensor, state, after, paths: Paths, width: int = MOST_BEAMS) -> DraftTree:
    """
    The tree for heads whose probabilities depend on all earlier tokens: at each depth the likeliest paths are extended
    in one batch, and the likeliest of all paths found form the tree (DARTree, arXiv 2608.13524). A beam as wide as the
    tree has nodes finds the same tree as a best-first search.

    Args:
        anchors (`torch.LongTensor`): `[R]`.
        state (`torch.Tensor`, *optional*): `[R, ...]`, of the drafter's head before the first slot.
        after (`Callable`): From a slot, the states `[R * w, ...]` and the previous tokens `[R * w]` of `w` paths per
            row: `k` next tokens and their log-probabilities, both `[R * w, k]`, and the next states.
        paths (`Paths`): Gives the numbers of nodes, slots and likely tokens.
        width (`int`): Maximum number of paths kept at each depth.
    """
    rows, depth = len(anchors), len(paths.levels)
    beam, totals = anchors[:, None], torch.zeros(rows, 1, device=anchors.device)  # [R, w]
    beginnings = beam.new_empty(rows, 1, 0)  # [R, w, slot], the numbers of a path's prefixes
    found, count = [], 0
    for slot in range(depth):
        # 1. Extend every path by k candidates.
        ids, log_probs, state = after(slot, state, beam.flatten())
        ways = ids.shape[-1]
        ids = ids.view(rows, -1)  # [R, w * k]
        totals = (totals[..., None] + bounded(log_probs).view(rows, -1, ways)).flatten(1)  # [R, w * k]
        numbers = torch.arange(count, count + ids.shape[1], device=ids.device).expand(rows, -1)
        longer = torch.cat([beginnings.repeat_interleave(ways, dim=1), numbers[..., None]], dim=-1)
        found.append((ids, totals, torch.nn.functional.pad(longer, (0, depth - slot - 1), value=-1)))
        count += ids.shape[1]
        # 2. Keep the likeliest, each with its parent's state.
        totals, best = totals.topk(min(width, ids.shape[1]), dim=-1)  # [R, w]
        beam = ids.gather(1, best)
        beginnings = longer.gather(1, best[..., None].expand(-1, -1, slot + 1))
        if state is not None:
            parents = best // ways + torch.arange(rows, device=ids.device)[:, None] * (len(state) // rows)
            state = state[parents.flatten()]
    # 3. The likeliest of all paths found.
    tokens, log_probs, prefixes = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return _tree_of(anchors, tokens, log_probs, prefixes, min(paths.nodes, count))


def _tree_of(anchors, tokens, log_probs, prefixes, nodes: int) -> DraftTree:
    """
    The tree of the `nodes` likeliest paths, from the last token `[R, M]` of each, its log-probability, and the numbers
    of its prefixes `[R, M, D]`. If a path is chosen, so are all of its prefixes.
    """
    log_probs, chosen = log_probs.topk(nodes, dim=-1)  # [R, n], the likeliest first
    prefixes = prefixes.gather(1, chosen[..., None].expand(-1, -1, prefixes.shape[-1]))  # [R, n, D]
    tokens = torch.cat([anchors[:, None], tokens.gather(1, chosen)], dim=1)
    depths = torch.nn.functional.pad((prefixes >= 0).sum(dim=-1), (1, 0))  # [R, n + 1]
    # 1. Which nodes each node sees.
    sees = (prefixes[:, :, None] == chosen[:, None, :, None]).any(dim=-1)  # [R, n, n]
    sees = torch.nn.functional.pad(sees, (1, 0, 1, 0))  # [R, n + 1, n + 1]
    sees[:, :, 0] = True
    # 2. The parent is the ancestor one slot above; nodes in the first slot have the anchor as parent.
    above = sees & (depths[:, None] == depths[:, :, None] - 1)
    parents = (above * torch.arange(above.shape[1], device=above.device)).sum(dim=-1)  # [R, n + 1]
    return DraftTree(tokens, depths, parents, sees, prefixes.shape[-1], torch.nn.functional.pad(log_probs, (1, 0)))
