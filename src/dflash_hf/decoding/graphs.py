"""
Compiled forwards: one graph of each model for drafts of one size and each bucket of slots, used for every prompt.

What Dynamo does not guard must not change under a graph. Hooks and forwards replaced on an instance decode eagerly,
with a line that says so (`no_graph_reason`). Everything else that a forward depends on without a guard is part of a
graph's key: see [`ModelGraphs`].
"""

import collections
import types
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from transformers.utils import logging

from dflash_hf.decoding.adapters import adapters_of
from dflash_hf.decoding.attention import takes_slot_masks
from dflash_hf.decoding.call import GenerateCall
from dflash_hf.decoding.session import SlotSession
from dflash_hf.targets.unsafe_hooks import collects_features


logger = logging.get_logger(__name__)

_MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune")
# The graphs of each model, as long as it lives. Without a lock: Dynamo compiles in one thread at a time, and at worst
# two threads make the same graph.
_graphs: "weakref.WeakKeyDictionary[nn.Module, ModelGraphs]" = weakref.WeakKeyDictionary()


class CallGraphs:
    """
    The compiled forwards of one call.

    Args:
        call (`GenerateCall`): The call.
        mode (`str`): A mode or backend of `torch.compile`.
    """

    def __init__(self, call: GenerateCall, mode: str):
        self.call = call
        self.mode = mode

    @classmethod
    def for_call(cls, call: GenerateCall) -> "CallGraphs | None":
        """The graphs of a call that asks for them, or `None`. If they cannot be made, the reason is logged."""
        mode = call.draft.decoding_config.compile
        if not mode:
            return None
        for model, reason in _no_graph_reasons(call):
            if reason is not None:
                logger.warning_once(f"The forwards of {type(model).__name__} are not compiled: {reason}.")
                return None
        if not isinstance(mode, str):
            mode = "reduce-overhead" if call.target.device.type == "cuda" else "default"
        return cls(call, mode)

    def drafter_forward(self) -> "CompiledForward":
        """The drafter's forward; `run` takes its inputs."""
        return CompiledForward(self.call.draft, _draft, self.mode)

    def target_forward(self, layer_ids: tuple[int, ...]) -> "CompiledForward":
        """The target's forward and the features of these layers; `run` takes the tap and the inputs."""
        return CompiledForward(self.call.target, _verify, self.mode, layer_ids)

    def log_failures(self) -> None:
        """Log what could not be compiled; called after the streamed text, not inside it."""
        for model in (self.call.target, self.call.draft):
            messages = ModelGraphs.for_model(model).messages
            if messages.get(self.mode):
                logger.warning(messages[self.mode])
                messages[self.mode] = ""


def _no_graph_reasons(call: GenerateCall) -> Iterator[tuple[nn.Module, str | None]]:
    """The models of a call, each with a reason why its forward cannot be compiled, or `None`."""
    nodes = call.draft.decoding_config.tree_nodes or 0
    if call.selector.max_new_tokens + nodes + call.draft.config.max_block_tokens >= call.positions_after_prompt:
        yield call.target, f"the text may exceed its {call.positions_after_prompt + call.prompt_length} positions"
    if call.capabilities.session is not SlotSession:
        yield call.target, "its states are recurrent"
    attention = call.target.config.get_text_config()._attn_implementation
    if not takes_slot_masks(attention):
        yield call.target, f"{attention} takes no mask of a draft"
    for model in (call.target, call.draft):
        yield model, no_graph_reason(model)


def no_graph_reason(model: nn.Module) -> str | None:
    """
    Why a model's forward is not compiled, or `None`: something changes it without invalidating earlier graphs. Dynamo
    guards no hooks (PEFT's `adapter_names` are hooks), and not every replaced forward.
    """
    if global_hooks._has_any_global_hook():
        return "a hook is registered on all modules"
    for module in model.modules():
        if "forward" in vars(module):
            return f"the forward of a {type(module).__name__} is replaced"
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not all(collects_features(hook) for hook in hooks):
            return f"a hook is registered on a {type(module).__name__}"
    return None


