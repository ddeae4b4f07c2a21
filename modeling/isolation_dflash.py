"""
A private model for one call, so that calls do not see each other.

A call hooks and changes copies only: of the modules concerned and of their parents. Everything else is shared, every
weight included. Below, layer 1 is hooked.

    target, shared by all calls           own, run by this call
    ------------------------------        -------------------------------------------------------
    model                                 model'
      embed_tokens  <-----------------------  embed_tokens
      layers                                  layers'
        0  <-------------------------------     0
        1                                       1'  with the hooks of this call
          self_attn, mlp, its weights  <---       self_attn, mlp, its weights
    lm_head  <----------------------------  lm_head

So calls in other threads, with a drafter or without, never see a hook of this call, and neither does a copy or a
pickle made meanwhile, or a graph that a user compiles. Permanent hooks that ask a `ContextVar` whose forward is
running would be in all of these, and would mistake a forward inside a user's hook for the call's own.
"""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from .rebinding_dflash import rebound


_CALLED = ("_forward_pre_hooks", "_forward_hooks")
HOOKS = (
    *_CALLED,
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@contextlib.contextmanager
def isolated(model: nn.Module, watched: Iterable[nn.Module], training: bool | None = None):
    """
    A model that computes the same as `model`, in which the modules of `watched` are private to the caller.

    Args:
        model (`nn.Module`): The shared model, which stays unchanged.
        watched (iterable of `nn.Module`): Its modules to copy.
        training (`bool`, *optional*): The mode of the copied modules; default: unchanged.

    Yields:
        `nn.Module`: of the same class.
    """
    # 1. Copy the modules. 2. Attributes that call one of them call its copy instead.
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
        # 4. What forwards stored on a copy, such as the rope deltas of a multimodal prompt, goes to the module.
        for module, copy in copies.items():
            _hand_on(copy, before[module], module)
            if not any(map(_lists_outputs, module._forward_hooks.values())):
                new = vars(copy)["_forward_hooks"].items()
                module._forward_hooks.update({n: hook for n, hook in new if _lists_outputs(hook)})
            # After this the copy aliases the module: references to the copy die without the garbage collector.
            vars(copy).update(vars(module))
            before[module].clear()


def _copied(module: nn.Module, watched: set, seen: dict) -> nn.Module:
    """
    The module itself if nothing in it needs a copy. Compiled modules are copied too, and the copies run eagerly: a
    graph compiled before a hook was registered does not call it.
    """
    if module in seen:
        return seen[module]
    seen[module] = module  # in case it contains itself
    children = dict(module._modules)
    children |= {name: _copied(child, watched, seen) for name, child in children.items() if child is not None}
    compiled = module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
    if module in watched or compiled or any(child is not module._modules[name] for name, child in children.items()):
        copy = seen[module] = object.__new__(type(module))
        vars(copy).update(vars(module), _modules=type(module._modules)(children), _compiled_call_impl=None)
        vars(copy).update({name: vars(copy)[name].copy() for name in HOOKS})
    return seen[module]


def _lists_outputs(hook: Callable) -> bool:
    """
    Whether transformers registered a hook, in the first forward that lists hidden states, attentions or the like. A
    model that has such hooks says so, and is not given them again.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _told(module: nn.Module, copy: nn.Module, was: dict, kind: str, number: int, hook: Callable):
    """
    A module's hook, as the copy calls it: it receives the module on which it was registered, since it may compare
    modules by identity, reads and writes attributes there as usual, and is no longer called once it is removed.
    """

    @torch.compiler.assume_constant_result  # not guarded: PEFT's hooks have other numbers in every call
    def removed() -> bool:
        return number not in getattr(module, kind)

    def call(_, *args, **kwargs):
        if removed():
            return None
        if torch.compiler.is_compiling():
            return hook(module, *args, **kwargs)
        _hand_on(copy, was, module)
        before = dict(vars(module))
        try:
            return hook(module, *args, **kwargs)
        finally:
            _hand_on(module, before, copy)
            if removed():  # by itself: the graphs of later rounds see that it is gone
                vars(copy)[kind].pop(number, None)

    return call


def _hand_on(giver: nn.Module, before: dict, taker: nn.Module) -> None:
    """Copy the attributes set on one module since `before` to another."""
    now = dict(vars(giver))  # in one step: other threads may be writing
    vars(taker).update({name: value for name, value in now.items() if before.get(name, before) is not value})
