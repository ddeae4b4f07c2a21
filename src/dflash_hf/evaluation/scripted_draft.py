"""A drafter that is told what to say: the forwards of a real one, and drafts that are right as often as is wished."""

import copy
import math
from collections.abc import Sequence

import torch
from torch import nn

from dflash_hf.modeling.modeling_dflash import DFlashDraftModel


_DIGITS = 3  # of a place in the script, in base 256: every dtype holds them exactly
_SURE = 3e4  # a logit above all others, which fp16 holds too


class ScriptedDraft(DFlashDraftModel):
    """
    A drafter that computes all that a drafter computes, and then drafts known texts.

    Its forward writes into the hidden state of each slot which place of the script this slot is, and `draft_logits`
    makes the tokens of that place the likeliest. So all that ask a drafter for tokens get those of the script: blocks,
    trees, compiled rounds, upstream's own loop. Each row follows the text that begins with its prompt, or the text of
    its own number where several do. It serves one call at a time. Build it with `of`.
    """

    @classmethod
    def of(
        cls,
        draft: DFlashDraftModel,
        texts: Sequence[torch.LongTensor],
        likely: Sequence[torch.LongTensor] | None = None,
        certainty: float = 0.8,
    ):
        """
        The drafter with a script; its weights and settings are shared.

        Args:
            draft (`DFlashDraftModel`): The drafter.
            texts (`Sequence[torch.LongTensor]`): `[S]` each, prompt and continuation, with the padding of the prompt.
            likely (`Sequence[torch.LongTensor]`, *optional*): `[S, k]` each, the tokens drafted for every place, the
                likeliest first. Default: the texts.
            certainty (`float`): In trees, the probability of the first of them, against that of all other tokens.
        """
        scripted = copy.copy(draft)
        scripted.__class__ = cls
        likely = [text[:, None] for text in texts] if likely is None else likely
        scripted.texts = nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=-1)  # [T, S]
        scripted.likely = nn.utils.rnn.pad_sequence(list(likely), batch_first=True)  # [T, S, k]
        places = torch.arange(scripted.texts.numel(), device=scripted.texts.device)
        base = 256 ** torch.arange(_DIGITS, device=places.device)
        scripted.codes = (places[:, None] // base % 256).to(draft.device, draft.dtype)  # [T * S, digits]
        scripted.base = base.float()
        certainty = min(max(certainty, 0.51), 1 - 1e-6)  # or it would not be the likeliest
        scripted.log_odds = math.log(certainty / (1 - certainty))
        scripted.begin(scripted.texts[:1, :1])
        return scripted

    def begin(self, prompt: torch.LongTensor) -> None:
        """Choose the text of each row by its prompt `[R, S]`. `generate` calls this; before other loops, call it."""
        rows, columns = prompt.shape
        own = torch.arange(rows, device=prompt.device) % len(self.texts)
        same = (self.texts[:, :columns] == prompt[:, None, : self.texts.shape[1]]).all(dim=-1).long()  # [R, T]
        same[torch.arange(rows), own] *= 2
        self.rows = torch.where(same.any(dim=1), same.argmax(dim=1), own)[:, None]  # [R, 1]
        self.columns, self.origin = columns, torch.zeros_like(self.rows)
        self.unread = columns  # of the prompt, at most

    def dflash_decode(self, target, input_ids, *args, **kwargs):
        self.begin(input_ids)
        return super().dflash_decode(target, input_ids, *args, **kwargs)

    def extend_context(self, context, position_ids, past_key_values):
        if self.unread > 0:  # the prompt; later texts are read that were written without drafts
            self.origin = (position_ids[:, -1:] - (self.columns - 1)).to(self.rows.device)  # [R, 1]
            self.unread -= position_ids.shape[1]
        return super().extend_context(context, position_ids, past_key_values)

    def forward(self, noise_embeds, *args, position_ids=None, **kwargs):
        output, self.unread = super().forward(noise_embeds, *args, position_ids=position_ids, **kwargs), 0
        places = self.places(position_ids, output.last_hidden_state)
        output.last_hidden_state[:, 1:, :_DIGITS] = self.codes[places.to(self.codes.device)]
        return output

    def places(self, position_ids: torch.LongTensor, hidden_states: torch.Tensor) -> torch.LongTensor:
        """`[R, B - 1]`, where the unknown slots of a block lie in the script, all texts in a row."""
        columns = position_ids[:, 1 - self.config.block_size :].to(self.rows.device) - self.origin
        width = self.texts.shape[1]
        return self.rows * width + columns.clamp(max=width - 1)

    def draft_logits(self, hidden_states, target_head):
        codes, rest = hidden_states[..., :_DIGITS], hidden_states[..., _DIGITS:]
        logits = super().draft_logits(nn.functional.pad(rest, (_DIGITS, 0)), target_head)
        places = (codes.to(self.base.device, torch.float32) * self.base).sum(dim=-1).long()
        likely = self.likely.flatten(0, 1)[places].to(logits.device)  # [..., k]
        if self.decoding_config.tree_nodes is None:
            return logits.scatter_(-1, likely[..., :1], _SURE)
        logits = logits.float()
        sure = logits.logsumexp(dim=-1, keepdim=True) + self.log_odds  # [..., 1]
        return logits.scatter(-1, likely, sure - torch.arange(likely.shape[-1], device=logits.device))
