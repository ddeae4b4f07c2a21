"""
The drafter's context: what it has read of the sequences in one call, and what it keeps for the next.

The life of a feature. The target's forward over the prompt passes it to [`DraftContext.append`], which projects it;
`prefill` turns the projections into the drafter's keys and values. After each round, `read` adds the features of the
accepted tokens to the `pending` ones: reading one token costs as much as reading many, so they wait for the next block
and are read in the same forward. At the end `free` drops everything, or `keep_for` keeps it as a [`KeptContext`].

Columns, indices, slots and positions are counted as in `slots.py`, but in the drafter's own cache: an index counts
from the first token that the drafter has read, which is in slot 0. This is the row's first token, unless the call
continues a cache whose features the drafter has not seen. If such a cache holds 3 tokens, the drafter's index 0 is
index 3 of the target, `first_index` is 3, and `first_positions` are the target's plus 3.
"""

import copy
import threading
import weakref
from dataclasses import dataclass

import torch

from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.attention import prefers_no_mask
from dflash_hf.decoding.masks import indices_in_slots, is_within
from dflash_hf.decoding.row_lengths import RowLengths
from dflash_hf.decoding.slots import Ring, SlotCache
from dflash_hf.modeling.modeling_dflash import additive_mask, execution_device


PROMPT_CHUNK = 2048  # prompt tokens, over all rows, that are projected at once: bounds memory
MAX_PENDING = 32  # committed tokens of a row whose features wait for a block; more are read without a block
# With a window, tokens at the start of each row that a drafter attends to besides those in the window ("attention
# sinks"). Not to be confused with `config.attention_sink_bias`, a key without a token.
SINK_TOKENS = 4


@dataclass(kw_only=True)
class KeptContext:
    """
    The context of a finished call of one row, for the call that continues its cache.

    Whoever takes `cache` owns it and sets the attribute to `None`. If nobody does, its slots are freed with this
    object: layers and cache refer to each other, and would wait for the garbage collector.
    """

    first_index: int  # index of the first token that the drafter read, in the target's cache
    length: int  # tokens
    pending: list  # as [`DraftContext.pending`]
    cache: SlotCache | None = None  # a default, since `__del__` also runs after a copy that failed halfway

    def __del__(self):
        if self.cache is not None:
            self.cache.free()


class KeptContexts:
    """
    For each cache that a call returned, and each drafter, the context of that call. The call that continues the cache
    takes the context out; until then it lives as long as both the cache and the drafter.

    All methods may be called by several threads at once.
    """

    def __init__(self):
        self._lock = threading.RLock()
        # Cache -> drafter -> `KeptContext`.
        self._of_caches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def keep(self, cache, draft, context: KeptContext) -> None:
        """Keep a drafter's context with a cache."""
        with self._lock:
            self._of_caches.setdefault(cache, weakref.WeakKeyDictionary())[draft] = context

    def take(self, cache, draft) -> KeptContext | None:
        """A drafter's context of a cache, which now belongs to the caller; `None` if there is none."""
        with self._lock:
            contexts = self._of_caches.get(cache)
            return None if contexts is None else contexts.pop(draft, None)

    def of_cache(self, cache) -> list[KeptContext]:
        """The contexts of all drafters of a cache. They stay where they are."""
        with self._lock:
            return list(self._of_caches.get(cache, {}).values())

    def move(self, source, destination) -> None:
        """Keep the contexts of a cache with another one, which continues it."""
        with self._lock:
            if source in self._of_caches:
                self._of_caches[destination] = self._of_caches.pop(source)

    def copy(self, source, destination) -> None:
        """Keep copies of a cache's contexts with another cache: calls write into the contexts that they take."""
        with self._lock:
            if source in self._of_caches:
                self._of_caches[destination] = copy.deepcopy(self._of_caches[source])


KEPT_CONTEXTS = KeptContexts()


