"""Pairs of many families, calls of many kinds, and ways of running them at the same time."""

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList

import dflash_hf
from support.pairs import make_target
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


class Collected:
    """A streamer that keeps what it is given."""

    def __init__(self, each: Callable[[int], None] | None = None):
        self.tokens, self.each = [], each

    def put(self, value):
        prompt = not self.tokens
        self.tokens.append(value.flatten())
        if self.each is not None and not prompt:
            self.each(len(self.tokens) - 1)

    def end(self):
        pass


class StopAfter(StoppingCriteria):
    """A criterion of somebody's own, which keeps count: after so many tokens, or after a token has come twice."""

    def __init__(self, calls: int, each: Callable[[int], None] | None = None):
        self.calls, self.left, self.each = 0, calls, each

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.each is not None:
            self.each(self.calls)
        return torch.full((len(input_ids),), self.calls == self.left)


@dataclass
class Call:
    """One way of calling `generate`, and what the target writes alone."""

    name: str
    inputs: dict
    options: dict
    own: Callable[[], dict] = dict  # what belongs to one call: a streamer, criteria
    greedy: bool = True
    pads: list[int] = field(default_factory=lambda: [0])
    expected: torch.LongTensor | None = None

    def __call__(self, target, draft=None, **more):
        """The output of `generate`, and its streamer if there is one."""
        own = {**self.own(), **more}
        options = {"do_sample": False, **self.options, **own}
        return target.generate(**self.inputs, **options, assistant_model=draft), own.get("streamer")

    def problem(self, output, streamer) -> str | None:
        """What is wrong with an output."""
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        prompt = self.inputs["input_ids"]
        if not self.greedy:
            new = sequences[:, prompt.shape[1] :]
            fine = torch.equal(sequences[:, : prompt.shape[1]], prompt) and new.shape[1] == 16
            return None if fine and not torch.isin(new, torch.arange(5)).any() else f"sampled {new.tolist()}"
        if not torch.equal(sequences, self.expected):
            return f"wrong text: {sequences.tolist()}, alone {self.expected.tolist()}"
        if isinstance(streamer, Collected) and not torch.equal(torch.cat(streamer.tokens), self.expected[0]):
            return "the streamer got another text"
        if self.options.get("output_scores") and len(output.scores) != sequences.shape[1] - prompt.shape[1]:
            return f"{len(output.scores)} scores"
        return None


def prompt(rows: int, longest: int, seed: int, vocab_size: int = 96) -> tuple[dict, list[int]]:
    """Left-padded prompts of different lengths, and their padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, min(vocab_size, 94), (rows, longest), generator=generator)
    pads = [0] + torch.randint(0, longest - 2, (rows - 1,), generator=generator).tolist()
    mask = (torch.arange(longest) >= torch.tensor(pads)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}, pads


def calls_for(family: str, seed: int) -> list[Call]:
    """Nine calls, each with a prompt of its own."""
    kinds = [
        ("greedy", 1, {"max_new_tokens": 24}, dict),
        ("batch", 3, {"max_new_tokens": 20}, dict),
        ("penalty", 1, {"max_new_tokens": 16, "repetition_penalty": 1.3}, dict),
        ("scores", 1, {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}, dict),
        ("criterion", 1, {"max_new_tokens": 40}, lambda: {"stopping_criteria": StoppingCriteriaList([StopAfter(17)])}),
        ("streamer", 1, {"max_new_tokens": 24}, lambda: {"streamer": Collected()}),
        ("top 1", 3, {"max_new_tokens": 14, "do_sample": True, "top_k": 1}, dict),
        ("sampled", 1, {"max_new_tokens": 16, "do_sample": True, "suppress_tokens": list(range(5))}, dict),
        ("ngrams", 3, {"max_new_tokens": 9, "no_repeat_ngram_size": 2, "return_dict_in_generate": True}, dict),
    ]
    calls = []
    for number, (name, rows, options, own) in enumerate(kinds):
        inputs, pads = prompt(rows, LONG.get(family, 5 + number), seed + number)
        calls.append(Call(name, inputs, options, own, greedy=name != "sampled", pads=pads))
    return calls


@dataclass
class Pair:
    """A target, calls whose texts are known, and drafters that know these texts, by the way in which they decode."""

    family: str
    target: nn.Module
    calls: list[Call]
    drafts: dict[str, RecognisingDraft]

    @classmethod
    def of(cls, family: str, seed: int = 0, ways: dict[str, dict] | None = None, names=None, **overrides):
        """
        The target writes every text alone at first.

        Args:
            family (`str`), seed (`int`): Of the target.
            ways (`dict`, *optional*): For the name of each drafter the fields of its `decoding_config`.
            names (`Sequence[str]`, *optional*): Of the calls that are wanted; default: all.
            overrides: Fields of the target's configuration.
        """
        target = make_target(family, **{"attn": None, "seed": seed, **TARGETS[family], **overrides})
        with_windows(target)
        calls, texts = [c for c in calls_for(family, 100 * seed) if names is None or c.name in names], []
        for call in calls:
            if call.greedy:
                output, _ = call(target)
                call.expected = output if isinstance(output, torch.Tensor) else output.sequences
                texts += [row[pad:] for row, pad in zip(call.expected, call.pads)]
        assert len(set(torch.cat(texts).tolist())) > 30, "constant texts prove nothing"
        drafts = {}
        for name, fields in (ways or {"block": {}, "tree": {"tree_nodes": 12}}).items():
            drafts[name] = draft = recognising(target, texts, BLOCK_SIZE)
            with_windows(draft)
            for key, value in fields.items():
                setattr(draft.decoding_config, key, value)
        return cls(family, target, calls, drafts)

    def call(self, name: str) -> Call:
        return next(call for call in self.calls if call.name == name)

    @property
    def models(self) -> list[nn.Module]:
        return [self.target, *self.drafts.values()]


def with_windows(model: nn.Module) -> None:
    """Put a window before each layer's network."""
    for module in [*model.modules()]:
        for name in {"mlp", "mixer", "feed_forward"} & module._modules.keys():
            setattr(module, name, Window(getattr(module, name)))


def packed(pair: Pair):
    """A context in which the layers of a pair are packed."""
    return dflash_hf.packed_weights(*pair.models)


def shape_of(*models) -> list[tuple]:
    """What a call must leave as it was, of every module: its class, its attributes, its hooks, its mode."""
    shape = []
    for model in models:
        for name, module in model.named_modules():
            hooks = {key: len(value) for key, value in vars(module).items() if "hook" in key and value}
            shape.append((name, type(module), sorted(vars(module)), hooks, module.training))
    return shape


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
        self.random, self.patience, self.often = random.Random(seed), patience, often
        self.condition, self.live, self.turn = threading.Condition(), [], None
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
