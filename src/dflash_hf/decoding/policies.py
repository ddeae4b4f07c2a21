"""
Draft policies: what a round verifies.

A policy has two methods, named as in upstream's `CandidateGenerator`: `get_candidates` drafts,
`update_candidate_strategy` learns from what was accepted. Only the names and their purpose are shared: the arguments
and results are this package's, for any number of rows, and neither can replace the other. No policy can change the
output in fp32, since the target verifies whatever it returns; in bf16 and fp16 a forward over another number of tokens
may round differently.

Lengths of drafts (`length`, `max_draft`, the `nodes` of a tree) do not count the anchor; the candidates of a round
(`n`, [`DraftPolicy.room`]) do. See *Counting* in `dflash_hf.decoding`.
"""

import math

import torch

from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.call import GenerateCall
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.decoding.state import GenerationState
from dflash_hf.decoding.trees import Tree, draft_tree


SUMMARY_FIELDS = ("draft_sizes", "estimated_speedup")  # of `DFlashGenerateOutput`, which a policy may set


class DraftPolicy:
    """
    Verifies a whole block in each round; the base of every policy. A subclass is passed as
    `draft.decoding_config.policy`, and created for each call of `generate`.

    `decode` calls `get_candidates` and `update_candidate_strategy` in turn, once each in every round, then `finish`
    and `summary`.

    Args:
        call (`GenerateCall`): The call.
        draft_session (`DraftSession`): The drafter in this call.
    """

    def __init__(self, call: GenerateCall, draft_session: DraftSession):
        self.call = call
        self.draft_session = draft_session

    @property
    def max_draft(self) -> int:
        """Maximum number of tokens that a round verifies besides the anchor: the cache makes room for as many."""
        return self.draft_session.block_tokens - 1

    def get_candidates(self, state: GenerationState) -> Block | Tree:
        """
        What to verify next.

        Args:
            state (`GenerationState`): The sequences so far.

        Returns:
            A `Block` or `Tree` of candidates `[R, n]`, the anchors first.
        """
        return self.draft_block(state, self.max_draft)

    def update_candidate_strategy(self, state: GenerationState, candidates, acceptance: Acceptance) -> None:
        """
        Learn from a round.

        Args:
            state (`GenerationState`): The sequences, with what was accepted.
            candidates (`Block` or `Tree`): What was verified.
            acceptance (`Acceptance`): `counts`, the tokens committed in each row, one of which is the target's own.
        """

    def finish(self) -> None:
        """Called once, after the last round: keep what later calls can use. Not called if the call fails."""

    def summary(self) -> dict:
        """
        Fields of the output, of those in `SUMMARY_FIELDS`. Called after [`finish`], if the caller of `generate` asked
        for more than token ids; changes nothing.
        """
        return {}

    # Helpers for subclasses.

    def draft_block(self, state: GenerationState, length: int) -> Block:
        """The drafter's next `length` tokens, or fewer, if fewer may still be generated."""
        num_drafted = min(length, self.room(state) - 1)
        if num_drafted == 0:
            return self.no_draft(state)
        return self.draft_session.draft_block(state.anchors, num_drafted)

    def draft_tree(self, state: GenerationState, nodes: int, top_k: int | None = None) -> Tree:
        """
        The `nodes` likeliest tokens on any path after the anchor. Without `supports_trees`, pass `top_k=1`: a single
        path.
        """
        return draft_tree(self.draft_session, state.anchors, nodes, top_k)

    @staticmethod
    def copied(state: GenerationState, tokens: list[list[int]]) -> Block:
        """A block of tokens that the drafter did not draft `[R][n - 1]`, equally many for each row."""
        return Block(torch.cat([state.anchors[:, None], state.anchors.new_tensor(tokens)], dim=1))

    @staticmethod
    def no_draft(state: GenerationState) -> Block:
        """The anchors alone: the round decodes one token, as without a drafter."""
        return Block(state.anchors[:, None])

    def room(self, state: GenerationState) -> int:
        """
        Maximum number of candidates of this round, anchor included: no more tokens than may still be generated, and
        none past the target's `max_position_embeddings`.

        There are two exceptions. A text that has passed these positions has no limit of positions: its target computes
        rotary embeddings for any position, as it does without a drafter. With compiled forwards, whose shapes are
        fixed, the result is at least a whole block: such a round may verify more tokens than may still be generated,
        and the state then writes only as many.
        """
        if self.draft_session.graph is not None:  # a call is compiled only if all these positions exist
            return max(self.draft_session.block_tokens, state.remaining_tokens)
        return int(min(state.remaining_tokens, self._remaining_positions(state)))

    def supports_trees(self, state: GenerationState) -> bool:
        """
        Whether trees can be verified now: not by every target, and not if the text may still reach the last of the
        target's positions, since paths of a tree, as long as a block, could end past it. See [`room`] for a text that
        has passed it.
        """
        if not self.call.capabilities.trees:
            return False
        return self.draft_session.graph is not None or self._remaining_positions(state) >= state.remaining_tokens

    def _remaining_positions(self, state: GenerationState) -> float:
        """Positions of the target from the longest row's anchor on; infinite if it has no limit, or has passed it."""
        remaining = self.call.positions_after_prompt - (state.longest - 1)
        return remaining if remaining > 0 else math.inf


class FixedTree(DraftPolicy):
    """Verifies a tree of `decoding_config.tree_nodes` in each round; a block where the target cannot verify trees."""

    def __init__(self, call: GenerateCall, draft_session: DraftSession):
        super().__init__(call, draft_session)
        self.tree_nodes = call.draft.decoding_config.tree_nodes

    @property
    def max_draft(self) -> int:
        return max(super().max_draft, self.tree_nodes)

    def get_candidates(self, state: GenerationState) -> Block | Tree:
        if self.room(state) == 1 or not self.supports_trees(state):
            return self.draft_block(state, super().max_draft)
        return self.draft_tree(state, self.tree_nodes)
