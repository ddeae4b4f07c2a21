"""The features that a drafter reads: outputs of a target's decoder layers, collected in the forwards of a call."""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.modeling.modeling_dflash import execution_device
from dflash_hf.modeling.target_dflash import decoder_layers, feature_hook
from dflash_hf.targets.clones import original_of


def input_device(target) -> torch.device:
    """The device on which a target expects token ids."""
    return execution_device(target.get_input_embeddings())


def cache_argument(target) -> str:
    """The name under which `generate` keeps a target's cache and passes it to the forward."""
    accepted = inspect.signature(target.forward).parameters
    if CACHE_NAME in accepted or CACHE_NAME == "cache":  # upstream renames `cache` for forwards with another name
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


HookPoint = tuple[nn.Module, Callable]  # a module, and the hook that is registered on it


class _SharedHook:
    """
    A hook that calls of several threads need on one module. It is registered while at least one of them does.

    Attributes:
        num_calls (`int`): The calls that need it.
        handle (`RemovableHandle`, *optional*): While it is registered.
    """

    def __init__(self):
        self.num_calls = 0
        self.handle: RemovableHandle | None = None


_lock = threading.Lock()  # guards `_shared_hooks`
_shared_hooks: "weakref.WeakKeyDictionary[nn.Module, dict[Callable, _SharedHook]]" = weakref.WeakKeyDictionary()

# The tap that collects the current forward of this thread.
_current_tap: ContextVar["FeatureTap | None"] = ContextVar("dflash_tap", default=None)
# In a forward that torch.compile traces, which knows no context variables, the last of these collects.
_traced_taps: list["FeatureTap"] = []


def _tap_of_this_forward() -> "FeatureTap | None":
    # Not `is_compiling`, which is true in all threads while one compiles.
    if torch.compiler.is_dynamo_compiling():
        return _traced_taps[-1] if _traced_taps else None
    return _current_tap.get()


@feature_hook
def _capture_input(layer, args, kwargs=None) -> None:
    # torch calls a hook without `kwargs` if it was registered during this forward, by another thread.
    tap = _tap_of_this_forward()
    if tap is not None:
        states = args[0] if args else (kwargs or {}).get("hidden_states")  # remote code may name it differently
        if states is not None:
            tap.record((original_of(layer), _capture_input), states)


@feature_hook
def _capture_output(layer, args, output) -> None:
    tap = _tap_of_this_forward()
    if tap is not None:
        tap.record((original_of(layer), _capture_output), output if isinstance(output, torch.Tensor) else output[0])


@feature_hook
def _capture_positions(target, args, kwargs=None) -> None:
    tap = _tap_of_this_forward()
    if tap is not None and kwargs is not None:
        tap.positions = kwargs.get("position_ids")


def attach(hook_points: Iterable[HookPoint]) -> None:
    """
    Register hooks, each once on its module however many calls need it. Each call of this needs one of [`detach`].
    """
    with _lock:
        for module, hook in hook_points:
            shared = _shared_hooks.setdefault(module, {}).setdefault(hook, _SharedHook())
            if shared.num_calls == 0:
                _remove_copied(module, hook)
                shared.handle = _register(module, hook)
            shared.num_calls += 1


def _register(module: nn.Module, hook: Callable) -> RemovableHandle:
    """Register a hook: after the forward for outputs, before it for all others."""
    if hook is _capture_output:
        return module.register_forward_hook(hook)
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _remove_copied(module: nn.Module, hook: Callable) -> None:
    """Remove a hook that a copy of a model, made during a call, has inherited."""
    for registered in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, other in registered.items() if other is hook]:
            del registered[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def detach(hook_points: Iterable[HookPoint]) -> None:
    """Remove hooks that no other call needs."""
    with _lock:
        for module, hook in hook_points:
            shared = _shared_hooks[module][hook]
            shared.num_calls -= 1
            if shared.num_calls == 0:
                shared.handle.remove()
                del _shared_hooks[module][hook]


class FeatureTap:
    """
    Collects the outputs of a target's decoder layers in the forwards of one call.

    `with tap:` registers hooks on the layers. They do nothing except in a forward that runs `with tap.running()` in
    the same thread, so that other calls of the same target do not notice them; transformers captures outputs in the
    same way (`utils/output_capturing.py`). Its `output_hidden_states=[i]` is not used: its meaning changed in 5.23,
    and its last entry is taken after the final norm.

    Args:
        target (`PreTrainedModel`): The target.
        layer_ids (`list[int]`): Id `i` is the output of decoder layer `i`, -1 the input of the first one.
        consume (`callable`, *optional*): Called with the layers' outputs, `[N, S, H]` each, as soon as a forward has
            produced the last of them; they are not kept.

    Attributes:
        hook_points (`list[HookPoint]`): Where the output of each of `layer_ids` is captured.
        captured (`dict[HookPoint, torch.Tensor]`): The outputs of the last forward, until they are taken.
        positions (`torch.LongTensor`, *optional*): `position_ids` of the last forward.
    """

    def __init__(self, target, layer_ids: list[int], consume=None):
        layers = [original_of(layer) for layer in decoder_layers(target)]
        self.layer_ids = tuple(layer_ids)
        self.hook_points = [(layers[max(i, 0)], _capture_input if i < 0 else _capture_output) for i in layer_ids]
        self.consume = consume
        self.captured: dict[HookPoint, torch.Tensor] = {}
        self.positions: torch.LongTensor | None = None
        self._all_hook_points = {*self.hook_points, (target, _capture_positions)}

    def __enter__(self):
        attach(self._all_hook_points)
        return self

    def __exit__(self, *exc):
        detach(self._all_hook_points)
        self.captured.clear()

    @contextmanager
    def running(self):
        """Collect the forwards that run in this context."""
        token = _current_tap.set(self)
        try:
            yield
        finally:
            _current_tap.reset(token)

    @contextmanager
    def tracing(self):
        """[`running`], for a forward that torch.compile traces."""
        _traced_taps.append(self)
        try:
            yield
        finally:
            _traced_taps.pop()

    def record(self, hook_point: HookPoint, output: torch.Tensor) -> None:
        """Keep what a hook has captured, if this tap reads it."""
        if hook_point in self.hook_points:
            self.captured[hook_point] = output
            if self.consume is not None and len(self.captured) == len({*self.hook_points}):
                self.consume(*self._take_layers())

    def take(self) -> torch.Tensor:
        """Return the features of the last forward, `[N, S, L * H]`, in the order of `layer_ids`, and drop them."""
        layers = self._take_layers()
        return torch.cat([layer.to(layers[0].device) for layer in layers], dim=-1)

    def _take_layers(self) -> list[torch.Tensor]:
        """The outputs of the last forward, in the order of `layer_ids`; they are not kept."""
        captured = self.captured
        self.captured = {}
        return [captured[hook_point] for hook_point in self.hook_points]
