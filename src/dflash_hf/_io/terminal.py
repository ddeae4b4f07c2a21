"""Standard input and output of commands."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field


_MARKS = (("\u27e6", "\u27e7"), ("\u00ab", "\u00bb"))


@dataclass
class Outcome:
    """
    The outcome of a command.

    Args:
        code (`int`): The exit status.
        facts (`dict`): The output of `--json`.
    """

    code: int = 0
    facts: dict = field(default_factory=dict)


def stdin_lines() -> Iterator[str]:
    """
    Standard input line by line, in UTF-8 whatever the locale, with or without a byte order mark.

    Raises:
        `ValueError`: it has another encoding; names the line.
    """
    for number, line in enumerate(getattr(sys.stdin, "buffer", None) or sys.stdin, start=1):
        try:
            yield line if isinstance(line, str) else line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"Line {number} of standard input is not UTF-8; pipe it through `iconv`.") from error


def print_line(line: str, stream) -> None:
    """Print immediately, above progress bars."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        print(line, file=stream)
    else:
        tqdm.write(line, file=stream)
    stream.flush()


def note(line: str) -> None:
    """Print to standard error; standard output is for results, which may be piped."""
    print_line(line, sys.stderr)


class Echo:
    """Prints to standard output immediately."""

    note = staticmethod(note)

    @property
    def stream(self):
        return sys.stdout

    def __call__(self, line: str) -> None:
        print_line(line, self.stream)

    def write(self, text: str) -> None:
        """Print part of a line immediately."""
        self.stream.write(text)
        self.stream.flush()


def wants_color(choice: bool | None, stream) -> bool:
    """`--color` and `--no-color` decide, then `NO_COLOR`, then whether the output is a terminal that is not dumb."""
    if choice is not None:
        return choice
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def marks_around(text: str, stream) -> tuple[str, str]:
    """
    An opening and a closing mark for parts of a text that is printed without colour: a pair that the text does not
    hold, unlike the brackets in code, and that the stream can print.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    for opening, closing in _MARKS:
        printable = (opening + closing).encode(encoding, "replace").decode(encoding) == opening + closing
        if printable and opening not in text and closing not in text:
            return opening, closing
    length = 2
    while "<" * length in text or ">" * length in text:
        length += 1
    return "<" * length, ">" * length


@contextlib.contextmanager
def hold_back_logs() -> Iterator[None]:
    """Hold log lines and warnings back until the block ends, so that they do not interrupt a streamed text."""
    from logging.handlers import MemoryHandler

    root = logging.getLogger()
    library = logging.getLogger("transformers")
    before = {root: root.handlers, library: library.handlers}
    for logger, handlers in before.items():
        if logger is root and not handlers:
            handlers = [logging.StreamHandler()]  # what Python itself would write to
        logger.handlers = [MemoryHandler(10**4, logging.CRITICAL + 1, handler) for handler in handlers]
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, handlers in before.items():
            holding = logger.handlers
            logger.handlers = handlers
            for handler in holding:
                handler.close()  # prints what it holds


def set_verbosity(quiet: bool, verbose: int) -> None:
    """
    Set the verbosity (`-q`, `-v`): of libraries in the environment, from which they read it when imported, and with
    `-v` of this package, whose messages below warnings are not shown without it.
    """
    if not quiet and not verbose:
        return
    level = "debug"
    if quiet:
        level = "error"
    elif verbose == 1:
        level = "info"
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ[name] = level
    if verbose and not quiet:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("dflash_hf").setLevel(level.upper())
    if quiet:
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ[name] = "1"
