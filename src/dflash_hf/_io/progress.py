"""Progress bars of commands, and how to hide those of libraries."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized

from dflash_hf._io.terminal import note


SECONDS_BETWEEN_LINES = 30.0  # between lines of progress, where no bar is shown


def bar(desc: str) -> Callable[[Iterable], Iterable]:
    """
    A function that wraps an iterable to show progress: on a terminal as a bar that disappears at the end, elsewhere as
    a line every `SECONDS_BETWEEN_LINES`, because a bar would fill a log file.
    """
    from tqdm import tqdm

    def with_progress(items: Iterable) -> Iterable:
        if os.environ.get("TQDM_DISABLE"):  # --quiet; tqdm itself reads it when it is imported
            return items
        if sys.stderr.isatty():
            return tqdm(items, desc=desc, leave=False)
        return _with_lines(items, desc)

    return with_progress


def _with_lines(items: Iterable, desc: str) -> Iterator:
    """Yield the items, and print how many are done every `SECONDS_BETWEEN_LINES`."""
    total = f" of {len(items)}" if isinstance(items, Sized) else ""
    last = time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            note(f"{desc}: {number}{total}")
            last = time.monotonic()


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers and `datasets`, but not those of downloads from the Hub."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    downloads_shown = not are_progress_bars_disabled()
    bars_shown = logging.is_progress_bar_enabled()
    datasets = sys.modules.get("datasets")  # bars are shown only if it was imported
    datasets_shown = datasets is not None and datasets.are_progress_bars_disabled() is False
    logging.disable_progress_bar()  # and those of downloads
    if downloads_shown:
        enable_progress_bars()
    if datasets is not None and datasets_shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if bars_shown:
            logging.enable_progress_bar()  # and those of downloads
        if not downloads_shown:
            disable_progress_bars()
        if datasets is not None and datasets_shown:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def without_standard_error() -> Iterator[None]:
    """
    Hide everything that is written to standard error, including bars that no setting disables, such as those of GGUF
    files. Exceptions are raised as usual.
    """
    with without_bars(), contextlib.redirect_stderr(io.StringIO()):
        yield
