"""
The features of a run's own rows (`store_rows`): the target reads each row once, and the run reads its features from
disk as often as it needs them. They are removed at the end.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from dflash_hf._io.names import dtype_name
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.examples import DFlashCollator
from dflash_hf.training.arguments import ScriptArguments
from dflash_hf.training.feature_manifest import MANIFEST, manifest_of
from dflash_hf.training.feature_store import store_features
from dflash_hf.training.features import StoredFeatures
from dflash_hf.training.nodes import one_process_first, smallest_count
from dflash_hf.training.time_budget import TimeBudget
from dflash_hf.training.trainer import DFlashTrainer


FOLDER = ".features"  # in `output_dir`; not a name that a user would choose, since it is removed
_STORING_SHARE = 1 / 3  # of `max_minutes`, to store the features of the rows to train on
_HELD_OUT_STORING_SHARE = 1 / 20  # of `max_minutes`, to store those of the held-out rows
_SHARD_TOKENS = 4096  # small, so that the time limit is checked often


def replace_rows_by_features(
    trainer: DFlashTrainer, script: ScriptArguments, encoder: RowEncoder, writes: bool, say
) -> None:
    """
    Replace a trainer's rows by their features. On each disk, the process for which `writes` is true stores them, and
    the others wait.
    """
    args = trainer.args
    folder = Path(args.output_dir) / FOLDER
    total = len(trainer.train_dataset)
    train_rows = _draw_rows_to_store(trainer.train_dataset, script, args)
    eval_rows = trainer.eval_dataset
    with one_process_first(args, writes):
        if writes:
            should_stop = _storing_limit(script, args, folder.parent, _STORING_SHARE)
            store_rows(train_rows, folder / "train", trainer, script, encoder, should_stop)
            # As many held-out rows as their share of the time allows, but all of the user's evaluation data.
            should_stop = None
            if not script.has_eval_data:
                should_stop = _storing_limit(script, args, folder.parent, _HELD_OUT_STORING_SHARE)
            store_rows(eval_rows, folder / "eval", trainer, script, encoder, should_stop)
    trainer.train_dataset = _common_rows(StoredFeatures(folder / "train"), trainer)
    if eval_rows is not None:
        trainer.eval_dataset = _common_rows(StoredFeatures(folder / "eval"), trainer)
    say(f"features          stored for {len(trainer.train_dataset):,} of {total:,} rows")


def _draw_rows_to_store(rows, script: ScriptArguments, args):
    """
    The rows whose features a run stores, in random order: as many as the recipe says, or as many as its steps read. A
    run with stored features draws from all rows, so that it finds those that are stored.
    """
    count = script.store_rows
    stored_before = Path(args.output_dir, FOLDER, "train", MANIFEST).is_file()
    if count == -1 and args.max_steps > 0 and not stored_before:
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
    A function that says whether storing the features of as many rows as a run can read has taken its share of the time
    or half of the free disk; `None` if `store_rows` is the number of rows.
    """
    if script.store_rows != -1:
        return None
    start = TimeBudget.clock()
    free_bytes = shutil.disk_usage(folder).free
    seconds = share * 60 * args.max_minutes if args.max_minutes else math.inf

    def should_stop() -> bool:
        """Whether either limit is reached."""
        return TimeBudget.clock() - start > seconds or shutil.disk_usage(folder).free < free_bytes / 2

    return should_stop


def store_rows(rows, folder: Path, trainer, script, encoder, should_stop: Callable[[], bool] | None = None) -> None:
    """Store the features of a trainer's rows, if there are any; `should_stop`: see [`store_features`]."""
    if rows is None:
        return
    target = trainer.target
    layer_ids = trainer.draft.config.target_layer_ids
    dtype = dtype_name(target.dtype)
    manifest = manifest_of(target, script.target, layer_ids, encoder, dtype, states=trainer.args.has_teacher)
    collator = DFlashCollator(0, encoder.template.reader)
    shard_bytes = _SHARD_TOKENS * manifest.token_bytes
    store_features(target, rows, folder, manifest, shard_bytes=shard_bytes, should_stop=should_stop, collator=collator)
