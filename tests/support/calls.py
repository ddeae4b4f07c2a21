"""Calls of `generate`, and what a drafter may not change of them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

from dflash_hf.decoding.slots import cached_length, recurrent_states


class Collected:
    """A streamer that keeps what it is given, and calls `each` with the number of each token."""

    def __init__(self, each: Callable[[int], object] = lambda number: None):
        self.tokens = []
        self.each = each

    def put(self, value):
        self.tokens.append(value.flatten())
        if len(self.tokens) > 1:  # the first is the prompt
            self.each(len(self.tokens) - 1)

    def end(self):
        pass


class StopAfter(StoppingCriteria):
    """A criterion of somebody's own, which keeps count: a text ends after so many tokens."""

    def __init__(self, calls: int, each: Callable[[int], object] = lambda number: None):
        self.calls = 0
        self.left = calls
        self.each = each

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
    plain_output = plain.output
    drafted_output = drafted.output
    if isinstance(plain_output, torch.Tensor) != isinstance(drafted_output, torch.Tensor):
        return f"is a {type(drafted_output).__name__}, not a {type(plain_output).__name__}"
    if not torch.equal(plain.sequences, drafted.sequences):
        return f"writes {drafted.sequences.tolist()}, not {plain.sequences.tolist()}"
    if seeded and not torch.equal(plain.after, drafted.after):
        return "leaves the generator in another state"
    streams = plain.own.get("streamer"), drafted.own.get("streamer")
    if isinstance(streams[0], Collected) and not torch.equal(*(torch.cat(stream.tokens) for stream in streams)):
        return "streams something else"
    if isinstance(plain_output, torch.Tensor):
        return None
    more = {"acceptance_lengths", "draft_sizes", "estimated_speedup"}
    plain_keys = sorted(plain_output.keys())
    drafted_keys = sorted(drafted_output.keys())
    if not isinstance(drafted_output, type(plain_output)) or set(plain_keys) != set(drafted_keys) - more:
        return f"is a {type(drafted_output).__name__} of {drafted_keys}, not of {plain_keys}"
    for name in ("scores", "logits", "hidden_states", "attentions"):
        listed = getattr(drafted_output, name), getattr(plain_output, name)
        if listed[1] is not None and not _close(*map(_tensors, listed), tolerance):
            return f"has other {name}"
    return _of_caches(drafted_output.past_key_values, plain_output.past_key_values, tolerance)


def _of_caches(drafted, plain, tolerance: float) -> str | None:
    if type(drafted) is not type(plain):
        return f"has a {type(drafted).__name__}, not a {type(plain).__name__}"
    if not isinstance(plain, DynamicCache):
        return None
    if cached_length(drafted) != cached_length(plain):
        return f"leaves {cached_length(drafted)} tokens in the cache, not {cached_length(plain)}"
    drafted_tensors = _tensors_of_cache(drafted)
    plain_tensors = _tensors_of_cache(plain)
    if any(tensor.is_inference() for tensor in drafted_tensors):
        return "has a cache that its caller cannot write to"
    # Rows that end early, and padding, hold what nobody reads.
    unread = len(plain_tensors) == 0 or len(plain_tensors[0]) > 1
    same = unread or _close(drafted_tensors, plain_tensors, tolerance)
    return None if same else "has another cache"


def _tensors_of_cache(cache: DynamicCache) -> list[torch.Tensor]:
    """Recurrent states, then the keys of all layers that have some, then the values."""
    tensors = [*recurrent_states(cache.layers)]
    for name in ("keys", "values"):
        of_layers = [getattr(layer, name, None) for layer in cache.layers]
        tensors += [tensor for tensor in of_layers if tensor is not None]
    return tensors


def _tensors(listed) -> list[torch.Tensor]:
    if isinstance(listed, torch.Tensor):
        return [listed]
    return [tensor for part in listed for tensor in _tensors(part)]


def _close(drafted: list[torch.Tensor], plain: list[torch.Tensor], tolerance: float) -> bool:
    def close(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
        finite = expected[expected.isfinite()].abs()
        atol = tolerance * float(finite.max() if finite.numel() else 1.0)
        same = tensor.shape == expected.shape and tensor.dtype == expected.dtype
        return same and torch.allclose(tensor, expected, rtol=tolerance, atol=atol, equal_nan=True)

    return len(drafted) == len(plain) and all(map(close, drafted, plain))


def shape_of(*models) -> list[tuple]:
    """What a call must leave as it was, of every module: its class, its attributes, its hooks, its mode."""
    shape = []
    for model in models:
        for name, module in model.named_modules():
            hooks = {key: len(value) for key, value in vars(module).items() if "hook" in key and value}
            shape.append((name, type(module), sorted(vars(module)), hooks, module.training))
    return shape
