"""
A head that nobody publishes, in one file: a recurrent state over the target's embeddings of the tokens drafted so far,
and a bias of low rank over the whole vocabulary. It stands for all heads whose slots depend on every token before.
"""

import sys

import torch
from torch import nn
from transformers import initialization as init

from dflash_hf.layouts.head_schemas import HEAD_SCHEMAS, HeadSchema
from dflash_hf.modeling.heads_dflash import TokenHead


SIZES = {"memory_width": 8, "memory_rank": 6}


class Memory(nn.Module):
    """Their names in a file: `memory.cell.*`, `memory.query.*`, `memory.tokens.weight`."""

    def __init__(self, config):
        super().__init__()
        self.cell = nn.GRUCell(config.hidden_size, config.memory_width)
        self.query = nn.Linear(config.hidden_size + config.memory_width, config.memory_rank)
        self.tokens = nn.Linear(config.memory_rank, config.draft_vocab_size or config.vocab_size, bias=False)


class RecurrentHead(TokenHead):
    """Adds a bias of rank `memory_rank` to the logits, from a recurrent state of `memory_width` numbers."""

    name = "recurrent head"
    architecture = "RecurrentDraftModel"
    sizes = tuple(SIZES)
    fields = {**dict.fromkeys(sizes), "memory_share": 0.5}
    order = TokenHead.ALL_PREVIOUS

    @classmethod
    def build_modules(cls, config):
        return {"memory": Memory(config)}

    @classmethod
    def init_weights(cls, module, config):
        if isinstance(module, Memory):
            init.zeros_(module.tokens.weight)

    def loss(self, tokens, progress):
        share = self.config.memory_share * progress
        return (1 - share) * tokens.divergence(tokens.scores) + share * tokens.divergence(tokens.logits)

    def start(self, anchors):
        return torch.zeros(len(anchors), self.config.memory_width, device=anchors.device, dtype=self.draft.dtype)

    def step(self, state, previous_ids, hidden):
        memory = self.draft.memory
        state = memory.cell(self.embed(previous_ids).to(hidden), state)
        return nn.functional.silu(memory.query(torch.cat([hidden, state], dim=-1))), state

    def scores(self, query, ids, logits):
        return logits.float() + self.draft.memory.tokens(query)[..., : logits.shape[-1]].float()


def _read(config):
    return {("memory_width" if key == "memories" else key): value for key, value in config.items()}


def _check(config):
    if not 0 <= config.memory_share <= 1:
        raise ValueError(f"memory_share={config.memory_share} must lie between 0 and 1.")


HEAD_SCHEMAS[RecurrentHead] = HeadSchema("Recurrent", None, {r"^memories\.": "memory."}, _read, _check)


def use_heads(monkeypatch, *heads):
    """For the length of a test drafters may have these heads as well."""
    for name, module in list(sys.modules.items()):
        if name.startswith("dflash_hf.") and hasattr(module, "TOKEN_HEADS"):
            monkeypatch.setattr(module, "TOKEN_HEADS", (*module.TOKEN_HEADS, *heads))
