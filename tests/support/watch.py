"""What forwards of a model leave behind: graphs, and memory."""

import functools
import gc

import torch


class Watch:
    """
    Attributes:
        graphs (`list[str]`): Modules whose forward recorded a graph.
        alive (`list[int]`): Bytes of all tensors that were alive at the end of each forward of the whole model.
    """

    def __init__(self, model):
        self.graphs: list[str] = []
        self.alive: list[int] = []
        for name, module in model.named_modules():
            module.register_forward_hook(functools.partial(self._see, name))

    def _see(self, name, module, arguments, output):
        tensors = [one for one in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(one)]
        if torch.is_grad_enabled() or any(one.requires_grad for one in tensors):
            self.graphs.append(name)
        if name == "":
            tensors = [one for one in gc.get_objects() if torch.is_tensor(one)]
            self.alive.append(sum(one.nbytes for one in tensors))
