"""A model of one's own for a while, with the same weights: other calls do not see what is changed in it."""

import copy
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel


def private(model: nn.Module, modules: Iterable[nn.Module]) -> nn.Module:
    """
    A model that computes the same as `model`, in which these modules and those that contain them are copies.
    Everything else is shared, every weight included.

    Raises:
        `ValueError`: a forward was replaced, by accelerate or others: it may call the shared module.
    """
    wanted, copies = {*modules}, {}

    def copied(module: nn.Module) -> nn.Module:
        if module not in copies:
            copies[module] = module  # in case it contains itself
            children = {name: child if child is None else copied(child) for name, child in module._modules.items()}
            if module in wanted or any(child is not module._modules[name] for name, child in children.items()):
                if "forward" in vars(module):
                    raise ValueError(f"The forward of a {type(module).__name__} was replaced: it has no private copy.")
                copies[module] = copy.copy(module)  # which shares `_modules`, and hooks
                copies[module]._modules = children
        return copies[module]

    return copied(model)


def with_own_config(model: PreTrainedModel) -> PreTrainedModel:
    """
    A model with the same weights, and with a configuration of its own that may be changed.

    Raises:
        `ValueError`: see [`private`].
    """
    own = private(model, (module for module in model.modules() if "config" in vars(module)))
    copies: dict = {}
    for module in own.modules():
        if "config" in vars(module):
            module.config = copy.deepcopy(module.config, copies)
    return own
