"""
Compiled forwards: one graph of each model for drafts of one size and each bucket of slots, used for every prompt.

What Dynamo does not guard must not change under a graph. Hooks and forwards replaced on an instance decode eagerly,
with a line that says so (`why_not_compiled`). Everything else that a forward depends on without a guard is part of a
graph's key: see [`Graphs`].
"""

import collections
import functools
import types
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from transformers.utils import logging

from dflash_hf.decoding.costs import adapters_of
from dflash_hf.decoding.strategy import Fixed
from dflash_hf.modeling.cache_dflash import SlotCache
from dflash_hf.modeling.drafting_dflash import Context, Drafter
from dflash_hf.modeling.generation_dflash import Call
from dflash_hf.modeling.session_dflash import SlotSession
from dflash_hf.modeling.target_dflash import is_tap, traced
from dflash_hf.modeling.text_dflash import Text


logger = logging.get_logger(__name__)

_MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune")
_graphs: "weakref.WeakKeyDictionary[nn.Module, Graphs]" = weakref.WeakKeyDictionary()


class Buckets(SlotCache):
    """Slots for graphs: capacities are powers of two, and attention sees all of them."""

    SMALLEST = 256

    def __init__(self, rows: int, capacity: int, ring=None):
        super().__init__(rows, max(self.SMALLEST, 1 << capacity.bit_length()) - 1, ring)

    def reserve(self, used: int) -> None:
        if used >= self.capacity:
            self._resize(1 << used.bit_length())
        self.view = self.capacity


def why_not_compiled(model: nn.Module) -> str | None:
    """
    What changes a model's forward unseen by graphs that were made before, or `None`: Dynamo guards no hooks (PEFT's
    `adapter_names` are hooks), and not every forward that was replaced.
    """
    if global_hooks._has_any_global_hook():
        return "a hook lies on all modules"
    for module in model.modules():
        if "forward" in vars(module):
            return f"the forward of a {type(module).__name__} is replaced"
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not all(is_tap(hook) for hook in hooks):
            return f"a hook lies on a {type(module).__name__}"
    return None


class Graphs:
    """
    The graphs of one model, as long as it lives.

    Each has a function of its own, so that Dynamo looks at the guards of one graph instead of all, and no limit of
    recompilations has to be raised for the whole process. A graph is looked up by the mode, by the shape of its
    inputs, and by what its guards do not cover: the forward of each class, the attention, the adapters, and the layers
    that are read.

    Attributes:
        failures (`Counter`): How often each graph could not be made.
        messages (`dict[str, str]`): Mode -> what to log of its first failure; empty once it was logged.
    """

    ATTEMPTS = 2  # the first failure may have been a passing one: a full disk, a compiler that was killed

    def __init__(self):
        self.compiled: dict[tuple, Callable] = {}
        self.failures: collections.Counter = collections.Counter()
        self.messages: dict[str, str] = {}

    @classmethod
    def of(cls, model: nn.Module) -> "Graphs":
        """The graphs of a model."""
        return _graphs.setdefault(model, cls())

    def function(self, function: Callable, how: str, key: tuple) -> Callable | None:
        """A function, compiled for one graph; `None` if that failed too often."""
        key = (how, *key)
        if self.failures[key] >= self.ATTEMPTS:
            return None
        if key not in self.compiled:
            self.compiled[key] = _compiled(function, how)
        return self.compiled[key]

    def failed(self, how: str, key: tuple, message: str) -> None:
        """Note that a graph could not be made."""
        key = (how, *key)
        self.failures[key] += 1
        self.compiled.pop(key, None)
        self.messages.setdefault(how, message)


def _compiled(function: Callable, how: str) -> Callable:
    """A compiled copy of a function: Dynamo keeps graphs with a function's code."""
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    options = {"mode": how} if how in _MODES else {"backend": how}
    try:
        return torch.compile(own, fullgraph=True, dynamic=False, **options)
    except torch._dynamo.exc.InvalidBackend as error:
        raise ValueError(
            f"decoding_config.compile={how!r} must be True, a mode of torch.compile ({', '.join(_MODES)}) or one of "
            f"its backends ({', '.join(torch.compiler.list_backends())})."
        ) from error


