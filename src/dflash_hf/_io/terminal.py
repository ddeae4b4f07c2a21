"""What the commands share: argument types, one-line messages, output."""

import argparse
import codecs
import contextlib
import io
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_hf._io.names import SHORT_DTYPES


LONGEST_LINE = 300  # characters of an error
LONGEST_DETAILS = 1000  # of a `DetailedError`
SECONDS_BETWEEN_LINES = 30.0  # of progress, where no bar is shown
_MARKS = (("\u27e6", "\u27e7"), ("\u00ab", "\u00bb"))
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{6,}")
_SECRET = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)


class UsageError(ValueError):
    """Invalid arguments: nothing was started."""


class DetailedError(ValueError):
    """An error with a longer message than others, since every part of it is needed."""


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


# ------------------------------------------------------------------------------------------------------------ messages


def one_line(message: object, limit: int = LONGEST_LINE) -> str:
    """A message on one line of at most `limit` characters, shortened in the middle, and without Hub tokens."""
    text = _TOKEN.sub("hf_...", " ".join(str(message).split()))
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 5]} ... {text[-tail:]}"


def json_text(value) -> str:
    """A value as JSON. Numbers that are not finite, which JSON does not have, become null; unknown objects text."""
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
    return json.dumps(plain, indent=1, allow_nan=False)


def is_secret(name: str) -> bool:
    """Whether a setting of this name is a secret."""
    return bool(_SECRET.search(name))


def install(extra: str) -> str:
    """How to install an extra, for any shell; the package is not on PyPI yet."""
    return f"run `pip install '.[{extra}]'` in a checkout of dflash-hf"


@contextlib.contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """
    Around the import of a package of an extra.

    Raises:
        `ImportError`: it is not installed; `what` says who needs it.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what}: {install(extra)}.") from error


# ------------------------------------------------------------------------------------------------- values, for `type=`


@dataclass(frozen=True)
class Number:
    """
    Reads a number from the command line.

    Args:
        kind (`type`): `int` or `float`.
        fits (`Callable`): Whether a number is valid.
        must (`str`): What the error says of other numbers.
    """

    kind: type
    fits: Callable[[float], bool]
    must: str

    @property
    def metavar(self) -> str:
        """What help calls the number."""
        return "N" if self.kind is int else "X"

    def __call__(self, text: str) -> Any:
        try:
            value = self.kind(text)
        except ValueError as error:
            whole = "whole " if self.kind is int else ""
            raise argparse.ArgumentTypeError(f"invalid value {text!r}; give a {whole}number") from error
        if not self.fits(value):
            raise argparse.ArgumentTypeError(f"{text} {self.must}")
        return value


_TEMPERATURE_RULE = "must be 0, for greedy decoding, or a positive number such as 0.7"
positive = Number(int, lambda value: value >= 1, "must be at least 1")
count = Number(int, lambda value: value >= 0, "must not be negative")
layer_id = Number(int, lambda value: value >= -1, "is not a layer: they count from 0, and -1 is the embedding")
seed = Number(int, lambda value: 0 <= value < 2**32, f"is not a valid seed: 0 to {2**32 - 1}")
token_id = Number(int, lambda value: value >= 0, "is not a token id: ids start at 0")
port = Number(int, lambda value: 0 <= value < 65536, "is not a port: 0 to 65535")
temperature = Number(float, lambda value: 0 <= value < math.inf, _TEMPERATURE_RULE)
probability = Number(float, lambda value: 0 < value <= 1, "must be above 0 and at most 1")
amount = Number(float, lambda value: 0 < value < math.inf, "must be a positive number")


def dtype(text: str) -> str:
    """The full name of a dtype; the option's choices are checked by it."""
    return SHORT_DTYPES.get(text, text)


def device(text: str) -> str:
    """The name of a device; [`~dflash_hf.pairs.loading.device_of`], which imports torch, checks that it exists."""
    if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu|npu|hpu)(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; use cpu, cuda, cuda:1, mps, ... or auto")
    return text


def readable_file(text: str) -> Path:
    """An existing, readable file."""
    path = Path(text).expanduser()
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error.strerror}") from error


def output_path(text: str) -> Path:
    """A file or folder that can be written: checked now, not after hours of work."""
    path = Path(text).expanduser()
    try:
        check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror or error}") from error
    return path


def output_lines(text: str) -> Path:
    """A writable JSON Lines file, which need not exist yet; `--data` recognises files by their endings."""
    path = output_path(text)
    if path.is_dir() or path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        raise argparse.ArgumentTypeError(f"{text} must be a file that ends in .jsonl, by which --data recognises it")
    return path


