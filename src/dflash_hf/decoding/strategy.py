"""Which strategy a call gets, and the one that chooses the sizes of its rounds."""

import copy
import weakref
from typing import NamedTuple

import torch
from transformers.utils import logging

from dflash_hf.decoding.copies import Copies, together
from dflash_hf.decoding.costs import NOTHING, Costs, Timed, Work, adapters_of, table_of
from dflash_hf.decoding.packing import warn_if_emulated
from dflash_hf.decoding.recurrent import ReplaySession
from dflash_hf.decoding.sizes import Seen, Throughput, best_size, gains, judged
from dflash_hf.decoding.trees import Tree, tree, trial_tree
from dflash_hf.modeling.accept_dflash import Block, Verdict
from dflash_hf.modeling.drafting_dflash import Drafter
from dflash_hf.modeling.generation_dflash import Call, Strategy
from dflash_hf.modeling.session_dflash import SlotSession
from dflash_hf.modeling.target_dflash import support_of
from dflash_hf.modeling.text_dflash import Text


logger = logging.get_logger(__name__)

# Settings of other kinds of assistants, and their values if the user does not set them.
_OTHER_ASSISTANTS = {
    "assistant_lookbehind": 10,
    "assistant_ensemble_weight": None,
    "assistant_early_exit": None,
    "assistant_confidence_threshold": 0.4,
    "num_assistant_tokens_schedule": "constant",
    "prompt_lookup_num_tokens": None,
    "use_mtp": None,
}
# For each drafter and target, statistics of the pair, by rows and decoding mode.
_throughputs: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


def strategy(call: Call) -> Strategy:
    """The strategy of a call: for the sizes in its settings, or for the fastest sizes."""
    warn_if_emulated(call.target)
    warn_if_emulated(call.draft)
    _warn_of_ignored(call.config)
    config = call.draft.decoding_config
    if config.compile:
        from dflash_hf.decoding.compiled import Compiled  # which builds on this file

        return Compiled(call)
    chosen = config.block_size is None and config.tree_nodes is None and call.asked_for is None
    return Fastest(call) if chosen else Fixed(call)


def _warn_of_ignored(generation_config) -> None:
    """Warn once about settings that only other kinds of assistants support."""
    ignored = {name: getattr(generation_config, name, None) for name in _OTHER_ASSISTANTS}
    ignored = {k: v for k, v in ignored.items() if v is not None and v != _OTHER_ASSISTANTS[k]}
    if ignored:
        settings = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
        logger.warning_once(f"A DFlash drafter ignores {settings}; see `draft.decoding_config` for its own settings.")


def support(target):
    """What a target supports; see [`support_of`]."""
    return support_of(target, Fixed.SESSIONS, trial_tree)


class Fixed(Strategy):
    """The same draft in every round: a block or a tree."""

    SESSIONS = (SlotSession, ReplaySession)
    draft_tree = staticmethod(trial_tree)

    def __init__(self, call: Call):
        super().__init__(call)
        self.nodes = call.draft.decoding_config.tree_nodes or 0

    @property
    def largest(self) -> int:
        return max(self.size, 1 + self.nodes)

    def trees(self, text: Text) -> bool:
        """Whether trees can be verified: not where the target runs out of positions."""
        return self.support.trees and self.room(text) == text.left

    def draft(self, drafter: Drafter, text: Text):
        if not self.nodes or self.room(text) == 1 or not self.trees(text):
            return super().draft(drafter, text)
        return tree(drafter, text.last, text.next_draws, self.nodes)


class Round(NamedTuple):
    """What a round of [`Fastest`] verifies, and what should come of it."""

    began: float  # seconds
    work: Work
    cost: float
    tree: Tree | None = None  # what was drafted
    chances: list[list[float]] = []  # of each row's drafted nodes, given their parents
    expected: float = 0.0  # tokens per row that should be accepted


