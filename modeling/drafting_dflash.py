"""Drafting: the context that a drafter keeps, and the tokens that it proposes for a block."""

from functools import partial
from typing import NamedTuple

import torch
from transformers.generation import CandidateGenerator

from .accept_dflash import Draft, Proposal, draw, likeliest
from .cache_dflash import SlotCache, slot_mask
from .noise_dflash import Foresight
from .plan_dflash import Plan
from .target_dflash import input_device, running_device
from .tree_dflash import (
    TOP_K,
    DraftTree,
    Paths,
    beam_tree,
    bounded,
    chained_paths,
    every_path,
    independent_paths,
    likeliest_tree,
)


TOKENS_AT_ONCE = 2048  # prompt tokens projected to the drafter's context at a time: bounds memory
STEPS_AT_ONCE = 32  # committed tokens whose features are read together
SINK = 4  # tokens at the start of each row that a drafter sees besides those in its window


class Context(NamedTuple):
    """Features of the target that the drafter has not read yet."""

    features: torch.Tensor  # [R, n, L * H]
    start: torch.LongTensor  # [R]  index of the first of these tokens in its row
    steps: int = 0  # number of these tokens if unfinished rows have committed all; 0: some may be rejected


class DFlashCandidateGenerator(CandidateGenerator):
    """
    Drafts blocks from the target's features. Also runs inside upstream's own `_assisted_decoding` (one row), through
    `get_candidates`.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        target (`PreTrainedModel`): The target, for its embedding and head.
        max_length (`int`): Longest row, prompt included; for upstream's loop.
        generators (`list[torch.Generator]`, *optional*): One per row, to draw drafts with.
        temperature (`float`): Temperature at which `propose` draws the tokens of a block; 0 is greedy.

    Attributes:
        foresight ([`Foresight`], *optional*): The noise of the target's next samples, which drafts then allow for.
    """

    requires_model_outputs = True
    model_kwargs_overrides = {"output_hidden_states": True}

    def __init__(self, draft, target, max_length=None, generators: list | None = None, temperature: float = 0.0):
        self.draft_model, self.target = draft, target
        self.config = draft.config
        self.head = target.get_output_embeddings()
        self.slot_head = self.config.head(draft, partial(draft.embed, target))
        self.device = input_device(target)
        # A model walks through its parameters to find these, which takes longer than a small layer.
        self.draft_device, self.draft_dtype, self.target_dtype = running_device(draft.fc), draft.dtype, target.dtype
        self.max_length, self.generators, self.temperature = max_length, generators, temperature
        self.foresight: Foresight | None = None
        self.window, self.ring = draft.decoding_config.window, None
        if self.window is not None:  # a block and what is read before it overwrite nothing in the window
            self.ring = self.window + 2 * self.config.block_tokens + STEPS_AT_ONCE
        self.noise = torch.full((1, self.config.block_size - 1), self.config.mask_token_id, device=self.device)
        self.cache: SlotCache | None = None
        self.contexts: list[torch.Tensor] = []  # of the prompt, [R, n, H] each, not in the cache yet

    @property
    def absorbed(self) -> int:
        """Columns of the prompt absorbed so far."""
        return sum(context.shape[1] for context in self.contexts)

    def open(
        self, padding: list[int], columns: int, room: int, offset: torch.Tensor, pool: dict | None = None
    ) -> None:
        """
        Make room for a prompt, and write its absorbed columns into the drafter's cache.

        Args:
            padding (`list[int]`): Padding columns at the start of each row.
            columns (`int`): Columns of the prompt and of a prefilled cache, whose features were never seen.
            room (`int`): Initial slots per row.
            offset (`torch.LongTensor`): `[R, 1]` or `[axes, R, 1]`, position of a row's first token.
            pool (`dict`, *optional*): As for [`SlotCache`].
        """
        self.padding = torch.tensor(padding, device=self.device)[:, None]  # [R, 1]
        past = columns - self.absorbed
        self.first = (past - self.padding).clamp(min=0)  # [R, 1], the token that sits in slot 0
        self.offset = offset if offset.dim() == 2 else offset[0]  # only distances matter here
        self.cache = SlotCache(len(padding), room, pool, None if self.ring is None else SINK + self.ring)
        self._write_context(past, columns)

    def absorb(self, *features: torch.Tensor) -> None:
        """
        Take the features of the prompt's next columns: `[R, C, L * H]`, or `[R, C, H]` for each layer.

        They become keys and values in `open`, after the target's forward: until then each token takes the memory of
        one hidden state instead of every drafter layer's keys and values.
        """
        step = max(TOKENS_AT_ONCE // features[0].shape[0], 1)
        for pieces in zip(*(layer.split(step, dim=1) for layer in features), strict=True):
            joined = torch.cat([self._to_draft(piece) for piece in pieces], dim=-1)  # [R, n, L * H]
            self.contexts.append(self.draft_model.project_context(joined))

    def _write_context(self, first: int, end: int) -> None:
        """Write the keys and values of the absorbed columns, from `first` to `end`, into the drafter's cache."""
        while self.contexts:
            context = self.contexts.pop(0)
            columns = torch.arange(first, first + context.shape[1], device=self.device)
            tokens = columns - self.padding  # [R, n], the index of each token in its row; padding is negative
            unseen = tokens < 0
            if self.ring is not None:  # of the tokens that share a slot, only the last is written
                unseen = unseen | (columns < end - self.ring) & (tokens - self.first >= SINK)
            slots = torch.where(unseen, self.cache.trash, self._slots(tokens))
            first += context.shape[1]
            self.cache.place(slots)
            positions = (tokens + self.offset).clamp(min=0)
            self.draft_model.extend_context(context, self._to_draft(positions), self.cache)

    def plan(self, block: int, nodes: int = 0, top_k: int = TOP_K) -> Plan:
        """
        A plan for one round: verify the first `block` tokens of a block, anchor included, or a tree of `nodes` tokens
        besides the anchor, over the `top_k` likeliest tokens of the block's slots.
        """
        if not nodes or block == 1:
            return Plan(block)
        top_k = min(top_k, self.slot_head.top_k or self.config.draft_vocab_size or top_k)
        return Plan(block, every_path(nodes, block - 1, top_k, self.device))

    def propose(self, plan: Plan, anchors, start, features, features_start) -> Draft:
        """
        Draft for each row, according to a plan: a tree, or a block, whose tokens are the likeliest or drawn. A block
        is drafted at the trained size. The cache must have room for it; see `SlotCache.reserve`.

        Args:
            plan (`Plan`): What to draft.
            anchors (`torch.LongTensor`): `[R]`, the last committed token of each row.
            start (`torch.LongTensor`): `[R]`, the index of that token in its row.
            features (`torch.Tensor`): `[R, n, L * H]`, features of the block verified last, rejected tokens included:
                the new block overwrites their slots. See [`no_features`].
            features_start (`torch.LongTensor`): `[R]`, the index of the first of them.
        """
        hidden = self._hidden_states(anchors, start, features, features_start)
        if plan.paths is None:
            judged = plan.cut is not None
            return Draft(*self.walk(anchors, hidden, self.temperature, judged)).prefix(plan.block)
        tree = self.tree(anchors, hidden, plan.paths)
        return Draft(tree.tokens, tree=tree)

    def tree(self, anchors: torch.LongTensor, hidden: torch.Tensor, paths: Paths) -> DraftTree:
        """As [`walk`], but the likeliest `paths` through the likely tokens of each slot; see [`plan`]."""
        head, hidden = self.slot_head, hidden[:, : len(paths.levels)]
        # 1. Independent slots.
        if head.order == 0:
            logits = self._logits(hidden)  # [R, D, V]
            best, ids = logits.topk(paths.top_k, dim=-1)
            log_probs = best.float() - logits.float().logsumexp(dim=-1, keepdim=True)  # [R, D, k]
            ids, log_probs = self.draft_model.target_ids(ids).to(self.device), log_probs.to(self.device)
            return likeliest_tree(anchors, *independent_paths(ids, log_probs, paths), paths)

        # 2. Scores that depend on the previous token: all pairs of candidates in one call.
        ids, logits = self._candidates(hidden)  # [R, D, c]
        before = self._known(anchors)
        if head.order == 1 and head.top_k is not None:
            query, _ = head.step(None, before, hidden[:, 0])
            first = head.scores(query, ids[:, 0], logits[:, 0])  # [R, c]
            query, _ = head.step(None, ids[:, :-1], hidden[:, 1:, None])  # [R, D - 1, c, q]
            later = head.scores(query, ids[:, 1:, None], logits[:, 1:, None])  # [R, D - 1, c, c]
            first, later = (scores.log_softmax(dim=-1).to(self.device) for scores in (first, later))
            return likeliest_tree(anchors, *chained_paths(ids.to(self.device), first, later, paths), paths)

        # 3. Scores that depend on more than a table can hold: a beam whose paths each carry a state.
        def after(slot: int, state, before: torch.LongTensor):  # [R * w]
            wide = [one[:, slot].repeat_interleave(len(before) // len(anchors), 0) for one in (hidden, ids, logits)]
            query, state = head.step(state, self._known(before), wide[0])
            best, order = bounded(head.scores(query, *wide[1:]).log_softmax(dim=-1)).topk(paths.top_k, dim=-1)
            return wide[1].gather(-1, order), best, state

        return beam_tree(anchors.to(self.draft_device), head.start(before), after, paths).to(self.device)

    def _known(self, anchors: torch.LongTensor) -> torch.LongTensor:
        """The anchors for a head: a target with padding rows may sample ids past the drafter's vocabulary."""
        anchors, size = anchors.to(self.draft_device), self.config.vocab_size
        return anchors if size is None else anchors.clamp(max=size - 1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits `[R, n, V]`, with the noise of the target's next samples if it is known."""
        logits = self.draft_model.draft_logits(hidden, self.head)
        return logits if self.foresight is None else self.foresight(logits)

    def _candidates(self, hidden: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor]:
        """The candidates of each slot, as the target's ids, and their draft logits."""
        ids, logits = self.slot_head.candidates(self._logits(hidden))  # [R, n, k]
        ids, logits = (one.to(self.draft_device) for one in (self.draft_model.target_ids(ids), logits))
        return ids.expand_as(logits), logits

    def walk(self, anchors: torch.LongTensor, hidden: torch.Tensor, temperature: float, judged: bool = False):
        """
        Choose the tokens of a block from left to right.

        Args:
            anchors (`torch.LongTensor`): `[R]`.
            hidden (`torch.Tensor`): `[R, n, H]`, final hidden states of the slots that draft.
            temperature (`float`): 0 takes the likeliest token of each slot.
            judged (`bool`): Whether the drafter's probabilities are needed although nothing is drawn.

        Returns:
            `torch.LongTensor` `[R, n + 1]`, and the [`Proposal`] they were drawn from; at temperature 0 `None`, or the
            probabilities at temperature 1.
        """
        head = self.slot_head
        # 1. Independent slots are drafted together.
        if head.order == 0 and temperature == 0 and not judged:
            tokens = likeliest(self._logits(hidden))  # [R, n]
            tokens = self.draft_model.target_ids(tokens)
            return torch.cat([anchors[:, None], tokens.to(self.device)], dim=1), None

        # 2. One token per slot, given the previous tokens.
        ids, logits = self._candidates(hidden)  # [R, n, k]
        before = self._known(anchors)
        state, chosen, probabilities = head.start(before), [], []
        for slot in range(ids.shape[1]):
            query, state = head.step(state, before, hidden[:, slot])
            score = head.scores(query, ids[:, slot], logits[:, slot])  # [R, k]
            if temperature or judged:  # if the drafter's scores of a slot are NaN: uniform
                chances = (score / (temperature or 1.0)).softmax(dim=-1).nan_to_num(1 / score.shape[-1])  # [R, k]
                probabilities.append(chances)
            choice = draw(chances[:, None], self.generators) if temperature else score.argmax(-1, keepdim=True)
            before = ids[:, slot].gather(-1, choice)[:, 0]  # [R]
            chosen.append(before)
        tokens = torch.stack(chosen, dim=1).to(self.device)  # [R, n]
        block = torch.cat([anchors[:, None], tokens], dim=1)
        if not probabilities:
            return block, None
        return block, Proposal(ids.to(self.device), torch.stack(probabilities, dim=1).to(self.device))

    def follow(self, context: Context | None, fresh: Context, committed: int | None) -> Context:
        """
        The context after a round. Reading one token costs as much as reading many, so what rounds without a draft
        leave is collected for a while.

        Args:
            context (`Context`, *optional*): What the drafter had not read before; `None` if it ran in this round.
            fresh (`Context`): What the round leaves.
            committed (`int`, *optional*): Maximum number of tokens that it committed in a row; `None` keeps the shape.
        """
        features = fresh.features[:, :committed]
        width = features.shape[1]
        steps = width if committed is not None and (width == 1 or len(features) == 1) else 0
        if context is not None:
            if context.steps and context.steps + width <= STEPS_AT_ONCE:
                joined = torch.cat([context.features, features], dim=1)
                return Context(joined, context.start, steps and context.steps + steps)
            self.read(context)
        return Context(features, fresh.start, steps)

    def shaped(self, context: Context, start: torch.LongTensor) -> Context:
        """
        A context in the shape of a block at `start`: padded, since the new block overwrites what follows the accepted
        tokens, or read and empty, if it is longer.
        """
        missing = self.config.block_tokens - context.features.shape[1]
        if missing < 0:
            self.read(context)
            return self.no_features(start, self.config.block_tokens)
        features = torch.nn.functional.pad(context.features, (0, 0, 0, missing)) if missing else context.features
        return Context(features, context.start)

    def read(self, context: Context) -> None:
        """Write the keys and values of a context into the drafter's cache, without a block."""
        tokens = context.start[:, None] + torch.arange(context.features.shape[1], device=self.device)  # [R, n]
        self.cache.place(self._slots(tokens))
        states = self.draft_model.project_context(self._to_draft(context.features))
        self.draft_model.extend_context(states, self._to_draft(tokens + self.offset), self.cache)

    def no_features(self, start: torch.LongTensor, size: int) -> Context:
        """
        The context of a first round, where no block was verified before: `size` columns of zeros at the slots of the
        new block, which overwrites them. So all rounds have the same shapes.
        """
        width = self.draft_model.fc.in_features
        zeros = torch.zeros(len(start), size, width, dtype=self.target_dtype, device=self.device)
        return Context(zeros, start.clone())

    def _hidden_states(self, anchors, start, features, features_start):
        rows, size = anchors.shape[0], self.config.block_size
        before = features_start[:, None] + torch.arange(features.shape[1], device=self.device)  # [R, n]
        block = start[:, None] + torch.arange(size, device=self.device)  # [R, B], token indices
        self.cache.place(self._slots(before), self._slots(block))

        noise = torch.cat([anchors[:, None], self.noise.expand(rows, -1)], dim=1)  # [R, B]
        hidden = self.draft_model(
            noise_embeds=self._to_draft(self.draft_model.embed(self.target, noise)),
            context_hidden_states=self._to_draft(features),
            attention_mask=self._masks(block - self.first),
            position_ids=self._to_draft(torch.cat([before, block], dim=1) + self.offset),
            past_key_values=self.cache,
        ).last_hidden_state
        # Slot 0 is the anchor's: it predicts the next token or nothing.
        first = 0 if self.config.sample_from_anchor else 1
        return hidden[:, first : first + self.config.block_tokens - 1]

    def _slots(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """The slots of tokens. With a window, all but the first few share a ring."""
        slots = tokens - self.first
        if self.ring is not None:
            slots = torch.where(slots < SINK, slots, SINK + (slots - SINK) % self.ring)
        # A row that has ended stands still while features of the others are collected, and runs out of slots.
        return slots.clamp(max=self.cache.trash)

    def _held(self, block: torch.LongTensor) -> torch.LongTensor | None:
        """`[R, view]`, the token in each slot of a ring; tokens before the window count as later than the block."""
        if self.ring is None:
            return None
        slot, last = torch.arange(self.cache.view, device=block.device), block[:, -1:]
        token = last - (last - slot) % self.ring  # the last one that was written there
        seen = (token >= (block[:, :1] - self.window).clamp(min=SINK)) & (slot < SINK + self.ring)
        return torch.where(slot < SINK, slot, torch.where(seen, token, last + 1))

    def _masks(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        held = self._held(slots)

        def mask(window, causal: bool) -> torch.Tensor:  # torch 2.8 cannot trace `int | None` on Python 3.10
            last_seen = slots if causal else slots[:, -1:].expand_as(slots)
            view, dtype = self.cache.view, self.draft_dtype
            return slot_mask(slots, last_seen, view, window, None, dtype, None, held).to(self.draft_device)

        return self.config.by_layer_type(mask)

    def _to_draft(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.draft_dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self.draft_device, dtype=dtype)

    def get_candidates(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **kwargs):
        """Upstream's interface: one row; the first call comes before any forward of the target and drafts nothing."""
        length = input_ids.shape[1]
        room = self.max_length - length - 1
        if is_first_iteration or room <= 0:
            return input_ids, None
        layers = [model_outputs.hidden_states[i + 1] for i in self.config.target_layer_ids]
        features = torch.cat([layer.to(self.device) for layer in layers], dim=-1)
        size, first = self.config.block_tokens, self.cache is None
        if first:
            padding, positions = padding_of(model_kwargs.get("attention_mask"), 1), model_kwargs.get("position_ids")
            columns = length if positions is None else positions.shape[-1]
            offset = first_positions(positions, columns, padding, self.device)
            self.absorb(features)
            self.open(padding, length - 1, length + size, offset)
        start = torch.tensor([length - 1 - int(self.padding)], device=self.device)
        context = self.no_features(start, size) if first else Context(features, self.start)
        self.start = start
        self.cache.reserve(length + size)
        draft = self.propose(Plan(size), input_ids[:, -1].to(self.device), start, context.features, context.start)
        return torch.cat([input_ids, draft.tokens[:, 1 : 1 + room].to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing to do: upstream's loop always drafts whole blocks; ours asks a planner for sizes."""


def padding_of(mask: torch.Tensor | None, rows: int) -> list[int]:
    """The padding columns at the start of each row of a prompt."""
    return [0] * rows if mask is None else (mask.shape[1] - mask.long().sum(dim=1)).tolist()


def first_positions(positions, columns: int, padding: list[int], device, counts_columns: bool = False) -> torch.Tensor:
    """
    The position of the first token of each row, `[R, 1]`, or `[axes, R, 1]` where positions have several axes.

    Args:
        positions (`torch.LongTensor`, *optional*): `[..., R, n]`, the positions of the prompt's last forward. Counted
            back from the last one as if the prompt were text only; images break that rule.
        columns (`int`): Columns of the prompt, padding included.
        padding (`list[int]`): Padding columns at the start of each row.
        counts_columns (`bool`): Whether the target, if given no positions, counts columns, padding included.
    """
    pads = torch.tensor(padding, device=device)
    if positions is None:
        return (pads if counts_columns else torch.zeros_like(pads))[:, None]
    last = positions[..., -1].to(device)  # [..., R], or [..., 1] for all rows
    return (last - (columns - 1 - pads))[..., None]
