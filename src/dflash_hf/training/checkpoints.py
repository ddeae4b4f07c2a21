"""Checkpoints that are written atomically, and checked before a run resumes."""

import shutil
from pathlib import Path

from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from dflash_hf.modeling.checks_dflash import part_keys
from dflash_hf.training.whole import check_whole, last_whole_checkpoint, seal


UNFINISHED = "_unfinished"  # folder in each run; not uploaded, not a checkpoint's name
_STATE_FILE = "trainer_state.json"
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


def _rename(source: Path, final: Path) -> None:
    seal(source)
    replaced = source.with_name("replaced")
    if final.exists():  # from a run that resumed at an earlier checkpoint
        final.rename(replaced)
    source.rename(final)
    shutil.rmtree(source.parent)


class AtomicTrainer(Trainer):
    """
    A `Trainer` whose checkpoints are complete or absent: if a process is killed meanwhile, the previous checkpoint
    remains the last one.
    """

    _saves_aside = False

    def _save_checkpoint(self, model, trial) -> None:
        # 1. Upstream writes everything to a side folder, empty of what a killed process may have left there.
        run_dir = Path(self._get_output_dir(trial))
        if self.is_local_process_zero():
            shutil.rmtree(run_dir / UNFINISHED, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._saves_aside = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saves_aside = False
        self.accelerator.wait_for_everyone()

        # 2. The state names the best checkpoint by its future path.
        name, aside = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}", run_dir / UNFINISHED
        best = self.state.best_global_step
        best_folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best}"
        if best and (best == self.state.global_step or best_folder.exists()):
            self.state.best_model_checkpoint = str(best_folder)

        # 3. One rename makes it a checkpoint.
        if self.args.should_save:
            self.state.save_to_json(str(aside / name / _STATE_FILE))
            _rename(aside / name, run_dir / name)
        self.accelerator.wait_for_everyone()
        if self.is_local_process_zero() and (aside / name).exists():  # on a node with its own disk
            _rename(aside / name, run_dir / name)

        # 4. Only now is it uploaded, and older checkpoints may be removed.
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))
        if self.args.should_save:
            best_checkpoint, limit = self.state.best_model_checkpoint, self.args.save_total_limit
            rotate_checkpoints(str(run_dir), limit, best_checkpoint, use_mtime=True)

    def _get_output_dir(self, trial) -> str:
        run_dir = super()._get_output_dir(trial)
        return str(Path(run_dir, UNFINISHED)) if self._saves_aside else run_dir

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._saves_aside:
            super()._push_from_checkpoint(checkpoint_folder)
