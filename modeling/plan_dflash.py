"""
How much one round drafts and verifies: as much as was requested, or as much as is fastest here.

A round that verifies `n` drafted tokens costs `C(n)` and commits `1 + A(n)` tokens, `A(n)` being the sum of the
chances that the target accepts them. Both are estimated: costs from timed rounds, chances from the drafter's own
probabilities and how reliable they were so far. At a speed of `L` tokens a second, one more token pays while it adds
more than `L` times its cost (Dinkelbach's rule for the best ratio of sums), and drafting pays while it is faster than
not drafting, which is a size like any other. Whatever is chosen, the text is the target's own.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import NormalDist
from typing import NamedTuple

import torch
from transformers.utils import logging

from .accept_dflash import Draft, Verdict
from .cost_dflash import NOTHING, CostTable, Work
from .lookup_dflash import Copier, CopyRecord
from .reliability_dflash import Correction, Reliability
from .tree_dflash import Paths


logger = logging.get_logger(__name__)


class Plan(NamedTuple):
    """How much one round drafts and verifies in every row."""

    block: int  # tokens of a block that are verified, or of the longest path through a tree; the anchor included
    paths: Paths | None = None  # for a tree: the paths among which its nodes are chosen
    cut: Callable[[Draft], Draft] | None = None  # reduces a draft, with its probabilities, to what is worth verifying
    copied: torch.LongTensor | None = None  # [R, block - 1]  tokens to verify instead of a draft
    compiled: bool = True  # if rounds are compiled at all

    @property
    def drafts(self) -> bool:
        """Whether the drafter runs."""
        return self.block > 1 and self.copied is None

    @property
    def nodes(self) -> int:
        """Tokens of a tree besides the anchor; 0 for a block."""
        return 0 if self.paths is None else self.paths.nodes

    @property
    def size(self) -> int:
        """Maximum number of tokens verified, anchor included."""
        return self.block if self.paths is None else 1 + self.paths.nodes

    @property
    def key(self) -> tuple[int, int, bool]:
        """What a compiled round depends on: equal keys mean equal shapes."""
        return self.block, self.nodes, self.drafts


class FixedPlan:
    """
    The same plan for every round, except at the end of a text, where no more is verified than is still allowed.

    Args:
        plan (`Plan`): The plan.
        whole (`bool`): Whether all rounds, even the last, have one shape.
    """

    def __init__(self, plan: Plan, whole: bool = False):
        self.plan, self.whole = plan, whole

    def next(self, text) -> Plan:
        """The plan of the next round of a text (`Continuation`)."""
        if self.whole or self.plan.paths is not None:
            return self.plan
        return self.plan._replace(block=min(self.plan.block, text.tokens_left))

    def learn(self, text, verdict: Verdict) -> None:
        """Nothing to learn: the plan is fixed."""

    def summary(self) -> dict:
        """Empty: nothing was chosen."""
        return {}


SCHEDULES = ("heuristic", "heuristic_transient")


class AssistantPlan:
    """
    Blocks as drafted by transformers' own assistants: a block ends after a token whose confidence is below a
    threshold; with a schedule, the next block is two tokens longer if all were accepted, else one shorter.

    Whether a token is verified depends only on those before it, so drafts may be drawn.

    Args:
        plan (`Plan`): The longest block.
        size (`int`): Drafted tokens of the first block.
        threshold (`float`): `assistant_confidence_threshold`; 0 for none.
        schedule (`str`): `num_assistant_tokens_schedule`.
        paces (`dict`): The drafter's statistics; "heuristic" continues where the previous call ended.
        drawn (`bool`): Whether drafts are drawn.
    """

    def __init__(self, plan: Plan, size: int, threshold: float, schedule: str, paces: dict, drawn: bool = False):
        self.plan, self.most = plan._replace(cut=self.cut if threshold else None), plan.block - 1
        self.threshold, self.drawn = threshold, drawn
        self.paces, self.key, self.schedule, self.sizes = paces, (schedule, size), schedule, []
        self.size = paces.get(self.key, size)

    def next(self, text) -> Plan:
        """The plan of the next round of a text (`Continuation`)."""
        self.alive, self.room = text.host.alive, min(self.size, self.most, text.tokens_left - 1)
        self.sizes.append(self.room)
        return self.plan._replace(block=1 + self.room)

    def cut(self, draft: Draft) -> Draft:
        """The start of a block; all rows share the size of the most confident row."""
        ids, probabilities = draft.proposal
        chances = (probabilities * (ids == draft.tokens[:, 1:, None])).sum(dim=-1)  # [R, n - 1]
        sure = (chances >= self.threshold).long().cumprod(dim=1).sum(dim=1).tolist()
        longest = max(count for count, alive in zip(sure, self.alive, strict=True) if alive)
        self.sizes[-1] = min(self.room, 1 + longest)
        return Draft(draft.tokens, draft.proposal if self.drawn else None).prefix(1 + self.sizes[-1])

    def learn(self, text, verdict: Verdict) -> None:
        """Set the size of the next block."""
        if self.schedule in SCHEDULES and self.sizes[-1]:
            counts = [count for count, alive in zip(text.host.committed, self.alive, strict=True) if alive]
            whole = min(counts) == self.sizes[-1] + 1
            self.size = min(self.size + 2, self.most) if whole else max(self.size - 1, 1)
            if self.schedule == "heuristic":
                self.paces[self.key] = self.size

    def summary(self) -> dict:
        """For the output: drafted tokens that each round verified."""
        return {"draft_sizes": self.sizes}


@dataclass
class Pace:
    """A drafter's statistics, kept between calls: how reliable its probabilities are, and whether drafting pays."""

    EXPECTED = 1.5  # assumed tokens per row of a drafting round, before any was seen
    SHARE = 0.015  # share of the time that may be lost to retrying what did not pay
    DECIDED = 2.5  # cost of the rounds, older ones counting less, after which it is decided whether drafting pays

    reliability: Reliability = field(default_factory=Reliability)
    copies: CopyRecord = field(default_factory=CopyRecord)
    tokens: float = 0.0  # committed per row by rounds that drafted; older rounds count less
    cost: float = 0.0  # of these rounds, in units of a round without a draft
    resting: int = 0  # number of upcoming rounds without a draft
    warned: bool = False  # whether the warning that drafting does not pay off was logged

    @property
    def speed(self) -> float:
        """Speed of rounds that draft relative to rounds that do not; at least 1, since drafting is optional."""
        return max(self.tokens / self.cost, 1.0) if self.cost else 1.0

    def begin(self, cost: float) -> None:
        """If nothing was drafted before, set a prior on whether drafting pays, worth two observed rounds."""
        if not self.cost:
            self.note(2 * self.EXPECTED, 2 * cost, rounds=2)
            self.resting = min(self.resting, 32)  # nothing observed yet

    def note(self, tokens: float, cost: float, rounds: int = 1) -> None:
        """Record a round that drafted. If drafting does not pay, rest; the more a retry costs, the longer."""
        self.tokens, self.cost = 0.95 * self.tokens + tokens, 0.95 * self.cost + cost
        if self.cost > self.DECIDED and self.tokens < self.cost:
            self.tokens, self.cost = 0.4 * self.tokens, 0.4 * self.cost  # so that one or two rounds decide again
            retried = 1 if 0.95 * self.cost + cost / rounds > self.DECIDED else 2
            lost = retried * cost / rounds * (1 - self.tokens / self.cost)
            self.resting = min(math.ceil(lost / self.SHARE), 128)


