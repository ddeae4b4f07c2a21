"""Drafting: the context that a drafter has read, and the blocks that it proposes."""

import weakref
from dataclasses import dataclass
from functools import partial

import torch

from dflash_hf.decoding.acceptance import Acceptance, Block, argmax_token
from dflash_hf.decoding.masks import in_window, tokens_in_slots
from dflash_hf.decoding.sampling_noise import SamplingNoise
from dflash_hf.decoding.slots import Ring, SlotCache
from dflash_hf.modeling.modeling_dflash import additive, execution_device


TOKENS_AT_ONCE = 2048  # prompt tokens projected to the drafter's context at a time: bounds memory
STEPS_AT_ONCE = 32  # committed tokens whose features are collected while nothing is drafted
SINK = 4  # tokens at the start of each row that a drafter sees besides those in its window

# For each cache that was returned, and each drafter, what that has read of its tokens. A call that continues the cache
# takes it out; otherwise it lives as long as both.
CONTEXTS: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@dataclass
class KeptContext:
    """
    The context of a call of one row, for the call that continues its cache.

    Whoever takes `cache` owns it and leaves `None`; otherwise its slots are freed with this object, since layers and
    cache refer to each other and would wait for the garbage collector.
    """

    cache: SlotCache | None
    first_column: int  # of the first token that the drafter saw
    length: int  # tokens
    pending: list  # as [`DraftContext.pending`]

    def __del__(self):
        if self.cache is not None:
            self.cache.clear()


