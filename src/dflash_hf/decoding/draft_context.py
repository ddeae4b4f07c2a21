"""
The drafter's context: what it has read of the sequences in one call, and what it keeps for the next.

The life of a feature. The target's forward over the prompt passes it to [`DraftContext.append`], which projects it;
`prefill` turns the projections into the drafter's keys and values. After each round, `read` adds the features of the
accepted tokens to the `pending` ones: reading one token costs as much as reading many, so they wait for the next block
and are read in the same forward. `release` frees everything, or keeps it as a [`KeptContext`].
"""

import weakref
from dataclasses import dataclass

import torch

from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.masks import in_window, tokens_in_slots
from dflash_hf.decoding.slots import Ring, SlotCache
from dflash_hf.modeling.modeling_dflash import additive_mask, execution_device


PROMPT_CHUNK = 2048  # prompt tokens, over all rows, that are projected at once: bounds memory
MAX_PENDING = 32  # committed tokens of a row whose features wait for a block; then they are read without one
SINK = 4  # tokens at the start of each row that a drafter attends to besides those in its window

# For each cache that a call returned, and each drafter, what the drafter has read of its tokens. The call that
# continues the cache takes it out; otherwise it lives as long as both.
KEPT_CONTEXTS: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@dataclass(kw_only=True)
class KeptContext:
    """
    The context of a finished call of one row, for the call that continues its cache.

    Whoever takes `cache` owns it and sets the attribute to `None`. Otherwise its slots are freed with this object:
    layers and cache refer to each other, and would wait for the garbage collector.
    """

    first_column: int  # index of the first token that the drafter read, in the row that the target's cache holds
    length: int  # tokens
    pending: list  # as [`DraftContext.pending`]
    cache: SlotCache | None = None  # the default is for `__del__` after a copy that failed

    def __del__(self):
        if self.cache is not None:
            self.cache.clear()


