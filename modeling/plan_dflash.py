"""How much one round drafts and verifies."""

from typing import NamedTuple

from .tree_dflash import Paths


class Plan(NamedTuple):
    """How much one round drafts and verifies, of every row."""

    block: int  # tokens of a block that are verified, or of the longest path through a tree; the anchor included
    paths: Paths | None = None  # of a tree, among which its nodes are chosen

    @property
    def nodes(self) -> int:
        """Tokens of a tree besides the anchor; 0 for a block."""
        return 0 if self.paths is None else self.paths.count

    @property
    def size(self) -> int:
        """Tokens that are verified, the anchor included."""
        return self.block if self.paths is None else 1 + self.paths.count

    @property
    def key(self) -> tuple[int, int]:
        """What a compiled round depends on: equal keys, equal shapes."""
        return self.block, self.nodes


_DEFAULT_ASSISTANT_TOKENS = 20  # of a `GenerationConfig` in which nobody set them


class FixedPlan:
    """
    The same plan for every round, but for the end of a text, where no more is verified than a row may still get.

    Args:
        plan (`Plan`): The plan.
        whole (`bool`): Whether all rounds keep one shape, the last ones too.
    """

    def __init__(self, plan: Plan, whole: bool = False):
        self.plan, self.whole = plan, whole

    def next(self, text) -> Plan:
        """The plan of the next round of a text (`Continuation`)."""
        if self.whole or self.plan.paths is not None:
            return self.plan
        return self.plan._replace(block=min(self.plan.block, text.tokens_left))


def planner_of(draft, drafter, text, generation_config, trees: bool, whole: bool) -> FixedPlan:
    """
    The planner of a call, as its settings ask for it.

    Args:
        draft (`DFlashDraftModel`): The drafter; its `decoding_config` holds the settings.
        drafter (`DFlashCandidateGenerator`): Makes plans.
        text (`Continuation`): What is being written.
        generation_config (`GenerationConfig`): Its `num_assistant_tokens` limit a block.
        trees (`bool`): Whether the target can verify a tree.
        whole (`bool`): Whether all rounds must keep one shape.
    """
    config, trained = draft.decoding_config, draft.config.block_size
    asked = generation_config.num_assistant_tokens
    limit = trained if asked in (None, _DEFAULT_ASSISTANT_TOKENS) else max(int(asked), 0) + 1
    # Rows that advance together agree on one path.
    trees = trees and (len(text.host.alive) == 1 or text.rules.pace != "together")
    nodes = (config.tree_nodes or 0) if trees else 0
    return FixedPlan(drafter.plan(min(config.block_size or trained, limit), nodes), whole)
