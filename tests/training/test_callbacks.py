"""Training by the clock: the learning rate decays over the time, and the rest of it is there after a resume."""

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from support.runs import BLOCK, make_trainer
from transformers import ProgressCallback

from dflash_hf.training import time_budget
from dflash_hf.training.callbacks import OpenEndedProgressCallback, StepCountCallback
from dflash_hf.training.time_budget import TimeBudget, TimeBudgetCallback


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by a second each time it is read."""
    seconds = [0.0]

    def read():
        seconds[0] += 1.0
        return seconds[0]

    monkeypatch.setattr(TimeBudget, "clock", staticmethod(read))
    monkeypatch.setattr(StepCountCallback, "clock", staticmethod(lambda: seconds[0]))
    return seconds


def test_warm_up_then_cosine_to_zero(clock):
    budget = TimeBudget(20.0, warmup=0.1)
    factors = []
    for step in range(22):
        budget.record_step(step)
        factors.append(budget.learning_rate_factor)
    assert factors[:3] == [0.01, 0.5, 1.0]
    assert factors[11] == pytest.approx(0.5) and factors[20] == factors[21] == 0.0
    assert factors[2:] == sorted(factors[2:], reverse=True) and budget.is_over


def run(folder, minutes, **overrides):
    torch.manual_seed(0)
    target = make_target()
    options = {"max_steps": -1, "max_minutes": minutes, "save_strategy": "steps", "save_steps": 2, **overrides}
    return make_trainer(folder, target, counting_rows(6), make_draft(target, block_size=BLOCK), **options)


def test_run_ends_in_time_and_resumes_with_the_rest(clock, tmp_path):
    uninterrupted = run(tmp_path / "whole", 10 / 60)
    uninterrupted.train()
    steps = uninterrupted.state.global_step
    assert 9 <= steps <= 12
    rates = [line["learning_rate"] for line in uninterrupted.state.log_history if "learning_rate" in line]
    assert rates[-1] < 3e-5 and max(rates) > 4e-4
    resumed = run(tmp_path / "again", 10 / 60)
    clock[0] += 1000  # the checkpoint lay there for a while
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert abs(resumed.state.global_step - steps) <= 1


@pytest.mark.parametrize("version", ["0.1.0", "0.2"])
def test_checkpoint_of_an_older_version_resumes(version, clock, tmp_path):
    """They held the attributes of a callable, under names that 0.3 no longer has."""
    uninterrupted = run(tmp_path / "whole", 10 / 60)
    uninterrupted.train()
    path = tmp_path / "whole" / "checkpoint-6" / "scheduler.pt"
    state = torch.load(path, weights_only=True)
    budget_state = state.pop("time_budget")
    attributes = {"seconds": 10.0, "warmup": 0.04, "spent": budget_state["elapsed"], "last": 7.0, "step": 6}
    if version == "0.2":
        attributes["usual"] = budget_state["typical_step"]
    state["lr_lambdas"] = [attributes] * len(state["lr_lambdas"])
    torch.save(state, path)
    resumed = run(tmp_path / "again", 10 / 60)
    resumed.train(resume_from_checkpoint=str(path.parent))
    assert abs(resumed.state.global_step - uninterrupted.state.global_step) <= 1


@pytest.mark.parametrize(("seconds", "steps"), [(20, range(17, 23)), (5, [7])])
def test_resumed_run_follows_its_own_arguments(seconds, steps, clock, tmp_path):
    """Length and warm-up were those of the checkpoint, whatever the resuming command said."""
    run(tmp_path, 10 / 60).train()
    resumed = run(tmp_path / "resumed", seconds / 60, warmup_steps=0.5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert (resumed.time_budget.seconds, resumed.time_budget.warmup) == (seconds, 0.5)
    assert resumed.state.global_step in steps
    rates = {line["step"]: line["learning_rate"] for line in resumed.state.log_history if "learning_rate" in line}
    assert seconds == 5 or max(rates, key=rates.get) in (10, 11)


def test_another_call_of_train_has_its_own_time(clock, tmp_path):
    """It made one step, at a learning rate of almost zero: the time of the first call was over."""
    trainer = run(tmp_path, 10 / 60, save_strategy="no")
    for _ in range(2):
        trainer.train()
        assert 9 <= trainer.state.global_step <= 12
        rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
        assert rates[-1] < 3e-5 and max(rates) > 4e-4
    assert sum(isinstance(callback, TimeBudgetCallback) for callback in trainer.callback_handler.callbacks) == 1


def test_removed_time_limit_no_longer_applies(clock, tmp_path):
    """The next run ended after a step: the time of the first was over."""
    trainer = run(tmp_path, 10 / 60, save_strategy="no")
    trainer.train()
    trainer.args.max_minutes = None
    trainer.args.max_steps = 3
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.progress == 1.0


def test_evaluation_counts_towards_max_minutes(clock, tmp_path):
    target = make_target()
    rows = counting_rows(6)
    options = {"eval_strategy": "steps", "eval_steps": 4}
    trainer = make_trainer(tmp_path, target, rows, None, rows, max_steps=-1, max_minutes=1, **options)
    predict = trainer.prediction_step

    def slow(*args, **kwargs):
        clock[0] += 10
        return predict(*args, **kwargs)

    trainer.prediction_step = slow
    begun = clock[0]
    trainer.train()
    assert 4 <= trainer.state.global_step < 30 and clock[0] - begun < 75


def test_step_that_would_end_too_late_is_not_begun(clock, tmp_path):
    trainer = run(tmp_path, 100 / 60, save_strategy="no")
    compute = trainer.compute_loss

    def slow(*args, **kwargs):
        clock[0] += 29
        return compute(*args, **kwargs)

    trainer.compute_loss = slow
    trainer.train(reserved_seconds=20.0)
    assert trainer.state.global_step == 2 and clock[0] < 80
    assert "loss" in trainer.state.log_history[-2]  # a line even so


def test_all_processes_keep_the_time_of_the_first(clock, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(time_budget, "PartialState", lambda: SimpleNamespace(num_processes=2, device="cpu"))
    monkeypatch.setattr(time_budget, "broadcast", lambda times: torch.tensor([19.5, 1.0, 20.0]).to(times))
    second_process = TimeBudget(1000.0, warmup=0.1)
    second_process.record_step(0)
    assert second_process.is_over and second_process.done == pytest.approx(0.975)


def counted(trainer):
    """What a trainer tells about the number of its steps, and its warnings."""
    messages = []
    warnings = []
    trainer.remove_callback(StepCountCallback)
    trainer.add_callback(StepCountCallback(messages.append, warnings.append))
    trainer.train()
    return messages, warnings


def test_steps_are_counted_after_ten(clock, tmp_path):
    messages, warnings = counted(run(tmp_path, 30 / 60, save_strategy="no"))
    assert len(messages) == len(warnings) == 1
    steps = int(messages[0].split()[2])
    assert 9 <= steps <= 30 and "steps of " in messages[0]
    assert warnings[0].startswith("In fewer than 200 steps a fresh drafter learns almost nothing: give it more time")
    messages, warnings = counted(run(tmp_path, None, max_steps=12, save_strategy="no"))
    assert "about 12 steps" in messages[0] and warnings


def test_slow_steps_name_the_settings(clock, tmp_path):
    """The paper's settings on a CPU, where a step takes half a minute: told after the second."""
    trainer = run(tmp_path, None, max_steps=2, save_strategy="no")
    compute = trainer.compute_loss

    def slow(*args, **kwargs):
        clock[0] += 40
        return compute(*args, **kwargs)

    trainer.compute_loss = slow
    _, (warning,) = counted(trainer)
    assert "per_device_train_batch_size=2, gradient_accumulation_steps=1 (preset cpu: 16, 4 and 1)" in warning


def test_bar_of_a_timed_run_is_open_ended(tmp_path):
    for minutes, kind in ((1, OpenEndedProgressCallback), (None, ProgressCallback)):
        trainer = run(tmp_path, minutes, max_steps=-1 if minutes else 1, disable_tqdm=False)
        (progress_bar,) = [
            callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ProgressCallback)
        ]
        assert type(progress_bar) is kind
