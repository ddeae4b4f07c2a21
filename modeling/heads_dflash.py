"""
Heads turn the hidden states of a block's slots into tokens: their contract, then the heads of DFlash 2, DSpark and
Domino. The base class takes the argmax of every slot.

One parallel pass of the drafter gives the hidden state `h_k` of every slot. A head then goes through the slots from
left to right. With `U_k` the draft logits of a slot, `x_{k-1}` the previous token:

    query_k, state = step(state, x_{k-1}, h_k)     what the past says about the slot, without the vocabulary
    S_k            = scores(query_k, ids, U_k)     over all tokens, or over the candidates of the slot

The token is the argmax of `S_k`, to which the noise of the target's next sample may have been added. In training the
previous tokens are known, so that `step` runs over whole blocks first, and `scores` chunk by chunk after the target's
frozen head, whose logits are never in memory all at once.
"""

import math

import torch
from torch import nn


class Head:
    """
    How the tokens of a block are chosen; this one takes the likeliest of each slot.

    A head is a view on a drafter: its modules are the drafter's, under their published names. Everything about a head
    is in its class; `HEADS` lists the classes.

    Class attributes:
        name (`str`): Name in messages.
        architecture (`str`): Name in the `architectures` of a drafter's `config.json`.
        fields (`dict`): Fields of the configuration, nested in `dflash_config` of a file, and their defaults. A
            drafter has this head if the first of them is set.
        sizes (`tuple[str]`): The fields that are sizes: positive integers, or 0 for none; all set, or none.
        order (`int`): Number of previous tokens that a slot's scores depend on: 0; 1, without a state; or `MANY`. An
            instance may override it: a head may have several forms.
        drafts_last_slot (`bool`): Whether the last slot of an anchor-first block is drafted, or only trained.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        embed (`Callable`): The raw embeddings `[..., H]` of the target's tokens `[...]`, from which blocks are built.
    """

    MANY = math.inf

    name = "argmax"
    architecture = "DFlashDraftModel"
    fields: dict = {}
    sizes: tuple[str, ...] = ()
    order: float = 0
    drafts_last_slot = True

    def __init__(self, draft, embed):
        self.draft, self.config, self.embed = draft, draft.config, embed

    @classmethod
    def is_set(cls, get) -> bool:
        """Whether a drafter has this head; `get` gives the value of a field, or `None`."""
        return bool(cls.fields) and bool(get(next(iter(cls.fields))))

    @classmethod
    def nested(cls, config) -> dict:
        """Entries of its `dflash_config` beyond its fields."""
        return {}

    @classmethod
    def write(cls, output: dict, config) -> None:
        """
        Turn a `config.json` with this head's fields in `dflash_config` into what engines read, in place; without a
        head, an anchor-first block is DeepSpec's plain drafter.
        """
        if config.sample_from_anchor and config.has_head:
            raise ValueError(
                f"sample_from_anchor=True with a {cls.name}: no published layout has both; leave it false, or give "
                "the head its own `write`."
            )
        if config.sample_from_anchor:
            output |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": False}
            output.setdefault("num_anchors", 512)  # required by DeepSpec's reader
        else:
            del output["sample_from_anchor"]

    @classmethod
    def modules(cls, config) -> dict[str, nn.Module]:
        """The modules a drafter gets for this head, by the first part of their tensors' published names."""
        return {}

    @classmethod
    def init_weights(cls, module: nn.Module, config) -> None:
        """
        Initialise one of the modules or submodules; a fresh head should draft like [`Head`]. The heads of this file
        are initialised by the package, which trains.
        """

    @property
    def top_k(self) -> int | None:
        """Number of candidates per slot; `None` for all tokens."""
        return None

    def candidates(self, logits: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor]:
        """
        The tokens among which the head chooses.

        Args:
            logits (`torch.Tensor`): `[..., V]`, over the drafter's vocabulary, without the last tokens of it if the
                target's embedding has shrunk.

        Returns:
            Ids in the drafter's vocabulary, `[..., k]`, or `[V]` for all tokens, and their logits, `[..., k]`.
        """
        return torch.arange(logits.shape[-1], device=logits.device), logits

    def start(self, anchors: torch.LongTensor) -> torch.Tensor | None:
        """The state before the first unknown slot of each row, `[R, ...]`; `step` receives the anchors `[R]`, too."""
        return None

    def step(self, state, before: torch.LongTensor, hidden: torch.Tensor):
        """
        Args:
            state (`torch.Tensor`): `[R, ...]`; `None` up to order 1.
            before (`torch.LongTensor`): `[R]`, the target's id of the token before the slot. Up to order 1, any shape
                `[...]` that broadcasts with `hidden`.
            hidden (`torch.Tensor`): `[R, H]`, the slot's hidden state after the final norm.

        Returns:
            The query `[R, q]` and the next state.
        """
        return None, None

    def scores(self, query, ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        """
        Args:
            query (`torch.Tensor`): `[..., q]`, from `step`.
            ids (`torch.LongTensor`): `[..., k]`, the target's ids of the candidates.
            logits (`torch.Tensor`): `[..., k]`, their draft logits.

        Returns:
            `torch.Tensor` `[..., k]` in fp32.
        """
        return logits.float()


class CandidateSelector(nn.Module):
    """
    Parameters of the selector: codebooks `A` of predecessors and `C` of successors, and the projection `W`.

    Args:
        config (`DFlashDraftConfig`): `selector_rank`, `vocab_size` of the target.
    """

    def __init__(self, config):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))  # A
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))  # C
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)  # W


