"""Checkpoints: whole or not there, found again, and the same losses after them as without the interruption."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.pairs import make_target
from support.rows import counting_rows
from support.runs import history, make_trainer
from transformers import TrainerCallback

from dflash_hf import DFlashDraftModel
from dflash_hf.training.checkpoints import is_complete, last_checkpoint
from dflash_hf.training.train import checkpoint_to_resume


FIELDS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1}  # four steps are one epoch
KEYS = ("loss", "accuracy", "simulated_tau")


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    """A run of six steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = make_trainer(folder, make_target(), counting_rows(8), loss_type="dpace", **FIELDS)
    trainer.train()
    return folder, trainer


@pytest.mark.parametrize("step", [1, 4, 5])
def test_resumed_run_equals_an_uninterrupted_run(step, uninterrupted_run, tmp_path):
    """In the middle of an epoch, at its end, and before the last step; anchors included."""
    folder, uninterrupted = uninterrupted_run
    resumed = make_trainer(tmp_path, make_target(), counting_rows(8), loss_type="dpace", **FIELDS)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    for key in KEYS:
        assert len(history(uninterrupted, key)) == 6
        assert history(resumed, key) == pytest.approx(history(uninterrupted, key), abs=1e-6)
    for expected, parameter in zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(expected, parameter, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("step", "max_steps"), [(6, 6), (3, 2)])
def test_complete_run_is_not_trained_on(step, max_steps, uninterrupted_run, tmp_path):
    """Upstream made a step more, in the middle of an epoch: each time the same command was given again."""
    checkpoint = str(uninterrupted_run[0] / f"checkpoint-{step}")
    resumed = make_trainer(tmp_path, make_target(), counting_rows(8), **{**FIELDS, "max_steps": max_steps})
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.state.global_step == step and not any(tmp_path.iterdir())
    for name, saved in DFlashDraftModel.from_pretrained(checkpoint).state_dict().items():
        assert torch.equal(saved, resumed.draft.state_dict()[name])


