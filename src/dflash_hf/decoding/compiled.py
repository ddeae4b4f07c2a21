"""
Compiled forwards: one graph of each model for drafts of one size and each bucket of slots, used for every prompt.
"""

import functools
import weakref

import torch
from transformers.utils import logging

from dflash_hf.decoding.strategy import Fixed
from dflash_hf.modeling.cache_dflash import SlotCache
from dflash_hf.modeling.drafting_dflash import Context, Drafter
from dflash_hf.modeling.generation_dflash import Call
from dflash_hf.modeling.session_dflash import SlotSession
from dflash_hf.modeling.target_dflash import traced
from dflash_hf.modeling.text_dflash import Text


logger = logging.get_logger(__name__)

_GRAPHS = 1024  # at most, of both forwards; torch gives up after 8: those of one pair and a few numbers of rows
_MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune")
# The modes and backends that could not compile the forward of a model, with a line to log, until it is logged.
_failed: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


class Buckets(SlotCache):
    """Slots for graphs: capacities are powers of two, and attention sees all of them."""

    SMALLEST = 256

    def __init__(self, rows: int, capacity: int, ring=None):
        super().__init__(rows, max(self.SMALLEST, 1 << capacity.bit_length()) - 1, ring)

    def reserve(self, used: int) -> None:
        if used >= self.capacity:
            self._resize(1 << used.bit_length())
        self.view = self.capacity


@functools.cache
def _compiled(function, how: str):
    """A compiled function. Its guards are torch's own; there is one graph per pair, bucket and number of rows."""
    options = {"mode": how} if how in _MODES else {"backend": how}
    try:
        return torch.compile(function, fullgraph=True, dynamic=False, **options)
    except torch._dynamo.exc.InvalidBackend as error:
        raise ValueError(
            f"decoding_config.compile={how!r} must be True, a mode of torch.compile ({', '.join(_MODES)}) or one of "
            f"its backends ({', '.join(torch.compiler.list_backends())})."
        ) from error


def _verified(target, tap, inputs: dict):
    traced.append(tap)
    try:
        logits = target(**inputs).logits
    finally:
        traced.pop()
    return logits, tap.take()


def _drafted(draft, inputs: dict):
    return draft(**inputs).last_hidden_state


def _run(function, how: str, model, *args):
    """Run a compiled function, or, if that fails, the function itself."""
    failed = _failed.setdefault(model, {})
    if how in failed:
        return function(model, *args)
    try:
        if model.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        with torch._dynamo.config.patch(recompile_limit=_GRAPHS, accumulated_recompile_limit=_GRAPHS):
            output = _compiled(function, how)(model, *args)
        clone = functools.partial(torch.utils._pytree.tree_map_only, torch.Tensor, torch.clone)
        return clone(output) if model.device.type == "cuda" else output  # the next replay overwrites it
    except (ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        output = function(model, *args)  # raises an error that is not the compiler's again
        failed[how] = f"Decoding eagerly: {type(model).__name__} cannot be compiled ({str(error).strip()[:200]})."
        return output


class CompiledSession(SlotSession):
    """A session that verifies by a graph; the arguments are the mode or backend, then those of [`SlotSession`]."""

    CACHE = Buckets

    def __init__(self, how: str, *args):
        super().__init__(*args)
        self.how = how

    def _forward(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self.tap.running():  # for a forward that cannot be compiled
            return _run(_verified, self.how, self.target, self.tap, inputs)


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
        self.how = how

    def _forward(self, **inputs) -> torch.Tensor:
        return _run(_drafted, self.how, self.draft, inputs)


class Compiled(Fixed):
    """Whole blocks, or trees of one size, by graphs, where a target can be rolled back in slots alone."""

    def __init__(self, call: Call):
        super().__init__(call)
        asked, on_gpu = call.draft.decoding_config.compile, call.target.device.type == "cuda"
        self.how = asked if isinstance(asked, str) else "reduce-overhead" if on_gpu else "default"

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the forwards can be compiled; not asked before it is known that the call drafts."""
        call = self.call
        ends = call.rules.max_new + self.nodes + call.draft.config.block_tokens >= self.positions_left
        if ends or self.support.session is not SlotSession:
            why = (
                f"the text may pass its {self.positions_left + call.columns} positions"
                if ends
                else "its states are recurrent"
            )
            logger.warning_once(f"The forwards of {type(call.target).__name__} are not compiled: {why}.")
            return False
        return True

    def drafter(self) -> Drafter:
        call = self.call
        return CompiledDrafter(self.how, call.draft, call.target, call.rules.noise) if self.fits else super().drafter()

    def session(self, *prompt) -> SlotSession:
        return CompiledSession(self.how, self.call.target, *prompt) if self.fits else super().session(*prompt)

    def summary(self) -> dict:
        for model in (self.call.target, self.call.draft):  # now: not in the middle of a text that is streamed
            failed = _failed.get(model, {})
            if failed.get(self.how):
                logger.warning(failed[self.how])
                failed[self.how] = ""
        return super().summary()

    def trees(self, text: Text) -> bool:
        return self.support.trees if self.fits else super().trees(text)

    def room(self, text: Text) -> int:
        return max(self.size, text.left) if self.fits else super().room(text)
