"""
A model of one call's own. What a call watches or changes in a model it watches and changes in copies of the modules
concerned; all other modules, and every weight, are shared. Calls in other threads, with a drafter or without, never
meet a hook of this one, and neither does a copy or a pickle that is made meanwhile.
"""

import contextlib
import functools
from collections.abc import Iterable
from types import MethodType

from torch import nn


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@contextlib.contextmanager
def isolated(model: nn.Module, watched: Iterable[nn.Module], training: bool | None = None):
    """
    A model that computes what `model` computes, in which the modules of `watched` belong to the caller alone.

    Copied are these modules, those that were compiled (the copies run eagerly: a graph that was made before a hook was
    there does not call it) and all modules above them, without their weights. What a forward stores on a copied
    module, such as the rope deltas of a multimodal prompt, is handed on to the original in the end.

    Args:
        model (`nn.Module`): The shared model; nothing of it is changed meanwhile.
        watched (iterable of `nn.Module`): Modules of it.
        training (`bool`, *optional*): The mode of the copied modules; default: as they are.

    Yields:
        `nn.Module`: of the same class.
    """
    twins: dict[nn.Module, nn.Module] = {}
    own = _twin(model, set(watched), twins)
    pairs = [(module, twin) for module, twin in twins.items() if twin is not module]
    for _, twin in pairs:
        twin.training = twin.training if training is None else training
    before = [dict(vars(twin)) for _, twin in pairs]
    try:
        yield own
    finally:
        for (module, twin), was in zip(pairs, before, strict=True):
            changes = {name: value for name, value in vars(twin).items() if was.get(name, was) is not value}
            vars(module).update(changes)
            for name in _HOOKS:  # which know the twins: garbage at once, not when the collector comes
                vars(twin)[name] = type(vars(twin)[name])()


def _twin(module: nn.Module, watched: set, twins: dict) -> nn.Module:
    """The module itself where nothing in it is to be copied."""
    if module in twins:
        return twins[module]
    twins[module] = module  # should it contain itself
    children = dict(module._modules)
    children |= {name: _twin(child, watched, twins) for name, child in children.items() if child is not None}
    compiled = module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
    if module in watched or compiled or any(child is not module._modules[name] for name, child in children.items()):
        twin = twins[module] = object.__new__(type(module))
        fields = {name: _rebound(value, twins) for name, value in vars(module).items()}
        fields |= {name: fields[name].copy() for name in _HOOKS}
        vars(twin).update(fields, _modules=type(module._modules)(children), _compiled_call_impl=None)
    return twins[module]


def _rebound(value, twins: dict):
    """What calls a copied module from an attribute, as the forwards that accelerate wraps do, calls the copy."""
    value = getattr(value, "_torchdynamo_orig_callable", value)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, twins.get(value.__self__, value.__self__))
    if isinstance(value, functools.partial):
        args = [twins.get(a, a) if isinstance(a, nn.Module) else a for a in value.args]
        bound = functools.partial(value.func, *args, **value.keywords)
        vars(bound).update(vars(value))
        return bound
    return value