@pytest.fixture
def checkpoints_folder(uninterrupted_run, tmp_path):
    """The first two checkpoints of that run, to be spoilt."""
    for step in (1, 2):
        shutil.copytree(uninterrupted_run[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    return tmp_path


UNFINISHED: dict[str, dict] = {
    "empty": {},
    "upstream's mark": {"checkpoint-is-incomplete.txt": "in progress..."},
    "no state": {"model.safetensors": "...", "optimizer.pt": "", "scheduler.pt": ""},
    "half a state": {"model.safetensors": "...", "trainer_state.json": '{"best_global_step": nu'},
    "a state of zeros": {"trainer_state.json": "\0" * 99},
}


@pytest.mark.parametrize("files", UNFINISHED.values(), ids=list(UNFINISHED))
def test_unfinished_checkpoints_are_skipped(files, checkpoints_folder, uninterrupted_run, monkeypatch):
    """`Can't find a valid checkpoint at checkpoint-9`, and the complete one before it was never tried."""
    for step in (8, 9):
        (checkpoints_folder / f"checkpoint-{step}").mkdir()
        for name, text in files.items():
            (checkpoints_folder / f"checkpoint-{step}" / name).write_text(text)
    shutil.copytree(checkpoints_folder / "checkpoint-2", checkpoints_folder / "checkpoint-best")  # the user's
    resumed = make_trainer(checkpoints_folder, make_target(), counting_rows(8), loss_type="dpace", **FIELDS)
    with pytest.raises(ValueError, match="checkpoint-9 was not saved to its end .*=auto finds the last complete one"):
        resumed.train(resume_from_checkpoint=str(checkpoints_folder / "checkpoint-9"))
    warnings = []
    monkeypatch.setattr("dflash_hf.training.checkpoints.logger.warning", warnings.append)
    assert last_checkpoint(checkpoints_folder) == checkpoints_folder / "checkpoint-2"
    assert warnings == [
        f"{checkpoints_folder / f'checkpoint-{step}'} was not saved to its end, and is skipped." for step in (9, 8)
    ]
    resumed.train(resume_from_checkpoint=True)
    assert history(resumed, "loss") == pytest.approx(history(uninterrupted_run[1], "loss"), abs=1e-6)


def test_last_checkpoint_has_the_largest_number(tmp_path):
    """By their names the ninth comes last."""
    for step, state in ((9, '{"global_step": 9}'), (10, '{"global_step": 10}'), (11, "")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_run_killed_in_its_first_save_starts_over(tmp_path):
    """A supervisor that repeats the command would otherwise never get past it."""
    (tmp_path / "checkpoint-1").mkdir()
    for resume in ("auto", None):
        assert checkpoint_to_resume(tmp_path, resume, overwrite=False) is None


def test_weights_alone_are_not_resumed_from(checkpoints_folder):
    """The optimizer and the warm-up started over, with status 0."""
    trainer = make_trainer(
        checkpoints_folder, make_target(), counting_rows(8), save_only_model=True, **{**FIELDS, "max_steps": 3}
    )
    trainer.train(resume_from_checkpoint=True)
    remedy = "save_only_model=true.* draft=.*checkpoint-3 and another output_dir"
    for resume in (True, str(checkpoints_folder / "checkpoint-3")):
        with pytest.raises(ValueError, match=remedy):
            trainer.train(resume_from_checkpoint=resume)
    with pytest.raises(ValueError, match=remedy):
        checkpoint_to_resume(checkpoints_folder, "auto", overwrite=False)


def test_second_save_at_a_step_leaves_the_first(checkpoints_folder):
    """`enable_jit_checkpoint` saves at any step: killed meanwhile, a run lost the checkpoint that it had."""
    trainer = make_trainer(checkpoints_folder, make_target(), counting_rows(8), **{**FIELDS, "max_steps": 3})

    def times(step):
        return {path: path.stat().st_mtime_ns for path in (checkpoints_folder / f"checkpoint-{step}").iterdir()}

    class SavesAgain(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            before = times(state.global_step)
            trainer._save_checkpoint(trainer.model, None)
            assert times(state.global_step) == before

    trainer.add_callback(SavesAgain())
    trainer.train(resume_from_checkpoint=True)
    trainer._save_checkpoint(trainer.model, None)
    assert last_checkpoint(checkpoints_folder) == checkpoints_folder / "checkpoint-3"


# Where a process dies while it saves its second checkpoint, once in a new folder and once in one that is replaced.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from transformers import Trainer, TrainerState
from test_checkpoints import FIELDS, counting_rows, make_target, make_trainer
from dflash_hf import DFlashDraftModel


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(name):
    def killed(owner, attribute, original):
        def cut(*args, **kwargs):
            original(*args, **kwargs)
            (path,) = Path(trainer.args.output_dir, "checkpoint-2").glob(name)
            path.write_bytes(path.read_bytes()[:-9])
            die()
        return cut
    return killed


def at_once(owner, attribute, original):
    return die


def rmtree(folder, **kwargs):
    (Path(folder) / "optimizer.pt").unlink(missing_ok=True)
    die()


points = {
    "removing": (shutil, "rmtree", lambda *_: rmtree),
    "before": (Trainer, "save_model", at_once),
    "weights": (DFlashDraftModel, "save_pretrained", die_in("model.safetensors")),
    "optimizer": (Trainer, "_save_optimizer_and_scheduler", at_once),
    "random": (Trainer, "_save_rng_state", die_in("rng_state.pth")),
    "state": (TrainerState, "save_to_json", at_once),
    "half a state": (TrainerState, "save_to_json", die_in("trainer_state.json")),
}
whole = sys.argv[2:]
for name, replaces in [(name, replaces) for name in points for replaces in (False, True)]:
    owner, attribute, kill = points[name]
    folder = Path(sys.argv[1], f"{name}, replaced" if replaces else name)
    if replaces:
        shutil.copytree(whole[0], folder / "checkpoint-1")
        shutil.copytree(whole[1], folder / "checkpoint-2")
    if os.fork() == 0:
        trainer = make_trainer(folder, make_target(), counting_rows(8), loss_type="dpace", **FIELDS)
        original = getattr(owner, attribute)
        later = kill(owner, attribute, original)
        def choose(*args, **kwargs):
            return (later if trainer.state.global_step == 2 else original)(*args, **kwargs)
        setattr(owner, attribute, choose)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1") if replaces else None)
        os._exit(1)
    _, status = os.wait()
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (name, status)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_during_a_save_leaves_the_last_checkpoint(uninterrupted_run, tmp_path):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    earlier = [str(uninterrupted_run[0] / f"checkpoint-{step}") for step in (1, 2)]
    command = [sys.executable, "-c", KILLED, str(tmp_path), *earlier]
    process = subprocess.run(command, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 14
    for folder in folders:
        assert {path.name for path in folder.iterdir()} <= {"checkpoint-1", "checkpoint-2"}
        assert last_checkpoint(folder) == folder / "checkpoint-1"
        first = load_file(folder / "checkpoint-1" / "model.safetensors")
        for name, tensor in load_file(uninterrupted_run[0] / "checkpoint-1" / "model.safetensors").items():
            assert torch.equal(first[name], tensor)
    for folder in folders[-2:]:
        resumed = make_trainer(folder, make_target(), counting_rows(8), loss_type="dpace", **FIELDS)
        resumed.train(resume_from_checkpoint=True)
        for key in KEYS:
            assert history(resumed, key) == pytest.approx(history(uninterrupted_run[1], key), abs=1e-6)
        assert {path.name for path in folder.iterdir()} == {f"checkpoint-{step}" for step in range(1, 7)}
        assert is_complete(folder / "checkpoint-2")


def test_resume_without_a_checkpoint_names_auto(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        trainer = make_trainer(folder, make_target(), counting_rows(2))
        (tmp_path / "checkpoint-3").mkdir(exist_ok=True)
        message = (
            f"resume_from_checkpoint=True, but output_dir='{folder}' holds no complete .* resume_from_checkpoint=auto"
        )
        for resume in (True, "true"):  # of Python, of a recipe
            with pytest.raises(ValueError, match=message):
                trainer.train(resume_from_checkpoint=resume)
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such folder; resume_from_checkpoint=auto finds"):
        trainer.train(resume_from_checkpoint="nowhere")
