"""
Features of a frozen target on disk: safetensors shards next to a manifest that describes their origin.

A shard holds whole examples, one after the other: `features` `[T, L*H]`, `input_ids` `[T]`, `loss_mask` `[T]`,
`offsets` `[examples + 1]`, and optionally `states` `[T, H]`, the final hidden states that the target's head reads. It
gets its final name when it is complete, and only then an entry in the manifest, so that a run interrupted at any time
resumes after the last complete shard.
"""

import hashlib
import json
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import logging

from dflash_hf.data.encode import digests_of_tokenizer
from dflash_hf.data.examples import DFlashCollator, check_examples
from dflash_hf.files import atomic, differences, locked, write_json
from dflash_hf.modeling.target_dflash import decoder_layers, text_depth
from dflash_hf.target import check_logits, digest_of_target, target_forward


MANIFEST = "manifest.json"


@dataclass
class FeatureManifest:
    """
    The origin of stored features; sets whose manifests differ only in shards are equal.

    Args:
        target (`str`): Name or folder of the target.
        revision (`str`, *optional*): Its commit on the Hub.
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
        examples, tokens (`int`): Counts of the whole dataset.
        shards (`list[dict]`): `file`, `examples`, `tokens` and `bytes` of each complete shard.
    """

    target: str
    revision: str | None
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
    examples: int = 0
    tokens: int = 0
    shards: list[dict] = field(default_factory=list)

    @property
    def token_bytes(self) -> int:
        """Bytes per token on disk."""
        width = self.width + (self.width // len(self.layer_ids) if self.states else 0)
        return width * getattr(torch, self.dtype).itemsize + 8 + 1

    def save(self, folder: Path) -> None:
        """Write `manifest.json` atomically."""
        write_json(folder / MANIFEST, asdict(self))

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
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); store the features again.") from error

    def check_same(self, other: "FeatureManifest", folder: Path, remedy: str) -> None:
        """
        Raises:
            `ValueError`: the manifests differ; the message names all differences. The target's location is ignored.
        """
        where = {"shards", "target", "revision"}
        wanted = {name: value for name, value in asdict(other).items() if name not in where}
        if others := differences(asdict(self), wanted):
            raise ValueError(f"{folder} was stored with {'; '.join(others)}; {remedy}.")


def drop_layers(target, device: torch.device):
    """
    Keep a target's embedding and head on `device` and free its layers, which are not needed with stored features.
    """
    decoder_layers(target).to("meta")
    target.get_input_embeddings().to(device)
    target.get_output_embeddings().to(device)
    target.hf_device_map = {"": device}  # so that Trainer does not move it
    return target


def describe(target, name: str, layer_ids: list[int], encoder, dtype: str, states: bool = False) -> FeatureManifest:
    """
    The manifest of the features to store, without data and shards.

    Raises:
        `ValueError`: the target has no such layers, or one is named twice.
    """
    depth = text_depth(target.config)
    if not -1 <= min(layer_ids) <= max(layer_ids) < depth or len(set(layer_ids)) < len(layer_ids):
        raise ValueError(
            f"target layers {layer_ids} must be distinct and from 0 to {depth - 1}, or -1, the embedding; set "
            "target_layer_ids (--target-layer-ids), or load the drafter that was trained for this target."
        )
    return FeatureManifest(
        target=name,
        revision=getattr(target.config, "_commit_hash", None),
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
) -> FeatureManifest:
    """
    Store the features of every token of a dataset, or resume where an earlier call ended.

    Args:
        target (`PreTrainedModel`): The frozen target.
        examples (`Sequence[dict]`): Rows with `input_ids` and `loss_mask`.
        folder (`str` or `Path`): Output folder.
        manifest (`FeatureManifest`): From [`describe`].
        batch_size (`int`): Examples per forward.
        shard_bytes (`int`): Size of a shard; an interruption loses at most one shard.
        say: Called with the size before anything is computed.

    Raises:
        `ValueError`: an example cannot be trained on, the folder holds other features, another process is storing
            there, the disk is too small, or states are requested from a target whose logits are not its head's output.
    """
    folder = Path(folder)
    check_examples(examples)
    if "document_ids" in examples[0]:
        raise ValueError("The examples are packed, and features are stored by example: leave out packing.")
    if manifest.states:
        check_logits(target)
    with locked(folder):
        return _store(target, examples, folder, manifest, batch_size, shard_bytes, say)


