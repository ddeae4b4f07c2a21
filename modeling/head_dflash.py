"""
The base class of token heads. A token head chooses the tokens of a block from the hidden states of its slots and their
draft logits. It is not the LM head, which computes these logits, nor an attention head, and its *queries* are not
queries of attention. The base class takes the argmax of each slot. Every other token head has a file of its own:
parameters, initial values, scores and loss.

One parallel pass of the drafter gives the hidden state `h_k` of every slot. `decode_block` then goes through the slots
from left to right. With `U_k` the draft logits of a slot and `x_{k-1}` the previous token:

    query_k, state = step(state, x_{k-1}, h_k)     a small vector, independent of the vocabulary
    S_k            = scores(query_k, ids, U_k)     over the whole vocabulary, or over the candidates of the slot

The token is the argmax of `S_k`. When the target samples, `U_k` may include the noise of its next sample. In training
the previous tokens are known: `step` runs over whole blocks first, and `scores` chunk by chunk after the target's
frozen LM head, so that the logits of all slots are never in memory at once.
"""

import math
from collections.abc import Mapping

import torch
from torch import nn


class TokenHead:
    """
    Chooses the tokens of a block; this class takes the likeliest token of each slot.

    A token head owns no parameters: its modules belong to the drafter, under their published names. An instance holds
    no state of a sequence either (`start` and `step` return it), so it is made for each call of `generate` or each run
    of training by whoever needs it, and shared by all rows. `heads_dflash.TOKEN_HEADS` lists the classes.

    A head is one file, so that a new one needs no line elsewhere. Its members are for three readers:

    - the drafter's files: `name`, `architecture`, `fields`, `sizes`, `is_configured`, `extra_nested_keys`,
      `write_config`, `build_modules`, `init_weights`;
    - training, which alone reads them: `preset`, `preset_loss_type`, `loss`, `needs_teacher`;
    - drafting, and training as well: `order`, `drafts_last_slot`, `top_k`, `candidates`, `start`, `step`, `scores`,
      `decode_block`.

    Class attributes:
        name (`str`): Name in messages.
        architecture (`str`): Name in the `architectures` of a drafter's `config.json`.
        fields (`dict`): Configuration fields of this head and their defaults; a file nests them in `dflash_config`. A
            drafter has this head if the first of them is set.
        sizes (`tuple[str]`): The fields that are sizes: all are positive integers, or all are 0 or unset.
        order (`int` or `math.inf`): How many previous tokens the scores of a slot depend on: 0, 1 (then there is no
            state), or `ALL_PREVIOUS`. An instance may override it, if the head has several variants.
        drafts_last_slot (`bool`): With `sample_from_anchor`: whether the last slot of a block drafts a token. If not,
            it is trained, but no draft uses it.
        preset (`dict`): The configuration fields that `--head NAME` of `dflash train` sets for this head, and their
            values. NAME is the architecture without `DraftModel`, in lower case, unless published drafters have
            another name. Empty: `--head` does not offer it.
        preset_loss_type (`str`, *optional*): The `loss_type` that `--head NAME` sets. `None`: the run's own.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        embed (`Callable`): Maps the target's ids `[...]` to raw embeddings `[..., H]`, those of a block's input.
    """

    ALL_PREVIOUS = math.inf

    name = "argmax"
    architecture = "DFlashDraftModel"
    fields: dict = {}
    sizes: tuple[str, ...] = ()
    order: float = 0
    drafts_last_slot = True
    preset: dict = {}
    preset_loss_type: str | None = None

    def __init__(self, draft, embed):
        self.draft = draft
        self.config = draft.config
        self.embed = embed

    # The drafter's files.

    @classmethod
    def is_configured(cls, values: Mapping) -> bool:
        """Whether a drafter with these configuration fields has this head; fields may be missing."""
        first_field = next(iter(cls.fields), None)
        return bool(values.get(first_field))

    @classmethod
    def extra_nested_keys(cls, config) -> dict:
        """What to write into `dflash_config` beyond the head's fields."""
        return {}

    @classmethod
    def write_config(cls, output: dict, config) -> None:
        """
        Rewrite a `config.json` into what inference engines read, in place.

        Args:
            output (`dict`): The file's content, with this head's fields in `dflash_config`.
            config (`DFlashDraftConfig`): The configuration. Without a token head, `sample_from_anchor` is written as
                in DeepSpec's plain drafter.

        Raises:
            `ValueError`: no published layout has this head together with `sample_from_anchor`.
        """
        if config.sample_from_anchor and config.has_token_head:
            raise ValueError(
                f"sample_from_anchor=True with a {cls.name}: no published layout has both; leave it false, or give "
                "the head its own `write_config`."
            )
        if config.sample_from_anchor:
            output |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": False}
            output.setdefault("num_anchors", 512)  # required by DeepSpec's reader
        else:
            del output["sample_from_anchor"]

    @classmethod
    def build_modules(cls, config) -> dict[str, nn.Module]:
        """New modules of a drafter with this head, by attribute name, as in published tensor names."""
        return {}

    @classmethod
    def init_weights(cls, module: nn.Module, config) -> None:
        """Initialise one of the head's modules or submodules, so that a new head drafts the argmax of each slot."""

    # Training.

    def loss(self, tokens, progress: float) -> torch.Tensor:
        """
        The training loss of each drafted token, `[M]`, differentiable.

        Args:
            tokens (`dflash_hf.training.losses.DraftedTokens`): Scores, logits, labels and teacher of `M` drafted
                tokens.
            progress (`float`): Progress of the run, from 0 to 1.
        """
        if tokens.ids is None:
            return tokens.divergence(tokens.scores)
        # A head with candidates learns to choose among them; the draft logits have the same loss as without a head.
        return tokens.divergence(tokens.logits) + tokens.selection()

    @classmethod
    def needs_teacher(cls, config) -> bool:
        """Whether its loss needs the target's distribution (`tokens.teacher`)."""
        return False

    # Drafting, and the scores of training.

    @property
    def top_k(self) -> int | None:
        """Number of candidates per slot; `None` for all tokens."""
        return None

    def candidates(self, logits: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor]:
        """
        The tokens among which the head chooses.

        Args:
            logits (`torch.Tensor`): `[..., V]`, over the drafter's vocabulary, or its first `V` tokens if the target's
                embedding has fewer rows.

        Returns:
            Ids in the drafter's vocabulary, `[..., k]`, or `[V]` for all tokens, and their logits, `[..., k]`.
        """
        return torch.arange(logits.shape[-1], device=logits.device), logits

    def start(self, anchors: torch.LongTensor) -> torch.Tensor | None:
        """The state of each row before any token is drafted, `[R, ...]`; the first `step` also gets the anchors."""
        return None

    def step(self, state, previous_ids: torch.LongTensor, hidden: torch.Tensor):
        """
        Advance by one slot.

        Args:
            state (`torch.Tensor`): `[R, ...]`; `None` up to order 1.
            previous_ids (`torch.LongTensor`): `[R]`, the token before the slot, as the target's id. Up to order 1,
                any shape `[...]` that broadcasts with `hidden`.
            hidden (`torch.Tensor`): `[R, H]`, the slot's hidden state after the final norm.

        Returns:
            The query `[R, q]` and the next state.
        """
        return None, None

    def scores(self, query, ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        """
        Scores of a slot's candidates; the candidate with the highest is chosen.

        Args:
            query (`torch.Tensor`): `[..., q]`, from `step`.
            ids (`torch.LongTensor`): `[..., k]`, the candidates, as the target's ids.
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
            anchors (`torch.LongTensor`): `[R]`, the last committed tokens, as the target's ids; those past the
                vocabulary that the drafter was trained on are clamped by the caller.
            hidden (`torch.Tensor`): `[R, n, H]`, of the slots that draft, after the final norm.
            logits (`torch.Tensor`): `[R, n, V]`, their draft logits, with the noise of samples or without.
            target_ids (`Callable`): Maps ids in the drafter's vocabulary to the target's.

        Returns:
            `torch.LongTensor` `[R, n]`, the target's ids.
        """
        # 1. Slots that do not depend on each other are decoded together.
        if self.order == 0:
            return target_ids(logits.argmax(dim=-1))
        # 2. Other slots are decoded one after the other, each given the tokens before it.
        ids, logits = self.candidates(logits)
        ids = target_ids(ids).to(hidden.device).expand_as(logits)  # [R, n, k]
        logits = logits.to(hidden.device)
        previous_ids = anchors
        state = self.start(anchors)
        chosen = []
        for slot in range(hidden.shape[1]):
            query, state = self.step(state, previous_ids, hidden[:, slot])
            best = self.scores(query, ids[:, slot], logits[:, slot]).argmax(dim=-1, keepdim=True)  # [R, 1]
            previous_ids = ids[:, slot].gather(-1, best)[:, 0]  # [R]
            chosen.append(previous_ids)
        return torch.stack(chosen, dim=1)
