"""
Stored features as a dataset, in place of the target's forward, and a thread that reads them ahead of the step. They
are written by `feature_store.py`, which describes the files; their manifest says from what they were made
(`feature_manifest.py`).
"""

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise, tee
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.utils.rnn import pad_sequence

from dflash_hf._io.files import differences
from dflash_hf.data.hold_out import conversation_key
from dflash_hf.modeling.target_dflash import decoder_layers
from dflash_hf.targets.digests import digest_of_target
from dflash_hf.targets.frozen import TargetOutput
from dflash_hf.training.feature_manifest import FeatureManifest, shard_name


# An open shard is a mapping of memory, of which Linux allows a process 65,530. Five layers of 800 million tokens of
# Qwen3-8B are 30,525 shards. Those that a run stores itself are small: so many of them have 201 million tokens.
_MAX_OPEN_SHARDS = 49_152


@dataclass(frozen=True)
class StoredRow:
    """The features of an example on disk, which are read when its micro-batch runs."""

    file: tuple[str, int]  # path and time of its last change
    start: int  # first token in the file
    end: int  # the token after its last one

    def read(self, name: str) -> torch.Tensor:
        """
        `features` `[S, L*H]`, `states` `[S, H]`, `input_ids` or `loss_mask` `[S]`.

        Raises:
            `ValueError`: the file is not the one that was opened.
        """
        path, changed = self.file
        # The kernel ends a process that reads past the new end of a mapped file. One that was removed stays readable.
        with suppress(FileNotFoundError):
            if os.stat(path).st_mtime_ns != changed:
                raise ValueError(f"{path} has changed since it was opened; store the features again, and resume.")
        return _open_shard(*self.file).get_slice(name)[self.start : self.end]