class DraftContext:
    """
    What a drafter has read in one call.

    The life of a feature. The target's forward over the prompt gives it to `append`, which projects it; `prefill`
    turns the projections into keys and values. After each round `read` puts the features of the accepted tokens among
    the `pending` ones: reading one token costs as much as reading many, so they wait for the next block and are read
    in the same forward.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        fixed_shapes (`bool`): For graphs: always read as many features as a block has tokens.

    Attributes:
        lengths (`list[int]`): Tokens of each row before its anchor.
        offset (`torch.LongTensor`): `[R, 1]`, position of a row's slot 0.
        prompt (`list[torch.Tensor]`): Projected features `[R, n, H]` of the prompt that are not in the cache yet.
        pending (`list[tuple]`): Features `[R, n, L * H]` that the drafter has not read, and their tokens `[R, n]`.
    """

    def __init__(self, draft, fixed_shapes: bool = False):
        window = draft.decoding_config.window
        if window == "trained":
            window = draft.config.trained_length or None
        self.draft = draft
        self.window = window
        self.fixed_shapes = fixed_shapes
        self.dtype = draft.dtype  # walks through the parameters, which takes longer than a small layer
        self.prompt: list[torch.Tensor] = []
        self.pending: list[tuple[torch.Tensor, torch.LongTensor]] = []
        self.lengths: list[int] = []
        self.cache = SlotCache(0, 0)
        self.first_column = 0
        self.offset = torch.zeros(0, 1, dtype=torch.long)

    def append(self, *features: torch.Tensor) -> None:
        """
        Take the features of the prompt's next columns: `[R, C, L * H]`, or `[R, C, H]` for each layer.

        They become keys and values in `prefill`, after the target's forward: until then each token takes the memory of
        one hidden state instead of every drafter layer's keys and values.
        """
        step = max(TOKENS_AT_ONCE // features[0].shape[0], 1)
        for pieces in zip(*(layer.split(step, dim=1) for layer in features), strict=True):
            joined = torch.cat([self.to_draft(piece) for piece in pieces], dim=-1)  # [R, n, L * H]
            self.prompt.append(self.draft.project_context(joined))

    @property
    def appended(self) -> int:
        """Columns of the prompt appended so far."""
        return sum(states.shape[1] for states in self.prompt)

    def prefill(self, padding: list[int], columns: int, offset: torch.LongTensor, continued=None) -> None:
        """
        Write the appended columns of a prompt into the drafter's cache.

        Args:
            padding (`list[int]`): Padding columns at the start of each row.
            columns (`int`): Columns of the prompt and of a prefilled cache, whose features are not seen.
            offset (`torch.LongTensor`): `[R, 1]` or `[axes, R, 1]`, position of a row's first token.
            continued (`Cache`, *optional*): The prefilled cache. If a call of this drafter returned it, the context
                of that call goes on, as far as the cache still holds its tokens.
        """
        past = columns - self.appended
        ring = None
        if self.window is not None:  # a block and what is read before it overwrite nothing in the window
            margin = 2 * (self.draft.config.max_block_tokens + STEPS_AT_ONCE)
            ring = Ring(self.window, self.window + margin, SINK)
        pads = torch.tensor(padding, device=offset.device)[:, None]  # [R, 1]
        # Slots are counted from the first token seen, positions from a row's first token: rotary attention depends on
        # differences only.
        start = (past - pads).clamp(min=0)  # [R, 1], the first token seen
        before = None if continued is None else CONTEXTS.get(continued, {}).pop(self.draft, None)
        if before is not None and padding == [0] and self._can_continue(before, past, ring):
            self.cache = before.cache
            before.cache = None
            self.first_column = before.first_column
            # Of what was not read, the tokens that the prefilled cache still holds.
            cut = past - before.first_column
            self.pending = [(states, tokens.masked_fill(tokens >= cut, -1)) for states, tokens in before.pending]
            start = torch.full_like(start, before.first_column)
        else:
            before = None  # frees its slots, before others are made
            self.first_column = max(past - padding[0], 0)
            capacity = columns + self.draft.config.max_block_tokens
            self.cache = SlotCache(len(padding), capacity, ring, self.fixed_shapes)
        row_offset = offset if offset.dim() == 2 else offset[0]
        self.offset = row_offset + start
        self.lengths = (columns - pads - start)[:, 0].tolist()
        self._write_prompt(torch.arange(past, columns, device=pads.device) - pads - start)

    def _write_prompt(self, tokens: torch.LongTensor) -> None:
        """Write what was appended, the features of these tokens `[R, n]`."""
        self.cache.reserve(max(self.lengths) + self.draft.config.max_block_tokens)
        ring = self.cache.ring
        if ring is not None:  # of the tokens that share a slot, only the last is written
            last = torch.tensor(self.lengths, device=tokens.device)[:, None]
            tokens = tokens.masked_fill((tokens >= SINK) & (tokens < last - ring.size), -1)
        for part in tokens.split([states.shape[1] for states in self.prompt], dim=1):
            self._write(self.prompt.pop(0), part)

    def _can_continue(self, before: KeptContext, past: int, ring: Ring | None) -> bool:
        """Whether a context has all `past` tokens of a cache, in slots that nothing later was written to."""
        keys = before.cache.layers[0].keys
        if keys.dtype != self.dtype or keys.device != execution_device(self.draft.fc):
            return False
        if before.cache.ring != ring or before.cache.fixed_shapes != self.fixed_shapes:
            return False
        most = before.length
        if ring is not None and before.length + self.draft.config.block_size > ring.size:  # slots are reused
            most = ring.size - ring.window - self.draft.config.block_size
        dropped = before.first_column + before.length - past
        return 0 <= dropped <= most

    def release(self, cache=None) -> None:
        """Free the context, or keep it for the call that continues this cache of a single row."""
        if cache is None or len(self.lengths) > 1:
            self.cache.clear()
            return
        kept = KeptContext(self.cache, self.first_column, self.lengths[0], self.pending)
        CONTEXTS.setdefault(cache, weakref.WeakKeyDictionary())[self.draft] = kept

    def read(self, features: torch.Tensor, acceptance: Acceptance) -> None:
        """Collect the features `[R, n, L * H]` of the accepted tokens of each row; the first is the last anchor."""
        device = self.offset.device
        steps = torch.arange(features.shape[1], device=device)
        counts = torch.tensor(acceptance.counts, device=device)[:, None]
        start = torch.tensor(self.lengths, device=device)[:, None]
        self.pending.append((features, torch.where(steps < counts, start + steps, -1)))
        self.lengths = [length + count for length, count in zip(self.lengths, acceptance.counts, strict=True)]
        if sum(tokens.shape[1] for _, tokens in self.pending) > STEPS_AT_ONCE:
            features, tokens = self._take_pending()
            self.cache.reserve(max(self.lengths))
            self._write(self.draft.project_context(self.to_draft(features)), tokens)

    def _take_pending(self) -> tuple[torch.Tensor | None, torch.LongTensor]:
        """The features that were not read yet, and their tokens; `None` if there are none."""
        parts = self.pending
        self.pending = []
        if len(parts) == 1:
            features, tokens = parts[0]
        elif parts:
            features = torch.cat([states for states, _ in parts], dim=1)
            tokens = torch.cat([numbers for _, numbers in parts], dim=1)
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
        self.cache.place(tokens)
        positions = self.to_draft((tokens + self.offset).clamp(min=0))
        self.draft.extend_context(states, positions, self.cache)

    def block_inputs(self, size: int) -> dict:
        """Arguments of the drafter's forward over all that is pending and a block of `size` tokens after the text."""
        features, before = self._take_pending()
        start = torch.tensor(self.lengths, device=self.offset.device)[:, None]
        block = start + torch.arange(size, device=start.device)  # [R, B]
        self.cache.reserve(max(self.lengths) + size)
        groups = [block] if features is None else [before, block]
        self.cache.place(*groups)
        positions = torch.cat([before, block], dim=1) + self.offset
        return {
            "context_hidden_states": None if features is None else self.to_draft(features),
            "attention_mask": self._masks(block),
            "position_ids": self.to_draft(positions.clamp(min=0)),
            "past_key_values": self.cache,
        }

    def _masks(self, block: torch.LongTensor) -> dict[str, torch.Tensor]:
        """For each layer type, the additive mask `[R, 1, B, view]` of a block of these tokens `[R, B]`."""
        ring = self.cache.ring
        last = block[:, -1:]
        tokens = tokens_in_slots(self.cache, ring, last)
        if ring is not None:  # tokens before the window are as good as none
            in_context = (tokens < SINK) | (tokens >= block[:, :1] - ring.window)
            tokens = tokens.masked_fill(~in_context, -1)
        key = tokens[:, None]  # [R or 1, 1, view]

        def mask(window, causal: bool) -> torch.Tensor:
            last_seen = block if causal else last.expand_as(block)
            visible = (key <= last_seen[:, :, None]) & in_window(key, block[:, :, None], window)
            if ring is not None:
                visible = visible & (key >= 0)
            return self.to_draft(additive(visible, self.dtype)[:, None])

        return self.draft.config.by_layer_type(mask)

    def to_draft(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the drafter's device, and, if floating, in its dtype."""
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=execution_device(self.draft.fc), dtype=dtype)


class Drafter:
    """
    A drafter in one call.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        target (`PreTrainedModel`): The target, for its embedding and head.
        noise ([`SamplingNoise`], *optional*): Of the target's next samples, which drafts allow for.
        block_tokens (`int`, *optional*): Tokens of a drafted block, anchor included. Default: the trained size.
        graph (`CompiledForward`, *optional*): Runs the drafter's forward; shapes are fixed then.

    Attributes:
        context ([`DraftContext`]): What it has read of the text.
        head (`TokenHead`): Chooses the tokens of a block.
    """

    def __init__(self, draft, target, noise: SamplingNoise | None = None, block_tokens: int | None = None, graph=None):
        self.draft = draft
        self.target = target
        self.noise = noise
        self.block_tokens = block_tokens or draft.config.max_block_tokens
        self.graph = graph
        self.head = draft.config.token_head_class(draft, partial(draft.embed, target))
        self.context = DraftContext(draft, fixed_shapes=graph is not None)

    def read(self, features: torch.Tensor, acceptance: Acceptance) -> None:
        """Read the features `[R, n, L * H]` of a draft, those of its accepted tokens."""
        self.context.read(acceptance.select(features), acceptance)

    def draft_block(self, anchors: torch.LongTensor, draws: list[int], size: int | None = None) -> Block:
        """
        The tokens that the drafter chooses from left to right.

        Args:
            anchors (`torch.LongTensor`): `[R]`, the last committed token of each row.
            draws (`list[int]`): The number of each row's next sample, for the noise.
            size (`int`, *optional*): Tokens of the block to return, anchor included.
        """
        hidden = self.hidden_states(anchors)
        if size is not None:
            hidden = hidden[:, : size - 1]
        return Block(self.decode_block(anchors, hidden, draws))

    def hidden_states(self, anchors: torch.LongTensor) -> torch.Tensor:
        """`[R, block_tokens - 1, H]` after the final norm, of the slots that draft."""
        config = self.draft.config
        # Where the last slot drafts a token, too, a block has one slot less than tokens.
        slots = self.block_tokens - (config.max_block_tokens - config.block_size)
        masked = anchors.new_full((len(anchors), slots - 1), config.mask_token_id)
        block = self.draft.embed(self.target, torch.cat([anchors[:, None], masked], dim=1))
        inputs = {"noise_embeds": self.context.to_draft(block), **self.context.block_inputs(slots)}
        if self.graph is None:
            hidden = self.draft(**inputs).last_hidden_state
        else:
            shapes = (inputs["noise_embeds"].shape, inputs["context_hidden_states"].shape, self.context.cache.view)
            hidden = self.graph.run(shapes, inputs)
        # Slot 0 is the anchor's: it predicts the next token or nothing.
        first = 0 if config.sample_from_anchor else 1
        return hidden[:, first : first + self.block_tokens - 1]

    def decode_block(self, anchors: torch.LongTensor, hidden: torch.Tensor, draws: list[int]) -> torch.LongTensor:
        """
        Choose the tokens of a block from left to right.

        Args:
            anchors (`torch.LongTensor`): `[R]`.
            hidden (`torch.Tensor`): `[R, n, H]`, of the slots that draft.
            draws (`list[int]`): As for `draft_block`.

        Returns:
            `torch.LongTensor` `[R, n + 1]`, the anchors first.
        """
        logits = self.logits(hidden, draws)
        if self.head.order == 0:
            tokens = self.draft.target_ids(argmax_token(logits))
        else:
            tokens = self.head.decode_block(self.in_vocabulary(anchors), hidden, logits, self.draft.target_ids)
        return torch.cat([anchors[:, None], tokens.to(anchors.device)], dim=1)

    def logits(self, hidden: torch.Tensor, draws: list[int]) -> torch.Tensor:
        """
        Draft logits `[R, n, V]`; with the noise of the target's next samples, if it is known: then the likeliest token
        of a slot is the one that would be drawn.
        """
        logits = self.draft.draft_logits(hidden, self.target.get_output_embeddings())
        if self.noise is None:
            return logits
        ids: slice | torch.Tensor = slice(logits.shape[-1])
        if self.draft.config.has_own_lm_head:
            ids = self.draft.target_ids(torch.arange(logits.shape[-1])).clamp(max=self.noise.vocab_size - 1)
        noise = self.noise.gumbel(draws, logits.shape[1], ids)
        return logits.float() / self.noise.temperature + noise.to(logits.device)

    def candidates(self, hidden: torch.Tensor, draws: list[int]) -> tuple[torch.LongTensor, torch.Tensor]:
        """The candidates of each slot, as the target's ids, and their draft logits, `[R, n, k]` both."""
        ids, logits = self.head.candidates(self.logits(hidden, draws))
        ids = self.draft.target_ids(ids).to(hidden.device)
        logits = logits.to(hidden.device)
        return ids.expand_as(logits), logits

    def in_vocabulary(self, anchors: torch.LongTensor) -> torch.LongTensor:
        """The anchors for a head: a target with padding rows may sample ids past the drafter's vocabulary."""
        anchors = anchors.to(execution_device(self.draft.fc))
        vocab_size = self.draft.config.vocab_size
        return anchors if vocab_size is None else anchors.clamp(max=vocab_size - 1)


def padding_of(mask: torch.Tensor | None, rows: int) -> list[int]:
    """The padding columns at the start of each row of a prompt."""
    if mask is None:
        return [0] * rows
    return (mask.shape[1] - mask.long().sum(dim=1)).tolist()
