"""
`dflash doctor`: why is acceptance low? A table of experiments, each a small change after which acceptance is counted.

Texts by the target and the anchors in them are fixed. At each anchor the drafter fills one block, given the target's
features of the text before it. Counted are the accepted prefix (what verification would accept if the target had
written the text) and the drafter's log-probability of the text's tokens: every token of a block contributes to it,
only the first mistake to acceptance, so that it tells a change from chance in a tenth of the texts.
"""

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import nn

from dflash_hf.data.encode import RowEncoder, digests_of_tokenizer
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.compare import mean_difference
from dflash_hf.evaluation.measure import in_blocks
from dflash_hf.evaluation.prompts import prompts_of
from dflash_hf.modeling.cache_dflash import additive
from dflash_hf.modeling.drafting_dflash import Drafter
from dflash_hf.modeling.target_dflash import text_depth
from dflash_hf.private import with_own_config
from dflash_hf.responses import eos_ids, generate_one
from dflash_hf.target import generate_responses, spare_token_id, target_features
from dflash_hf.training.blocks import block_mask, build_blocks, sample_anchors
from dflash_hf.training.start import draft_ids


SIGNIFICANT = 3.5  # standard errors: with 40 useless changes and 24 texts, 1 of 25 diagnoses is wrong
SUSPICIOUS = 2.4  # standard errors after which more texts are worth their time
GAIN, GAIN_OF_OTHER_TEXT = 1.03, 1.4  # times the accepted tokens; texts differ in how predictable they are
LEAST, LEAST_OF_OTHER_TEXT = 0.05, 0.5  # accepted tokens per block
LEAST_NATS = 0.1  # log-probability per block
FEWER = -1.0  # standard errors: no fewer accepted tokens, apart from chance
ALIKE = 0.9  # share of the best gain at which the first in the table, the smallest change, is the cause
HARDLY = 1.15  # tau of a drafter that was trained for minutes, or for another target
DECODED = 8  # number of prompts that are decoded
WINDOWS = (64, 256, 1024, 4096)  # tokens of context
MOST_MASKS = 8  # special tokens that are tried
TRAIN_AGAIN = "train a drafter on this target's own answers: `dflash prompts`, `dflash regenerate`, `dflash train`"


# ----------------------------------------------------------------------------------------------------------- the texts


@dataclass
class Text:
    """A prompt with its answer, `input_ids` `[1, S]`, and the `anchors` `[1, A]` of the blocks to draft."""

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
class Case:
    """
    A pair and the prompts to measure it on.

    Args:
        target, draft: The pair.
        rows (`list[dict]`): Rows with prompts.
        encoder (`RowEncoder`): Tokenizer and arguments of the chat template, as the pair is used.
        base (`PreTrainedModel`, *optional*): The model that the target was made from, if the drafter was trained for
            it.
        max_new_tokens (`int`): Maximum length of an answer.
        blocks (`int`): Blocks per text.
        batch_size (`int`): Answers generated together.
    """

    target: object
    draft: object
    rows: Sequence[dict]
    encoder: RowEncoder
    base: object = None
    max_new_tokens: int = 128
    blocks: int = 16
    batch_size: int = 8

    @cached_property
    def prompts(self) -> list[list[int]]:
        return prompts_of(self.rows, self.encoder, "the prompts")

    @cached_property
    def texts(self) -> list[Text | None]:
        return self.answered(self.prompts)

    def answered(self, prompts: Sequence[Sequence[int]], target=None) -> list[Text | None]:
        """Each prompt with the greedy answer of a target; `None` if the target lacks its ids or says hardly a word."""
        target, size = target or self.target, self.draft.config.block_size
        rows = target.get_input_embeddings().weight.shape[0]
        greedy = copy.deepcopy(target.generation_config)
        greedy.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
        usable = [i for i, prompt in enumerate(prompts) if max(prompt) < rows]
        asked, texts = [prompts[i] for i in usable], dict.fromkeys(range(len(prompts)))
        answers = generate_responses(target, asked, self.max_new_tokens, None, self.batch_size, greedy)
        texts |= {i: Text.of(prompts[i], one, size, self.blocks, i) for i, one in zip(usable, answers, strict=True)}
        return list(texts.values())

    def other_prompts(self, raw: bool = False, **fields) -> list[list[int]]:
        """The prompts with another encoder; as they are if it rejects a row."""
        try:
            return prompts_of(self.rows, replace(self.encoder, **fields), "the prompts", raw)
        except ValueError:
            return self.prompts


