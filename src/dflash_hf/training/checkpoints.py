"""Checkpoints that are written atomically, and checked before a run resumes."""

import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

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


def clear_aside(trainer, run_dir: Path) -> None:
    """Remove an incomplete checkpoint of a killed process."""
    if trainer.is_local_process_zero():
        shutil.rmtree(run_dir / UNFINISHED, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()


def finish_checkpoint(trainer, run_dir: Path) -> Path:
    """
    Turn the files that all processes have written into a checkpoint: if a process is killed meanwhile, the previous
    checkpoint remains the last one.
    """
    name, aside = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}", run_dir / UNFINISHED
    trainer.accelerator.wait_for_everyone()

    # 1. The state names the best checkpoint by its future path.
    best = trainer.state.best_global_step
    best_folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best}"
    if best and (best == trainer.state.global_step or best_folder.exists()):
        trainer.state.best_model_checkpoint = str(best_folder)

    # 2. One rename makes it a checkpoint.
    if trainer.args.should_save:
        trainer.state.save_to_json(str(aside / name / _STATE_FILE))
        _rename(aside / name, run_dir / name)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_local_process_zero() and (aside / name).exists():  # on a node with its own disk
        _rename(aside / name, run_dir / name)
    return run_dir / name


def _rename(source: Path, final: Path) -> None:
    seal(source)
    replaced = source.with_name("replaced")
    if final.exists():  # from a run that resumed at an earlier checkpoint
        final.rename(replaced)
    source.rename(final)
    shutil.rmtree(source.parent)
