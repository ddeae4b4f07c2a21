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


class StateTape:
    """
    A record of what a verification did to the recurrent states of a cache, so that part of it can be undone.

    Args:
        cache (`Cache`): The cache that the target is called with.
        modules (`dict[nn.Module, int]`): Modules that update a state, each with its layer; see [`moving_modules`].
            They must be private to the caller: their hooks are never removed.
    """

    def __init__(self, cache: Cache, modules: dict):
        self.layers, self.modules = cache.layers, modules
        self.saved: list[torch.Tensor] = []
        self.calls: list[tuple] = []
        self.size = 0  # tokens of the forward being recorded
        self._hook()

    @property
    def states(self) -> list[torch.Tensor]:
        return recurrent_states(self.layers)

    def start(self, size: int) -> None:
        """Save the states, and record the modules' inputs in the next forward, over `size` tokens."""
        if self.saved:
            _copy(self.saved, self.states)
        else:
            self.saved = [state.clone() for state in self.states]
        self.calls.clear()
        self.size = size

    def stop(self) -> None:
        self.size = 0

    def rewind(self, size: int, kept: list[int]) -> None:
        """
        Set each row's states to those after the first `kept[row]` of the `size` recorded tokens.

        Rows that keep the same number are advanced together: one pass for each number below `size`.
        """
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

    def _hook(self) -> None:
        def tape(module, args, kwargs):
            if self.size:
                self.calls.append((module, args, kwargs))

        for module in self.modules:
            module.register_forward_pre_hook(tape, with_kwargs=True)

    def _go_back(self, size: int, count: int) -> None:
        _copy(self.states, self.saved)
        if count > 0:
            for module, args, kwargs in self.calls:
                module(*_tokens(args, size, 0, count), **_tokens(kwargs, size, 0, count))


class StepTape(StateTape):
    """
    For modules that lose their state when they receive several tokens: they receive one token at a time, and the
    intermediate states are kept, so that rolling back recomputes nothing.
    """

    def start(self, size: int) -> None:
        super().start(size)
        self.between = {layer_idx: [] for layer_idx in self.modules.values()}  # layer -> its states after each token
        self.whole: dict = {}  # module -> its inputs

    def _hook(self) -> None:
        def first(module, args, kwargs):
            if not self.size or module in self.whole:
                return None
            self.whole[module] = args, kwargs
            return _tokens(args, self.size, 0, 1), _tokens(kwargs, self.size, 0, 1)

        def others(module, args, kwargs, output):
            if not self.size:
                return None
            layer_idx = self.modules[module]
            self.between[layer_idx].append([state.clone() for state in recurrent_states([self.layers[layer_idx]])])
            if len(self.between[layer_idx]) > 1:  # called from the loop below
                return None
            outputs, (args, kwargs) = [output], self.whole[module]
            for step in range(1, self.size):
                span = (self.size, step, step + 1)
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
            _copy(recurrent_states([self.layers[layer_idx]]), between[count - 1])


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


class ReplaySession(SlotSession):
    """
    A target with recurrent layers, whose states are restored and advanced over the accepted tokens.

    Args:
        moving (`dict[str, int]`): From [`moving_modules`]; the modules of these names must be private to the caller.
    """

    tape_class = StateTape
    rollback_is_free = False

    def __init__(self, target, *args, moving):
        super().__init__(target, *args)
        modules = {target.get_submodule(name): layer_idx for name, layer_idx in moving.items()}
        self.tape = self.tape_class(self.cache, modules)
        self.pending = None  # [R], size: start and size of a verification that is not committed yet

    @staticmethod
    def takes(cache: Cache) -> bool:
        """Whether a session can be opened on such a cache."""
        return not any(isinstance(layer, _FIXED) for layer in cache.layers)

    def verify(self, draft: Draft, start: torch.LongTensor):
        size = draft.tokens.shape[1]
        self.pending = start, size
        self.tape.start(size)
        try:
            return super().verify(draft, start)
        finally:
            self.tape.stop()

    def commit(self, start: torch.LongTensor, verdict: Verdict) -> None:
        self._keep(verdict.counts.tolist())

    def close(self, columns: int) -> Cache:
        if self.pending is not None:  # interrupted between verification and commit
            start, _ = self.pending
            self._keep([columns - pad - n for pad, n in zip(self.padding, start.tolist(), strict=True)])
        return super().close(columns)

    def _keep(self, counts: list[int]) -> None:
        self.tape.rewind(self.pending[1], counts)
        self.pending = None


class StepSession(ReplaySession):
    """A target with recurrent layers that continue from a state only one token at a time, such as Mamba's."""

    tape_class = StepTape