@torch.no_grad()
def surprise(target, prompts: Sequence[Sequence[int]]) -> float:
    """The target's loss in nats per token of the prompts, without their first; a uniform guess costs `ln V`."""
    total = count = 0
    rows = target.get_input_embeddings().weight.shape[0]
    for prompt in prompts:
        if len(prompt) > 1 and max(prompt) < rows:
            ids = torch.tensor([list(prompt)], device=target.device)
            total += float(target(ids, labels=ids).loss) * (len(prompt) - 1)
            count += len(prompt) - 1
    return total / max(count, 1)


# ------------------------------------------------------------------------------------------------------------ counting


@dataclass
class Experiment:
    """
    A suspicion, and the change to the pair that tests it.

    Args:
        key (`str`), name (`str`): For programs, and for people.
        cause (`str`), remedy (`str`): The problem, if the change helps, and what to do then.
        config (`dict`): Fields of the drafter's configuration.
        features (`PreTrainedModel`, *optional*): Model to read features from.
        embedding (`PreTrainedModel`, *optional*): Model whose embedding is used.
        head (`nn.Module`, *optional*): Head to draft with.
        shift (`int`): 1 switches between anchor-first blocks and DFlash's.
        dtype (`torch.dtype`, *optional*): The drafter's dtype.
        texts (`Callable`, *optional*): Returns other texts; called when they are needed.
    """

    key: str = ""
    name: str = ""
    cause: str = ""
    remedy: str = ""
    config: dict = field(default_factory=dict)
    features: object = None
    embedding: object = None
    head: nn.Module | None = None
    shift: int = 0
    dtype: torch.dtype | None = None
    texts: Callable[[], list[Text | None]] | None = None


@dataclass
class Counts:
    """
    The counts of one measurement, text by text.

    Args:
        accepted (`list[tuple[int, int]]`): Drafted tokens that verification would accept, and the number of blocks.
        nats (`list[list[float]]`): Log-probability of the text's tokens in each slot, summed over its blocks; empty
            if tokens were decoded.
    """

    accepted: list[tuple[int, int]] = field(default_factory=list)
    nats: list[list[float]] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return sum(blocks for _, blocks in self.accepted)

    @property
    def tau(self) -> float:
        """Mean accepted prefix over all blocks, plus the bonus token."""
        return 1 + sum(accepted for accepted, _ in self.accepted) / max(self.blocks, 1)


def changed_draft(draft: DFlashDraftModel, fields: dict, dtype: torch.dtype | None = None) -> DFlashDraftModel:
    """A frozen drafter with another configuration; its weights are shared unless `dtype` differs."""
    if not fields and dtype in (None, draft.dtype):
        return draft
    config = copy.deepcopy(draft.config)
    for name, value in fields.items():
        setattr(config, name, value)
    with torch.device("meta"):
        other = DFlashDraftModel(config)
    other.load_state_dict(draft.state_dict(), assign=True)
    for name in ("rotary_emb", "context_rotary_emb"):  # not stored
        table = getattr(other, name)
        if table is not None:
            setattr(other, name, type(table)(table.config).to(draft.device))
    return other.requires_grad_(False).eval().to(dtype or draft.dtype)


