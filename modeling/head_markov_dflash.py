"""DSpark's token head: a low-rank bias that depends on the previous token, and a confidence."""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import initialization as init

from .head_dflash import TokenHead


class MarkovTables(nn.Module):
    """
    Parameters: the embedding `W1` of the previous token, the output table `W2` of the next, and, in some variants, the
    layer that mixes in the hidden state.

    Args:
        config (`DFlashDraftConfig`): `markov_rank`, `markov_head_type`, the vocabularies of target and drafter.
    """

    def __init__(self, config):
        super().__init__()
        rank = config.markov_rank
        hidden = config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.markov_head_type == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif config.markov_head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)


class MarkovHead(TokenHead):
    """
    Adds a low-rank bias that depends on the previous token `x` to the draft logits `U` of a slot. With `w = W1[x]`:

        vanilla   S = U + W2 w
        gated     S = U + W2 (sigmoid(G [h; w]) * w)
        rnn       S = U + W2 tanh(o), [g; c; o] = J [s; w; h], s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), s_0 = 0

    At initialisation `W2` is zero, so that the argmax of every slot is drafted. `markov_rank` is the rank of the
    tables, `markov_head_type` the variant. `enable_confidence_head` adds a confidence: the logit of the probability
    that the target accepts the token of a slot, from its hidden state and optionally the previous token. Drafting does
    not use it; it is trained and saved for engines that do.
    """

    name = "Markov head"
    architecture = "Qwen3DSparkModel"
    sizes = ("markov_rank",)
    fields = {
        "markov_rank": None,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
    preset = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
    preset_loss_type = "dspark"

    def __init__(self, draft, embed):
        super().__init__(draft, embed)
        config = self.config
        self.rank = config.markov_rank or 0
        self.variant = config.markov_head_type if self.rank else None  # None: a confidence without a bias
        if self.variant is None:
            self.order = 0
        elif self.variant == "rnn":
            self.order = self.ALL_PREVIOUS
        else:
            self.order = 1

    @classmethod
    def is_configured(cls, values: Mapping) -> bool:
        """A drafter may have the confidence alone, without a bias."""
        return bool(values.get("markov_rank") or values.get("enable_confidence_head"))

    @classmethod
    def write_config(cls, output: dict, config) -> None:
        """DeepSpec's layout: the head's fields and `sample_from_anchor` at the top level, where engines read them."""
        nested = output["dflash_config"]
        output |= {key: nested.pop(key, default) for key, default in cls.fields.items()}
        output["markov_rank"] = output["markov_rank"] or 0
        output["sample_from_anchor"] = config.sample_from_anchor
        output.setdefault("num_anchors", 512)  # required by DeepSpec's reader

    @classmethod
    def build_modules(cls, config) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {}
        if config.markov_rank:
            modules["markov_head"] = MarkovTables(config)
        if config.enable_confidence_head:
            width = config.hidden_size
            if config.confidence_head_with_markov:
                width += config.markov_rank or 0
            modules["confidence_head"] = nn.ModuleDict({"proj": nn.Linear(width, 1)})
        return modules

    @classmethod
    def init_weights(cls, module: nn.Module, config) -> None:
        if isinstance(module, MarkovTables):
            init.zeros_(module.markov_w2.weight)

    def loss(self, tokens, progress: float) -> torch.Tensor:
        """The run's loss and the cross-entropy of the confidence with the overlap of target `p` and drafter `q`."""
        loss = tokens.divergence(tokens.scores)
        if not self.config.enable_confidence_head or tokens.teacher is None:
            return loss
        # The overlap is the probability that rejection sampling accepts the token.
        acceptance = 1.0 - tokens.distance(tokens.scores.detach())
        confidence = tokens.query[..., self.rank].to(acceptance)  # it follows the `rank` inputs of `W2`, see `step`
        entropy = nn.functional.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")
        return loss + entropy

    @classmethod
    def needs_teacher(cls, config) -> bool:
        return bool(config.enable_confidence_head)

    def start(self, anchors: torch.LongTensor) -> torch.Tensor | None:
        if self.variant != "rnn":
            return None
        weight = self.draft.markov_head.markov_w1.weight
        return torch.zeros(len(anchors), self.rank, dtype=weight.dtype, device=weight.device)

    def step(self, state, previous_ids: torch.LongTensor, hidden: torch.Tensor):
        """The query is the input of `W2`, followed by the logit of the confidence; a drafter may lack either."""
        parts = []
        confidence_inputs = [hidden]
        if self.variant is not None:
            tables = self.draft.markov_head
            previous = tables.markov_w1(previous_ids).to(hidden.dtype)  # [..., r]
            bias_input, state = self._mix(tables, state, previous, hidden)
            parts.append(bias_input)
            if self.config.confidence_head_with_markov:
                confidence_inputs.append(previous)
        if self.config.enable_confidence_head:
            parts.append(self.draft.confidence_head.proj(torch.cat(confidence_inputs, dim=-1)))
        return torch.cat(parts, dim=-1), state

    def _mix(self, tables: MarkovTables, state, previous: torch.Tensor, hidden: torch.Tensor):
        """The input of `W2`, `[..., r]`, and the next state; `previous` is `W1[x]`, `[..., r]`."""
        if self.variant == "vanilla":
            return previous, None
        if self.variant == "gated":
            gate = torch.sigmoid(tables.gate_proj(torch.cat([hidden, previous], dim=-1)))
            return gate * previous, None
        joint = tables.joint_proj(torch.cat([state, previous, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)

    def scores(self, query: torch.Tensor, ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        if self.variant is None:
            return logits.float()
        bias = self.draft.markov_head.markov_w2(query[..., : self.rank])
        return logits.float() + bias[..., : logits.shape[-1]].float()
