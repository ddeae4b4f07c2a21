"""Domino's head: a correction of the draft logits by a recurrent state over the drafted tokens."""

import torch
from torch import nn
from transformers import initialization as init

from .head_dflash import Head


class PrefixGRU(nn.Module):
    """One step of a single-layer GRU without biases; torch's own module cannot be compiled."""

    def __init__(self, config):
        super().__init__()
        width = config.gru_hidden_dim
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * width, config.hidden_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * width, width))

    def forward(self, embedding: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.gru_cell(embedding, state, self.weight_ih_l0, self.weight_hh_l0)


class Correction(nn.Sequential):
    """`E2 SiLU(E1 [h; g])`, from the hidden state of a slot and the state of the GRU."""

    def __init__(self, config):
        inner = config.emb_dim
        vocabulary = config.draft_vocab_size or config.vocab_size
        super().__init__(
            nn.Linear(config.hidden_size + config.gru_hidden_dim, inner, bias=False),
            nn.SiLU(),
            nn.Linear(inner, vocabulary, bias=False),
        )


class DominoHead(Head):
    """
    `S = U + E2 SiLU(E1 [h; g])`, with `g` the state of a GRU over the target's embeddings of the anchor and of the
    tokens drafted after it. The first `pure_draft_prefix_len` drafted slots use their draft logits `U` only.

    At initialisation `E2` is zero, so that the head is the argmax of every slot. `gru_hidden_dim` is the width of the
    GRU, `emb_dim` the width of the correction.
    """

    name = "Domino head"
    architecture = "DFlashDraftModel"  # SGLang finds it by this name
    sizes = ("gru_hidden_dim", "emb_dim")
    fields = {**dict.fromkeys(sizes), "pure_draft_prefix_len": 0}
    order = Head.MANY
    drafts_last_slot = False

    @classmethod
    def nested(cls, config) -> dict:
        """As SGLang requires: keys whose defaults differ are always written."""
        return {
            "projector_type": "domino",
            "shift_label": config.sample_from_anchor,
            "pure_draft_prefix_len": config.pure_draft_prefix_len,
        }

    @classmethod
    def write(cls, output: dict, config) -> None:
        del output["sample_from_anchor"]
        output["emb_dim"] = config.emb_dim

    @classmethod
    def modules(cls, config) -> dict[str, nn.Module]:
        return {"prefix_gru": PrefixGRU(config), "embed_proj": Correction(config)}

    @classmethod
    def init_weights(cls, module: nn.Module, config) -> None:
        if isinstance(module, Correction):
            init.zeros_(module[2].weight)
        elif isinstance(module, PrefixGRU):
            bound = config.gru_hidden_dim**-0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -bound, bound)

    def loss(self, rows, progress: float) -> torch.Tensor:
        """From the draft logits alone to the corrected ones, linearly over the run."""
        return progress * rows.divergence(rows.scores) + (1.0 - progress) * rows.divergence(rows.logits)

    def start(self, anchors: torch.LongTensor) -> torch.Tensor:
        """The GRU's state, followed by the number of slots drafted: `[R, G + 1]`."""
        weight = self.draft.prefix_gru.weight_hh_l0
        return torch.zeros(len(anchors), weight.shape[1] + 1, dtype=weight.dtype, device=weight.device)

    def step(self, state, before: torch.LongTensor, hidden: torch.Tensor):
        first, act, _ = self.draft.embed_proj
        memory = state[:, :-1]
        drafted = state[:, -1:]
        memory = self.draft.prefix_gru(self.embed(before).to(hidden), memory.to(hidden.dtype))
        query = act(first(torch.cat([hidden, memory], dim=-1)))  # [R, emb_dim]
        # With a zero query `E2` adds nothing.
        query = query * (drafted >= self.config.pure_draft_prefix_len)
        return query, torch.cat([memory, drafted.to(memory.dtype) + 1], dim=-1)

    def scores(self, query: torch.Tensor, ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.float() + self.draft.embed_proj[2](query)[..., : logits.shape[-1]].float()
