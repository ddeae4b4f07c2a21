"""
CUDA graphs on the pretend accelerator. As on CUDA, nothing runs while a graph is captured: its kernels, which are
operators here, get the addresses that they have then, and each replay runs them again at these addresses. So what the
host computes while it captures, a length for example, stays as it was: a program that does not pass such values in
tensors of its own writes a wrong text here, as it would on a GPU.
"""

from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from support.pretend.memory import mark_of, next_serial, tensors_in


class _Kernel(NamedTuple):
    """An operator, with its arguments and the memory of its results."""

    operator: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    results: list[torch.Tensor]

    def run(self) -> None:
        """Compute the results, where they are."""
        computed = self.operator(*self.args, **self.kwargs)
        if self.operator._schema.is_mutable:
            return
        for result, value in zip(self.results, tensors_in((computed,)), strict=True):
            result.copy_(value)


class PretendGraph:
    """
    In place of `torch.cuda.CUDAGraph`.

    Attributes:
        kernels (`list[_Kernel]`): What a replay runs. They hold their tensors, as a graph does the memory of its pool.
    """

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.kernels: list[_Kernel] = []
        self._start = 0  # serial of memory: what has a larger one is made in the capture

    def capture_begin(self, pool=None, capture_error_mode: str = "global") -> None:
        """
        Raises:
            `RuntimeError`: another graph is being captured.
        """
        if self.accelerator.graph is not None:
            raise RuntimeError("a graph is being captured")
        self.accelerator.graph = self
        self._start = next_serial()

    def capture_end(self) -> None:
        self.accelerator.graph = None
        for kernel in self.kernels:
            for result in kernel.results:
                _spoil(result)

    def run(self, operator, args: tuple, kwargs: dict):
        """
        What an operator that launches a kernel returns in a capture. It runs, since the CPU would stumble over indices
        that were never computed; but memory from before the capture stays as it is.
        """
        is_write = operator._schema.is_mutable
        if is_write and mark_of(args[0]).serial < self._start:
            result = args[0]
        else:
            result = operator(*args, **kwargs)
        self.kernels.append(_Kernel(operator, args, kwargs, [] if is_write else list(tensors_in((result,)))))
        return result

    def replay(self) -> None:
        """Run the kernels; for the host it is one launch."""
        self.accelerator.note("kernels")
        with _disable_current_modes(), torch.inference_mode():
            for kernel in self.kernels:
                kernel.run()


class PretendStream:
    """In place of `torch.cuda.Stream`: all work is in one order."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream) -> None:
        """Nothing: whatever was launched on another stream has ended."""


def _spoil(tensor: torch.Tensor) -> None:
    """Fill memory that a capture has not computed."""
    with _disable_current_modes(), torch.inference_mode():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
        else:
            tensor.zero_()
