"""
How many drafted tokens a round verifies: as many as are expected to be fastest here.

A round that verifies `n` drafted tokens costs `C(n)` and commits `1 + A(n)` tokens, `A(n)` being the sum of the
chances that the target accepts them. Both are estimated: costs from timed rounds, chances from the drafter's own
probabilities and how reliable they were so far. At a speed of `L` tokens a second, one more token pays while it adds
more than `L` times its cost (Dinkelbach's rule for the best ratio of sums), and drafting pays while it is faster than
not drafting, which is a size like any other.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import NormalDist

from dflash_hf.decoding.reliability import Reliability


@dataclass
class Throughput:
    """A drafter's statistics, kept between calls: how reliable its probabilities are, and whether drafting pays."""

    EXPECTED = 1.5  # assumed tokens per row of a drafting round, before any was seen
    SHARE = 0.015  # share of the time that may be lost to retrying what did not pay
    DECIDED = 2.5  # cost of the rounds, older ones counting less, after which it is decided whether drafting pays

    reliability: Reliability = field(default_factory=Reliability)
    of_copies: Reliability = field(default_factory=Reliability)
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
        got = min(got for got, one in zip(self.got, alive, strict=True) if one)
        pace = min(got / self.rounds + self.trust * lag / self.rounds**0.5, mean)
        return pace / (1 + lag / ((got + left) * pace) ** 0.5)


def gains(tree, alive: list[bool], left: int, reliability: Reliability) -> tuple[list[float], list[list[float]]]:
    """
    What verifying the first 0, 1, ... nodes of a tree should gain.

    Args:
        tree (`Tree`): The tree.
        alive (`list[bool]`): Rows that have not ended.
        left (`int`): Maximum number of tokens that any of them may still generate.
        reliability (`Reliability`): Of the drafter's probabilities.

    Returns:
        Tokens of all rows, `[n]`, and the drafter's chance of each node of each row, given its parent, `[R][n]`.
    """
    depths, parents = tree.depths.tolist(), tree.parents.tolist()
    chances = (tree.log_probs - tree.log_probs.gather(1, tree.parents)).exp().tolist()
    each = [0.0] * len(depths[0])
    for row in (row for row, one in enumerate(alive) if one):
        likely = [1.0] * len(each)
        for node in range(1, len(each)):
            likely[node] = likely[parents[row][node]] * reliability(chances[row][node])
            each[node] += likely[node] * (depths[row][node] < left)
    return list(accumulate(each)), chances


def worth(gains: list[float], costs: list[float], speed: float, bonus=lambda size: 0.0) -> int:
    """How many tokens to verify: the smallest number that is worth most, given gains, costs and tokens per cost."""
    worths = [gain - speed * (cost - costs[0]) + bonus(size) for size, (gain, cost) in enumerate(zip(gains, costs))]
    return worths.index(max(worths))