@torch.no_grad()
def hits(target, draft: DFlashDraftModel, text: Text, features: torch.Tensor, change: Experiment):
    """
    Which drafted tokens match the text, block by block, and the drafter's log-probabilities of the text's tokens.

    Args:
        draft (`DFlashDraftModel`): The result of [`changed_draft`].
        features (`torch.Tensor`): `[1, S, L*H]`, from the layers that the drafter reads.

    Returns:
        `correct`, `torch.BoolTensor` `[A, B-1]`, for slots 1..B-1, false past the end of the text. `nats`,
        `torch.Tensor` `[A, B-1]`, log-probabilities; 0 past the end of the text, or if the token cannot be drafted.
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
    return (drafted[:, 1:] == labels) & counted, nats


def measure(
    target,
    draft: DFlashDraftModel,
    texts: list[Text | None],
    changes: Sequence[Experiment],
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Counts]:
    """Count with each change, whose texts are answers to the same prompts. A target reads each text once."""
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
            if text is not None:
                read = target_features(reader, layer_ids, text.input_ids.to(reader.device))
                read = read.unflatten(-1, (len(layer_ids), -1))  # [1, S, U, H]
            for number in numbers:
                accepted, blocks, nats = 0, 0, []
                if text is not None:
                    wanted = [layer_ids.index(i) for i in twins[number].config.target_layer_ids]
                    features = read[:, :, wanted].flatten(2)  # [1, S, L*H]
                    correct, by_slot = hits(target, twins[number], text, features, changes[number])
                    # Verification stops at the first mistake.
                    accepted, blocks = int(correct.int().cumprod(-1).sum()), correct.shape[0]
                    nats = by_slot.sum(0).tolist()
                counts[number].accepted.append((accepted, blocks))
                counts[number].nats.append(nats)
    return counts


@dataclass
class Tried:
    """What an experiment gave: the counts before it and after it."""

    experiment: Experiment
    before: Counts
    after: Counts

    @cached_property
    def accepted(self) -> tuple[float, float]:
        """The gain in accepted tokens per block, and in standard errors."""
        return mean_difference(self.before.accepted, self.after.accepted)

    @cached_property
    def likelihood(self) -> tuple[float, float] | None:
        """
        The gain in log-probability per block over the same texts, in nats and in standard errors; of common slots.
        `None`: the texts are others, whose likelihoods say nothing, or were decoded.
        """
        if self.experiment.texts is not None or not self.before.nats:
            return None
        pair = (self.before, self.after)
        slots = min((len(nats) for one in pair for nats in one.nats if nats), default=0)
        sums = [[(sum(nats[:slots]), n) for nats, (_, n) in zip(one.nats, one.accepted, strict=True)] for one in pair]
        return mean_difference(*sums)

    @property
    def accepts_more(self) -> bool:
        """Whether the gain in accepted tokens is significant and large enough to matter."""
        gain, errors = self.accepted
        other = self.experiment.texts is not None
        share, least = (GAIN_OF_OTHER_TEXT, LEAST_OF_OTHER_TEXT) if other else (GAIN, LEAST)
        return errors >= SIGNIFICANT and gain >= max(least, (share - 1) * (self.before.tau - 1))

    @property
    def is_likelier(self) -> bool:
        """Whether the same texts are significantly likelier, with no fewer accepted tokens."""
        gain, errors = self.likelihood or (0.0, 0.0)
        return errors >= SIGNIFICANT and gain >= LEAST_NATS and self.accepted[1] >= FEWER

    @property
    def evidence(self) -> float:
        """How many standard errors speak for the change; 0 if it gains too little to matter."""
        pairs = [self.accepted]
        if self.likelihood is not None and self.accepted[1] > FEWER:
            pairs.append(self.likelihood)
        return max(errors if gain >= LEAST_NATS else 0.0 for gain, errors in pairs)


def likeliest(tried: Sequence[Tried]) -> Tried | None:
    """
    The first change with about the best gain in accepted tokens, or, if there is none, in likelihood; `None` if no
    change is better.
    """
    gains = [(one.accepted[0], one) for one in tried if one.accepts_more]
    gains = gains or [(one.likelihood[0], one) for one in tried if one.likelihood and one.is_likelier]
    best = max((gain for gain, _ in gains), default=0.0)
    return next((one for gain, one in gains if gain >= ALIKE * best), None)


# ----------------------------------------------------------------------------------------------------- the experiments


def experiments(case: Case) -> Iterator[Experiment]:
    """
    The table, for a pair. The smallest changes come first: of those that gain about the same the first is the cause. A
    quantised drafter stays as it is, since its weights fit no other model.
    """
    for key, name, trained, fields in _settings(case) if _quantisation(case.draft) is None else ():
        first = next(iter(fields))
        cause = f"{first}={getattr(case.draft.config, first)!r} is not {trained}"
        values = ", ".join(f"{json.dumps(field)}: {json.dumps(value)}" for field, value in fields.items())
        yield Experiment(key, name, cause, f"write {values} into the drafter's config.json", config=fields)
    yield from _models(case)
    yield from _texts(case)


def _settings(case: Case) -> Iterator[tuple[str, str, str, dict]]:
    """Other values in the drafter's configuration: key, name, what was trained, and the fields."""
    config = case.draft.config
    for token_id, name in _masks(case):
        yield "mask", f"mask id {token_id} ({name})", "the mask token of training", {"mask_token_id": token_id}
    for word, step in (("down", -1), ("up", 1)):
        moved = [i + step for i in config.target_layer_ids]
        if 0 <= min(moved) and max(moved) < text_depth(case.target.config):
            trained = "the list of layers of training: ids count from 0, and id i is the output of layer i"
            yield f"layers_{word}", f"layer ids one {word}, {moved}", trained, {"target_layer_ids": moved}
    causal = [config.layer_is_causal(i) for i in range(config.num_hidden_layers)]
    for wanted, name in ((True, "causal blocks"), (False, "bidirectional blocks")):
        if any(one != wanted for one in causal):
            yield "causal", name, "the attention mask of training", {"is_causal": wanted}
    for size in (config.block_size // 2, config.block_size * 2):
        if size > 1:
            yield "block_size", f"blocks of {size}", "the size of the blocks in training", {"block_size": size}
    for name, scale in (("raw", 1.0), ("times the square root of the width", round(config.hidden_size**0.5, 4))):
        if abs(scale - config.input_embedding_scale) > 1e-3:
            yield "embedding", f"embedding {name}", "the scale of training", {"input_embedding_scale": scale}
    own = config.rope_parameters
    rope = type(config).for_target(case.target.config, 0, target_layer_ids=config.target_layer_ids).rope_parameters
    if rope and any(rope.get(key) != own.get(key) for key in ("rope_type", "rope_theta", "factor")):
        yield "rope", "rotary embedding of the target", "that of training", {"rope_parameters": rope}
    longest = max((text.input_ids.shape[1] for text in case.texts if text is not None), default=0)
    count, first = config.num_hidden_layers, {"is_causal": causal[0]}
    if "sliding_attention" in config.layer_types:
        trained = f"that of training: sliding_window={config.sliding_window} hides context that was visible there"
        yield "window", "no window", trained, {"layer_types": ["full_attention"] * count, **first}
    for window in sorted({*WINDOWS, _window_of(case.target) or WINDOWS[0]}):
        if config.block_size < window < longest and window != config.sliding_window:
            slides = {"layer_types": ["sliding_attention"] * count, "sliding_window": window, **first}
            yield "window", f"context of {window} tokens", "that of training, or the target's", slides


def _masks(case: Case) -> Iterator[tuple[int, str]]:
    """Other mask tokens: the usual ones and the tokenizer's special tokens, except tokens in the texts."""
    tokenizer, rows = case.encoder.tokenizer, case.target.get_input_embeddings().weight.shape[0]
    read = {token for text in case.texts if text is not None for token in text.input_ids[0].tolist()}
    read |= {*eos_ids(case.target.generation_config), case.draft.config.mask_token_id}
    names = {spare_token_id(case.target, tokenizer): "first spare row", rows - 1: "last row"}
    for name in ("mask", "pad", "unk", "eos", "bos"):
        names.setdefault(getattr(tokenizer, f"{name}_token_id", None), f"{name} token")
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True)[:MOST_MASKS]:
        names.setdefault(token_id, str(token))
    for token_id, name in names.items():
        possible = token_id is not None and 0 <= token_id < rows and token_id not in read
        if possible and not case.draft.config.own_mask_embedding:
            yield token_id, name


