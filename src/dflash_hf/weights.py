"""Checks that the weights in a folder are finite."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from dflash_hf.modeling.checkpoint_dflash import checkpoint_files


def check_finite_weights(folder: str | Path) -> None:
    """
    Read every tensor of a drafter's safetensors, one at a time.

    Args:
        folder (`str` or `Path`): A local folder with `model.safetensors`, in one file or in shards.

    Raises:
        `ValueError`: some are inf or NaN; names the first tensor and the remedy.
        `OSError`: there are no weights.
    """
    wrong, count, total = [], 0, 0
    for file in checkpoint_files(str(folder)):
        with safe_open(str(file), "pt") as tensors:
            for name in tensors.keys():
                tensor = tensors.get_tensor(name)
                bad = int((~tensor.float().isfinite()).sum())
                total, count = total + tensor.numel(), count + bad
                wrong += [name] if bad else []
    if wrong:
        others = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        raise ValueError(
            f"{folder}: {count:,} of {total:,} weights are not finite (inf or NaN), in {wrong[0]}{others}: it cannot "
            "draft. Use an earlier checkpoint, or train again with a lower learning_rate."
        )


def is_finite(tensors) -> bool:
    """Whether all values of some tensors are finite; of sharded tensors, this process's part. Syncs only once."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    flags = [part.detach().isfinite().all() for part in parts]
    return not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())
