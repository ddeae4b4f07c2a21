"""
A model of one call's own. What a call watches or changes in a model it watches and changes in copies of the modules
concerned; all other modules, and every weight, are shared. Calls in other threads, with a drafter or without, never
meet a hook of this one, and neither does a copy or a pickle that is made meanwhile.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MethodType

import torch
from torch import nn


_CALLED = ("_forward_pre_hooks", "_forward_hooks")
_HOOKS = (
    *_CALLED,
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
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
    for (module, twin), was in zip(pairs, before, strict=True):
        for kind in _CALLED:
            told = {number: _told(module, twin, was, kind, number, hook) for number, hook in was[kind].items()}
            was[kind].update(told)
    try:
        yield own
    finally:
        for (module, twin), was in zip(pairs, before, strict=True):
            _hand_on(twin, was, module)
            # From now on another name of the module: what knew the copy is garbage at once, without the collector.
            vars(twin).update(vars(module))
            was.clear()


def _hand_on(giver: nn.Module, before: dict, taker: nn.Module) -> None:
    """What was stored on one module since `before` is stored on another."""
    now = dict(vars(giver))  # at once: others may be writing
    vars(taker).update({name: value for name, value in now.items() if before.get(name, before) is not value})


def _told(module: nn.Module, twin: nn.Module, was: dict, kind: str, number: int, hook: Callable):
    """
    A hook of a module as its copy calls it: it is told the module on which it was registered, for it may know modules
    by their identity, finds and leaves there what it would find and leave, and is called no more once it is removed.
    """

    def call(_, *args, **kwargs):
        if number not in getattr(module, kind):
            return None
        if torch.compiler.is_compiling():
            return hook(module, *args, **kwargs)
        _hand_on(twin, was, module)
        before = dict(vars(module))
        try:
            return hook(module, *args, **kwargs)
        finally:
            _hand_on(module, before, twin)

    return call


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


def _rebound(value, twins: dict, within: tuple = ()):
    """
    What calls a copied module from an attribute, as the forwards that accelerate or their users wrap do, calls the
    copy: a method, a partial, or a function that closes over one of these.
    """
    value = getattr(value, "_torchdynamo_orig_callable", value)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, twins.get(value.__self__, value.__self__))
    if isinstance(value, functools.partial):
        args = [twins.get(a, a) if isinstance(a, nn.Module) else a for a in value.args]
        bound = functools.partial(value.func, *args, **value.keywords)
        vars(bound).update(vars(value))
        return bound
    if isinstance(value, FunctionType) and value.__closure__ and value not in within:
        cells = tuple(_rebound_cell(cell, twins, (*within, value)) for cell in value.__closure__)
        bound = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        bound.__kwdefaults__ = value.__kwdefaults__
        vars(bound).update(vars(value))
        return bound if cells != value.__closure__ else value
    return value


def _rebound_cell(cell: CellType, twins: dict, within: tuple) -> CellType:
    """The cell itself, which may be written to, where nothing in it is rebound."""
    try:
        value = cell.cell_contents
    except ValueError:  # empty
        return cell
    if isinstance(value, nn.Module):
        bound = twins.get(value, value)
    elif isinstance(value, FunctionType | MethodType | functools.partial):
        bound = _rebound(value, twins, within)
    else:
        return cell
    return cell if bound is value or (isinstance(bound, MethodType) and bound == value) else CellType(bound)
