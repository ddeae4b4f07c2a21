"""
How a target verifies a block and rolls back to the accepted length, with its cache in slots.

A session is opened on the prompt's cache. `verify` runs one forward over a block whose first token is token number
`start` of its row; `commit` drops the rejected tokens; `close` returns the cache as `generate` does.
"""

import inspect

import torch
from transformers import masking_utils

from .accept_dflash import Draft, Verdict
from .cache_dflash import SlotCache, can_adopt, slot_mask
from .target_dflash import CACHE_NAME, cache_argument, input_device


class SlotSession:
    """
    A target whose cache lives in slots: any number of rows, each with its own length; rolling back is free.

    Args:
        target (`PreTrainedModel`): The target.
        cache (`Cache`): The prompt's cache.
        padding (`list[int]`): Padding columns at the start of each row.
        capacity (`int`): Slots of each row.
        offset (`torch.LongTensor`): `[R, 1]` or `[axes, R, 1]`, position of a row's slot 0.
        extra (`dict`): Additional arguments of the target's forward.
        pool (`dict`, *optional*): As for [`SlotCache`].
        last_slot (`int`, *optional*): Last slot of the text: a block may reach past it, to slots without a position.

    Attributes:
        within (`torch.LongTensor`, *optional*): `[R]`, the last slot of each row that has one of the target's
            `max_position_embeddings` positions. No draft reaches past it before the text does; `None` is no bound.
    """

    windows: dict[str | None, tuple[int | None, int | None] | None]  # as returned by [`mask_windows`]
    within: torch.LongTensor | None = None
    rollback_is_free = True  # so that rounds can be compiled, and run before the host knows what was accepted

    def __init__(self, target, cache, padding, capacity, offset, extra, pool=None, last_slot=None):
        self.target, self.offset, self.source, self.padding = target, offset, cache, padding
        self.cache = SlotCache.adopt(cache, padding, capacity, pool)
        self.arguments = {**extra, cache_argument(target): self.cache, "use_cache": True}
        if "output_router_logits" in inspect.signature(target.forward).parameters:
            self.arguments["output_router_logits"] = False  # their loss reads a mask of padding, and nobody reads it
        self.windows, self.dtype = mask_windows(target), target.dtype
        if not any(self.windows.values()):  # no layer has a mask
            self.windows = {None: None}
        self.last_slot = None if last_slot is None else torch.tensor(last_slot, device=offset.device)

    @staticmethod
    def takes(cache) -> bool:
        """Whether a session can be opened on such a cache."""
        return can_adopt(cache)

    def verify(self, draft: Draft, start: torch.LongTensor):
        """
        The target's output, with logits `[R, n, V]`, for each token of a draft whose anchor is at slot `start`,
        followed by the other tokens. A tree node's position is its depth; it sees the past, its ancestors and itself.
        """
        slots = start[:, None] + torch.arange(draft.tokens.shape[1], device=start.device)  # [R, n]
        self.cache.place(slots)
        masks = {
            name: None if rule is None else slot_mask(slots, slots, self.cache.view, *rule, self.dtype, draft.tree)
            for name, rule in self.windows.items()
        }
        numbers = slots if draft.tree is None else start[:, None] + draft.tree.depths
        if self.within is not None:
            last = torch.where(start <= self.within, self.within, self.last_slot)
            numbers = numbers.minimum(last[:, None])
        return self.target(
            input_ids=draft.tokens,
            attention_mask=masks[None] if None in masks else masks,
            position_ids=(numbers if self.last_slot is None else numbers.minimum(self.last_slot)) + self.offset,
            **block_arguments(self.arguments, draft.tokens.shape[1]),
        )

    def most(self, start: torch.LongTensor) -> torch.LongTensor | None:
        """`[R]`, maximum number of tokens that may be committed after anchors at `start`; see `within`."""
        if self.within is None:
            return None
        return torch.where(start <= self.within, self.within + 1 - start, self.last_slot)

    def commit(self, start: torch.LongTensor, verdict: Verdict) -> None:
        """Keep the accepted tokens: the path through a tree is made contiguous, the other nodes are overwritten."""
        if verdict.path is not None:
            behind = torch.arange(verdict.path.shape[1], device=start.device)
            self.cache.move(start[:, None] + verdict.path, start[:, None] + behind)

    def close(self, columns: int):
        """The cache as `generate` returns it without a drafter."""
        return self.cache.release(self.source, self.padding, columns)

    def clear(self) -> None:
        """Free everything but the caller's cache."""
        self.cache.clear()


def mask_windows(target) -> dict[str | None, tuple[int | None, int | None] | None]:
    """
    The masks that a target needs, as upstream passes them for static caches: `{None: ...}` when one mask serves all
    layers, else one entry per layer type; each with its window and chunk length in tokens, `None` for recurrent
    layers, whose mask would only mark padding, which blocks do not have.

    Raises:
        `ValueError`: a layer type without a known mask rule.
    """
    config = target.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    rules = {"full_attention": (None, None), "sliding_attention": (window, None), "chunked_attention": (None, chunk)}
    rules |= {"linear_attention": None, "conv": None}
    if getattr(config, "layer_types", None) is None:
        return {None: (window, None) if window is not None else (None, chunk)}
    create = getattr(target, "create_masks_for_generate", masking_utils.create_masks_for_generate)
    like = torch.empty(1, 2, 0, dtype=target.dtype, device=input_device(target))
    nothing = {"attention_mask": None, CACHE_NAME: None, "position_ids": None}
    masks = create(config=target.config, inputs_embeds=like, **nothing)
    types = set(masks) if isinstance(masks, dict) else set(config.layer_types)
    unknown = types - rules.keys()
    if unknown:
        raise ValueError(f"no mask rule for layer types {sorted(unknown)}")
    if isinstance(masks, dict):
        return {name: rules[name] for name in types}
    if len(types) > 1:
        raise ValueError(f"one mask for several layer types {sorted(types)}")
    return {None: rules[types.pop()]}


def block_arguments(arguments: dict, size: int) -> dict:
    """Arguments of a forward over `size` tokens: all have the token type of the prompt's last token."""
    types = arguments.get("token_type_ids")  # [R, 1]
    return arguments if types is None else {**arguments, "token_type_ids": types.expand(-1, size)}
