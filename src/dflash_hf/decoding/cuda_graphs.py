"""
CUDA graphs of one call: the forwards of both models are captured once for each size of draft, and replayed.

A graph launches its kernels again with the same arguments, at the same addresses. So the slots of a call have fixed
shapes, and all that changes from round to round, tokens and lengths, is copied into memory that the graph reads. What
is constant in a call, positions or padding for example, the graph just holds. Graphs end with their call: they hold
addresses of its slots. To capture costs the host time, as launching does, so a size that occurs once is not captured.
"""

import collections
import itertools
import threading
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree
from transformers.utils import logging

from dflash_hf.decoding.call import GenerateCall
from dflash_hf.decoding.graphs import no_graph_reason
from dflash_hf.decoding.session import SlotSession


logger = logging.get_logger(__name__)

_capturing = threading.Lock()  # torch captures in one thread at a time


class CallCudaGraphs:
    """
    The CUDA graphs of one call.

    Attributes:
        target, drafter ([`ModelCudaGraphs`]): Of each model.
    """

    def __init__(self):
        pool = torch.cuda.graph_pool_handle()
        self.target = ModelCudaGraphs(pool)
        self.drafter = ModelCudaGraphs(pool)

    @classmethod
    def for_call(cls, call: GenerateCall) -> "CallCudaGraphs | None":
        """The graphs of a call that asks for them, or `None`. If it cannot have them, the reason is logged."""
        if not call.draft.decoding_config.cuda_graphs:
            return None
        reason = _no_cuda_graph_reason(call)
        if reason is not None:
            logger.warning_once(f"Decoding without CUDA graphs: {reason}.")
            return None
        return cls()

    def log_failures(self) -> None:
        """Log once what could not be captured; called after the streamed text, not inside it."""
        for graphs in (self.target, self.drafter):
            if graphs.failure is not None:
                logger.warning_once(f"Some rounds run without CUDA graphs: {graphs.failure}.")


class ModelCudaGraphs:
    """
    The CUDA graphs of one model in one call.

    Args:
        pool: The handle of the memory that its graphs share, from `torch.cuda.graph_pool_handle`.
    """

    MAX_GRAPHS = 12  # each keeps the memory of its results: rounds of further sizes run without a graph
    MIN_ROUNDS = 2  # of one size, from which a graph is captured: one round may be the only one

    def __init__(self, pool):
        self.pool = pool
        self.graphs: dict[tuple, CudaGraph] = {}
        self.rounds: collections.Counter = collections.Counter()  # by key
        self.num_slots = 0
        self.failure: str | None = None

    def run(self, num_slots: int, key: tuple, function: Callable, *inputs):
        """
        Run a function, by a graph if there is one.

        Args:
            num_slots (`int`): Slots of the model's cache. With another number the slots have moved, so graphs that
                were captured before are dropped.
            key (`tuple`): All else that decides which kernels run: sizes. In one call, equal keys must mean equal
                shapes.
            function (`Callable`): Launches kernels, and neither waits for the device nor copies to it.
            inputs: Its arguments, tensors and tuples of them.
        """
        if num_slots != self.num_slots:
            self.graphs.clear()
            self.rounds.clear()
            self.num_slots = num_slots
        graph = self.graphs.get(key)
        if graph is None:
            self.rounds[key] += 1
            is_new = self.rounds[key] < self.MIN_ROUNDS
            if is_new or self.failure is not None or len(self.graphs) == self.MAX_GRAPHS:
                return function(*inputs)
            try:
                graph = CudaGraph(function, inputs, self.pool)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # something in the model waits for the device
                self.failure = str(error).strip()[:200]
                return function(*inputs)
            self.graphs[key] = graph
        return graph.replay(inputs)


class CudaGraph:
    """
    A captured function.

    Args:
        function (`Callable`): Called once, while its kernels are captured.
        inputs (`tuple`): Arguments of the shapes that it will be replayed with.
        pool: As for [`ModelCudaGraphs`].

    Raises:
        `RuntimeError`: it cannot be captured.
    """

    def __init__(self, function: Callable, inputs: tuple, pool):
        captured = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
        self.inputs = _tensors_in(captured)
        self.graph = torch.cuda.CUDAGraph()
        # As `torch.cuda.graph`, which also empties the allocator's cache and collects garbage before each capture.
        device = self.inputs[0].device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with _capturing, torch.cuda.stream(stream):
            # Other threads may go on: what they ask of the device is not in the graph.
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.outputs = function(*captured)
            finally:
                self.graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)

    def replay(self, inputs: tuple):
        """The function's results for other inputs, in memory of their own."""
        for captured, value in zip(self.inputs, _tensors_in(inputs), strict=True):
            captured.copy_(value)
        self.graph.replay()
        return pytree.tree_map_only(torch.Tensor, torch.clone, self.outputs)


def _tensors_in(values: tuple) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _no_cuda_graph_reason(call: GenerateCall) -> str | None:
    if call.capabilities.session is not SlotSession:
        return f"the states of {type(call.target).__name__} are recurrent"
    parameters = itertools.chain(call.target.parameters(), call.draft.parameters())
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1 or next(iter(devices)).type != "cuda":
        return f"the models are on {', '.join(sorted(map(str, devices)))}, not on one CUDA device"
    for model in (call.target, call.draft):
        reason = no_graph_reason(model)
        if reason is not None:
            return reason
    return None
