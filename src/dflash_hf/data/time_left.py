"""Estimates of the time until all rows have their text: before the start, and after the first batch."""

import time
from collections.abc import Callable, Iterable, Iterator

from transformers import GenerationConfig
from transformers.utils import logging

from dflash_hf.responses import PLAIN_ROWS, best_rows, decodes_in_slots


def rows_at_a_time(
    given: int | None, target, config: GenerationConfig, length: int, texts: int
) -> tuple[int, float | None]:
    """
    The number of rows to decode together (as given, otherwise the fastest, which is measured), and their tokens per
    second (`None` if batches are not always full, so that it cannot be measured).

    Args:
        target (`PreTrainedModel`), config (`GenerationConfig`): The model and its generation settings.
        length (`int`): Tokens of a typical row.
        texts (`int`): Number of texts wanted; at most half of them decode together, since a batch that is never full
            is slow.
    """
    if not decodes_in_slots(target, config):
        return given or PLAIN_ROWS, None
    return best_rows(target, length, (given,) if given else None, max(8, texts // 2))


class TimeLeft:
    """
    A progress bar with tokens per second, and a line with the remaining time once the first batch of texts has ended.

    Args:
        unit (`str`): The unit of the progress bar.
        total, done (`int`): Number of texts wanted, and finished before.
        rows (`int`): Texts that are written together.
        say: Called with the line.
        full (`bool`): Whether a finished text is replaced immediately, not only when the whole batch has ended.
    """

    def __init__(self, unit: str, total: int, done: int, rows: int, say: Callable[[str], None], full: bool = True):
        self.bar = logging.tqdm(total=total, initial=done, unit=unit)
        self.wanted, self.rows, self.say = total - done, rows, say
        # Batches written when as many texts as a batch holds have ended: if refilled, the others are half finished.
        self.batches = 1.5 if full else 1.0
        self.start, self.ended, self.kept, self.tokens = time.monotonic(), 0, 0, 0

    def __enter__(self) -> "TimeLeft":
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()

    def count(self, kept: int, tokens: int) -> None:
        """Count a finished text: the rows and tokens that it gave."""
        self.ended, self.kept, self.tokens = self.ended + 1, self.kept + kept, self.tokens + tokens
        seconds = time.monotonic() - self.start
        self.bar.set_postfix_str(f"{self.tokens / seconds:,.0f} tokens/s", refresh=False)
        self.bar.update(kept)
        if self.ended == self.rows and self.kept and self.wanted > 2 * self.kept:
            self.say(f"about {duration(seconds * (self.wanted / self.kept / self.batches - 1))} to go")


def telling(items: Iterable, total: int, say: Callable[[str], None], done: int = 0) -> Iterator:
    """
    Iterate over `total` items of similar duration; after a twentieth of them, `say` the whole and the remaining time.

    Args:
        done (`int`): Number of items at the start that take no time, since their outcome is known.
    """
    start, report_at = time.monotonic(), done + max(3, (total - done) // 20)
    for number, item in enumerate(items):
        if number == done:
            start = time.monotonic()
        if number == report_at and total > report_at + 3:
            each = (time.monotonic() - start) / (number - done)
            say(f"about {duration(each * (total - done))} in all, {duration(each * (total - number))} to go")
        yield item


def duration(seconds: float) -> str:
    """A duration for people."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
