"""
Which change makes a difference, and which one explains it best.

A change is better where more tokens are accepted. Of the same blocks it is also better where the target's own text
becomes likelier to the drafter and no fewer tokens are accepted: every token of a block says how likely it was, for
acceptance only the first mistake counts. Likelihoods show in a few texts what acceptance shows in hundreds.
"""

from collections.abc import Sequence

from dflash_hf.doctor.measure import Counts
from dflash_hf.evaluation.compare import mean_difference


SIGNIFICANT = 3.5  # standard errors: of 40 changes that do nothing, in 24 texts, one seems to help in 1 of 25 cases
GAIN, GAIN_OF_OTHER_TEXT = 1.03, 1.4  # times the accepted tokens; texts differ in how predictable they are
LEAST, LEAST_NATS = 0.05, 0.1  # accepted tokens of a block, and what is gained in the likelihood of its text
FEWER = -1.0  # standard errors: not fewer, but for chance
ALIKE = 0.9  # of the best gain: then the first in the list, which changes least, is the explanation


def difference(before: Counts, after: Counts) -> tuple[float, float]:
    """How many more tokens of a block are accepted, and in standard errors."""
    return mean_difference(*(list(zip(one.accepted, one.blocks, strict=True)) for one in (before, after)))


def likelihood(before: Counts, after: Counts) -> tuple[float, float]:
    """By how many nats the text of a block is likelier, and in standard errors; of the same texts."""
    return mean_difference(*(list(zip(one.nats, one.blocks, strict=True)) for one in (before, after)))


def accepts_more(before: Counts, after: Counts, same_blocks: bool) -> bool:
    """Whether more is accepted, by more than chance and by more than is worth naming."""
    gain, errors = difference(before, after)
    share = GAIN if same_blocks else GAIN_OF_OTHER_TEXT
    return errors >= SIGNIFICANT and gain >= max(LEAST, (share - 1) * (before.tau - 1))


def is_likelier(before: Counts, after: Counts) -> bool:
    """Whether the same texts are likelier, by more than chance, and no less of them is accepted."""
    gain, errors = likelihood(before, after)
    return errors >= SIGNIFICANT and gain >= LEAST_NATS and difference(before, after)[1] >= FEWER


def is_better(before: Counts, after: Counts, same_blocks: bool) -> bool:
    """Whether a change is better by more than chance, and by more than is worth naming."""
    return accepts_more(before, after, same_blocks) or (same_blocks and is_likelier(before, after))


def likeliest(before: Counts, after: Sequence[Counts], same_blocks: Sequence[bool]) -> int | None:
    """
    The number of the first change that gains about as much as the best: in accepted tokens, and where no change gains
    any, in likelihood. `None` where none is better.
    """
    pairs = list(zip(after, same_blocks, strict=True))
    more = {i: difference(before, one)[0] for i, (one, same) in enumerate(pairs) if accepts_more(before, one, same)}
    likelier = [i for i, (one, same) in enumerate(pairs) if same and is_likelier(before, one)]
    gains = more or {i: likelihood(before, after[i])[0] for i in likelier}
    return next((i for i, gain in gains.items() if gain >= ALIKE * max(gains.values())), None)
