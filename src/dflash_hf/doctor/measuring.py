"""An experiment on a pair: drafting with the change, counting what is accepted, and whether a gain is chance."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import nn

from dflash_hf.decoding.drafter import Drafter
from dflash_hf.doctor.case import Text, Texts
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.compare import mean_difference
from dflash_hf.modeling.modeling_dflash import additive
from dflash_hf.targets.frozen import target_features
from dflash_hf.training.blocks import block_mask, build_blocks
from dflash_hf.training.start import draft_ids


SIGNIFICANT = 3.5  # standard errors: with 40 useless changes and 24 texts, 1 of 25 diagnoses is wrong
# Accepted tokens per block, and share of those before, that a change must gain to matter.
LEAST_GAIN = 0.05
LEAST_SHARE = 0.03
# The same where other texts are drafted: texts differ in how predictable they are.
LEAST_GAIN_ON_OTHER_TEXTS = 0.5
LEAST_SHARE_ON_OTHER_TEXTS = 0.4
LEAST_NATS = 0.1  # log-likelihood per block
FEWER_ACCEPTED = -1.0  # standard errors: no fewer accepted tokens, apart from chance
ALIKE = 0.9  # of changes with this share of the best gain, the first in the table is the cause: the smallest


@dataclass
class Experiment:
    """
    A change to the pair, and what is wrong if it raises acceptance.

    Args:
        name (`str`): What is changed.
        key (`str`), cause (`str`), remedy (`str`): What is wrong, for programs and for people, and what to do then.
        config (`dict`): Fields of the drafter's configuration.
        model (`PreTrainedModel`, *optional*): Model whose features and embedding are read.
        head (`nn.Module`, *optional*): Head to draft with.
        shift (`int`): 1 switches between anchor-first blocks and DFlash's.
        texts (`Callable`, *optional*): Returns other texts, for the same prompts; called when they are needed.
    """

    name: str = ""
    key: str = ""
    cause: str = ""
    remedy: str = ""
    config: dict = field(default_factory=dict)
    model: object = None
    head: nn.Module | None = None
    shift: int = 0
    texts: Callable[[], Texts] | None = None


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
        texts (`list[TextCounts]`): Of each text; zeros where the target gave no text.
    """

    texts: list[TextCounts] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return sum(text.blocks for text in self.texts)

    @property
    def tau(self) -> float:
        """Mean accepted tokens over all blocks, plus the bonus token."""
        return 1 + sum(text.accepted for text in self.texts) / max(self.blocks, 1)


def changed_draft(draft: DFlashDraftModel, fields: dict) -> DFlashDraftModel:
    """A frozen drafter with another configuration, and the same weights."""
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


@torch.no_grad()
def draft_blocks(
    target, draft: DFlashDraftModel, text: Text, features: torch.Tensor, change: Experiment
) -> tuple[int, list[float]]:
    """
    Draft a block at each anchor of a text, and compare with it.

    Args:
        draft (`DFlashDraftModel`): The result of [`changed_draft`].
        features (`torch.Tensor`): `[1, S, L*H]`, from the layers that the drafter reads.

    Returns:
        The accepted tokens and the log-likelihood of the text in each slot, both summed over the blocks. Tokens past
        the end of the text, and tokens that cannot be drafted, do not count.
    """
    config = draft.config
    ids = text.input_ids.to(features.device)  # [1, S]
    anchors = text.anchors.to(features.device)  # [1, A]
    every_token = torch.ones_like(ids)
    every_anchor = torch.ones_like(anchors, dtype=torch.bool)
    anchor_first = config.sample_from_anchor != bool(change.shift)

    # 1. The drafter's forward over all blocks.
    blocks = build_blocks(
        ids, every_token, anchors, every_anchor, config.block_size, config.mask_token_id, anchor_first=anchor_first
    )

    def mask_of_layer_type(window, causal) -> torch.Tensor:
        return additive(block_mask(anchors, every_token, config.block_size, window, causal), draft.dtype)

    hidden = draft(
        noise_embeds=draft.embed(change.model or target, blocks.input_ids).to(draft.dtype),
        context_hidden_states=features.to(draft.dtype),
        attention_mask=config.by_layer_type(mask_of_layer_type),
        position_ids=blocks.position_ids,
    ).last_hidden_state.view(anchors.shape[1], config.block_size, -1)  # [A, B, H]

    # 2. Its tokens, with the head of another target where the experiment has one.
    drafter = Drafter(draft, target)
    head = change.head or target.get_output_embeddings()
    drafter.logits = lambda states, lengths: draft.draft_logits(states, head)
    first_slot = 0 if anchor_first else 1
    states = hidden[:, first_slot:][:, : config.max_block_tokens - 1]  # [A, D, H]
    tokens = drafter.decode_block(ids[0, anchors[0]], states, [])[:, 1:]  # [A, D]

    # 3. What verification accepts: it stops at the first mistake.
    slots = states.shape[1]
    counted = blocks.counted[0, :, 1 : slots + 1]  # [A, D]
    labels = blocks.labels[0, :, 1 : slots + 1]  # [A, D]
    accepted = ((tokens == labels) & counted).int().cumprod(-1)

    # 4. How likely the text itself is, of the tokens that the drafter's vocabulary holds.
    log_probs = drafter.logits(states, []).float().log_softmax(-1)  # [A, D, V]
    draft_id_of_token = draft_ids(draft)
    label_ids = labels if draft_id_of_token is None else draft_id_of_token[labels]
    can_be_drafted = counted & (label_ids >= 0) & (label_ids < log_probs.shape[-1])
    label_ids = label_ids.masked_fill(~can_be_drafted, 0)
    nats = log_probs.gather(-1, label_ids[..., None])[..., 0] * can_be_drafted  # [A, D]
    return int(accepted.sum()), nats.sum(0).tolist()