class DraftContext:
    """
    What a drafter has read in one call.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        fixed_shapes (`bool`): For graphs: always read as many features as a block has tokens.

    Attributes:
        lengths (`RowLengths`): Tokens of each row before its anchor, from the first that the drafter has read.
        first_positions (`torch.LongTensor`): `[R, 1]`, the position of the token in each row's slot 0.
        prompt (`list[torch.Tensor]`): Projected features `[R, n, H]` of the prompt that are not in the cache yet.
        pending (`list[tuple]`): Features `[R, n, L * H]` that the drafter has not read, and the indices of their
            tokens `[R, n]`; negative: rejected.
    """

    def __init__(self, draft, fixed_shapes: bool = False):
        window = draft.decoding_config.window
        if window == "trained":
            window = draft.config.trained_length or None
        self.draft = draft
        self.window = window
        self.fixed_shapes = fixed_shapes
        self.dtype = draft.dtype  # looking it up iterates over the parameters: longer than a small layer's forward
        self.prompt: list[torch.Tensor] = []
        self.pending: list[tuple[torch.Tensor, torch.LongTensor]] = []
        self.lengths = RowLengths([], torch.device("cpu"))
        self.cache = SlotCache(0, 0)
        self.first_index = 0
        self.first_positions = torch.zeros(0, 1, dtype=torch.long)

    @property
    def device(self) -> torch.device:
        """Where indices and positions are: the device of the call's prompt."""
        return self.first_positions.device

    # ---------------------------------------------------------------------------------------------------- the prompt

    def append(self, *features: torch.Tensor) -> None:
        """
        Take the features of the prompt's next columns: `[R, C, L * H]`, or `[R, C, H]` for each layer.

        They become keys and values in `prefill`, after the target's forward: until then each token takes the memory of
        one hidden state instead of every drafter layer's keys and values.
        """
        step = max(PROMPT_CHUNK // features[0].shape[0], 1)
        for pieces in zip(*(layer.split(step, dim=1) for layer in features), strict=True):
            joined = torch.cat([self.to_draft(piece) for piece in pieces], dim=-1)  # [R, n, L * H]
            self.prompt.append(self.draft.project_context(joined))

    @property
    def appended_length(self) -> int:
        """Columns of the prompt appended so far."""
        return sum(states.shape[1] for states in self.prompt)

    def prefill(
        self, padding: list[int], prompt_length: int, first_positions: torch.LongTensor, continued_cache=None
    ) -> None:
        """
        Write the appended columns of a prompt into the drafter's cache.

        Args:
            padding (`list[int]`): Padding columns at the start of each row.
            prompt_length (`int`): Columns of the prompt and of a prefilled cache, whose features are not available.
            first_positions (`torch.LongTensor`): `[R, 1]` or `[axes, R, 1]`, position of each row's first token.
            continued_cache (`Cache`, *optional*): The prefilled cache. If a call of this drafter returned it, the
                context of that call is continued, as far as the cache still holds its tokens.
        """
        past_length = prompt_length - self.appended_length
        ring = self._ring()
        pads = torch.tensor(padding, device=first_positions.device)[:, None]  # [R, 1]
        previous = self._take_previous(continued_cache)
        if previous is not None and padding == [0] and self._can_continue(previous, past_length, ring):
            self._continue(previous, past_length)
            # [R, 1], the target's index of the token in slot 0 of the drafter.
            first_indices = torch.full_like(pads, previous.first_index)
        else:
            previous = None  # frees its slots before others are allocated
            self.first_index = max(past_length - padding[0], 0)
            capacity = prompt_length + self.draft.config.max_block_tokens
            self.cache = SlotCache(len(padding), capacity, ring, self.fixed_shapes)
            first_indices = (past_length - pads).clamp(min=0)
        row_positions = first_positions if first_positions.dim() == 2 else first_positions[0]  # [R, 1]
        self.first_positions = row_positions + first_indices
        self.lengths = RowLengths((prompt_length - pads - first_indices)[:, 0].tolist(), self.device)
        appended_columns = torch.arange(past_length, prompt_length, device=pads.device)
        self._write_prompt(appended_columns - pads - first_indices)

    def _ring(self) -> Ring | None:
        """The slots that a drafter with a window reuses; `None` without a window."""
        if self.window is None:
            return None
        # The margin keeps a block and what is read before it from overwriting keys inside the window.
        margin = 2 * (self.draft.config.max_block_tokens + MAX_PENDING)
        return Ring(self.window, self.window + margin, SINK_TOKENS)

    def _continue(self, previous: KeptContext, past_length: int) -> None:
        """Take over a context, as far as the prefilled cache of `past_length` columns still holds its tokens."""
        self.cache = previous.cache
        previous.cache = None
        self.first_index = previous.first_index
        num_cached = past_length - previous.first_index  # of the context's tokens, those that the cache still holds
        for features, indices in previous.pending:
            self.pending.append((features, indices.masked_fill(indices >= num_cached, -1)))

    def _take_previous(self, continued_cache) -> KeptContext | None:
        """The context of the call that returned this cache."""
        if continued_cache is None:
            return None
        return KEPT_CONTEXTS.take(continued_cache, self.draft)

    def _can_continue(self, previous: KeptContext, past_length: int, ring: Ring | None) -> bool:
        """Whether a context has all `past_length` tokens of a cache, in slots that nothing later was written to."""
        keys = previous.cache.layers[0].keys
        if keys.dtype != self.dtype or keys.device != execution_device(self.draft.fc):
            return False
        if previous.cache.ring != ring or previous.cache.fixed_shapes != self.fixed_shapes:
            return False
        max_dropped = previous.length
        num_slots = self.draft.config.block_size  # of a block, which were written after the last token
        if ring is not None and previous.length + num_slots > ring.size:  # slots are reused
            max_dropped = ring.size - ring.window - num_slots
        dropped = previous.first_index + previous.length - past_length
        return 0 <= dropped <= max_dropped

    def _write_prompt(self, indices: torch.LongTensor) -> None:
        """Write the appended features, which belong to the tokens with indices `[R, n]`; negative: padding."""
        self.cache.reserve(self.lengths.longest + self.draft.config.max_block_tokens)
        ring = self.cache.ring
        if ring is not None:  # of the tokens that share a slot, only the last is written
            last = self.lengths.starts
            indices = indices.masked_fill((indices >= SINK_TOKENS) & (indices < last - ring.size), -1)
        for part in indices.split([states.shape[1] for states in self.prompt], dim=1):
            self._write(self.prompt.pop(0), part)

    # ------------------------------------------------------------------------------------------------------- a round

    def reserve(self, num_slots: int) -> None:
        """Make room for a block of `num_slots` slots, and all that is read before it."""
        self.cache.reserve(self.lengths.longest + num_slots, exactly=self._omits_masks)

    def block_inputs(
        self, num_slots: int, pending_indices: torch.LongTensor, features: torch.Tensor | None, start: torch.LongTensor
    ) -> dict:
        """
        Arguments of the drafter's forward. Nothing here waits for the device.

        Args:
            num_slots (`int`): Slots of the block, for which `reserve` has made room.
            pending_indices, features: What is read first, from [`take_pending`].
            start (`torch.LongTensor`): `[R, 1]`, the index of the block's first slot in each row.
        """
        block_indices = start + torch.arange(num_slots, device=start.device)  # [R, B]
        groups = [block_indices] if features is None else [pending_indices, block_indices]
        self.cache.set_next_indices(*groups)
        positions = torch.cat([pending_indices, block_indices], dim=1) + self.first_positions
        return {
            "context_hidden_states": None if features is None else self.to_draft(features),
            "attention_mask": self._masks(block_indices),
            "position_ids": self.to_draft(positions.clamp(min=0)),
            "past_key_values": self.cache,
        }

    def read(self, features: torch.Tensor, acceptance: Acceptance) -> None:
        """Collect the features `[R, n, L * H]` of each row's accepted tokens; the first is that of the last anchor."""
        start = self.lengths.starts
        self.lengths.add(acceptance)
        indices = start + torch.arange(features.shape[1], device=self.device)  # [R, n]
        self.pending.append((features, indices.masked_fill(indices >= self.lengths.starts, -1)))
        if sum(indices.shape[1] for _, indices in self.pending) > MAX_PENDING:
            features, indices = self.take_pending()
            self.cache.reserve(self.lengths.longest)
            self._write(self.draft.project_context(self.to_draft(features)), indices)

    def take_pending(self) -> tuple[torch.Tensor | None, torch.LongTensor]:
        """The pending features `[R, n, L * H]`, `None` if there are none, and the indices of their tokens `[R, n]`."""
        parts = self.pending
        self.pending = []
        if len(parts) == 1:
            features, indices = parts[0]
        elif parts:
            features = torch.cat([part_features for part_features, _ in parts], dim=1)
            indices = torch.cat([part_indices for _, part_indices in parts], dim=1)
        else:
            features = None
            indices = self.first_positions.new_zeros(len(self.first_positions), 0)
        if not self.fixed_shapes:
            return features, indices
        if features is None:
            width = self.draft.fc.in_features
            features = torch.zeros(len(indices), 0, width, dtype=self.dtype, device=indices.device)
        missing = max(self.draft.config.max_block_tokens - indices.shape[1], 0)
        padded = torch.nn.functional.pad(features, (0, 0, 0, missing))
        return padded, torch.nn.functional.pad(indices, (0, missing), value=-1)

    def _write(self, states: torch.Tensor, indices: torch.LongTensor) -> None:
        """Write the keys and values of projected features `[R, n, H]` into the drafter's cache, without a block."""
        self.cache.set_next_indices(indices)
        positions = self.to_draft((indices + self.first_positions).clamp(min=0))
        self.draft.extend_context(states, positions, self.cache)

    @property
    def _omits_masks(self) -> bool:
        """Whether layers get no mask if each slot of a block sees all keys."""
        is_whole = len(self.first_positions) == 1 and self.cache.ring is None and not self.fixed_shapes
        return is_whole and prefers_no_mask(self.draft)

    def _masks(self, block_indices: torch.LongTensor) -> dict[str, torch.Tensor | None]:
        """
        For each layer type, the additive mask `[R, 1, B, K]` of a block whose slots have these indices `[R, B]`;
        `None` if it would hide nothing.
        """
        ring = self.cache.ring
        last = block_indices[:, -1:]
        key_indices = indices_in_slots(self.cache, ring, last)
        if ring is not None:  # tokens before the window count as none
            in_context = (key_indices < SINK_TOKENS) | (key_indices >= block_indices[:, :1] - ring.window)
            key_indices = key_indices.masked_fill(~in_context, -1)
        key = key_indices[:, None]  # [R or 1, 1, K]

        def mask(window, causal: bool) -> torch.Tensor | None:
            if self._omits_masks and window is None and not causal:
                return None
            last_visible = block_indices if causal else last.expand_as(block_indices)
            visible = (key <= last_visible[:, :, None]) & is_within(key, block_indices[:, :, None], window)
            if ring is not None:
                visible = visible & (key >= 0)
            return self.to_draft(additive_mask(visible, self.dtype)[:, None])

        return self.draft.config.map_layer_types(mask)

    # ------------------------------------------------------------------------------------------------- after the call

    def free(self) -> None:
        """Free the context."""
        self.cache.free()

    def keep_for(self, cache) -> None:
        """Keep the context for the call that continues this cache; free it if there are several rows."""
        if len(self.first_positions) > 1:
            self.free()
            return
        kept_context = KeptContext(
            first_index=self.first_index, length=self.lengths.longest, pending=self.pending, cache=self.cache
        )
        KEPT_CONTEXTS.keep(cache, self.draft, kept_context)

    def to_draft(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the drafter's device, and, if floating, in its dtype."""
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=execution_device(self.draft.fc), dtype=dtype)
