"""Ctrl-C during training: a checkpoint is saved first, and nothing is left behind."""

import os
import signal
import threading

import pytest
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from support.runs import BLOCK, history, make_trainer
from transformers import TrainerCallback

from dflash_hf.training.checkpoints import last_checkpoint
from dflash_hf.training.interruption import checkpoint_on_interrupt


@pytest.fixture(autouse=True)
def default_sigint_handler():
    """A run in the background of a shell ignores Ctrl-C."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


class CtrlC(TrainerCallback):
    """Presses Ctrl-C in the second step, some times."""

    def __init__(self, times: int):
        self.times = times
        self.finished_steps = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)

    def on_step_end(self, args, state, control, **kwargs):
        self.finished_steps += 1


def make_run(folder, callbacks=(), **overrides):
    target = make_target()
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3, "seed": 5, **overrides}
    trainer = make_trainer(folder, target, counting_rows(6), make_draft(target, block_size=BLOCK), **options)
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


@pytest.mark.parametrize(
    ("times", "options", "finished_steps", "checkpoint"),
    [
        (1, {}, 2, "checkpoint-2"),
        (2, {}, 1, None),
        (1, {"save_strategy": "no"}, 1, None),
    ],
    ids=["once", "twice", "a run without checkpoints"],
)
def test_step_and_checkpoint_are_finished(times, options, finished_steps, checkpoint, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    ctrl_c = CtrlC(times)
    trainer = make_run(tmp_path, [ctrl_c], **options)
    lines = []
    with pytest.raises(KeyboardInterrupt), checkpoint_on_interrupt(trainer, lines.append):
        trainer.train()
    assert ctrl_c.finished_steps == finished_steps
    last = last_checkpoint(tmp_path)
    assert (None if last is None else last.name) == checkpoint
    assert lines == [] if options else lines[0].startswith("interrupted: a checkpoint is saved after this step")
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_after_the_last_step_is_not_lost(tmp_path):
    class CtrlCAtTheEnd(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            os.kill(os.getpid(), signal.SIGINT)

    trainer = make_run(tmp_path, [CtrlCAtTheEnd()])
    with pytest.raises(KeyboardInterrupt), checkpoint_on_interrupt(trainer, print):
        trainer.train()
    assert last_checkpoint(tmp_path).name == "checkpoint-4"


def test_interrupted_run_resumes(tmp_path):
    """It ends with the losses of a run that was not interrupted."""
    whole = make_run(tmp_path / "whole")
    whole.train()
    interrupted = make_run(tmp_path / "run", [CtrlC(1)])
    with pytest.raises(KeyboardInterrupt), checkpoint_on_interrupt(interrupted, print):
        interrupted.train()
    resumed = make_run(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    losses = history(whole, "loss")
    assert len(losses) == 4 and history(resumed, "loss") == pytest.approx(losses, abs=1e-6)


def test_ignored_ctrl_c_remains_so(tmp_path):
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer = make_run(tmp_path, [CtrlC(1)])
        with checkpoint_on_interrupt(trainer, print):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            trainer.train()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert trainer.state.global_step == 4


def test_run_in_another_thread_is_trained(tmp_path):
    trainer = make_run(tmp_path)

    def train():
        with checkpoint_on_interrupt(trainer, print):
            trainer.train()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 4