class Forward:
    """
    A model's forward in one call: its graphs, or, after an error of the compiler, the forward itself.

    Args:
        model (`PreTrainedModel`): Whose forward.
        function (`Callable`): What is compiled; called with the model and the arguments of [`run`].
        how (`str`): A mode or backend of `torch.compile`.
        layer_ids (`tuple[int]`): The layers of the model whose outputs `function` reads.
    """

    def __init__(self, model, function: Callable, how: str, layer_ids: tuple[int, ...] = ()):
        self.model, self.compiles, self.how = model, function, how
        self.graphs = Graphs.of(model)
        self.eager = False
        forwards = frozenset((kind, kind.forward) for kind in {type(module) for module in model.modules()})
        attention = model.config.get_text_config()._attn_implementation
        self.state = (function.__name__, layer_ids, forwards, attention, adapters_of(model))

    def run(self, eagerly: Callable, shape: tuple, *arguments):
        """
        Run the graph for inputs of this shape.

        Args:
            eagerly (`Callable`): Gives the same without a graph.
            shape (`tuple`): What the graph depends on besides the model.
        """
        key = (*self.state, shape)
        compiled = None if self.eager else self.graphs.function(self.compiles, self.how, key)
        if compiled is None:
            return eagerly()
        on_cuda = self.model.device.type == "cuda"
        try:
            if on_cuda:
                torch.compiler.cudagraph_mark_step_begin()
            output = compiled(self.model, *arguments)
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            output = eagerly()  # raises an error that is not the compiler's again
            self.eager = True  # for the rest of this call
            reason = str(error).strip()[:200]
            message = f"Decoding eagerly: {type(self.model).__name__} cannot be compiled ({reason})."
            self.graphs.failed(self.how, key, message)
            return output
        if on_cuda:  # the next replay overwrites it
            return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, output)
        return output


def _verified(target, tap, inputs: dict):
    if not torch.compiler.is_dynamo_compiling():  # Dynamo is switched off, and this is not a graph
        with tap.running():
            logits = target(**inputs).logits
        return logits, tap.take()
    traced.append(tap)
    try:
        logits = target(**inputs).logits
    finally:
        traced.pop()
    return logits, tap.take()


def _drafted(draft, inputs: dict):
    return draft(**inputs).last_hidden_state


class CompiledSession(SlotSession):
    """A session that verifies by a graph; the arguments are the mode or backend, then those of [`SlotSession`]."""

    CACHE = Buckets

    def __init__(self, how: str, *args):
        super().__init__(*args)
        self.forward = Forward(self.target, _verified, how, self.tap.layer_ids)

    def _forward(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (inputs["input_ids"].shape, self.cache.view)
        return self.forward.run(lambda: super(CompiledSession, self)._forward(inputs), shape, self.tap, inputs)


class PaddedContext(Context):
    """A context that always reads as many features as a block has tokens."""

    CACHE = Buckets

    def collected(self) -> tuple[torch.Tensor, torch.LongTensor]:
        features, tokens = super().collected()
        if features is None:
            width = self.draft.fc.in_features
            features = torch.zeros(len(tokens), 0, width, dtype=self.dtype, device=tokens.device)
        missing = max(self.draft.config.block_tokens - tokens.shape[1], 0)
        padded = torch.nn.functional.pad(features, (0, 0, 0, missing))
        return padded, torch.nn.functional.pad(tokens, (0, missing), value=-1)


class CompiledDrafter(Drafter):
    """A drafter that runs as a graph; the arguments are the mode or backend, then those of [`Drafter`]."""

    CONTEXT = PaddedContext

    def __init__(self, how: str, *args):
        super().__init__(*args)
        self.forward = Forward(self.draft, _drafted, how)

    def _forward(self, **inputs) -> torch.Tensor:
        shape = (inputs["noise_embeds"].shape, inputs["context_hidden_states"].shape, self.context.cache.view)
        return self.forward.run(lambda: super(CompiledDrafter, self)._forward(**inputs), shape, inputs)


class Compiled(Fixed):
    """Whole blocks, or trees of one size, by graphs, where a target can be rolled back in slots alone."""

    def __init__(self, call: Call):
        super().__init__(call)
        asked, on_gpu = call.draft.decoding_config.compile, call.target.device.type == "cuda"
        self.how = asked if isinstance(asked, str) else "reduce-overhead" if on_gpu else "default"

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the forwards can be compiled; not asked before it is known that the call drafts."""
        for model, reason in self._reasons():
            if reason is not None:
                logger.warning_once(f"The forwards of {type(model).__name__} are not compiled: {reason}.")
                return False
        return True

    def _reasons(self):
        """Yields the models, and why their forwards cannot be compiled."""
        call, target = self.call, self.call.target
        if call.rules.max_new + self.nodes + call.draft.config.block_tokens >= self.positions_left:
            yield target, f"the text may pass its {self.positions_left + call.columns} positions"
        if self.support.session is not SlotSession:
            yield target, "its states are recurrent"
        for model in (target, call.draft):
            yield model, why_not_compiled(model)

    def drafter(self) -> Drafter:
        if not self.fits:
            return super().drafter()
        call = self.call
        return CompiledDrafter(self.how, call.draft, call.target, call.rules.noise, self.size)

    def session(self, *prompt) -> SlotSession:
        return CompiledSession(self.how, self.call.target, *prompt) if self.fits else super().session(*prompt)

    def summary(self) -> dict:
        for model in (self.call.target, self.call.draft):  # now: not in the middle of a text that is streamed
            messages = Graphs.of(model).messages
            if messages.get(self.how):
                logger.warning(messages[self.how])
                messages[self.how] = ""
        return super().summary()

    def trees(self, text: Text) -> bool:
        return self.support.trees if self.fits else super().trees(text)

    def room(self, text: Text) -> int:
        return max(self.size, text.left) if self.fits else super().room(text)
