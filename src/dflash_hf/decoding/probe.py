"""What a target can do for a drafter, found by running it on a few tokens."""

import contextlib
import functools
import inspect
import math
import weakref
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.attention import prefers_no_mask, takes_slot_masks, with_slot_attention
from dflash_hf.decoding.recurrent import ReplaySession
from dflash_hf.decoding.session import SlotSession
from dflash_hf.decoding.slots import ProbeLengths, recurrent_states
from dflash_hf.decoding.trees import IndependentScores, Tree, grow_tree
from dflash_hf.modeling.target_dflash import decoder_layers
from dflash_hf.targets.features import (
    FeatureTap,
    cache_argument,
    empty_cache,
    input_device,
    run_short_forward,
)


logger = logging.get_logger(__name__)


class TargetCapabilities(NamedTuple):
    """
    What a target supports.

    Attributes:
        session (`type[SlotSession]`, *optional*): How its cache is rolled back; `None` if no way restores it.
        relative_error (`float`): The largest relative error of its logits and states after a rollback.
        padding (`bool`): Whether rows with padding on the left can be rolled back.
        trees (`bool`): Whether trees can be verified.
        feature_layers (`frozenset[int]`): Decoder layers whose output is one vector per token; -1: their input.
        failure (`str`, *optional*): Why the probe failed; the next call repeats it.
        maskless (`bool`): Whether a block of one row is best verified without a mask, and right that way.
        no_masks (`str`, *optional*): The attention that takes no masks of drafts, and why it cannot be replaced.
    """

    session: Any
    relative_error: float
    padding: bool = True
    trees: bool = False
    feature_layers: frozenset[int] = frozenset()
    failure: str | None = None
    maskless: bool = False
    no_masks: str | None = None

    def fallback_reason(self, name: str, layer_ids: list[int], mask: torch.Tensor | None) -> str | None:
        """Why a drafter that reads these layers cannot draft for a prompt with this mask, or `None`."""
        if self.no_masks is not None:
            return (
                f"{name} takes no mask of a draft, and its attention cannot be replaced ({self.no_masks}); load it "
                "with attn_implementation='sdpa'"
            )
        if self.failure is not None:
            return f"{name} could not be tried on a few tokens ({self.failure})"
        if not self.feature_layers:
            return f"the decoder layers of {name} are in no list, or none has an output of one vector per token"
        if self.session is None:
            if math.isfinite(self.relative_error):
                return (
                    f"{name} computes different logits for several tokens than for one at a time (relative error "
                    f"{self.relative_error:.2g}): its cache cannot be rolled back, or its weights are quantised "
                    "dynamically"
                )
            return f"the cache of {name} cannot be rolled back"
        for layer_id in layer_ids:
            if max(layer_id, -1) not in self.feature_layers:
                return f"decoder layer {layer_id} of {name} is skipped, or has no output of one vector per token"
        if not self.padding and mask is not None and not bool(mask.all()):
            return f"rows of {name} with padding on the left cannot be rolled back"
        return None


# Ways to roll a target back, the simplest first.
SESSION_CLASSES = (SlotSession, ReplaySession)
# For each target, as long as it lives: capabilities by everything that they depend on, see `_probe_key`. Without a
# lock: two threads that call a new target at the same time both probe it, with the same result.
_capabilities: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@torch.no_grad()
def capabilities_of(target) -> TargetCapabilities:
    """
    What a target supports, found by running it once for each attention, dtype and code of its forwards and inputs: a
    short prompt, a draft with rejected tokens, a roll-back and a second draft must give the same logits and states as
    decoding the kept tokens one by one. A target that could not run is tried again by the next call, since the cause
    may pass.
    """
    attention = target.config.get_text_config()._attn_implementation
    if not takes_slot_masks(attention):
        try:
            with_slot_attention(target)
        except ValueError as error:
            return TargetCapabilities(None, math.inf, no_masks=f"attn_implementation={attention!r}: {error}")
    results = _capabilities.setdefault(target, {})
    key = _probe_key(target)
    if key not in results:
        try:
            results[key] = Probe(target).capabilities()
        except Exception as error:  # the target cannot run on two rows, at least now
            return TargetCapabilities(None, math.inf, failure=f"{type(error).__name__}: {error}")
    return results[key]


