"""Whether the gain of an experiment is more than chance and large enough to matter, and which gain is the best."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dflash_hf.doctor.measuring import Counts, Experiment
from dflash_hf.evaluation.compare import mean_difference


# A gain of fewer standard errors may be chance: with 40 useless changes and 24 texts, 1 of 25 diagnoses is wrong.
MIN_STANDARD_ERRORS = 3.5
# Accepted tokens per block, and share of those before, that a change must gain to matter.
MIN_GAIN = 0.05
MIN_SHARE = 0.03
# The same where other texts are drafted: texts differ in how predictable they are.
MIN_GAIN_ON_OTHER_TEXTS = 0.5
MIN_SHARE_ON_OTHER_TEXTS = 0.4
MIN_NATS = 0.1  # gain in log-likelihood per block
# Standard errors of the gain in accepted tokens, below which a likelier text has fewer of them.
MIN_STANDARD_ERRORS_OF_LIKELIER = -1.0
# Of changes with this share of the best gain, the first in the table is the cause: the smallest change.
SHARE_OF_BEST_GAIN = 0.9


@dataclass
class Result:
    """The result of an experiment: the counts without its change and with it."""

    experiment: Experiment
    before: Counts
    after: Counts

    @cached_property
    def accepted_gain(self) -> tuple[float, float]:
        """The gain in accepted tokens per block, and in standard errors."""
        before = [(text.accepted, text.blocks) for text in self.before.texts]
        after = [(text.accepted, text.blocks) for text in self.after.texts]
        return mean_difference(before, after)

    @cached_property
    def likelihood_gain(self) -> tuple[float, float] | None:
        """
        The gain in log-likelihood per block, in nats over the slots that both have, and in standard errors; `None` if
        other texts were drafted, whose likelihood says nothing.
        """
        if self.experiment.texts is not None:
            return None
        all_texts = self.before.texts + self.after.texts
        slots = min((len(text.nats) for text in all_texts if text.nats), default=0)
        before = [(sum(text.nats[:slots]), text.blocks) for text in self.before.texts]
        after = [(sum(text.nats[:slots]), text.blocks) for text in self.after.texts]
        return mean_difference(before, after)

    @property
    def figures(self) -> dict[str, float]:
        """All gains, by name, as `--json` shows them."""
        gain, standard_errors = self.accepted_gain
        figures = {"gain": gain, "standard_errors": standard_errors}
        if self.likelihood_gain is not None:
            figures["nats"], figures["nats_standard_errors"] = self.likelihood_gain
        return figures

    @property
    def accepts_more(self) -> bool:
        """Whether the gain in accepted tokens is significant and large enough to matter."""
        min_gain = MIN_GAIN
        min_share = MIN_SHARE
        if self.experiment.texts is not None:
            min_gain = MIN_GAIN_ON_OTHER_TEXTS
            min_share = MIN_SHARE_ON_OTHER_TEXTS
        gain, standard_errors = self.accepted_gain
        return standard_errors >= MIN_STANDARD_ERRORS and gain >= max(min_gain, min_share * (self.before.tau - 1))

    @property
    def is_likelier(self) -> bool:
        """Whether the same texts are significantly likelier, with no fewer accepted tokens."""
        if self.likelihood_gain is None:
            return False
        gain, standard_errors = self.likelihood_gain
        if standard_errors < MIN_STANDARD_ERRORS or gain < MIN_NATS:
            return False
        _, accepted_standard_errors = self.accepted_gain
        return accepted_standard_errors >= MIN_STANDARD_ERRORS_OF_LIKELIER

    @property
    def is_better(self) -> bool:
        """Whether the change is better by more than chance."""
        return self.accepts_more or self.is_likelier


def likeliest(results: Sequence[Result]) -> Result | None:
    """
    The first change with about the best gain in accepted tokens, or, if there is none, in likelihood; `None` if no
    change is better.
    """
    gains = [(result.accepted_gain[0], result) for result in results if result.accepts_more]
    if not gains:
        likelier = [result for result in results if result.is_likelier]
        gains = [(result.likelihood_gain[0], result) for result in likelier if result.likelihood_gain]
    best_gain = max((gain for gain, _ in gains), default=0.0)
    for gain, result in gains:
        if gain >= SHARE_OF_BEST_GAIN * best_gain:
            return result
    return None
