"""
Compiled rounds: one graph of fixed shape for each bucket of slots, compiled once and used for every prompt.
"""

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.utils import logging

from .target_dflash import methods_of


logger = logging.get_logger(__name__)

_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_MODES = ("default", "max-autotune-no-cudagraphs", *_CUDA_GRAPHS)

# For each model, the slots that finished calls returned; for each drafter and target, the modes and backends that
# could not compile a round.
_pools: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()
_failed: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


def failed_on(target, draft) -> set:
    """The values of `decoding_config.compile` that failed to compile a round of this pair."""
    return _failed.setdefault(draft, weakref.WeakKeyDictionary()).setdefault(target, set())


@contextlib.contextmanager
def slots_of(model):
    """Borrow slots for one call: those of a finished call, or new ones."""
    idle = _pools.setdefault(model, [])
    try:
        pool = idle.pop()
    except IndexError:
        pool = {}
    try:
        yield pool
    finally:
        idle.append(pool)


@functools.cache
def _compiled(function: Callable, how: str, methods: frozenset) -> tuple[Callable, Callable]:
    """
    A compiled function, and the copy of the function whose code owns its graphs. Pairs with the same `methods` share
    it; there is one graph per pair, bucket, number of rows and drafting method.
    """
    code = function.__code__.replace()
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    options = {"mode": how} if how in _MODES else {"backend": how}
    try:
        return torch.compile(copy, fullgraph=True, dynamic=False, **options), copy
    except torch._dynamo.exc.InvalidBackend as error:
        raise ValueError(
            f"decoding_config.compile={how!r} must be True, a mode of torch.compile ({', '.join(_MODES)}) or one of "
            f"its backends ({', '.join(torch.compiler.list_backends())})."
        ) from error


class CompiledRound:
    """
    A round as a graph; a round that cannot be compiled runs eagerly, and a warning says so.

    Within a call, a graph depends on nothing that changes but the capacities of the caches and the plan of a round.
    Both identify a graph, whose guards are checked once.

    Args:
        function (`callable`): The round, or a part of it.
        eagerly (`callable`): The same function without compilation.
        target (`PreTrainedModel`), draft (`DFlashDraftModel`): The pair whose round it is.
        asked (`str` or `bool`): `decoding_config.compile`; `True` is torch's default, with CUDA graphs on a GPU.
        caches (sequence of `SlotCache`): The caches whose capacities identify a graph.
    """

    def __init__(self, function: Callable, eagerly: Callable, target, draft, asked: str | bool, caches):
        self.function, self.eagerly, self.target, self.caches = function, eagerly, target, caches
        self.asked, self.failed = asked, failed_on(target, draft)
        on_gpu = target.device.type == "cuda"
        how = asked if isinstance(asked, str) else "reduce-overhead" if on_gpu else "default"
        # Graphs guard hooks and attributes of each module, but not its class's methods. Dynamo itself replaces two.
        methods = methods_of(target) - {nn.Module.__init__, nn.Module.__setstate__}
        self.compiled, self.copy = _compiled(function, how, frozenset(map(weakref.ref, methods)))
        self.graphs_replay = on_gpu and how in _CUDA_GRAPHS
        self.graphs: dict[tuple, Callable] = {}

    def __call__(self, pair, start, context, plan):
        if not plan.compiled:  # and not in inference mode, whose tensors would need separate graphs
            return self.function(pair, start, context, plan)
        context = context if plan.drafts else None  # a round that drafts nothing reads none
        width = context and context.features.shape[1]
        key = (*(cache.capacity for cache in self.caches), *plan.key, width)
        if key not in self.graphs:
            return self._first(key, pair, start, context, plan)
        return self._replayed(self.graphs[key], (pair, start, context, plan))

    def _first(self, key: tuple, *args):
        kind, rows, slots = type(self.target).__name__, self.caches[0].rows, max(c.capacity for c in self.caches)
        logger.warning_once(
            f"Compiling a round of {kind} for {rows} row(s) of {slots} slots. This takes a while, once."
        )
        try:
            with torch._dynamo.config.patch(
                recompile_limit=256, accumulated_recompile_limit=1024, skip_nnmodule_hook_guards=False
            ):
                output = self._replayed(self.compiled, args)
            graph = self._graph(args)
            if graph is not None:  # else the guards are checked again in the next round
                self.graphs[key] = graph
            return output
        except Exception as error:
            # The round can simply run again, since it writes the same slots. An error unrelated to compilation is
            # raised again by the eager round.
            self.graphs[key] = self.eagerly
            output = self.eagerly(*args)
            if isinstance(error, torch._dynamo.exc.TorchDynamoException):  # it would fail in every call
                self.failed.add(self.asked)
            first, *others = str(error).strip().split("\n")  # "backend='inductor' raised:", then the reason
            reason = " ".join([first, *others[: first.endswith(":")]])
            logger.warning(
                f"Decoding eagerly: the round of {type(self.target).__name__} cannot be compiled ({reason})."
            )
            return output

    def _graph(self, args) -> Callable | None:
        """The graph that has just run, without its guards; `None` if this version of PyTorch does not expose it."""
        entries = getattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
        if entries is None:
            return None
        bound = inspect.signature(self.copy).bind(*args)
        bound.apply_defaults()
        for entry in entries(self.copy.__code__):
            if entry.guard_manager.check(bound.arguments):
                return types.FunctionType(entry.code, self.copy.__globals__, argdefs=self.copy.__defaults__)
        return None

    def _replayed(self, run: Callable, args):
        if not self.graphs_replay:
            return run(*args)
        torch.compiler.cudagraph_mark_step_begin()
        # The next replay overwrites what this one returns.
        return tree_map_only(torch.Tensor, torch.clone, run(*args))
