"""Errors of commands, and the one line that a command prints for any error: the problem, the place and the remedy."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path


MAX_LINE = 300  # characters of an error message
MAX_DETAILS = 1000  # characters of the message of a `DetailedError`
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{6,}")
_SECRET = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
# Parts of the messages by which the errors of all libraries are recognised, whatever their types.
_DISK_IS_FULL = ("no space left on device", "disk quota exceeded", "pytorchstreamwriter failed writing")
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "unable to allocate")
_USE_LESS_MEMORY = (
    "use fewer or shorter rows at a time (--batch-size, --max-length, per_device_train_batch_size=1 with as many more "
    "gradient_accumulation_steps), or bfloat16"
)


class UsageError(ValueError):
    """Invalid arguments: nothing was started."""


class DetailedError(ValueError):
    """An error whose message may be as long as `MAX_DETAILS`, because all of it is needed."""


def one_line(message: object, limit: int = MAX_LINE) -> str:
    """A message on one line of at most `limit` characters, shortened in the middle, with Hub tokens masked."""
    text = _TOKEN.sub("hf_...", " ".join(str(message).split()))
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 5]} ... {text[-tail:]}"


def is_secret(name: str) -> bool:
    """Whether a setting of this name holds a secret, which is not printed."""
    return bool(_SECRET.search(name))


def install_hint(extra: str) -> str:
    """How to install an extra; the command works in any shell. The package is not on PyPI yet."""
    return f"run `pip install '.[{extra}]'` in a checkout of dflash-hf"


@contextlib.contextmanager
def requires_extra(what: str, extra: str) -> Iterator[None]:
    """
    A context manager around the import of a package that an extra installs.

    Args:
        what (`str`): The beginning of the error, such as `"Pictures need matplotlib"`.
        extra (`str`): The extra.

    Raises:
        `ImportError`: the package is not installed; with the command that installs it.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what}: {install_hint(extra)}.") from error


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk is full."""
    return any(sign in str(error).lower() for sign in _DISK_IS_FULL)


def explain(error: BaseException, resume_hint: str = "run the same command again", output: object = None) -> str:
    """
    The line that a command prints for an error.

    Args:
        error (`BaseException`): The error that a command raised.
        resume_hint (`str`): How to resume the command.
        output (*optional*): The file or folder that the command writes, as the user named it.
    """
    text = str(error) or repr(error)
    if is_full(error):
        place = output
        if place is None and isinstance(error, OSError):
            place = error.filename2 or error.filename  # `filename2` is the destination of a copy
        where = f" ({place})" if place else ""
        return one_line(f"the disk is full{where}: free some space, then {resume_hint}")
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _sentence_about_memory(text)):
        return f"out of memory ({_sentence_about_memory(text) or 'no details'}): {_USE_LESS_MEMORY}"
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


def _sentence_about_memory(text: str) -> str:
    """The sentence about memory, which is not the first one in torch's messages; empty if there is none."""
    for sentence in text.split(". "):
        if any(sign in sentence.lower() for sign in _OUT_OF_MEMORY):
            return one_line(sentence, 100)
    return ""
