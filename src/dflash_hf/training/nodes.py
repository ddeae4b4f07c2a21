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

from dflash_hf._io.errors import one_line


_TIMEOUT = timedelta(days=14)  # milliseconds are stored in 32 bits: at most 24 days
_numbers = itertools.count()  # all processes come to the same waits in the same order
_ARRIVALS = "arrived"  # keys of the store of a wait: how many processes are here
_GO = "go"  # set when the wait is over: empty, or the error because of which it ended early


def _store(number: int):
    """The store that the processes of the run share for one wait, the `number`-th of each of them."""
    from torch.distributed.distributed_c10d import _get_default_store

    return torch.distributed.PrefixStore(f"dflash_hf/{number}", _get_default_store())


def wait_for_all(args) -> None:
    """Wait until all processes are here, however long that takes."""
    if args.world_size > 1:
        _arrive(_store(next(_numbers)), args.world_size)


def _arrive(store, processes: int) -> None:
    """
    Wait until `processes` processes have called this with the store of one wait; the last of them lets all go.

    Raises:
        `RuntimeError`: one of them has failed instead, see [`_release_after_failure`].
    """
    if store.add(_ARRIVALS, 1) == processes:
        store.set(_GO, "")
    store.wait([_GO], _TIMEOUT)
    error = store.get(_GO).decode()
    if error:
        raise RuntimeError(f"Another process has failed: {error}")


def _release_after_failure(store, error: BaseException) -> None:
    """Release all waiting processes with an error: the process that they wait for will not arrive."""
    store.set(_GO, one_line(f"{type(error).__name__}: {error}", 300))


@contextmanager
def one_process_first(args, is_first: bool | None = None) -> Iterator[None]:
    """
    As `main_process_first`: a block that one process of each node runs before the others do, which find its results.

    Args:
        args (`DFlashTrainingArguments`): Say which process this is.
        is_first (`bool`, *optional*): Whether this process runs it before the others. Default: on each node one does.

    Raises:
        `RuntimeError`: it failed in a process that runs it first; the others do not run it.
    """
    if args.world_size == 1:
        yield
        return
    if is_first is None:
        is_first = args.local_process_index <= 0
    store = _store(next(_numbers))
    # All processes arrive once: the first ones after their block, the others before theirs.
    if not is_first:
        _arrive(store, args.world_size)
        yield
        return
    try:
        yield
    except BaseException as error:
        _release_after_failure(store, error)
        raise
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
    store.wait(["mark"], _TIMEOUT)
    is_shared = (folder / store.get("mark").decode()).exists()
    wait_for_all(args)
    if args.process_index == 0:
        mark.unlink()
        return True
    return args.local_process_index <= 0 and not is_shared


def check_same_checkpoint(checkpoint: str | None, args) -> None:
    """
    Check that all processes resume at the same step. A node with a disk of its own has only a part of the checkpoints
    that the first process wrote: with `resume_from_checkpoint=auto` it would start a new run beside those that go on,
    until all wait for each other in different collectives.

    Args:
        checkpoint (`str`, *optional*): The checkpoint that this process has found.
        args (`DFlashTrainingArguments`): Say which process this is.

    Raises:
        `ValueError`: another process has found another one, or none; raised in all of them.
    """
    if args.world_size == 1:
        return
    store = _store(next(_numbers))
    names = [f"checkpoint of {number}" for number in range(args.world_size)]
    store.set(names[args.process_index], "none" if checkpoint is None else Path(checkpoint).name)
    store.wait(names, _TIMEOUT)
    first, *others = (store.get(name).decode() for name in names)
    for number, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(
                f"resume_from_checkpoint: process 0 has found {first}, process {number} {other}. If each node has a "
                "disk of its own, copy the first node's last checkpoint into output_dir on the others, and keep the "
                "rng_state files that are there."
            )


def smallest_count(count: int, trainer) -> int:
    """The smallest of the counts of all processes."""
    if trainer.args.world_size == 1:
        return count
    counts = trainer.accelerator.gather(torch.tensor([count], device=trainer.args.device))
    return int(counts.min())
