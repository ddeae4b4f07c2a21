"""What a target can do for a drafter, found by running it on a few tokens."""

import contextlib
import functools
import inspect
import math
import weakref
from typing import Any, NamedTuple

import torch
from transformers import masking_utils
from transformers.utils import logging

from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.recurrent import ReplaySession
from dflash_hf.decoding.session import SlotSession
from dflash_hf.decoding.slots import Probed, recurrent_states
from dflash_hf.decoding.trees import probe_tree
from dflash_hf.modeling.target_dflash import decoder_layers
from dflash_hf.targets.features import (
    FeatureTap,
    cache_argument,
    empty_cache,
    input_device,
    try_out,
)


logger = logging.get_logger(__name__)


class TargetCapabilities(NamedTuple):
    """
    What a target supports.

    Attributes:
        session (`type`, *optional*): How its cache is rolled back; `None` if no way restores it.
        error (`float`): The largest relative error after rolling back.
        pads (`bool`): Whether rows with padding on the left can be drafted.
        trees (`bool`): Whether trees can be verified.
        features (`frozenset[int]`): Layers with an output of one vector per token, -1: their input.
        failure (`str`, *optional*): Why it could not be tried this time.
        attention (`str`, *optional*): Its attention, if that takes no masks of drafts.
    """

    session: Any
    error: float
    pads: bool = True
    trees: bool = False
    features: frozenset[int] = frozenset()
    failure: str | None = None
    attention: str | None = None

    def fallback_reason(self, name: str, layer_ids: list[int], mask: torch.Tensor | None) -> str | None:
        """Why a drafter that reads these layers cannot draft for a prompt with this mask, or `None`."""
        if self.attention is not None:
            return (
                f"{name} was loaded with attn_implementation={self.attention!r}, which takes no mask of a draft; load "
                "it with attn_implementation='sdpa'"
            )
        if self.failure is not None:
            return f"{name} could not be tried on a few tokens ({self.failure})"
        if not self.features:
            return f"the decoder layers of {name} are in no list, or none has an output of one vector per token"
        if self.session is None:
            if math.isfinite(self.error):
                return (
                    f"{name} computes different logits for several tokens than for one at a time (relative error "
                    f"{self.error:.2g}): its cache cannot be rolled back, or its weights are quantised dynamically"
                )
            return f"the cache of {name} cannot be rolled back"
        for layer_id in layer_ids:
            if max(layer_id, -1) not in self.features:
                return f"decoder layer {layer_id} of {name} is skipped, or has no output of one vector per token"
        if not self.pads and mask is not None and not bool(mask.all()):
            return f"rows of {name} with padding on the left cannot be rolled back"
        return None


def takes_masks(attention: str | None) -> bool:
    """
    Whether an attention implementation takes additive masks `[R, 1, n, S]`, as upstream makes them for it.

    FlashAttention reads a mask as a list of rows: on a GPU an index out of bounds ends the process, so a target with
    it is not even tried. FlexAttention wants a function. An attention of somebody's own gets no masks from upstream,
    and is tried.
    """
    create = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(attention)
    return "flash" not in (attention or "") and create in (None, masking_utils.sdpa_mask, masking_utils.eager_mask)


SESSIONS = (SlotSession, ReplaySession)  # ways to roll a target back, the simplest first
# For each target, as long as it lives: capabilities by everything that they depend on.
_capabilities: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@torch.no_grad()
def capabilities_of(target, sessions: tuple[Any, ...] = SESSIONS, draft_tree=probe_tree) -> TargetCapabilities:
    """
    Try a target once for each attention, dtype and code of its forwards and inputs: a short prompt, a draft with
    rejected tokens, a roll-back and a second draft must give the same logits and states as decoding the kept tokens
    one by one. A target that could not run is tried again by the next call: the cause may pass.

    Args:
        target (`PreTrainedModel`): The target.
        sessions (`tuple[type]`): The kinds of sessions to try, the simplest first.
        draft_tree (`callable`, *optional*): Makes a tree of a block `[R, n]`, and the path of the block in it.
    """
    attention = target.config.get_text_config()._attn_implementation
    if not takes_masks(attention):
        return TargetCapabilities(None, math.inf, attention=attention)
    results = _capabilities.setdefault(target, {})
    key = (sessions, attention, *_computed_by(target))
    if key not in results:
        try:
            results[key] = Probe(target, draft_tree).capabilities(sessions)
        except Exception as error:  # the target itself cannot run on two rows, now
            return TargetCapabilities(None, math.inf, failure=f"{type(error).__name__}: {error}")
    return results[key]


