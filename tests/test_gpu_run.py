"""What `.gpu/run` would do on a GPU, in small on this processor; and that no part can end the others."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_pairs import random_pair

from dflash_hf.evaluation.scripted_draft import ScriptedDraft


FOLDER = Path(__file__).resolve().parents[1] / ".gpu"
PARTS = ["machine", "lossless", "tests", "smollm2", "qwen3", "stops", "training"]


@pytest.mark.parametrize("nodes", [None, 15])
def test_oracle_confidence_equals_its_accuracy(nodes):
    """An oracle that was always certain made every tree a chain: trees never looked faster than blocks."""
    target, draft, prompts = random_pair("tiny", torch.float32, "cpu", 1, prompt_length=8)
    oracle = ScriptedDraft.of(draft, [torch.tensor(prompts[0])], certainty=0.7)
    oracle.is_certain_in_blocks = False
    oracle.decoding_config.tree_nodes = nodes
    hidden = torch.randn(1, 8, draft.config.hidden_size)
    hidden[..., : oracle.codes.shape[-1]] = oracle.codes  # the slots of all places of the script
    chances = oracle.draft_logits(hidden, target.get_output_embeddings()).softmax(dim=-1)
    assert chances.argmax(dim=-1).tolist() == prompts
    assert chances.amax(dim=-1).sub(0.7).abs().max() < 0.03


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(sys.platform == "win32", reason="the script is for bash")
def test_dry_run_finds_every_figure(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(FOLDER / "run"), "--dry-run", "--output", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    assert list(dict.fromkeys(row["part"] for row in rows)) == PARTS
    assert not [row for row in rows if row["what"].startswith(("FAILED", "CUT"))]
    assert all(row["same text"] for row in rows if "same text" in row)
    speeds = {row["what"]: row["tokens/s"] for row in rows if row["part"] == "qwen3"}
    methods = {"target alone", "a loop of the published shape", "block of 8", "plain call", "tree of 15", "tree of 63"}
    assert methods <= set(speeds) and all(speed > 0 for speed in speeds.values())
    tables = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert all(f"\n## {part}\n" in tables for part in PARTS)


UNRULY = """
import os
import time


class LeftOut(Exception):
    pass


def answers(device):
    return device != "broken"


def machine(setting):
    setting.add("process", pid=os.getpid())
    raise RuntimeError("a kernel failed")


def lossless(setting):
    setting.add("process", pid=os.getpid())
    os._exit(3)


def tests(setting):
    setting.add("first figure", seconds=1.5)
    time.sleep(600)


def smollm2(setting):
    raise LeftOut("there are no weights")


def qwen3(setting):
    setting.add("target alone", **{"tokens/s": 10.0})
"""
SHORT = """
import sys

import measure


if __name__ == "__main__":
    measure.SECONDS["tests"] = 2
    measure.LEAST_SECONDS = 0
    sys.exit(measure.main())
"""


@pytest.mark.parametrize("device", ["cpu", "broken"])
def test_unruly_parts_do_not_end_the_run(device, tmp_path):
    """One raises, one ends its process, one hangs: each is a line, figures found before are kept, the others run."""
    shutil.copy(FOLDER / "measure.py", tmp_path)
    (tmp_path / "parts.py").write_text(UNRULY, encoding="utf-8")
    (tmp_path / "short.py").write_text(SHORT, encoding="utf-8")
    command = [sys.executable, "short.py", "--output", "out", "--device", device, "--only", *PARTS[:5]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "out")
    ends = {row["part"]: row["what"] for row in rows}
    assert ends["machine"] == ends["lossless"] == "FAILED" and ends["tests"].startswith("CUT")
    assert ends["smollm2"] == "left out: there are no weights" and ends["qwen3"] == "target alone"
    first, second = (row["pid"] for row in rows if "pid" in row)
    assert (first == second) == (device == "cpu")  # a device that no longer answers asks for a new process
    tables = (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    assert "| first figure | 1.5 |" in tables and "a kernel failed" in tables


def test_parts_are_skipped_when_time_is_over(tmp_path):
    shutil.copy(FOLDER / "measure.py", tmp_path)
    (tmp_path / "parts.py").write_text(UNRULY, encoding="utf-8")
    command = [sys.executable, "measure.py", "--output", "out", "--seconds", "5", "--only", "smollm2", "qwen3"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    assert all(row["what"].startswith("left out: ") for row in rows_of(tmp_path / "out"))
