"""Drafting: the blocks that a drafter proposes for the next tokens of a text."""

from functools import partial

import torch

from .accept_dflash import Block, likeliest
from .context_dflash import Context
from .noise_dflash import Noise
from .target_dflash import running_device


class Drafter:
    """
    A drafter in one call.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        target (`PreTrainedModel`): The target, for its embedding and head.
        noise ([`Noise`], *optional*): Of the target's next samples, which drafts allow for.

    Attributes:
        context ([`Context`]): What it has read of the text.
        head (`Head`): Chooses the tokens of a block.
    """

    CONTEXT = Context

    def __init__(self, draft, target, noise: Noise | None = None):
        self.draft, self.target, self.noise = draft, target, noise
        self.head = draft.config.head(draft, partial(draft.embed, target))
        self.context = self.CONTEXT(draft)

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
        """`[R, n, H]` after the final norm, of the slots that draft, in a block of the trained size."""
        config = self.draft.config
        masked = anchors.new_full((len(anchors), config.block_size - 1), config.mask_token_id)
        block = self.draft.embed(self.target, torch.cat([anchors[:, None], masked], dim=1))
        hidden = self._forward(noise_embeds=self.context.to_draft(block), **self.context.with_block(config.block_size))
        # Slot 0 is the anchor's: it predicts the next token or nothing.
        first = 0 if config.sample_from_anchor else 1
        return hidden[:, first : first + config.block_tokens - 1]

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
        before = self.known(anchors)
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
        ids = self.draft.target_ids(torch.arange(logits.shape[-1], device=logits.device))
        noise = self.noise.gumbel(lengths, logits.shape[1], ids.clamp(max=self.noise.width - 1))
        return logits.float() / self.noise.temperature + noise.to(logits.device)

    def candidates(self, hidden: torch.Tensor, lengths: list[int]) -> tuple[torch.LongTensor, torch.Tensor]:
        """The candidates of each slot, as the target's ids, and their draft logits, `[R, n, k]` both."""
        ids, logits = self.head.candidates(self.logits(hidden, lengths))
        ids, logits = (one.to(hidden.device) for one in (self.draft.target_ids(ids), logits))
        return ids.expand_as(logits), logits

    def known(self, anchors: torch.LongTensor) -> torch.LongTensor:
        """The anchors for a head: a target with padding rows may sample ids past the drafter's vocabulary."""
        anchors, size = anchors.to(running_device(self.draft.fc)), self.draft.config.vocab_size
        return anchors if size is None else anchors.clamp(max=size - 1)
