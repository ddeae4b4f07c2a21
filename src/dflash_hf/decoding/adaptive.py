"""
Adaptive draft length: how many drafted tokens the next round verifies, possibly none.

In each round, in this order:

0. *Measurement.* Until the latency of a round without a draft is known, every fourth round is one.
1. *Prompt lookup.* If the last tokens occurred before, verify what followed them there, if that is faster than recent
   rounds with drafts.
2. *Back-off.* After rounds with drafts that were slower than target-only decoding, pause: draft nothing for as many
   rounds as keep the loss of the next try below `MAX_LOSS` of the time. A new call does not wait for the end of a
   pause if drafts have ever paid: its text may be easier.
3. *Draft.* The drafter's tree, its likeliest nodes first. `E(d)`, the expected accepted tokens of the first `d`
   drafted nodes, is the sum of their paths' probabilities, calibrated by what was accepted so far; `T(d)`, the latency
   of a round that verifies them, is measured. Each round also commits one token of the target's own: verify the `d`
   with most tokens per time, `(1 + E(d)) / T(d)`, possibly none of them.

What this loses against more elaborate rules, and what each constant is worth:
`examples/benchmarks/results/policy.md`, written by `examples/benchmarks/policy.py`, which replays recorded rounds with
other constants.

Latencies are in rounds without a draft, and lengths depend on no clock within a call: see `latency.py`. Lengths of
drafts do not count the anchor; only [`CandidateLimits`] count it.

Lengths are chosen on the host, which on a CPU has the tree at once. An accelerator would have to finish the tree
before the host can queue the target's forward. There the length follows `E(d)` of an average tree, and the tree itself
is copied to the host while the target verifies it, for the next rounds: a round waits once, for what was accepted.
"""

import copy
import math
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers.utils import logging

from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.adapters import adapters_of
from dflash_hf.decoding.calibration import (
    AcceptanceCalibration,
    HostTree,
    acceptance_outcomes,
    expected_accepted,
    values_of_tree,
)
from dflash_hf.decoding.call import GenerateCall
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.decoding.latency import NO_DRAFT, DraftSize, LatencyModel, RoundTimer, latency_model_of
from dflash_hf.decoding.policies import DraftPolicy
from dflash_hf.decoding.prompt_lookup import PromptLookup, copies_of_batch
from dflash_hf.decoding.state import GenerationState
from dflash_hf.decoding.trees import Tree


logger = logging.get_logger(__name__)

# For each drafter and target, what their calls learned: (rows, whether sampled, adapters) -> `DraftStatistics`.
_statistics: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@dataclass
class DraftStatistics:
    """What calls with a pair learn for later calls with as many rows, decoded in the same way (greedy, sampled)."""

    ASSUMED_TOKENS = 1.5  # tokens that a round with a draft commits in each row, before any was measured
    ASSUMED_ROUNDS = 2  # weight of that assumption: it counts as much as so many measured rounds
    DECAY = 0.95  # of the weight of older rounds, with each new one
    MAX_LOSS = 0.02  # share of the time that drafting may lose against target-only decoding
    TYPICAL_DRAFT = 1  # tokens per row of the round whose latency is assumed

    calibration: AcceptanceCalibration = field(default_factory=AcceptanceCalibration)
    lookup_calibration: AcceptanceCalibration = field(default_factory=AcceptanceCalibration)
    tokens: float = 0.0  # committed per row by rounds with drafts; older rounds count less
    relative_time: float = 0.0  # that these rounds took, in rounds without a draft
    rounds_to_pause: int = 0  # upcoming rounds without a draft: the back-off
    average_expected: list[float] = field(default_factory=list)  # `E(0)`, `E(1)`, ... of a row; empty: not known yet
    has_paid: bool = False  # whether the drafts of any call were faster than target-only decoding
    warned: bool = False  # whether the warning that drafting does not pay was logged

    @property
    def speed(self) -> float:
        """Speed of rounds with drafts relative to target-only decoding; at least 1, since drafting is optional."""
        return max(self.tokens / self.relative_time, 1.0)

    def begin_call(self) -> None:
        """Another text may be easier to draft: it is tried at once, unless drafts have never paid."""
        if self.has_paid:
            self.rounds_to_pause = 0

    def assume_unless_measured(self, latency: float) -> None:
        """Assume how fast drafting is, unless it was measured; `latency`: of a round with `TYPICAL_DRAFT` tokens."""
        if not self.relative_time:
            self.tokens = self.ASSUMED_ROUNDS * self.ASSUMED_TOKENS
            self.relative_time = self.ASSUMED_ROUNDS * latency
            self._back_off(latency)

    def record(self, tokens: float, latency: float) -> None:
        """Add a round with a draft: the tokens that it committed per row, and its latency."""
        self.tokens = self.DECAY * self.tokens + tokens
        self.relative_time = self.DECAY * self.relative_time + latency
        self._back_off(latency)

    def _back_off(self, latency: float) -> None:
        """
        If at least two recent rounds were slower than target-only decoding, do not draft until the loss of one more
        such round is `MAX_LOSS` of the time. Their average then weighs as one round: the next one decides again.
        """
        speed = self.tokens / self.relative_time
        has_two_rounds = self.relative_time > 1.5 * latency
        if speed < 1 and has_two_rounds:
            self.tokens = latency * speed
            self.relative_time = latency
            self.rounds_to_pause = math.ceil(latency * (1 - speed) / self.MAX_LOSS)


