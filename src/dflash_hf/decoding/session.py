"""
How a target verifies a draft and keeps its accepted part, with its cache in slots.

The life of a session. It takes the keys and values out of the prompt's cache. In each round `verify` runs one forward
over a draft, and `keep` keeps the accepted tokens. At the end, after an interruption too, `close` writes the slots
back into the prompt's cache, if the caller will get it, and `clear` frees them.
"""

import inspect

import torch
from transformers import masking_utils

from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.masks import MaskRule, verification_mask
from dflash_hf.decoding.slots import SlotCache
from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.targets.features import cache_argument, input_device


class SlotSession:
    """
    A target whose cache lives in slots: any number of rows, each with its own length; rolling back is free.

    Args:
        target (`PreTrainedModel`): The target.
        cache (`Cache`): The prompt's cache, `source` from now on: empty until `close`.
        padding (`list[int]`): Padding columns at the start of each row.
        offset (`torch.LongTensor`): `[R, 1]` or `[axes, R, 1]`, position of a row's slot 0.
        extra_arguments (`dict`): Additional arguments of the target's forward.
        tap (`FeatureTap`, *optional*): Collects the features of what is verified.
        last_slot (`int`, *optional*): Last slot that is ever kept. Tokens of a draft past it get its position, since
            the target may have no others.
        largest_draft (`int`): Maximum number of tokens of a draft, anchor included.
        graph (`CompiledForward`, *optional*): Runs the forward; shapes are fixed then.

    Attributes:
        lengths (`list[int]`): Tokens of each row that the cache holds.
    """

    CACHE = SlotCache
    rollback_is_free = True

    def __init__(
        self,
        target,
        cache,
        padding: list[int],
        offset: torch.LongTensor,
        extra_arguments: dict,
        tap=None,
        last_slot: int | None = None,
        largest_draft: int = 0,
        graph=None,
    ):
        self.target = target
        self.source = cache
        self.padding = padding
        self.offset = offset
        self.tap = tap
        self.last_slot = last_slot
        self.graph = graph
        self.mask_rules = mask_rules(target)
        takes_router_argument = "output_router_logits" in inspect.signature(target.forward).parameters
        # From here on the caller's cache is empty: what may fail comes before.
        self.cache = self.CACHE.adopt(cache, padding, largest_draft, fixed_shapes=graph is not None)
        self.lengths = [self.cache.columns - pad for pad in padding]
        self.arguments = {**extra_arguments, cache_argument(target): self.cache, "use_cache": True}
        if takes_router_argument:
            self.arguments["output_router_logits"] = False  # the loss, which nobody uses, reads a mask of padding

    def without_gradients(self):
        """
        For the forwards of a round. Inference mode is faster, but recurrent states are written in place between
        rounds, and a tensor that was made in inference mode cannot be written outside of it.
        """
        # Not `inference_mode(False)`: that switches gradients on, inside of `no_grad` too.
        return torch.inference_mode() if self.rollback_is_free else torch.no_grad()

    def verify(self, draft) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        One forward over a draft (`Block` or `Tree`), whose anchor is each row's next token. A token's position follows
        from its depth in the draft; it attends to the tokens before the draft, to its ancestors and to itself.

        Returns:
            Logits `[R, n, V]` and, with a tap, features `[R, n, L * H]` of each of its tokens.
        """
        size = draft.tokens.shape[1]
        self.cache.reserve(max(self.lengths) + size)
        start = torch.tensor(self.lengths, device=self.offset.device)[:, None]  # [R, 1]
        slots = start + torch.arange(size, device=start.device)  # [R, n]
        self.cache.set_next_tokens(slots)
        arguments = self.arguments
        types = arguments.get("token_type_ids")
        if types is not None:  # [R, 1], of the prompt's last token
            arguments = {**arguments, "token_type_ids": types.expand(-1, size)}
        positions = slots if draft.depths is None else start + draft.depths
        if self.last_slot is not None:
            positions = positions.clamp(max=self.last_slot)
        inputs = {
            "input_ids": draft.tokens,
            "attention_mask": self._masks(draft, slots),
            "position_ids": positions + self.offset,
            **arguments,
        }
        if self.graph is None:
            return self._forward(inputs)
        shapes = (draft.tokens.shape, self.cache.view)
        return self.graph.run(shapes, self.tap, inputs)

    def _masks(self, draft, slots: torch.LongTensor) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        """One mask `[R, 1, n, view]`, or that of each layer type."""

        def mask(rule: MaskRule | None) -> torch.Tensor | None:
            return None if rule is None else verification_mask(self.cache, slots, rule, self.target.dtype, draft)

        if isinstance(self.mask_rules, dict):
            return {layer_type: mask(rule) for layer_type, rule in self.mask_rules.items()}
        return mask(self.mask_rules)

    def _forward(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.tap is None:
            return self.target(**inputs).logits, None
        with self.tap.running():
            logits = self.target(**inputs).logits
        return logits, self.tap.take()

    def keep(self, acceptance: Acceptance) -> None:
        """Keep the accepted tokens: the path through a tree is made contiguous; the next round overwrites the rest."""
        path = acceptance.path
        if path is not None:
            start = torch.tensor(self.lengths, device=path.device)[:, None]
            steps = torch.arange(path.shape[1], device=path.device)
            self.cache.copy_tokens(start + path, start + steps)
        self.lengths = [length + count for length, count in zip(self.lengths, acceptance.counts, strict=True)]

    def close(self, interrupted: Acceptance | None = None):
        """
        Write the slots back into the prompt's cache, as `generate` leaves it without a drafter: with the columns of
        the longest row, and what was accepted before a round was interrupted.
        """
        if interrupted is not None:
            self.keep(interrupted)
        columns = max(length + pad for length, pad in zip(self.lengths, self.padding, strict=True))
        self.cache.reserve(columns)  # rows that ended early are read up to here, too
        return self.cache.release(self.source, self.padding, columns)

    def clear(self) -> None:
        """Free everything but the caller's cache."""
        self.cache.clear()


def mask_rules(target) -> MaskRule | dict[str, MaskRule | None] | None:
    """
    The masks that a target's forward takes, as upstream passes them for static caches.

    Returns:
        The rule of the one mask of all layers; or that of each layer type, `None` for recurrent layers, whose mask
        would only mark padding, which slots do not have. `None` if no layer takes a mask.

    Raises:
        `ValueError`: a layer type without a known mask rule.
    """
    config = target.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    rules = {
        "full_attention": MaskRule(),
        "sliding_attention": MaskRule(window=window),
        "chunked_attention": MaskRule(chunk=chunk),
        "linear_attention": None,
        "conv": None,
    }
    if getattr(config, "layer_types", None) is None:
        return MaskRule(window=window) if window is not None else MaskRule(chunk=chunk)
    create = getattr(target, "create_masks_for_generate", masking_utils.create_masks_for_generate)
    embeds = torch.empty(1, 2, 0, dtype=target.dtype, device=input_device(target))
    no_inputs = {"attention_mask": None, CACHE_NAME: None, "position_ids": None}
    masks = create(config=target.config, inputs_embeds=embeds, **no_inputs)
    types = set(masks) if isinstance(masks, dict) else set(config.layer_types)
    unknown = types - rules.keys()
    if unknown:
        raise ValueError(f"no mask rule for layer types {sorted(unknown)}")
    if isinstance(masks, dict):
        by_type = {name: rules[name] for name in types}
        return by_type if any(by_type.values()) else None
    if len(types) > 1:
        raise ValueError(f"one mask for several layer types {sorted(types)}")
    return rules[types.pop()]
