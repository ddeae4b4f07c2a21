"""Shallow clones of a model, with the same weights: other calls do not see what is changed in a clone."""

import copy
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel


def shallow_clone(model: nn.Module, modules: Iterable[nn.Module]) -> nn.Module:
    """
    A model that computes the same as `model`, in which these modules and those that contain them are copies.
    Everything else is shared, every weight included.

    Raises:
        `ValueError`: a forward was replaced, by accelerate or others: it may call the shared module.
    """
    to_copy = {*modules}
    clones: dict[nn.Module, nn.Module] = {}

    def clone(module: nn.Module) -> nn.Module:
        if module in clones:
            return clones[module]
        clones[module] = module  # in case the module contains itself
        children = {name: child if child is None else clone(child) for name, child in module._modules.items()}
        if module in to_copy or any(child is not module._modules[name] for name, child in children.items()):
            if "forward" in vars(module):
                raise ValueError(f"The forward of a {type(module).__name__} was replaced: it has no private copy.")
            clones[module] = copy.copy(module)  # which shares `_modules`, and hooks
            clones[module]._modules = children
        return clones[module]

    return clone(model)


def with_own_config(model: PreTrainedModel) -> PreTrainedModel:
    """
    A model with the same weights, and with a configuration of its own that may be changed.

    Raises:
        `ValueError`: see [`shallow_clone`].
    """
    clone = shallow_clone(model, (module for module in model.modules() if "config" in vars(module)))
    copies: dict = {}  # a configuration that several modules share is copied once
    for module in clone.modules():
        if "config" in vars(module):
            module.config = copy.deepcopy(module.config, copies)
    return clone
