"""DSpark's head: a low-rank bias that depends on the previous token, and a confidence."""

import torch
from torch import nn
from transformers import initialization as init

from .head_dflash import Head


class MarkovTables(nn.Module):
    """
    Parameters: codebooks `W1` of the previous token and `W2` of the next, and the layers that mix in the hidden state.

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


class MarkovHead(Head):
    """
    Adds a low-rank bias that depends on the previous token `x` to the draft logits `U` of a slot. With `w = W1[x]`:

        vanilla   S = U + W2 w
        gated     S = U + W2 (sigmoid(G [h; w]) * w)
        rnn       S = U + W2 tanh(o), [g; c; o] = J [s; w; h], s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), s_0 = 0

    At initialisation `W2` is zero, so that the walk is the argmax of every slot. `markov_rank` is the rank of the
    codebooks, `markov_head_type` one of the three. `enable_confidence_head` adds a confidence: the logit of the
    chance that the target accepts a slot, from its hidden state and optionally the previous token. Drafting does not
    use it: it is trained and saved for engines that do.
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

    @classmethod
    def is_set(cls, get) -> bool:
        return bool(get("markov_rank") or get("enable_confidence_head"))

    @classmethod
    def write(cls, output: dict, config) -> None:
        """DeepSpec's layout: its fields at the top level, where engines read them, and the block's layout."""
        nested = output["dflash_config"]
        output |= {key: nested.pop(key, default) for key, default in cls.fields.items()}
        output["markov_rank"] = output["markov_rank"] or 0
        output["sample_from_anchor"] = config.sample_from_anchor
        output.setdefault("num_anchors", 512)  # required by DeepSpec's reader

    @classmethod
    def modules(cls, config) -> dict[str, nn.Module]:
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

    def loss(self, rows, progress: float) -> torch.Tensor:
        """The run's loss, plus the confidence's cross-entropy with the overlap of `p` and `q`."""
        loss = rows.divergence(rows.scores)
        if not self.config.enable_confidence_head or rows.teacher is None:
            return loss
        acceptance = 1.0 - rows.distance(rows.scores.detach())  # acceptance probability of rejection sampling
        confidence = rows.query[..., self.width].to(acceptance)
        entropy = nn.functional.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")
        return loss + entropy

    @classmethod
    def needs_teacher(cls, config) -> bool:
        return bool(config.enable_confidence_head)

    def __init__(self, draft, embed):
        super().__init__(draft, embed)
        config = self.config
        self.kind = config.markov_head_type if config.markov_rank else None
        self.order = {None: 0, "rnn": self.MANY}.get(self.kind, 1)
        self.width = config.markov_rank or 0

    def start(self, anchors: torch.LongTensor) -> torch.Tensor | None:
        if self.kind != "rnn":
            return None
        weight = self.draft.markov_head.markov_w1.weight
        return torch.zeros(len(anchors), self.width, dtype=weight.dtype, device=weight.device)

    def step(self, state, before: torch.LongTensor, hidden: torch.Tensor):
        """The query is the input of `W2`, followed by the logit of the confidence if the drafter has one."""
        parts = []
        confidence_input = [hidden]
        if self.kind is not None:
            tables = self.draft.markov_head
            previous = tables.markov_w1(before).to(hidden.dtype)  # [..., r]
            query, state = self._mixed(tables, state, previous, hidden)
            parts.append(query)
            if self.config.confidence_head_with_markov:
                confidence_input.append(previous)
        if self.config.enable_confidence_head:
            parts.append(self.draft.confidence_head.proj(torch.cat(confidence_input, dim=-1)))
        return torch.cat(parts, dim=-1), state

    def _mixed(self, tables: MarkovTables, state, previous: torch.Tensor, hidden: torch.Tensor):
        """The input of `W2`, `[..., r]`, and the next state."""
        if self.kind == "vanilla":
            return previous, None
        if self.kind == "gated":
            return torch.sigmoid(tables.gate_proj(torch.cat([hidden, previous], dim=-1))) * previous, None
        joint = tables.joint_proj(torch.cat([state, previous, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)

    def scores(self, query: torch.Tensor, ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            return logits.float()
        bias = self.draft.markov_head.markov_w2(query[..., : self.width])
        return logits.float() + bias[..., : logits.shape[-1]].float()
