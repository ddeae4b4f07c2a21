"""
Storing the features of a frozen target on disk: safetensors shards next to a manifest that describes their origin.

A shard holds whole examples, one after the other: `features` `[T, L*H]`, `input_ids` `[T]`, `loss_mask` `[T]`,
`offsets` `[examples + 1]`, and optionally `states` `[T, H]`, the final hidden states that the target's head reads, and
`conversations` `[examples]`, a number that the examples of one conversation share. The manifest is written first, with
the examples of every shard; a shard gets its name when it is complete. So a set is complete when all shards are there,
and a run that was interrupted at any time stores those that are missing.
"""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.utils import logging

from dflash_hf._io.files import atomic, differences, digest_of, digest_of_file, locked, write_json
from dflash_hf.data.examples import DFlashCollator
from dflash_hf.data.prepare import CONVERSATION
from dflash_hf.targets.frozen import target_forward
from dflash_hf.targets.logits import check_logits
from dflash_hf.training.feature_manifest import MANIFEST, FeatureManifest, shard_name
from dflash_hf.training.rows import digest_of_rows, lengths_of


_END_OF_ROW = digest_of("data:")  # between the digests of the images of two rows


def store_features(
    target,
    examples: Sequence[dict],
    folder: str | Path,
    manifest: FeatureManifest,
    batch_size: int = 8,
    shard_bytes: int = 1 << 30,
    say: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] | None = None,
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
        should_stop (`Callable`, *optional*): Called after each shard; if it is true, the set ends there. With it, a
            set that holds the first of the examples is complete, and is not continued.
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
            f"{_format_size(total_bytes)}; {_format_size(missing_bytes)} are to be written, "
            f"{_format_size(free_bytes)} are free in {folder}"
        )
        if missing_bytes > free_bytes and should_stop is None:
            raise ValueError(
                f"{folder} has {_format_size(free_bytes)} left, but {_format_size(missing_bytes)} are needed; choose "
                "another output."
            )

        # 2. The rows, read once and checked, and what the folder holds.
        rows = examples if should_stop is None else _first_rows(examples, starts[-1])
        manifest.data = _digest_of_data(rows)
        _claim_folder(folder, manifest, stored_manifest)

        # 3. Shard by shard.
        with logging.tqdm(total=missing_tokens, unit="token", unit_scale=True, desc="features") as bar:
            for number in missing:
                if should_stop is not None and number > 0 and should_stop():
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
    """A digest of the ids and loss masks of a dataset, and of the content of its images, if it has any."""
    if hasattr(rows, "column_names"):
        images_by_row = rows["images"] if "images" in rows.column_names else []
    else:
        images_by_row = [row.get("images") for row in rows]
    content = hashlib.sha256()
    for images in images_by_row:
        for image in images or ():
            digest_of_image = digest_of(image) if image.startswith("data:") else digest_of_file(Path(image))
            content.update(digest_of_image.encode())
        content.update(_END_OF_ROW.encode())
    digest = digest_of_rows(rows)
    return digest_of([digest, content.hexdigest()]) if any(images_by_row) else digest


def _claim_folder(folder: Path, manifest: FeatureManifest, stored_manifest: FeatureManifest | None) -> None:
    """Write the manifest of a folder; one that is there must be of the same features, except for the target's path."""
    if stored_manifest is not None:
        expected = {**asdict(manifest), "target": stored_manifest.target}
        mismatches = differences(asdict(stored_manifest), expected)
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
            with_last_hidden_state=manifest.states,
            images=collator.read_images(batch),
        )
        outputs = {"features": output.features, "states": output.last_hidden_state}  # [N, S, L*H], [N, S, H]
        for row, i in enumerate(batch_rows):
            tokens = slice(offsets[i], offsets[i + 1])
            for name, tensor in tensors.items():
                tensor[tokens] = outputs[name][row, : lengths[i + 1]].to("cpu", dtype)
                _check_finite(tensor[tokens], name, f"Example {first + i}", manifest)
            on_tokens(int(lengths[i + 1]))
    if all(CONVERSATION in row for row in rows):
        tensors["conversations"] = torch.tensor([row[CONVERSATION] for row in rows])
    return {
        **tensors,
        "input_ids": torch.cat([torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]),
        "loss_mask": torch.cat([torch.as_tensor(row["loss_mask"], dtype=torch.uint8) for row in rows]),
        "offsets": offsets,
    }


def _check_finite(stored: torch.Tensor, name: str, row: str, manifest: FeatureManifest) -> None:
    """
    Reject `features` `[S, L*H]` or `states` `[S, H]`, as `name` says, with inf or NaN: training on them would turn all
    weights into NaN.
    """
    wrong = ~stored.isfinite().all(0)  # [L*H] or [H]
    if wrong.any():
        what = "final states"
        if name == "features":
            layer = manifest.layer_ids[int(wrong.nonzero()[0]) * len(manifest.layer_ids) // manifest.width]
            what = f"features of layer {layer}"
        raise ValueError(
            f"{row}: {what} of {manifest.target} are inf or NaN as {manifest.dtype}; load the target with --dtype "
            "bfloat16 or float32, and store them with --store-dtype bfloat16 in another output."
        )


def _format_size(count: float) -> str:
    """A number of bytes as text, such as `1.5 GB`."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"