def _store(target, examples, folder: Path, manifest, batch_size: int, shard_bytes: int, say) -> FeatureManifest:
    manifest.data, lengths = digest_of_rows((row["input_ids"], row["loss_mask"]) for row in examples)
    manifest.examples, manifest.tokens = len(lengths), sum(lengths)
    if (folder / MANIFEST).exists():
        stored_before = FeatureManifest.load(folder)
        stored_before.check_same(manifest, folder, "choose another output, or remove this one")
        manifest.shards = stored_before.shards
        for shard in manifest.shards:
            _check_size(folder, shard)
    for half in folder.glob(".*.half"):
        half.unlink()

    # 1. The size, before anything is computed.
    token_bytes = manifest.token_bytes
    done = sum(shard["tokens"] for shard in manifest.shards)
    needed, free = (manifest.tokens - done) * token_bytes, shutil.disk_usage(folder).free
    say(
        f"{manifest.examples:,} examples, {manifest.tokens:,} tokens at {token_bytes:,} bytes: "
        f"{_size(manifest.tokens * token_bytes)}, of which {_size(done * token_bytes)} are stored; "
        f"{_size(free)} are free in {folder}"
    )
    if needed > free:
        raise ValueError(f"{folder} has {_size(free)} left, but {_size(needed)} are needed; choose another output.")
    manifest.save(folder)

    # 2. Shard by shard.
    first = sum(shard["examples"] for shard in manifest.shards)
    with logging.tqdm(total=manifest.tokens, initial=done, unit="token", unit_scale=True, desc="features") as bar:
        while first < len(lengths):
            last, tokens = first + 1, lengths[first]
            while last < len(lengths) and (tokens + lengths[last]) * token_bytes <= shard_bytes:
                tokens, last = tokens + lengths[last], last + 1
            rows = [examples[i] for i in range(first, last)]
            tensors = _shard(target, rows, first, manifest, batch_size, bar.update)
            name = f"features-{len(manifest.shards):05d}.safetensors"
            with atomic(folder / name) as half:
                save_file(tensors, half)
                shard = {"file": name, "examples": len(rows), "tokens": tokens, "bytes": half.stat().st_size}
            manifest.shards.append(shard)
            manifest.save(folder)
            first = last
    return manifest


def _shard(target, rows, first, manifest, batch_size, on_tokens) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([0] + [len(row["input_ids"]) for row in rows])
    offsets, dtype = lengths.cumsum(0), getattr(torch, manifest.dtype)
    widths = {"features": manifest.width}
    if manifest.states:
        widths["states"] = manifest.width // len(manifest.layer_ids)
    tensors = {name: torch.empty(int(offsets[-1]), width, dtype=dtype) for name, width in widths.items()}
    collate = DFlashCollator()
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))  # little padding
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = collate([{name: rows[i][name] for name in ("input_ids", "loss_mask")} for i in chosen])
        ids, mask = (batch[name].to(target.device) for name in ("input_ids", "attention_mask"))
        output = target_forward(target, manifest.layer_ids, ids, attention_mask=mask, states=manifest.states)
        found = {"features": output.features, "states": output.last_hidden_state}  # [N, S, L*H], [N, S, H]
        for row, i in enumerate(chosen):
            place = slice(offsets[i], offsets[i + 1])
            for name, tensor in tensors.items():
                computed = found[name][row, : lengths[i + 1]]
                tensor[place] = computed.to("cpu", dtype)
                _check_finite(tensor[place], computed, first + i, manifest)
            on_tokens(int(lengths[i + 1]))
    return {
        **tensors,
        "input_ids": torch.cat([torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]),
        "loss_mask": torch.cat([torch.as_tensor(row["loss_mask"], dtype=torch.uint8) for row in rows]),
        "offsets": offsets,
    }


