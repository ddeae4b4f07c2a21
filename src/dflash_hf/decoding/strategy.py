"""Which strategy a call gets, and the one that chooses the sizes of its rounds."""

import copy
import weakref
from typing import NamedTuple

import torch
from transformers.utils import logging

from dflash_hf.decoding.copies import Copies, together
from dflash_hf.decoding.costs import NOTHING, Costs, Work, adapters_of, table_of
from dflash_hf.decoding.packing import warn_if_emulated
from dflash_hf.decoding.recurrent import ReplaySession
from dflash_hf.decoding.reliability import Correction
from dflash_hf.decoding.sizes import SlowestRow, Throughput, gains, worth
from dflash_hf.decoding.trees import TOP_K, Tree, tree, trial_tree
from dflash_hf.modeling.accept_dflash import Block, Verdict
from dflash_hf.modeling.drafting_dflash import Drafter
from dflash_hf.modeling.generation_dflash import Call, Strategy
from dflash_hf.modeling.session_dflash import SlotSession
from dflash_hf.modeling.target_dflash import support_of
from dflash_hf.modeling.text_dflash import Text, clock


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
    _warn_of_ignored(call.config)
    config, asked = call.draft.decoding_config, call.config.num_assistant_tokens
    if config.compile:
        from dflash_hf.decoding.compiled import Compiled  # which builds on this file

        return Compiled(call)
    chosen = config.block_size is None and config.tree_nodes is None and asked in (None, 20)
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

    def draft(self, drafter: Drafter, text: Text):
        if not self.nodes or not self.support.trees or self.room(text) == 1 or self.room(text) < text.left:
            return super().draft(drafter, text)
        return tree(drafter, text.last, text.next_draws, self.nodes)


class Plan(NamedTuple):
    """What a round of [`Fastest`] verifies, and what should come of it."""

    began: float  # seconds
    written: int  # tokens of the longest row
    alive: list[bool]  # rows that had not ended
    left: int  # maximum number of tokens that any of them could still generate
    work: Work
    cost: float
    tree: Tree | None = None  # what was drafted
    chances: list[list[float]] = []  # of each row's drafted nodes, given their parents
    expected: float = 0.0  # tokens per row that should be accepted