def _computed_by(target) -> tuple:
    """
    What decides how a target computes, besides its attention. Forwards and input preparation are compared by their
    code: quantisation, tensor parallelism and patches replace them on a class or an instance.
    """
    device = input_device(target).type
    forwards = frozenset(kind.forward for kind in {type(module) for module in target.modules()})
    steps = (target.prepare_inputs_for_generation, target._update_model_kwargs_for_generation)
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return target.dtype, forwards, tuple(getattr(step, "__func__", step) for step in steps), autocast


class Probe:
    """
    Finds out what a target supports, by running it on a few tokens.

    Args:
        target (`PreTrainedModel`): The target.
        draft_tree (`callable`, *optional*): As for [`capabilities_of`].
    """

    EXACT = 1e-4  # relative error of rounding
    # Targets that round differently for one token and for several. Nemotron-H differs by 7e-4, another text: it limits
    # time steps in forwards over several tokens only.
    CLOSE = 3e-4
    # Some targets take positions or windows from the length of their cache, or of what attention gets.
    PRETENDED = Probed(view=512, reported_length=1 << 20)

    def __init__(self, target, draft_tree=None):
        self.target = target
        self.draft_tree = draft_tree
        self.device = input_device(target)
        vocab_size = target.config.get_text_config().vocab_size
        tokens = torch.arange(3, 31, device=self.device).view(2, 14)
        self.tokens = tokens * 7 % max(vocab_size - 1, 2)  # no random numbers drawn
        self.counts = [2, 3]  # tokens of the draft that each row keeps

    def capabilities(self, sessions: tuple[Any, ...]) -> TargetCapabilities:
        """The simplest way to roll back, and what it cannot do."""
        features: frozenset[int] = frozenset()
        with contextlib.suppress(ValueError):  # HRM-Text runs two stacks in cycles
            features = self.features()
        best = TargetCapabilities(None, math.inf, features=features)
        expected = functools.cache(self.one_by_one)
        for session in sessions:
            for padding, tree in ((2, True), (2, False), (0, True), (0, False)):
                if tree and (self.draft_tree is None or not session.rollback_is_free):
                    continue
                error = self.error(session, padding, tree, expected(padding))
                if error < self.EXACT:
                    return TargetCapabilities(session, error, padding > 0, tree, features)
                if best.session is None and error < best.error:  # the first that is close, or the best, to tell
                    close = session if error < self.CLOSE else None
                    best = TargetCapabilities(close, error, padding > 0, tree, features)
        return best

    def error(self, session_class: Any, padding: int, tree: bool, expected) -> float:
        """
        The largest relative error of logits and states after rolling back two rows, which keep different numbers of
        tokens; the second row starts with padding.
        """
        session = None
        try:
            cache = empty_cache(self.target)
            _, positions, _ = self.prefilled(padding, cache)
            if not session_class.CACHE.can_adopt(cache):
                return math.inf
            pads = [0, padding]
            offset = first_positions(positions, 5, pads, self.device)
            session = session_class(self.target, cache, pads, offset, {})
            session.cache.probed = self.PRETENDED
            return self._error_after_rollback(session, tree, *expected)
        except torch.OutOfMemoryError:  # says nothing about the target
            raise
        except Exception as error:  # a target may fail in any way here
            logger.debug("%s cannot roll back with %s: %s", type(self.target).__name__, session_class.__name__, error)
            return math.inf
        finally:
            if session is not None:
                session.clear()

    def _error_after_rollback(self, session, tree: bool, expected_logits, expected_states) -> float:
        # 1. A draft of which each row keeps another number of tokens.
        rejected = self.tokens[:, 5:10].clone()
        for row, count in enumerate(self.counts):
            rejected[row, count:] += 1
        draft = Block(rejected)
        path = None
        if tree:
            draft, path = self.draft_tree(rejected)
        first, _ = session.verify(draft)
        acceptance = Acceptance(self.counts, path)
        session.keep(acceptance)
        errors = []
        for row in range(2):
            for state, expected in zip(recurrent_states(session.cache.layers), expected_states[row], strict=True):
                errors.append(_relative_error(state[row].flatten(), expected.flatten()))
        # 2. Another draft after what was kept.
        counts = torch.tensor(self.counts, device=self.device)
        places = (counts + 5)[:, None] + torch.arange(6, device=self.device)
        second, _ = session.verify(Block(self.tokens.gather(1, places)))
        first = acceptance.select(first)
        for row, count in enumerate(self.counts):
            logits = torch.cat([first[row, :count], second[row]])
            errors.append(_relative_error(logits, expected_logits[row, : len(logits)]))
        return max(errors)

    def prefilled(self, padding: int, cache) -> tuple:
        """The output for a prompt `[2, 5]`, its positions, and the arguments of the next forward, as in `generate`."""
        target = self.target
        tokens = self.tokens[:, :5]
        mask = torch.ones_like(tokens)
        mask[1, :padding] = 0
        arguments = {cache_argument(target): cache, "use_cache": True, "attention_mask": mask}
        if "position_ids" in inspect.signature(target.forward).parameters:
            arguments["position_ids"] = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
        if padding:
            inputs = target.prepare_inputs_for_generation(tokens, is_first_iteration=True, **arguments)
        else:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            inputs = {cache_argument(target): cache, "use_cache": True, "input_ids": tokens, "position_ids": positions}
        return target(**inputs, return_dict=True), inputs.get("position_ids"), arguments

    def one_by_one(self, padding: int) -> tuple[torch.Tensor, dict]:
        """Logits after each token from the sixth on, one by one as in `generate`, and each row's states when kept."""
        target = self.target
        cache = empty_cache(target)
        output, _, arguments = self.prefilled(padding, cache)
        logits = []
        states = {}
        for step in range(1, self.tokens.shape[1] - 4):
            arguments = target._update_model_kwargs_for_generation(
                output, arguments, is_encoder_decoder=target.config.is_encoder_decoder
            )
            inputs = target.prepare_inputs_for_generation(
                self.tokens[:, : 5 + step], next_sequence_length=1, is_first_iteration=False, **arguments
            )
            output = target(**inputs, return_dict=True)
            logits.append(output.logits)
            for row, count in enumerate(self.counts):
                if count == step:
                    states[row] = [state[row].clone() for state in recurrent_states(cache.layers)]
        return torch.cat(logits, dim=1), states

    def features(self) -> frozenset[int]:
        """The decoder layers whose output in a short forward over text is one vector per token; -1: their input."""
        ids = [-1, *range(len(decoder_layers(self.target)))]
        with FeatureTap(self.target, ids) as tap, tap.running():
            try_out(self.target)
            outputs = [tap.captured.get(place) for place in tap.places]
        return frozenset(i for i, output in zip(ids, outputs) if output is not None and output.dim() == 3)


def first_positions(positions, columns: int, padding: list[int], device) -> torch.Tensor:
    """
    The position of the first token of each row, `[R, 1]`, or `[axes, R, 1]` where positions have several axes.

    Args:
        positions (`torch.LongTensor`, *optional*): `[..., R, n]`, the positions of the prompt's last forward. Counted
            back from the last one as if the prompt were text only; images break that rule.
        columns (`int`): Columns of the prompt, padding included.
        padding (`list[int]`): Padding columns at the start of each row.
    """
    pads = torch.tensor(padding, device=device)
    if positions is None:
        return torch.zeros_like(pads)[:, None]
    last = positions[..., -1].to(device)  # [..., R], or [..., 1] for all rows
    return (last - (columns - 1 - pads))[..., None]


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    difference = (actual - expected).double().norm(dim=-1) / expected.double().norm(dim=-1).clamp(min=1e-12)
    if actual.dtype in (torch.float32, torch.float64):
        return float(difference.nan_to_num(math.inf).max())
    # Half precision: rounding changes single positions (another expert is chosen), a wrong state changes all of them.
    return 0.0 if difference.median() < 0.1 else math.inf
