"""Errors of commands, and every error as one line: the problem, the place and the remedy."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path


MAX_LINE = 300  # characters of an error
MAX_DETAILS = 1000  # characters of a `DetailedError`
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{6,}")
_SECRET = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
# Libraries raise these as errors of many kinds.
_FULL = ("no space left on device", "disk quota exceeded", "pytorchstreamwriter failed writing")
_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "unable to allocate")
_LESS = (
    "use fewer or shorter rows at a time (--batch-size, --max-length, per_device_train_batch_size=1 with as many more "
    "gradient_accumulation_steps), or bfloat16"
)


class UsageError(ValueError):
    """Invalid arguments: nothing was started."""


class DetailedError(ValueError):
    """An error with a longer message than others, since every part of it is needed."""


def one_line(message: object, limit: int = MAX_LINE) -> str:
    """A message on one line of at most `limit` characters, shortened in the middle, and without Hub tokens."""
    text = _TOKEN.sub("hf_...", " ".join(str(message).split()))
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 5]} ... {text[-tail:]}"


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


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk is full."""
    return any(sign in str(error).lower() for sign in _FULL)


def explain(error: BaseException, again: str = "run the same command again", output: object = None) -> str:
    """
    One line about an error.

    Args:
        error (`BaseException`): The error that a command raised.
        again (`str`): How to resume the command.
        output (*optional*): The file or folder that the command writes, as it was named.
    """
    text = str(error) or repr(error)
    if is_full(error):
        place = output
        if place is None and isinstance(error, OSError):
            place = error.filename2 or error.filename  # of a copy, the second is the one that is written
        where = f" ({place})" if place else ""
        return one_line(f"the disk is full{where}: free some space, then {again}")
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _about_memory(text)):
        return f"out of memory ({_about_memory(text) or 'no details'}): {_LESS}"
    if isinstance(error, DetailedError):
        return one_line(text, MAX_DETAILS)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return one_line(f"{error.filename}: {error.strerror}")
    if type(error).__module__.startswith("dflash_hf") or isinstance(error, ValueError | OSError | ImportError):
        return one_line(text)
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "no place"
    message = one_line(f"{type(error).__name__}: {error}", 180).rstrip(".")
    return f"{message} ({place}); --debug shows the traceback; add `dflash env` to a bug report"


def _about_memory(text: str) -> str:
    """The sentence about memory; torch names a line of its own code first."""
    for sentence in text.split(". "):
        if any(sign in sentence.lower() for sign in _MEMORY):
            return one_line(sentence, 100)
    return ""