@dataclass
class PlannedRound:
    """What the current round verifies, and what is expected of it."""

    size: DraftSize
    latency: float  # expected, in rounds without a draft
    started: float  # seconds
    tree: HostTree | None = None  # of a round with a draft: all that was drafted
    # The same as `values_of_tree` returns it, on its way to the host: complete when the round's result is.
    copied_values: torch.Tensor | None = None


class CandidateLimits(NamedTuple):
    """
    Maximum number of candidates of a round, anchor included.

    Attributes:
        per_row (`int`): In one row.
        per_batch (`int`): In all rows together.
        minimum (`int`): What each row gets however many rows there are.
    """

    per_row: int
    per_batch: int
    minimum: int

    def for_rows(self, rows: int) -> int:
        """The limit for each row of a batch."""
        return max(min(self.per_row, self.per_batch // rows), self.minimum)


class AdaptiveLength(DraftPolicy):
    """
    The default policy. See the top of this file for which length comes next and why.

    Args:
        call (`GenerateCall`): The call.
        draft_session (`DraftSession`): The drafter in this call.
    """

    LOOKUP_ROWS = 4  # with more, one of them seldom repeats itself: a batch is as fast as its slowest row
    CPU_LIMITS = CandidateLimits(per_row=16, per_batch=32, minimum=2)
    ACCELERATOR_LIMITS = CandidateLimits(per_row=64, per_batch=512, minimum=16)

    def __init__(self, call: GenerateCall, draft_session: DraftSession):
        super().__init__(call, draft_session)
        device = call.target.device
        limits = self.CPU_LIMITS if device.type == "cpu" else self.ACCELERATOR_LIMITS
        self.max_nodes = limits.for_rows(call.rows) - 1  # without the anchor
        self.chooses_late = device.type != "cpu"
        # What earlier calls learned, as it is now: others may be learning at the same time.
        self.latency_model = self._shared_latency_model()
        self.latencies_at_start = self.latency_model.snapshot()
        self.curves: dict[tuple, list[float]] = {}  # of the snapshot
        self.key = (call.rows, call.config.do_sample, adapters_of(call.draft))
        self.statistics = copy.deepcopy(self._shared_statistics().get(self.key, DraftStatistics()))
        self.statistics.begin_call()
        self.statistics.assume_unless_measured(self._latencies(0, drafted=True)[DraftStatistics.TYPICAL_DRAFT])
        vocab_size = call.target.config.get_text_config(decoder=True).vocab_size
        calibration = self.statistics.lookup_calibration
        prompts = call.prompt.tolist() if call.rows <= self.LOOKUP_ROWS else []
        self.lookups = [PromptLookup(prompt, vocab_size, calibration) for prompt in prompts]
        self.round = PlannedRound(NO_DRAFT, 1.0, 0.0)
        self.rounds: list[tuple[int, int, float]] = []  # drafted tokens, tokens committed per row, latency
        # Of the rounds with drafts: tokens committed per row, and their time in rounds without a draft.
        self.tokens_of_drafts = 0
        self.time_of_drafts = 0.0
        self.timer = RoundTimer(device, call.selector.streamer)

    @property
    def max_draft(self) -> int:
        return max(super().max_draft, self.max_nodes)

    def _shared_latency_model(self) -> LatencyModel:
        """What the pair's calls measured; extended when a call ends."""
        return latency_model_of(self.call.target, self.call.draft)

    def _shared_statistics(self) -> dict[tuple, DraftStatistics]:
        """What the pair's calls learned, by their kind; replaced when a call ends."""
        by_target = _statistics.setdefault(self.call.draft, weakref.WeakKeyDictionary())
        return by_target.setdefault(self.call.target, {})

    def _latencies(self, written: int, drafted: bool) -> list[float]:
        """The latencies of rounds after `written` generated tokens; see [`LatencyModel.latencies`]."""
        context_length = self.call.prompt_length + written
        key = (LatencyModel.bucket(context_length), drafted)
        if key not in self.curves:
            curve = self.latencies_at_start.latencies(self.call.rows, context_length, self.max_nodes, drafted)
            self.curves[key] = curve
        return self.curves[key]

    # ------------------------------------------------------------------------------------------- what to verify next

    def get_candidates(self, state: GenerationState) -> Block | Tree:
        started = self.timer.now()
        if not self.rounds:
            self._read_first_tokens(state)
        is_measurement = self._is_measurement_round(state)
        if self.lookups and not is_measurement:
            copied = self._copy(state, started)
            if copied is not None:
                return copied
        if is_measurement or self.statistics.rounds_to_pause or self.room(state) == 1:
            self.statistics.rounds_to_pause = max(self.statistics.rounds_to_pause - 1, 0)
            self.round = PlannedRound(NO_DRAFT, 1.0, started)
            return self.no_draft(state)
        return self._draft(state, started)

    def _is_measurement_round(self, state: GenerationState) -> bool:
        """Whether this round has no draft in order to measure its latency: every fourth one, until that is known."""
        is_fourth = len(self.rounds) % 4 == 1  # rounds 1, 5, 9, ...: the timer does not keep round 0
        if not is_fourth or self.statistics.rounds_to_pause:
            return False
        samples = self.latencies_at_start.count(self.call.rows, self.call.prompt_length + state.longest, NO_DRAFT)
        return samples + self.timer.count(NO_DRAFT) < LatencyModel.MIN_SAMPLES

    def _copy(self, state: GenerationState, started: float) -> Block | None:
        """The prompt lookup of all rows, if it is faster than drafting."""
        max_copied = min(self.room(state) - 1, self.max_nodes)
        copies = [lookup.propose(max_copied) for lookup in self.lookups]
        tokens, expected = copies_of_batch(copies, state.lengths, state.unfinished)
        latencies = self._latencies(state.longest, drafted=False)
        active = sum(state.unfinished)
        length = self.choose_length(expected, latencies, active)
        speed = (1 + expected[length] / active) / latencies[length]
        if length == 0 or speed <= self.statistics.speed:
            return None
        self.round = PlannedRound(DraftSize(length, False), latencies[length], started)
        return self.copied(state, [row[:length] for row in tokens])

    def _draft(self, state: GenerationState, started: float) -> Block | Tree:
        """The likeliest nodes of a tree; a single path where the target cannot verify trees."""
        if self.supports_trees(state):
            drafted = self.draft_tree(state, self.max_nodes)
        else:
            longest_path = min(self.call.draft.config.max_block_tokens, self.room(state)) - 1
            drafted = self.draft_tree(state, min(longest_path, self.max_nodes), top_k=1)
        latencies = self._latencies(state.longest, drafted=True)
        if self.chooses_late:
            return self._verify_by_average(state, drafted, latencies, started)
        tree = HostTree.of(drafted)
        expected = expected_accepted(tree, state.unfinished, state.remaining_tokens, self.statistics.calibration)
        length = self.choose_length(expected, latencies, sum(state.unfinished))
        verified = drafted.first(1 + length)
        self.round = PlannedRound(DraftSize(length, True), latencies[length], started, tree)
        # A path in every row is verified as a block, which is faster; its nodes have the same numbers.
        return Block(verified.tokens) if tree.is_path(1 + length) else verified

    def _verify_by_average(
        self, state: GenerationState, drafted: Tree, latencies: list[float], started: float
    ) -> Block | Tree:
        """As many nodes of a tree as an average tree would have verified; all of them if none was seen."""
        length = drafted.tokens.shape[1] - 1
        average = self.statistics.average_expected
        if average:
            active = sum(state.unfinished)
            expected = [active * tokens for tokens in average[: 1 + length]]
            length = self.choose_length(expected, latencies, active)
        values = values_of_tree(drafted).to("cpu", non_blocking=True)  # complete when the round's result is
        self.round = PlannedRound(DraftSize(length, True), latencies[length], started, copied_values=values)
        verified = drafted.first(1 + length)
        return verified if self.supports_trees(state) else Block(verified.tokens)

    def choose_length(self, expected: list[float], latencies: list[float], active: int) -> int:
        """
        The number of drafted tokens to verify in each row: the one with most committed tokens per time.

        Args:
            expected (`list[float]`): Expected accepted tokens of the first 0, 1, ... drafted ones, over all rows.
            latencies (`list[float]`): Latencies of these rounds, at least as many.
            active (`int`): Rows that have not ended.
        """
        speeds = [(active + tokens) / latency for tokens, latency in zip(expected, latencies)]
        return speeds.index(max(speeds))

    # ------------------------------------------------------------------------------------- learning from the outcome

    def update_candidate_strategy(self, state: GenerationState, candidates, acceptance: Acceptance) -> None:
        current = self.round
        counts = acceptance.counts
        lengths_before = [length - count for length, count in zip(state.lengths, counts, strict=True)]
        self.timer.record(self.call.prompt_length + max(lengths_before), current.size, current.started)
        for lookup, tokens_of_row in zip(self.lookups, state.committed):
            lookup.extend(tokens_of_row)
        tokens = self._progress(state, lengths_before, counts)
        self.rounds.append((current.size.num_drafted, tokens, current.latency))
        if current.copied_values is not None:
            current.tree = HostTree.of_values(current.copied_values)
            self._average_expected(current.tree)
        if current.tree is None:
            return
        for probability, was_accepted in acceptance_outcomes(
            current.tree, 1 + current.size.num_drafted, acceptance, state.unfinished
        ):
            self.statistics.calibration.record(probability, was_accepted)
        self.statistics.record(tokens, current.latency)
        self.tokens_of_drafts += tokens
        self.time_of_drafts += current.latency

    def _average_expected(self, tree: HostTree) -> None:
        """Add a tree to the average `E(d)` of a row."""
        rows = len(tree.depths)
        expected = expected_accepted(tree, [True] * rows, len(tree.depths[0]), self.statistics.calibration)
        average = self.statistics.average_expected
        decay = DraftStatistics.DECAY
        for length, tokens in enumerate(expected):
            if length < len(average):
                average[length] = decay * average[length] + (1 - decay) * tokens / rows
            else:
                average.append(tokens / rows)

    def _progress(self, state: GenerationState, lengths_before: list[int], counts: list[int]) -> int:
        """
        Tokens by which the slowest active row came closer to its end: a batch is done when that row is.

        An example: of three rows with a limit of 20 tokens, the first had 10, the second 12, and the third has ended.
        The round commits 5 and 1 tokens, so they have 15 and 13. The slowest row had 10 tokens left, and now is
        another one, with 7 left: the round counts as 3 tokens.
        """
        shortest_before = min(length for length, count in zip(lengths_before, counts, strict=True) if count)
        left_before = self.call.selector.max_new_tokens - shortest_before
        left_after = 0 if state.done else state.remaining_tokens
        return min(left_before - left_after, max(counts))

    def _read_first_tokens(self, state: GenerationState) -> None:
        """Let the prompt lookup of each row read the token that the prompt's forward wrote."""
        if self.lookups:
            for lookup, token in zip(self.lookups, state.anchors.tolist(), strict=True):
                lookup.extend([token])

    # --------------------------------------------------------------------------------------------------- after a call

    def finish(self) -> None:
        """Let later calls use what this one learned. If calls run at the same time, the last one's statistics stay."""
        self.latency_model.record(self.call.rows, self.timer.rounds)
        self.statistics.has_paid |= self.tokens_of_drafts > self.time_of_drafts
        self._shared_statistics()[self.key] = self.statistics
        if self.rounds:
            self._warn_if_slow()

    def summary(self) -> dict:
        """`draft_sizes` and `estimated_speedup`."""
        if not self.rounds:
            return {"draft_sizes": [], "estimated_speedup": None}
        sizes = [size for size, _, _ in self.rounds]
        return {"draft_sizes": sizes, "estimated_speedup": self.timer.speedup(self._speedup)}

    @property
    def _speedup(self) -> float:
        """Speed of this call's rounds relative to rounds without a draft."""
        tokens = sum(tokens for _, tokens, _ in self.rounds)
        return tokens / sum(latency for _, _, latency in self.rounds)

    def _warn_if_slow(self) -> None:
        """Log once that most rounds of a call had no draft because drafting does not pay."""
        statistics = self.statistics
        sizes = [size for size, _, _ in self.rounds]
        mostly_none = len(sizes) >= 16 and 2 * sizes.count(0) > len(sizes)
        slow = any(statistics.calibration.observed) and statistics.tokens < statistics.relative_time
        lookup_compensates = self._speedup >= 1.1
        if not mostly_none or not slow or lookup_compensates or statistics.warned:
            return
        statistics.warned = True
        logger.warning(
            f"Decoding mostly without drafts: with {self.call.rows} row(s), rounds that draft are estimated at "
            f"{statistics.tokens / statistics.relative_time:.2f}x the speed of the target alone, by the acceptance "
            "and the latencies measured here. Set `draft.decoding_config.block_size` to draft in every round."
        )