class Fastest(Fixed):
    """
    For each round, the drafted tokens of a tree that are worth verifying, possibly none. A single row that repeats
    what it or its prompt said before copies it, without a draft, where that is faster.

    Within a call, sizes follow from the costs that were known at its start and from what was accepted, never from a
    clock. Measurements of this call serve later calls.

    Args:
        call (`Call`): The call.
    """

    LADDER = (1, 2, 4, 8, 16, 32, 64)  # sizes that are slightly preferred until their cost is known
    MARGIN = 0.1  # tokens that a copy must gain
    COPYING = 2  # rows of a call that copies: with more of them, the slowest one rarely gains

    def __init__(self, call: Call):
        super().__init__(call)
        rows, on_cpu = len(call.prompt), call.target.device.type == "cpu"
        # More on devices where wide forwards are cheap.
        self.widest = max(min(16, 32 // rows), 2) if on_cpu else max(min(64, 512 // rows), 15)
        self.costs = Costs(table_of(call.target, call.draft), rows, call.columns, clock(call.target.device))
        self.throughput = copy.deepcopy(self._throughputs.get(self._key, Throughput()))
        self.slowest, self.here = SlowestRow(rows), Correction()
        self.copies: list[Copies] = []  # of each row, if they are few
        self.plan: Plan | None = None
        self.rounds: list[tuple[int, float, float]] = []  # size, tokens committed per row, cost of each round

    @property
    def largest(self) -> int:
        return max(self.size, 1 + self.widest)

    @property
    def _throughputs(self) -> dict:
        return _throughputs.setdefault(self.call.draft, weakref.WeakKeyDictionary()).setdefault(self.call.target, {})

    @property
    def _key(self) -> tuple:
        return len(self.call.prompt), self.call.config.do_sample, adapters_of(self.call.draft)

    def _seconds(self, text: Text) -> float:
        """A clock that stands still while tokens are streamed."""
        return clock(self.call.target.device) - text.streaming

    def draft(self, drafter: Drafter, text: Text):
        now = self._seconds(text), text.longest, [*text.alive], text.left
        costs = self.costs.curve(text.longest, self.widest)
        if not self.rounds:
            self.throughput.begin(costs[min(2, self.widest)])
            if len(text.alive) <= self.COPYING:
                vocab_size = self.call.target.config.get_text_config(decoder=True).vocab_size
                rows = text.sequences.tolist()
                self.copies = [Copies(row, vocab_size, self.throughput.of_copies) for row in rows]
        resting = self.throughput.resting > 0
        # 1. Every fourth round costs a token of the target alone, until that is known.
        measured = len(self.rounds) % 4 == 1 and not resting and self.costs.is_new(text.longest, NOTHING)
        # 2. A copy, if it is faster than drafting.
        if self.copies and not measured:
            most = min(self.room(text) - 1, self.widest)
            tokens, gained = together([one.next(most * alive) for one, alive in zip(self.copies, text.alive)])
            cost = self.costs.curve(text.longest, self.widest, drafted=False)
            speed = sum(text.alive) * self.throughput.speed
            size = worth(gained, cost, speed, lambda size: self.MARGIN if size == 0 else 0.0)
            if size:
                self.plan = Plan(*now, (size, False), cost[size])
                return Block(torch.cat([text.last[:, None], text.last.new_tensor(tokens)[:, :size]], dim=1))
        # 3. Nothing, while drafting does not pay.
        if measured or resting or self.room(text) == 1:
            self.throughput.resting -= resting and not measured
            self.plan = Plan(*now, NOTHING, 1.0)
            return Block(text.last[:, None])
        # 4. The likeliest tokens of a tree, as many as are worth it; a single path where trees cannot be verified.
        slots = min(drafter.draft.config.block_tokens, self.room(text)) - 1
        trees = self.support.trees and self.room(text) == text.left
        nodes, top_k = (self.widest, TOP_K) if trees else (slots, 1)
        drafted = tree(drafter, text.last, text.next_draws, nodes, top_k)
        gained, chances = gains(drafted, text.alive, text.left, self.throughput.reliability)
        speed, ratio = sum(text.alive) * self.throughput.speed, self.here.ratio

        def bonus(size: int) -> float:
            return 0.1 * speed * (size in self.LADDER and self.costs.is_new(text.longest, (size, True)))

        size = worth([ratio * gain for gain in gained], costs, speed, bonus)
        kept = drafted.first(size + 1)
        self.plan = Plan(*now, (size, True), costs[size], kept, chances, gained[size] / sum(text.alive))
        return kept.block or kept

    def learn(self, text: Text, draft, verdict: Verdict) -> None:
        """Record how long a round took, and what the target accepted of its draft."""
        plan, counts = self.plan, verdict.counts
        self.costs.note(plan.written, plan.work, plan.began, self._seconds(text))
        # A batch is done when its slowest row is.
        tokens = min(plan.left - (0 if text.done else text.left), max(counts))
        self.rounds.append((plan.work[0], tokens, plan.cost))
        for row, copies in enumerate(self.copies):
            end = self.call.rules.prompt_length + text.lengths[row]
            copies.extend(text.buffer[row, end - counts[row] : end].tolist())
        if plan.tree is None:
            return
        expected = min(1 + self.here.ratio * plan.expected, plan.left)
        self.here.note(plan.expected, sum(counts) / sum(plan.alive) - 1)
        parents, path = plan.tree.parents.tolist(), None if verdict.path is None else verdict.path.tolist()
        for row in (row for row, alive in enumerate(plan.alive) if alive):
            taken = (path[row] if path else range(plan.work[0] + 1))[: counts[row]]
            # The last token of a row that ends says nothing about the tokens drafted after it.
            judged = set(taken if text.alive[row] else taken[:-1])
            for node in range(1, plan.work[0] + 1):
                if parents[row][node] in judged:
                    self.throughput.reliability.note(plan.chances[row][node], node in taken)
        # For a single row, the expected number is as informative as the accepted one, and varies less.
        paced = 0.25 * tokens + 0.75 * expected
        if len(counts) > 1:
            paced = self.slowest.after(counts, plan.alive, plan.left)
        self.throughput.note(paced, plan.cost)

    def summary(self) -> dict:
        """The choices, for the output. A call that mostly decodes without drafts logs the reason once."""
        self.costs.close()
        throughput, sizes = self.throughput, [size for size, _, _ in self.rounds]
        self._throughputs[self._key] = throughput
        if not sizes:
            return {"draft_sizes": [], "estimated_speedup": None}
        speedup = sum(tokens for _, tokens, _ in self.rounds) / sum(cost for _, _, cost in self.rounds)
        mostly_none = len(sizes) >= 16 and 2 * sizes.count(0) > len(sizes)
        judged = any(observations for observations, *_ in throughput.reliability.seen)
        lost = judged and throughput.tokens < throughput.cost and speedup < 1.1  # copies may make up for it
        if mostly_none and lost and not throughput.warned:
            throughput.warned = True
            logger.warning(
                f"Decoding mostly without drafts: with {len(self.call.prompt)} row(s), rounds that draft are estimated"
                f" at {throughput.tokens / throughput.cost:.2f}x the speed of the target alone, given its acceptance "
                "and the cost of rounds here. Set `draft.decoding_config.block_size` to draft in every round."
            )
        return {"draft_sizes": sizes, "estimated_speedup": self.costs.speedup(speedup)}