def _models(case: Case) -> Iterator[Experiment]:
    """The weights read in another way: anchor-first, another head, another precision, the target without a window."""
    draft, target = case.draft, case.target
    cause = (
        "the weights are anchor-first: slot k drafts the token at anchor + 1 + k; in DFlash's layout, at anchor + k"
    )
    remedy = f"{TRAIN_AGAIN}; or serve it with an engine that supports sample_from_anchor"
    yield Experiment("anchor_first", "anchor-first blocks", cause, remedy, shift=1)
    head, table = target.get_output_embeddings().weight, target.get_input_embeddings().weight
    if not draft.config.has_own_head and head.data_ptr() != table.data_ptr() and head.shape == table.shape:
        cause = "the target's head is no longer its embedding, as it was in training: replaced, or a norm is folded in"
        own = nn.Linear(*reversed(table.shape), bias=False, device="meta")
        own.weight = nn.Parameter(table, requires_grad=False)
        yield Experiment("head", "the embedding as head", cause, TRAIN_AGAIN, head=own)
    if draft.dtype not in (torch.float32, torch.float64) and _quantisation(draft) is None:
        cause = f"the drafter loses accuracy in {str(draft.dtype).removeprefix('torch.')}"
        yield Experiment("dtype", "drafter in float32", cause, "load it with --dtype float32", dtype=torch.float32)
    if window := _window_of(target):
        wide = with_own_config(target)
        for module in wide.modules():
            if "config" in vars(module):  # a copy
                module.config.get_text_config().sliding_window = 2**30
                if getattr(module, "sliding_window", None):
                    module.sliding_window = 2**30
        cause = f"the target slides over {window} tokens, and did not when the drafter was trained for it"
        texts = partial(case.answered, case.prompts, wide)
        name = "target without its window"
        yield Experiment("target_window", name, cause, TRAIN_AGAIN, features=wide, texts=texts)


