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
from dflash_hf.targets.features import attach, detach, empty_cache, try_out


# Layers whose shape is fixed, or whose tokens cannot be moved. Quantised layers had no base class before 8-bit
# quantisation was added.
_FIXED = (StaticLayer, getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer))
_recorder: ContextVar[Callable | None] = ContextVar("dflash_recorder", default=None)
_lock = threading.Lock()
_stateful: "weakref.WeakKeyDictionary[nn.Module, list]" = weakref.WeakKeyDictionary()  # the modules of each target


def _record(module, args, kwargs=None) -> None:
    record = _recorder.get()
    if record is not None and kwargs is not None:
        record(module, args, kwargs)


class RecurrentSlotLayer(SlotLayer, LinearAttentionLayer):
    """A layer with keys in slots, and recurrent states that are shared with the original layer."""

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
        own = getattr(cache.update, "__func__", None) is Cache.update
        # A layer that records, as after upstream's assisted decoding, keeps the inputs of its state, too.
        return own and not any(
            isinstance(layer, _FIXED) or getattr(layer, "record_past", False) for layer in cache.layers
        )

    def slot_layer(self, layer: CacheLayerMixin, margin: int) -> SlotLayer:
        if isinstance(layer, LinearAttentionLayer):
            return RecurrentSlotLayer(self, layer)
        return super().slot_layer(layer, margin)


class ReplaySession(SlotSession):
    """
    A target with recurrent layers, whose states are restored and advanced over the accepted tokens: the modules that
    update them run again, on the inputs that they had in the verification.
    """

    CACHE = RecurrentSlots
    rollback_is_free = False

    def __init__(self, target, cache, *args, **kwargs):
        # First what may fail: the cache stays whole. Then the states before a verification.
        self.hooks = [(module, _record) for module in _stateful_modules(target)]
        self.saved = [state.clone() for state in recurrent_states(cache.layers)]
        super().__init__(target, cache, *args, **kwargs)
        self.calls: list[tuple] = []  # the modules' inputs in it
        self.size = 0  # tokens of a verification that was not kept yet
        attach(self.hooks)

    @property
    def states(self) -> list[torch.Tensor]:
        return recurrent_states(self.cache.layers)

    def _forward(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
        _copy(self.saved, self.states)
        self.calls = []
        self.size = inputs["input_ids"].shape[1]
        token = _recorder.set(lambda *call: self.calls.append(call))
        try:
            return super()._forward(inputs)
        finally:
            _recorder.reset(token)

    def keep(self, acceptance: Acceptance) -> None:
        self._advance(acceptance.counts)
        super().keep(acceptance)
        self.size = 0  # last: if this is interrupted, `close` restores the states

    def close(self, interrupted: Acceptance | None = None) -> Cache:
        try:
            if self.size and interrupted is None:  # the end came before the verified tokens were kept
                self._advance([0] * len(self.lengths))
        finally:
            cache = super().close(interrupted)
        return cache

    def clear(self) -> None:
        detach(self.hooks)
        super().clear()

    def _advance(self, counts_of_rows: list[int]) -> None:
        """
        Set each row's states to those after the first `counts_of_rows[row]` of the verified tokens.

        Rows that keep the same number are advanced together: one pass for each number below that of all tokens.
        """
        size = self.size
        counts = sorted({count for count in counts_of_rows if count < size})
        rows_differ = len(set(counts_of_rows)) > 1
        final = [state.clone() for state in self.states] if rows_differ else None
        for count in counts:
            _copy(self.states, self.saved)
            if count > 0:
                for module, args, kwargs in self.calls:
                    module(*_tokens(args, size, count), **_tokens(kwargs, size, count))
            if final is not None:
                for state, result in zip(self.states, final, strict=True):
                    rows = [row for row, kept in enumerate(counts_of_rows) if kept == count]
                    result[rows] = state[rows]
        if counts and final is not None:
            _copy(self.states, final)


def _copy(into: list[torch.Tensor], states: list[torch.Tensor]) -> None:
    if states:
        torch._foreach_copy_(into, states)


def _tokens(value, size: int, count: int):
    """The part for the first `count` tokens of a module's inputs for `size` tokens, `[R, size, ...]`."""
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == size:
        return value[:, :count]
    if isinstance(value, tuple):
        return tuple(_tokens(item, size, count) for item in value)
    if isinstance(value, dict):
        return {name: _tokens(item, size, count) for name, item in value.items()}
    return value


def _stateful_modules(target) -> list[nn.Module]:
    """The innermost modules of a target that update a recurrent state, found by observing a short forward."""
    with _lock:
        if target not in _stateful:
            _stateful[target] = _find_stateful(target)
        return _stateful[target]


def _find_stateful(target) -> list[nn.Module]:
    cache = empty_cache(target)
    running: list[nn.Module] = []
    stateful: dict[nn.Module, None] = {}  # in order

    def watched(update):
        def watch(*args, **kwargs):
            stateful[running[-1]] = None
            return update(*args, **kwargs)

        return watch

    cache.update_conv_state = watched(cache.update_conv_state)
    cache.update_recurrent_state = watched(cache.update_recurrent_state)
    # Forwards in other threads, on other caches, do not matter: each thread has a list of its own.
    this_thread = threading.get_ident()

    def enter(module, args):
        if threading.get_ident() == this_thread:
            running.append(module)

    def leave(module, args, output):
        if threading.get_ident() == this_thread:
            running.pop()

    handles = [module.register_forward_pre_hook(enter) for module in target.modules()]
    handles += [module.register_forward_hook(leave) for module in target.modules()]
    try:
        try_out(target, cache)
    finally:
        for handle in handles:
            handle.remove()
    return list(stateful)