class SlowestRow:
    """
    Tokens per round of a batch, which is done when its slowest row is.

    After `k` rounds whose counts have a standard deviation of `s`, the slowest of several equally fast rows lags
    behind by `z * s / sqrt(k)` tokens per round: a lot at first, little by the end of a long text. So part of this lag
    is added to the slowest row's rate so far, and the lag expected at the end is subtracted.
    """

    def __init__(self, rows: int):
        self.rounds, self.got = 0, [0] * rows
        self.seen, self.total, self.squares = 0, 0, 0
        self.z = NormalDist().inv_cdf((rows - 0.375) / (rows + 0.25))  # expected maximum of normals (Blom)
        self.trust = max(0.5 - 1 / rows, 0.0)  # that rows are equally fast: few rows say little about it

    def after(self, counts: list[int], alive: list[bool], left: int) -> float:
        """Tokens per round, after a round that committed `counts` with `left` tokens to go."""
        self.rounds += 1
        for row, count in enumerate(counts):
            if alive[row]:
                self.got[row] += count
                self.seen, self.total, self.squares = self.seen + 1, self.total + count, self.squares + count**2
        mean = self.total / self.seen
        lag = self.z * max(self.squares / self.seen - mean**2, 0.0) ** 0.5
        got = min(got for got, goes_on in zip(self.got, alive, strict=True) if goes_on)
        pace = min(got / self.rounds + self.trust * lag / self.rounds**0.5, mean)
        return pace / (1 + lag / ((got + left) * pace) ** 0.5)


