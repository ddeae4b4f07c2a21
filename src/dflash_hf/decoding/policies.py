"""
Draft policies: what a round verifies.

A policy has the two methods of upstream's `CandidateGenerator`, for any number of rows: `get_candidates` drafts,
`update_candidate_strategy` learns from what was accepted. No policy can change the text: the target verifies whatever
it returns.
"""

import torch

from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.call import GenerateCall
from dflash_hf.decoding.drafter import Drafter
from dflash_hf.decoding.state import GenerationState
from dflash_hf.decoding.trees import Tree, draft_tree


class DraftPolicy:
    """
    Verifies a whole block in each round; the base of every policy. A subclass is passed as
    `draft.decoding_config.policy`, and made for each call of `generate`.

    Args:
        call (`GenerateCall`): The call.
        drafter (`Drafter`): Its drafter.
    """

    def __init__(self, call: GenerateCall, drafter: Drafter):
        self.call = call
        self.drafter = drafter

    @property
    def max_draft(self) -> int:
        """Most tokens besides the anchor that a round may verify; decides how much room the cache makes."""
        return self.drafter.block_tokens - 1

    def get_candidates(self, state: GenerationState) -> Block | Tree:
        """
        What to verify next.

        Args:
            state (`GenerationState`): The text so far.

        Returns:
            A `Block` or `Tree` of `[R, n]` tokens, each row's last committed token first.
        """
        return self.draft_block(state, self.max_draft)

    def update_candidate_strategy(self, state: GenerationState, candidates, acceptance: Acceptance) -> None:
        """
        Learn from a round.

        Args:
            state (`GenerationState`): The text, with what was accepted.
            candidates (`Block` or `Tree`): What was verified.
            acceptance (`Acceptance`): `counts`, the tokens committed in each row, one of which is the target's own.
        """

    def summary(self) -> dict:
        """Fields of the output."""
        return {}

    # What policies draft with.

    def draft_block(self, state: GenerationState, length: int) -> Block:
        """The drafter's next `length` tokens, as far as the text may grow."""
        size = 1 + min(length, self.room(state) - 1)
        if size == 1:
            return self.no_draft(state)
        return self.drafter.draft_block(state.last, state.next_draws, size)

    def draft_tree(self, state: GenerationState, nodes: int, top_k: int | None = None) -> Tree:
        """The `nodes` likeliest tokens after the text, on any path; only where `supports_trees`."""
        return draft_tree(self.drafter, state.last, state.next_draws, nodes, top_k)

    @staticmethod
    def copied(state: GenerationState, tokens: list[list[int]]) -> Block:
        """Tokens from anywhere else, the same number for each row."""
        return Block(torch.cat([state.last[:, None], state.last.new_tensor(tokens)], dim=1))

    @staticmethod
    def no_draft(state: GenerationState) -> Block:
        """Nothing: the target decodes one token alone."""
        return Block(state.last[:, None])

    def room(self, state: GenerationState) -> int:
        """Maximum number of tokens to verify: those left, and no position past the end of the target's table."""
        if self.drafter.graph is not None:  # graphs have one shape, and run only where all positions exist
            return max(self.drafter.block_tokens, state.left)
        positions = self.call.positions_left - state.longest + 1  # the anchor has one of them
        return int(min(state.left, positions)) if positions > 0 else state.left

    def supports_trees(self, state: GenerationState) -> bool:
        """Whether trees can be verified: not where the target runs out of positions."""
        if self.drafter.graph is not None:
            return self.call.capabilities.trees
        return self.call.capabilities.trees and self.room(state) == state.left


class FixedTree(DraftPolicy):
    """A tree of the same size in every round; a block where trees cannot be verified."""

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
