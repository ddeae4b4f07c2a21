"""
The contract of heads, which turn the hidden states of a block's slots into tokens. The base class takes the argmax of
every slot; each other head is a file: its parameters, initial values, scores and loss.

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
    is in its class; `heads_dflash.HEADS` lists the classes.

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
        """Initialise one of the modules or submodules; a fresh head drafts what the slots say by themselves."""

    def loss(self, rows, progress: float) -> torch.Tensor:
        """
        What the head learns from, `[M]`, differentiable.

        Args:
            rows (`Rows` of `dflash_hf.training.losses`): Scores, logits, labels and teacher of `M` draftable tokens.
            progress (`float`): Progress of the run, from 0 to 1.
        """
        if rows.ids is None:
            return rows.divergence(rows.scores)
        # A head with candidates learns to choose among them, and leaves the loss of the independent slots unchanged.
        return rows.divergence(rows.logits) + rows.selection()

    @classmethod
    def needs_teacher(cls, config) -> bool:
        """Whether part of its loss needs the target's distribution."""
        return False

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

    def decode_block(
        self, anchors: torch.LongTensor, hidden: torch.Tensor, logits: torch.Tensor, target_ids
    ) -> torch.LongTensor:
        """
        Choose the tokens of a block from left to right.

        Args:
            anchors (`torch.LongTensor`): `[R]`, the target's ids of the tokens before the first slot.
            hidden (`torch.Tensor`): `[R, n, H]`, of the slots that draft, after the final norm.
            logits (`torch.Tensor`): `[R, n, V]`, their draft logits, with noise or without.
            target_ids (`Callable`): The target's ids of ids in the drafter's vocabulary.

        Returns:
            `torch.LongTensor` `[R, n]`, the target's ids.
        """
        # 1. Independent slots are chosen together.
        if self.order == 0:
            return target_ids(logits.argmax(dim=-1))
        # 2. One token per slot, given the tokens before it.
        ids, logits = self.candidates(logits)
        ids = target_ids(ids).to(hidden.device).expand_as(logits)  # [R, n, k]
        logits = logits.to(hidden.device)
        before = anchors
        state = self.start(anchors)
        chosen = []
        for slot in range(hidden.shape[1]):
            query, state = self.step(state, before, hidden[:, slot])
            best = self.scores(query, ids[:, slot], logits[:, slot]).argmax(dim=-1, keepdim=True)  # [R, 1]
            before = ids[:, slot].gather(-1, best)[:, 0]  # [R]
            chosen.append(before)
        return torch.stack(chosen, dim=1)
