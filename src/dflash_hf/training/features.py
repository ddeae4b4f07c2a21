"""
Features of a frozen target on disk: safetensors shards next to a manifest that describes their origin.

A shard holds whole examples, one after the other: `features` `[T, L*H]`, `input_ids` `[T]`, `loss_mask` `[T]`,
`offsets` `[examples + 1]`, and optionally `states` `[T, H]`, the final hidden states that the target's head reads, and
`conversations` `[examples]`, a number that the examples of one conversation share. The manifest is written first, with
the examples of every shard; a shard gets its name when it is complete. So a set is complete when all shards are there,
and a run that was interrupted at any time stores those that are missing.
"""

import hashlib
import json
import shutil
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from dflash_hf._io.files import atomic, differences, digest_of, digest_of_file, locked, write_json
from dflash_hf.data.examples import DFlashCollator
from dflash_hf.data.held_out import conversation_key
from dflash_hf.data.prepare import CONVERSATION
from dflash_hf.data.template import digests_of_tokenizer
from dflash_hf.modeling.target_dflash import decoder_layers, num_decoder_layers
from dflash_hf.targets.digests import digest_of_target
from dflash_hf.targets.frozen import TargetOutput, target_forward
from dflash_hf.targets.logits import check_logits
from dflash_hf.training.rows import digest_of_rows, lengths_of


MANIFEST = "manifest.json"
_TOKENS = 4096  # of a shard of a run's own features: after each, a run with little time asks whether it has enough


