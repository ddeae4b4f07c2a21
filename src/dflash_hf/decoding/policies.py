"""
Draft policies: what a round verifies.

A policy has two methods, named as in upstream's `CandidateGenerator`: `get_candidates` drafts,
`update_candidate_strategy` learns from what was accepted. Only the names and their purpose are shared: the arguments
and results are this package's, for any number of rows, and neither can replace the other. No policy can change the
output: the target verifies whatever it returns.
"""

import torch

from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.call import GenerateCall
from dflash_hf.decoding.drafter import Drafter
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
        drafter (`Drafter`): Its drafter.
    """

    def __init__(self, call: GenerateCall, drafter: Drafter):
        self.call = call
        self.drafter = drafter

    @property
    def max_draft(self) -> int:
        """Maximum number of tokens besides the anchor that a round verifies; the cache reserves room for as many."""
        return self.drafter.block_tokens - 1

    def get_candidates(self, state: GenerationState) -> Block | Tree:
        """
        What to verify next.

        Args:
            state (`GenerationState`): The sequences so far.

        Returns:
            A `Block` or `Tree` of `[R, n]` tokens, the anchors first.
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

    # The rest is for subclasses to draft with.

    def draft_block(self, state: GenerationState, length: int) -> Block:
        """The drafter's next `length` tokens, or fewer, if fewer may still be generated."""
        size = 1 + min(length, self.room(state) - 1)
        if size == 1:
            return self.no_draft(state)
        return self.drafter.draft_block(state.anchors, state.sample_indices, size)

    def draft_tree(self, state: GenerationState, nodes: int, top_k: int | None = None) -> Tree:
        """The `nodes` likeliest next tokens on any path. Without `supports_trees`, pass `top_k=1`: a single path."""
        return draft_tree(self.drafter, state.anchors, state.sample_indices, nodes, top_k)

    @staticmethod
    def copied(state: GenerationState, tokens: list[list[int]]) -> Block:
        """Tokens from elsewhere, the same number for each row."""
        return Block(torch.cat([state.anchors[:, None], state.anchors.new_tensor(tokens)], dim=1))

    @staticmethod
    def no_draft(state: GenerationState) -> Block:
        """No draft: the round decodes one token, as without a drafter."""
        return Block(state.anchors[:, None])

    def room(self, state: GenerationState) -> int:
        """
        Maximum number of tokens to verify now, anchor included: no more than may still be generated, and no position
        beyond the target's `max_position_embeddings`.

        With compiled forwards it is at least a whole block, since their shapes are fixed: such a round may verify more
        tokens than may still be generated, and the state then writes only as many.
        """
        if self.drafter.graph is not None:  # a call is compiled only if all these positions exist
            return max(self.drafter.block_tokens, state.remaining_tokens)
        positions = self.call.positions_left - state.longest + 1  # one of them is the anchor's
        return int(min(state.remaining_tokens, positions)) if positions > 0 else state.remaining_tokens

    def supports_trees(self, state: GenerationState) -> bool:
        """Whether trees can be verified: not by every target, nor where it runs out of positions."""
        if self.drafter.graph is not None:
            return self.call.capabilities.trees
        return self.call.capabilities.trees and self.room(state) == state.remaining_tokens


class FixedTree(DraftPolicy):
    """Verifies a tree of the same size in each round, or a block where the target cannot verify trees."""

    def __init__(self, call: GenerateCall, drafter: Drafter):
        super().__init__(call, drafter)
        self.nodes = call.draft.decoding_config.tree_nodes

    @property
    def max_draft(self) -> int:
        return max(super().max_draft, self.nodes)

    def get_candidates(self, state: GenerationState) -> Block | Tree:
        if self.room(state) == 1 or not self.supports_trees(state):
            return self.draft_block(state, super().max_draft)
        return self.draft_tree(state, self.nodes)
