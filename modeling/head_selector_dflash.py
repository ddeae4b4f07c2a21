"""DFlash 2's token head: a path selector among the likeliest tokens of each slot."""

import torch
from torch import nn
from transformers import initialization as init

from .head_dflash import TokenHead


class CandidateSelector(nn.Module):
    """
    Parameters: codebooks `A` of predecessors and `C` of successors, and the projection `W` of hidden states.

    Args:
        config (`DFlashDraftConfig`): `selector_rank`, `vocab_size` of the target.
    """

    def __init__(self, config):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))  # A
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))  # C
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)  # W


class PathSelector(TokenHead):
    """
    Scores the `top_k` likeliest tokens `b` of a slot, given the token `a` chosen before it:
    `S(a, b) = U(b) + <A[a] * (W h), C[b]>`, with `U` the draft logit and `h` the slot's hidden state.

    At initialisation `C` is zero, so that the argmax of every slot is drafted. `selector_rank` is the rank `r` of the
    codebooks, `selector_top_k` the number of candidates `k`.
    """

    name = "path selector"
    architecture = "DFlash2DraftModel"
    sizes = ("selector_rank", "selector_top_k")
    fields = dict.fromkeys(sizes)
    order = 1
    # Half the published rank drafted as well. The convolution, which starts as the identity, is included because vLLM
    # serves no DFlash 2 drafter without it.
    preset = {"selector_rank": 128, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16}

    @classmethod
    def build_modules(cls, config) -> dict[str, nn.Module]:
        return {"candidate_selector": CandidateSelector(config)}

    @classmethod
    def init_weights(cls, module: nn.Module, config) -> None:
        if isinstance(module, CandidateSelector):
            init.normal_(module.predecessor_codebook, mean=0.0, std=config.initializer_range)
            init.zeros_(module.successor_codebook)

    @property
    def top_k(self) -> int:
        return self.config.selector_top_k

    def candidates(self, logits: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor]:
        """The `top_k` likeliest, sorted by id: ties then go to the lowest id, as in `argmax` over the vocabulary."""
        ids = logits.topk(self.top_k, dim=-1).indices.sort(dim=-1).values
        return ids, logits.gather(-1, ids)

    def step(self, state, previous_ids: torch.LongTensor, hidden: torch.Tensor):
        # `embedding` instead of an index: the gradient of an index is serial on a GPU for ids that many slots share.
        selector = self.draft.candidate_selector
        predecessors = nn.functional.embedding(previous_ids, selector.predecessor_codebook)  # [..., r]
        return predecessors * selector.hidden_projection(hidden), None

    def scores(self, query: torch.Tensor, ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        successors = nn.functional.embedding(ids, self.draft.candidate_selector.successor_codebook)  # [..., k, r]
        return logits.float() + (successors @ query.unsqueeze(-1)).squeeze(-1).float()