class PlanByCost:
    """
    What the planners that choose sizes have in common.

    Within a call, sizes follow from the costs that were known at its start and from what was accepted, never from a
    clock. Measurements of this call serve later calls.

    Args:
        table (`CostTable`): The cost of rounds on this machine; extended.
        place (`tuple[int, int]`): Rows, and tokens per row before the first round.
        pace (`Pace`): The drafter's statistics; extended.
        vocab_size (`int`, *optional*): Of the target, if rows may copy earlier text.
    """

    def __init__(self, table: CostTable, place: tuple[int, int], pace: Pace, vocab_size: int | None):
        self.table, self.known, self.pace = table, table.copy(), pace
        self.rows, self.columns = self.place = place
        self.copier = None if vocab_size is None else Copier(self.rows, vocab_size, pace.copies)
        self.timed: list[tuple] = []  # rows, columns, work and seconds of this call's rounds
        self.sizes: list[int] = []  # drafted or copied tokens that each round verified
        self.tokens = self.spent = 0.0  # committed per row; their cost, in units of a round without a draft

    def arrive(self, text) -> None:
        """Before a round, or several between two syncs: look up costs, and book seconds, at the text's length."""
        self.place = self.rows, self.columns + text.host.longest

    def note(self, size: int, tokens: float, cost: float) -> None:
        """Record a round of this call."""
        self.sizes.append(size)
        self.tokens, self.spent = self.tokens + tokens, self.spent + cost

    def summary(self) -> dict:
        """The choices, for the output."""
        self.table.note(self.timed)
        self.table.keep()
        return {"draft_sizes": self.sizes, "estimated_speedup": self.tokens / self.spent if self.sizes else None}


@dataclass
class Round:
    """A round of [`FastestPlan`]: as it begins, what is verified in it, and what should come of it."""

    alive: list[bool]  # rows that had not ended
    left: int  # maximum number of tokens that any of them could still generate
    costs: list[float]  # of rounds that verify 0, 1, ... drafted tokens
    began: float = 0.0  # seconds
    work: Work = NOTHING
    cost: float = 1.0
    judged: list[tuple] = field(default_factory=list)  # of each row's drafted nodes: parents and chances
    said: float = 0.0  # tokens per row that should be accepted