@dataclass
class FeatureManifest:
    """
    The origin of stored features; sets of equal features have equal manifests.

    Args:
        target (`str`): Name or folder of the target.
        weights (`dict[str, str]`): Digests of the target's `ends` (embedding and head) and `layers`.
        layer_ids (`list[int]`): Layers whose outputs are stored, in this order.
        width (`int`): `L * H`.
        dtype (`str`): Dtype of the stored features.
        template (`str`): Digest of the chat template.
        chat_template_kwargs (`dict`): Its arguments.
        tokenizer (`str`): Digest of the vocabulary.
        max_length (`int`): Tokens at which examples were cut.
        states (`bool`): Whether the final hidden states are stored too.
        data (`str`): Digest of all ids and loss masks.
        shards (`list[int]`): Examples of each shard.
    """

    target: str
    weights: dict[str, str]
    layer_ids: list[int]
    width: int
    dtype: str
    template: str
    chat_template_kwargs: dict
    tokenizer: str
    max_length: int | None
    states: bool = False
    data: str = ""
    shards: list[int] = field(default_factory=list)

    @property
    def examples(self) -> int:
        """Examples of all shards."""
        return sum(self.shards)

    @property
    def token_bytes(self) -> int:
        """Bytes per token on disk."""
        width = self.width + (self.width // len(self.layer_ids) if self.states else 0)
        return width * getattr(torch, self.dtype).itemsize + 8 + 1

    def missing(self, folder: Path) -> list[int]:
        """The numbers of the shards that are not in a folder."""
        return [number for number in range(len(self.shards)) if not (folder / shard_name(number)).is_file()]

    @classmethod
    def load(cls, folder: Path) -> "FeatureManifest":
        """
        Raises:
            `ValueError`: the manifest is missing or damaged.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise ValueError(f"{folder} has no {MANIFEST}: it holds no stored features; run `dflash features` first.")
        try:
            manifest = cls(**json.loads(path.read_text(encoding="utf-8")))
            manifest.shards = [int(examples) for examples in manifest.shards]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged, or of 0.1 ({error}); store the features again.") from error
        return manifest


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"features-{number:05d}.safetensors"


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


def manifest_of(target, name: str, layer_ids: list[int], encoder, dtype: str, states: bool = False) -> FeatureManifest:
    """
    The manifest of the features to store, without data and shards.

    Raises:
        `ValueError`: the target has no such layers, or one is named twice.
    """
    depth = num_decoder_layers(target.config)
    if not -1 <= min(layer_ids) <= max(layer_ids) < depth or len(set(layer_ids)) < len(layer_ids):
        raise ValueError(
            f"target layers {layer_ids} must be distinct and from 0 to {depth - 1}, or -1, the embedding; set "
            "target_layer_ids (--target-layer-ids), or load the drafter that was trained for this target."
        )
    return FeatureManifest(
        target=name,
        weights=digest_of_target(target),
        layer_ids=list(layer_ids),
        width=len(layer_ids) * target.config.get_text_config().hidden_size,
        dtype=dtype,
        **digests_of_tokenizer(encoder.tokenizer),
        chat_template_kwargs=encoder.chat_template_kwargs,
        max_length=encoder.max_length,
        states=states,
    )


def store_features(
    target,
    examples: Sequence[dict],
    folder: str | Path,
    manifest: FeatureManifest,
    batch_size: int = 8,
    shard_bytes: int = 1 << 30,
    say: Callable[[str], None] = lambda line: None,
    enough: Callable[[], bool] | None = None,
    collator: DFlashCollator | None = None,
) -> FeatureManifest:
    """
    Store the features of every token of a dataset, or the shards that an earlier call left out.

    Args:
        target (`PreTrainedModel`): The frozen target.
        examples (`Sequence[dict]`): Rows with `input_ids` and `loss_mask`.
        folder (`str` or `Path`): Output folder.
        manifest (`FeatureManifest`): From [`manifest_of`].
        batch_size (`int`): Examples per forward.
        shard_bytes (`int`): Size of a shard; an interruption loses at most one shard.
        say: Called with the size before anything is read.
        enough (`Callable`, *optional*): Called after each shard; if it is true, the set ends there. With it, a set
            that holds the first of the examples is complete, and is not continued.
        collator (`DFlashCollator`, *optional*): One that reads images, if there are any.

    Raises:
        `ValueError`: an example cannot be trained on, the folder holds other features, another process is storing
            there, the disk is too small, or states are requested from a target whose logits are not its head's output.
    """
    folder = Path(folder)
    if collator is None:
        collator = DFlashCollator()
    if manifest.states:
        check_logits(target)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        # 1. The size, from the lengths alone.
        lengths = lengths_of(examples).tolist()
        stored_manifest = FeatureManifest.load(folder) if (folder / MANIFEST).exists() else None
        if stored_manifest is None:
            manifest.shards = _plan_shards(lengths, shard_bytes // manifest.token_bytes)
        else:
            manifest.shards = stored_manifest.shards
        starts = [0, *accumulate(manifest.shards)]  # the first example of each shard
        missing = [number for number in manifest.missing(folder) if starts[number + 1] <= len(lengths)]
        missing_tokens = sum(sum(lengths[starts[number] : starts[number + 1]]) for number in missing)
        missing_bytes = missing_tokens * manifest.token_bytes
        total_bytes = sum(lengths) * manifest.token_bytes
        free_bytes = shutil.disk_usage(folder).free
        say(
            f"{len(lengths):,} examples, {sum(lengths):,} tokens at {manifest.token_bytes:,} bytes: "
            f"{_size(total_bytes)}; {_size(missing_bytes)} are to be written, {_size(free_bytes)} are free in {folder}"
        )
        if missing_bytes > free_bytes and enough is None:
            raise ValueError(
                f"{folder} has {_size(free_bytes)} left, but {_size(missing_bytes)} are needed; choose another output."
            )

        # 2. The rows, read once and checked, and what the folder holds.
        rows = examples if enough is None else _first_rows(examples, starts[-1])
        manifest.data = _digest_of_data(rows)
        _claim_folder(folder, manifest, stored_manifest)

        # 3. Shard by shard.
        with logging.tqdm(total=missing_tokens, unit="token", unit_scale=True, desc="features") as bar:
            for number in missing:
                if enough is not None and number > 0 and enough():
                    manifest.shards = manifest.shards[:number]
                    manifest.data = _digest_of_data(_first_rows(rows, manifest.examples))
                    write_json(folder / MANIFEST, asdict(manifest))
                    break
                shard_rows = [examples[i] for i in range(starts[number], starts[number + 1])]
                tensors = _compute_shard(
                    target, shard_rows, starts[number], manifest, batch_size, bar.update, collator
                )
                with atomic(folder / shard_name(number)) as unfinished:
                    save_file(tensors, unfinished)
    return manifest


def _plan_shards(lengths: list[int], max_tokens: int) -> list[int]:
    """The examples of each shard, one at least, of at most `max_tokens` tokens if there are more."""
    shards: list[int] = []
    tokens = max_tokens + 1  # the first example begins a shard
    for length in lengths:
        tokens += length
        if tokens > max_tokens:
            shards.append(0)
            tokens = length
        shards[-1] += 1
    return shards


def _first_rows(rows, count: int):
    """The first rows of a dataset."""
    return rows.select(range(min(count, len(rows)))) if hasattr(rows, "select") else rows[:count]


def _digest_of_data(rows) -> str:
    """Of the ids and loss masks of a dataset, and of the content of its images, if it has any."""
    if hasattr(rows, "column_names"):
        images_by_row = rows["images"] if "images" in rows.column_names else []
    else:
        images_by_row = [row.get("images") for row in rows]
    content = hashlib.sha256()
    for images in images_by_row:
        for image in images or ():
            digest_of_image = digest_of(image) if image.startswith("data:") else digest_of_file(Path(image))
            content.update(digest_of_image.encode())
        content.update(digest_of("data:").encode())  # marks the end of a row
    digest = digest_of_rows(rows)
    return digest_of([digest, content.hexdigest()]) if any(images_by_row) else digest


def _claim_folder(folder: Path, manifest: FeatureManifest, stored_manifest: FeatureManifest | None) -> None:
    """Write the manifest of a folder; one that is there must be of the same features, wherever the target lay."""
    if stored_manifest is not None:
        wanted = {**asdict(manifest), "target": stored_manifest.target}
        mismatches = differences(asdict(stored_manifest), wanted)
        if mismatches:
            raise ValueError(
                f"{folder} was stored with {'; '.join(mismatches)}; choose another output, or remove this one."
            )
    elif any(folder.glob("features-*.safetensors")):
        raise ValueError(f"{folder} holds shards without {MANIFEST}; choose another output, or remove them.")
    for unfinished in folder.glob(".*.half"):
        unfinished.unlink()
    write_json(folder / MANIFEST, asdict(manifest))


def _compute_shard(
    target,
    rows: list[dict],
    first: int,
    manifest: FeatureManifest,
    batch_size: int,
    on_tokens: Callable[[int], object],
    collator: DFlashCollator,
) -> dict[str, torch.Tensor]:
    """
    The tensors of a shard, see the top of this module.

    Args:
        rows: The examples of the shard, the first of which has number `first` in its dataset.
        on_tokens: Called with the number of tokens of each example that has been read.
    """
    lengths = torch.tensor([0] + [len(row["input_ids"]) for row in rows])
    offsets = lengths.cumsum(0)  # [examples + 1]
    dtype = getattr(torch, manifest.dtype)
    widths = {"features": manifest.width}
    if manifest.states:
        widths["states"] = manifest.width // len(manifest.layer_ids)
    tensors = {name: torch.empty(int(offsets[-1]), width, dtype=dtype) for name, width in widths.items()}
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))  # little padding
    for start in range(0, len(by_length), batch_size):
        batch_rows = by_length[start : start + batch_size]
        names = ("input_ids", "loss_mask", "images")
        examples = [{name: rows[i][name] for name in names if name in rows[i]} for i in batch_rows]
        batch = collator(examples)
        output = target_forward(
            target,
            manifest.layer_ids,
            batch["input_ids"].to(target.device),
            attention_mask=batch["attention_mask"].to(target.device),
            states=manifest.states,
            images=collator.read_images(batch),
        )
        outputs = {"features": output.features, "states": output.last_hidden_state}  # [N, S, L*H], [N, S, H]
        for row, i in enumerate(batch_rows):
            tokens = slice(offsets[i], offsets[i + 1])
            for name, tensor in tensors.items():
                tensor[tokens] = outputs[name][row, : lengths[i + 1]].to("cpu", dtype)
                _check_finite(tensor[tokens], f"Example {first + i}", manifest)
            on_tokens(int(lengths[i + 1]))
    if all(CONVERSATION in row for row in rows):
        tensors["conversations"] = torch.tensor([row[CONVERSATION] for row in rows])
    return {
        **tensors,
        "input_ids": torch.cat([torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]),
        "loss_mask": torch.cat([torch.as_tensor(row["loss_mask"], dtype=torch.uint8) for row in rows]),
        "offsets": offsets,
    }


def _check_finite(stored: torch.Tensor, row: str, manifest: FeatureManifest) -> None:
    """Reject features `[S, L*H]` with inf or NaN: training on them would turn all weights into NaN."""
    wrong = ~stored.isfinite().all(0)  # [L*H]
    if wrong.any():
        layer = manifest.layer_ids[int(wrong.nonzero()[0]) * len(manifest.layer_ids) // manifest.width]
        what = f"features of layer {layer}" if stored.shape[1] == manifest.width else "final states"
        raise ValueError(
            f"{row}: {what} of {manifest.target} are inf or NaN as {manifest.dtype}; load the target with --dtype "
            "bfloat16 or float32, and store them with --store-dtype bfloat16 in another output."
        )


@dataclass(frozen=True)
class StoredRow:
    """The features of an example on disk, which are read when they are needed."""

    file: tuple[str, int]  # path and time of its last change
    start: int  # tokens, in the file
    end: int

    def read(self, name: str) -> torch.Tensor:
        """`features` `[S, L*H]`, `states` `[S, H]`, `input_ids` or `loss_mask` `[S]`."""
        return _opened(*self.file).get_slice(name)[self.start : self.end]


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
        self.offsets = [_opened(*file).get_tensor("offsets") for file in self.files]

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
            shard = _opened(*file)
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


@lru_cache(maxsize=256)
def _opened(path: str, changed: int):
    """An open shard; `changed`, the time of its last change, makes a file that was written anew another entry."""
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        remedy = "remove it, and run the same `dflash features` again"
        raise ValueError(f"{path} is damaged ({error}); {remedy}.") from error


def store_rows(rows, folder: Path, trainer, script, encoder, enough: Callable[[], bool] | None = None) -> None:
    """Store the features of a trainer's rows, if there are any; `enough`: see [`store_features`]."""
    if rows is None:
        return
    target = trainer.target
    layer_ids = trainer.draft.config.target_layer_ids
    dtype = str(target.dtype).removeprefix("torch.")
    manifest = manifest_of(target, script.target, layer_ids, encoder, dtype, states=trainer.args.has_teacher)
    collator = DFlashCollator(0, encoder.reader)
    shard_bytes = _TOKENS * manifest.token_bytes
    store_features(target, rows, folder, manifest, shard_bytes=shard_bytes, enough=enough, collator=collator)


def stored_output(batch: dict, states: bool) -> TargetOutput:
    """The target's output for a batch of stored rows, read from disk; with its final hidden states or without."""

    def read(name: str) -> torch.Tensor:
        rows = pad_sequence([row.read(name) for row in batch["stored"]], batch_first=True)  # [N, S, ...]
        return rows.to(batch["input_ids"].device)

    return TargetOutput(read("features"), read("states") if states else None)


def check_stored(dataset: StoredFeatures, states: bool, weights: dict | None = None, **wanted) -> None:
    """
    Check that stored features are those of a run.

    Args:
        dataset (`StoredFeatures`): The features.
        states (`bool`): Whether the run's loss needs the final states.
        weights (`dict[str, str]`): Digests of the run's target.
        wanted: Other values of a [`FeatureManifest`], as the run has them.

    Raises:
        `ValueError`: names what differs and the remedy.
    """
    mismatches = differences(asdict(dataset.manifest), wanted)
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
            shard = _opened(*file)
            rows.append({name: shard.get_tensor(name) for name in ("input_ids", "loss_mask")})
    return rows


def parts_of(dataset) -> list:
    """The parts of a concatenated dataset, or of a subset of it; otherwise the dataset itself."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    return dataset.datasets if isinstance(dataset, torch.utils.data.ConcatDataset) else [dataset]


def _size(count: float) -> str:
    """A number of bytes for people."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"
