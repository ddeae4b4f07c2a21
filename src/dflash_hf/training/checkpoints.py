"""Checkpoints: complete, or recognised as unfinished, so that a run resumes from the last complete one."""

import shutil
from pathlib import Path

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from dflash_hf.files import read_json, write_json
from dflash_hf.modeling.configuration_dflash import part_keys


logger = logging.get_logger(__name__)
FILES = "files.json"  # the sizes of a checkpoint's other files
# Fields that a checkpoint's weights were trained for; another value would load and silently draft worse.
_FIXED_ON_RESUME = (
    *("mask_token_id", "block_size", "target_layer_ids", "layer_types", "sliding_window", "is_causal"),
    "draft_vocab_size",
)


def checkpoint_of(resume: str | bool | None, output_dir: str, draft_config) -> str | None:
    """
    The checkpoint to resume from; `True` is the last complete one.

    Raises:
        `ValueError`: there is no checkpoint to resume from, it is damaged, or it belongs to a drafter with another
            mask token, block size, features, masks, vocabulary, head or convolution.
    """
    if resume is True:
        resume = last_whole_checkpoint(Path(output_dir))
        if resume is None:
            raise ValueError(
                f"resume_from_checkpoint=True, but output_dir={output_dir!r} holds no checkpoint; leave it out to "
                "start a new run."
            )
    elif resume:
        check_whole(resume)
    if resume and Path(resume, "config.json").is_file():  # otherwise an adapter, whose drafter the user loads
        saved = type(draft_config).from_pretrained(resume)
        for name in (*_FIXED_ON_RESUME, *part_keys()):
            ours, theirs = getattr(draft_config, name), getattr(saved, name)
            if ours != theirs:
                raise ValueError(
                    f"{name}={ours!r} of this drafter is not the {theirs!r} that {resume} was trained with; "
                    f"resume with {theirs!r}, or start a new run from `from_pretrained`."
                )
    return resume or None


def check_whole(checkpoint: str | Path) -> None:
    """
    Check that a run can resume from a checkpoint.

    Args:
        checkpoint (`str` or `Path`): A folder `checkpoint-N`.

    Raises:
        `FileNotFoundError`: there is no such folder.
        `ValueError`: a file is missing or has another size; names it, and the previous checkpoint. Or it holds weights
            alone.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise FileNotFoundError(f"resume_from_checkpoint={checkpoint}: there is no such folder.")
    if (damage := _damage(folder)) is not None:
        earlier = next((one for one in checkpoints_of(folder.parent) if _number(one) < _number(folder)), None)
        remedy = f"resume from {earlier} (resume_from_checkpoint={earlier})" if earlier else "start the run over"
        raise ValueError(f"{damage}: {remedy}.")
    has_states = any(folder.glob("optimizer*")) and (folder / "scheduler.pt").exists()
    if not has_states and not any(folder.glob("global_step*")):  # DeepSpeed's
        raise ValueError(
            f"{folder} was saved without optimizer and scheduler (save_only_model=true), which would start over: "
            f"start a new run from its weights, with draft={folder} and another output_dir."
        )


def last_whole_checkpoint(folder: Path) -> str | None:
    """
    The last complete checkpoint of a run; warns about later ones.

    Raises:
        `ValueError`: of several that were saved, none is still complete; names a file. Or the last one holds weights
            alone.
    """
    damage = None
    for checkpoint in _folders(folder):
        if (damage := _damage(checkpoint)) is None:
            check_whole(checkpoint)
            return str(checkpoint)
        logger.warning(f"{damage}: {checkpoint.name} is skipped.")
    if checkpoints_of(folder):
        raise ValueError(
            f"{damage}, and no other checkpoint is complete: start the run over (overwrite_output_dir=true)."
        )
    return None


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints of a run that were saved to their end, latest first."""
    return [one for one in _folders(folder) if _is_finished(one)]


def _folders(folder: Path) -> list[Path]:
    found = [one for one in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if one.is_dir() and _number(one)]
    return sorted(found, key=_number, reverse=True)


def _is_finished(checkpoint: Path) -> bool:
    try:
        return bool(read_json(checkpoint / TRAINER_STATE_NAME))  # its last file
    except ValueError:
        return False


def _damage(folder: Path) -> str | None:
    state, listed = folder / TRAINER_STATE_NAME, folder / FILES
    if not _is_finished(folder):
        return f"{state} is {'cut off or damaged' if state.exists() else 'missing'}"
    try:
        sizes = read_json(listed) if listed.exists() else {}  # another trainer's checkpoint has no list
    except ValueError:
        return f"{listed} is cut off or damaged"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != (size[0] if isinstance(size, list) else size):  # with a digest, in 0.1.0
            return f"{path} is cut off or damaged"
    return None


def _number(folder: Path) -> int:
    tail = folder.name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0


class AtomicTrainer(Trainer):
    """
    A `Trainer` whose checkpoints are complete once `trainer_state.json` is: it is written last, after the files of all
    processes. If a process is killed before, the previous checkpoint remains the last one.
    """

    latest: Path | None = None  # the checkpoint that it was resumed from, or saved last

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}").resolve()
        if folder == self.latest:  # it would be lost if a second save were killed, as of `enable_jit_checkpoint`
            return
        if self.is_local_process_zero():  # of an earlier run, or unfinished
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.latest = folder

    def _save_rng_state(self, output_dir) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # everything else is there before the state
        if self.args.should_save:
            paths = sorted(path for path in Path(output_dir).rglob("*") if path.is_file())
            sizes = {path.relative_to(output_dir).as_posix(): path.stat().st_size for path in paths}
            write_json(Path(output_dir, FILES), sizes)
