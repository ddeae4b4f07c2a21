"""
How a target checks a block and goes back to the accepted length: by slots or by `crop`, whichever a probe finds to
work.

A session is opened on the cache that the prompt left behind. `verify` runs one forward over a block whose first token
is token number `start` of its row; `commit` drops what was rejected; `close` gives the cache back as `generate` does.
"""

import inspect
import weakref

import torch
from transformers import DynamicCache, masking_utils
from transformers.generation import utils as generation_utils
from transformers.utils import logging

from .cache_dflash import SlotCache, can_adopt, slot_mask


logger = logging.get_logger(__name__)

# Arguments that a session passes itself, or that belong to the prompt alone.
_OWN_ARGUMENTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache"}
_PROMPT_ARGUMENTS = {"token_type_ids", "mm_token_type_ids", "logits_to_keep", "cache_position"}


class SlotSession:
    """
    A target whose cache lives in slots: any number of rows, each with its own length; rolling back is free.

    Args:
        target (`PreTrainedModel`): The target.
        cache (`Cache`): What the prompt left behind.
        padding (`list[int]`): Padding columns at the start of each row.
        capacity (`int`): Slots of each row.
        offset (`torch.LongTensor`): `[R, 1]`, position of a row's slot 0.
        extra (`dict`): Further arguments of the target's forward.
        pool (`dict`, *optional*): As for [`SlotCache`].
    """

    kind = "slots"

    def __init__(self, target, cache, padding, capacity, offset, extra, pool=None):
        self.target, self.extra, self.offset = target, extra, offset
        self.source, self.padding = cache, padding
        self.cache = SlotCache.adopt(cache, padding, capacity, pool)
        self.windows = mask_windows(target)

    def verify(self, block: torch.LongTensor, start: torch.LongTensor, used: int) -> torch.Tensor:
        """Logits `[R, n, V]` after each token of `block` `[R, n]`, which stands at slots `start..start + n - 1`."""
        slots = start[:, None] + torch.arange(block.shape[1], device=start.device)  # [R, n]
        self.cache.place(slots, used=used)
        dtype = self.target.dtype
        masks = {
            name: slot_mask(slots, slots, self.cache.view, window, chunk, dtype)
            for name, (window, chunk) in self.windows.items()
        }
        return self.target(
            input_ids=block,
            attention_mask=masks.get(None, masks),
            position_ids=slots + self.offset,
            past_key_values=self.cache,
            use_cache=True,
            **self.extra,
        ).logits

    def commit(self, rejected: int) -> None:
        """Nothing to do: the next block is written over the rejected tokens."""

    def close(self, columns: int):
        """The cache as `generate` returns it without a drafter."""
        return self.cache.release(self.source, self.padding, columns)


class CropSession:
    """A target whose cache is cropped after each verification: one row, any cache that can crop itself."""

    kind = "crop"

    def __init__(self, target, cache, padding, capacity, offset, extra, pool=None):
        self.target, self.extra, self.offset = target, extra, offset
        self.cache, self.padding = cache, padding
        activate_past_recording(cache)

    def verify(self, block: torch.LongTensor, start: torch.LongTensor, used: int) -> torch.Tensor:
        positions = start[:, None] + torch.arange(block.shape[1], device=start.device) + self.offset
        mask = None
        if self.padding[0]:
            length = self.padding[0] + int(start[0]) + block.shape[1]
            mask = torch.ones(1, length, dtype=torch.long, device=block.device)
            mask[:, : self.padding[0]] = 0
        outputs = self.target(
            input_ids=block,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            **self.extra,
        )
        return outputs.logits

    def commit(self, rejected: int) -> None:
        # Also with nothing rejected: only `crop` shrinks a sliding layer back to its window.
        self.cache.crop(-rejected)

    def close(self, columns: int):
        return self.cache


def activate_past_recording(cache) -> None:
    """Sliding layers keep what a roll-back may need only when told so before the first forward."""
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()


def mask_windows(target) -> dict[str | None, tuple[int | None, int | None]]:
    """
    The masks a target wants, as upstream hands them over for static caches: `{None: ...}` when one mask serves all
    layers, else one entry for each layer type; each with its window and chunk length in tokens.

    Raises:
        `ValueError`: a layer type whose rule is not known here.
    """
    config = target.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    rules = {"full_attention": (None, None), "sliding_attention": (window, None), "chunked_attention": (None, chunk)}
    if getattr(config, "layer_types", None) is None:
        return {None: (window, None) if window is not None else (None, chunk)}
    create = getattr(target, "create_masks_for_generate", masking_utils.create_masks_for_generate)
    like = torch.empty(1, 2, 0, dtype=target.dtype, device=target.device)
    masks = create(config=target.config, inputs_embeds=like, attention_mask=None, past_key_values=None)
    types = set(masks) if isinstance(masks, dict) else set(config.layer_types)
    unknown = types - rules.keys()
    if unknown:
        raise ValueError(f"no mask rule for layer types {sorted(unknown)}")
    if isinstance(masks, dict):
        return {name: rules[name] for name in types}
    if len(types) > 1:
        raise ValueError(f"one mask for several layer types {sorted(types)}")
    return {None: rules[types.pop()]}


