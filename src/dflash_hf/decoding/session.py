"""
How a target verifies a draft and keeps its accepted part, with its cache in slots.

A session is opened on the prompt's cache. `verify` runs one forward over a draft, `keep` drops what was rejected,
`close` returns the cache as `generate` does.
"""

import inspect

import torch
from transformers import masking_utils

from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.masks import verification_mask
from dflash_hf.decoding.slots import SlotCache
from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.targets.features import cache_argument, input_device


class SlotSession:
    """
    A target whose cache lives in slots: any number of rows, each with its own length; rolling back is free.

    Args:
        target (`PreTrainedModel`): The target.
        cache (`Cache`): The prompt's cache. The session owns what it holds until `close`.
        padding (`list[int]`): Padding columns at the start of each row.
        offset (`torch.LongTensor`): `[R, 1]` or `[axes, R, 1]`, position of a row's slot 0.
        extra (`dict`): Additional arguments of the target's forward.
        tap (`FeatureTap`, *optional*): Collects the features of what is verified.
        last_slot (`int`, *optional*): Last slot that is ever kept: a draft may reach past it, to others' positions.
        largest_draft (`int`): Tokens of the largest draft.
        graph (`CompiledForward`, *optional*): Runs the forward; shapes are fixed then.

    Attributes:
        lengths (`list[int]`): Tokens of each row that the cache holds.
    """

    CACHE = SlotCache
    rollback_is_free = True

    def __init__(
        self, target, cache, padding, offset, extra, tap=None, last_slot=None, largest_draft: int = 0, graph=None
    ):
        self.target = target
        self.source = cache
        self.padding = padding
        self.offset = offset
        self.tap = tap
        self.last_slot = last_slot
        self.graph = graph
        windows = mask_windows(target)
        self.windows = windows if any(windows.values()) else {None: None}  # no layer has a mask
        # Last: what fails before leaves the cache as it is.
        self.cache = self.CACHE.adopt(cache, padding, largest_draft, fixed_shapes=graph is not None)
        self.lengths = [self.cache.columns - pad for pad in padding]
        self.arguments = {**extra, cache_argument(target): self.cache, "use_cache": True}
        if "output_router_logits" in inspect.signature(target.forward).parameters:
            self.arguments["output_router_logits"] = False  # their loss reads a mask of padding, and nobody reads it

    def without_gradients(self):
        """
        For the forwards of a round. Inference mode is faster, but recurrent states are written in place between
        rounds, and a tensor that was made in inference mode cannot be written outside of it.
        """
        # Not `inference_mode(False)`: that switches gradients on, inside of `no_grad` too.
        return torch.inference_mode() if self.rollback_is_free else torch.no_grad()

    def verify(self, draft) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        One forward over a draft (`Block` or the like), whose anchor is each row's next token. A token's position is
        its depth in the draft; it sees the past, its ancestors and itself.

        Returns:
            Logits `[R, n, V]` and, with a tap, features `[R, n, L * H]` of each of its tokens.
        """
        size = draft.tokens.shape[1]
        self.cache.reserve(max(self.lengths) + size)
        start = torch.tensor(self.lengths, device=self.offset.device)[:, None]  # [R, 1]
        slots = start + torch.arange(size, device=start.device)  # [R, n]
        self.cache.place(slots)
        masks = {
            name: None if rule is None else verification_mask(self.cache, slots, *rule, self.target.dtype, draft)
            for name, rule in self.windows.items()
        }
        arguments = self.arguments
        types = arguments.get("token_type_ids")
        if types is not None:  # [R, 1], of the prompt's last token
            arguments = {**arguments, "token_type_ids": types.expand(-1, size)}
        positions = slots if draft.depths is None else start + draft.depths
        if self.last_slot is not None:
            positions = positions.clamp(max=self.last_slot)
        inputs = {
            "input_ids": draft.tokens,
            "attention_mask": masks[None] if None in masks else masks,
            "position_ids": positions + self.offset,
            **arguments,
        }
        if self.graph is None:
            return self._forward(inputs)
        shape = (draft.tokens.shape, self.cache.view)
        return self.graph.run(shape, self.tap, inputs)

    def _forward(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.tap is None:
            return self.target(**inputs).logits, None
        with self.tap.running():
            logits = self.target(**inputs).logits
        return logits, self.tap.take()

    def keep(self, acceptance: Acceptance) -> None:
        """Keep the accepted tokens: the path through a tree is made contiguous, the rest is overwritten."""
        path = acceptance.path
        if path is not None:
            start = torch.tensor(self.lengths, device=path.device)[:, None]
            steps = torch.arange(path.shape[1], device=path.device)
            self.cache.move(start + path, start + steps)
        self.lengths = [length + count for length, count in zip(self.lengths, acceptance.counts, strict=True)]

    def close(self, interrupted: Acceptance | None = None):
        """
        The cache as `generate` returns it without a drafter, with the columns of the longest row; and with what was
        accepted before a round was interrupted.
        """
        if interrupted is not None:
            self.keep(interrupted)
        columns = max(length + pad for length, pad in zip(self.lengths, self.padding, strict=True))
        self.cache.reserve(columns)  # a row without padding that ended early is filled up, too
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
    rules = {
        "full_attention": (None, None),
        "sliding_attention": (window, None),
        "chunked_attention": (None, chunk),
        "linear_attention": None,
        "conv": None,
    }
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
