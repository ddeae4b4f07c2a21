"""How much memory is free on the device of a model."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import torch


class _ControlGroup(NamedTuple):
    """Linux's files on the memory of a container, and the key in `stat` of the caches that it can reclaim."""

    limit: Path
    used: Path
    stat: Path
    reclaimable: str


_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_CONTROL_GROUPS = (
    _ControlGroup(_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat", "inactive_file"),
    _ControlGroup(
        _V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", _V1 / "memory.stat", "total_inactive_file"
    ),
)


def free_memory(device: torch.device) -> int:
    """
    Free bytes of a device; for main memory, at most what a container's limit leaves. No other device is touched:
    creating a CUDA context takes half a GB of a GPU, even of one that others use.
    """
    if device.type in ("cpu", "mps"):  # Metal uses main memory
        return _free_main_memory()
    return getattr(torch, device.type).mem_get_info(device)[0]


def _free_main_memory() -> int:
    import psutil

    free = psutil.virtual_memory().available  # of the machine, also in a container
    for group in _CONTROL_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or its limit is "max"
            limit = int(group.limit.read_text())
            used = int(group.used.read_text()) - _reclaimable_bytes(group)
            free = min(free, max(0, limit - used))
    return free


def _reclaimable_bytes(group: _ControlGroup) -> int:
    """Bytes of files that the container has read and Linux reclaims first, such as mapped weights; 0 if not known."""
    with contextlib.suppress(OSError):
        for line in group.stat.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == group.reclaimable:
                return int(value)
    return 0