def extra_arguments(target, model_kwargs: dict) -> dict:
    """Arguments of `generate` that every forward of the target gets, such as adapter names."""
    accepted = inspect.signature(target.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    skip = _OWN_ARGUMENTS | _PROMPT_ARGUMENTS
    prompt_only = getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())
    return {
        key: value
        for key, value in model_kwargs.items()
        if key not in skip and key not in prompt_only and (takes_any or key in accepted)
    }


_probed: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@torch.no_grad()
def probe_rollback(target) -> type | None:
    """
    Find out, once for each target, how its cache can be rolled back.

    A short prompt, a block with rejected tokens, a roll-back and a second block must give the logits of one plain
    forward over the kept tokens. Tried with slots, then with `crop`.

    Returns:
        `SlotSession`, `CropSession` or `None` when neither restores the state (recurrent targets, for example).
    """
    known = _probed.setdefault(target, {})
    key = (target.config._attn_implementation, target.dtype)
    if key not in known:
        known[key] = next((kind for kind in (SlotSession, CropSession) if _restores(target, kind)), None)
    return known[key]


def _restores(target, session_class) -> bool:
    vocab_size = target.config.get_text_config().vocab_size
    device = target.get_input_embeddings().weight.device
    tokens = torch.arange(3, 17, device=device)[None] * 7 % max(vocab_size - 1, 2)  # [1, 14], no random numbers drawn
    prompt, kept, wrong, rest = tokens[:, :5], tokens[:, 5:7], tokens[:, :3] + 1, tokens[:, 7:]
    zero = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        expected = target(input_ids=tokens, use_cache=False).logits[:, 5:]  # [1, 9, V]
        cache = DynamicCache(config=target.config.get_text_config(decoder=True))
        if session_class is CropSession:
            activate_past_recording(cache)
        target(input_ids=prompt, past_key_values=cache, use_cache=True, position_ids=zero + torch.arange(5))
        if session_class is CropSession:
            cache.crop(0)
        elif not can_adopt(cache):
            return False
        session = session_class(target, cache, [0], 32, zero, {})
        first = session.verify(torch.cat([kept, wrong], dim=1), zero[0] + 5, used=10)[:, :2]
        session.commit(rejected=3)
        if session_class is CropSession and not _same_state(target, cache, tokens[:, :7]):
            return False
        second = session.verify(rest, zero[0] + 7, used=14)
        session.commit(rejected=0)
    except Exception as error:  # a target may fail in any way at all here; the next kind is tried
        logger.debug("%s cannot roll back with %s: %s", type(target).__name__, session_class.kind, error)
        return False
    return _close(torch.cat([first, second], dim=1), expected)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    difference = (actual - expected).double().norm(dim=-1) / expected.double().norm(dim=-1).clamp(min=1e-12)
    if actual.dtype in (torch.float32, torch.float64):
        return bool(difference.max() < 1e-3)
    # Half precision: rounding moves single positions (an expert chosen otherwise), a wrong state moves all of them.
    return bool(difference.median() < 0.1)


def _same_state(target, cache, tokens) -> bool:
    """Whether a cropped cache holds what a cache that only ever saw `tokens` holds; logits alone can hide a state."""
    fresh = DynamicCache(config=target.config.get_text_config(decoder=True))
    activate_past_recording(fresh)
    target(input_ids=tokens, past_key_values=fresh, use_cache=True)
    fresh.crop(0)
    return all(
        a.shape == b.shape and _close(a, b)
        for ours, theirs in zip(cache.layers, fresh.layers, strict=True)
        for a, b in zip(_tensors(vars(ours)), _tensors(vars(theirs)), strict=True)
    )


def _tensors(state):
    """All tensors with a head dimension in a nest of dictionaries, lists and tuples, in a fixed order."""
    if isinstance(state, torch.Tensor):
        return [state] if state.dim() > 1 else []
    if isinstance(state, dict):
        state = list(state.values())
    return [t for item in state for t in _tensors(item)] if isinstance(state, list | tuple) else []