class ModelGraphs:
    """
    The graphs of one model, as long as it lives.

    Each has a function of its own, so that Dynamo checks the guards of one graph instead of all, and no recompilation
    limit has to be raised for the whole process. The key of a graph: the mode, the shapes of its inputs, and what its
    guards do not cover, which is the forward of each class, the attention, the adapters, and the layers that are read.

    Attributes:
        failures (`Counter`): How often each graph could not be made.
        messages (`dict[str, str]`): Mode -> what to log of its first failure; empty once it was logged.
    """

    MAX_ATTEMPTS = 2  # the first failure may be temporary: a full disk, a compiler that was killed

    def __init__(self):
        self.compiled: dict[tuple, Callable] = {}
        self.failures: collections.Counter = collections.Counter()
        self.messages: dict[str, str] = {}

    @classmethod
    def for_model(cls, model: nn.Module) -> "ModelGraphs":
        """The graphs of a model, shared by its calls."""
        return _graphs.setdefault(model, cls())

    def compiled_for(self, function: Callable, mode: str, key: tuple) -> Callable | None:
        """A function, compiled for one graph; `None` if that failed too often."""
        key = (mode, *key)
        if self.failures[key] >= self.MAX_ATTEMPTS:
            return None
        if key not in self.compiled:
            self.compiled[key] = _compile(function, mode)
        return self.compiled[key]

    def record_failure(self, mode: str, key: tuple, message: str) -> None:
        """Count that a graph could not be made, and keep the first message of a mode for the log."""
        key = (mode, *key)
        self.failures[key] += 1
        self.compiled.pop(key, None)
        self.messages.setdefault(mode, message)


def _compile(function: Callable, mode: str) -> Callable:
    """A compiled copy of a function: Dynamo keeps graphs with a function's code."""
    copied = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    options = {"mode": mode} if mode in _MODES else {"backend": mode}
    try:
        return torch.compile(copied, fullgraph=True, dynamic=False, **options)
    except torch._dynamo.exc.InvalidBackend as error:
        raise ValueError(
            f"decoding_config.compile={mode!r} must be True, a mode of torch.compile ({', '.join(_MODES)}) or one of "
            f"its backends ({', '.join(torch.compiler.list_backends())})."
        ) from error


class CompiledForward:
    """
    A model's forward in one call: its graphs, or, after an error of the compiler, the forward itself.

    Args:
        model (`PreTrainedModel`): Whose forward.
        function (`Callable`): What is compiled; called with the model and the arguments of [`run`].
        mode (`str`): A mode or backend of `torch.compile`.
        layer_ids (`tuple[int]`): The layers of the model whose outputs `function` reads.
    """

    def __init__(self, model, function: Callable, mode: str, layer_ids: tuple[int, ...] = ()):
        self.model = model
        self.function = function
        self.mode = mode
        self.graphs = ModelGraphs.for_model(model)
        self.eager = False
        forwards = frozenset((kind, kind.forward) for kind in {type(module) for module in model.modules()})
        attention = model.config.get_text_config()._attn_implementation
        self.key = (function.__name__, layer_ids, forwards, attention, adapters_of(model))

    def run(self, shapes: tuple, *arguments):
        """
        Run the graph for inputs of these shapes.

        Args:
            shapes (`tuple`): The sizes that the graph depends on.
            arguments: Arguments of the function, after the model.
        """
        key = (*self.key, shapes)
        compiled = None if self.eager else self.graphs.compiled_for(self.function, self.mode, key)
        if compiled is None:
            return self.function(self.model, *arguments)
        on_cuda = self.model.device.type == "cuda"
        try:
            if on_cuda:
                torch.compiler.cudagraph_mark_step_begin()
            output = compiled(self.model, *arguments)
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            output = self.function(self.model, *arguments)  # raises the error again if it is not the compiler's
            self.eager = True  # for the rest of this call
            reason = str(error).strip()[:200]
            message = f"Decoding eagerly: {type(self.model).__name__} cannot be compiled ({reason})."
            self.graphs.record_failure(self.mode, key, message)
            return output
        if on_cuda:  # the next replay overwrites it
            return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, output)
        return output


def _verify(target, tap, inputs: dict):
    if not torch.compiler.is_dynamo_compiling():  # torch.compile is disabled: this runs as eager code
        with tap.running():
            logits = target(**inputs).logits
        return logits, tap.take()
    with tap.tracing():
        logits = target(**inputs).logits
    return logits, tap.take()


def _draft(draft, inputs: dict):
    return draft(**inputs).last_hidden_state
