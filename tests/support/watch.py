"""What a computation leaves behind: graphs, and memory."""

import functools

import torch
from prompt_memory import LiveBytes


class Watch(LiveBytes):
    """
    Watches all operations inside.

    Attributes:
        now, peak (`int`): Bytes of the tensors that were made inside and are alive, and the most so far.
        graphs (`list[str]`): Operations that recorded a graph, and modules whose forward could have.
        alive (`list[int]`): `now` at the end of each forward of a model that is hooked.
    """

    def __init__(self):
        super().__init__()
        self.graphs: list[str] = []
        self.alive: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.is_grad_enabled() and any(torch.is_tensor(value) and value.requires_grad for value in args):
            self.graphs.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def hook(self, model) -> None:
        """Watch the forwards of a model's modules, too; not for decoding, which takes another path under hooks."""
        for name, module in model.named_modules():
            module.register_forward_hook(functools.partial(self._see, name))

    def peak_since_last(self) -> int:
        """The most since this was asked last."""
        peak = self.peak
        self.peak = self.now
        return peak

    def _see(self, name, module, arguments, output):
        outputs = output if isinstance(output, tuple) else (output,)
        if torch.is_grad_enabled() or any(torch.is_tensor(value) and value.requires_grad for value in outputs):
            self.graphs.append(name)
        if name == "":
            self.alive.append(self.now)
