"""
Heads turn the hidden states of a block's slots into tokens. This is their contract; the base class takes the argmax of
every slot.

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


class UnknownHeadError(ValueError):
    """A drafter whose head, or drafting method, this package does not know."""


class Head:
    """
    How the tokens of a block are chosen; this one takes the likeliest of each slot.

    A head is a view on a drafter: its modules are the drafter's, under their published names. Everything about a head
    is in its class; `HEADS` of `heads_dflash` lists the classes.

    Class attributes:
        name (`str`): Name in messages.
        family (`str`): What others call drafters with this head, as in `layouts_dflash`, which rejects families
            without a head.
        architecture (`str`): Name in the `architectures` of a drafter's `config.json`.
        speculators_model_type (`str`): Type under which speculators writes this head; `None` if it does not.
        fields (`dict`): Fields of the configuration, nested in `dflash_config` of a file, and their defaults. A
            drafter has this head if the first of them is set.
        sizes (`tuple[str]`): The fields that are sizes: positive integers, or 0 for none; all set, or none.
        tensor_names (`dict[str, str]`): Other names of its tensors, regular expressions as in `layouts_dflash`.
        order (`int`): Number of previous tokens that a slot's scores depend on: 0; 1, without a state; or `MANY`. An
            instance may override it: a head may have several forms.
        drafts_last_slot (`bool`): Whether the last slot of an anchor-first block is drafted, or only trained.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        embed (`Callable`): The raw embeddings `[..., H]` of the target's tokens `[...]`, from which blocks are built.
    """

    MANY = math.inf

    name = "argmax"
    family = "DFlash"
    architecture = "DFlashDraftModel"
    speculators_model_type: str | None = "dflash"
    fields: dict = {}
    sizes: tuple[str, ...] = ()
    tensor_names: dict[str, str] = {}
    order: float = 0
    drafts_last_slot = True

    def __init__(self, draft, embed):
        self.draft, self.config, self.embed = draft, draft.config, embed

    @classmethod
    def is_set(cls, get) -> bool:
        """Whether a drafter has this head; `get` gives the value of a field, or `None`."""
        return bool(cls.fields) and bool(get(next(iter(cls.fields))))

    @classmethod
    def read(cls, config: dict) -> dict:
        """
        A `config.json` with this head's fields, from any published spelling. Keys of `dflash_config` that have a field
        are already at the top level.
        """
        return config

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
    def method(cls, config) -> str:
        """The engines' name for drafting with this head: `"dflash"` or `"dspark"`."""
        return "dspark" if config.sample_from_anchor and not config.has_head else "dflash"

    @classmethod
    def needs_teacher(cls, config) -> bool:
        """Whether part of the head learns only from the target's distribution."""
        return False

    @classmethod
    def check(cls, config) -> None:
        """
        Check its fields, beyond `sizes`.

        Raises:
            `ValueError`: names field, value and remedy.
        """

    @classmethod
    def modules(cls, config) -> dict[str, nn.Module]:
        """The modules a drafter gets for this head, by the first part of their tensors' published names."""
        return {}

    @classmethod
    def init_weights(cls, module: nn.Module, config) -> None:
        """Initialise one of the modules or submodules; a fresh head should draft like [`Head`]."""

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

    def forced(self, before: torch.LongTensor, hidden: torch.Tensor, known: torch.BoolTensor) -> torch.Tensor:
        """
        The queries of whole blocks whose tokens are known.

        Args:
            before (`torch.LongTensor`): `[..., B]`, the token before each slot; slot 0 is the anchor's own.
            hidden (`torch.Tensor`): `[..., B, H]`.
            known (`torch.BoolTensor`): `[..., B]`, the slots to learn from, never slot 0.

        Returns:
            `torch.Tensor` `[M, q]`, the queries of the known slots.
        """
        if self.order <= 1:
            return self.step(None, before[known], hidden[known])[0]
        before, hidden = before.flatten(0, -2), hidden.flatten(0, -3)  # [R, B], [R, B, H]
        state, queries = self.start(before[:, 1]), []
        for slot in range(1, before.shape[1]):
            query, state = self.step(state, before[:, slot], hidden[:, slot])
            queries.append(query)
        return torch.stack(queries, dim=1).unflatten(0, known.shape[:-1])[known[..., 1:]]

    def loss(self, rows, progress: float) -> torch.Tensor:
        """
        The differentiable loss `[M]` of a head over all tokens. (A head with candidates is trained towards the
        target's probabilities among them, and leaves the loss of the independent slots unchanged.)

        Args:
            rows (`Rows` of `dflash_hf.training.losses`): Scores, logits, labels and teacher of some known tokens.
            progress (`float`): Progress of the run, from 0 to 1.
        """
        return rows.divergence(rows.scores)