class FastestPlan(PlanByCost):
    """
    For each round, the drafted tokens of a tree that are worth verifying, possibly none. Rows that repeat what they
    or their prompts said before copy it, without a draft, where that is faster.

    Args:
        plan (`Plan`): The draft if there is one: a tree with the maximum number of nodes.
        table (`CostTable`): The cost of rounds on this machine; extended.
        paces (`dict`): The drafter's statistics.
        key: Their key, for this number of rows and decoding mode.
        place (`tuple[int, int]`): Rows, and tokens per row before the first round.
        vocab_size (`int`, *optional*): Of the target, if rows may copy earlier text.
    """

    LADDER = (1, 2, 4, 8, 16, 32, 64)  # sizes that are slightly preferred until their cost is known
    ENOUGH = 3  # number of times that each of them, and a round without a draft, is tried

    def __init__(
        self, plan: Plan, table: CostTable, paces: dict, key, place: tuple[int, int], vocab_size: int | None = None
    ):
        super().__init__(table, place, copy.deepcopy(paces.get(key, Pace())), vocab_size)
        self.widest, self.paces, self.key = plan._replace(cut=self.cut), paces, key
        self.tried: dict[Work, int] = {}  # rounds of this call
        self.slowest = SlowestRow(self.rows)  # over rounds with a draft
        self.here = Correction()  # of the drafts of this text
        self.round: Round | None = None  # set by `next`, completed by `cut`, evaluated by `learn`

    def next(self, text) -> Plan:
        """The plan of the next round of a text (`Continuation`)."""
        self.arrive(text)
        costs = self.known.curve(*self.place, self.widest.nodes)
        this = self.round = Round(text.host.alive, text.tokens_left, costs)
        if not self.sizes:
            self.pace.begin(costs[min(2, self.widest.nodes)])
        measures = self._measures_nothing()
        copied = None if measures else self._worth_copying(text)
        rests = not measures and copied is None and self.pace.resting > 0
        self.pace.resting -= rests
        this.began = text.seconds
        if copied is not None:
            count = copied.shape[1]
            this.work, this.cost = (count, False), self._costs_of_copies()[count]
            return Plan(1 + count, copied=copied)
        return Plan(1) if this.left == 1 or rests or measures else self.widest

    def cut(self, draft: Draft) -> Draft:
        """The likeliest nodes of a drafted tree, as many as are worth it; as a block if they form a single path."""
        this, tree, most = self.round, draft.tree, draft.tokens.shape[1]
        depths, parents = tree.depths.tolist(), tree.parents.tolist()
        chances = (tree.log_probs - tree.log_probs.gather(1, tree.parents)).exp().tolist()
        gains = [0.0] * most  # tokens of all rows by node
        for row in (row for row, alive in enumerate(this.alive) if alive):
            likely = [1.0] * most
            for node in range(1, most):
                likely[node] = likely[parents[row][node]] * self.pace.reliability(chances[row][node])
                gains[node] += likely[node] * (depths[row][node] < this.left)
        count = self._worth([self.here.ratio * gain for gain in gains])
        this.work, this.cost, size = (count, True), this.costs[count], 1 + count
        this.judged = [(parents[row][:size], chances[row][:size]) for row in range(len(parents))]
        this.said = sum(gains[:size]) / sum(this.alive)
        deepest = max(max(row[:size]) for row in depths)
        if deepest == size - 1 and all(row[:size] == list(range(size)) for row in depths):
            return Draft(tree.tokens[:, :size])
        return Draft(tree.tokens[:, :size], tree=tree.prefix(size, deepest))

    def learn(self, text, verdict: Verdict) -> None:
        """Record how long a round took, and what the target accepted of its draft."""
        this = self.round
        seconds = text.seconds - this.began
        counts, (size, drafted) = text.host.committed, this.work
        if self.sizes:  # the first round of a call is slower than the others
            self.timed.append((*self.place, this.work, seconds))
            self.tried[this.work] = self.tried.get(this.work, 0) + 1
        # A batch is done when its slowest row is.
        tokens = min(this.left - (text.tokens_left if any(text.host.alive) else 0), max(counts))
        self.note(size, tokens, this.cost)
        self.paces[self.key] = self.pace  # the next call copies it
        if size and not drafted:
            self.copier.learn(counts, this.alive)
        if not this.judged:
            return
        expected = min(1 + self.here.ratio * this.said, this.left)
        self.here.note(this.said, sum(counts) / sum(this.alive) - 1)
        path = None if verdict.path is None else verdict.path.tolist()
        for row, (parents, chances) in enumerate(this.judged):
            if this.alive[row]:
                taken = (path[row] if path else range(size + 1))[: counts[row]]
                ended = not text.host.alive[row]  # then its last token says nothing about the children
                judged = set(taken[:-1] if ended else taken)
                for node in range(1, size + 1):
                    if parents[node] in judged:
                        self.pace.reliability.note(chances[node], node in taken)
        # For a single row, the expected number is as informative as the accepted one, and varies less.
        paced = 0.25 * tokens + 0.75 * expected
        if len(counts) > 1:
            paced = self.slowest.after(counts, this.alive, this.left)
        self.pace.note(paced, this.cost)

    def summary(self) -> dict:
        """The choices, for the output. A call that mostly decodes without drafts logs the reason once."""
        pace, mostly_none = self.pace, len(self.sizes) >= 16 and 2 * self.sizes.count(0) > len(self.sizes)
        judged = any(observations for observations, *_ in pace.reliability.seen)
        lost = judged and pace.tokens < pace.cost and self.tokens < 1.1 * self.spent  # copies may make up for it
        if mostly_none and lost and not pace.warned:
            pace.warned = True
            logger.warning(
                f"Decoding mostly without drafts: with {self.rows} row(s), rounds that draft are estimated at "
                f"{pace.tokens / pace.cost:.2f}x the speed of the target alone, given its acceptance and the cost of "
                "rounds here. Set `draft.decoding_config.block_size` to draft in every round."
            )
        return super().summary()

    def _worth_copying(self, text) -> torch.LongTensor | None:
        if self.copier is None:
            return None
        most = min(self.round.left - 1, self.widest.nodes)
        return self.copier.worth_copying(text, most, self.pace.speed, self._costs_of_copies())

    def _costs_of_copies(self) -> list[float]:
        """Costs of rounds that verify 0, 1, ... copied tokens."""
        return self.known.curve(*self.place, self.widest.nodes, drafted=False)

    def _worth(self, gains: list[float]) -> int:
        """How many nodes to verify, given the `gains` of each in tokens of all rows."""
        costs, rate, worths = self.round.costs, sum(self.round.alive) * self.pace.speed, [0.0]
        for size, value in enumerate(accumulate(gains[1:]), start=1):
            is_new = size in self.LADDER and self._is_new((size, True))
            worths.append(value - rate * (costs[size] - costs[0]) + 0.1 * rate * is_new)
        return worths.index(max(worths))  # the smallest of those that are worth most

    def _is_new(self, work: Work) -> bool:
        return self.known.count(*self.place, work) + self.tried.get(work, 0) < self.ENOUGH

    def _measures_nothing(self) -> bool:
        """Whether this round does not draft, whatever that is worth: every fourth, until its cost is known."""
        return len(self.sizes) % 4 == 1 and not self.pace.resting and self._is_new(NOTHING)
