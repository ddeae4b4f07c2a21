"""
Rolling back recurrent targets: a state cannot be cropped, so it is restored and advanced over the accepted tokens.

Only the target's modules that update a state run again, on inputs recorded in the verification; attention layers live
in slots, as in any other target. Every row keeps its own length.
"""

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
)

from .accept_dflash import Draft, Verdict
from .isolation_dflash import isolated
from .sessions_dflash import SlotSession
from .target_dflash import empty_cache, try_out


# Layers whose shape is fixed, or whose tokens cannot be moved. Quantised layers had no base class before 8-bit
# quantisation was added.
_FIXED = (StaticLayer, getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer))


class ReplaySession(SlotSession):
    """
    A target with recurrent layers, whose states are restored and advanced over the accepted tokens: the modules that
    update them run again, on the inputs that they had in the verification.

    Args:
        moving (`dict[str, int]`): From [`moving_modules`]; the modules of these names must be private to the caller:
            their hooks are never removed.
    """

    rollback_is_free = False

    def __init__(self, target, *args, moving: dict[str, int]):
        super().__init__(target, *args)
        self.modules = {target.get_submodule(name): layer_idx for name, layer_idx in moving.items()}
        self.pending: tuple = ()  # start `[R]` and size of a verification that is not committed yet
        self.saved: list[torch.Tensor] = []  # the states before it
        self.calls: list[tuple] = []  # the modules' inputs in it
        self.recording = 0  # tokens of the forward that is running
        self._hook()

    @staticmethod
    def takes(cache: Cache) -> bool:
        """Whether a session can be opened on such a cache."""
        return not any(isinstance(layer, _FIXED) for layer in cache.layers)

    @property
    def states(self) -> list[torch.Tensor]:
        return recurrent_states(self.cache.layers)

    def verify(self, draft: Draft, start: torch.LongTensor):
        self.pending = start, draft.tokens.shape[1]
        self._save()
        self.recording = draft.tokens.shape[1]
        try:
            return super().verify(draft, start)
        finally:
            self.recording = 0

    def commit(self, start: torch.LongTensor, verdict: Verdict) -> None:
        self._keep(verdict.counts.tolist())

    def close(self, columns: int) -> Cache:
        if self.pending:  # interrupted between verification and commit
            start, _ = self.pending
            self._keep([columns - pad - n for pad, n in zip(self.padding, start.tolist(), strict=True)])
        return super().close(columns)

    def _keep(self, kept: list[int]) -> None:
        """
        Set each row's states to those after the first `kept[row]` of the verified tokens.

        Rows that keep the same number are advanced together: one pass for each number below that of all tokens.
        """
        _, size = self.pending
        counts = sorted({count for count in kept if count < size})
        final = None if len(set(kept)) == 1 else [state.clone() for state in self.states]
        for count in counts:
            self._go_back(size, count)
            if final is not None:
                for state, result in zip(self.states, final, strict=True):
                    rows = torch.tensor([row for row, n in enumerate(kept) if n == count], device=state.device)
                    result[rows] = state[rows]
        if counts and final is not None:
            _copy(self.states, final)
        self.pending = ()

    def _save(self) -> None:
        """Before a verification: what is needed to go back."""
        if self.saved:
            _copy(self.saved, self.states)
        else:
            self.saved = [state.clone() for state in self.states]
        self.calls.clear()

    def _hook(self) -> None:
        def record(module, args, kwargs):
            if self.recording:
                self.calls.append((module, args, kwargs))

        for module in self.modules:
            module.register_forward_pre_hook(record, with_kwargs=True)

    def _go_back(self, size: int, count: int) -> None:
        """Set all states to those after the first `count` of `size` verified tokens."""
        _copy(self.states, self.saved)
        if count > 0:
            for module, args, kwargs in self.calls:
                module(*_tokens(args, size, 0, count), **_tokens(kwargs, size, 0, count))


class StepSession(ReplaySession):
    """
    A target with recurrent layers that continue from a state only one token at a time, such as Mamba's: its modules
    receive one token at a time, and the states in between are kept, so that rolling back recomputes nothing.
    """

    def _save(self) -> None:
        super()._save()
        self.between = {layer_idx: [] for layer_idx in self.modules.values()}  # layer -> its states after each token
        self.whole: dict = {}  # module -> its inputs

    def _hook(self) -> None:
        def first(module, args, kwargs):
            if not self.recording or module in self.whole:
                return None
            self.whole[module] = args, kwargs
            return _tokens(args, self.recording, 0, 1), _tokens(kwargs, self.recording, 0, 1)

        def others(module, args, kwargs, output):
            if not self.recording:
                return None
            layers = [self.cache.layers[self.modules[module]]]
            between = self.between[self.modules[module]]
            between.append([state.clone() for state in recurrent_states(layers)])
            if len(between) > 1:  # called from the loop below
                return None
            outputs, (args, kwargs) = [output], self.whole[module]
            for step in range(1, self.recording):
                span = (self.recording, step, step + 1)
                outputs.append(module(*_tokens(args, *span), **_tokens(kwargs, *span)))
            if isinstance(output, torch.Tensor):
                return torch.cat(outputs, dim=1)
            return (torch.cat([item[0] for item in outputs], dim=1), *output[1:])

        for module in self.modules:
            module.register_forward_pre_hook(first, with_kwargs=True)
            module.register_forward_hook(others, with_kwargs=True)

    def _go_back(self, size: int, count: int) -> None:
        if count == 0:
            return _copy(self.states, self.saved)
        for layer_idx, between in self.between.items():
            _copy(recurrent_states([self.cache.layers[layer_idx]]), between[count - 1])


def recurrent_states(layers) -> list[torch.Tensor]:
    """Every state of every recurrent layer among `layers`, `[R, ...]` each."""
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    nests = [nest for layer in recurrent for nest in (layer.conv_states, layer.recurrent_states)]
    held = [state for nest in nests for state in nest.values()]
    return [state for state in held if state is not None]


def _copy(into: list[torch.Tensor], states: list[torch.Tensor]) -> None:
    if states:
        torch._foreach_copy_(into, states)


def _tokens(value, size: int, start: int, stop: int):
    """The part for tokens `start..stop - 1` of a module's inputs for `size` tokens, `[R, size, ...]`."""
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == size:
        return value[:, start:stop]
    if isinstance(value, tuple):
        return tuple(_tokens(item, size, start, stop) for item in value)
    if isinstance(value, dict):
        return {name: _tokens(item, size, start, stop) for name, item in value.items()}
    return value


def moving_modules(target) -> dict[str, int]:
    """
    Names of the innermost modules that update a recurrent state, each with the index of its layer; found by observing
    a short forward.
    """
    cache, running, found = empty_cache(target), [], {}

    def watched(update):
        def watch(states, layer_idx, *args, **kwargs):
            found[running[-1]] = layer_idx
            return update(states, layer_idx, *args, **kwargs)

        return watch

    cache.update_conv_state = watched(cache.update_conv_state)
    cache.update_recurrent_state = watched(cache.update_recurrent_state)
    with isolated(target, target.modules()) as own:
        for name, module in own.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
            module.register_forward_hook(lambda *_: running.pop() and None)
        try_out(own, cache)
    return found
