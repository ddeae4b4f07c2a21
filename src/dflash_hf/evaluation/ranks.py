"""The processes of an evaluation, as `accelerate launch` or `torchrun` starts them: each decodes some prompts."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch


Item = TypeVar("Item")
# How long a process waits for the others, whose prompts may have much longer answers.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class Ranks:
    """
    The processes, as seen from one of them. A single process has rank 0 of 1, and does not wait for others.

    Args:
        rank (`int`): Number of this process.
        size (`int`): Number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes the report."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """This process's share: every `size`-th of them, as the reference implementation deals them out."""
        return items[self.rank :: self.size]

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in all of them; waits for them. Values are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def collect(self, values: Sequence[Item], count: int) -> list[Item]:
        """What the processes made of their [`share`] of `count` items, in the order of the items."""
        values_of_ranks = self.gather(values)
        return [values_of_ranks[index % self.size][index // self.size] for index in range(count)]

    def from_main(self, value: Any) -> Any:
        """The main process's value, in all of them; waits for it."""
        if self.size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]


ALONE = Ranks()


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """
    The processes that a launcher has started, or this one alone. They exchange Python objects only, on the host: so
    the group's backend is gloo, also with accelerators.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    torch.distributed.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield Ranks(torch.distributed.get_rank(), size)
    finally:
        torch.distributed.destroy_process_group()
        gc.collect()  # the group's threads must not outlive the interpreter


def device_of_rank(name: str | None) -> str | None:
    """
    The device of this process among several on one machine: the accelerator of its local rank.

    Args:
        name (`str`, *optional*): The device that was chosen for all of them: `None` and a name without a number
            (`"cuda"`) are numbered; `"cpu"`, `"cuda:1"` and `"auto"` stay.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not torch.accelerator.is_available():
        return name
    kind = torch.accelerator.current_accelerator().type
    if name not in (None, kind):
        return name
    return f"{kind}:{os.environ.get('LOCAL_RANK', '0')}"
