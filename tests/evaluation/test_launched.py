"""`dflash eval` in two processes, killed in the middle and started again."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.pairs import make_draft
from support.tiny_chat import CHATML, make_tokenizer, saved_with


pytestmark = pytest.mark.slow

CONFIGURATION = Path(__file__).parents[2] / "examples" / "accelerate" / "ddp.yaml"
PROMPTS = 6
RUNS = 20  # so many that a kill comes before the end


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = saved_with(make_tokenizer(CHATML), folder / "target")
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(folder / "draft")
    (folder / "prompts.txt").write_text("".join(f"Say {i}\n" for i in range(PROMPTS)), encoding="utf-8")
    return folder


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def command_of(pair, output):
    arguments = ["eval", "--target", pair / "target", "--draft", pair / "draft", "--data", pair / "prompts.txt"]
    arguments += ["--runs", RUNS, "--max-new-tokens", 8, "--no-packed", "--device", "cpu", "--dtype", "float32"]
    return ["-m", "dflash_hf.cli", *map(str, [*arguments, "--output", output, "--json"])]


def start(command, **variables):
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **variables}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], env=env, **streams)


def lines_of(output):
    return {path.name: len(path.read_bytes().splitlines()) for path in output.glob("eval_progress*.jsonl")}


def test_killed_processes_go_on_together(pair, tmp_path):
    output = tmp_path / "report"
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = [start(command_of(pair, output), RANK=str(rank), **variables) for rank in range(2)]
    deadline = time.monotonic() + 300
    while min(lines_of(output).values(), default=0) < 3 or len(lines_of(output)) < 2:
        assert time.monotonic() < deadline and processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.02)
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()
    before = lines_of(output)
    assert len(before) == 2 and sum(before.values()) < PROMPTS * RUNS
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGURATION), "--mixed_precision", "no"]
    launcher += ["--num_processes", "2", "--main_process_port", free_port()]
    process = start([*launcher, *command_of(pair, output)])
    printed, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    facts = json.loads(printed)  # of the main process alone
    report = json.loads((output / "eval_report.json").read_text(encoding="utf-8"))
    assert facts["responses"] == report["responses"] and len(report["responses"]) == PROMPTS
    assert report["setting"]["processes"] == 2 and report["summary"]["lossless"]
    assert [len(method["runs"]) for method in report["methods"].values()] == [RUNS] * len(report["methods"])
    assert not lines_of(output)
    start(command_of(pair, tmp_path / "alone")).communicate(timeout=600)
    alone = json.loads((tmp_path / "alone" / "eval_report.json").read_text(encoding="utf-8"))
    for name in ("responses", "acceptance_lengths", "prompt_lengths"):
        assert report[name] == alone[name], name
    assert report["setting"] == {**alone["setting"], "processes": 2}
