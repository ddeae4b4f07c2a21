"""The features that a drafter reads: outputs of a target's decoder layers, collected in the forwards of a call."""

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import nn
from transformers import DynamicCache

from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.modeling.modeling_dflash import execution_device
from dflash_hf.modeling.target_dflash import decoder_layers, feature_hook


def input_device(target) -> torch.device:
    """The device on which a target expects token ids."""
    return execution_device(target.get_input_embeddings())


def cache_argument(target) -> str:
    """The name under which `generate` keeps a target's cache and passes it to the forward."""
    accepted = inspect.signature(target.forward).parameters
    if CACHE_NAME in accepted or CACHE_NAME == "cache":  # upstream translates `cache` for forwards that say otherwise
        return CACHE_NAME
    return "cache_params" if "cache_params" in accepted else CACHE_NAME


def empty_cache(target) -> DynamicCache:
    """The cache that `generate` makes by default."""
    return DynamicCache(config=target.config.get_text_config(decoder=True))


@torch.no_grad()
def run_short_forward(target, cache=None) -> None:
    """Run a short forward, to observe what happens in it."""
    ids = torch.ones(2, 3, dtype=torch.long, device=input_device(target))
    target(input_ids=ids, use_cache=True, **{cache_argument(target): empty_cache(target) if cache is None else cache})


_running: ContextVar["FeatureTap | None"] = ContextVar("dflash_tap", default=None)
_lock = threading.Lock()
# The hooks on each module while calls need them: how many calls, and the handle.
_hooks: "weakref.WeakKeyDictionary[nn.Module, dict[Callable, list]]" = weakref.WeakKeyDictionary()
# Of the forward that torch.compile traces: it knows no context variables.
tracing: list["FeatureTap"] = []


def _running_tap() -> "FeatureTap | None":
    # Not `is_compiling`, which is true in all threads while one compiles.
    if torch.compiler.is_dynamo_compiling():
        return tracing[-1] if tracing else None
    return _running.get()


@feature_hook
def _input(layer, args, kwargs=None) -> None:  # no `kwargs` in a thread that runs while the hook is registered
    tap = _running_tap()
    if tap is not None:
        states = args[0] if args else (kwargs or {}).get("hidden_states")  # remote code may name it differently
        if states is not None:
            tap.put((layer, _input), states)


@feature_hook
def _output(layer, args, output) -> None:
    tap = _running_tap()
    if tap is not None:
        tap.put((layer, _output), output if isinstance(output, torch.Tensor) else output[0])


@feature_hook
def _positions(target, args, kwargs=None) -> None:
    tap = _running_tap()
    if tap is not None and kwargs is not None:
        tap.positions = kwargs.get("position_ids")


def attach(hooks) -> None:
    """Put each of these hooks on its module once, however many calls need it; `hooks` are pairs of both."""
    with _lock:
        for module, hook in hooks:
            uses = _hooks.setdefault(module, {}).setdefault(hook, [0, None])
            if uses[0] == 0:
                _remove_copied(module, hook)
                if hook is _output:
                    uses[1] = module.register_forward_hook(hook)
                else:
                    uses[1] = module.register_forward_pre_hook(hook, with_kwargs=True)
            uses[0] += 1


def _remove_copied(module: nn.Module, hook: Callable) -> None:
    """Take off a hook that a copy of a model, made during a call, has inherited."""
    for registered in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, other in registered.items() if other is hook]:
            del registered[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def detach(hooks) -> None:
    """Take these hooks off if no other call needs them."""
    with _lock:
        for module, hook in hooks:
            uses = _hooks[module][hook]
            uses[0] -= 1
            if uses[0] == 0:
                _hooks[module].pop(hook)[1].remove()


class FeatureTap:
    """
    Collects the outputs of a target's decoder layers in the forwards of one call.

    Hooks lie on the layers while a tap is open on them. They do nothing but in a forward that runs `with
    tap.running()` in the same thread, so other calls of the same target do not notice them: transformers' own way of
    capturing outputs (`utils/output_capturing.py`). Its `output_hidden_states=[i]` is not used: its meaning changed in
    5.23, and its last entry is taken after the final norm.

    Args:
        target (`PreTrainedModel`): The target.
        layer_ids (`list[int]`): Id `i` is the output of decoder layer `i`, -1 the input of the first one.
        consume (`callable`, *optional*): Called with the layers' outputs, `[N, S, H]` each, as soon as a forward has
            produced the last of them; they are not kept.
    """

    def __init__(self, target, layer_ids: list[int], consume=None):
        layers = decoder_layers(target)
        self.layer_ids = tuple(layer_ids)
        self.places = [(layers[max(i, 0)], _input if i < 0 else _output) for i in layer_ids]
        self.hooks = {*self.places, (target, _positions)}
        self.consume = consume
        self.captured: dict[tuple, torch.Tensor] = {}
        self.positions: torch.LongTensor | None = None  # `position_ids` of the last forward

    def __enter__(self):
        attach(self.hooks)
        return self

    def __exit__(self, *exc):
        detach(self.hooks)
        self.captured.clear()

    @contextlib.contextmanager
    def running(self):
        """Collect the forwards that run in this context."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    def put(self, place: tuple, output: torch.Tensor) -> None:
        """Keep an output of a layer, if it is among those that are read."""
        if place in self.places:
            self.captured[place] = output
            if self.consume is not None and len(self.captured) == len({*self.places}):
                self.consume(*self._layers())

    def take(self) -> torch.Tensor:
        """Return the features of the last forward, `[N, S, L * H]`, in the order of `layer_ids`, and drop them."""
        layers = self._layers()
        return torch.cat([layer.to(layers[0].device) for layer in layers], dim=-1)

    def _layers(self) -> list[torch.Tensor]:
        captured = self.captured
        self.captured = {}
        return [captured[place] for place in self.places]