class DraftContext:
    """
    What a drafter has read in one call.

    A row's tokens are counted from the first one that the drafter has read, which lies in slot 0.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        fixed_shapes (`bool`): For graphs: always read as many features as a block has tokens.

    Attributes:
        lengths (`list[int]`): Tokens of each row before its anchor.
        offset (`torch.LongTensor`): `[R, 1]`, position of a row's slot 0.
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
        self.lengths: list[int] = []
        self.cache = SlotCache(0, 0)
        self.first_column = 0
        self.offset = torch.zeros(0, 1, dtype=torch.long)

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

    def prefill(self, padding: list[int], prompt_length: int, offset: torch.LongTensor, continued_cache=None) -> None:
        """
        Write the appended columns of a prompt into the drafter's cache.

        Args:
            padding (`list[int]`): Padding columns at the start of each row.
            prompt_length (`int`): Columns of the prompt and of a prefilled cache, whose features are not available.
            offset (`torch.LongTensor`): `[R, 1]` or `[axes, R, 1]`, position of a row's first token.
            continued_cache (`Cache`, *optional*): The prefilled cache. If a call of this drafter returned it, the
                context of that call is continued, as far as the cache still holds its tokens.
        """
        past_length = prompt_length - self.appended_length
        ring = None
        if self.window is not None:  # a block and what is read before it overwrite nothing in the window
            margin = 2 * (self.draft.config.max_block_tokens + MAX_PENDING)
            ring = Ring(self.window, self.window + margin, SINK)
        pads = torch.tensor(padding, device=offset.device)[:, None]  # [R, 1]
        # Slots are counted from the first token read, positions from a row's first token: rotary attention depends on
        # differences only.
        start = (past_length - pads).clamp(min=0)  # [R, 1], the first token read
        previous = self._take_previous(continued_cache)
        if previous is not None and padding == [0] and self._can_continue(previous, past_length, ring):
            self.cache = previous.cache
            previous.cache = None
            self.first_column = previous.first_column
            # Of what was pending, the tokens that the prefilled cache still holds.
            cut = past_length - previous.first_column
            self.pending = [(states, tokens.masked_fill(tokens >= cut, -1)) for states, tokens in previous.pending]
            start = torch.full_like(start, previous.first_column)
        else:
            previous = None  # frees its slots before others are allocated
            self.first_column = max(past_length - padding[0], 0)
            capacity = prompt_length + self.draft.config.max_block_tokens
            self.cache = SlotCache(len(padding), capacity, ring, self.fixed_shapes)
        row_offset = offset if offset.dim() == 2 else offset[0]
        self.offset = row_offset + start
        self.lengths = (prompt_length - pads - start)[:, 0].tolist()
        self._write_prompt(torch.arange(past_length, prompt_length, device=pads.device) - pads - start)

    def _take_previous(self, continued_cache) -> KeptContext | None:
        """The context of the call that returned this cache."""
        if continued_cache is None:
            return None
        return KEPT_CONTEXTS.get(continued_cache, {}).pop(self.draft, None)

    def _can_continue(self, previous: KeptContext, past_length: int, ring: Ring | None) -> bool:
        """Whether a context has all `past_length` tokens of a cache, in slots that nothing later was written to."""
        keys = previous.cache.layers[0].keys
        if keys.dtype != self.dtype or keys.device != execution_device(self.draft.fc):
            return False
        if previous.cache.ring != ring or previous.cache.fixed_shapes != self.fixed_shapes:
            return False
        max_dropped = previous.length
        if ring is not None and previous.length + self.draft.config.block_size > ring.size:  # slots are reused
            max_dropped = ring.size - ring.window - self.draft.config.block_size
        dropped = previous.first_column + previous.length - past_length
        return 0 <= dropped <= max_dropped

    def _write_prompt(self, tokens: torch.LongTensor) -> None:
        """Write the appended features, which are those of tokens `[R, n]`."""
        self.cache.reserve(max(self.lengths) + self.draft.config.max_block_tokens)
        ring = self.cache.ring
        if ring is not None:  # of the tokens that share a slot, only the last is written
            last = torch.tensor(self.lengths, device=tokens.device)[:, None]
            tokens = tokens.masked_fill((tokens >= SINK) & (tokens < last - ring.size), -1)
        for part in tokens.split([states.shape[1] for states in self.prompt], dim=1):
            self._write(self.prompt.pop(0), part)

    # ------------------------------------------------------------------------------------------------------- a round

    def block_inputs(self, size: int) -> dict:
        """Arguments of the drafter's forward: all that is pending, and a block of `size` tokens after it."""
        features, context = self._take_pending()
        start = torch.tensor(self.lengths, device=self.offset.device)[:, None]
        block = start + torch.arange(size, device=start.device)  # [R, B]
        self.cache.reserve(max(self.lengths) + size)
        groups = [block] if features is None else [context, block]
        self.cache.set_next_tokens(*groups)
        positions = torch.cat([context, block], dim=1) + self.offset
        return {
            "context_hidden_states": None if features is None else self.to_draft(features),
            "attention_mask": self._masks(block),
            "position_ids": self.to_draft(positions.clamp(min=0)),
            "past_key_values": self.cache,
        }

    def read(self, features: torch.Tensor, acceptance: Acceptance) -> None:
        """Collect the features `[R, n, L * H]` of each row's accepted tokens; the first is that of the last anchor."""
        device = self.offset.device
        steps = torch.arange(features.shape[1], device=device)
        counts = torch.tensor(acceptance.counts, device=device)[:, None]
        start = torch.tensor(self.lengths, device=device)[:, None]
        self.pending.append((features, torch.where(steps < counts, start + steps, -1)))
        self.lengths = [length + count for length, count in zip(self.lengths, acceptance.counts, strict=True)]
        if sum(tokens.shape[1] for _, tokens in self.pending) > MAX_PENDING:
            features, tokens = self._take_pending()
            self.cache.reserve(max(self.lengths))
            self._write(self.draft.project_context(self.to_draft(features)), tokens)

    def _take_pending(self) -> tuple[torch.Tensor | None, torch.LongTensor]:
        """The pending features `[R, n, L * H]` and their tokens `[R, n]`; no features are `None`."""
        parts = self.pending
        self.pending = []
        if len(parts) == 1:
            features, tokens = parts[0]
        elif parts:
            features = torch.cat([states for states, _ in parts], dim=1)
            tokens = torch.cat([indices for _, indices in parts], dim=1)
        else:
            features = None
            tokens = self.offset.new_zeros(len(self.lengths), 0)
        if not self.fixed_shapes:
            return features, tokens
        if features is None:
            width = self.draft.fc.in_features
            features = torch.zeros(len(tokens), 0, width, dtype=self.dtype, device=tokens.device)
        missing = max(self.draft.config.max_block_tokens - tokens.shape[1], 0)
        padded = torch.nn.functional.pad(features, (0, 0, 0, missing))
        return padded, torch.nn.functional.pad(tokens, (0, missing), value=-1)

    def _write(self, states: torch.Tensor, tokens: torch.LongTensor) -> None:
        """Write the keys and values of projected features `[R, n, H]` into the drafter's cache, without a block."""
        self.cache.set_next_tokens(tokens)
        positions = self.to_draft((tokens + self.offset).clamp(min=0))
        self.draft.extend_context(states, positions, self.cache)

    def _masks(self, block: torch.LongTensor) -> dict[str, torch.Tensor]:
        """For each layer type, the additive mask `[R, 1, B, view]` of a block of these tokens `[R, B]`."""
        ring = self.cache.ring
        last = block[:, -1:]
        tokens = tokens_in_slots(self.cache, ring, last)
        if ring is not None:  # tokens before the window count as none
            in_context = (tokens < SINK) | (tokens >= block[:, :1] - ring.window)
            tokens = tokens.masked_fill(~in_context, -1)
        key = tokens[:, None]  # [R or 1, 1, view]

        def mask(window, causal: bool) -> torch.Tensor:
            last_seen = block if causal else last.expand_as(block)
            visible = (key <= last_seen[:, :, None]) & in_window(key, block[:, :, None], window)
            if ring is not None:
                visible = visible & (key >= 0)
            return self.to_draft(additive_mask(visible, self.dtype)[:, None])

        return self.draft.config.by_layer_type(mask)

    # ------------------------------------------------------------------------------------------------- after the call

    def release(self, cache=None) -> None:
        """Free the context, or keep it for the call that continues this cache of a single row."""
        if cache is None or len(self.lengths) > 1:
            self.cache.clear()
            return
        kept_context = KeptContext(
            first_column=self.first_column, length=self.lengths[0], pending=self.pending, cache=self.cache
        )
        KEPT_CONTEXTS.setdefault(cache, weakref.WeakKeyDictionary())[self.draft] = kept_context

    def to_draft(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the drafter's device, and, if floating, in its dtype."""
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=execution_device(self.draft.fc), dtype=dtype)
