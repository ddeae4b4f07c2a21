"""The benchmarks of training run, at shapes that take a moment."""

import json
import sys
from pathlib import Path

import pytest
import training_gpu
import training_step


def test_benchmark_of_a_gpu_runs_without_one(monkeypatch, capsys):
    shape = "--tiny --length 96 --anchors 16 --steps 2 --loss dpace"
    monkeypatch.setattr(sys, "argv", ["training_gpu.py", *shape.split()])
    training_gpu.main()
    output = capsys.readouterr().out
    result = json.loads(output[output.index('{\n "device"') :])
    assert result["tokens_per_second"] == pytest.approx(96 / result["seconds_per_step"])
    # By hand: 6 of 8 layers of 256 x (256 + 2 * 64 + 256) + 3 * 256 * 768 weights, attention to half of the tokens.
    layer = 256 * (256 + 2 * 64 + 256) + 3 * 256 * 768
    target = 2 * 6 * layer * 96 + 6 * 4 * 256 * 96 * 97 / 2
    assert result["tflop_per_step"]["target"] * 1e12 == pytest.approx(target)
    assert 4e-3 < result["peak_memory_gb"] < 0.2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the kernel's figures")
def test_losses_of_the_step_benchmark_agree():
    shape = {"anchors": 6, "block": 4, "length": 32, "hidden": 128, "vocab": 300, "dtype": "float32"}
    losses = [training_step.measure_memory(shape, kind)["loss"] for kind in training_step.LOSSES]
    assert losses == pytest.approx(3 * [losses[0]], rel=1e-5)
    timed = training_step.measure_time(shape, rounds=1)  # compares losses and gradients before it starts
    assert timed["processor"]["ratio_to_recomputed"][0] > 0


def test_features_of_the_step_benchmark_are_waited_for():
    waits = training_step.measure_features(rounds=3, length=8, width=16, seconds=0.01)
    assert waits["bytes"] == 256 and min(waits["in the step"], waits["ahead"]) > 0
