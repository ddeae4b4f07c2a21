"""
Which changes help, and which one is the cause.

A change is better if more tokens are accepted. On the same blocks it is also better if the drafter's likelihood of the
target's text rises and no fewer tokens are accepted. Every token of a block contributes to the likelihood, only the
first mistake to acceptance, so that likelihoods need a tenth of the texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dflash_hf.doctor.experiments import Experiment
from dflash_hf.doctor.measure import Counts
from dflash_hf.evaluation.compare import mean_difference


SIGNIFICANT = 3.5  # standard errors: with 40 useless changes and 24 texts, 1 of 25 diagnoses is wrong
SUSPICIOUS = 2.4  # standard errors after which more texts are worth their time
GAIN, GAIN_OF_OTHER_TEXT = 1.03, 1.4  # times the accepted tokens; texts differ in how predictable they are
LEAST, LEAST_OF_OTHER_TEXT = 0.05, 0.5  # accepted tokens per block
LEAST_NATS = 0.1  # log-probability per block
FEWER = -1.0  # standard errors: no fewer, apart from chance
ALIKE = 0.9  # share of the best gain at which the first in the list, the smallest change, is the cause


@dataclass
class Tried:
    """
    What an experiment gave.

    Args:
        experiment (`Experiment`): The change.
        before, after (`Counts`): Without it and with it.
    """

    experiment: Experiment
    before: Counts
    after: Counts

    @cached_property
    def difference(self) -> tuple[float, float]:
        """The gain in accepted tokens per block, and in standard errors."""
        pair = (self.before, self.after)
        return mean_difference(*(list(zip(one.accepted, one.blocks, strict=True)) for one in pair))

    @cached_property
    def likelihood(self) -> tuple[float, float] | None:
        """
        The gain in log-probability per block over the same texts, in nats and in standard errors; of common slots.
        `None`: the texts are others, whose likelihoods say nothing, or were decoded.
        """
        if self.experiment.change.texts is not None or not self.before.nats:
            return None
        pair = (self.before, self.after)
        slots = min((len(nats) for one in pair for nats in one.nats if nats), default=0)
        return mean_difference(
            *([(sum(nats[:slots]), n) for nats, n in zip(one.nats, one.blocks, strict=True)] for one in pair)
        )

    @property
    def accepts_more(self) -> bool:
        """Whether the gain in accepted tokens is significant and large enough to matter."""
        gain, errors = self.difference
        other = self.experiment.change.texts is not None
        share, least = (GAIN_OF_OTHER_TEXT, LEAST_OF_OTHER_TEXT) if other else (GAIN, LEAST)
        return errors >= SIGNIFICANT and gain >= max(least, (share - 1) * (self.before.tau - 1))

    @property
    def is_likelier(self) -> bool:
        """Whether the same texts are significantly likelier, with no fewer accepted tokens."""
        gain, errors = self.likelihood or (0.0, 0.0)
        return errors >= SIGNIFICANT and gain >= LEAST_NATS and self.difference[1] >= FEWER

    @property
    def is_better(self) -> bool:
        """Whether the change is significantly better."""
        return self.accepts_more or self.is_likelier

    @property
    def suspicion(self) -> float:
        """How many standard errors speak for the change; 0 if it gains too little to matter."""
        gain, errors = self.difference
        if self.likelihood is not None and errors > FEWER:
            gain, errors = max((gain, errors), self.likelihood, key=lambda pair: pair[1])
        return errors if gain >= LEAST_NATS else 0.0


def likeliest(tried: Sequence[Tried]) -> Tried | None:
    """
    The first change with about the best gain in accepted tokens, or, if there is none, in likelihood; `None` if no
    change is better.
    """
    gains = [(one.difference[0], one) for one in tried if one.accepts_more]
    gains = gains or [(one.likelihood[0], one) for one in tried if one.is_likelier]
    best = max((gain for gain, _ in gains), default=0.0)
    return next((one for gain, one in gains if gain >= ALIKE * best), None)
