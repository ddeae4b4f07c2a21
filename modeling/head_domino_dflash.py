"""Domino's token head: a correction of the draft logits by a recurrent state over the drafted tokens."""

import torch
from torch import nn
from transformers import initialization as init

from .head_dflash import TokenHead


class PrefixGRU(nn.Module):
    """One step of a single-layer GRU without biases; `nn.GRU`, whose tensor names it has, cannot be compiled."""

    def __init__(self, config):
        super().__init__()
        width = config.gru_hidden_dim
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * width, config.hidden_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * width, width))

    def forward(self, embedding: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.gru_cell(embedding, state, self.weight_ih_l0, self.weight_hh_l0)


class LogitCorrection(nn.Sequential):
    """`E2 SiLU(E1 [h; g])`, from the hidden state `h` of a slot and the state `g` of the GRU."""

    def __init__(self, config):
        inner = config.emb_dim
        vocab_size = config.draft_vocab_size or config.vocab_size
        super().__init__(
            nn.Linear(config.hidden_size + config.gru_hidden_dim, inner, bias=False),  # E1
            nn.SiLU(),
            nn.Linear(inner, vocab_size, bias=False),  # E2
        )


class DominoHead(TokenHead):
    """
    `S = U + E2 SiLU(E1 [h; g])`, with `g` the state of a GRU over the target's embeddings of the anchor and of the
    tokens drafted after it. The first `pure_draft_prefix_len` drafted slots use their draft logits `U` only.

    At initialisation `E2` is zero, so that the argmax of every slot is drafted. `gru_hidden_dim` is the width of the
    GRU, `emb_dim` the width of the correction.
    """

    name = "Domino head"
    # SGLang loads Domino drafters under the plain drafter's name, and recognises them by `projector_type`.
    architecture = "DFlashDraftModel"
    sizes = ("gru_hidden_dim", "emb_dim")
    fields = {**dict.fromkeys(sizes), "pure_draft_prefix_len": 0}
    order = TokenHead.ALL_PREVIOUS
    drafts_last_slot = False
    preset = {"gru_hidden_dim": 1024, "emb_dim": 256, "pure_draft_prefix_len": 1}

    @classmethod
    def extra_nested_keys(cls, config) -> dict:
        """Keys that are always written, because SGLang has other defaults."""
        return {
            "projector_type": "domino",
            "shift_label": config.sample_from_anchor,
            "pure_draft_prefix_len": config.pure_draft_prefix_len,
        }

    @classmethod
    def write_config(cls, output: dict, config) -> None:
        del output["sample_from_anchor"]
        output["emb_dim"] = config.emb_dim

    @classmethod
    def build_modules(cls, config) -> dict[str, nn.Module]:
        return {"prefix_gru": PrefixGRU(config), "embed_proj": LogitCorrection(config)}

    @classmethod
    def init_weights(cls, module: nn.Module, config) -> None:
        if isinstance(module, LogitCorrection):
            init.zeros_(module[2].weight)
        elif isinstance(module, PrefixGRU):
            bound = config.gru_hidden_dim**-0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -bound, bound)

    def loss(self, tokens, progress: float) -> torch.Tensor:
        """The loss of the draft logits at the start of the run, of the corrected ones at its end; linear between."""
        return progress * tokens.divergence(tokens.scores) + (1.0 - progress) * tokens.divergence(tokens.logits)

    def start(self, anchors: torch.LongTensor) -> torch.Tensor:
        """
        The GRU's state `[R, G]` and, in one more channel, the number of slots drafted so far: one tensor `[R, G + 1]`,
        since trees select rows of a head's state, and training stacks them.
        """
        weight = self.draft.prefix_gru.weight_hh_l0
        return torch.zeros(len(anchors), weight.shape[1] + 1, dtype=weight.dtype, device=weight.device)

    def step(self, state, previous_ids: torch.LongTensor, hidden: torch.Tensor):
        e1, silu, _ = self.draft.embed_proj
        gru_state = state[:, :-1]
        num_drafted = state[:, -1:]
        gru_state = self.draft.prefix_gru(self.embed(previous_ids).to(hidden), gru_state.to(hidden.dtype))
        query = silu(e1(torch.cat([hidden, gru_state], dim=-1)))  # [R, emb_dim]
        is_corrected = num_drafted >= self.config.pure_draft_prefix_len
        query = query * is_corrected  # `E2` maps zeros to zeros
        return query, torch.cat([gru_state, num_drafted.to(gru_state.dtype) + 1], dim=-1)

    def scores(self, query: torch.Tensor, ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        e2 = self.draft.embed_proj[2]
        return logits.float() + e2(query)[..., : logits.shape[-1]].float()
