"""
How a target checks a block and goes back to the accepted length: by slots or by `crop`.

A session is opened on the cache that the prompt left behind. `verify` runs one forward over a block whose first token
is token number `start` of its row; `commit` drops what was rejected; `close` gives the cache back as `generate` does.
"""

import inspect

import torch
from transformers import cache_utils, masking_utils
from transformers.cache_utils import CacheLayerMixin, StaticLayer
from transformers.generation import utils as generation_utils

from .cache_dflash import SlotCache, can_adopt, slot_mask
from .target_dflash import input_device
from .tree_dflash import DraftTree


# Arguments that a session passes itself, or that belong to the prompt alone.
_OWN_ARGUMENTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache"}
_OWN_ARGUMENTS |= {"output_attentions", "output_hidden_states"}
_CACHES = ("past_key_values", "cache_params")
# Layers that no session can be opened on; the second base was the first's, before there was quantisation to 8 bits.
FIXED = (StaticLayer, getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer))
_PROMPT_ARGUMENTS = {"mm_token_type_ids", "logits_to_keep", "cache_position"}


def cache_argument(target) -> str:
    """The name under which a target's forward takes its cache."""
    accepted = inspect.signature(target.forward).parameters
    return next((name for name in _CACHES if name in accepted), _CACHES[0])


def cached_columns(cache) -> int:
    """Columns that a cache holds before the prompt; recurrent layers alone do not tell, and their prompt is whole."""
    return cache.get_seq_length() if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) else 0


class SlotSession:
    """
    A target whose cache lives in slots: any number of rows, each with its own length; rolling back is free.

    Args:
        target (`PreTrainedModel`): The target.
        cache (`Cache`): What the prompt left behind.
        padding (`list[int]`): Padding columns at the start of each row.
        capacity (`int`): Slots of each row.
        offset (`torch.LongTensor`): `[R, 1]` or `[axes, R, 1]`, position of a row's slot 0.
        extra (`dict`): Further arguments of the target's forward.
        pool (`dict`, *optional*): As for [`SlotCache`].
    """

    cache_class = SlotCache
    in_step = False  # whether all rows must keep equally many tokens
    records_past = False  # whether the cache must be told before the prompt that it will be rolled back
    free = True  # committing changes nothing: rounds can be compiled, and run before the host knows what was accepted

    def __init__(self, target, cache, padding, capacity, offset, extra, pool=None):
        self.target, self.offset, self.source, self.padding = target, offset, cache, padding
        self.cache = self.cache_class.adopt(cache, padding, capacity, pool)
        self.arguments = {**extra, cache_argument(target): self.cache, "use_cache": True}
        self.windows, self.dtype = mask_windows(target), target.dtype
        if not any(self.windows.values()):  # no layer has a mask
            self.windows = {None: None}
        self.last_slot = None  # [], of the text: a block may reach past it, into slots that have no position

    @staticmethod
    def takes(cache) -> bool:
        """Whether a session can be opened on such a cache."""
        return can_adopt(cache)

    def verify(self, block: torch.LongTensor, start: torch.LongTensor, used: int) -> torch.Tensor:
        """Logits `[R, n, V]` after each token of `block` `[R, n]`, which stands at slots `start..start + n - 1`."""
        return self._forward(block, start, used)

    def verify_tree(self, tree: DraftTree, start: torch.LongTensor, used: int) -> torch.Tensor:
        """
        Logits `[R, n, V]` after each node of a tree, whose anchor stands at slot `start`, the others behind it. A node
        has the position of its depth, and sees the past, its ancestors and itself.
        """
        return self._forward(tree.tokens, start, used, tree)

    def _forward(self, block, start, used, tree=None):
        slots = start[:, None] + torch.arange(block.shape[1], device=start.device)  # [R, n]
        self.cache.place(slots, used=used)
        masks = {
            name: None if rule is None else slot_mask(slots, slots, self.cache.view, *rule, self.dtype, tree)
            for name, rule in self.windows.items()
        }
        numbers = slots if tree is None else start[:, None] + tree.depths
        return self.target(
            input_ids=block,
            attention_mask=masks[None] if None in masks else masks,
            position_ids=(numbers if self.last_slot is None else numbers.minimum(self.last_slot)) + self.offset,
            **block_arguments(self.arguments, block.shape[1]),
        ).logits

    def straighten(self, start: torch.LongTensor, way: torch.LongTensor) -> None:
        """Put the tokens on the way `[R, n]` through a tree, which starts at slot `start`, one behind the other."""
        self.cache.move(start[:, None] + way, start[:, None] + torch.arange(way.shape[1], device=start.device))

    def commit(self, size: int, kept: list[int]) -> None:
        """Of the `size` verified tokens of each row keep `kept[row]`: the next block is written over the others."""

    def first_columns(self, keys: int, end: int) -> list[int]:
        """The column, in each row, of the first of so many keys that a block saw which ends before column `end`."""
        return self.padding

    def close(self, columns: int):
        """The cache as `generate` returns it without a drafter."""
        return self.cache.release(self.source, self.padding, columns)

    def clear(self) -> None:
        """Let go of what a session holds besides the caller's cache."""
        self.cache.clear()


