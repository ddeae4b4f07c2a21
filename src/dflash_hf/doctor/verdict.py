"""
Which changes help, and which one is the cause.

A change is better if more tokens are accepted. On the same blocks it is also better if the drafter's likelihood of the
target's text rises and no fewer tokens are accepted. Every token of a block contributes to the likelihood, only the
first mistake to acceptance, so that likelihoods need a tenth of the texts.
"""

from collections.abc import Sequence

from dflash_hf.doctor.measure import Counts
from dflash_hf.evaluation.compare import mean_difference


SIGNIFICANT = 3.5  # standard errors: with 40 useless changes and 24 texts, 1 of 25 diagnoses is wrong
SUSPICIOUS = 2.4  # standard errors after which more texts are worth their time
GAIN, GAIN_OF_OTHER_TEXT = 1.03, 1.4  # times the accepted tokens; texts differ in how predictable they are
LEAST, LEAST_OF_OTHER_TEXT = 0.05, 0.5  # accepted tokens per block
LEAST_NATS = 0.1  # log-probability per block
FEWER = -1.0  # standard errors: no fewer, apart from chance
ALIKE = 0.9  # share of the best gain at which the first in the list, the smallest change, is the cause


def difference(before: Counts, after: Counts) -> tuple[float, float]:
    """The gain in accepted tokens per block, and in standard errors."""
    return mean_difference(*(list(zip(one.accepted, one.blocks, strict=True)) for one in (before, after)))


def likelihood(before: Counts, after: Counts) -> tuple[float, float]:
    """The gain in log-probability per block over the same texts, in nats and in standard errors; of common slots."""
    pair = (before, after)
    slots = min((len(nats) for one in pair for nats in one.nats if nats), default=0)
    return mean_difference(
        *([(sum(nats[:slots]), n) for nats, n in zip(one.nats, one.blocks, strict=True)] for one in pair)
    )


def accepts_more(before: Counts, after: Counts, same_blocks: bool) -> bool:
    """Whether the gain in accepted tokens is significant and large enough to matter."""
    gain, errors = difference(before, after)
    share, least = (GAIN, LEAST) if same_blocks else (GAIN_OF_OTHER_TEXT, LEAST_OF_OTHER_TEXT)
    return errors >= SIGNIFICANT and gain >= max(least, (share - 1) * (before.tau - 1))


def is_likelier(before: Counts, after: Counts) -> bool:
    """Whether the same texts are significantly likelier, with no fewer accepted tokens."""
    gain, errors = likelihood(before, after)
    return errors >= SIGNIFICANT and gain >= LEAST_NATS and difference(before, after)[1] >= FEWER


def is_better(before: Counts, after: Counts, same_blocks: bool) -> bool:
    """Whether a change is significantly better."""
    return accepts_more(before, after, same_blocks) or (same_blocks and is_likelier(before, after))


def likeliest(before: Counts, after: Sequence[Counts], same_blocks: Sequence[bool]) -> int | None:
    """
    Index of the first change with about the best gain in accepted tokens, or, if there is none, in likelihood; `None`
    if no change is better.
    """
    pairs = list(zip(after, same_blocks, strict=True))
    more = {i: difference(before, one)[0] for i, (one, same) in enumerate(pairs) if accepts_more(before, one, same)}
    likelier = [i for i, (one, same) in enumerate(pairs) if same and is_likelier(before, one)]
    gains = more or {i: likelihood(before, after[i])[0] for i in likelier}
    return next((i for i, gain in gains.items() if gain >= ALIKE * max(gains.values())), None)
