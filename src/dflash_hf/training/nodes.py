"""
Work that one process does for others, on one machine or on several: encoding data, storing features.

The processes of a run wait for each other through the store by which they found each other, not in a collective, whose
time limit (`ddp_timeout`, ten minutes with NCCL) would end the run where the work takes longer.
"""

import itertools
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch


_PATIENCE = timedelta(days=14)  # of milliseconds in 32 bits there are 24 days
_numbers = itertools.count()  # all processes come to the same waits in the same order


def _store(number: int):
    """What the processes of the run write to and read from at one wait."""
    from torch.distributed.distributed_c10d import _get_default_store

    return torch.distributed.PrefixStore(f"dflash_hf/{number}", _get_default_store())


def wait_for_all(args) -> None:
    """Wait until all processes are here, however long that takes."""
    if args.world_size > 1:
        _arrive(_store(next(_numbers)), args.world_size)


def _arrive(store, processes: int) -> None:
    """Wait until `processes` processes have called this with the store of one wait; the last of them lets all go."""
    if store.add("arrived", 1) == processes:
        store.set("all", "here")
    store.wait(["all"], _PATIENCE)


@contextmanager
def one_process_first(args) -> Iterator[None]:
    """
    As `main_process_first`: a block that one process of each node runs before the others do, which find its results.
    If it fails there, the others do not run it.
    """
    if args.world_size == 1:
        yield
        return
    store = _store(next(_numbers))
    runs_first = args.local_process_index <= 0
    # All processes arrive once: the first of a node after its block, the others before theirs.
    if not runs_first:
        _arrive(store, args.world_size)
    yield
    if runs_first:
        _arrive(store, args.world_size)


def writes_to(folder: Path, args) -> bool:
    """
    Whether this process writes a run's files to a folder: the first of all, and, where a node has a disk of its own,
    the first of the node.

    Args:
        folder (`Path`): It exists where the first process runs.
    """
    if args.world_size == 1:
        return True
    store = _store(next(_numbers))
    if args.process_index == 0:
        mark = folder / f".{uuid.uuid4().hex}"
        mark.touch()
        store.set("mark", mark.name)
    store.wait(["mark"], _PATIENCE)
    is_shared = (folder / store.get("mark").decode()).exists()
    wait_for_all(args)
    if args.process_index == 0:
        mark.unlink()
        return True
    return args.local_process_index <= 0 and not is_shared


def smallest_count(count: int, trainer) -> int:
    """The smallest of the counts of all processes."""
    if trainer.args.world_size == 1:
        return count
    counts = trainer.accelerator.gather(torch.tensor([count], device=trainer.args.device))
    return int(counts.min())
