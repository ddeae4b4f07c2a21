"""Calls of `generate`, and what a drafter may not change of them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

from dflash_hf.decoding.slots import cached_columns, recurrent_states


class Collected:
    """A streamer that keeps what it is given, and calls `each` with the number of each token."""

    def __init__(self, each: Callable[[int], object] = lambda number: None):
        self.tokens, self.each = [], each

    def put(self, value):
        self.tokens.append(value.flatten())
        if len(self.tokens) > 1:  # the first is the prompt
            self.each(len(self.tokens) - 1)

    def end(self):
        pass


class StopAfter(StoppingCriteria):
    """A criterion of somebody's own, which keeps count: a text ends after so many tokens."""

    def __init__(self, calls: int, each: Callable[[int], object] = lambda number: None):
        self.calls, self.left, self.each = 0, calls, each

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        self.each(self.calls)
        return torch.full((len(input_ids),), self.calls == self.left)


class EveryOther(LogitsProcessor):
    """A processor of somebody's own, which keeps count of its calls and reads the text."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % scores.shape[1]] += 3.0
        scores[:, int(input_ids[0, -1]) % scores.shape[1]] -= 2.0
        return scores


class Outcome(NamedTuple):
    """What came of a call."""

    output: Any
    own: dict  # its arguments
    after: torch.Tensor  # the state of torch's generator

    @property
    def sequences(self) -> torch.LongTensor:
        return self.output if isinstance(self.output, torch.Tensor) else self.output.sequences

    @property
    def lengths(self) -> list[list[int]] | None:
        return getattr(self.output, "acceptance_lengths", None)


@dataclass
class Call:
    """
    A call of `generate`.

    Args:
        target (`PreTrainedModel`): Whose text.
        inputs (`dict`): Prompts `[R, S]` and their mask.
        pads (`list[int]`): Padding of each row.
        options (`dict`): Other arguments. A function is called with this call and gives what belongs to one run of it:
            a streamer, a cache.
        seed (`int`, *optional*): Of torch's generator; `None`: it goes on.
    """

    target: Any
    inputs: dict
    pads: list[int]
    options: dict = field(default_factory=dict)
    seed: int | None = 0

    def __call__(self, draft=None, **more) -> Outcome:
        options = {**self.options, **more}
        own = {name: value(self) if inspect.isfunction(value) else value for name, value in options.items()}
        if draft is not None:
            own["assistant_model"] = draft
        if self.seed is not None:
            torch.manual_seed(self.seed)
        return Outcome(self.target.generate(**{**self.inputs, **own}), own, torch.get_rng_state())

    def texts(self, sequences: torch.LongTensor) -> list[torch.LongTensor]:
        """The texts of a result without the padding of their prompts."""
        each = max(len(sequences) // len(self.pads), 1)
        return [row[self.pads[min(i // each, len(self.pads) - 1)] :] for i, row in enumerate(sequences)]


def difference(plain: Outcome, drafted: Outcome, tolerance: float = 1e-3, seeded: bool = True) -> str | None:
    """
    What a drafter changed, if anything.

    Args:
        plain, drafted (`Outcome`): Of the target alone, and with a drafter.
        tolerance (`float`): Of scores, keys and values, in units of the largest.
        seeded (`bool`): Whether samples and the generator must be the same; other threads may draw meanwhile.
    """
    theirs, ours = plain.output, drafted.output
    if isinstance(theirs, torch.Tensor) != isinstance(ours, torch.Tensor):
        return f"is a {type(ours).__name__}, not a {type(theirs).__name__}"
    if not torch.equal(plain.sequences, drafted.sequences):
        return f"writes {drafted.sequences.tolist()}, not {plain.sequences.tolist()}"
    if seeded and not torch.equal(plain.after, drafted.after):
        return "leaves the generator in another state"
    streams = plain.own.get("streamer"), drafted.own.get("streamer")
    if isinstance(streams[0], Collected) and not torch.equal(*(torch.cat(one.tokens) for one in streams)):
        return "streams something else"
    if isinstance(theirs, torch.Tensor):
        return None
    more = {"acceptance_lengths", "draft_sizes", "estimated_speedup"}
    if not isinstance(ours, type(theirs)) or set(theirs.keys()) != set(ours.keys()) - more:
        return f"is a {type(ours).__name__} of {sorted(ours.keys())}, not of {sorted(theirs.keys())}"
    for name in ("scores", "logits", "hidden_states", "attentions"):
        listed = getattr(ours, name), getattr(theirs, name)
        if listed[1] is not None and not _close(*map(_tensors, listed), tolerance):
            return f"has other {name}"
    return _of_caches(ours.past_key_values, theirs.past_key_values, tolerance)


def _of_caches(ours, theirs, tolerance: float) -> str | None:
    if type(ours) is not type(theirs):
        return f"has a {type(ours).__name__}, not a {type(theirs).__name__}"
    if not isinstance(theirs, DynamicCache):
        return None
    if cached_columns(ours) != cached_columns(theirs):
        return f"leaves {cached_columns(ours)} tokens in the cache, not {cached_columns(theirs)}"
    states = [recurrent_states(one.layers) for one in (ours, theirs)]
    for name in ("keys", "values"):
        for one, cache in zip(states, (ours, theirs), strict=True):
            one += [t for layer in cache.layers if (t := getattr(layer, name, None)) is not None]
    if any(tensor.is_inference() for tensor in states[0]):
        return "has a cache that its caller cannot write to"
    # Rows that end early, and padding, hold what nobody reads.
    same = len(states[1]) == 0 or len(states[1][0]) > 1 or _close(*states, tolerance)
    return None if same else "has another cache"


def _tensors(listed) -> list[torch.Tensor]:
    if isinstance(listed, torch.Tensor):
        return [listed]
    return [tensor for one in listed for tensor in _tensors(one)]


def _close(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> bool:
    def close(one: torch.Tensor, other: torch.Tensor) -> bool:
        finite = other[other.isfinite()].abs()
        atol = tolerance * float(finite.max() if finite.numel() else 1.0)
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and torch.allclose(one, other, rtol=tolerance, atol=atol, equal_nan=True)

    return len(ours) == len(theirs) and all(map(close, ours, theirs))


def shape_of(*models) -> list[tuple]:
    """What a call must leave as it was, of every module: its class, its attributes, its hooks, its mode."""
    shape = []
    for model in models:
        for name, module in model.named_modules():
            hooks = {key: len(value) for key, value in vars(module).items() if "hook" in key and value}
            shape.append((name, type(module), sorted(vars(module)), hooks, module.training))
    return shape
