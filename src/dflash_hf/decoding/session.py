"""
How a target verifies candidates and keeps the accepted ones, with its cache in slots.

The life of a session. It takes the keys and values out of the prompt's cache. In each round `verify` runs one forward
over the candidates, and `keep` keeps the accepted ones. At the end, also after an interruption, `write_back` moves the
slots into the prompt's cache, if the caller will get it, and `free` drops what is left.
"""

import inspect

import torch
from transformers import masking_utils

from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.attention import with_slot_attention
from dflash_hf.decoding.masks import LayerMaskRule, verification_mask
from dflash_hf.decoding.row_lengths import RowLengths
from dflash_hf.decoding.slots import SlotCache
from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.targets.features import cache_argument, input_device


class SlotSession:
    """
    A target whose cache is in slots: any number of rows, each with its own length; rolling back is free.

    A constructor that fails leaves the prompt's cache whole. The last step of this one that may fail empties that
    cache, and undoes it after an error. So a subclass does everything that may fail *before* `super().__init__`, and
    after it only what cannot.

    Args:
        target (`PreTrainedModel`): The target.
        cache (`Cache`): The prompt's cache, `caller_cache` from now on: empty until `write_back`.
        padding (`list[int]`): Padding columns at the start of each row.
        first_positions (`torch.LongTensor`): `[R, 1]` or `[axes, R, 1]`, the position of the token in each row's slot
            0.
        extra_arguments (`dict`): Additional arguments of the target's forward.
        tap (`FeatureTap`, *optional*): Collects the features of what is verified.
        last_index (`int`, *optional*): Index of the last token that is ever kept. Candidates past it get its position,
            since the target may have no others.
        max_candidates (`int`): Maximum number of tokens of a round's candidates, anchor included.
        graph (`CompiledForward`, *optional*): Runs the forward; shapes are fixed then.
        cuda_graphs (`ModelCudaGraphs`, *optional*): Run what a round launches; shapes are fixed then.
        omits_masks (`bool`): Whether blocks are attended to without a mask where that is possible; ignored if there
            are several rows.

    Class attributes:
        cache_class (`type[SlotCache]`): What takes the prompt's cache over.
        rollback_is_free (`bool`): Whether rejected tokens need no work, since nothing but the slots is stateful.

    Attributes:
        target (`PreTrainedModel`): The target, or a clone of it whose attention reads slots without repeating them.
        lengths (`RowLengths`): Tokens of each row that the cache holds.
    """

    cache_class = SlotCache
    rollback_is_free = True

    def __init__(
        self,
        target,
        cache,
        padding: list[int],
        first_positions: torch.LongTensor,
        extra_arguments: dict,
        tap=None,
        last_index: int | None = None,
        max_candidates: int = 0,
        graph=None,
        cuda_graphs=None,
        omits_masks: bool = False,
    ):
        # Compiled forwards are those of the target itself: they outlive a call.
        self.target = target if graph is not None else with_slot_attention(target)
        has_fixed_shapes = graph is not None or cuda_graphs is not None
        self.omits_masks = omits_masks and len(padding) == 1 and self.target is not target and not has_fixed_shapes
        self.caller_cache = cache
        self.padding = padding
        self.first_positions = first_positions
        self.tap = tap
        self.last_index = last_index
        self.graph = graph
        self.cuda_graphs = cuda_graphs
        self.layer_mask_rules = layer_mask_rules(target)
        takes_router_argument = "output_router_logits" in inspect.signature(target.forward).parameters
        # From here on the caller's cache is empty: whatever may fail comes before.
        self.cache = self.cache_class.adopt(cache, padding, max_candidates, fixed_shapes=has_fixed_shapes)
        self.lengths = RowLengths([self.cache.columns - pad for pad in padding], first_positions.device)
        self.arguments = {**extra_arguments, cache_argument(target): self.cache, "use_cache": True}
        if takes_router_argument:
            # If it is true, the forward computes a loss from a mask of padding, which is absent.
            self.arguments["output_router_logits"] = False

    def inference_context(self):
        """
        The context for the forwards of a round, which records no gradients. Inference mode is faster, but recurrent
        states are written in place between rounds, and a tensor that was made in inference mode cannot be written
        outside of it.
        """
        # Not `inference_mode(False)`: that switches gradients on, inside of `no_grad` too.
        return torch.inference_mode() if self.rollback_is_free else torch.no_grad()

    def verify(self, candidates) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        One forward over candidates (`Block` or `Tree`), whose anchor is each row's next token. A candidate's position
        follows from its depth; it attends to the tokens before the anchor, to its ancestors and to itself.

        Returns:
            Logits `[R, n, V]` after each candidate and, with a tap, its features `[R, n, L * H]`.
        """
        num_candidates = candidates.tokens.shape[1]
        omits_masks = self.omits_masks and candidates.ancestors is None
        self.cache.reserve(self.lengths.longest + num_candidates, exactly=omits_masks)
        if self.cuda_graphs is None:
            return self._verify(candidates, self.lengths.starts, omits_masks)
        key = (candidates.tokens.shape, candidates.ancestors is None)
        return self.cuda_graphs.run(self.cache.num_attended, key, self._verify, candidates, self.lengths.starts)

    def _verify(
        self, candidates, start: torch.LongTensor, omits_masks: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[`verify`] after each row's `start` `[R, 1]`, in reserved slots: nothing here waits for the device."""
        num_candidates = candidates.tokens.shape[1]
        indices = start + torch.arange(num_candidates, device=start.device)  # [R, n]
        self.cache.set_next_indices(indices)
        arguments = self.arguments
        token_type_ids = arguments.get("token_type_ids")
        if token_type_ids is not None:  # [R, 1], of the prompt's last token
            arguments = {**arguments, "token_type_ids": token_type_ids.expand(-1, num_candidates)}
        path_indices = indices if candidates.depths is None else start + candidates.depths
        if self.last_index is not None:
            path_indices = path_indices.clamp(max=self.last_index)
        inputs = {
            "input_ids": candidates.tokens,
            "attention_mask": self._masks(candidates, indices, omits_masks),
            "position_ids": path_indices + self.first_positions,
            **arguments,
        }
        if self.graph is None:
            return self._forward(inputs)
        shapes = (candidates.tokens.shape, self.cache.num_attended)
        return self.graph.run(shapes, self.tap, inputs)

    def _masks(
        self, candidates, indices: torch.LongTensor, omits_masks: bool
    ) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        """
        One mask `[R, 1, n, K]`, or that of each layer type. With `omits_masks`, layers that attend to all earlier
        tokens get none.
        """

        def mask(rule: LayerMaskRule | None) -> torch.Tensor | None:
            if rule is None or (omits_masks and rule == LayerMaskRule()):
                return None
            return verification_mask(self.cache, indices, rule, self.target.dtype, candidates)

        if isinstance(self.layer_mask_rules, dict):
            return {layer_type: mask(rule) for layer_type, rule in self.layer_mask_rules.items()}
        return mask(self.layer_mask_rules)

    def _forward(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.tap is None:
            return self.target(**inputs).logits, None
        with self.tap.running():
            logits = self.target(**inputs).logits
        return logits, self.tap.take()

    def keep(self, acceptance: Acceptance) -> None:
        """Keep the accepted tokens: the path through a tree is made contiguous; the next round overwrites the rest."""
        path = acceptance.device_path
        if path is not None:
            start = self.lengths.starts
            steps = torch.arange(path.shape[1], device=path.device)
            self.cache.copy_tokens(start + path, start + steps)
        self.lengths.add(acceptance)

    def write_back(self, interrupted: Acceptance | None = None):
        """
        Move the slots into the prompt's cache, as `generate` leaves it without a drafter: with the columns of the
        longest row.

        Args:
            interrupted (`Acceptance`, *optional*): What was accepted of a round that was interrupted before `keep`.

        Returns:
            The prompt's cache.
        """
        if interrupted is not None:
            self.keep(interrupted)
        columns = max(length + pad for length, pad in zip(self.lengths.on_host, self.padding, strict=True))
        self.cache.reserve(columns)  # also the rows that ended early are read up to here
        return self.cache.write_back(self.caller_cache, self.padding, columns)

    def free(self) -> None:
        """Free everything but the caller's cache."""
        self.cache.free()


def layer_mask_rules(target) -> LayerMaskRule | dict[str, LayerMaskRule | None] | None:
    """
    The masks that a target's forward takes, as upstream passes them for static caches.

    Returns:
        The rule of the one mask that all layers share, or a dictionary of the rules of each layer type. The rule of
        recurrent layers is `None`: their mask would only mark padding, which slots do not have. `None` if no layer
        takes a mask.

    Raises:
        `ValueError`: a layer type without a known mask rule.
    """
    config = target.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    rules = {
        "full_attention": LayerMaskRule(),
        "sliding_attention": LayerMaskRule(window=window),
        "chunked_attention": LayerMaskRule(chunk=chunk),
        "linear_attention": None,
        "conv": None,
    }
    if getattr(config, "layer_types", None) is None:
        return LayerMaskRule(window=window) if window is not None else LayerMaskRule(chunk=chunk)
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
        takes_masks = any(rule is not None for rule in by_type.values())
        return by_type if takes_masks else None
    if len(types) > 1:
        raise ValueError(f"one mask for several layer types {sorted(types)}")
    return rules[types.pop()]
