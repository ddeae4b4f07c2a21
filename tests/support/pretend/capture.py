"""
Could a CUDA graph replay a part of a program? A graph launches the same kernels again, with the same arguments, at the
same addresses. So two runs, as different as runs of the program are, must be the same operator by operator.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from support.pretend.memory import HOST, device_of, mark_of, next_serial


_SHOWN = 5  # differences between two recordings that are listed
_OBSTACLES = {"waits": "the host waits", "from_host": "a copy from the host"}


class Argument(NamedTuple):
    """
    A tensor that an operator reads or writes.

    Attributes:
        dtype (`torch.dtype`), shape (`tuple[int]`), stride (`tuple[int]`): Its own.
        memory (`str`): Its memory: `made here, no. 3`, the third piece that the recording has seen being made, which a
            graph keeps in memory of its own; or the address of memory from before the recording.
        serial (`int`, *optional*): Of memory from before the recording: an address may be used again, this is not.
        offset (`int`): Elements from the start of the memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    memory: str
    serial: int | None
    offset: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {list(self.shape)} with strides {list(self.stride)} at {self.memory}, offset {self.offset}"


class Operator(NamedTuple):
    """
    An operator that has run.

    Attributes:
        name (`str`): Such as `aten.add.Tensor`.
        tensors (`tuple[Argument]`): Its tensors, results last.
        values (`tuple[str]`): All other arguments, which a graph repeats as they are.
        line (`str`): The line of code that asked for it.
    """

    name: str
    tensors: tuple[Argument, ...]
    values: tuple[str, ...]
    line: str


@dataclass
class Recording:
    """
    The operators of a part of a program that launch a kernel, in order.

    Attributes:
        operators (`list[Operator]`): These.
        obstacles (`list[str]`): What a graph should not hold: waits, and copies from the host. A graph can replay a
            copy from pinned memory, but the host would have to write that memory at the right time.
    """

    operators: list[Operator] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)
    _start: int = field(default_factory=next_serial)  # memory with a larger serial is made here
    _numbers: dict[int, int] = field(default_factory=dict)  # serial -> number, of memory made here

    def add_obstacles(self, kinds: Iterable[str], line: str) -> None:
        """Note what a line does that a graph should not hold: `kinds` are names of attributes of `Counts`."""
        self.obstacles += [f"{_OBSTACLES[kind]} at {line}" for kind in kinds]

    def add_operator(self, name: str, args: tuple, kwargs: dict, outputs: list[torch.Tensor], line: str) -> None:
        """Add an operator that has run."""
        tensors: list[Argument] = []
        values: list[str] = []
        for value in (*args, *kwargs.values()):
            self._add_value(value, tensors, values)
        for output in outputs:
            self._add_value(output, tensors, values)
        self.operators.append(Operator(name, tuple(tensors), tuple(values), line))

    def _add_value(self, value, tensors: list[Argument], values: list[str]) -> None:
        if isinstance(value, torch.Tensor):
            if device_of(value) == HOST and mark_of(value) is None:
                values.append(repr(value))  # of one value, which is an argument of the kernel; or an obstacle
            else:
                tensors.append(self._argument(value))
        elif isinstance(value, list | tuple):
            for item in value:
                self._add_value(item, tensors, values)
        elif not isinstance(value, torch.Generator):
            values.append(repr(value))

    def _argument(self, tensor: torch.Tensor) -> Argument:
        serial = mark_of(tensor).serial
        memory = f"{tensor.untyped_storage().data_ptr():#x}"
        if serial > self._start:
            number = self._numbers.setdefault(serial, 1 + len(self._numbers))
            memory = f"made here, no. {number}"
            serial = None
        return Argument(
            tensor.dtype, tuple(tensor.shape), tensor.stride(), memory, serial, int(tensor.storage_offset())
        )


def obstacles_to_graph(first: Recording, second: Recording) -> list[str]:
    """
    Why no CUDA graph of one run could replay another; empty if it could.

    Args:
        first, second ([`Recording`]): Two runs of the same part of a program, as different as its runs are: two rounds
            in a row, for example.

    Returns:
        `list[str]`: Lines to read, without repetitions: waits and copies from the host, then the first differences.
    """
    reasons = list(dict.fromkeys([*first.obstacles, *second.obstacles]))
    differences = []
    for number, (one_operator, other) in enumerate(zip(first.operators, second.operators)):
        difference = _difference(one_operator, other)
        if difference is not None:
            differences.append(f"operator {number}, {one_operator.name} at {one_operator.line}: {difference}")
    if len(first.operators) != len(second.operators):
        differences.append(f"{len(first.operators)} operators, then {len(second.operators)}")
    hidden = len(differences) - _SHOWN
    return [*reasons, *differences[:_SHOWN], *([f"and {hidden} more differences"] if hidden > 0 else [])]


def _difference(first: Operator, second: Operator) -> str | None:
    """What differs between two operators in the same place of two runs, or `None`."""
    if first.name != second.name:
        return f"then {second.name} at {second.line}"
    if first.values != second.values:
        changed = [f"{before}, then {after}" for before, after in zip(first.values, second.values) if before != after]
        return f"an argument is {'; '.join(changed) or 'missing'}"
    for before, after in zip(first.tensors, second.tensors):
        if before != after:
            return f"{before}; then {after}"
    if len(first.tensors) != len(second.tensors):
        return f"{len(first.tensors)} tensors, then {len(second.tensors)}"
    return None
