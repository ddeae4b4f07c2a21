"""How reliable probabilities turned out to be: of a drafter in general, and in the text at hand."""

from bisect import bisect


class Reliability:
    """
    How often the target accepts a token to which the drafter gives a certain probability, if its predecessors were
    accepted. Until it is observed, the drafter's own probability.
    """

    EDGES = (0.03, 0.08, 0.16, 0.3, 0.45, 0.6, 0.75, 0.88, 0.96)
    TRUST, MEMORY = 4.0, 400.0  # observations that the drafter's own probability is worth; that a bin remembers

    def __init__(self):
        self.seen = [(0.0, 0.0, 0.0)] * (len(self.EDGES) + 1)  # observations, accepted, sum of the probabilities

    def note(self, probability: float, accepted: bool) -> None:
        place = bisect(self.EDGES, probability)
        seen = self.seen[place]
        if seen[0] >= self.MEMORY:
            seen = tuple(count * 0.75 for count in seen)
        self.seen[place] = seen[0] + 1, seen[1] + accepted, seen[2] + probability

    def __call__(self, probability: float) -> float:
        """The calibrated probability."""
        _, accepted, said = self.seen[bisect(self.EDGES, probability)]
        trusted = self.TRUST * probability
        return min(probability * (accepted + trusted) / (said + trusted), 1.0)


class TextCalibration:
    """The share of the expected tokens that were accepted in one text; older rounds count less."""

    TRUST, MEMORY = 4.0, 0.9  # expected tokens that all other texts are worth; kept from each round to the next

    def __init__(self):
        self.expected = self.accepted = 0.0

    def note(self, expected: float, accepted: float) -> None:
        """Record a round: tokens per row that should be accepted, and that were."""
        self.expected = self.MEMORY * self.expected + expected
        self.accepted = self.MEMORY * self.accepted + accepted

    @property
    def ratio(self) -> float:
        return (self.accepted + self.TRUST) / (self.expected + self.TRUST)
