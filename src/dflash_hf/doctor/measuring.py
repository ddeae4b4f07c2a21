"""An experiment on a pair: drafting with a change, and counting what verification would accept."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.doctor.case import DraftedText, DraftedTexts
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.modeling.modeling_dflash import additive_mask
from dflash_hf.pairs.draft_vocabulary import draft_ids
from dflash_hf.targets.frozen import target_features
from dflash_hf.training.block_mask import block_mask
from dflash_hf.training.blocks import build_blocks


@dataclass(frozen=True)
class Cause:
    """
    A reason for low acceptance.

    Args:
        key (`str`): Its name in `--json`.
        text (`str`): What is wrong.
        remedy (`str`): What to do about it.
    """

    key: str
    text: str
    remedy: str


@dataclass
class Experiment:
    """
    A change to the pair. Without arguments it changes nothing.

    Args:
        name (`str`): What is changed, for the table.
        cause ([`Cause`], *optional*): What is wrong if the change raises acceptance.
        config (`dict`): Other values of fields in the drafter's configuration.
        target (`PreTrainedModel`, *optional*): Another target, whose features and embedding the drafter is given.
        output_head (`nn.Module`, *optional*): Another head for the draft logits.
        switches_anchor_first (`bool`): Read the weights as anchor-first if they are DFlash's, and the other way round.
        texts (`Callable`, *optional*): Returns other texts, for the same prompts; called when they are needed.
    """

    name: str = ""
    cause: Cause | None = None
    config: dict = field(default_factory=dict)
    target: object = None
    output_head: nn.Module | None = None
    switches_anchor_first: bool = False
    texts: Callable[[], DraftedTexts] | None = None


class TextCounts(NamedTuple):
    """
    The counts of one text.

    Args:
        accepted (`int`): The drafted tokens that verification would accept, summed over the blocks.
        nats (`list[float]`): The log-likelihood of the text's own tokens in each slot, summed over the blocks.
        blocks (`int`): The number of blocks.
    """

    accepted: int
    nats: list[float]
    blocks: int


@dataclass
class Counts:
    """
    The counts of one measurement.

    Args:
        texts (`list[TextCounts]`): The counts of each text; zeros where the target gave no text.
    """

    texts: list[TextCounts] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Number of blocks in all texts."""
        return sum(text.blocks for text in self.texts)

    @property
    def tau(self) -> float:
        """Mean accepted tokens over all blocks, plus the bonus token."""
        return 1 + sum(text.accepted for text in self.texts) / max(self.blocks, 1)


def changed_draft(draft: DFlashDraftModel, fields: dict) -> DFlashDraftModel:
    """
    A drafter with another configuration, and the same weights, frozen and in evaluation mode.

    Args:
        draft (`DFlashDraftModel`): The drafter. Without `fields` it is returned itself, as it is.
        fields (`dict`): Values of fields of its configuration.
    """
    if not fields:
        return draft
    config = copy.deepcopy(draft.config)
    for name, value in fields.items():
        setattr(config, name, value)
    with torch.device("meta"):
        changed = DFlashDraftModel(config)
    changed.load_state_dict(draft.state_dict(), assign=True)
    for name in ("rotary_emb", "context_rotary_emb"):  # not stored
        rotary = getattr(changed, name)
        if rotary is not None:
            setattr(changed, name, type(rotary)(rotary.config).to(draft.device))
    return changed.requires_grad_(False).eval()


class _SessionWithHead(DraftSession):
    """A drafter in one call whose draft logits come from a head that may not be the target's."""

    def __init__(self, draft: DFlashDraftModel, target, output_head: nn.Module):
        super().__init__(draft, target)
        self.output_head = output_head

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.draft.draft_logits(hidden, self.output_head)


