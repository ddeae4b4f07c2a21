"""
How much a round drafts and verifies if all rounds of a size have one shape, compiled or run ahead of the host: a few
plans, each with its own graph, compiled once the plan has been used enough.
"""

import copy
from dataclasses import dataclass, field

import torch

from .accept_dflash import Verdict
from .cost_dflash import CostTable
from .plan_dflash import Pace, Plan, PlanByCost


@dataclass
class Record:
    """
    A drafter's statistics, kept between calls: how far its blocks were accepted, what its trees committed. Older
    rounds count less. Its dictionaries are replaced, not extended: calls in other threads may be copying it.
    """

    reached: list[float]  # blocks whose token `j` was judged, all its predecessors being accepted
    passed: list[float]  # of those, blocks whose token `j` was accepted
    trees: dict[int, tuple[float, float]] = field(default_factory=dict)  # by nodes: tokens per row, rounds
    used: dict[tuple, int] = field(default_factory=dict)  # total rounds of each plan
    pace: Pace = field(default_factory=Pace)

    def note(self, plan: Plan, counts: list[int], unfinished: list[int]) -> None:
        """Record how many tokens a round committed in each row; 0 for rows that had ended before."""
        committed = [(count, goes_on) for count, goes_on in zip(counts, unfinished, strict=True) if count]
        tokens = sum(counts) / len(committed)
        if plan.nodes:
            before, rounds = self.trees.get(plan.nodes, (0.0, 0.0))
            self.trees = {**self.trees, plan.nodes: (0.95 * before + tokens, 0.95 * rounds + 1)}
            return
        for slot in range(plan.block - 1):
            # The last token of a row that ends says nothing about the tokens drafted after it.
            judged = sum(count > slot + 1 or count == slot + 1 and goes_on for count, goes_on in committed)
            accepted = sum(count > slot + 1 for count, _ in committed)
            self.reached[slot] = 0.97 * self.reached[slot] + judged / len(committed)
            self.passed[slot] = 0.97 * self.passed[slot] + accepted / len(committed)

    def tokens(self, plan: Plan) -> float:
        """Expected tokens per row of a round, from past rounds or its slots' acceptance; for a new tree, 1/3 more."""
        tokens, rounds = self.trees.get(plan.nodes, (0.0, 0.0))
        if rounds >= 2:
            return tokens / rounds
        expected, chance = 1.0, 1.0
        for reached, passed in zip(self.reached[: plan.block - 1], self.passed, strict=False):
            chance *= (passed + 0.6) / (reached + 1.0)
            expected += chance
        return 1.3 * expected if plan.nodes else expected


class FewPlans(PlanByCost):
    """
    At each sync of the host, the fastest of a few plans until the next sync; copies of earlier text (see [`Copier`])
    if the host syncs after each round.

    Args:
        plans (`list[Plan]`): The first drafts nothing, the second is the initial plan.
        table (`CostTable`): The cost of rounds on this machine; extended.
        paces (`dict`): The drafter's statistics.
        key: Their key, for this number of rows and decoding mode.
        place (`tuple[int, int]`): Rows, and tokens per row before the first round.
        compiled (`bool`): Whether rounds are compiled.
        vocab_size (`int`, *optional*): Of the target, if rows may copy earlier text.
    """

    EARNED = 48  # rounds of a plan before it is compiled; the initial plan is compiled immediately
    LASTING = 1.05  # minimum speed of a plan, relative to the current one, to replace it

    def __init__(self, plans: list[Plan], table: CostTable, paces: dict, key, place, compiled: bool, vocab_size=None):
        slots = max(plan.block for plan in plans) - 1
        self.record = copy.deepcopy(paces.get(key)) or Record([0.0] * slots, [0.0] * slots)
        super().__init__(table, place, self.record.pace, vocab_size)
        self.plans, self.paces, self.key, self.compiled = plans, paces, key, compiled
        self.lasting = plans[1]  # the plan of rounds that draft
        self.plan, self.window = plans[1], 0  # rounds of this plan since the last sync
        self.warm: set = set()  # plans whose first rounds are over

    def next(self, text) -> Plan:
        """The plan of the next round of a text (`Continuation`)."""
        if not self.window:
            self.arrive(text)
            self.began = text.seconds
            plan = self._copying(text) or self._fastest()
            earned = plan.key == self.plans[1].key or self.record.used.get(plan.key, 0) >= self.EARNED
            self.plan = plan._replace(compiled=earned)
        self.window += 1
        used = self.record.used
        self.record.used = {**used, self.plan.key: used.get(self.plan.key, 0) + 1}
        return self.plan

    def cost(self, size: int, drafted: bool) -> float:
        """Cost of a round that verifies `size` tokens, in units of a round without a draft."""
        most = max(plan.size for plan in self.plans) - 1
        return self.known.curve(*self.place, most, drafted)[size - 1]

    def _fastest(self) -> Plan:
        nothing, *drafting = self.plans
        if self.pace.resting > 0:
            return nothing
        speeds = {plan.key: self.record.tokens(plan) / self.cost(plan.size, True) for plan in drafting}
        best = max(drafting, key=lambda plan: speeds[plan.key])
        self.lasting = best if speeds[best.key] > self.LASTING * speeds[self.lasting.key] else self.lasting
        return self.lasting

    def _copying(self, text) -> Plan | None:
        """Copies where they are faster than drafting: as many as a block has, since its shape is fixed."""
        if self.copier is None:
            return None
        whole = self.plans[1]
        costs = [self.cost(whole.size, drafted=False)] * whole.block
        copied = self.copier.worth_copying(text, whole.block - 1, self.pace.speed, costs)
        if copied is None:
            return None
        missing = whole.block - 1 - copied.shape[1]
        return whole._replace(copied=torch.nn.functional.pad(copied, (0, missing)))

    def learn(self, text, verdict: Verdict) -> None:
        """After a sync, record how long the rounds took and what they committed."""
        if text.host.pending:
            return
        seconds, plan, pace = text.seconds - self.began, self.plan, self.pace
        if plan.compiled or not self.compiled:
            if plan.key in self.warm:  # the first rounds of a plan may compile
                self.timed.append((*self.place, (plan.size - 1, plan.drafts), seconds / self.window))
            self.warm.add(plan.key)
        for counts, unfinished in text.host.looked_at:
            if not any(counts):  # wasted
                continue
            tokens = sum(counts) / sum(count > 0 for count in counts)
            cost = self.cost(plan.size, plan.drafts)
            self.note(plan.size - 1, tokens, cost)
            if plan.drafts:
                self.record.note(plan, counts, unfinished)
                pace.note(tokens, cost)
            elif plan.copied is None:
                pace.resting = max(pace.resting - 1, 0)
            else:
                self.copier.learn(counts, [count > 0 for count in counts])
        self.window = 0
        self.paces[self.key] = self.record
