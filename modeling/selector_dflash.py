"""DFlash 2's path selector: which of the likely tokens of each slot follow one another."""

import torch
from torch import nn


class CandidateSelector(nn.Module):
    """
    Scores the `top_k` likeliest tokens `b` of a slot given the token `a` that was chosen before it:
    `S(a, b) = U(b) + <A[a] * (W h), C[b]>`, with `U` the draft logit and `h` the slot's hidden state.

    At initialisation `C` is zero, so that the walk is the argmax of every slot.

    Args:
        config (`DFlashDraftConfig`): `selector_rank`, `selector_top_k`, `vocab_size` of the target.
    """

    def __init__(self, config):
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))  # A
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))  # C
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)  # W

    def candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The likeliest tokens of each slot and their logits, both `[..., k]`, from draft logits `[..., V]`. In the order
        of their ids, so that of equal scores the lowest id is taken, as `argmax` over the vocabulary does.
        """
        logits = logits[..., : self.successor_codebook.shape[0]]  # a head may be padded with rows of no token
        ids = logits.topk(self.top_k, dim=-1).indices.sort(dim=-1).values
        return ids, logits.gather(-1, ids)

    def scores(self, before: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor):
        """
        `S(before, ids)` in fp32, `[..., k]`.

        Args:
            before (`torch.LongTensor`): `[...]`, the token of the slot before.
            hidden (`torch.Tensor`): `[..., H]`, the slot's hidden state after the final norm.
            ids (`torch.LongTensor`): `[..., k]`.
            logits (`torch.Tensor`): `[..., k]`.
        """
        query = self.predecessor_codebook[before] * self.hidden_projection(hidden)  # [..., r]
        transition = (self.successor_codebook[ids] @ query.unsqueeze(-1)).squeeze(-1)  # [..., k]
        return logits.float() + transition.float()
