"""Pairs of many families with calls whose texts are known, and ways of running calls at the same time."""

import contextlib
import copy
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import StoppingCriteriaList

from support.calls import Call, Collected, Outcome, StopAfter
from support.pairs import make_target
from support.rows import ragged_prompts
from support.scripted_draft import RecognisingDraft, recognising


BLOCK_SIZE = 6


class Window(nn.Module):
    """A module through which a test looks out of the middle of a forward; it can be copied."""

    look: Callable | None = None

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        if Window.look is not None:
            Window.look()
        return self.module(*args, **kwargs)


DOUBLE = {"dtype": torch.float64}  # a random recurrence is chaotic: in fp32 rounding alone changes its text

# By slots, with windows, with prompts beyond a bucket of slots; by replay; plainly.
TARGETS = {
    "qwen3": {},
    "gemma3": {},
    "llama": {"max_position_embeddings": 1024},
    "qwen3_5_text": DOUBLE,
    "falcon_h1": DOUBLE,
    "jamba": DOUBLE,
    "bloom": {},  # Recurrent Gemma keeps its states in its modules: upstream's own plain calls cannot share it
}
PLAIN = ("jamba", "bloom")
LONG = {"llama": 280}  # tokens of a prompt
# Layers large enough to be packed.
LARGE = {"hidden_size": 64, "intermediate_size": 2048, "vocab_size": 2048}
# Rows of a call, and its options.
KINDS = {
    "greedy": (1, {"max_new_tokens": 24}),
    "batch": (3, {"max_new_tokens": 20}),
    "penalty": (1, {"max_new_tokens": 16, "repetition_penalty": 1.3}),
    "scores": (1, {"max_new_tokens": 12, "output_scores": True}),
    "criterion": (1, {"max_new_tokens": 40, "stopping_criteria": lambda call: StoppingCriteriaList([StopAfter(17)])}),
    "streamer": (1, {"max_new_tokens": 24, "streamer": lambda call: Collected()}),
    "top 1": (3, {"max_new_tokens": 14, "do_sample": True, "top_k": 1}),
    "sampled": (1, {"max_new_tokens": 16, "do_sample": True, "suppress_tokens": list(range(5))}),  # any text
    "ngrams": (3, {"max_new_tokens": 9, "no_repeat_ngram_size": 2}),
}


@dataclass
class Pair:
    """A target, calls, what it writes in them alone, and drafters that know these texts, by how they decode."""

    family: str
    target: nn.Module
    calls: dict[str, Call]
    expected: dict[str, Outcome]
    drafts: dict[str, RecognisingDraft]

    @classmethod
    def of(cls, family: str, seed: int = 0, settings: dict[str, dict] | None = None, names=tuple(KINDS), **overrides):
        """
        Args:
            family (`str`), seed (`int`): Of the target.
            settings (`dict`, *optional*): For the name of each drafter the fields of its `decoding_config`.
            names (`Sequence[str]`): Of the calls that are wanted.
            overrides: Fields of the target's configuration.
        """
        target = make_target(family, **{"attn": None, "seed": seed, **TARGETS[family], **overrides})
        with_windows(target)
        calls = {}
        expected = {}
        drafts = {}
        for number, name in enumerate(names):
            rows, options = KINDS[name]
            prompts = ragged_prompts(rows, LONG.get(family, 5 + number), 100 * seed + number)
            options = {"do_sample": False, "return_dict_in_generate": True, **options}
            calls[name] = Call(target, *prompts, options, seed=None)
            expected[name] = calls[name]()
        texts = [text for name in names for text in calls[name].texts(expected[name].sequences)]
        assert len(set(torch.cat(texts).tolist())) > 30, "constant texts prove nothing"
        draft = recognising(target, texts, BLOCK_SIZE)
        for draft_name, fields in (settings or {"block": {}, "tree": {"tree_nodes": 12}}).items():
            drafts[draft_name] = copy.deepcopy(draft)
            with_windows(drafts[draft_name])
            for key, value in fields.items():
                setattr(drafts[draft_name].decoding_config, key, value)
        return cls(family, target, calls, expected, drafts)

    @property
    def models(self) -> list[nn.Module]:
        return [self.target, *self.drafts.values()]

    def text(self, name: str) -> list[list[int]]:
        """What the target writes alone in a call."""
        return self.expected[name].sequences.tolist()


def with_windows(model: nn.Module) -> None:
    """Put a window before each layer's network."""
    for module in [*model.modules()]:
        for name in {"mlp", "mixer", "feed_forward"} & module._modules.keys():
            setattr(module, name, Window(getattr(module, name)))


def at_once(*functions: Callable[[], object], timeout: float = 120.0) -> list:
    """What functions return, each in a thread of its own; or what they raise."""
    results = [TimeoutError("the thread did not end")] * len(functions)

    def run(number, function):
        try:
            results[number] = function()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    return results


class Turns:
    """
    Threads that run one at a time, and change at places and in an order that a seed decides: an interleaving that
    can be repeated.

    A thread that is kept from going on, by a lock or a compiler, gives its turn away after `patience` seconds.
    """

    def __init__(self, seed: int, patience: float = 0.5, often: float = 0.3):
        self.random = random.Random(seed)
        self.patience = patience
        self.often = often
        self.condition = threading.Condition()
        self.live = []
        self.turn = None
        self.changes = 0

    def change(self, *_, always: bool = False) -> None:
        """A place where another thread may go on."""
        me = threading.get_ident()
        with self.condition:
            if me not in self.live or not (always or self.random.random() < self.often):
                return
            self.turn = self.random.choice(self.live)
            if self.turn != me:
                self.changes += 1
                self.condition.notify_all()
                self._wait(me)

    def _wait(self, me: int) -> None:
        while self.turn != me:
            before = self.changes, self.turn
            if not self.condition.wait(self.patience) and before == (self.changes, self.turn):
                self.turn = me

    def run(self, *functions: Callable[[], object]) -> list:
        """As [`at_once`]."""
        everyone = threading.Barrier(len(functions))

        def taking_turns(function):
            def run():
                me = threading.get_ident()
                with self.condition:
                    self.live.append(me)
                everyone.wait()
                with self.condition:
                    if self.turn is None:
                        self.live.sort()
                        self.turn = self.live[0]
                    self._wait(me)
                try:
                    return function()
                finally:
                    with self.condition:
                        self.live.remove(me)
                        if self.live:
                            self.turn = self.random.choice(self.live)
                        self.condition.notify_all()

            return run

        return at_once(*map(taking_turns, functions))

    @contextlib.contextmanager
    def inside(self):
        """Threads change in the middle of forwards, too: at each window."""
        Window.look = self.change
        try:
            yield
        finally:
            Window.look = None
