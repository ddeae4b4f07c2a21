"""
Rolling back recurrent targets: a state cannot be cropped, so it is restored and advanced over the accepted tokens.

Only the target's modules that update a state run again, on inputs recorded in the verification; attention layers live
in slots, as in any other target. Every row keeps its own length.
"""

import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer, StaticLayer

from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.session import SlotSession
from dflash_hf.decoding.slots import SlotCache, SlotLayer, recurrent_states
from dflash_hf.targets.features import attach, detach, empty_cache, run_short_forward


# Layers of fixed shape, or whose tokens cannot be moved. Quantised layers have a base class since transformers has
# 8-bit ones.
_UNSUPPORTED_LAYERS = (StaticLayer, getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer))
# Called with each stateful module and its inputs in the verification that runs in this thread.
_recorder: ContextVar[Callable | None] = ContextVar("dflash_recorder", default=None)
# The stateful modules of each target, as long as it lives. The lock lets one thread at a time observe a target.
_lock = threading.Lock()
_stateful: "weakref.WeakKeyDictionary[nn.Module, list]" = weakref.WeakKeyDictionary()


def _record(module, args, kwargs=None) -> None:
    """
    The hook on stateful modules. It does nothing without `kwargs`: torch may call it without them in a forward of
    another thread, which runs while the hook is registered.
    """
    record = _recorder.get()
    if record is not None and kwargs is not None:
        record(module, args, kwargs)


class RecurrentSlotLayer(SlotLayer, LinearAttentionLayer):
    """
    A layer with keys in slots. Its recurrent states are the original layer's: it takes over the attributes of that
    layer, and with them the same dictionaries of states.
    """

    is_compileable = False

    def __init__(self, cache: "SlotCache", recurrent: LinearAttentionLayer):
        self.__dict__ = {**vars(recurrent), "cache": cache, "ring": None, "keys": None, "values": None}

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Upstream's convention: keys and values are passed by position, states by keyword."""
        kind = SlotLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)


class RecurrentSlots(SlotCache):
    """Slots next to recurrent states, which are shared with the cache they were adopted from."""

    @staticmethod
    def can_adopt(cache: Cache) -> bool:
        if getattr(cache.update, "__func__", None) is not Cache.update:
            return False
        for layer in cache.layers:
            # After upstream's assisted decoding a layer may also record the inputs of its state.
            if isinstance(layer, _UNSUPPORTED_LAYERS) or getattr(layer, "record_past", False):
                return False
        return True

    def slot_layer(self, layer: CacheLayerMixin, margin: int) -> SlotLayer:
        if isinstance(layer, LinearAttentionLayer):
            return RecurrentSlotLayer(self, layer)
        return super().slot_layer(layer, margin)