class StoredFeatures(torch.utils.data.Dataset):
    """
    Stored features as a dataset for `DFlashTrainer`, which needs only the target's embedding and head then (see
    [`drop_layers`]): rows `input_ids` `[S]`, `loss_mask` `[S]` and `stored`, a [`StoredRow`] that reads
    the features when they are needed.

    Args:
        folder (`str` or `Path`): Output of [`store_features`].

    Raises:
        `ValueError`: shards are missing or damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = manifest = FeatureManifest.load(self.folder)
        missing = manifest.missing(self.folder)
        if missing:
            raise ValueError(
                f"{folder} holds {len(manifest.shards) - len(missing)} of {len(manifest.shards)} shards; run the same "
                f"`dflash features` again to finish it ({shard_name(missing[0])} is missing)."
            )
        self.starts = [0, *accumulate(manifest.shards)]
        paths = (self.folder / shard_name(number) for number in range(len(manifest.shards)))
        self.files = [(str(path), path.stat().st_mtime_ns) for path in paths]
        # Copies: a tensor of a shard keeps its mapping, also of shards that are no longer open.
        self.offsets = [_open_shard(*file).get_tensor("offsets").clone() for file in self.files]

    def __len__(self) -> int:
        return self.manifest.examples

    @property
    def lengths(self) -> torch.Tensor:
        """The tokens of each row, `[rows]`."""
        return torch.cat([offsets.diff() for offsets in self.offsets])

    @property
    def conversations(self) -> list[int]:
        """The conversation of each row; of features that were stored without, by its prompt."""
        keys: list[int] = []
        for file, offsets in zip(self.files, self.offsets, strict=True):
            shard = _open_shard(*file)
            if "conversations" in shard.keys():
                keys += shard.get_tensor("conversations").tolist()
                continue
            ids = shard.get_tensor("input_ids").numpy()
            mask = shard.get_tensor("loss_mask").numpy()
            spans = pairwise(offsets.tolist())
            keys += [conversation_key(ids[start:end], mask[start:end]) for start, end in spans]
        return keys

    def __getitem__(self, index: int) -> dict:
        index = range(len(self))[index]
        number = bisect_right(self.starts, index) - 1
        first = index - self.starts[number]
        row = StoredRow(self.files[number], *self.offsets[number][first : first + 2].tolist())
        return {"input_ids": row.read("input_ids"), "loss_mask": row.read("loss_mask"), "stored": row}


@lru_cache(maxsize=_MAX_OPEN_SHARDS)
def _open_shard(path: str, changed: int):
    """A shard, which stays open; `changed`, the time of its last change, so that a new file is opened again."""
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        remedy = "remove it, and run the same `dflash features` again"
        raise ValueError(f"{path} is damaged ({error}); {remedy}.") from error


def read_rows(rows: list[StoredRow], states: bool, pin_memory: bool = False) -> dict[str, torch.Tensor]:
    """
    The `features` `[N, S, L*H]` of rows, padded, and their `states` `[N, S, H]` if `states` is true.

    Args:
        pin_memory (`bool`): Whether to read them into pinned memory, from which copies to an accelerator are
            asynchronous.
    """
    names = ("features", "states") if states else ("features",)
    tensors = {}
    for name in names:
        tensor = pad_sequence([row.read(name) for row in rows], batch_first=True)
        tensors[name] = tensor.pin_memory() if pin_memory else tensor
    return tensors


class FeaturesAhead:
    """
    Reads the features of the next micro-batches in a thread, beside the training step.

    An iterator over the micro-batches of one pass over the data, to each of which it adds itself as `reader`. All
    micro-batches of an optimizer step exist at once, since the loss is divided by the sum of their weights; features,
    which are much larger, are read for the next two of them only.

    A thread rather than the workers of a `DataLoader`: reading is copying from files in memory, for which Python's
    lock is released, while a process would need shared memory for whole micro-batches and copy them twice more.

    Args:
        batches (`Iterator[dict]`): The micro-batches, with `stored`, in the order in which they are trained on.
        states, pin_memory (`bool`): As for [`read_rows`].

    Attributes:
        source (`Iterator[dict]`): The `batches`.
    """

    DEPTH = 2  # micro-batches that are read ahead: one may take longer than a step, if two take less than two

    def __init__(self, batches: Iterator[dict], states: bool, pin_memory: bool):
        self.source = batches
        self._batches, self._upcoming = tee(batches)
        self._read = partial(read_rows, states=states, pin_memory=pin_memory)
        # One thread of torch, as where `DataLoader` pins memory: the cores are for the step.
        self._executor = ThreadPoolExecutor(1, "features", initializer=torch.set_num_threads, initargs=(1,))
        self._pending: deque[tuple[list[StoredRow], Future]] = deque()
        for _ in range(self.DEPTH):
            self._read_next()

    def __iter__(self) -> "FeaturesAhead":
        return self

    def __next__(self) -> dict:
        return {**next(self._batches), "reader": self}

    def _read_next(self) -> None:
        """Begin to read the features of another micro-batch, if there is one."""
        batch = next(self._upcoming, None)
        if batch is not None:
            rows = batch["stored"]
            self._pending.append((rows, self._executor.submit(self._read, rows)))

    def take(self, rows: list[StoredRow]) -> dict[str, torch.Tensor]:
        """
        The features of a micro-batch, see [`read_rows`]; those of micro-batches before it are dropped.

        Raises:
            `RuntimeError`: they have been taken or dropped. An error of reading is raised here, too.
        """
        while self._pending:
            pending_rows, future = self._pending.popleft()
            self._read_next()
            if pending_rows == rows:
                return future.result()
        raise RuntimeError(
            "The features of a micro-batch are read once, in the order of the micro-batches; compute its loss once."
        )

    def close(self) -> None:
        """End the thread, after what it is reading."""
        self._pending.clear()
        self._executor.shutdown(cancel_futures=True)


def stored_output(batch: dict, states: bool) -> TargetOutput:
    """
    The target's output for a batch of stored rows, on the batch's device; with its final hidden states or without. It
    is read from disk, unless the batch has a `reader` that has done so.
    """
    rows = batch["stored"]
    tensors = batch["reader"].take(rows) if "reader" in batch else read_rows(rows, states)
    device = batch["input_ids"].device
    # A copy from pinned memory is awaited by the device alone.
    moved = {name: tensor.to(device, non_blocking=tensor.is_pinned()) for name, tensor in tensors.items()}
    return TargetOutput(moved["features"], moved.get("states"))


def check_stored(dataset: StoredFeatures, states: bool, weights: dict | None = None, **expected) -> None:
    """
    Check that stored features are those of a run.

    Args:
        dataset (`StoredFeatures`): The features.
        states (`bool`): Whether the run's loss needs the final states.
        weights (`dict[str, str]`): Digests of the run's target.
        expected: Other values of a [`FeatureManifest`], as the run has them.

    Raises:
        `ValueError`: names what differs and the remedy.
    """
    mismatches = differences(asdict(dataset.manifest), expected)
    mismatches += [f"weights.{part}" for part in differences(dataset.manifest.weights, weights or {})]
    if mismatches:
        raise ValueError(
            f"{dataset.folder} was stored with {'; '.join(mismatches)}: train with the target, tokenizer, chat "
            "template (chat_template=FILE) and target_layer_ids of the features, or store them again."
        )
    if states and not dataset.manifest.states:
        raise ValueError(
            f"{dataset.folder} was stored without the final states, from which the target's distribution is computed: "
            "store the features again with `dflash features --states`, or train with loss_type=ce or dpace."
        )


def open_features(folders: str | Path | Sequence[str | Path]):
    """[`StoredFeatures`] of a folder, or of several, concatenated."""
    if isinstance(folders, str | Path):
        return StoredFeatures(folders)
    return torch.utils.data.ConcatDataset([StoredFeatures(folder) for folder in folders])


def stored_tokens(folders: str | Path | Sequence[str | Path]) -> list[dict[str, torch.Tensor]]:
    """The ids and loss masks of stored features, a row for each shard."""
    rows = []
    for part in parts_of(open_features(folders)):
        for file in part.files:
            shard = _open_shard(*file)
            rows.append({name: shard.get_tensor(name) for name in ("input_ids", "loss_mask")})
    return rows


def parts_of(dataset) -> list:
    """The parts of a concatenated dataset, or of a subset of it; otherwise the dataset itself."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    return dataset.datasets if isinstance(dataset, torch.utils.data.ConcatDataset) else [dataset]


def drop_layers(target, device: torch.device):
    """
    Keep a target's embedding and head on `device` and free its layers, which are not needed with stored features. The
    digest of its weights stays, to be compared with that of the features.
    """
    target.weights_digest = digest_of_target(target)
    decoder_layers(target).to("meta")
    target.get_input_embeddings().to(device)
    target.get_output_embeddings().to(device)
    target.hf_device_map = {"": device}  # so that Trainer does not move it
    return target
