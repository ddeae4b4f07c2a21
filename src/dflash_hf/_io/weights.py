"""Whether weights are finite."""

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


def is_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all values of some tensors, of this process's shards, are finite; waits for the device only once."""
    flags = [_finite_values(tensor).all() for tensor in tensors]
    if not flags:
        return True
    flags = [flag.to(flags[0].device) for flag in flags]
    return bool(torch.stack(flags).all())


def check_finite(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """
    Check that all weights of a drafter are finite.

    Args:
        named (`Iterable[tuple[str, torch.Tensor]]`): Its weights with their names, as of `named_parameters()`.

    Raises:
        `ValueError`: a tensor has values that are inf or NaN; names it, and the remedy.
    """
    for name, tensor in named:
        if is_finite([tensor]):
            continue
        finite = _finite_values(tensor)
        raise ValueError(
            f"{int((~finite).sum()):,} of {finite.numel():,} weights are not finite (inf or NaN), in {name}: it "
            "cannot draft. Use an earlier checkpoint, or train again with a lower learning_rate."
        )


def _finite_values(tensor: torch.Tensor) -> torch.BoolTensor:
    """Which values of a tensor, of this process's shard if it is sharded, are finite."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    if local.is_floating_point() and local.itemsize == 1:  # torch has no `isfinite` for float8
        local = local.float()
    return local.isfinite()
