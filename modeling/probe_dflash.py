"""Which way of rolling back works for a target: tried once, on a few tokens, and compared with never having erred."""

import weakref

import torch
from transformers import DynamicCache
from transformers.utils import logging

from .replay_dflash import ReplaySession, StepSession, recurrent_states
from .target_dflash import input_device, uncompiled
from .verify_dflash import CropSession, SlotSession, activate_past_recording, cache_argument


logger = logging.get_logger(__name__)

KINDS = (SlotSession, ReplaySession, StepSession, CropSession)
# Largest relative error of single and double precision. Rounding stays below the first; between the two lie targets
# that upstream itself computes a little differently for one token and for several.
EXACT, CLOSE = 1e-4, 1e-3

_probed: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@torch.no_grad()
def probe_rollback(target) -> type | None:
    """
    Find out, once for each target, how its cache can be rolled back.

    A short prompt, a block with rejected tokens, a roll-back and a second block must give the logits, and leave the
    state, that decoding the kept tokens one by one gives. Tried with slots, with slots and replay of the recurrent
    layers, with slots and steps through the recurrent layers, then with `crop`.

    Returns:
        `SlotSession`, `ReplaySession`, `StepSession`, `CropSession` or `None` when none restores the state.
    """
    known = _probed.setdefault(target, {})
    key = (target.config._attn_implementation, target.dtype)
    if key not in known:
        errors = {}
        with uncompiled(target):
            for kind in KINDS:
                errors[kind] = _error(target, kind)
                if errors[kind] < EXACT:
                    break
        best = min(errors, key=errors.get)
        known[key] = best if errors[best] < CLOSE else None
    return known[key]


def _error(target, session_class) -> float:
    """
    The largest relative error of logits and states after rolling back two rows, which keep different numbers of tokens
    where the session allows it.
    """
    vocab_size = target.config.get_text_config().vocab_size
    device = input_device(target)
    tokens = torch.arange(3, 31, device=device).view(2, 14) * 7 % max(vocab_size - 1, 2)  # no random numbers drawn
    block, kept = tokens[:, 5:10].clone(), [2, 2 if session_class.in_step else 3]
    for row, count in enumerate(kept):
        block[row, count:] += 1  # rejected
    start = torch.full((2,), 5, device=device)
    try:
        expected, states = _decoded(target, tokens, session_class, kept)  # [2, 9, V]
        cache = _prefilled(target, tokens[:, :5], session_class)
        if not session_class.takes(cache):
            return float("inf")
        session = session_class(target, cache, [0, 0], 32, torch.zeros_like(start)[:, None], {})
        first = session.verify(block, start, used=10)
        session.commit(5, kept)
        errors = [
            _relative_error(a[row].flatten(), b.flatten())
            for row in range(2)
            for a, b in zip(_states(session.cache, session_class), states[row], strict=True)
        ]
        start = start + torch.tensor(kept, device=device)
        rest = tokens.gather(1, start[:, None] + torch.arange(6, device=device))  # [2, 6]
        second = session.verify(rest, start, used=14)
        session.commit(6, [6, 6])
        for row, count in enumerate(kept):
            ours = torch.cat([first[row, :count], second[row]])
            errors.append(_relative_error(ours, expected[row, : len(ours)]))
        return max(errors)
    except Exception as error:  # a target may fail in any way at all here; the next kind is tried
        logger.debug("%s cannot roll back with %s: %s", type(target).__name__, session_class.__name__, error)
        return float("inf")


def _prefilled(target, tokens, session_class):
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    if session_class.records_past:
        activate_past_recording(cache)
    return _fed(target, tokens, cache, session_class)[1]


def _fed(target, tokens, cache, session_class, past: int = 0):
    positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)[None]
    name = cache_argument(target)
    logits = target(input_ids=tokens, position_ids=positions, use_cache=True, **{name: cache}).logits
    if session_class.records_past:
        cache.crop(0)
    return logits, cache


def _decoded(target, tokens, session_class, kept):
    """Logits after each token from the sixth on, fed one by one as `generate` does, and what each row held when."""
    cache = _prefilled(target, tokens[:, :5], session_class)
    logits, states = [], {}
    for step, token in enumerate(tokens[:, 5:].split(1, dim=1), start=1):
        logits.append(_fed(target, token, cache, session_class, past=4 + step)[0])
        rows = [row for row, count in enumerate(kept) if count == step]
        states |= {row: [state[row].clone() for state in _states(cache, session_class)] for row in rows}
    return torch.cat(logits, dim=1), states


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual - expected).double().norm(dim=-1) / expected.double().norm(dim=-1).clamp(min=1e-12)
    if actual.dtype in (torch.float32, torch.float64):
        return float(difference.nan_to_num(float("inf")).max())
    # Half precision: rounding moves single positions (an expert chosen otherwise), a wrong state moves all of them.
    return 0.0 if difference.median() < 0.1 else float("inf")


def _states(cache, session_class) -> list[torch.Tensor]:
    """What a cache holds besides keys and values in slots, which the logits test; logits alone can hide a state."""
    if session_class.records_past:
        return [state for layer in cache.layers for state in _tensors(vars(layer))]
    return recurrent_states(cache.layers)


def _tensors(state) -> list[torch.Tensor]:
    """All tensors with a head dimension in a nest of dictionaries, lists and tuples, in a fixed order."""
    if isinstance(state, torch.Tensor):
        return [state] if state.dim() > 1 else []
    if isinstance(state, dict):
        state = list(state.values())
    return [t for item in state for t in _tensors(item)] if isinstance(state, list | tuple) else []
