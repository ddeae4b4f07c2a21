"""Checks that weights are finite, and a writer for a folder of weights."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from dflash_hf._io.files import write_json


def check_finite(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """
    Check that all weights of a drafter are finite.

    Raises:
        `ValueError`: a tensor has values that are inf or NaN; names it, and the remedy.
    """
    for name, tensor in named:
        finite = tensor.float().isfinite()
        number = int((~finite).sum())
        if number > 0:
            raise ValueError(
                f"{number:,} of {finite.numel():,} weights are not finite (inf or NaN), in {name}: it cannot draft. "
                "Use an earlier checkpoint, or train again with a lower learning_rate."
            )


def save_folder(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a new folder with a drafter's `config.json` and all its weights in one file; returns it."""
    folder.mkdir()
    write_json(folder / "config.json", dict(sorted(config.items())))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def is_finite(tensors) -> bool:
    """Whether all values of some tensors, of this process's shards, are finite; waits for the device only once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    flags = [tensor.detach().isfinite().all() for tensor in local]
    if not flags:
        return True
    flags = [flag.to(flags[0].device) for flag in flags]
    return bool(torch.stack(flags).all())
