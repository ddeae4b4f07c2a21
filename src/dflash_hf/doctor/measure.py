"""
Teacher-forced acceptance under small changes, over the same blocks.

Texts and anchors are fixed. At each anchor the drafter fills one block, given the target's features of the text before
it. Counted are the accepted prefix (what verification would accept if the target had written the text) and the
drafter's log-probability of the text's tokens. A change is measured by counting again; if it affects the drafter
alone, on the same features.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.modeling.cache_dflash import additive
from dflash_hf.modeling.drafting_dflash import Drafter
from dflash_hf.target import target_features
from dflash_hf.training.blocks import block_mask, build_blocks, sample_anchors
from dflash_hf.training.metrics import slot_counts
from dflash_hf.training.start import draft_ids


@dataclass
class Text:
    """
    A prompt with its answer, and the anchors of the blocks to draft.

    Args:
        input_ids (`torch.LongTensor`): `[1, S]`.
        anchors (`torch.LongTensor`): `[1, A]`.
    """

    input_ids: torch.LongTensor
    anchors: torch.LongTensor

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int], block_size: int, anchors: int, seed: int = 0):
        """Draw anchors in the answer, if possible with whole blocks; `None` if the answer is too short."""
        ids = torch.tensor([[*prompt, *answer]])
        mask = (torch.arange(ids.shape[1]) >= len(prompt)).long()[None]
        whole = mask.clone()
        whole[:, max(ids.shape[1] - block_size + 2, len(prompt) + 2) :] = 0  # the token after an anchor is needed too
        for eligible in (whole, mask):
            places, valid = sample_anchors(eligible, anchors, torch.Generator().manual_seed(seed))
            if valid.any():
                return cls(ids, places[valid][None])
        return None


@dataclass
class Change:
    """
    A change to the pair.

    Args:
        config (`dict`): Fields of the drafter's configuration.
        features (`PreTrainedModel`, *optional*): Model to read features from.
        embedding (`PreTrainedModel`, *optional*): Model whose embedding is used.
        head (`nn.Module`, *optional*): Head to draft with.
        shift (`int`): 1 switches between anchor-first blocks and DFlash's.
        dtype (`torch.dtype`, *optional*): The drafter's dtype.
        texts (`Callable`, *optional*): Returns other texts; called when they are needed.
    """

    config: dict = field(default_factory=dict)
    features: object = None
    embedding: object = None
    head: nn.Module | None = None
    shift: int = 0
    dtype: torch.dtype | None = None
    texts: Callable[[], list[Text | None]] | None = None


def changed_draft(draft: DFlashDraftModel, fields: dict, dtype: torch.dtype | None = None) -> DFlashDraftModel:
    """The drafter with another configuration; its weights are shared unless `dtype` differs."""
    if not fields and dtype in (None, draft.dtype):
        return draft
    config = copy.deepcopy(draft.config)
    for name, value in fields.items():
        setattr(config, name, value)
    return of_tensors(config, draft.state_dict()).to(dtype or draft.dtype)


def of_tensors(config, tensors: dict[str, torch.Tensor]) -> DFlashDraftModel:
    """A frozen drafter with these tensors, which are not copied."""
    with torch.device("meta"):
        draft = DFlashDraftModel(config)
    draft.load_state_dict(tensors, assign=True)
    for name in ("rotary_emb", "context_rotary_emb"):  # not stored
        table = getattr(draft, name)
        if table is not None:
            setattr(draft, name, type(table)(table.config).to(draft.fc.weight.device))
    return draft.requires_grad_(False).eval()


@torch.no_grad()
def hits(target, draft: DFlashDraftModel, text: Text, features: torch.Tensor, change: Change):
    """
    Which drafted tokens match the text, block by block, and the drafter's log-probabilities of the text's tokens.

    Args:
        draft (`DFlashDraftModel`): The result of [`changed_draft`].
        features (`torch.Tensor`): `[1, S, L*H]`, from the layers that the drafter reads.

    Returns:
        `correct` and `counted`, `torch.BoolTensor` `[A, B-1]`, for slots 1..B-1; slots past the end of the text are
        not counted. `nats`, `torch.Tensor` `[A, B-1]`, log-probabilities; 0 if a token is not counted or cannot be
        drafted.
    """
    config, device = draft.config, features.device
    ids, anchors = text.input_ids.to(device), text.anchors.to(device)
    ones, valid = torch.ones_like(ids), torch.ones_like(anchors, dtype=torch.bool)
    early = config.sample_from_anchor != bool(change.shift)
    blocks = build_blocks(ids, ones, anchors, valid, config.block_size, config.mask_token_id, anchor_first=early)
    masks = config.by_layer_type(
        lambda window, causal: additive(block_mask(anchors, ones, config.block_size, window, causal), draft.dtype)
    )
    hidden = draft(
        noise_embeds=draft.embed(change.embedding or target, blocks.input_ids).to(draft.dtype),
        context_hidden_states=features.to(draft.dtype),
        attention_mask=masks,
        position_ids=blocks.position_ids,
    ).last_hidden_state.view(anchors.shape[1], config.block_size, -1)  # [A, B, H]
    drafter = Drafter(draft, target)
    head = change.head or target.get_output_embeddings()
    drafter.logits = lambda states, lengths: draft.draft_logits(states, head)  # of another target, perhaps
    states = hidden[:, 0 if early else 1 :][:, : config.block_tokens - 1]  # [A, D, H]
    drafted = drafter.walk(ids[0, anchors[0]], states, [])  # [A, B]
    counted, labels = (one[0, :, 1 : states.shape[1] + 1] for one in (blocks.counted, blocks.labels))
    log_probs = drafter.logits(states, []).float().log_softmax(-1)  # [A, B-1, V]
    own = draft_ids(draft)
    own = labels if own is None else own[labels]
    known = counted & (own >= 0) & (own < log_probs.shape[-1])
    nats = log_probs.gather(-1, own.masked_fill(~known, 0)[..., None])[..., 0] * known
    return (drafted[:, 1:] == labels) & counted, counted, nats


@dataclass
class Counts:
    """
    The counts of one measurement, text by text.

    Args:
        accepted (`list[int]`): Drafted tokens that verification would accept, over the blocks of the text.
        blocks (`list[int]`): Number of blocks.
        nats (`list[list[float]]`): Log-probability of the text's tokens in each slot, summed over its blocks; empty
            if tokens were decoded.
        slots (`torch.Tensor`): `[4, B-1]`, over all texts: of slots 1..B-1 the tokens counted, correct, reached (all
            before are correct) and accepted.
    """

    accepted: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    nats: list[list[float]] = field(default_factory=list)
    slots: torch.Tensor | float = 0.0

    def add(self, correct: torch.BoolTensor, counted: torch.BoolTensor, nats: torch.Tensor) -> None:
        slots = slot_counts(correct, counted)  # [4, A, B-1]
        kept = slots[3]
        self.accepted.append(int(kept.sum()))
        self.blocks.append(len(kept))
        self.nats.append(nats.sum(0).tolist())
        self.slots = self.slots + slots.sum(1).cpu().float()

    def nothing(self) -> None:
        """Count a prompt without a text."""
        self.accepted.append(0)
        self.blocks.append(0)
        self.nats.append([])

    @property
    def tau(self) -> float:
        """Mean accepted prefix over all blocks, plus the bonus token."""
        return 1 + sum(self.accepted) / max(sum(self.blocks), 1)

    @property
    def accuracy(self) -> list[float]:
        """Share of correct tokens, by slot."""
        return (self.slots[1] / self.slots[0].clamp(min=1)).tolist()

    @property
    def acceptance(self) -> list[float]:
        """Share of correct tokens where all slots before are correct, by slot."""
        return (self.slots[3] / self.slots[2].clamp(min=1)).tolist()


def measure(
    target,
    draft: DFlashDraftModel,
    texts: list[Text | None],
    changes: Sequence[Change],
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Counts]:
    """
    Count with each change. A target reads each text once.

    Args:
        texts (`list[Text]`): One per prompt; texts that a change makes correspond to the same prompts.
    """
    twins = [changed_draft(draft, change.config, change.dtype) for change in changes]
    own = [texts if change.texts is None else change.texts() for change in changes]
    counts = [Counts() for _ in changes]
    # Changes by texts, and by the model that reads them.
    readers: dict[tuple[int, int], list[int]] = {}
    for number, change in enumerate(changes):
        readers.setdefault((id(own[number]), id(change.features or target)), []).append(number)
    for numbers in progress(list(readers.values())):
        reader = changes[numbers[0]].features or target
        layer_ids = sorted({i for number in numbers for i in twins[number].config.target_layer_ids})
        for text in own[numbers[0]]:
            if text is None:
                for number in numbers:
                    counts[number].nothing()
                continue
            read = target_features(reader, layer_ids, text.input_ids.to(reader.device))
            read = read.unflatten(-1, (len(layer_ids), -1))  # [1, S, U, H]
            for number in numbers:
                wanted = [layer_ids.index(i) for i in twins[number].config.target_layer_ids]
                features = read[:, :, wanted].flatten(2)  # [1, S, L*H]
                counts[number].add(*hits(target, twins[number], text, features, changes[number]))
    return counts