def _window_of(target) -> int | None:
    """The window of a target's sliding layers; `None` if it has none."""
    config = target.config.get_text_config()
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return getattr(config, "sliding_window", None) if slides else None


def _quantisation(draft) -> str | None:
    """How a drafter is quantised; `None` if it is not."""
    given = getattr(draft.config, "quantization_config", None)
    return None if given is None else given["quant_method"] if isinstance(given, dict) else given.quant_method


def _texts(case: Case) -> Iterator[Experiment]:
    """Other texts: with and without thinking, without the template, and the base's."""
    now, template = dict(case.encoder.chat_template_kwargs), str(case.encoder.tokenizer.chat_template or "")
    others, tried = [], [case.prompts]
    switch = next((name for name in ("enable_thinking", "thinking") if name in template), None)
    for value in (False, True, None) if switch else ():
        wanted = {key: one for key, one in {**now, switch: value}.items() if one is not None}
        cause = f"the drafter was not trained with chat_template_kwargs={json.dumps(now)}, but in another mode"
        name, remedy = f"{switch} {value}", f"use it with --template-args '{json.dumps(wanted)}'"
        others.append(("thinking", name, cause, remedy, case.other_prompts(chat_template_kwargs=wanted)))
    cause = "the drafter was trained without the chat template, or it is not the target's template"
    remedy = "use it without the template, as `dflash eval --raw` does, or train it with the template"
    others.append(("raw", "without the chat template", cause, remedy, case.other_prompts(raw=True)))
    for *words, prompts in others:
        if prompts not in tried:
            tried.append(prompts)
            yield Experiment(*words, texts=partial(case.answered, prompts))
    if (base := case.base) is not None:
        cause = "the target's layers have changed since the drafter was trained, by quantisation or further training"
        yield Experiment("base", "features of the base", cause, TRAIN_AGAIN, features=base)
        cause = "the drafter fits the base, and no longer the model made from it"
        texts, head = partial(case.answered, case.prompts, base), base.get_output_embeddings()
        whole = {"features": base, "embedding": base, "head": head, "texts": texts}
        yield Experiment("base", "the base itself, on its own text", cause, TRAIN_AGAIN, **whole)


