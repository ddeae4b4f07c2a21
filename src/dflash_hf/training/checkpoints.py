"""Checkpoints: complete, or recognised as unfinished, so that a run resumes from the last complete one."""

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME, logging

from dflash_hf._io.files import read_json
from dflash_hf.modeling.configuration_dflash import part_fields


logger = logging.get_logger(__name__)
# Fields that a checkpoint's weights were trained for; another value would load and silently draft worse.
_FIXED_ON_RESUME = (
    "mask_token_id",
    "block_size",
    "target_layer_ids",
    "layer_types",
    "sliding_window",
    "is_causal",
    "draft_vocab_size",
)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was saved to its end: its state is the last file that is written."""
    try:
        return bool(read_json(checkpoint / TRAINER_STATE_NAME))
    except ValueError:
        return False


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, in order: folders named by their step, and no others, such as `checkpoint-best`."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    steps = {path: path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*")}
    return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))


def last_checkpoint(folder: str | Path) -> Path | None:
    """The last complete checkpoint of a run, if there is one; warns about unfinished ones after it."""
    for checkpoint in reversed(checkpoints_in(Path(folder))):
        if is_complete(checkpoint):
            return checkpoint
        logger.warning(f"{checkpoint} was not saved to its end, and is skipped.")
    return None


def wants_to_resume(resume: str | bool | None) -> bool:
    """Whether a `resume_from_checkpoint` names anything; a recipe and a command line write "false" or "no", too."""
    return bool(resume) and str(resume).lower() not in ("false", "no")


def checkpoint_of(resume: str | bool | None, output_dir: str | Path) -> Path | None:
    """
    The checkpoint to resume from; `True` is the last complete one, `"auto"` the same if there is one.

    Raises:
        `FileNotFoundError`: there is no such folder.
        `ValueError`: the checkpoint is unfinished, or of weights alone, with which a run would start over.
    """
    if not wants_to_resume(resume):
        return None
    finds_last = resume == "auto" or str(resume).lower() == "true"  # "true" of a recipe or a command line
    checkpoint = last_checkpoint(output_dir) if finds_last else Path(str(resume))
    if checkpoint is None and resume == "auto":
        return None
    if checkpoint is None:
        raise ValueError(
            f"resume_from_checkpoint=True, but output_dir='{output_dir}' holds no complete checkpoint; leave it "
            "out to start a new run, or write resume_from_checkpoint=auto, which starts one where there is no "
            "checkpoint."
        )
    if not checkpoint.is_dir():
        raise FileNotFoundError(
            f"resume_from_checkpoint={checkpoint}: there is no such folder; resume_from_checkpoint=auto finds the "
            "last complete checkpoint."
        )
    if not is_complete(checkpoint):
        raise ValueError(
            f"{checkpoint} was not saved to its end ({TRAINER_STATE_NAME} is missing or cut off): resume from an "
            "earlier one; resume_from_checkpoint=auto finds the last complete one."
        )
    has_states = any(checkpoint.glob("optimizer*")) and (checkpoint / "scheduler.pt").exists()
    if not has_states and not any(checkpoint.glob("global_step*")):  # DeepSpeed's
        raise ValueError(
            f"{checkpoint} was saved without optimizer and scheduler (save_only_model=true), which would start over: "
            f"start a new run from its weights, with draft={checkpoint} and another output_dir."
        )
    return checkpoint


def check_same_drafter(checkpoint: Path, draft) -> None:
    """
    Raises:
        `ValueError`: a checkpoint belongs to a drafter with another mask token, block size, features, masks,
            vocabulary, head or convolution.
    """
    if not (checkpoint / "config.json").is_file():  # an adapter, whose drafter the user loads
        return
    draft_config = draft.config
    saved = type(draft_config).from_pretrained(checkpoint)
    for name in (*_FIXED_ON_RESUME, *part_fields()):
        value = getattr(draft_config, name)
        saved_value = getattr(saved, name)
        if value != saved_value:
            raise ValueError(
                f"{name}={value!r} of this drafter is not the {saved_value!r} that {checkpoint} was trained with; "
                f"resume with {saved_value!r}, or start a new run from `from_pretrained`."
            )
    weights = checkpoint / SAFE_WEIGHTS_NAME
    if draft_config.has_own_lm_head and weights.is_file():
        with safe_open(weights, "pt") as tensors:
            same = torch.equal(tensors.get_tensor("d2t"), draft.d2t.cpu())
        if not same:
            raise ValueError(
                f"The {draft_config.draft_vocab_size} tokens that this drafter drafts are not those of {checkpoint}: "
                "resume on the data that they were counted in, or start a new run from `from_pretrained`."
            )


class AtomicTrainer(Trainer):
    """
    A `Trainer` whose checkpoints are complete once `trainer_state.json` is: it is written last, after the files of all
    processes. A run that is killed loses no more than the checkpoint that it was saving.
    """

    latest: Path | None = None  # the checkpoint that the run was resumed from, or saved last

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}").resolve()
        if folder == self.latest:  # saved at this step already: if a second save were killed, it would be lost
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

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        before = [set(group) for group in getattr(self.optimizer, "param_groups", [])]
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
            for keys, group in zip(before, getattr(self.optimizer, "param_groups", []), strict=False):
                missing = keys - group.keys()
                if missing:
                    raise ValueError(f"without {sorted(missing)}")
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{checkpoint} holds the optimizer of other parameters or another one ({error}): resume with its "
                "head_only, peft_config, muon and optim, or start a new run from its weights, with "
                f"draft={checkpoint} and another output_dir."
            ) from error
