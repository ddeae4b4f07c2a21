"""
Draft trees (DDTree, arXiv 2604.12989): the likeliest of all paths through the likely tokens of each slot are verified
in one forward. The target's choice after each node decides which path is accepted, so the output is the target's.

[`draft_tree`] drafts one: [`grow_tree`] extends paths slot by slot, and one of three classes scores what may follow a
path, depending on what the drafter's token head reads: [`IndependentScores`], [`FirstOrderScores`],
[`SequentialScores`]. A *slot* here is one of the drafter's block, `D` of which draft a token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from dflash_hf.decoding.draft_session import DraftSession


MAX_SEQUENTIAL_BEAMS = 16  # paths extended at each depth if the token head scores each path by itself
# Log-probabilities of a token are clamped to this range, away from 0 and -inf: a node is likelier than its children.
MIN_LOG_PROB = -20.0
MAX_LOG_PROB = -1e-3


class Tree(NamedTuple):
    """
    Candidates that are a tree for each row. Node 0 is the anchor; the other nodes are sorted by the probability of the
    path to them, so that the first nodes of a tree are a tree themselves.
    """

    tokens: torch.LongTensor  # [R, n]
    depths: torch.LongTensor  # [R, n]   0 for the anchor
    ancestors: torch.BoolTensor  # [R, n, n]  whether a node attends to another: an ancestor or itself
    parents: torch.LongTensor  # [R, n]  0 for the anchor itself
    log_probs: torch.Tensor  # [R, n]    of the path to a node; always below that of the path to its parent
    slots: int | None = None  # no node is deeper; `None`: not known to the host

    @property
    def max_depth(self) -> int:
        """No node is deeper. If the tree does not say it, this waits for the device."""
        return int(self.depths.max()) if self.slots is None else self.slots

    @classmethod
    def of_anchors(cls, anchors: torch.LongTensor) -> "Tree":
        """The tree of anchors `[R]` alone."""
        tokens = anchors[:, None]
        zeros = torch.zeros_like(tokens)
        ancestors = torch.ones(len(anchors), 1, 1, dtype=torch.bool, device=anchors.device)
        return cls(tokens, zeros, ancestors, zeros, zeros.float(), slots=0)

    def first(self, num_candidates: int) -> "Tree":
        """The tree of the anchor and the likeliest nodes, `num_candidates` in all."""
        return Tree(
            self.tokens[:, :num_candidates],
            self.depths[:, :num_candidates],
            self.ancestors[:, :num_candidates, :num_candidates],
            self.parents[:, :num_candidates],
            self.log_probs[:, :num_candidates],
            None if self.slots is None else min(self.slots, num_candidates - 1),
        )

    def longest_match(self, target_tokens: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
        """As [`Block.longest_match`]: the number of nodes on the path `[R]`, and the nodes `[R, n]`, then zeros."""
        matches = self.tokens == target_tokens.gather(1, self.parents)  # [R, n]
        matches[:, 0] = True
        is_on_path = (matches[:, None] | ~self.ancestors).all(dim=-1)  # [R, n]
        # Siblings differ, so at most one node is on the path at each depth; the others are written past the end.
        num_candidates = target_tokens.shape[1]
        depths = torch.where(is_on_path, self.depths, num_candidates)
        nodes = torch.arange(num_candidates, device=depths.device).expand_as(depths)
        path = torch.zeros(len(depths), num_candidates + 1, dtype=torch.long, device=depths.device)
        return is_on_path.sum(dim=1), path.scatter_(1, depths, nodes)[:, :num_candidates]

    def child_by_token(self, row: int) -> dict[tuple[int, int], int]:
        """As [`Block.child_by_token`]."""
        keys = zip(self.parents[row].tolist(), self.tokens[row].tolist(), strict=True)
        return {key: node for node, key in enumerate(keys) if node > 0}


def draft_tree(
    draft_session: DraftSession,
    anchors: torch.LongTensor,
    nodes: int,
    top_k: int | None = None,
) -> Tree:
    """
    The tree of the likeliest paths of a block: the same as a best-first search finds in the whole vocabulary, or among
    the candidates of the token head. A token head without candidates that depends on previous tokens must score each
    path by itself, over the whole vocabulary: then at most `MAX_SEQUENTIAL_BEAMS` paths of each depth are extended,
    and the tree may differ.

    Args:
        draft_session (`DraftSession`): What drafts the block. If its blocks have no token but the anchor, neither has
            the tree.
        anchors (`torch.LongTensor`): `[R]`, the last committed token of each row.
        nodes (`int`): Tokens to draft, that is, nodes without the anchor; fewer if there are not as many.
        top_k (`int`, *optional*): Likely tokens of each slot; 1 gives a single path. Default: `nodes`, since less
            likely tokens cannot be part of the tree. On SmolLM2 and its drafter, 8 lose 0.3 % of the expected tokens
            at 31 nodes, 0.9 % at 63 and 2.6 % at 255, and save nothing.
    """
    if draft_session.block_tokens == 1:
        return Tree.of_anchors(anchors)

    def tree(anchors: torch.LongTensor, hidden: torch.Tensor) -> Tree:
        return tree_of(draft_session, anchors, hidden, nodes, top_k)

    return draft_session.run(anchors, tree, ("tree", nodes, top_k))


def tree_of(
    draft_session: DraftSession, anchors: torch.LongTensor, hidden: torch.Tensor, nodes: int, top_k: int | None = None
) -> Tree:
    """The tree of [`draft_tree`] from the hidden states `[R, D, H]` of a block."""
    top_k = top_k or nodes
    token_head = draft_session.token_head
    beams = nodes
    scores: IndependentScores | FirstOrderScores | SequentialScores
    if token_head.order == 0:
        scores = IndependentScores.of_session(draft_session, hidden, top_k)
    elif token_head.order == 1 and token_head.top_k is not None:
        scores = FirstOrderScores.of_session(draft_session, anchors, hidden, top_k)
    else:
        scores = SequentialScores(draft_session, anchors, hidden, top_k)
        beams = min(nodes, MAX_SEQUENTIAL_BEAMS)
    return grow_tree(anchors, scores.extend, hidden.shape[1], nodes, beams)


def grow_tree(anchors: torch.LongTensor, extend: Callable, depth: int, nodes: int, beams: int) -> Tree:
    """
    At each depth the likeliest paths, the beam, are extended in one batch; the likeliest of all paths that were in a
    beam form the tree. A beam as wide as the tree has nodes finds the same tree as a best-first search.

    Args:
        anchors (`torch.LongTensor`): `[R]`.
        extend (`Callable`): Called with a slot and the beam: the indices `[R, w]` of its paths among the `w * k` that
            the last call returned, `None` at first. Returns next tokens and their log-probabilities, both `[R, w, k]`.
        depth (`int`): Slots, at least 1.
        nodes (`int`): Paths to choose: the nodes of the tree, without the anchor.
        beams (`int`): Maximum number of paths extended at each depth.
    """
    beam = None
    beam_log_probs = torch.zeros(len(anchors), 1, device=anchors.device)  # [R, w], of the paths in the beam
    # [R, w, slot], the numbers of a path's prefixes, shortest first. Paths are numbered over all depths.
    beam_prefixes = anchors.new_empty(len(anchors), 1, 0)
    num_paths = 0
    tokens_by_slot = []
    log_probs_by_slot = []
    prefixes_by_slot = []
    for slot in range(depth):
        # 1. What may follow each path of the beam; the likeliest longer paths are the next beam.
        ids, log_probs = extend(slot, beam)  # [R, w, k]
        width = log_probs.shape[1]
        num_children = ids.shape[-1]  # k
        log_probs = log_probs.nan_to_num(MIN_LOG_PROB).clamp(MIN_LOG_PROB, MAX_LOG_PROB)
        log_probs = (beam_log_probs[..., None] + log_probs).flatten(1)  # [R, w * k]
        beam_log_probs, beam = log_probs.topk(min(beams, log_probs.shape[1]), dim=-1)  # [R, w], w of the next beam
        # 2. Their prefixes: all those of the path that was extended, and they themselves.
        path_numbers = torch.arange(num_paths, num_paths + beam.shape[1], device=beam.device).expand_as(beam)
        beam_prefixes = beam_prefixes.gather(1, (beam // num_children)[..., None].expand(-1, -1, slot))
        beam_prefixes = torch.cat([beam_prefixes, path_numbers[..., None]], dim=-1)
        num_paths += beam.shape[1]
        # 3. Each is a candidate node of the tree.
        tokens_by_slot.append(ids.expand(-1, width, -1).flatten(1).gather(1, beam))
        log_probs_by_slot.append(beam_log_probs)
        prefixes_by_slot.append(torch.nn.functional.pad(beam_prefixes, (0, depth - slot - 1), value=-1))
    tokens = torch.cat(tokens_by_slot, dim=1)  # [R, M]
    log_probs = torch.cat(log_probs_by_slot, dim=1)
    prefixes = torch.cat(prefixes_by_slot, dim=1)  # [R, M, D]
    return _tree_of_paths(anchors, tokens, log_probs, prefixes, min(nodes, num_paths))


class IndependentScores:
    """
    Slots that do not depend on each other: the same tokens may follow every path.

    Args:
        ids (`torch.LongTensor`): `[R, D, k]`, the likely tokens of each slot.
        log_probs (`torch.Tensor`): `[R, D, k]`, of these.
    """

    def __init__(self, ids: torch.LongTensor, log_probs: torch.Tensor):
        self.ids = ids
        self.log_probs = log_probs

    @classmethod
    def of_session(cls, draft_session: DraftSession, hidden: torch.Tensor, top_k: int):
        """The `top_k` likeliest tokens of each slot, from hidden states `[R, D, H]`."""
        logits = draft_session.logits(hidden)  # [R, D, V]
        best, ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
        log_probs = best.float() - logits.float().logsumexp(dim=-1, keepdim=True)  # [R, D, k]
        device = draft_session.context.device
        return cls(draft_session.draft.target_ids(ids).to(device), log_probs.to(device))

    def extend(self, slot: int, beam: torch.LongTensor | None) -> tuple[torch.LongTensor, torch.Tensor]:
        """For [`grow_tree`]."""
        width = 1 if beam is None else beam.shape[1]
        ids = self.ids[:, slot, None].expand(-1, width, -1)  # [R, w, k]
        return ids, self.log_probs[:, slot, None].expand(-1, width, -1)


class FirstOrderScores:
    """
    Slots whose scores depend on the token before, one of `c` candidates: all pairs of candidates are scored in one
    call of the token head.

    Args:
        ids (`torch.LongTensor`): `[R, D, c]`, the candidates of each slot, as the target's ids.
        first (`torch.Tensor`): `[R, 1, 1, c]`, scores of the first slot's candidates after the anchor.
        later (`torch.Tensor`): `[R, D - 1, c, c]`, scores of the candidates of each later slot (last dimension) after
            each candidate of the slot before.
        top_k (`int`): Likely tokens after each path.
    """

    def __init__(self, ids: torch.LongTensor, first: torch.Tensor, later: torch.Tensor, top_k: int):
        self.ids = ids
        self.num_children = min(top_k, ids.shape[-1])  # k
        # Log-probabilities and candidates of the likeliest tokens: after the anchor, and after each candidate.
        self.first = first.log_softmax(dim=-1).to(ids.device).topk(self.num_children, dim=-1)  # [R, 1, 1, k]
        self.later = later.log_softmax(dim=-1).to(ids.device).topk(self.num_children, dim=-1)  # [R, D - 1, c, k]
        # [R, w, k], what the last call of `extend` returned, as numbers of candidates.
        self.last_candidates = ids.new_empty(0)

    @classmethod
    def of_session(
        cls,
        draft_session: DraftSession,
        anchors: torch.LongTensor,
        hidden: torch.Tensor,
        top_k: int,
    ):
        """Run the token head on hidden states `[R, D, H]`, after anchors `[R]`."""
        token_head = draft_session.token_head
        ids, logits = draft_session.candidates(hidden)  # [R, D, c]
        query, _ = token_head.step(None, draft_session.to_token_head(anchors), hidden[:, 0])
        first = token_head.scores(query, ids[:, 0], logits[:, 0])[:, None, None]  # [R, 1, 1, c]
        query, _ = token_head.step(None, ids[:, :-1], hidden[:, 1:, None])  # [R, D - 1, c, q]
        later = token_head.scores(query, ids[:, 1:, None], logits[:, 1:, None])  # [R, D - 1, c, c]
        return cls(ids.to(draft_session.context.device), first, later, top_k)

    def extend(self, slot: int, beam: torch.LongTensor | None) -> tuple[torch.LongTensor, torch.Tensor]:
        """For [`grow_tree`]."""
        if beam is None:
            log_probs = self.first.values[:, 0]  # [R, 1, k]
            candidates = self.first.indices[:, 0]
        else:
            last_of_paths = self.last_candidates.flatten(1).gather(1, beam)  # [R, w], the last candidate of each path
            last_of_paths = last_of_paths[..., None].expand(-1, -1, self.num_children)
            log_probs = self.later.values[:, slot - 1].gather(1, last_of_paths)  # [R, w, k]
            candidates = self.later.indices[:, slot - 1].gather(1, last_of_paths)
        self.last_candidates = candidates
        return self.ids[:, slot].gather(1, candidates.flatten(1)).view_as(candidates), log_probs


class SequentialScores:
    """
    Slots whose scores depend on the tokens before, in the whole vocabulary: the token head runs on each path, slot by
    slot. If it has a state, so has each path.
    """

    def __init__(
        self,
        draft_session: DraftSession,
        anchors: torch.LongTensor,
        hidden: torch.Tensor,
        top_k: int,
    ):
        anchors = draft_session.to_token_head(anchors)
        self.draft_session = draft_session
        self.hidden = hidden
        self.ids, self.logits = draft_session.candidates(hidden)  # [R, D, c]
        self.num_children = min(top_k, self.ids.shape[-1])  # k
        self.state = draft_session.token_head.start(
            anchors
        )  # [R * w, ...], of the paths in the beam; None up to order 1
        self.last_tokens = anchors[:, None]  # [R, w * k], what the last call of `extend` returned

    def extend(self, slot: int, beam: torch.LongTensor | None) -> tuple[torch.LongTensor, torch.Tensor]:
        """For [`grow_tree`]."""
        draft_session = self.draft_session
        token_head = draft_session.token_head
        if beam is not None:
            self._select(beam.to(self.last_tokens.device))
        rows, width = self.last_tokens.shape
        hidden = self.hidden[:, slot].repeat_interleave(width, dim=0)  # [R * w, H]
        ids = self.ids[:, slot].repeat_interleave(width, dim=0)  # [R * w, c]
        logits = self.logits[:, slot].repeat_interleave(width, dim=0)
        query, self.state = token_head.step(
            self.state, draft_session.to_token_head(self.last_tokens.flatten()), hidden
        )
        log_probs = token_head.scores(query, ids, logits).log_softmax(dim=-1)
        log_probs, candidates = log_probs.topk(self.num_children, dim=-1)  # [R * w, k]
        tokens = ids.gather(-1, candidates).view(rows, width, self.num_children)
        self.last_tokens = tokens.flatten(1)
        device = draft_session.context.device
        return tokens.to(device), log_probs.view(rows, width, self.num_children).to(device)

    def _select(self, beam: torch.LongTensor) -> None:
        """Keep the states and last tokens of the paths in the beam."""
        if self.state is not None:
            rows = len(beam)
            last_width = len(self.state) // rows
            parents = beam // self.num_children + torch.arange(rows, device=beam.device)[:, None] * last_width
            self.state = self.state[parents.flatten()]
        self.last_tokens = self.last_tokens.gather(1, beam)


def _tree_of_paths(anchors, tokens, log_probs, prefixes, nodes: int) -> Tree:
    """
    The tree of the `nodes` likeliest of `M` paths. If a path is chosen, so are all of its prefixes.

    An example, one row with five paths (`M` = 5) over two slots, of which four are chosen:

        path               0      1      2      3      4
        its tokens         a      b      a c    b d    a e     `tokens` holds the last of each: a b c d e
        log-probability   -0.2   -1.0   -0.5   -3.0   -0.9
        prefixes           0 -1   1 -1   0 2    1 3    0 4

        node               0      1      2      3      4       node 0 is the anchor
        chosen path               0      2      4      1
        nodes of the path         1 0    1 2    1 3    4 0     0 past the node itself
        depth              0      1      2      2      1
        parent             0      0      1      1      0

    Args:
        anchors (`torch.LongTensor`): `[R]`.
        tokens (`torch.LongTensor`): `[R, M]`, the last token of each path.
        log_probs (`torch.Tensor`): `[R, M]`, of each path.
        prefixes (`torch.LongTensor`): `[R, M, D]`, the numbers of its prefixes, itself included; then -1.
        nodes (`int`): Paths to choose, at most `M`.
    """
    num_paths = log_probs.shape[1]
    # 1. The likeliest paths, of which each is a node: that of its last token.
    log_probs, chosen = log_probs.topk(nodes, dim=-1)  # [R, n], the likeliest first
    prefixes = prefixes.gather(1, chosen[..., None].expand(-1, -1, prefixes.shape[-1]))  # [R, n, D]
    tokens = torch.cat([anchors[:, None], tokens.gather(1, chosen)], dim=1)  # [R, n + 1]
    depths = _prepend_anchor_zeros((prefixes >= 0).sum(dim=-1))  # [R, n + 1]
    # 2. The nodes of the path to each of them, itself included.
    path_nodes = _nodes_of_paths(prefixes, chosen, num_paths)  # [R, n, D]
    # 3. They are what it attends to, with the anchor. The last but one is its parent.
    ancestors = torch.zeros(*depths.shape, nodes + 1, dtype=torch.bool, device=chosen.device)
    ancestors[:, 1:].scatter_(2, path_nodes, True)
    ancestors[:, :, 0] = True
    path_from_anchor = torch.nn.functional.pad(path_nodes, (1, 0))  # [R, n, 1 + D], by depth
    parents = path_from_anchor.gather(2, depths[:, 1:, None] - 1)[..., 0]  # [R, n]
    parents = _prepend_anchor_zeros(parents)
    log_probs = _prepend_anchor_zeros(log_probs)
    return Tree(tokens, depths, ancestors, parents, log_probs, slots=min(prefixes.shape[-1], nodes))


def _nodes_of_paths(paths: torch.LongTensor, chosen: torch.LongTensor, num_paths: int) -> torch.LongTensor:
    """
    The nodes of paths, by their numbers.

    Args:
        paths (`torch.LongTensor`): `[R, n, D]`, numbers of chosen paths, or -1 for none.
        chosen (`torch.LongTensor`): `[R, n]`, the number of the path to each node, from node 1 on.
        num_paths (`int`): How many paths are numbered.

    Returns:
        `torch.LongTensor` `[R, n, D]`; 0 for none.
    """
    node_numbers = torch.arange(1, 1 + chosen.shape[1], device=chosen.device).expand_as(chosen)
    node_of_path = chosen.new_zeros(len(chosen), num_paths + 1)  # [R, M + 1]; the last entry, always 0, is for -1
    node_of_path = node_of_path.scatter(1, chosen, node_numbers)
    paths = torch.where(paths < 0, num_paths, paths)
    return node_of_path.gather(1, paths.flatten(1)).view_as(paths)


def _prepend_anchor_zeros(values: torch.Tensor) -> torch.Tensor:
    """`[R, 1 + n]`: zeros for the anchors, then the values `[R, n]` of the other nodes."""
    return torch.nn.functional.pad(values, (1, 0))