class ReplaySession(SlotSession):
    """
    A target with recurrent layers, whose states are restored and advanced over the accepted tokens: the modules that
    update them run again, on the inputs that they had in the verification.

    Attributes:
        saved_states (`list[torch.Tensor]`): The states before the verification that was not kept yet.
        recorded_calls (`list[tuple]`): In it, each call of a stateful module: the module, its `args` and `kwargs`.
        num_verified (`int`): Candidates of that verification; 0 if it was kept.
    """

    cache_class = RecurrentSlots
    rollback_is_free = False

    def __init__(self, target, cache, *args, **kwargs):
        # 1. Whatever may fail: nothing is changed yet. The base class empties the cache.
        self.hooks = [(module, _record) for module in _stateful_modules(target)]
        self.saved_states = [state.clone() for state in recurrent_states(cache.layers)]
        super().__init__(target, cache, *args, **kwargs)
        # 2. What cannot fail.
        self.recorded_calls: list[tuple] = []
        self.num_verified = 0
        attach(self.hooks)

    @property
    def states(self) -> list[torch.Tensor]:
        return recurrent_states(self.cache.layers)

    def _forward(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
        _copy_states(self.states, self.saved_states)
        self.recorded_calls = []
        self.num_verified = inputs["input_ids"].shape[1]
        token = _recorder.set(lambda *call: self.recorded_calls.append(call))
        try:
            return super()._forward(inputs)
        finally:
            _recorder.reset(token)

    def keep(self, acceptance: Acceptance) -> None:
        self._replay(acceptance.counts)
        super().keep(acceptance)
        self.num_verified = 0  # last, so that `write_back` restores the states if this is interrupted

    def write_back(self, interrupted: Acceptance | None = None) -> Cache:
        try:
            if self.num_verified and interrupted is None:  # interrupted before the verified tokens were kept
                self._replay([0] * len(self.padding))
        finally:
            cache = super().write_back(interrupted)
        return cache

    def free(self) -> None:
        detach(self.hooks)
        super().free()

    def _replay(self, counts_of_rows: list[int]) -> None:
        """
        Set each row's states to those after the first `counts_of_rows[row]` of the verified tokens.

        Rows that keep the same number are advanced together: one pass for each number below that of all tokens.
        """
        size = self.num_verified
        counts = sorted({count for count in counts_of_rows if count < size})
        rows_differ = len(set(counts_of_rows)) > 1
        final = [state.clone() for state in self.states] if rows_differ else None
        for count in counts:
            _copy_states(self.saved_states, self.states)
            if count > 0:
                for module, args, kwargs in self.recorded_calls:
                    module(*_first_tokens(args, size, count), **_first_tokens(kwargs, size, count))
            if final is not None:
                for state, result in zip(self.states, final, strict=True):
                    rows = [row for row, count_of_row in enumerate(counts_of_rows) if count_of_row == count]
                    result[rows] = state[rows]
        if counts and final is not None:
            _copy_states(final, self.states)


def _copy_states(source: list[torch.Tensor], destination: list[torch.Tensor]) -> None:
    """In place; both lists may be empty."""
    if source:
        torch._foreach_copy_(destination, source)


def _first_tokens(value, size: int, count: int):
    """The part for the first `count` tokens of a module's inputs for `size` tokens, `[R, size, ...]`."""
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == size:
        return value[:, :count]
    if isinstance(value, tuple):
        return tuple(_first_tokens(item, size, count) for item in value)
    if isinstance(value, dict):
        return {name: _first_tokens(item, size, count) for name, item in value.items()}
    return value


def _stateful_modules(target) -> list[nn.Module]:
    """The innermost modules of a target that update a recurrent state, found by observing a short forward."""
    with _lock:
        if target not in _stateful:
            _stateful[target] = _find_stateful(target)
        return _stateful[target]


def _find_stateful(target) -> list[nn.Module]:
    cache = empty_cache(target)
    observer = _StateObserver(cache)
    handles = []
    for module in target.modules():
        handles.append(module.register_forward_pre_hook(observer.enter))
        handles.append(module.register_forward_hook(observer.leave))
    try:
        run_short_forward(target, cache)
    finally:
        for handle in handles:
            handle.remove()
    return list(observer.stateful)


class _StateObserver:
    """
    Records which module is running when a recurrent state of a cache is updated.

    Forwards in other threads, which use other caches, are ignored.

    Attributes:
        stateful (`dict[nn.Module, None]`): These modules, in order.
    """

    def __init__(self, cache: Cache):
        self.thread = threading.get_ident()
        self.running: list[nn.Module] = []  # the innermost last
        self.stateful: dict[nn.Module, None] = {}
        cache.update_conv_state = self._recording(cache.update_conv_state)
        cache.update_recurrent_state = self._recording(cache.update_recurrent_state)

    def _recording(self, update: Callable) -> Callable:
        def update_and_record(*args, **kwargs):
            self.stateful[self.running[-1]] = None
            return update(*args, **kwargs)

        return update_and_record

    def enter(self, module, args) -> None:
        if threading.get_ident() == self.thread:
            self.running.append(module)

    def leave(self, module, args, output) -> None:
        if threading.get_ident() == self.thread:
            self.running.pop()
