"""How many tokens of a draft the target is expected to accept: calibrated probabilities of the drafter."""

from collections.abc import Iterator
from itertools import accumulate

from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.trees import Tree


class AcceptanceCalibration:
    """
    How often the target accepts a token to which the drafter gives a certain probability, if it accepted the tokens
    before: a histogram of outcomes over ten equal ranges of probability (histogram binning, Zadrozny & Elkan 2001).
    Until there are outcomes, the drafter's own probability.
    """

    BINS = 10
    PRIOR = 4.0  # outcomes that the drafter's own probability is worth
    HALVE_AT = 400  # outcomes of a bin, after which older ones count half: texts change

    def __init__(self):
        self.observed = [0.0] * self.BINS
        self.accepted = [0.0] * self.BINS

    def _bin(self, probability: float) -> int:
        return min(int(probability * self.BINS), self.BINS - 1)

    def record(self, probability: float, accepted: bool) -> None:
        """Add an outcome."""
        index = self._bin(probability)
        if self.observed[index] >= self.HALVE_AT:
            self.observed[index] /= 2
            self.accepted[index] /= 2
        self.observed[index] += 1
        self.accepted[index] += accepted

    def __call__(self, probability: float) -> float:
        """The probability that such a token is accepted."""
        index = self._bin(probability)
        return (self.accepted[index] + self.PRIOR * probability) / (self.observed[index] + self.PRIOR)


def node_probabilities(tree: Tree) -> list[list[float]]:
    """`[R][n]`, the drafter's probability of each node given its parent."""
    return (tree.log_probs - tree.log_probs.gather(1, tree.parents)).exp().tolist()


def expected_accepted(
    tree: Tree,
    probabilities: list[list[float]],
    unfinished: list[bool],
    remaining_tokens: int,
    calibration: AcceptanceCalibration,
) -> list[float]:
    """
    How many tokens the target is expected to accept of the first 0, 1, ... drafted nodes of a tree, over all rows: the
    sum of the probabilities that it accepts the path to each of them.

    Args:
        tree (`Tree`): `n` candidates, the anchor first, then the likeliest nodes.
        probabilities (`list[list[float]]`): `[R][n]`, the drafter's, of each node given its parent.
        unfinished (`list[bool]`): Rows that have not ended.
        remaining_tokens (`int`): Maximum number of tokens that any of them may still generate.
        calibration (`AcceptanceCalibration`): Of the drafter.

    Returns:
        `list[float]` `[n]`.
    """
    depths = tree.depths.tolist()
    parents = tree.parents.tolist()
    num_candidates = len(depths[0])
    accepted_at_node = [0.0] * num_candidates
    for row, is_unfinished in enumerate(unfinished):
        if not is_unfinished:
            continue
        path_probabilities = [1.0] * num_candidates
        for node in range(1, num_candidates):
            path_probabilities[node] = path_probabilities[parents[row][node]] * calibration(probabilities[row][node])
            if depths[row][node] < remaining_tokens:
                accepted_at_node[node] += path_probabilities[node]
    return list(accumulate(accepted_at_node))


def acceptance_outcomes(
    tree: Tree, probabilities: list[list[float]], acceptance: Acceptance, unfinished: list[bool]
) -> Iterator[tuple[float, bool]]:
    """
    The outcomes of a round, from which calibration learns: for each node whose parent was accepted, whether it was
    accepted too. In a row that ended, nothing is learned of the nodes after the last token.

    Args:
        tree (`Tree`): What was verified.
        probabilities (`list[list[float]]`): As in [`expected_accepted`].
        acceptance (`Acceptance`): What was accepted.
        unfinished (`list[bool]`): Rows that have not ended.

    Yields:
        The probability of a node, and whether it was accepted.
    """
    parents = tree.parents.tolist()
    for row, count in enumerate(acceptance.counts):
        path = list(range(count)) if acceptance.path is None else acceptance.path[row, :count].tolist()
        extended = path if unfinished[row] else path[:-1]
        for node in range(1, len(parents[row])):
            if parents[row][node] in extended:
                yield probabilities[row][node], node in path