class Fastest(Fixed):
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

    def __init__(self, call: Call):
        super().__init__(call)
        rows, device = len(call.prompt), call.target.device
        of_one, of_all, least = self.WIDEST.get(device.type, self.WIDEST["other"])
        self.max_draft = max(min(of_one, of_all // rows), least)
        if call.rules.streamer is not None:
            call.rules.streamer = Timed(call.rules.streamer, device)
        self.costs = Costs(table_of(call.target, call.draft), rows, call.columns, device, call.rules.streamer)
        self.throughput = copy.deepcopy(self._throughputs.get(self._key, Throughput()))
        self.throughput.begin(self.costs.curve(0, self.max_draft)[2])
        vocab_size = call.target.config.get_text_config(decoder=True).vocab_size
        copying = call.prompt.tolist() if rows <= self.COPYING else []
        self.copies = [Copies(row, vocab_size, self.throughput.of_copies) for row in copying]
        self.seen, self.round = Seen(), None

    def drafter(self) -> Drafter:
        self.costs.begin()  # again: the trial of a target is not part of the prompt
        return super().drafter()

    @property
    def largest(self) -> int:
        return max(self.size, 1 + self.max_draft)

    @property
    def _throughputs(self) -> dict:
        return _throughputs.setdefault(self.call.draft, weakref.WeakKeyDictionary()).setdefault(self.call.target, {})

    @property
    def _key(self) -> tuple:
        return len(self.call.prompt), self.call.config.do_sample, adapters_of(self.call.draft)

    def draft(self, drafter: Drafter, text: Text):
        began, resting = self.costs.now(), self.throughput.resting > 0
        speed = sum(text.alive) * self.throughput.speed
        if not self.seen.rounds:
            self._extend_copies(text, [1] * len(text.alive))
        # 1. Every fourth round costs a token of the target alone, until that is known.
        measured = len(self.seen.rounds) % 4 == 1 and not resting and self.costs.is_new(text.longest, NOTHING)
        # 2. A copy, if it is faster than drafting.
        if self.copies and not measured and (copied := self._copied(text, speed, began)) is not None:
            return copied
        # 3. Nothing, while drafting does not pay.
        if measured or resting or self.room(text) == 1:
            self.throughput.resting = max(self.throughput.resting - 1, 0)
            self.round = Round(began, NOTHING, 1.0)
            return Block(text.last[:, None])
        # 4. The likeliest tokens of a tree, as many as are worth it; a single path where trees cannot be verified.
        slots = min(drafter.draft.config.block_tokens, self.room(text)) - 1
        nodes, top_k = (self.max_draft, None) if self.trees(text) else (slots, 1)
        drafted = tree(drafter, text.last, text.next_draws, nodes, top_k)
        gained, chances = gains(drafted, text.alive, text.left, self.throughput.reliability)
        costs, ratio = self.costs.curve(text.longest, self.max_draft), self.seen.calibration.ratio

        def bonus(size: int) -> float:
            """Powers of two are tried first while their cost is not known: what lies between them is interpolated."""
            rung = size > 0 and size & (size - 1) == 0
            return self.SLACK * speed * (rung and self.costs.is_new(text.longest, (size, True)))

        size = best_size([ratio * gain for gain in gained], costs, speed, bonus)
        kept = drafted.first(size + 1)
        self.round = Round(began, (size, True), costs[size], kept, chances, gained[size] / sum(text.alive))
        return kept.block or kept

    def _copied(self, text: Text, speed: float, began: float) -> Block | None:
        """What follows the last tokens where they occurred before, if that is faster than drafting."""
        most = min(self.room(text) - 1, self.max_draft)
        tokens, values = together([one.next(most) for one in self.copies], text.lengths, text.alive)
        costs = self.costs.curve(text.longest, self.max_draft, drafted=False)
        gain_of_drafting = speed - sum(text.alive)  # over a round without a draft
        size = best_size(values, costs, speed, lambda size: (self.SLACK + gain_of_drafting) * (size == 0))
        if not size:
            return None
        self.round = Round(began, (size, False), costs[size])
        return Block(torch.cat([text.last[:, None], text.last.new_tensor(tokens)[:, :size]], dim=1))

    def _extend_copies(self, text: Text, counts: list[int]) -> None:
        """Let the copies read the last tokens of each row."""
        for row, copies in enumerate(self.copies):
            end = self.call.rules.prompt_length + text.lengths[row]
            copies.extend(text.buffer[row, end - counts[row] : end].tolist())

    def learn(self, text: Text, verdict: Verdict) -> None:
        """Record how long a round took, and what the target accepted of its draft."""
        done, seen, throughput, counts = self.round, self.seen, self.throughput, verdict.counts
        before = [length - count for length, count in zip(text.lengths, counts, strict=True)]
        self.costs.note(max(before), done.work, done.began)
        self._extend_copies(text, counts)
        # A batch is done when its slowest row is.
        left = self.call.rules.max_new - min(length for length, count in zip(before, counts, strict=True) if count)
        tokens = min(left - (0 if text.done else text.left), max(counts))
        seen.rounds.append((done.work[0], tokens, done.cost))
        if done.tree is None:
            return
        for chance, accepted in judged(done.tree, done.chances, verdict, text.alive):
            throughput.reliability.note(chance, accepted)
        # Of one row, the expected number is as informative as the accepted one, and varies less.
        share = self.EXPECTED_SHARE if len(counts) == 1 else 0.0
        expected = min(1 + seen.calibration.ratio * done.expected, left)
        throughput.note(share * expected + (1 - share) * tokens, done.cost)
        seen.calibration.note(done.expected, sum(counts) / sum(count > 0 for count in counts) - 1)

    def summary(self) -> dict:
        """The choices, for the output. A call that mostly decodes without drafts logs the reason once."""
        self.costs.close()
        throughput, sizes = self.throughput, [size for size, _, _ in self.seen.rounds]
        self._throughputs[self._key] = throughput
        if not sizes:
            return {"draft_sizes": [], "estimated_speedup": None}
        speedup = sum(tokens for _, tokens, _ in self.seen.rounds) / sum(cost for _, _, cost in self.seen.rounds)
        mostly_none = len(sizes) >= 16 and 2 * sizes.count(0) > len(sizes)
        measured = any(observations for observations, *_ in throughput.reliability.seen)
        lost = measured and throughput.tokens < throughput.cost and speedup < 1.1  # copies may make up for it
        if mostly_none and lost and not throughput.warned:
            throughput.warned = True
            logger.warning(
                f"Decoding mostly without drafts: with {len(self.call.prompt)} row(s), rounds that draft are estimated"
                f" at {throughput.tokens / throughput.cost:.2f}x the speed of the target alone, given its acceptance "
                "and the cost of rounds here. Set `draft.decoding_config.block_size` to draft in every round."
            )
        return {"draft_sizes": sizes, "estimated_speedup": self.costs.speedup(speedup)}
