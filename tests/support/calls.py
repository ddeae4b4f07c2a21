"""Calls of `generate`, and what a drafter may not change of them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

from dflash_hf.decoding.slots import cached_length, recurrent_states


class Collected:
    """A streamer that keeps the tokens that it gets, and calls `on_token` with the number of each, from 1."""

    def __init__(self, on_token: Callable[[int], object] = lambda number: None):
        self.tokens = []
        self.on_token = on_token

    def put(self, value):
        self.tokens.append(value.flatten())
        if len(self.tokens) > 1:  # the first is the prompt
            self.on_token(len(self.tokens) - 1)

    def end(self):
        pass


class StopAfter(StoppingCriteria):
    """A user's criterion with a state: the text ends after `max_calls` tokens; `on_call` gets the number of each."""

    def __init__(self, max_calls: int, on_call: Callable[[int], object] = lambda number: None):
        self.calls = 0
        self.max_calls = max_calls
        self.on_call = on_call

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        self.on_call(self.calls)
        return torch.full((len(input_ids),), self.calls == self.max_calls)


class EveryOther(LogitsProcessor):
    """A user's processor whose scores depend on how often it was called, and on the last token."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % scores.shape[1]] += 3.0
        scores[:, int(input_ids[0, -1]) % scores.shape[1]] -= 2.0
        return scores


class Outcome(NamedTuple):
    """
    What came of a call.

    Attributes:
        output: What `generate` returned: ids, or an output with fields.
        arguments (`dict`): Those of this one run, its own streamer and cache among them.
        generator_state (`torch.Tensor`): The state of torch's generator after the call.
    """

    output: Any
    arguments: dict
    generator_state: torch.Tensor

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
        pads (`list[int]`): Padding columns of each row.
        options (`dict`): Other arguments. A function gets this call and makes what belongs to one run of it, such as a
            streamer or a cache.
        seed (`int`, *optional*): Seed of torch's generator before each run; `None`: the generator is left as it is.
    """

    target: Any
    inputs: dict
    pads: list[int]
    options: dict = field(default_factory=dict)
    seed: int | None = 0

    def __call__(self, draft=None, **more_options) -> Outcome:
        """Run the call, with a drafter or without."""
        arguments = {}
        for name, value in {**self.options, **more_options}.items():
            arguments[name] = value(self) if inspect.isfunction(value) else value
        if draft is not None:
            arguments["assistant_model"] = draft
        if self.seed is not None:
            torch.manual_seed(self.seed)
        output = self.target.generate(**{**self.inputs, **arguments})
        return Outcome(output, arguments, torch.get_rng_state())

    def texts(self, sequences: torch.LongTensor) -> list[torch.LongTensor]:
        """The texts of a result without the padding of their prompts, which may each have several texts."""
        texts_per_prompt = max(len(sequences) // len(self.pads), 1)
        texts = []
        for number, text in enumerate(sequences):
            prompt = min(number // texts_per_prompt, len(self.pads) - 1)
            texts.append(text[self.pads[prompt] :])
        return texts


def difference(plain: Outcome, drafted: Outcome, tolerance: float = 1e-3, seeded: bool = True) -> str | None:
    """
    What a drafter changed, as the end of the sentence "the call with a drafter ..."; `None` if it changed nothing.

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
    if seeded and not torch.equal(plain.generator_state, drafted.generator_state):
        return "leaves the generator in another state"
    streamer = plain.arguments.get("streamer")
    if isinstance(streamer, Collected):
        streamed_tokens = torch.cat(drafted.arguments["streamer"].tokens)
        if not torch.equal(torch.cat(streamer.tokens), streamed_tokens):
            return "streams something else"
    if isinstance(plain_output, torch.Tensor):
        return None
    fields_of_drafts = {"acceptance_lengths", "draft_sizes", "estimated_speedup"}
    plain_keys = sorted(plain_output.keys())
    drafted_keys = sorted(drafted_output.keys())
    if not isinstance(drafted_output, type(plain_output)) or set(plain_keys) != set(drafted_keys) - fields_of_drafts:
        return f"is a {type(drafted_output).__name__} of {drafted_keys}, not of {plain_keys}"
    for name in ("scores", "logits", "hidden_states", "attentions"):
        plain_values = getattr(plain_output, name)
        drafted_values = getattr(drafted_output, name)
        if plain_values is not None and not _close(_tensors(drafted_values), _tensors(plain_values), tolerance):
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
