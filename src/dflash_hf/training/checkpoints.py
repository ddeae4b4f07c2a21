"""Checkpoints that are whole or not there, and resuming that asks what they were trained for."""

import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from dflash_hf.modeling.checks_dflash import part_keys
from dflash_hf.training.whole import check_whole, last_whole_checkpoint, seal


UNFINISHED = "_unfinished"  # of each run; not uploaded, not a name of a checkpoint
_STATE_FILE = "trainer_state.json"
# What the weights of a checkpoint were trained for; another value would load and silently draft worse.
_FIXED_ON_RESUME = (
    *("mask_token_id", "block_size", "target_layer_ids", "layer_types", "sliding_window", "is_causal"),
    "draft_vocab_size",
)


class SafeCheckpoints:
    """
    The part of `DFlashTrainer` that saves and resumes; mixed in before `Trainer`.

    A checkpoint is written into a folder aside and renamed when all ranks have finished: a process that is killed in
    the middle leaves the one before it as the last one.
    """

    _saves_aside = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """
        As upstream; `True` is the last checkpoint that is whole.

        Raises:
            `ValueError`: there is no checkpoint to resume from, it is damaged, or it belongs to a drafter with another
                mask token, block size, features, masks, vocabulary, head or convolution.
        """
        if resume_from_checkpoint is True:
            folder = Path(self.args.output_dir)
            resume_from_checkpoint = last_whole_checkpoint(folder)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"resume_from_checkpoint=True, but output_dir={self.args.output_dir!r} holds no checkpoint; leave "
                    "it out to start a new run."
                )
        elif resume_from_checkpoint:
            check_whole(resume_from_checkpoint)
        if resume_from_checkpoint:
            self._check_resume(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _check_resume(self, checkpoint: str) -> None:
        if not Path(checkpoint, "config.json").is_file():  # an adapter, whose drafter is loaded by its user
            return
        saved = type(self.draft_config).from_pretrained(checkpoint)
        for name in (*_FIXED_ON_RESUME, *part_keys()):
            ours, theirs = getattr(self.draft_config, name), getattr(saved, name)
            if ours != theirs:
                raise ValueError(
                    f"{name}={ours!r} of this drafter is not the {theirs!r} that {checkpoint} was trained with; "
                    f"resume with {theirs!r}, or start a new run from `from_pretrained`."
                )

    def _get_output_dir(self, trial) -> str:
        run_dir = super()._get_output_dir(trial)
        return str(Path(run_dir, UNFINISHED)) if self._saves_aside else run_dir

    def _save_checkpoint(self, model, trial) -> None:
        run_dir = Path(self._get_output_dir(trial))
        aside = run_dir / UNFINISHED
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

        # 1. Upstream writes everything aside. What a killed process left there goes first.
        if self.is_local_process_zero():
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._saves_aside = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saves_aside = False
        self.accelerator.wait_for_everyone()

        # 2. The state names the best checkpoint by the path that it will have.
        best = self.state.best_global_step
        best_folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best}"
        if best and (best == self.state.global_step or best_folder.exists()):
            self.state.best_model_checkpoint = str(best_folder)

        # 3. One rename makes it a checkpoint.
        if self.args.should_save:
            self.state.save_to_json(str(aside / name / _STATE_FILE))
            _rename(aside / name, run_dir / name)
        self.accelerator.wait_for_everyone()
        if self.is_local_process_zero() and (aside / name).exists():  # a node with a disk of its own
            _rename(aside / name, run_dir / name)

        # 4. Only now is it uploaded, and may an older one go.
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._saves_aside:
            super()._push_from_checkpoint(checkpoint_folder)


def _rename(source: Path, final: Path) -> None:
    seal(source)
    replaced = source.with_name("replaced")
    if final.exists():  # from a run that went on from an earlier checkpoint
        final.rename(replaced)
    source.rename(final)
    shutil.rmtree(source.parent)
