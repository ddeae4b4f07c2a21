"""
The features of a run's own rows (`store_rows`): the target reads each row once, and the run reads its features from
disk as often as it needs them. They are removed at the end.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from dflash_hf.data.encode import RowEncoder
from dflash_hf.training.arguments import ScriptArguments
from dflash_hf.training.features import MANIFEST, StoredFeatures, store_rows
from dflash_hf.training.nodes import smallest_count, wait_for_all
from dflash_hf.training.time_budget import TimeBudget
from dflash_hf.training.trainer import DFlashTrainer


FOLDER = ".features"  # in `output_dir`; not a name that a user would choose, since it is removed
_TRAIN_SHARE = 1 / 3  # of `max_minutes`, for the features of the rows to train on
_HELD_OUT_SHARE = 1 / 20  # for those of held-out rows


def replace_rows_by_features(
    trainer: DFlashTrainer, script: ScriptArguments, encoder: RowEncoder, writes: bool, say
) -> None:
    """
    Replace a trainer's rows by their features. One process stores them on each disk, as it `writes`; the others wait.
    """
    args = trainer.args
    folder = Path(args.output_dir) / FOLDER
    train_rows = _draw_rows_to_store(trainer.train_dataset, script, args)
    eval_rows = trainer.eval_dataset
    if writes:
        is_enough = _storing_limit(script, args, folder.parent, _TRAIN_SHARE)
        store_rows(train_rows, folder / "train", trainer, script, encoder, is_enough)
        # Of held-out rows as many as their share of the time allows; of the user's evaluation data all.
        is_enough = None if script.evaluates else _storing_limit(script, args, folder.parent, _HELD_OUT_SHARE)
        store_rows(eval_rows, folder / "eval", trainer, script, encoder, is_enough)
    wait_for_all(args)
    trainer.train_dataset = _common_rows(StoredFeatures(folder / "train"), trainer)
    if eval_rows is not None:
        trainer.eval_dataset = _common_rows(StoredFeatures(folder / "eval"), trainer)
    say(f"features          of {len(trainer.train_dataset):,} of {len(train_rows):,} rows, as many as time allows")


def _draw_rows_to_store(rows, script: ScriptArguments, args):
    """The rows whose features a run stores, in random order: as many as asked, or as it can read."""
    count = script.store_rows
    stored_before = Path(args.output_dir, FOLDER, "train", MANIFEST).is_file()
    if count == -1 and args.max_steps > 0 and not stored_before:  # else those that are stored come first
        count = args.max_steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed))
    if count > 0:
        order = order[:count]
    return rows.select(order.tolist())


def _common_rows(dataset: StoredFeatures, trainer: DFlashTrainer):
    """The rows that every node has stored: in the same time a slower one stores fewer, of the same order."""
    count = smallest_count(len(dataset), trainer)
    return dataset if count == len(dataset) else torch.utils.data.Subset(dataset, range(count))


def _storing_limit(script: ScriptArguments, args, folder: Path, share: float) -> Callable[[], bool] | None:
    """
    A function that says whether storing features, as many as a run can, has taken its share of the time or half of the
    free disk; `None` if `store_rows` is their number.
    """
    if script.store_rows != -1:
        return None
    start = TimeBudget.clock()
    free_bytes = shutil.disk_usage(folder).free
    seconds = share * 60 * args.max_minutes if args.max_minutes else math.inf

    def is_enough() -> bool:
        """Whether either limit is reached."""
        return TimeBudget.clock() - start > seconds or shutil.disk_usage(folder).free < free_bytes / 2

    return is_enough
