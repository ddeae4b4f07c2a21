"""Every error as one line: the problem, the place and the remedy."""

import errno
import traceback
from collections.abc import Iterator
from pathlib import Path

from dflash_hf.terminal import LONGEST_DETAILS, DetailedError, one_line


_FULL = ("No space left on device", "os error 28", "Disk quota exceeded", "PytorchStreamWriter failed writing")
_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "Unable to allocate")
_LESS = "use fewer or shorter rows at a time (--batch-size, --max-length, per_device_train_batch_size=1), or bfloat16"


def explain(error: BaseException, again: str = "run the same command again") -> str:
    """
    One line about an error.

    Args:
        error (`BaseException`): The error that a command raised.
        again (`str`): How to resume the command.
    """
    chain = list(_causes(error))
    texts = [str(one) for one in chain]
    if any(getattr(one, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for one in chain) or _holds(texts, _FULL):
        where = next((one.filename for one in chain if isinstance(one, OSError) and one.filename), None)
        return one_line(f"the disk is full{f' ({where})' if where else ''}: free some space, then {again}")
    if any(isinstance(one, MemoryError) or type(one).__name__ == "OutOfMemoryError" for one in chain) or (
        isinstance(error, RuntimeError) and _holds(texts, _MEMORY)
    ):
        return one_line(f"out of memory ({_about_memory(texts) or 'no details'}): {_LESS}")
    if isinstance(error, RecursionError):
        return f"the input is nested too deeply to be read ({_place(error)}); it is damaged or malicious"
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not UTF-8 (byte {error.start}, {_place(error)}); convert it, for example with iconv"
    if isinstance(error, DetailedError):
        return one_line(error, LONGEST_DETAILS)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return one_line(f"{error.filename}: {error.strerror}")
    ours = type(error).__module__.startswith("dflash_hf")
    if ours or isinstance(error, ValueError | OSError | ImportError):
        return one_line(str(error) or repr(error))
    kind = type(error).__name__
    message = one_line(f"{kind}: {error}", 180).rstrip(".")
    return f"{message} ({_place(error)}); --debug shows the traceback; add `dflash env` to a bug report"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _holds(texts: list[str], signs: tuple[str, ...]) -> bool:
    return any(sign.lower() in text.lower() for text in texts for sign in signs)


def _about_memory(texts: list[str]) -> str:
    """The sentence about memory; torch names a line of its own code first."""
    sentences = [sentence for text in texts for sentence in text.split(". ")]
    return one_line(next((one for one in sentences if _holds([one], _MEMORY)), ""), 100)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "no place"
