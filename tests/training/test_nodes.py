"""A run on two nodes: two processes that are each the first of theirs, on one disk or on two."""

import json
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.runs import TINY_RECIPE
from support.tiny_chat import THINKING, save_target

from dflash_hf.training import nodes


pytest.importorskip("yaml")
pytest.importorskip("datasets")
TESTS = Path(__file__).parents[1]
TINY = (*TINY_RECIPE, "save_strategy=no", "draft_vocab_size=null", "max_length=64", "store_rows=12")


def write(path, rows):
    chats = []
    for number in range(rows):
        texts = [f"Say {number}", f"{number}, as you wish."]
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
        chats.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(chats), encoding="utf-8")
    return path


def run_on_two_nodes(folder, outputs, delay=0.0, *settings):
    """What each process did."""
    target = save_target(folder / "target", THINKING)
    data = write(folder / "data.jsonl", 24)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank, output in enumerate(outputs):
        recipe = [f"target={target}", f"data={data}", f"output_dir={output}", *TINY, *settings]
        process_settings = {"recipe": recipe, "delay": delay, "result": str(folder / f"{rank}.json")}
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OMP_NUM_THREADS": "1"}
        env |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
        env |= {"HF_DATASETS_CACHE": str(folder / f"cache{rank}"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(TESTS / "support" / "nodes.py"), json.dumps(process_settings)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=env, **streams))
    outputs_of_ranks = []
    try:
        for process in processes:
            outputs_of_ranks.append(process.communicate(timeout=300)[0])
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs_of_ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("disks", [1, 2])
def test_each_disk_gets_its_features_once(disks, tmp_path):
    """The second node looked for the first's features before they were stored, and the run ended."""
    first, second = run_on_two_nodes(tmp_path, [tmp_path / "a", tmp_path / ("a" if disks == 1 else "b")])
    assert first["stored"] > 0 and second["stored"] == (first["stored"] if disks == 2 else 0)
    assert first["losses"] == second["losses"] and first["rows"] == second["rows"] == 12
    assert first["held_out"] == second["held_out"]
    assert not any((tmp_path / name / ".features").exists() for name in "ab")
    # A thread of the group that woke while the interpreter exited killed its process, or kept it from ending.
    assert not [name for process in (first, second) for name in process["threads"] if "gloo" in name]


@pytest.mark.slow
def test_storing_may_take_longer_than_collectives(tmp_path):
    """The other processes waited in a barrier, which ends after `ddp_timeout` seconds."""
    first, second = run_on_two_nodes(tmp_path, [tmp_path / "a", tmp_path / "a"], 12.0, "ddp_timeout=20")
    assert first["stored"] > 1 and second["stored"] == 0
    assert first["losses"] == second["losses"]


def test_failure_of_the_first_process_ends_others(monkeypatch):
    """They waited for it, for up to 14 days."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(nodes, "_store", lambda number: store)
    monkeypatch.setattr(nodes, "_TIMEOUT", timedelta(seconds=20))
    errors = []

    def run_second_process():
        try:
            with nodes.one_process_first(SimpleNamespace(world_size=2, local_process_index=1)):
                errors.append("it ran the block")
        except RuntimeError as error:
            errors.append(str(error))

    second_process = threading.Thread(target=run_second_process)
    second_process.start()
    first = nodes.one_process_first(SimpleNamespace(world_size=2, local_process_index=0))
    with pytest.raises(ValueError, match="the disk is full"), first:
        raise ValueError("the disk is full")
    second_process.join()
    assert errors == ["Another process has failed: ValueError: the disk is full"]


@pytest.mark.parametrize("found", [("a/checkpoint-20", "b/checkpoint-20"), ("a/checkpoint-20", None), (None, None)])
def test_nodes_resume_from_one_checkpoint(found, monkeypatch):
    """A node without the checkpoint started a new run beside the one that went on, and both hung."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(nodes, "_store", lambda number: store)
    monkeypatch.setattr(nodes, "_TIMEOUT", timedelta(seconds=20))
    errors = ["", ""]

    def check(rank):
        try:
            nodes.check_same_checkpoint(found[rank], SimpleNamespace(world_size=2, process_index=rank))
        except ValueError as error:
            errors[rank] = str(error)

    second_process = threading.Thread(target=check, args=(1,))
    second_process.start()
    check(0)
    second_process.join()
    if found[1] is None and found[0] is not None:
        assert errors[0] == errors[1]
        assert "process 0 has found checkpoint-20, process 1 none" in errors[0]
    else:
        assert errors == ["", ""]
