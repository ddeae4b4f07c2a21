"""How many tokens of a draft the target is expected to accept: calibrated probabilities of the drafter."""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch

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


class HostTree(NamedTuple):
    """
    What the policy reads of a [`Tree`], on the host: lists `[R][n]`, made by one copy from the device.

    Attributes:
        depths (`list[list[int]]`): Each node's distance from the anchor.
        parents (`list[list[int]]`): The parent of each node.
        probabilities (`list[list[float]]`): The drafter's, of each node given its parent.
    """

    depths: list[list[int]]
    parents: list[list[int]]
    probabilities: list[list[float]]

    @classmethod
    def of(cls, tree: Tree) -> "HostTree":
        """Copy a tree to the host, which waits for the device."""
        return cls.of_values(values_of_tree(tree))

    @classmethod
    def of_values(cls, values: torch.Tensor) -> "HostTree":
        """From the values `[3, R, n]` that [`values_of_tree`] returns."""
        depths, parents, probabilities = values.tolist()
        return cls(_as_integers(depths), _as_integers(parents), probabilities)

    def is_path(self, num_candidates: int) -> bool:
        """Whether the first `num_candidates` nodes, the anchor included, are a single path in every row."""
        path = list(range(num_candidates))
        return all(depths[:num_candidates] == path for depths in self.depths)


def values_of_tree(tree: Tree) -> torch.Tensor:
    """The depths, parents and probabilities of a tree's nodes as one tensor `[3, R, n]`, for one copy to the host."""
    probabilities = (tree.log_probs - tree.log_probs.gather(1, tree.parents)).exp()
    return torch.stack([tree.depths.double(), tree.parents.double(), probabilities.double()])


def _as_integers(rows: list[list[float]]) -> list[list[int]]:
    return [[int(value) for value in row] for row in rows]


def expected_accepted(
    tree: HostTree, unfinished: list[bool], remaining_tokens: int, calibration: AcceptanceCalibration
) -> list[float]:
    """
    How many tokens the target is expected to accept of the first 0, 1, ... drafted nodes of a tree, over all rows: the
    sum of the probabilities that it accepts the path to each of them.

    Args:
        tree (`HostTree`): `n` candidates, the anchor first, then the likeliest nodes.
        unfinished (`list[bool]`): Rows that have not ended.
        remaining_tokens (`int`): Maximum number of tokens that any of them may still generate.
        calibration (`AcceptanceCalibration`): Of the drafter.

    Returns:
        `list[float]` `[n]`.
    """
    num_candidates = len(tree.depths[0])
    accepted_at_node = [0.0] * num_candidates
    for depths, parents, probabilities, is_unfinished in zip(*tree, unfinished, strict=True):
        if not is_unfinished:
            continue
        path_probabilities = [1.0] * num_candidates
        for node in range(1, num_candidates):
            path_probabilities[node] = path_probabilities[parents[node]] * calibration(probabilities[node])
            if depths[node] < remaining_tokens:
                accepted_at_node[node] += path_probabilities[node]
    return list(accumulate(accepted_at_node))


def acceptance_outcomes(
    tree: HostTree, num_candidates: int, acceptance: Acceptance, unfinished: list[bool]
) -> Iterator[tuple[float, bool]]:
    """
    The outcomes of a round, from which calibration learns: for each node whose parent was accepted, whether it was
    accepted too. In a row that ended, nothing is learned of the nodes after the last token.

    Args:
        tree (`HostTree`): What was drafted.
        num_candidates (`int`): How many of its nodes were verified, the anchor included.
        acceptance (`Acceptance`): What was accepted.
        unfinished (`list[bool]`): Rows that have not ended.

    Yields:
        The probability of a node, and whether it was accepted.
    """
    for row, path in enumerate(acceptance.paths):
        extended = path if unfinished[row] else path[:-1]
        for node in range(1, num_candidates):
            if tree.parents[row][node] in extended:
                yield tree.probabilities[row][node], node in path