def _probe_key(target) -> tuple:
    """
    Everything that the outcome of a probe depends on and that may change in a target's life.

    - The attention implementation: `set_attn_implementation`.
    - The dtype and the kind of device: `to`. They decide how large errors of rounding are, whether masks are omitted,
      and an implementation may depend on them.
    - The code of all forwards: quantisation, tensor parallelism and patches replace them, on a class or an instance.
    - How `generate` prepares the inputs of a forward, which patches may also replace.
    - Autocast, in which the target may be called.
    """
    attention = target.config.get_text_config()._attn_implementation
    forwards = frozenset(kind.forward for kind in {type(module) for module in target.modules()})
    prepare = getattr(target.prepare_inputs_for_generation, "__func__", target.prepare_inputs_for_generation)
    update = target._update_model_kwargs_for_generation
    update = getattr(update, "__func__", update)
    device = input_device(target).type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return attention, target.dtype, device, forwards, prepare, update, autocast


class Probe:
    """
    Finds out what a target supports, by running it on a few tokens: two rows of a prompt, the second with padding or
    without, and a draft of which each row keeps another number of tokens.

    Args:
        target (`PreTrainedModel`): The target.
    """

    MAX_EXACT_ERROR = 1e-4  # relative error of rounding
    # Targets that round differently for one token and for several. Nemotron-H differs by 7e-4 and writes another text:
    # it limits time steps in forwards over several tokens only.
    MAX_CLOSE_ERROR = 3e-4
    # Some targets take positions or windows from the length of their cache, or of what attention gets: both are far
    # from the true length.
    PROBE_LENGTHS = ProbeLengths(min_attended=512, seq_length=1 << 20)

    # All in tokens or columns.
    PADDING = 2  # padding columns of the second row, if padding is tried
    PROMPT = 5  # columns of the prompt, padding included
    DRAFT = 5  # tokens of the first draft, so that both rows reject at least two
    KEPT = (2, 3)  # tokens of the first draft that each row keeps: different numbers, and not the whole draft
    SECOND_DRAFT = 6  # tokens of the second draft, which reach past the first one: its rejected slots are overwritten
    COLUMNS = PROMPT + max(KEPT) + SECOND_DRAFT  # columns of a row in all
    # What is tried for each way to roll back, the most that a target may support first: padding columns, with a tree.
    ATTEMPTS = ((PADDING, True), (PADDING, False), (0, True), (0, False))

    def __init__(self, target):
        self.target = target
        self.device = input_device(target)
        vocab_size = target.config.get_text_config().vocab_size
        ids = torch.arange(3, 3 + 2 * self.COLUMNS, device=self.device).view(2, self.COLUMNS)
        self.tokens = ids * 7 % max(vocab_size - 1, 2)  # varied, without drawing random numbers

    def capabilities(self) -> TargetCapabilities:
        """The simplest way to roll back, with padding and trees if they work."""
        feature_layers: frozenset[int] = frozenset()
        with contextlib.suppress(ValueError):  # HRM-Text runs two stacks in cycles
            feature_layers = self.feature_layers()
        best = TargetCapabilities(None, math.inf, feature_layers=feature_layers)
        expected = functools.cache(self.reference_outputs)
        for session_class in SESSION_CLASSES:
            for padding_columns, with_tree in self.ATTEMPTS:
                if with_tree and not session_class.rollback_is_free:
                    continue
                error = self.rollback_error(session_class, padding_columns, with_tree, *expected(padding_columns))
                if error < self.MAX_EXACT_ERROR:
                    supported = TargetCapabilities(
                        session_class, error, padding_columns > 0, with_tree, feature_layers
                    )
                    return supported._replace(maskless=self.is_maskless(session_class))
                # Not exact: the first attempt that is close. If none is, the smallest error, for the message.
                if best.session is None and error < best.relative_error:
                    close_class = session_class if error < self.MAX_CLOSE_ERROR else None
                    best = TargetCapabilities(close_class, error, padding_columns > 0, with_tree, feature_layers)
        return best

    def rollback_error(
        self, session_class: Any, padding: int, with_tree: bool, expected_logits, expected_states
    ) -> float:
        """
        The largest relative error of logits and states after rolling back two rows, which keep different numbers of
        tokens; the second row starts with padding. Infinite if the target cannot be run or rolled back in this way.
        """
        try:
            with self.session(session_class, [0, padding]) as session:
                session.cache.probe_lengths = self.PROBE_LENGTHS
                return self._measure_rollback_error(session, with_tree, expected_logits, expected_states)
        except torch.OutOfMemoryError:  # says nothing about the target
            raise
        except Exception as error:  # a target may fail in any way here
            logger.debug("%s cannot roll back with %s: %s", type(self.target).__name__, session_class.__name__, error)
            return math.inf

    def is_maskless(self, session_class: Any) -> bool:
        """Whether blocks of one row are best verified without a mask, and give the same logits as with one."""
        if not prefers_no_mask(self.target):
            return False
        try:
            expected = self._logits_of_one_row(session_class, omits_masks=False)
            actual = self._logits_of_one_row(session_class, omits_masks=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            logger.debug("%s needs the mask of a block: %s", type(self.target).__name__, error)
            return False
        return _relative_error(actual, expected) < self.MAX_EXACT_ERROR

    def _logits_of_one_row(self, session_class: Any, omits_masks: bool) -> torch.Tensor:
        """`[1, n, V]`, of two drafts, the first of which is kept in part."""
        num_kept = self.KEPT[0]
        with self.session(session_class, [0], omits_masks=omits_masks) as session:
            start = self.PROMPT
            first_logits, _ = session.verify(Block(self.tokens[:1, start : start + self.DRAFT]))
            session.keep(Acceptance.from_counts([num_kept], self.device))
            start += num_kept
            second_logits, _ = session.verify(Block(self.tokens[:1, start : start + self.SECOND_DRAFT]))
        return torch.cat([first_logits, second_logits], dim=1)

    @contextlib.contextmanager
    def session(self, session_class: Any, padding: list[int], **options):
        """
        A session after the prompt, in as many rows as `padding` has numbers of columns.

        Raises:
            `ValueError`: the cache cannot be moved into slots.
        """
        cache = empty_cache(self.target)
        _, positions, _ = self.prefilled(padding, cache)
        if not session_class.cache_class.can_adopt(cache):
            raise ValueError(f"{type(cache).__name__} does not fit into slots")
        position_of_first = first_positions(positions, self.PROMPT, padding, self.device)
        session = session_class(self.target, cache, padding, position_of_first, {}, **options)
        try:
            yield session
        finally:
            session.free()

    def _measure_rollback_error(self, session, with_tree: bool, expected_logits, expected_states) -> float:
        # 1. A draft of which each row keeps another number of tokens; the others are wrong.
        drafted = self.tokens[:, self.PROMPT : self.PROMPT + self.DRAFT].clone()
        for row, count in enumerate(self.KEPT):
            drafted[row, count:] += 1
        candidates = Block(drafted)
        paths = [list(range(count)) for count in self.KEPT]
        if with_tree:
            candidates, path = _probe_tree(drafted)
            paths = [path[:count] for count in self.KEPT]
        first_logits, _ = session.verify(candidates)
        acceptance = Acceptance.from_paths(paths, self.device)
        session.keep(acceptance)
        errors = []
        for row in range(2):
            for state, expected in zip(recurrent_states(session.cache.layers), expected_states[row], strict=True):
                errors.append(_relative_error(state[row].flatten(), expected.flatten()))
        # 2. Another draft after what was kept.
        start = self.PROMPT + torch.tensor(self.KEPT, device=self.device)
        columns = start[:, None] + torch.arange(self.SECOND_DRAFT, device=self.device)
        second_logits, _ = session.verify(Block(self.tokens.gather(1, columns)))
        first_logits = acceptance.select(first_logits)
        for row, count in enumerate(self.KEPT):
            logits = torch.cat([first_logits[row, :count], second_logits[row]])
            errors.append(_relative_error(logits, expected_logits[row, : len(logits)]))
        return max(errors)

    def prefilled(self, padding: list[int], cache) -> tuple:
        """The output for the prompt, its positions, and the arguments of the next forward, as in `generate`."""
        target = self.target
        tokens = self.tokens[: len(padding), : self.PROMPT]
        mask = torch.ones_like(tokens)
        for row, columns in enumerate(padding):
            mask[row, :columns] = 0
        arguments = {cache_argument(target): cache, "use_cache": True, "attention_mask": mask}
        if "position_ids" in inspect.signature(target.forward).parameters:
            arguments["position_ids"] = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
        if any(padding):
            inputs = target.prepare_inputs_for_generation(tokens, is_first_iteration=True, **arguments)
        else:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            inputs = {cache_argument(target): cache, "use_cache": True, "input_ids": tokens, "position_ids": positions}
        return target(**inputs, return_dict=True), inputs.get("position_ids"), arguments

    def reference_outputs(self, padding: int) -> tuple[torch.Tensor, dict]:
        """
        What is expected: logits after each token that follows the prompt, decoded one by one as in `generate`, and the
        recurrent states of each row after the tokens that it keeps of the first draft.
        """
        target = self.target
        cache = empty_cache(target)
        output, _, arguments = self.prefilled([0, padding], cache)
        logits = []
        states = {}
        for step in range(1, self.COLUMNS - self.PROMPT + 1):
            arguments = target._update_model_kwargs_for_generation(
                output, arguments, is_encoder_decoder=target.config.is_encoder_decoder
            )
            inputs = target.prepare_inputs_for_generation(
                self.tokens[:, : self.PROMPT + step], next_sequence_length=1, is_first_iteration=False, **arguments
            )
            output = target(**inputs, return_dict=True)
            logits.append(output.logits)
            for row, count in enumerate(self.KEPT):
                if count == step:
                    states[row] = [state[row].clone() for state in recurrent_states(cache.layers)]
        return torch.cat(logits, dim=1), states

    def feature_layers(self) -> frozenset[int]:
        """The decoder layers whose output in a short forward over text is one vector per token; -1: their input."""
        ids = [-1, *range(len(decoder_layers(self.target)))]
        with FeatureTap(self.target, ids) as tap, tap.running():
            run_short_forward(self.target)
            outputs = [tap.captured.get(hook_point) for hook_point in tap.hook_points]
        return frozenset(i for i, output in zip(ids, outputs) if output is not None and output.dim() == 3)


def first_positions(positions, prompt_length: int, padding: list[int], device) -> torch.Tensor:
    """
    The position of the first token of each row, `[R, 1]`, or `[axes, R, 1]` where positions have several axes.

    Args:
        positions (`torch.LongTensor`, *optional*): `[..., R, n]`, of the prompt's last forward. The first position is
            counted back from the last, as if the prompt were text only: positions of images are not a sequence.
        prompt_length (`int`): Columns of the prompt, padding included.
        padding (`list[int]`): Padding columns at the start of each row.
    """
    pads = torch.tensor(padding, device=device)
    if positions is None:
        return torch.zeros_like(pads)[:, None]
    last = positions[..., -1].to(device)  # [..., R], or [..., 1] for all rows
    return (last - (prompt_length - 1 - pads))[..., None]


def _probe_tree(block: torch.LongTensor) -> tuple[Tree, list[int]]:
    """
    A tree to probe a target with: the first three tokens of a block `[2, n]` are one of its paths, and at each depth
    another, likelier node comes before that of the path. Returns the tree and the nodes of the path.
    """
    anchors, second, third = block[:, :3].T
    # Nodes by probability: 0 anchor, 1 `second + 1`, 2 `second`, 3 `third` after node 1, 4 `third` after node 2.
    ids = torch.stack([second + 1, second, third, anchors], dim=1).view(2, 2, 2)  # [R, slots, candidates]
    log_probs = torch.tensor([[-0.1, -0.2], [-0.5, -9.0]], device=block.device).expand(2, 2, 2)
    tree = grow_tree(anchors, IndependentScores(ids, log_probs).extend, depth=2, nodes=4, beams=4)
    return tree, [0, 2, 4]


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    difference = (actual - expected).double().norm(dim=-1) / expected.double().norm(dim=-1).clamp(min=1e-12)
    if actual.dtype in (torch.float32, torch.float64):
        return float(difference.nan_to_num(math.inf).max())
    # Half precision: rounding changes single positions (another expert is chosen), a wrong state changes all of them.
    return 0.0 if difference.median() < 0.1 else math.inf