def measure(
    target,
    draft: DFlashDraftModel,
    texts: Texts,
    changes: Sequence[Experiment],
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Counts]:
    """
    Count with each change. A model reads each text once, with all layers that some drafter needs.

    Args:
        target, draft: The unchanged pair.
        texts (`list[Text | None]`): One of each prompt.
        changes (`list[Experiment]`): What to change; `Experiment()` changes nothing.
        progress (`Callable`): Wraps the iteration over prompts.

    Returns:
        `list[Counts]`: Of each change.
    """
    changed_drafts = [changed_draft(draft, change.config) for change in changes]
    read_layers: set[int] = set()
    for changed in changed_drafts:
        read_layers |= set(changed.config.target_layer_ids)
    layer_ids = sorted(read_layers)
    counts = [Counts() for _ in changes]
    texts_of_changes = [texts if change.texts is None else change.texts() for change in changes]
    rows = list(zip(*texts_of_changes, strict=True))
    for row in progress(rows):  # the text of one prompt, with each change

        @cache  # for the texts of one prompt: features are large
        def read_features(model, text: Text) -> torch.Tensor:
            features = target_features(model, layer_ids, text.input_ids.to(model.device))
            return features.unflatten(-1, (len(layer_ids), -1))  # [1, S, U, H]

        for change, changed, text, count in zip(changes, changed_drafts, row, counts, strict=True):
            if text is None:
                count.texts.append(TextCounts(0, [], 0))
                continue
            columns = [layer_ids.index(i) for i in changed.config.target_layer_ids]
            features = read_features(change.model or target, text)[:, :, columns].flatten(2)  # [1, S, L*H]
            accepted, nats = draft_blocks(target, changed, text, features, change)
            count.texts.append(TextCounts(accepted, nats, text.anchors.shape[1]))
    return counts


@dataclass
class Result:
    """What an experiment gave: the counts before it and after it."""

    experiment: Experiment
    before: Counts
    after: Counts

    @cached_property
    def accepted(self) -> tuple[float, float]:
        """The gain in accepted tokens per block, and in standard errors."""
        before = [(text.accepted, text.blocks) for text in self.before.texts]
        after = [(text.accepted, text.blocks) for text in self.after.texts]
        return mean_difference(before, after)

    @cached_property
    def likelihood(self) -> tuple[float, float] | None:
        """The same in nats, of common slots; `None` if other texts were drafted, whose likelihoods say nothing."""
        if self.experiment.texts is not None:
            return None
        all_texts = self.before.texts + self.after.texts
        slots = min((len(text.nats) for text in all_texts if text.nats), default=0)
        before = [(sum(text.nats[:slots]), text.blocks) for text in self.before.texts]
        after = [(sum(text.nats[:slots]), text.blocks) for text in self.after.texts]
        return mean_difference(before, after)

    @property
    def figures(self) -> dict[str, float]:
        """All of them, by name."""
        gain, standard_errors = self.accepted
        figures = {"gain": gain, "standard_errors": standard_errors}
        if self.likelihood is not None:
            figures["nats"], figures["nats_standard_errors"] = self.likelihood
        return figures

    @property
    def accepts_more(self) -> bool:
        """Whether the gain in accepted tokens is significant and large enough to matter."""
        least_gain = LEAST_GAIN
        least_share = LEAST_SHARE
        if self.experiment.texts is not None:
            least_gain = LEAST_GAIN_ON_OTHER_TEXTS
            least_share = LEAST_SHARE_ON_OTHER_TEXTS
        gain, standard_errors = self.accepted
        return standard_errors >= SIGNIFICANT and gain >= max(least_gain, least_share * (self.before.tau - 1))

    @property
    def is_likelier(self) -> bool:
        """Whether the same texts are significantly likelier, with no fewer accepted tokens."""
        if self.likelihood is None:
            return False
        gain, standard_errors = self.likelihood
        _, accepted_standard_errors = self.accepted
        return standard_errors >= SIGNIFICANT and gain >= LEAST_NATS and accepted_standard_errors >= FEWER_ACCEPTED

    @property
    def is_better(self) -> bool:
        return self.accepts_more or self.is_likelier


def likeliest(results: Sequence[Result]) -> Result | None:
    """
    The first change with about the best gain in accepted tokens, or, if there is none, in likelihood; `None` if no
    change is better.
    """
    gains = [(result.accepted[0], result) for result in results if result.accepts_more]
    if not gains:
        gains = [(result.likelihood[0], result) for result in results if result.likelihood and result.is_likelier]
    best_gain = max((gain for gain, _ in gains), default=0.0)
    for gain, result in gains:
        if gain >= ALIKE * best_gain:
            return result
    return None
