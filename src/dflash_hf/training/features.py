"""
Stored features as a dataset, in place of the target's forward. They are written by `feature_store.py`, which describes
the files; their manifest says from what they were made (`feature_manifest.py`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
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


# An open shard is a mapping of memory, of which Linux allows a process 65,530. Those that a run stores itself are
# small: so many of them have 67 million tokens.
_MAX_OPEN_SHARDS = 16_384


@dataclass(frozen=True)
class StoredRow:
    """The features of an example on disk, which are read when its micro-batch runs."""

    file: tuple[str, int]  # path and time of its last change
    start: int  # first token in the file
    end: int  # the token after its last one

    def read(self, name: str) -> torch.Tensor:
        """`features` `[S, L*H]`, `states` `[S, H]`, `input_ids` or `loss_mask` `[S]`."""
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
        self.offsets = [_open_shard(*file).get_tensor("offsets") for file in self.files]

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


def stored_output(batch: dict, states: bool) -> TargetOutput:
    """The target's output for a batch of stored rows, read from disk; with its final hidden states or without."""

    def read(name: str) -> torch.Tensor:
        rows = pad_sequence([row.read(name) for row in batch["stored"]], batch_first=True)  # [N, S, ...]
        return rows.to(batch["input_ids"].device)

    return TargetOutput(read("features"), read("states") if states else None)


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