class PathSelector(Head):
    """
    Scores the `top_k` likeliest tokens `b` of a slot, given the token `a` chosen before it:
    `S(a, b) = U(b) + <A[a] * (W h), C[b]>`, with `U` the draft logit and `h` the slot's hidden state.

    At initialisation `C` is zero, so that the walk is the argmax of every slot. `selector_rank` is the rank `r` of the
    codebooks, `selector_top_k` the number of candidates `k`.
    """

    name = "path selector"
    architecture = "DFlash2DraftModel"
    sizes = ("selector_rank", "selector_top_k")
    fields = dict.fromkeys(sizes)
    order = 1

    @classmethod
    def modules(cls, config) -> dict[str, nn.Module]:
        return {"candidate_selector": CandidateSelector(config)}

    @property
    def top_k(self) -> int:
        return self.config.selector_top_k

    def candidates(self, logits: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor]:
        """Sorted by id, so that ties go to the lowest id, as in `argmax` over the vocabulary."""
        ids = logits.topk(self.top_k, dim=-1).indices.sort(dim=-1).values
        return ids, logits.gather(-1, ids)

    def step(self, state, before: torch.LongTensor, hidden: torch.Tensor):
        # Not by index: on a GPU its gradient adds up tokens that many slots share one after the other.
        selector, lookup = self.draft.candidate_selector, nn.functional.embedding
        return lookup(before, selector.predecessor_codebook) * selector.hidden_projection(hidden), None  # [..., r]

    def scores(self, query: torch.Tensor, ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        successors = nn.functional.embedding(ids, self.draft.candidate_selector.successor_codebook)  # [..., k, r]
        return logits.float() + (successors @ query.unsqueeze(-1)).squeeze(-1).float()


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
        found = {}
        if config.markov_rank:
            found["markov_head"] = MarkovTables(config)
        if config.enable_confidence_head:
            width = config.hidden_size + config.confidence_head_with_markov * (config.markov_rank or 0)
            found["confidence_head"] = nn.ModuleDict({"proj": nn.Linear(width, 1)})
        return found

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
        inner, vocabulary = config.emb_dim, config.draft_vocab_size or config.vocab_size
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

    def start(self, anchors: torch.LongTensor) -> torch.Tensor:
        """The GRU's state, followed by the number of slots drafted: `[R, G + 1]`."""
        weight = self.draft.prefix_gru.weight_hh_l0
        return torch.zeros(len(anchors), weight.shape[1] + 1, dtype=weight.dtype, device=weight.device)

    def step(self, state, before: torch.LongTensor, hidden: torch.Tensor):
        first, act, _ = self.draft.embed_proj
        memory, drafted = state[:, :-1], state[:, -1:]
        memory = self.draft.prefix_gru(self.embed(before).to(hidden), memory.to(hidden.dtype))
        query = act(first(torch.cat([hidden, memory], dim=-1)))  # [R, emb_dim]
        # With a zero query `E2` adds nothing.
        query = query * (drafted >= self.config.pure_draft_prefix_len)
        return query, torch.cat([memory, drafted.to(memory.dtype) + 1], dim=-1)

    def scores(self, query: torch.Tensor, ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.float() + self.draft.embed_proj[2](query)[..., : logits.shape[-1]].float()


HEADS: tuple[type[Head], ...] = (PathSelector, MarkovHead, DominoHead)


def head_fields() -> dict:
    """Configuration fields of all heads, and their defaults."""
    return {field: default for head in HEADS for field, default in head.fields.items()}
