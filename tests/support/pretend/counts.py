"""What a program asks of an accelerator, counted by the line of code that asks."""

import functools
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch


_ROOT = Path(__file__).resolve().parents[3]
_SITE = Path(torch.__file__).resolve().parents[1]
# Lines of these are passed over: those that call them are meant.
_PASSED_OVER = (Path(torch.__file__).resolve().parent, Path(__file__).resolve().parent)
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()


def calling_line() -> str:
    """
    The line that asks for the current operation: the innermost one that is neither torch's nor this folder's nor the
    standard library's, such as `dflash_hf/decoding/state.py:131` or `transformers/generation/utils.py:396`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = _shown_name(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@functools.cache
def _shown_name(file: str) -> str | None:
    """How a file is named in counts; `None`: its lines are passed over."""
    path = Path(file).resolve()
    if any(path.is_relative_to(folder) for folder in _PASSED_OVER):
        return None
    if path.is_relative_to(_SITE):
        return path.relative_to(_SITE).as_posix()
    if path.is_relative_to(_STANDARD_LIBRARY):
        return None
    for folder in (_ROOT / "src", _ROOT):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.name


@dataclass
class Counts:
    """
    How often each line of code asks for something. A copy that is not asynchronous is also a wait.

    Attributes:
        kernels (`Counter`): Operators that compute or move something on a device; views and empty tensors do not.
        from_host (`Counter`): Copies from the host to a device: of tensors, of Python lists, of indices on the CPU.
        to_host (`Counter`): Copies to the host: of tensors, and of single values (`item`, `tolist`, `bool`, `int`).
        between_devices (`Counter`): Copies from one device to another; the host does not wait for them.
        waits (`Counter`): Times that the host waits until a device is done: for a copy from memory that is not pinned
            or that is not asynchronous, for a value, for a shape that depends on values (`nonzero`, a boolean index).
    """

    kernels: Counter = field(default_factory=Counter)
    from_host: Counter = field(default_factory=Counter)
    to_host: Counter = field(default_factory=Counter)
    between_devices: Counter = field(default_factory=Counter)
    waits: Counter = field(default_factory=Counter)

    def copy(self) -> "Counts":
        return Counts(*(Counter(getattr(self, kind.name)) for kind in fields(self)))

    def since(self, earlier: "Counts") -> "Counts":
        """What has been counted since `earlier`, a copy of these counts, or of another run of the same program."""
        differences = []
        for kind in fields(self):
            difference = Counter(getattr(self, kind.name))
            difference.subtract(getattr(earlier, kind.name))
            differences.append(Counter({line: count for line, count in difference.items() if count}))
        return Counts(*differences)
