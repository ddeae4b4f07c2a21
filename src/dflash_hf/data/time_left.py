"""How long it will take until all rows have their text: said before, and once it can be told better."""

import time
from collections.abc import Callable, Iterable, Iterator

from transformers import GenerationConfig
from transformers.utils import logging

from dflash_hf.responses import PLAIN_ROWS, best_rows, decodes_in_slots


def rows_at_a_time(
    given: int | None, target, config: GenerationConfig, length: int, texts: int
) -> tuple[int, float | None]:
    """
    How many rows should decode together, and the tokens that they give a second: as many as are given, else those that
    are fastest here, which is measured; `None` where batches are not always full, so that it cannot be.

    Args:
        target (`PreTrainedModel`), config (`GenerationConfig`): What decodes, and how.
        length (`int`): Tokens of a usual row.
        texts (`int`): How many are wanted: a batch that is seldom full is slow.
    """
    if not decodes_in_slots(target, config):
        return given or PLAIN_ROWS, None
    return best_rows(target, length, (given,) if given else None, max(8, texts // 8))


class TimeLeft:
    """
    A progress bar with the tokens of a second, and a line that says how long the rest will take as soon as a batch of
    texts has ended.

    Args:
        unit (`str`): What is counted.
        total, done (`int`): How many are wanted, and were there before.
        rows (`int`): Texts that are written at a time.
        say: Is told.
        full (`bool`): A text that has ended is followed by the next at once; else when the whole batch has ended.
    """

    def __init__(self, unit: str, total: int, done: int, rows: int, say: Callable[[str], None], full: bool = True):
        self.bar = logging.tqdm(total=total, initial=done, unit=unit)
        self.wanted, self.rows, self.say = total - done, rows, say
        self.batches = 1.5 if full else 1.0  # when as many have ended as a batch holds; the others are half written
        self.begun, self.ended, self.kept, self.tokens = time.monotonic(), 0, 0, 0

    def __enter__(self) -> "TimeLeft":
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()

    def count(self, kept: int, tokens: int) -> None:
        """One more text has ended, which gave so many rows, of so many tokens."""
        self.ended, self.kept, self.tokens = self.ended + 1, self.kept + kept, self.tokens + tokens
        seconds = time.monotonic() - self.begun
        self.bar.set_postfix_str(f"{self.tokens / seconds:,.0f} tokens/s", refresh=False)
        self.bar.update(kept)
        if self.ended == self.rows and self.kept and self.wanted > 2 * self.kept:
            self.say(f"about {duration(seconds * (self.wanted / self.kept / self.batches - 1))} to go")


def telling(items: Iterable, total: int, say: Callable[[str], None], done: int = 0) -> Iterator:
    """
    Items, so many in all, that take about as long each; after a twentieth, `say` is told how long the rest takes.

    Args:
        done (`int`): Of the first so many the outcome is known, and they take no time.
    """
    begun, heard = time.monotonic(), done + max(3, (total - done) // 20)
    for number, item in enumerate(items):
        if number == done:
            begun = time.monotonic()
        if number == heard and total > heard + 3:
            say(f"about {duration((time.monotonic() - begun) / (number - done) * (total - number))} to go")
        yield item


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
