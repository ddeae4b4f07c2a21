"""How much memory is free, in a container too."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from dflash_hf.decoding.packing import fit_memory
from dflash_hf.targets import memory


GB = 2**30


def set_control_group(monkeypatch, folder, limit: str, used: int, droppable: int) -> None:
    """A machine with 64 GB free, and a container with a limit in bytes."""
    group = memory._ControlGroup(folder / "max", folder / "current", folder / "stat", "inactive_file")
    group.limit.write_text(f"{limit}\n")
    group.used.write_text(f"{used}\n")
    group.stat.write_text(f"anon 5\ninactive_file {droppable}\nactive_file 7\n")
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", (group,))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GB))


@pytest.mark.parametrize(
    ("limit", "used", "droppable", "expected"),
    [
        (str(8 * GB), 3 * GB, 0, 5 * GB),
        (str(8 * GB), 7 * GB, 4 * GB, 5 * GB),  # mapped weights that were read are no use of memory
        (str(2 * GB), 3 * GB, 0, 0),
        (str(999 * GB), 3 * GB, 0, 64 * GB),
        ("max", 3 * GB, 0, 64 * GB),
    ],
)
def test_free_memory_ends_at_the_containers_limit(tmp_path, monkeypatch, limit, used, droppable, expected):
    """Only packing read it: batches and kept conversations were sized by the memory of the whole machine."""
    set_control_group(monkeypatch, tmp_path, limit, used, droppable)
    assert memory.free_memory(torch.device("cpu")) == expected


def test_packing_ends_at_the_containers_limit(tmp_path, monkeypatch):
    layer = SimpleNamespace(weight=SimpleNamespace(nbytes=GB))
    set_control_group(monkeypatch, tmp_path, str(4 * GB), 0, 0)
    assert fit_memory([layer])
    set_control_group(monkeypatch, tmp_path, str(3 * GB), 0, 0)
    assert not fit_memory([layer])


def test_memory_without_control_groups_is_the_machines(tmp_path, monkeypatch):
    set_control_group(monkeypatch, tmp_path, "max", 0, 0)
    for file in tmp_path.iterdir():
        file.unlink()
    assert memory.free_memory(torch.device("cpu")) == 64 * GB
