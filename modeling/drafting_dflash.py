"""Drafting: the context that a drafter keeps, and the blocks that it proposes."""

import weakref
from dataclasses import dataclass
from functools import partial

import torch

from .accept_dflash import Block, Verdict, likeliest
from .cache_dflash import Ring, SlotCache, additive, visible
from .noise_dflash import Noise
from .target_dflash import running_device


TOKENS_AT_ONCE = 2048  # prompt tokens projected to the drafter's context at a time: bounds memory
STEPS_AT_ONCE = 32  # committed tokens whose features are collected while nothing is drafted
SINK = 4  # tokens at the start of each row that a drafter sees besides those in its window

# For each cache that was returned, and each drafter, what that has read of its tokens.
CONTEXTS: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


@dataclass
class KeptContext:
    """The context of a call of one row, for the call that continues its cache."""

    cache: SlotCache | None  # `None` once it was taken
    first_column: int  # of the first token that the drafter saw
    length: int  # tokens
    unread: list  # as [`Context.unread`]

    def __del__(self):  # its layers refer to it
        if self.cache is not None:
            self.cache.clear()


class Context:
    """
    What a drafter has read in one call.

    Features are read when the next block is drafted, together with the block. Until then they are collected: reading
    one token costs as much as reading many.

    Args:
        draft (`DFlashDraftModel`): The drafter.

    Attributes:
        lengths (`list[int]`): Tokens of each row before its anchor.
        offset (`torch.LongTensor`): `[R, 1]`, position of a row's slot 0.
        prompt (`list[torch.Tensor]`): Projected features `[R, n, H]` of the prompt that are not in the cache yet.
        unread (`list[tuple]`): Features `[R, n, L * H]` that the drafter has not read, and their tokens `[R, n]`.
    """

    CACHE = SlotCache

    def __init__(self, draft):
        window = draft.decoding_config.window
        self.draft, self.window = draft, draft.config.trained_length or None if window == "trained" else window
        self.dtype = draft.dtype  # walks through the parameters, which takes longer than a small layer
        self.prompt: list[torch.Tensor] = []
        self.unread: list[tuple[torch.Tensor, torch.LongTensor]] = []
        self.lengths: list[int] = []
        self.cache, self.first_column, self.offset = self.CACHE(0, 0), 0, torch.zeros(0, 1, dtype=torch.long)

    def absorb(self, *features: torch.Tensor) -> None:
        """
        Take the features of the prompt's next columns: `[R, C, L * H]`, or `[R, C, H]` for each layer.

        They become keys and values in `open`, after the target's forward: until then each token takes the memory of
        one hidden state instead of every drafter layer's keys and values.
        """
        step = max(TOKENS_AT_ONCE // features[0].shape[0], 1)
        for pieces in zip(*(layer.split(step, dim=1) for layer in features), strict=True):
            joined = torch.cat([self.to_draft(piece) for piece in pieces], dim=-1)  # [R, n, L * H]
            self.prompt.append(self.draft.project_context(joined))

    @property
    def absorbed(self) -> int:
        """Columns of the prompt absorbed so far."""
        return sum(states.shape[1] for states in self.prompt)

    def open(self, padding: list[int], columns: int, offset: torch.LongTensor, continued=None) -> None:
        """
        Write the absorbed columns of a prompt into the drafter's cache.

        Args:
            padding (`list[int]`): Padding columns at the start of each row.
            columns (`int`): Columns of the prompt and of a prefilled cache, whose features are not seen.
            offset (`torch.LongTensor`): `[R, 1]` or `[axes, R, 1]`, position of a row's first token.
            continued (`Cache`, *optional*): The prefilled cache. If a call of this drafter returned it, the context
                of that call goes on, as far as the cache still holds its tokens.
        """
        past, ring = columns - self.absorbed, None
        if self.window is not None:  # a block and what is read before it overwrite nothing in the window
            ring = Ring(self.window + 2 * (self.draft.config.block_tokens + STEPS_AT_ONCE), SINK)
        pads = torch.tensor(padding, device=offset.device)[:, None]  # [R, 1]
        # Slots are counted from the first token seen, positions from a row's first token: rotary attention depends on
        # differences only.
        start = (past - pads).clamp(min=0)  # [R, 1], the first token seen
        before = None if continued is None else CONTEXTS.get(continued, {}).pop(self.draft, None)
        if before is not None and padding == [0] and self._can_continue(before, past, ring):
            self.cache, before.cache, self.first_column = before.cache, None, before.first_column
            # Of what was not read, the tokens that the prefilled cache still holds.
            cut = past - before.first_column
            self.unread = [(states, tokens.masked_fill(tokens >= cut, -1)) for states, tokens in before.unread]
            start = torch.full_like(start, before.first_column)
        else:
            before = None  # frees its slots, before others are made
            self.first_column = max(past - padding[0], 0)
            self.cache = self.CACHE(len(padding), columns + self.draft.config.block_tokens, ring)
        self.offset = (offset if offset.dim() == 2 else offset[0]) + start
        self.lengths = (columns - pads - start)[:, 0].tolist()
        self._write_prompt(torch.arange(past, columns, device=pads.device) - pads - start)

    def _write_prompt(self, tokens: torch.LongTensor) -> None:
        """Write what was absorbed, the features of these tokens `[R, n]`."""
        self.cache.reserve(max(self.lengths) + self.draft.config.block_tokens)
        if (ring := self.cache.ring) is not None:  # of the tokens that share a slot, only the last is written
            last = torch.tensor(self.lengths, device=tokens.device)[:, None]
            tokens = tokens.masked_fill((tokens >= SINK) & (tokens < last - ring.size), -1)
        for part in tokens.split([states.shape[1] for states in self.prompt], dim=1):
            self._write(self.prompt.pop(0), part)

    def _can_continue(self, before: KeptContext, past: int, ring: Ring | None) -> bool:
        """Whether a context has all `past` tokens of a cache, in slots that nothing later was written to."""
        keys, mine = before.cache.layers[0].keys, (self.CACHE, self.dtype, running_device(self.draft.fc))
        if (type(before.cache), keys.dtype, keys.device) != mine:
            return False
        block_size, dropped = self.draft.config.block_size, before.first_column + before.length - past
        wrapped = ring is not None and before.length + block_size > ring.size
        most = ring.size - self.window - block_size if wrapped else before.length
        return before.cache.ring == ring and 0 <= dropped <= most

    def close(self, cache=None) -> None:
        """Free the context, or keep it for the call that continues this cache of a single row."""
        if cache is None or len(self.lengths) > 1:
            return self.cache.clear()
        kept = KeptContext(self.cache, self.first_column, self.lengths[0], self.unread)
        CONTEXTS.setdefault(cache, weakref.WeakKeyDictionary())[self.draft] = kept

    def read(self, features: torch.Tensor, verdict: Verdict) -> None:
        """Collect the features `[R, n, L * H]` of the tokens that a verdict accepts; the first is the last anchor."""
        steps = torch.arange(features.shape[1], device=self.offset.device)
        counts, start = (torch.tensor(one, device=steps.device)[:, None] for one in (verdict.counts, self.lengths))
        self.unread.append((features, torch.where(steps < counts, start + steps, -1)))
        self.lengths = [length + count for length, count in zip(self.lengths, verdict.counts, strict=True)]
        if sum(tokens.shape[1] for _, tokens in self.unread) > STEPS_AT_ONCE:
            features, tokens = self.collected()
            self.cache.reserve(max(self.lengths))
            self._write(self.draft.project_context(self.to_draft(features)), tokens)

    def collected(self) -> tuple[torch.Tensor | None, torch.LongTensor]:
        """The features that were not read yet, and their tokens."""
        parts, self.unread = self.unread, []
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return None, self.offset.new_zeros(len(self.lengths), 0)
        features, tokens = zip(*parts, strict=True)
        return torch.cat(features, dim=1), torch.cat(tokens, dim=1)

    def _write(self, states: torch.Tensor, tokens: torch.LongTensor) -> None:
        """Write the keys and values of projected features `[R, n, H]` into the drafter's cache."""
        self.cache.place(tokens)
        self.draft.extend_context(states, self.to_draft((tokens + self.offset).clamp(min=0)), self.cache)

    def with_block(self, size: int) -> dict:
        """Arguments of the drafter's forward over all that is unread and a block of `size` tokens after the text."""
        features, before = self.collected()
        start = torch.tensor(self.lengths, device=self.offset.device)[:, None]
        block = start + torch.arange(size, device=start.device)  # [R, B]
        self.cache.reserve(max(self.lengths) + size)
        self.cache.place(*([block] if features is None else [before, block]))
        positions = torch.cat([before, block], dim=1) + self.offset
        return {
            "context_hidden_states": None if features is None else self.to_draft(features),
            "attention_mask": self._masks(block),
            "position_ids": self.to_draft(positions.clamp(min=0)),
            "past_key_values": self.cache,
        }

    def _masks(self, block: torch.LongTensor) -> dict[str, torch.Tensor]:
        cache, last = self.cache, block[:, -1:]
        held = torch.arange(cache.view, device=block.device)
        if cache.ring is not None:  # tokens before the window are as good as none
            held = cache.ring.held(cache.view_of(cache.ring), last)
            seen = (held < SINK) | (held >= block[:, :1] - self.window)
            held = held.masked_fill(~seen, -1)

        def mask(window, causal: bool) -> torch.Tensor:
            seen = visible(block, held, window, None, last_seen=block if causal else last.expand_as(block))
            return self.to_draft(additive(seen, self.dtype)[:, None])

        return self.draft.config.by_layer_type(mask)

    def to_draft(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the drafter's device, and, if floating, in its dtype."""
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=running_device(self.draft.fc), dtype=dtype)


class Drafter:
    """
    A drafter in one call.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        target (`PreTrainedModel`): The target, for its embedding and head.
        noise ([`Noise`], *optional*): Of the target's next samples, which drafts allow for.
        block_tokens (`int`, *optional*): Tokens of a drafted block, anchor included. Default: the trained size.

    Attributes:
        context ([`Context`]): What it has read of the text.
        head (`Head`): Chooses the tokens of a block.
    """

    CONTEXT = Context

    def __init__(self, draft, target, noise: Noise | None = None, block_tokens: int | None = None):
        self.draft, self.target, self.noise = draft, target, noise
        self.block_tokens = block_tokens or draft.config.block_tokens
        self.head = draft.config.head(draft, partial(draft.embed, target))
        self.context = self.CONTEXT(draft)

    def read(self, features: torch.Tensor, verdict: Verdict) -> None:
        """Read the features `[R, n, L * H]` of a draft, those of its accepted tokens."""
        self.context.read(verdict.along(features), verdict)

    def block(self, anchors: torch.LongTensor, lengths: list[int], size: int | None = None) -> Block:
        """
        The tokens that the drafter chooses from left to right.

        Args:
            anchors (`torch.LongTensor`): `[R]`, the last committed token of each row.
            lengths (`list[int]`): The number of each row's next sample, for the noise.
            size (`int`, *optional*): Tokens of the block to return, anchor included.
        """
        hidden = self.hidden_states(anchors)
        if size is not None:
            hidden = hidden[:, : size - 1]
        return Block(self.walk(anchors, hidden, lengths))

    def hidden_states(self, anchors: torch.LongTensor) -> torch.Tensor:
        """`[R, block_tokens - 1, H]` after the final norm, of the slots that draft."""
        config = self.draft.config
        # Where the last slot drafts a token, too, a block has one slot less than tokens.
        slots = self.block_tokens - (config.block_tokens - config.block_size)
        masked = anchors.new_full((len(anchors), slots - 1), config.mask_token_id)
        block = self.draft.embed(self.target, torch.cat([anchors[:, None], masked], dim=1))
        hidden = self._forward(noise_embeds=self.context.to_draft(block), **self.context.with_block(slots))
        # Slot 0 is the anchor's: it predicts the next token or nothing.
        first = 0 if config.sample_from_anchor else 1
        return hidden[:, first : first + self.block_tokens - 1]

    def _forward(self, **inputs) -> torch.Tensor:
        return self.draft(**inputs).last_hidden_state

    def walk(self, anchors: torch.LongTensor, hidden: torch.Tensor, lengths: list[int]) -> torch.LongTensor:
        """
        Choose the tokens of a block from left to right.

        Args:
            anchors (`torch.LongTensor`): `[R]`.
            hidden (`torch.Tensor`): `[R, n, H]`, of the slots that draft.
            lengths (`list[int]`): As for `block`.

        Returns:
            `torch.LongTensor` `[R, n + 1]`, the anchors first.
        """
        head = self.head
        # 1. Independent slots are chosen together.
        if head.order == 0:
            tokens = self.draft.target_ids(likeliest(self.logits(hidden, lengths)))
            return torch.cat([anchors[:, None], tokens.to(anchors.device)], dim=1)
        # 2. One token per slot, given the previous tokens.
        ids, logits = self.candidates(hidden, lengths)  # [R, n, k]
        before = self.in_vocabulary(anchors)
        state, chosen = head.start(before), [anchors]
        for slot in range(ids.shape[1]):
            query, state = head.step(state, before, hidden[:, slot])
            best = head.scores(query, ids[:, slot], logits[:, slot]).argmax(dim=-1, keepdim=True)
            before = ids[:, slot].gather(-1, best)[:, 0]  # [R]
            chosen.append(before.to(anchors.device))
        return torch.stack(chosen, dim=1)

    def logits(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """
        Draft logits `[R, n, V]`; with the noise of the target's next samples, if it is known: then the likeliest token
        of a slot is the one that would be drawn.
        """
        logits = self.draft.draft_logits(hidden, self.target.get_output_embeddings())
        if self.noise is None:
            return logits
        ids = slice(logits.shape[-1])
        if self.draft.config.has_own_head:
            ids = self.draft.target_ids(torch.arange(logits.shape[-1])).clamp(max=self.noise.width - 1)
        noise = self.noise.gumbel(lengths, logits.shape[1], ids)
        return logits.float() / self.noise.temperature + noise.to(logits.device)

    def candidates(self, hidden: torch.Tensor, lengths: list[int]) -> tuple[torch.LongTensor, torch.Tensor]:
        """The candidates of each slot, as the target's ids, and their draft logits, `[R, n, k]` both."""
        ids, logits = self.head.candidates(self.logits(hidden, lengths))
        ids, logits = (one.to(hidden.device) for one in (self.draft.target_ids(ids), logits))
        return ids.expand_as(logits), logits

    def in_vocabulary(self, anchors: torch.LongTensor) -> torch.LongTensor:
        """The anchors for a head: a target with padding rows may sample ids past the drafter's vocabulary."""
        anchors, size = anchors.to(running_device(self.draft.fc)), self.draft.config.vocab_size
        return anchors if size is None else anchors.clamp(max=size - 1)


def padding_of(mask: torch.Tensor | None, rows: int) -> list[int]:
    """The padding columns at the start of each row of a prompt."""
    return [0] * rows if mask is None else (mask.shape[1] - mask.long().sum(dim=1)).tolist()