# ---------------------------------------------------------------------------------------------------------- the report


@dataclass
class Diagnosis:
    """
    The result of [`diagnose`].

    Args:
        as_given (`Counts`): Teacher-forced counts of the unchanged pair.
        decoded, forced (`Counts`): Counts of decoding, and teacher-forced counts of the same blocks.
        tried (`list[Tried]`): The experiments and what they gave.
        cause (`Experiment`, *optional*): The likeliest cause.
        surprise, guess (`float`): The target's loss on the prompts, in nats per token, and a uniform guess's.
        unlike (`list[str]`): `tokenizer` and `template`, if they differ from those of the drafter's training.
    """

    as_given: Counts
    decoded: Counts
    forced: Counts
    tried: list[Tried]
    cause: Experiment | None
    surprise: float
    guess: float
    unlike: list[str]

    def lines(self) -> list[str]:
        """Lines for a terminal."""
        given, decoding = self.as_given, "without drafts: see the warning above"
        if self.decoded.blocks:
            decoding = f"tau {self.decoded.tau:.2f}; teacher-forced, the same blocks {self.forced.tau:.2f}"
        cause, remedy = self.conclusion()
        return [
            f"as it is          tau {given.tau:.2f}, teacher-forced, over {given.blocks} blocks",
            f"decoding          {decoding}",
            f"prompts           cost the target {self.surprise:.2f} nats per token; guessing costs {self.guess:.2f}",
            *[f"noticed           the {what} differs from the drafter's training" for what in self.unlike],
            "",
            f"{'tried':44}{'tau':>6}{'change':>9}{'std. errors':>13}{'nats':>8}{'std. errors':>13}",
            *map(self._row, self.tried),
            "",
            f"likeliest cause   {cause}",
            f"remedy            {remedy}",
        ]

    def _row(self, one: Tried) -> str:
        if not one.after.blocks:
            return f"{one.experiment.name:44}{'no text':>6}"
        better = "  better" if one.accepts_more or one.is_likelier else ""
        figures = f"{one.experiment.name:44}{one.after.tau:6.2f}" + "{:+9.2f}{:+13.1f}".format(*one.accepted)
        if one.likelihood is not None:
            figures += "{:+8.2f}{:+13.1f}".format(*one.likelihood)
        return f"{figures:93}{'  <- likeliest cause' if one.experiment is self.cause else better}".rstrip()

    def conclusion(self) -> tuple[str, str]:
        """The likeliest cause, and its remedy."""
        if self.cause is not None:
            return self.cause.cause, self.cause.remedy
        nearest = max(reversed(self.tried), key=lambda one: one.evidence)
        if nearest.evidence >= SUSPICIOUS:
            chance = f"by {nearest.evidence:.1f} standard errors; it takes {SIGNIFICANT} to rule out chance"
            return f"perhaps {nearest.experiment.name}, {chance}", "measure again with more --prompts"
        none = "none of these: no change is better by more than chance"
        if changed := " and ".join(self.unlike):
            return none, f"use the {changed} of training, or train with the new one"
        return none, "more of the target's own answers, and more training"

    def facts(self) -> dict:
        """The data for `--json`."""
        tried = []
        for one in self.tried:
            figures = {"tau": one.after.tau, "gain": one.accepted[0], "standard_errors": one.accepted[1]}
            if one.likelihood is not None:
                figures["nats"], figures["nats_standard_errors"] = one.likelihood
            names = {"key": one.experiment.key, "name": one.experiment.name}
            tried.append({**names, **figures, "better": one.accepts_more or one.is_likelier})
        cause = self.cause
        return {
            "tau": self.as_given.tau,
            "decoding": {"tau": self.decoded.tau, "teacher_forced": self.forced.tau},
            "prompt_nats": {"target": self.surprise, "guess": self.guess},
            "unlike": self.unlike,
            "tried": tried,
            "cause": None if cause is None else {"key": cause.key, "cause": cause.cause, "remedy": cause.remedy},
        }


