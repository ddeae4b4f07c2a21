"""
How many drafted tokens a round verifies: as many as are expected to be fastest here.

A round that verifies `n` drafted tokens costs `C(n)` and commits `1 + A(n)` tokens, `A(n)` being the sum of the
chances that the target accepts them. Both are estimated: costs from timed rounds, chances from the drafter's own
probabilities and how reliable they were so far. At a speed of `L` tokens a second, one more token pays while it adds
more than `L` times its cost (Dinkelbach's rule for the best ratio of sums), and drafting pays while it is faster than
not drafting, which is a size like any other.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from dflash_hf.decoding.reliability import Reliability, TextCalibration


@dataclass
class Throughput:
    """A drafter's statistics, kept between calls: how reliable its probabilities are, and whether drafting pays."""

    # What each is worth: `examples/benchmarks/results/constants.md`.
    EXPECTED = 1.5  # assumed tokens per row of a drafting round, before any was seen; 2.5: -5 to +12 %
    MEMORY = 0.95  # kept of older rounds with each new one; 0.8 and 0.99: within 1 %
    SHARE = 0.015  # share of the time that may be lost to trying again what did not pay; 1: -6 to +5 %
    LONGEST_REST = 128  # rounds without a draft; 16: +1 % with four rows

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
            self.tokens, self.cost = 2 * self.EXPECTED, 2 * cost
            self._rest(cost)

    def note(self, tokens: float, cost: float) -> None:
        """Record a round that drafted."""
        self.tokens, self.cost = self.MEMORY * self.tokens + tokens, self.MEMORY * self.cost + cost
        self._rest(cost)

    def _rest(self, cost: float) -> None:
        """If two rounds or more say that drafting does not pay, rest: the longer, the more another try would cost."""
        rate = self.tokens / self.cost
        if rate < 1 and self.cost > 1.5 * cost:
            self.tokens, self.cost = cost * rate, cost  # as one round, so that the next one decides again
            self.resting = min(math.ceil(cost * (1 - rate) / self.SHARE), self.LONGEST_REST)


class Seen:
    """
    What a call has seen of its own text.

    Attributes:
        rounds (`list[tuple]`): Size, tokens committed per row, and cost of each round.
        calibration (`TextCalibration`): How much of what is expected of a draft is accepted in this text.
    """

    def __init__(self):
        self.rounds: list[tuple[int, float, float]] = []
        self.calibration = TextCalibration()


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


def judged(tree, chances: list[list[float]], acceptance, alive: list[bool]) -> Iterator[tuple[float, bool]]:
    """
    The nodes of a tree whose predecessors were accepted.

    Args:
        tree (`Tree`), chances (`list[list[float]]`): The tree, and the drafter's chance of each node of each row.
        acceptance (`Acceptance`): What was accepted.
        alive (`list[bool]`): Rows that go on. The last token of a row that ended says nothing about those after it.

    Yields:
        The drafter's chance of a node, and whether it was accepted.
    """
    parents = tree.parents.tolist()
    paths = [range(len(parents[0]))] * len(parents) if acceptance.path is None else acceptance.path.tolist()
    for row, count in enumerate(acceptance.counts):
        accepted = paths[row][:count]
        followed = set(accepted if alive[row] else accepted[:-1])
        for node in range(1, len(parents[row])):
            if parents[row][node] in followed:
                yield chances[row][node], node in accepted


def best_size(gains: list[float], costs: list[float], speed: float, bonus=lambda size: 0.0) -> int:
    """How many tokens to verify: the smallest number that is worth most, given gains, costs and tokens per cost."""
    worths = [gain - speed * (cost - costs[0]) + bonus(size) for size, (gain, cost) in enumerate(zip(gains, costs))]
    return worths.index(max(worths))
