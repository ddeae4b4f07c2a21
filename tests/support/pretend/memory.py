"""Where a tensor pretends to be: a mark on its memory, which all views of it share."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


HOST = torch.device("cpu")
_serials = itertools.count()


@dataclass
class Mark:
    """
    What an accelerator knows of a piece of memory. Torch keeps attributes of a storage as long as the memory lives.

    Attributes:
        device (`torch.device`): `cuda:N`, or the host for pinned memory.
        serial (`int`): No other memory ever has the same, while addresses are used again.
        is_pinned (`bool`): Whether it is pinned memory of the host.
        is_awaited (`bool`): Whether an asynchronous copy writes to it, for which the host has not waited yet.
    """

    device: torch.device
    serial: int
    is_pinned: bool = False
    is_awaited: bool = False


def mark_of(tensor: torch.Tensor) -> Mark | None:
    """The mark of a tensor's memory; `None` for ordinary memory of the host, and for tensors without memory."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return None
    return getattr(tensor.untyped_storage(), "pretend_mark", None)


def set_mark(tensor: torch.Tensor, device: torch.device, is_pinned: bool = False) -> torch.Tensor:
    """Mark a tensor's memory; returns the tensor."""
    tensor.untyped_storage().pretend_mark = Mark(device, next(_serials), is_pinned)
    return tensor


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device that a tensor says it is on."""
    mark = mark_of(tensor)
    return tensor.device if mark is None else mark.device


def tensors_in(values: Iterable) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results of an operator, and in their lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def next_serial() -> int:
    """A serial that is larger than those of all memory so far, and smaller than those of all later memory."""
    return next(_serials)


def as_device(device) -> torch.device:
    """A device as torch's functions take it: a number is that of an accelerator; without an index it is the first."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    device = torch.device(device)
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device
