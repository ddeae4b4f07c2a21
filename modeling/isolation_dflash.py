"""
A model of one call's own, so that calls do not see each other.

What a call watches or changes in a model it watches and changes in copies: of the modules concerned, and of those
above them. All else is shared, every weight included. Below, layer 1 is watched.

    target, which all calls share         own, which this call runs
    ------------------------------        -------------------------------------------------------
    model                                 model'
      embed_tokens  <-----------------------  embed_tokens
      layers                                  layers'
        0  <-------------------------------     0
        1                                       1'  with the hooks that this call puts on it
          self_attn, mlp, its weights  <---       self_attn, mlp, its weights
    lm_head  <----------------------------  lm_head

So calls in other threads, with a drafter or without, never meet a hook of this one, and neither does a copy or a
pickle that is made meanwhile, or a graph that a user compiles. Hooks that stay for good, and ask a `ContextVar` whose
forward it is, would be in all of these, and would take the forward inside a user's hook for the call's own.
"""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from .rebinding_dflash import rebound


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

    Args:
        model (`nn.Module`): The shared model; nothing of it is changed meanwhile.
        watched (iterable of `nn.Module`): Modules of it.
        training (`bool`, *optional*): The mode of the copied modules; default: as they are.

    Yields:
        `nn.Module`: of the same class.
    """
    # 1. Copy the modules. 2. What calls one of them from an attribute calls its copy.
    seen: dict[nn.Module, nn.Module] = {}
    own = _copied(model, set(watched), seen)
    copies = {module: copy for module, copy in seen.items() if copy is not module}
    for copy in copies.values():
        vars(copy).update({name: rebound(value, copies) for name, value in vars(copy).items()})
        copy.training = copy.training if training is None else training
    # 3. Users' hooks receive the module, not its copy.
    before = {module: dict(vars(copy)) for module, copy in copies.items()}
    for module, copy in copies.items():
        for kind in _CALLED:
            hooks = vars(copy)[kind]
            hooks.update({n: _told(module, copy, before[module], kind, n, hook) for n, hook in hooks.items()})
    try:
        yield own
    finally:
        # 4. What forwards have stored on a copy, such as the rope deltas of a multimodal prompt, is the module's.
        for module, copy in copies.items():
            _hand_on(copy, before[module], module)
            # After this the copy aliases the module: references to the copy die without the garbage collector.
            vars(copy).update(vars(module))
            before[module].clear()


def _copied(module: nn.Module, watched: set, seen: dict) -> nn.Module:
    """
    The module itself where nothing in it is to be copied. Those that were compiled are, and the copies run eagerly: a
    graph that was made before a hook was there does not call it.
    """
    if module in seen:
        return seen[module]
    seen[module] = module  # should it contain itself
    children = dict(module._modules)
    children |= {name: _copied(child, watched, seen) for name, child in children.items() if child is not None}
    compiled = module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
    if module in watched or compiled or any(child is not module._modules[name] for name, child in children.items()):
        copy = seen[module] = object.__new__(type(module))
        vars(copy).update(vars(module), _modules=type(module._modules)(children), _compiled_call_impl=None)
        vars(copy).update({name: vars(copy)[name].copy() for name in _HOOKS})
    return seen[module]


def _told(module: nn.Module, copy: nn.Module, was: dict, kind: str, number: int, hook: Callable):
    """
    A hook of a module as its copy calls it: it receives the module on which it was registered, since it may know
    modules by their identity, finds and leaves there what it would find and leave, and is called no more once it is
    removed.
    """

    def call(_, *args, **kwargs):
        if number not in getattr(module, kind):
            return None
        if torch.compiler.is_compiling():
            return hook(module, *args, **kwargs)
        _hand_on(copy, was, module)
        before = dict(vars(module))
        try:
            return hook(module, *args, **kwargs)
        finally:
            _hand_on(module, before, copy)

    return call


def _hand_on(giver: nn.Module, before: dict, taker: nn.Module) -> None:
    """What was stored on one module since `before` is stored on another."""
    now = dict(vars(giver))  # in one step: others may be writing
    vars(taker).update({name: value for name, value in now.items() if before.get(name, before) is not value})
