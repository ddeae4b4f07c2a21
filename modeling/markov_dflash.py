"""DSpark's heads (arXiv 2607.05147): a bias by the tokens drafted before, and the chance that a slot is accepted."""

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization as init

from .head_dflash import Head, UnknownHeadError


TYPES = ("vanilla", "gated", "rnn")


class MarkovTables(nn.Module):
    """
    Parameters: codebooks `W1` of the previous token and `W2` of the next, and the layers that mix in the hidden state.

    Args:
        config (`DFlashDraftConfig`): `markov_rank`, `markov_head_type`, the vocabularies of target and drafter.
    """

    def __init__(self, config):
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
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
    family = "DSpark"
    architecture = "Qwen3DSparkModel"
    speculators_model_type = "dspark"
    sizes = ("markov_rank",)
    fields = {
        "markov_rank": None,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
    tensor_names = {
        r"^markov_w1\.": "markov_head.markov_w1.",
        r"^markov_w2\.": "markov_head.markov_w2.",
        r"^gate_proj\.": "markov_head.gate_proj.",
        r"^joint_proj\.": "markov_head.joint_proj.",
        r"^confidence_proj\.": "confidence_head.proj.",
    }

    @classmethod
    def is_set(cls, get) -> bool:
        return bool(get("markov_rank") or get("enable_confidence_head"))

    @classmethod
    def read(cls, config: dict) -> dict:
        """DSpark's dialects; the fields have DeepSpec's and Automodel's names."""
        if not _is_dspark(config):
            return config
        others = ("projector_type", "use_confidence_head", "confidence_head_alpha")
        file = {key: value for key, value in config.items() if key not in others}
        left_out: dict = {"sample_from_anchor": True}
        if file.get("speculators_model_type"):
            left_out = {"sample_from_anchor": False, "markov_rank": 256}
            left_out |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), True)
        elif (has_one := config.get("use_confidence_head")) is not None:  # ModelOpt's always reads the codebook
            file |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), has_one)
        elif config.get("confidence_head_alpha"):  # SpecForge's
            left_out["enable_confidence_head"] = True
        # Without its own table the drafter's embedding is a copy of the target's.
        layout = {} if file.get("has_embed_tokens") else {"source_layout": "with copies"}
        said = {key: value for key, value in file.items() if value is not None or key not in left_out}
        return {**left_out, **said, **layout}

    @classmethod
    def method(cls, config) -> str:
        return "dspark"

    @classmethod
    def needs_teacher(cls, config) -> bool:
        return config.enable_confidence_head

    @classmethod
    def check(cls, config) -> None:
        if config.markov_head_type not in TYPES:
            raise ValueError(f"markov_head_type={config.markov_head_type!r} must be one of {', '.join(TYPES)}.")
        for key in ("enable_confidence_head", "confidence_head_with_markov"):
            if not isinstance(getattr(config, key), bool):
                raise ValueError(f"{key}={getattr(config, key)!r} must be true or false.")
        if config.enable_confidence_head and config.confidence_head_with_markov and not config.markov_rank:
            raise ValueError(
                f"confidence_head_with_markov=True reads a codebook, but markov_rank={config.markov_rank}: set the "
                "rank, or leave it false."
            )
        if config.vocab_size is None:
            raise ValueError("vocab_size=None: a Markov head has a row for each of the target's tokens; set it.")

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
        found = {}
        if config.markov_rank:
            found["markov_head"] = MarkovTables(config)
        if config.enable_confidence_head:
            width = config.hidden_size + config.confidence_head_with_markov * (config.markov_rank or 0)
            found["confidence_head"] = nn.ModuleDict({"proj": nn.Linear(width, 1)})
        return found

    @classmethod
    def init_weights(cls, module: nn.Module, config) -> None:
        if isinstance(module, MarkovTables):
            init.zeros_(module.markov_w2.weight)

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
        if self.kind is None:
            parts, known = [], hidden
        else:
            tables = self.draft.markov_head
            known = tables.markov_w1(before).to(hidden.dtype)  # [..., r]
            query, state = self._mixed(tables, state, known, hidden)
            parts = [query]
        if self.config.enable_confidence_head:
            sees = [hidden, known] if self.config.confidence_head_with_markov else [hidden]
            parts.append(self.draft.confidence_head.proj(torch.cat(sees, dim=-1)))
        return torch.cat(parts, dim=-1), state

    def _mixed(self, tables: MarkovTables, state, known: torch.Tensor, hidden: torch.Tensor):
        """The input of `W2`, `[..., r]`, and the next state."""
        if self.kind == "vanilla":
            return known, None
        if self.kind == "gated":
            return torch.sigmoid(tables.gate_proj(torch.cat([hidden, known], dim=-1))) * known, None
        gate, candidate, output = tables.joint_proj(torch.cat([state, known, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)

    def scores(self, query: torch.Tensor, ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            return logits.float()
        bias = self.draft.markov_head.markov_w2(query[..., : self.width])
        return logits.float() + bias[..., : logits.shape[-1]].float()

    def loss(self, rows, progress: float) -> torch.Tensor:
        """The run's loss, plus the confidence's cross-entropy with the overlap of `p` and `q`."""
        loss = rows.divergence(rows.scores)
        if not self.config.enable_confidence_head or rows.teacher is None:
            return loss
        shared = 1.0 - rows.distance(rows.scores.detach())  # acceptance probability of rejection sampling
        said = rows.query[..., self.width].to(shared)
        return loss + functional.binary_cross_entropy_with_logits(said, shared, reduction="none")


def _is_dspark(config: dict) -> bool:
    """
    Raises:
        `ValueError`: the file has a Markov head, but cannot be read.
    """
    bundled = [key for key in config if key.startswith("dspark_")]
    if bundled:
        raise UnknownHeadError(
            f"{bundled[0]}={config[bundled[0]]!r} belongs to a DSpark drafter inside its target's checkpoint, which "
            "cannot be loaded here; load a drafter that was published separately."
        )
    names = [config.get("speculators_model_type"), config.get("projector_type"), *(config.get("architectures") or [])]
    if any("dspark" in str(name).lower() for name in names):
        return True
    if config.get("markov_rank") and "sample_from_anchor" not in config:
        raise ValueError(
            f"markov_rank={config['markov_rank']} without sample_from_anchor: the file does not say whether slot k of "
            "its blocks predicts the token at anchor + k (false) or anchor + 1 + k (true); set it."
        )
    return False