def output_folder(text: str) -> Path:
    """A writable folder, which need not exist yet."""
    path = output_path(text)
    if path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is a file; name a folder")
    return path


# What help calls a value, by its type.
METAVARS: dict[object, str] = {
    readable_file: "FILE",
    output_path: "FILE",
    output_lines: "FILE",
    output_folder: "FOLDER",
}


def check_writable(path: Path) -> None:
    """
    Try to write where `path` is or would be created, leaving nothing behind.

    Raises:
        `OSError`: it cannot be written.
    """
    if path.is_file():
        with path.open("ab"):
            return
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass


def template_arguments(text: str | None) -> dict | None:
    """
    The value of `--template-args`.

    Raises:
        `UsageError`: it is not a JSON object.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        value = error
    if not isinstance(value, dict):
        remedy = "write it in quotes, such as '{\"enable_thinking\": false}'"
        raise UsageError(f"--template-args {text} is not a JSON object; {remedy}.")
    return value


# ----------------------------------------------------------------------------------------------------------- the input


def read_text(path: Path) -> str:
    """
    A text file in UTF-8, with or without a byte order mark.

    Raises:
        `ValueError`: it has another encoding; names file and line.
    """
    content = Path(path).read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(path, content.count(b"\n", 0, error.start) + 1)) from error


def not_utf8(path, line: int) -> str:
    """The error for a file in another encoding."""
    with open(path, "rb") as file:
        encoding = "UTF-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "LATIN1"
    return f"Line {line} of {path} is not UTF-8; convert the file: iconv -f {encoding} -t UTF-8 {path} > converted"


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


# ---------------------------------------------------------------------------------------------------------- the output


def print_line(line: str, stream) -> None:
    """Print immediately, above the progress bars that may be on the screen."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        print(line, file=stream)
    else:
        tqdm.write(line, file=stream)
    stream.flush()


def note(line: str) -> None:
    """Print to standard error, so that only results are piped."""
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
        """Print a piece of a line immediately."""
        self.stream.write(text)
        self.stream.flush()


def wants_color(choice: bool | None, stream) -> bool:
    """`--color` and `--no-color` decide, then `NO_COLOR`, then whether the output is a terminal that is not dumb."""
    if choice is not None:
        return choice
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def marks_around(text: str, stream) -> tuple[str, str]:
    """
    An opening and a closing mark for parts of a text without colour: a pair that the text does not hold, and that the
    stream can print. Code is full of brackets.
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
def after_the_text() -> Iterator[None]:
    """Holds the log and warnings back, which would be in the middle of a streamed text, until that is complete."""
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


def bar(desc: str) -> Callable[[Iterable], Iterable]:
    """
    Progress around some items: on a terminal a bar, which disappears when they are done; elsewhere a line now and
    then, since a bar in a file is one endless line.
    """
    from tqdm import tqdm

    def around(items: Iterable) -> Iterable:
        if os.environ.get("TQDM_DISABLE"):  # --quiet; tqdm itself reads it when it is imported
            return items
        if sys.stderr.isatty():
            return tqdm(items, desc=desc, leave=False)
        return _with_lines(items, desc)

    return around


def _with_lines(items: Iterable, desc: str) -> Iterator:
    """Yields items, and notes how many are done every `SECONDS_BETWEEN_LINES`."""
    total = f" of {len(items)}" if isinstance(items, Sized) else ""
    last = time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            note(f"{desc}: {number}{total}")
            last = time.monotonic()


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars of transformers and `datasets` meanwhile; downloads from the Hub keep theirs."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    downloads_shown = not are_progress_bars_disabled()
    bars_shown = logging.is_progress_bar_enabled()
    datasets = sys.modules.get("datasets")  # whoever shows its bars has imported it
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
            logging.enable_progress_bar()
        if datasets is not None and datasets_shown:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def without_standard_error() -> Iterator[None]:
    """
    Nothing on standard error meanwhile, for bars that heed no setting, as those of GGUF files; also as
    [`without_bars`]. Errors are raised as always.
    """
    with without_bars(), contextlib.redirect_stderr(io.StringIO()):
        yield


def set_verbosity(quiet: bool, verbose: int) -> None:
    """`-q` and `-v`: the verbosity of libraries, which read it from the environment when imported."""
    if not quiet and not verbose:
        return
    level = "debug"
    if quiet:
        level = "error"
    elif verbose == 1:
        level = "info"
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ[name] = level
    if quiet:
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ[name] = "1"