def diagnose(case: Case, progress: Callable[[Iterable], Iterable] = iter) -> Diagnosis:
    """
    Run all experiments on a pair.

    Raises:
        `ValueError`: the target's answers are too short for drafts.
    """
    answered = sum(text is not None for text in case.texts)
    if answered < 2:
        raise ValueError(
            f"Two answers of more than a token or two are needed, and {len(case.rows)} prompt(s) gave {answered}; "
            "give more with --data."
        )
    # 1. All experiments but decoding; the unchanged pair comes first.
    known = list(experiments(case))
    as_given, *counts = measure(case.target, case.draft, case.texts, [Experiment(), *known], progress)
    tried = [Tried(one, as_given, after) for one, after in zip(known, counts, strict=True)]
    # 2. Decoding against teacher forcing, and whether the target can read its prompts.
    decoded, forced = decoding(case)
    nats, guess = surprise(case.target, case.prompts), math.log(case.target.get_input_embeddings().weight.shape[0])
    before, now = case.draft.config.dflash_config.get("trained_with", {}), digests_of_tokenizer(case.encoder.tokenizer)
    unlike = [name for name in ("tokenizer", "template") if name in before and before[name] != now[name]]
    # 3. The cause: unreadable prompts, then a loss in decoding alone, then the best change.
    best = likeliest(tried)
    worse = "decoding accepts less than teacher forcing does in the same blocks: a defect, or low precision"
    lost = Experiment("decoding", "teacher forcing instead of decoding", worse, "evaluate it with --dtype float32")
    lost = Tried(lost, decoded, forced)
    if nats > guess:  # it cannot read them: wrong ids, or a damaged target
        if case.base is None or surprise(case.base, case.prompts) > guess:
            wrong = "the tokenizer or chat template is not the one that the target was trained with"
            remedy = "save the tokenizer of the model that the target was made from beside the target"
            tried.append(Tried(Experiment("tokenizer", "nothing changed", wrong, remedy), as_given, as_given))
        best = tried[-1]  # otherwise the base itself
    elif lost.accepts_more:
        tried.append(best := lost)
    elif max(as_given.tau, 1.0 if best is None else best.after.tau) < HARDLY:
        tried.append(best := Tried(_hardly_anything(case), as_given, as_given))
    cause = None if best is None else best.experiment
    return Diagnosis(as_given, decoded, forced, tried, cause, nats, guess, unlike)


def decoding(case: Case) -> tuple[Counts, Counts]:
    """
    Counts of decoding, and teacher-forced counts at the same anchors; in fp32 they are equal, block by block. The last
    block of each text is left out: the end of the text cuts it short.
    """
    decoded, texts = Counts(), []
    for text, prompt in zip(case.texts, case.prompts, strict=True):
        if text is None or len(texts) == DECODED:
            continue
        options = {"do_sample": False, "max_new_tokens": case.max_new_tokens}
        output = generate_one(case.target, prompt, assistant_model=in_blocks(case.draft), **options)
        lengths = (getattr(output, "acceptance_lengths", None) or [[]])[0][:-1]
        if lengths:
            starts = torch.tensor([0, *lengths[:-1]]).cumsum(0) + len(prompt)
            texts.append(Text(output.sequences.cpu(), starts[None]))
            decoded.accepted.append((sum(lengths) - len(lengths), len(lengths)))
    return decoded, measure(case.target, case.draft, texts, [Experiment()])[0]


def _hardly_anything(case: Case) -> Experiment:
    """The cause where no change lets more than a few drafts be accepted."""
    method = _quantisation(case.draft)
    if method is None:
        cause = "hardly any draft is accepted: the drafter was trained for another target, or hardly at all"
        return Experiment("target", "nothing changed", cause, TRAIN_AGAIN)
    cause = f"hardly any draft is accepted, and the drafter is quantised ({method}): few bits of a small model ruin it"
    remedy = "draft with the drafter before it was quantised; it costs little memory"
    return Experiment("quantised", "nothing changed", cause, remedy)