class CropSession:
    """A target whose cache is cropped after each verification: any cache that can crop itself, all rows in step."""

    in_step = True
    records_past = True
    free = False

    def __init__(self, target, cache, padding, capacity, offset, extra, pool=None):
        self.target, self.offset, self.cache, self.padding = target, offset, cache, padding
        self.arguments = {**extra, cache_argument(target): cache, "use_cache": True}

    @staticmethod
    def takes(cache) -> bool:
        """Whether a session can be opened on such a cache."""
        return not any(isinstance(layer, FIXED) for layer in cache.layers)

    def verify(self, block: torch.LongTensor, start: torch.LongTensor, used: int) -> torch.Tensor:
        positions = start[:, None] + torch.arange(block.shape[1], device=start.device) + self.offset
        mask = None
        if any(self.padding):
            length = self.padding[0] + int(start[0]) + block.shape[1]
            columns = torch.arange(length, device=block.device)
            mask = (columns >= torch.tensor(self.padding, device=block.device)[:, None]).long()
        arguments = block_arguments(self.arguments, block.shape[1])
        return self.target(input_ids=block, attention_mask=mask, position_ids=positions, **arguments).logits

    def commit(self, size: int, kept: list[int]) -> None:
        # Also with nothing rejected: only `crop` shrinks a sliding layer back to its window.
        self.cache.crop(kept[0] - size)

    def first_columns(self, keys: int, end: int) -> list[int]:
        return [end - keys] * len(self.padding)

    def close(self, columns: int):
        return self.cache

    def clear(self) -> None:
        pass


def activate_past_recording(cache) -> None:
    """Sliding layers keep what a roll-back may need only when told so before the first forward."""
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()


def mask_windows(target) -> dict[str | None, tuple[int | None, int | None] | None]:
    """
    The masks a target wants, as upstream hands them over for static caches: `{None: ...}` when one mask serves all
    layers, else one entry for each layer type; each with its window and chunk length in tokens, `None` for recurrent
    layers, whose mask would tell padding, of which a block has none.

    Raises:
        `ValueError`: a layer type whose rule is not known here.
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
    nothing = {"attention_mask": None, "past_key_values": None, "position_ids": None}
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
    """Arguments of a forward over `size` tokens: the type of the prompt's last token is that of all that follow."""
    types = arguments.get("token_type_ids")  # [R, 1]
    return arguments if types is None else {**arguments, "token_type_ids": types.expand(-1, size)}


def extra_arguments(target, model_kwargs: dict) -> dict:
    """Arguments of `generate` that every forward of the target gets, such as adapter names; see `block_arguments`."""
    accepted = inspect.signature(target.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    skip = _OWN_ARGUMENTS | _PROMPT_ARGUMENTS | {*_CACHES}
    prompt_only = getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())
    return {
        key: value[:, -1:] if key == "token_type_ids" and value is not None else value
        for key, value in model_kwargs.items()
        if key not in skip and key not in prompt_only and (takes_any or key in accepted)
    }
