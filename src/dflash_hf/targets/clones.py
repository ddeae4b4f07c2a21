"""Shallow clones of a model, with the same weights: other calls do not see what is changed in a clone."""

import copy
import functools
import types
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel


def shallow_clone(model: nn.Module, modules: Iterable[nn.Module]) -> nn.Module:
    """
    A model that computes the same as `model`, in which these modules and those that contain them are copies.
    Everything else is shared: every weight, and the dictionaries of hooks. A hook that is registered on a module also
    runs in its copy, which it gets as its module; [`original_of`] returns the module that was copied.

    Raises:
        `ValueError`: a forward was replaced by a function that may call the shared module.
    """
    to_copy = {*modules}
    clones: dict[nn.Module, nn.Module] = {}

    def clone(module: nn.Module) -> nn.Module:
        if module in clones:
            return clones[module]
        clones[module] = module  # in case the module contains itself
        children = {name: child if child is None else clone(child) for name, child in module._modules.items()}
        if module in to_copy or any(child is not module._modules[name] for name, child in children.items()):
            clones[module] = _copy_of(module, children)
        return clones[module]

    return clone(model)


def _copy_of(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    """A copy of a module with other children, which shares everything else."""
    copied = copy.copy(module)
    copied._modules = children
    attributes = vars(copied)
    attributes["_cloned_from"] = original_of(module)  # not by `setattr`, which would make it a child
    # Methods that were replaced on the module itself: accelerate keeps `forward` and `_old_forward` there.
    for name, attribute in list(vars(module).items()):  # a list: other threads may be adding attributes
        bound_to = attribute.__self__ if isinstance(attribute, types.MethodType) else None
        if bound_to is module:
            attributes[name] = types.MethodType(attribute.__func__, copied)
        elif isinstance(attribute, functools.partial) and attribute.args[:1] == (module,):
            attributes[name] = functools.partial(attribute.func, copied, *attribute.args[1:], **attribute.keywords)
        elif name == "forward":
            raise ValueError(f"the forward of a {type(module).__name__} was replaced, so it has no private copy")
    return copied


def original_of(module: nn.Module) -> nn.Module:
    """The module that a module is a copy of; the module itself if it is none."""
    return vars(module).get("_cloned_from", module)


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
