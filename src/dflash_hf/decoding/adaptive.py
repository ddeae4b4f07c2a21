"""The policy that chooses how many tokens each round verifies."""

import copy
import weakref
from typing import NamedTuple

from transformers.utils import logging

from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.adapters import adapters_of
from dflash_hf.decoding.call import GenerateCall
from dflash_hf.decoding.copies import Copies, together
from dflash_hf.decoding.costs import NOTHING, Costs, Work, table_of
from dflash_hf.decoding.drafter import Drafter
from dflash_hf.decoding.policies import DraftPolicy
from dflash_hf.decoding.sizes import Seen, Throughput, best_size, gains, judged
from dflash_hf.decoding.state import GenerationState
from dflash_hf.decoding.trees import Tree


logger = logging.get_logger(__name__)

# For each drafter and target, statistics of the pair, by rows and decoding mode.
_throughputs: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


class Round(NamedTuple):
    """What a round of [`AdaptiveLength`] verifies, and what should come of it."""

    began: float  # seconds
    work: Work
    cost: float
    tree: Tree | None = None  # what was drafted
    chances: list[list[float]] = []  # of each row's drafted nodes, given their parents
    expected: float = 0.0  # tokens per row that should be accepted


class AdaptiveLength(DraftPolicy):
    """
    For each round, the drafted tokens of a tree that are worth verifying, possibly none. Up to four rows that repeat
    what they or their prompts said before copy it, without a draft, where that is faster.

    Within a call, sizes follow from the costs that were known at its start and from what was accepted, never from a
    clock. Measurements of this call serve later calls.

    Args:
        call (`Call`): The call.
    """

    # What each is worth: `examples/benchmarks/results/constants.md`.
    SLACK = 0.1  # tokens that a copy must gain, and that a size may lose while its cost is not known; 0: -3 to +1 %
    COPYING = 4  # rows of a call that copies; 2: +18 % with four rows; more: nothing with eight
    EXPECTED_SHARE = 0.75  # of a row's rate: tokens that were expected in place of those accepted; 0: +5 %
    # Drafted tokens at most: of one row, of all rows, and of a row however many there are.
    WIDEST = {"cpu": (16, 32, 2), "other": (64, 512, 15)}

    def __init__(self, call: GenerateCall, drafter: Drafter):
        super().__init__(call, drafter)
        rows, device = len(call.prompt), call.target.device
        of_one, of_all, least = self.WIDEST.get(device.type, self.WIDEST["other"])
        self.widest = max(min(of_one, of_all // rows), least)
        self.costs = Costs(table_of(call.target, call.draft), rows, call.prompt_length, device, call.selector.streamer)
        self.throughput = copy.deepcopy(self._throughputs.get(self._key, Throughput()))
        self.throughput.begin(self.costs.curve(0, self.widest)[2])
        vocab_size = call.target.config.get_text_config(decoder=True).vocab_size
        copying = call.prompt.tolist() if rows <= self.COPYING else []
        self.copies = [Copies(row, vocab_size, self.throughput.of_copies) for row in copying]
        self.seen, self.round = Seen(), None
        self.costs.begin()  # the probe of a target, before, is not part of the prompt

    @property
    def max_draft(self) -> int:
        return max(super().max_draft, self.widest)

    @property
    def _throughputs(self) -> dict:
        return _throughputs.setdefault(self.call.draft, weakref.WeakKeyDictionary()).setdefault(self.call.target, {})

    @property
    def _key(self) -> tuple:
        return len(self.call.prompt), self.call.config.do_sample, adapters_of(self.call.draft)

    def get_candidates(self, state: GenerationState):
        began, resting = self.costs.now(), self.throughput.resting > 0
        speed = sum(state.unfinished) * self.throughput.speed
        if not self.seen.rounds:
            self._extend_copies(state, [1] * len(state.unfinished))
        # 1. Every fourth round costs a token of the target alone, until that is known.
        measured = len(self.seen.rounds) % 4 == 1 and not resting and self.costs.is_new(state.longest, NOTHING)
        # 2. A copy, if it is faster than drafting.
        if self.copies and not measured and (copied := self._copied(state, speed, began)) is not None:
            return copied
        # 3. Nothing, while drafting does not pay.
        if measured or resting or self.room(state) == 1:
            self.throughput.resting = max(self.throughput.resting - 1, 0)
            self.round = Round(began, NOTHING, 1.0)
            return self.no_draft(state)
        # 4. The likeliest tokens of a tree, as many as are worth it; a single path where trees cannot be verified.
        slots = min(self.call.draft.config.max_block_tokens, self.room(state)) - 1
        nodes, top_k = (self.widest, None) if self.supports_trees(state) else (slots, 1)
        drafted = self.draft_tree(state, nodes, top_k)
        gained, chances = gains(drafted, state.unfinished, state.remaining_tokens, self.throughput.reliability)
        costs, ratio = self.costs.curve(state.longest, self.widest), self.seen.calibration.ratio

        def bonus(size: int) -> float:
            """Powers of two are tried first while their cost is not known: what lies between them is interpolated."""
            rung = size > 0 and size & (size - 1) == 0
            return self.SLACK * speed * (rung and self.costs.is_new(state.longest, (size, True)))

        size = best_size([ratio * gain for gain in gained], costs, speed, bonus)
        kept = drafted.first(size + 1)
        self.round = Round(began, (size, True), costs[size], kept, chances, gained[size] / sum(state.unfinished))
        return kept.block or kept

    def _copied(self, state: GenerationState, speed: float, began: float) -> Block | None:
        """What follows the last tokens where they occurred before, if that is faster than drafting."""
        most = min(self.room(state) - 1, self.widest)
        tokens, values = together([one.next(most) for one in self.copies], state.lengths, state.unfinished)
        costs = self.costs.curve(state.longest, self.widest, drafted=False)
        gain_of_drafting = speed - sum(state.unfinished)  # over a round without a draft
        size = best_size(values, costs, speed, lambda size: (self.SLACK + gain_of_drafting) * (size == 0))
        if not size:
            return None
        self.round = Round(began, (size, False), costs[size])
        return self.copied(state, [row[:size] for row in tokens])

    def _extend_copies(self, state: GenerationState, counts: list[int]) -> None:
        """Let the copies read the last tokens of each row."""
        for row, copies in enumerate(self.copies):
            end = self.call.selector.input_length + state.lengths[row]
            copies.extend(state.buffer[row, end - counts[row] : end].tolist())

    def update_candidate_strategy(self, state: GenerationState, candidates, acceptance: Acceptance) -> None:
        """Record how long a round took, and what the target accepted of its draft."""
        done, seen, throughput, counts = self.round, self.seen, self.throughput, acceptance.counts
        before = [length - count for length, count in zip(state.lengths, counts, strict=True)]
        self.costs.note(max(before), done.work, done.began)
        self._extend_copies(state, counts)
        # A batch is done when its slowest row is.
        left = self.call.selector.max_new - min(length for length, count in zip(before, counts, strict=True) if count)
        tokens = min(left - (0 if state.done else state.remaining_tokens), max(counts))
        seen.rounds.append((done.work[0], tokens, done.cost))
        if done.tree is None:
            return
        for chance, accepted in judged(done.tree, done.chances, acceptance, state.unfinished):
            throughput.reliability.note(chance, accepted)
        # Of one row, the expected number is as informative as the accepted one, and varies less.
        share = self.EXPECTED_SHARE if len(counts) == 1 else 0.0
        expected = min(1 + seen.calibration.ratio * done.expected, left)
        throughput.note(share * expected + (1 - share) * tokens, done.cost)
        seen.calibration.note(done.expected, sum(counts) / sum(count > 0 for count in counts) - 1)

    def finish(self) -> None:
        """Let later calls use what was learned. A call that mostly decodes without drafts logs the reason once."""
        self.costs.close()
        throughput = self.throughput
        self._throughputs[self._key] = throughput
        sizes = [size for size, _, _ in self.seen.rounds]
        mostly_none = len(sizes) >= 16 and 2 * sizes.count(0) > len(sizes)
        measured = any(observations for observations, *_ in throughput.reliability.seen)
        # Copies may make up for drafts that do not pay.
        lost = measured and throughput.tokens < throughput.cost and mostly_none and self._speedup < 1.1
        if lost and not throughput.warned:
            throughput.warned = True
            logger.warning(
                f"Decoding mostly without drafts: with {len(self.call.prompt)} row(s), rounds that draft are estimated"
                f" at {throughput.tokens / throughput.cost:.2f}x the speed of the target alone, given its acceptance "
                "and the cost of rounds here. Set `draft.decoding_config.block_size` to draft in every round."
            )

    @property
    def _speedup(self) -> float:
        """Of this call's rounds relative to rounds without a draft."""
        return sum(tokens for _, tokens, _ in self.seen.rounds) / sum(cost for _, _, cost in self.seen.rounds)

    def summary(self) -> dict:
        sizes = [size for size, _, _ in self.seen.rounds]
        if not sizes:
            return {"draft_sizes": [], "estimated_speedup": None}
        return {"draft_sizes": sizes, "estimated_speedup": self.costs.speedup(self._speedup)}