def _check_finite(stored: torch.Tensor, computed: torch.Tensor, row: int, manifest: FeatureManifest) -> None:
    """Reject features `[S, L*H]` with inf or NaN: training on them would turn all weights into NaN."""
    wrong = ~stored.isfinite().all(0)  # [L*H]
    if not wrong.any():
        return
    layer = manifest.layer_ids[int(wrong.nonzero()[0]) * len(manifest.layer_ids) // manifest.width]
    what = f"features of layer {layer}" if stored.shape[1] == manifest.width else "final states"
    where = f"Example {row}: {what} of {manifest.target}"
    if computed.isfinite().all():
        raise ValueError(
            f"{where} reach {computed.abs().max().item():.3g}, which overflows {manifest.dtype}; store them with "
            "--store-dtype bfloat16 in another output."
        )
    dtype = str(computed.dtype).removeprefix("torch.")
    raise ValueError(f"{where} are inf or NaN as {dtype}; load the target with --dtype bfloat16 or float32.")


class StoredFeatures(torch.utils.data.Dataset):
    """
    Stored features as a dataset of rows `input_ids` `[S]`, `loss_mask` `[S]`, `features` `[S, L*H]` and optionally
    `states` `[S, H]`; only the requested row is read.

    Args:
        folder (`str` or `Path`): Output of [`store_features`].
        layer_ids (`list[int]`): The layers to read, in this order; an empty list gives rows without `features`.
            Default: all stored layers.
        states (`bool`): Read the final hidden states too.

    Raises:
        `ValueError`: the set is incomplete, a shard is missing or damaged, or a layer or the states are not stored.
    """

    def __init__(self, folder: str | Path, layer_ids: list[int] | None = None, states: bool = False):
        self.folder, self.states = Path(folder), states
        self.manifest = FeatureManifest.load(self.folder)
        if states and not self.manifest.states:
            raise ValueError(
                f"{folder} was stored without the final states, from which the target's distribution is computed: "
                "store the features again with `dflash features --states`, or train with label_source=data and "
                "loss_type=ce or dpace."
            )
        self.layer_ids = self.manifest.layer_ids if layer_ids is None else list(layer_ids)
        if not set(self.layer_ids) <= set(self.manifest.layer_ids):
            raise ValueError(
                f"{folder} holds target_layer_ids={self.manifest.layer_ids}, but the drafter reads "
                f"target_layer_ids={self.layer_ids}; store them with `dflash features --target-layer-ids`, or train a "
                "drafter that reads some of the stored layers with `dflash train target_layer_ids=...`."
            )
        self.starts = [0]
        for shard in self.manifest.shards:
            _check_size(self.folder, shard)
            self.starts.append(self.starts[-1] + shard["examples"])
        if self.starts[-1] < self.manifest.examples:
            raise ValueError(
                f"{folder} holds {self.starts[-1]} of {self.manifest.examples} examples; run the same `dflash "
                "features` again to finish it."
            )
        self.files: dict[int, tuple] = {}

    def __len__(self) -> int:
        return self.manifest.examples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index = range(len(self))[index]
        number = bisect_right(self.starts, index) - 1
        if number not in self.files:
            file = safe_open(str(self.folder / self.manifest.shards[number]["file"]), "pt")
            self.files[number] = file, file.get_tensor("offsets").tolist()
        file, offsets = self.files[number]
        first = index - self.starts[number]
        place = slice(*offsets[first : first + 2])
        row = {name: file.get_slice(name)[place] for name in ("input_ids", "loss_mask")}
        if self.layer_ids:
            row["features"] = self._features(file.get_slice("features"), place)
        if self.states:
            row["states"] = file.get_slice("states")[place]
        return row

    def _features(self, stored, place: slice) -> torch.Tensor:
        if self.layer_ids == self.manifest.layer_ids:
            return stored[place]
        width = self.manifest.width // len(self.manifest.layer_ids)
        starts = [self.manifest.layer_ids.index(layer) * width for layer in self.layer_ids]
        return torch.cat([stored[place, start : start + width] for start in starts], dim=1)

    def __getstate__(self):
        return {**self.__dict__, "files": {}}  # open files are not passed to other processes


def store_rows(rows, folder: Path, run) -> StoredFeatures | None:
    """Features of a run's dataset, if there is one: the first process stores them, the others follow."""
    if rows is None:
        return None
    target, states = run.target, run.args.reads_states
    if run.args.process_index == 0:
        dtype = str(target.dtype).removeprefix("torch.")
        made_with = describe(target, run.recipe.target, run.layer_ids, run.encoder, dtype, states)
        store_features(target, rows, folder, made_with)
    return StoredFeatures(folder, run.layer_ids, states)


def drawn(rows, run):
    """The rows whose features a run stores: as many as asked, drawn at random."""
    count = run.recipe.store_rows
    if count >= len(rows):
        return rows
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(run.args.seed))[:count]
    return rows.select(sorted(chosen.tolist()))


def stored(folders: str | Path | Sequence[str | Path], layer_ids: list[int] | None = None, states: bool = False):
    """[`StoredFeatures`] of a folder, or of several, concatenated."""
    if isinstance(folders, str | Path):
        return StoredFeatures(folders, layer_ids, states)
    return torch.utils.data.ConcatDataset([StoredFeatures(folder, layer_ids, states) for folder in folders])


def parts_of(dataset) -> list:
    """The parts of a concatenated dataset, or of a subset of it; otherwise the dataset itself."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    return dataset.datasets if isinstance(dataset, torch.utils.data.ConcatDataset) else [dataset]


def _check_size(folder: Path, shard: dict) -> None:
    path = folder / shard["file"]
    if not path.is_file():
        raise ValueError(f"{path}, a shard of {MANIFEST}, is missing; restore it, or store the features again.")
    if path.stat().st_size != shard["bytes"]:
        raise ValueError(
            f"{path} is damaged: it has {path.stat().st_size:,} bytes, not {shard['bytes']:,}; restore it, or store "
            "the features again."
        )


def digest_of_rows(rows: Iterable[tuple]) -> tuple[str, list[int]]:
    """A digest of rows, each of ids and a loss mask, and the length of each."""
    digest, lengths = hashlib.sha256(), []
    for ids, mask in rows:
        parts = [torch.as_tensor(part, dtype=torch.int32) for part in ([len(ids)], ids, mask)]
        digest.update(torch.cat(parts).numpy().tobytes())
        lengths.append(len(ids))
    return digest.hexdigest()[:16], lengths


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
