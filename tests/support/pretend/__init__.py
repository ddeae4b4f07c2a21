"""
A pretend accelerator: what a program asks of a GPU, seen without one.

    with PretendAccelerator(devices=2) as accelerator:
        target.to("cuda:0")
        target.generate(ids.to("cuda:0"))
    accelerator.counts.waits      # how often the host waited, by line of code

Inside, every tensor on `cuda:N` is an ordinary tensor of the CPU whose memory has a mark (`memory.py`). Two modes of
torch see each call (`accelerator.py`): one answers questions about devices and carries out moves between them, the
other sees every operator, rejects those that mix devices and counts what a GPU would do (`counts.py`). A CUDA graph
holds the operators that were captured, and runs them again at the same addresses (`graph.py`).

What it shows: which operators run, and where; copies from and to the host; waits of the host; addresses.

What it cannot show:

- Time. An operator counts as one kernel, whether it takes a microsecond or a millisecond. On a GPU it may be several
  kernels (`sort`, `multinomial`), or none where a library fuses it.
- The choice of kernels. Operators are those of the CPU: attention is one operator here, whichever the GPU would take.
- Rounding, and the random numbers of a GPU. Texts are those of the CPU, bit for bit.
- Memory, streams, and what happens at the same time. Only one thing is checked: memory that an asynchronous copy
  writes to must not be read before the host has waited.
- A machine with a GPU. Questions about the machine, such as `torch.cuda.is_available()`, have their true answer,
  because libraries remember it. Custom CUDA kernels and `torch.compile` are not supported.
"""

from support.pretend.accelerator import PretendAccelerator
from support.pretend.counts import Counts


__all__ = ["Counts", "PretendAccelerator"]