@torch.no_grad()
def draft_blocks(
    target, draft: DFlashDraftModel, text: DraftedText, features: torch.Tensor, experiment: Experiment
) -> tuple[int, list[float]]:
    """
    Draft a block at each anchor of a text, and compare it with the text.

    Args:
        target (`PreTrainedModel`): The pair's target.
        draft (`DFlashDraftModel`): The result of [`changed_draft`].
        text (`DraftedText`): The text, with its anchors.
        features (`torch.Tensor`): `[1, S, L*H]`, from the layers that the drafter reads.
        experiment (`Experiment`): The experiment. With another target, this is the target whose embedding the
            drafter and its token head read; the LM head is the pair's, unless the experiment has another.

    Returns:
        The accepted tokens and the log-likelihood of the text in each slot, both summed over the blocks. Tokens past
        the end of the text, and tokens that cannot be drafted, do not count.
    """
    config = draft.config
    embedding_target = experiment.target or target
    ids = text.input_ids.to(features.device)  # [1, S]
    anchors = text.anchors.to(features.device)  # [1, A]
    every_token = torch.ones_like(ids)
    every_anchor = torch.ones_like(anchors, dtype=torch.bool)
    anchor_first = config.sample_from_anchor != experiment.switches_anchor_first

    # 1. The drafter's forward over all blocks.
    blocks = build_blocks(
        ids, every_token, anchors, every_anchor, config.block_size, config.mask_token_id, anchor_first=anchor_first
    )

    def mask_of_layer_type(window, causal) -> torch.Tensor:
        return additive_mask(block_mask(anchors, every_token, config.block_size, window, causal), draft.dtype)

    hidden = draft(
        noise_embeds=draft.embed(embedding_target, blocks.input_ids).to(draft.dtype),
        context_hidden_states=features.to(draft.dtype),
        attention_mask=config.map_layer_types(mask_of_layer_type),
        position_ids=blocks.position_ids,
    ).last_hidden_state.view(anchors.shape[1], config.block_size, -1)  # [A, B, H]

    # 2. Its tokens, with another head where the experiment has one.
    drafter = _SessionWithHead(draft, embedding_target, experiment.output_head or target.get_output_embeddings())
    first_slot = 0 if anchor_first else 1
    states = hidden[:, first_slot:][:, : config.max_block_tokens - 1]  # [A, D, H]
    tokens = drafter.decode_block(ids[0, anchors[0]], states)[:, 1:]  # [A, D]

    # 3. What verification accepts: it stops at the first mistake.
    slots = states.shape[1]
    counted = blocks.counted[0, :, 1 : slots + 1]  # [A, D]
    labels = blocks.labels[0, :, 1 : slots + 1]  # [A, D]
    accepted = ((tokens == labels) & counted).int().cumprod(-1)

    # 4. How likely the text itself is, of the tokens that the drafter's vocabulary holds.
    log_probs = drafter.logits(states).float().log_softmax(-1)  # [A, D, V]
    draft_id_of_token = draft_ids(draft)
    label_ids = labels if draft_id_of_token is None else draft_id_of_token[labels]
    can_be_drafted = counted & (label_ids >= 0) & (label_ids < log_probs.shape[-1])
    label_ids = label_ids.masked_fill(~can_be_drafted, 0)
    nats = log_probs.gather(-1, label_ids[..., None])[..., 0] * can_be_drafted  # [A, D]
    return int(accepted.sum()), nats.sum(0).tolist()


def measure(
    target,
    draft: DFlashDraftModel,
    texts: DraftedTexts,
    experiments: Sequence[Experiment],
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Counts]:
    """
    Count with the change of each experiment. A target reads each text once, with all layers that any drafter needs.

    Args:
        target, draft: The unchanged pair.
        texts (`list[DraftedText | None]`): A text for each prompt; `None` where the target gave none.
        experiments (`list[Experiment]`): What to change; `Experiment()` changes nothing.
        progress (`Callable`): Wraps the iteration over prompts.

    Returns:
        `list[Counts]`: The counts of each experiment.
    """
    changed_drafts = [changed_draft(draft, experiment.config) for experiment in experiments]
    read_layers: set[int] = set()
    for changed in changed_drafts:
        read_layers |= set(changed.config.target_layer_ids)
    layer_ids = sorted(read_layers)
    counts = [Counts() for _ in experiments]
    texts_of_experiments = [texts if experiment.texts is None else experiment.texts() for experiment in experiments]
    rows = list(zip(*texts_of_experiments, strict=True))
    for row in progress(rows):  # the text of one prompt, in each experiment

        @cache  # for the texts of one prompt: features are large
        def read_features(model, text: DraftedText) -> torch.Tensor:
            features = target_features(model, layer_ids, text.input_ids.to(model.device))
            return features.unflatten(-1, (len(layer_ids), -1))  # [1, S, U, H]

        for experiment, changed, text, count in zip(experiments, changed_drafts, row, counts, strict=True):
            if text is None:
                count.texts.append(TextCounts(0, [], 0))
                continue
            columns = [layer_ids.index(i) for i in changed.config.target_layer_ids]
            features = read_features(experiment.target or target, text)[:, :, columns].flatten(2)  # [1, S, L*H]
            accepted, nats = draft_blocks(target, changed, text, features, experiment)
            count.texts.append(TextCounts(accepted, nats, text.anchors.shape[1]))
    return counts
