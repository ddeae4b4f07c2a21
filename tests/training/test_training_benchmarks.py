"""The benchmarks of training run, at shapes that take a moment."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch


FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_of_a_gpu_runs_without_one(monkeypatch, capsys):
    script = load("training_gpu")
    shape = "--tiny --length 96 --anchors 16 --steps 2 --loss dpace"
    monkeypatch.setattr(sys, "argv", ["training_gpu.py", *shape.split()])
    script.main()
    output = capsys.readouterr().out
    result = json.loads(output[output.index('{\n "device"') :])
    assert result["tokens_per_second"] == pytest.approx(96 / result["seconds_per_step"])
    # By hand: 6 of 8 layers of 256 x (256 + 2 * 64 + 256) + 3 * 256 * 768 weights, attention to half of the tokens.
    layer = 256 * (256 + 2 * 64 + 256) + 3 * 256 * 768
    target = 2 * 6 * layer * 96 + 6 * 4 * 256 * 96 * 97 / 2
    assert result["tflop_per_step"]["target"] * 1e12 == pytest.approx(target)
    assert 4e-3 < result["peak_memory_gb"] < 0.2


def test_what_a_signal_foresees():
    script, random = load("confidence"), torch.Generator().manual_seed(0)
    taken = (torch.rand(400, generator=random) < 0.5).float()
    noise = torch.randn(400, 1, generator=random)
    right = torch.cat([noise, 8 * taken[:, None] - 4], dim=1)
    assert script.foreseen(right, taken) < 0.05 < 0.65 < script.foreseen(noise, taken) < 0.75


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the kernel's figures")
def test_both_losses_of_the_step_benchmark_agree():
    script = load("training_step")
    shape = {"anchors": 6, "block": 4, "length": 32, "hidden": 128, "vocab": 300, "dtype": "float32"}
    losses = [script.measure_memory(shape, kind)["loss"] for kind in script.LOSSES]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    timed = script.measure_time(shape, pairs=1)  # compares losses and gradients before it starts
    assert timed["processor"]["ratio_median"] > 0


@pytest.mark.parametrize("draft", [[], ["--draft", "none"]], ids=["fresh", "selector"])
def test_the_ablation_knows_which_variants_belong_together(draft, tmp_path, monkeypatch, capsys):
    """A variant of the other kind was a KeyError; "rate 5e-4" is in both, and one took the other's run for its own."""
    script = load("ablation")
    monkeypatch.setattr(script, "__file__", str(tmp_path / "ablation.py"))
    monkeypatch.setattr(script, "Pace", type("Pace", (), {}))
    monkeypatch.setattr(script.torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(script, "measure", lambda name, seed, arguments: {"name": name, "seed": seed, "seconds": 1.0})
    monkeypatch.setattr(script, "table", lambda runs: " ".join(run["name"] for run in runs))
    command = ["ablation.py", "--features", "F", "--eval-features", "G", "--seconds", "1", *draft, "--only"]
    monkeypatch.setattr(sys, "argv", [*command, "rate 5e-4"])
    script.main()
    assert (tmp_path / "results" / ("selector" if draft else "ablation") / "ablation.md").read_text() == "rate 5e-4"
    monkeypatch.setattr(sys, "argv", [*command, "base" if draft else "rank 32"])
    with pytest.raises(SystemExit):
        script.main()
    assert f"is not a variant {'with' if draft else 'without'} --draft" in capsys.readouterr().err
