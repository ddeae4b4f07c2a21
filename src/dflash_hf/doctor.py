"""
`dflash doctor`: why is acceptance low? A table of experiments, each a small change after which acceptance is counted.

The target writes texts, in which anchors are drawn once. At each anchor the drafter fills one block, given the
target's features of the text before it. Two figures are counted: the tokens that verification would accept, and the
text's log-likelihood under the drafter. Every token of a block contributes to the likelihood, only the first mistake
to acceptance: the likelihood tells a change from chance in a tenth of the texts.
"""

import contextlib
import copy
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path

import torch
from torch import nn

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.template import digests_of_tokenizer
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.compare import mean_difference
from dflash_hf.evaluation.prompts import prompts_of
from dflash_hf.files import read_json
from dflash_hf.modeling.cache_dflash import additive
from dflash_hf.modeling.drafting_dflash import Drafter
from dflash_hf.modeling.target_dflash import text_depth
from dflash_hf.private import with_own_config
from dflash_hf.responses import eos_ids
from dflash_hf.target import generate_responses, spare_token_id, target_features
from dflash_hf.training.blocks import block_mask, build_blocks, sample_anchors
from dflash_hf.training.held_out import learned_by_heart
from dflash_hf.training.start import draft_ids


SIGNIFICANT = 3.5  # standard errors: with 40 useless changes and 24 texts, 1 of 25 diagnoses is wrong
LEAST, SHARE = 0.05, 0.03  # accepted tokens per block, and share of those before, that a change must gain to matter
LEAST_OF_OTHER_TEXT, SHARE_OF_OTHER_TEXT = 0.5, 0.4  # texts differ in how predictable they are
LEAST_NATS = 0.1  # log-likelihood per block
FEWER = -1.0  # standard errors: no fewer accepted tokens, apart from chance
ALIKE = 0.9  # of changes with this share of the best gain, the first in the table is the cause: the smallest
HARDLY = 1.15  # tau of a drafter that was trained for minutes, or for another target
WINDOWS = (64, 256, 1024, 4096)  # tokens of context
MOST_MASKS = 8  # special tokens that are tried
MANY_PASSES, FEW_ROWS = 8.0, 2000  # over training rows: 56 over 60 rows gave tau 3.95 there and 1.26 elsewhere
TRAIN_AGAIN = "train a drafter on this target's own answers: `dflash prompts`, `dflash regenerate`, `dflash train`"


# ----------------------------------------------------------------------------------------------------------- the texts


@dataclass(eq=False)
class Text:
    """A prompt with its answer, `input_ids` `[1, S]`, and the `anchors` `[1, A]` of the blocks to draft."""

    input_ids: torch.LongTensor
    anchors: torch.LongTensor

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int], anchors: int, seed: int):
        """Draw anchors in the answer; `None` if it is too short."""
        ids = torch.tensor([[*prompt, *answer]])
        mask = (torch.arange(ids.shape[1]) >= len(prompt)).long()[None]
        places, valid = sample_anchors(mask, anchors, torch.Generator().manual_seed(seed))
        return cls(ids, places[valid][None]) if valid.any() else None


Texts = list[Text | None]  # one for each prompt


@dataclass(frozen=True)
class Training:
    """
    How a drafter was trained.

    Args:
        rows (`int`): Training examples.
        passes (`float`): How often each was read.
        tau (`float`, *optional*): The last `simulated_tau` of the training log, over these rows.
    """

    rows: int
    passes: float
    tau: float | None = None

    @classmethod
    def of_folder(cls, folder: str | Path) -> "Training | None":
        """
        From what `dflash train` writes beside the weights, `card_facts.json`, and the log of the last checkpoint;
        `None` if the folder does not say it, or is no folder.
        """
        try:
            training = read_json(Path(folder, "card_facts.json"))["training"]
            sizes = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
            batch = math.prod(training.get(name, 1) for name in sizes)
            rows = training["train_examples"]
            passes = training["optimizer_steps"] * batch / rows
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            return None
        return cls(rows, passes, _logged_tau(Path(folder)))


def _logged_tau(folder: Path) -> float | None:
    """The last `simulated_tau` over training rows in the logs of a run; `None` if there is none."""
    logs = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]
    logged: list[tuple[int, float]] = []
    for path in logs:
        with contextlib.suppress(ValueError, TypeError):
            history = read_json(path).get("log_history") or []
            logged += [
                (one["step"], one["simulated_tau"]) for one in history if {"step", "simulated_tau"} <= one.keys()
            ]
    return max(logged)[1] if logged else None


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
        training ([`Training`], *optional*): How the drafter was trained, if its folder says so.
    """

    target: object
    draft: object
    rows: Sequence[dict]
    encoder: RowEncoder
    base: object = None
    max_new_tokens: int = 128
    blocks: int = 16
    batch_size: int = 8
    training: "Training | None" = None

    @cached_property
    def prompts(self) -> list[list[int]]:
        return self.asked()

    @cached_property
    def texts(self) -> Texts:
        return self.answered(self.prompts)

    def asked(self, raw: bool = False, **fields) -> list[list[int]]:
        """The prompts, with other fields of the encoder."""
        encoder = replace(self.encoder, **fields)
        return prompts_of(self.rows, encoder, "the prompts", raw, self.target, self.max_new_tokens)

    def answered(self, prompts: Sequence[Sequence[int]], target=None) -> Texts:
        """Each prompt with the greedy answer of a target; `None` if the target lacks its ids or says hardly a word."""
        target = target or self.target
        rows = target.get_input_embeddings().weight.shape[0]
        greedy = copy.deepcopy(target.generation_config)
        greedy.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
        usable = [i for i, prompt in enumerate(prompts) if max(prompt) < rows]
        asked, texts = [prompts[i] for i in usable], dict.fromkeys(range(len(prompts)))
        answers = generate_responses(target, asked, self.max_new_tokens, None, self.batch_size, greedy)
        texts |= {i: Text.of(prompts[i], one, self.blocks, i) for i, one in zip(usable, answers, strict=True)}
        return list(texts.values())


@torch.no_grad()
def loss_on(target, prompts: Sequence[Sequence[int]]) -> float:
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


@dataclass
class Counts:
    """
    The counts of one measurement.

    Args:
        texts (`list[tuple[int, list[float], int]]`): Of each text: the drafted tokens that verification would accept,
            the log-likelihood of the text's own tokens in each slot, in nats, and the number of blocks, over which
            both are summed.
    """

    texts: list[tuple[int, list[float], int]] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return sum(blocks for _, _, blocks in self.texts)

    @property
    def tau(self) -> float:
        """Mean accepted tokens over all blocks, plus the bonus token."""
        return 1 + sum(accepted for accepted, _, _ in self.texts) / max(self.blocks, 1)


def changed_draft(draft: DFlashDraftModel, fields: dict) -> DFlashDraftModel:
    """A frozen drafter with another configuration, and the same weights."""
    if not fields:
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
    return other.requires_grad_(False).eval()


@torch.no_grad()
def drafted(target, draft: DFlashDraftModel, text: Text, features: torch.Tensor, change: Experiment):
    """
    Draft a block at each anchor of a text, and compare with it.

    Args:
        draft (`DFlashDraftModel`): The result of [`changed_draft`].
        features (`torch.Tensor`): `[1, S, L*H]`, from the layers that the drafter reads.

    Returns:
        The accepted tokens and the log-likelihood of the text in each slot, both summed over the blocks. Tokens past
        the end of the text, and tokens that cannot be drafted, do not count.
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
        noise_embeds=draft.embed(change.model or target, blocks.input_ids).to(draft.dtype),
        context_hidden_states=features.to(draft.dtype),
        attention_mask=masks,
        position_ids=blocks.position_ids,
    ).last_hidden_state.view(anchors.shape[1], config.block_size, -1)  # [A, B, H]
    drafter = Drafter(draft, target)
    head = change.head or target.get_output_embeddings()
    drafter.logits = lambda states, lengths: draft.draft_logits(states, head)  # of another target, perhaps
    states = hidden[:, 0 if early else 1 :][:, : config.block_tokens - 1]  # [A, D, H]
    tokens = drafter.walk(ids[0, anchors[0]], states, [])[:, 1:]  # [A, D]
    counted, labels = (one[0, :, 1 : states.shape[1] + 1] for one in (blocks.counted, blocks.labels))
    accepted = ((tokens == labels) & counted).int().cumprod(-1)  # verification stops at the first mistake
    log_probs = drafter.logits(states, []).float().log_softmax(-1)  # [A, D, V]
    own = draft_ids(draft)
    own = labels if own is None else own[labels]
    known = counted & (own >= 0) & (own < log_probs.shape[-1])
    nats = log_probs.gather(-1, own.masked_fill(~known, 0)[..., None])[..., 0] * known
    return int(accepted.sum()), nats.sum(0).tolist()


def measure(
    target,
    draft: DFlashDraftModel,
    texts: Texts,
    changes: Sequence[Experiment],
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Counts]:
    """Count with each change. A model reads each text once, with all layers that some drafter needs."""
    twins = [changed_draft(draft, change.config) for change in changes]
    layer_ids = sorted({i for twin in twins for i in twin.config.target_layer_ids})
    counts = [Counts() for _ in changes]
    rows = zip(*(texts if change.texts is None else change.texts() for change in changes), strict=True)
    for row in progress(list(rows)):  # the text of one prompt, with each change

        @cache
        def read(reader, text: Text) -> torch.Tensor:
            features = target_features(reader, layer_ids, text.input_ids.to(reader.device))
            return features.unflatten(-1, (len(layer_ids), -1))  # [1, S, U, H]

        for change, twin, text, count in zip(changes, twins, row, counts, strict=True):
            if text is None:
                count.texts.append((0, [], 0))
                continue
            wanted = [layer_ids.index(i) for i in twin.config.target_layer_ids]
            features = read(change.model or target, text)[:, :, wanted].flatten(2)  # [1, S, L*H]
            count.texts.append((*drafted(target, twin, text, features, change), text.anchors.shape[1]))
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
        return mean_difference(*([(one, n) for one, _, n in counts.texts] for counts in (self.before, self.after)))

    @cached_property
    def likelihood(self) -> tuple[float, float] | None:
        """The same in nats, of common slots; `None` if other texts were drafted, whose likelihoods say nothing."""
        if self.experiment.texts is not None:
            return None
        both = (self.before.texts, self.after.texts)
        slots = min((len(nats) for texts in both for _, nats, _ in texts if nats), default=0)
        return mean_difference(*([(sum(nats[:slots]), n) for _, nats, n in texts] for texts in both))

    @property
    def figures(self) -> dict[str, float]:
        """All of them, by name."""
        names = ("gain", "standard_errors", "nats", "nats_standard_errors")
        return dict(zip(names, (*self.accepted, *(self.likelihood or ()))))

    @property
    def accepts_more(self) -> bool:
        """Whether the gain in accepted tokens is significant and large enough to matter."""
        least, share = LEAST, SHARE
        if self.experiment.texts is not None:
            least, share = LEAST_OF_OTHER_TEXT, SHARE_OF_OTHER_TEXT
        gain, errors = self.accepted
        return errors >= SIGNIFICANT and gain >= max(least, share * (self.before.tau - 1))

    @property
    def is_likelier(self) -> bool:
        """Whether the same texts are significantly likelier, with no fewer accepted tokens."""
        gain, errors = self.likelihood or (0.0, 0.0)
        return errors >= SIGNIFICANT and gain >= LEAST_NATS and self.accepted[1] >= FEWER

    @property
    def is_better(self) -> bool:
        return self.accepts_more or self.is_likelier


def likeliest(results: Sequence[Result]) -> Result | None:
    """
    The first change with about the best gain in accepted tokens, or, if there is none, in likelihood; `None` if no
    change is better.
    """
    gains = [(one.accepted[0], one) for one in results if one.accepts_more]
    gains = gains or [(one.likelihood[0], one) for one in results if one.likelihood and one.is_likelier]
    best = max((gain for gain, _ in gains), default=0.0)
    return next((one for gain, one in gains if gain >= ALIKE * best), None)


# ----------------------------------------------------------------------------------------------------- the experiments


def experiments(case: Case) -> Iterator[Experiment]:
    """
    All experiments on a pair, the smallest changes first: of those that gain about the same, the first is the cause. A
    quantised drafter's settings stay as they are, since its weights fit no other model.
    """
    for key, trained, others in SETTINGS if _quantisation(case.draft) is None else ():
        for name, fields in others(case):
            first = next(iter(fields))
            cause = f"{first}={getattr(case.draft.config, first)!r} is not {trained}"
            values = ", ".join(f"{json.dumps(one)}: {json.dumps(value)}" for one, value in fields.items())
            yield Experiment(name, key, cause, f"write {values} into the drafter's config.json", config=fields)
    for others in (_weights, _target_window, _modes, _base):
        yield from others(case)


# 1. Other values in the drafter's configuration: what was changed, and the fields.
Others = Iterator[tuple[str, dict]]


def _masks(case: Case) -> Others:
    """The usual mask tokens and the tokenizer's special tokens, except those that the texts hold."""
    tokenizer, rows = case.encoder.tokenizer, case.target.get_input_embeddings().weight.shape[0]
    read = {token for text in case.texts if text is not None for token in text.input_ids[0].tolist()}
    read |= {*eos_ids(case.target.generation_config), case.draft.config.mask_token_id}
    added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    special |= {token_id: added[token_id] for token_id in sorted(added)[-MOST_MASKS:]}
    names = {rows - 1: "last row", spare_token_id(case.target, tokenizer): "first spare row", **special}
    for token_id, name in names.items():
        possible = token_id is not None and 0 <= token_id < rows and token_id not in read
        if possible and not case.draft.config.own_mask_embedding:
            yield f"mask id {token_id} ({name})", {"mask_token_id": token_id}


def _other_layers(step: int, case: Case) -> Others:
    moved = [i + step for i in case.draft.config.target_layer_ids]
    if 0 <= min(moved) and max(moved) < text_depth(case.target.config):
        yield f"layer ids one {'up' if step > 0 else 'down'}, {moved}", {"target_layer_ids": moved}


def _causality(case: Case) -> Others:
    causal = [case.draft.config.layer_is_causal(i) for i in range(case.draft.config.num_hidden_layers)]
    for wanted, name in ((True, "causal blocks"), (False, "bidirectional blocks")):
        if any(one != wanted for one in causal):
            yield name, {"is_causal": wanted}


def _block_sizes(case: Case) -> Others:
    for size in (case.draft.config.block_size // 2, case.draft.config.block_size * 2):
        if size > 1:
            yield f"blocks of {size}", {"block_size": size}


def _scales(case: Case) -> Others:
    config = case.draft.config
    for name, scale in (("raw", 1.0), ("times the square root of the width", round(config.hidden_size**0.5, 4))):
        if abs(scale - config.input_embedding_scale) > 1e-3:
            yield f"embedding {name}", {"input_embedding_scale": scale}


def _ropes(case: Case) -> Others:
    config = case.draft.config
    target = type(config).for_target(case.target.config, 0, target_layer_ids=config.target_layer_ids)
    own, rope = config.rope_parameters, target.rope_parameters
    if rope and any(rope.get(key) != own.get(key) for key in ("rope_type", "rope_theta", "factor")):
        yield "rotary embedding of the target", {"rope_parameters": rope}


def _windows(case: Case) -> Others:
    config = case.draft.config
    count, causality = config.num_hidden_layers, {"is_causal": config.layer_is_causal(0)}
    if "sliding_attention" in config.layer_types:
        yield "no window", {"layer_types": ["full_attention"] * count, **causality}
    for window in sorted({*WINDOWS, _window_of(case.target) or WINDOWS[0]}):
        if config.block_size < window != config.sliding_window:
            kinds = ["sliding_attention"] * count
            yield f"context of {window} tokens", {"sliding_window": window, "layer_types": kinds, **causality}


_LAYERS = "the list of layers of training: ids count from 0, and id i is the output of layer i"
SETTINGS: tuple[tuple[str, str, Callable[[Case], Others]], ...] = (
    # the key, what the value must be, other values
    ("mask", "the mask token of training", _masks),
    ("layers_down", _LAYERS, partial(_other_layers, -1)),
    ("layers_up", _LAYERS, partial(_other_layers, 1)),
    ("causal", "the attention mask of training", _causality),
    ("block_size", "the size of the blocks in training", _block_sizes),
    ("embedding", "the scale of training", _scales),
    ("rope", "that of training", _ropes),
    ("window", "that of training, or the target's", _windows),
)


# 2. The weights read in another way.


def _weights(case: Case) -> Iterator[Experiment]:
    cause = "the weights are anchor-first: slot k drafts the token at anchor + 1 + k; with DFlash's, at anchor + k"
    remedy = f"{TRAIN_AGAIN}; or serve it with an engine that supports sample_from_anchor"
    yield Experiment("anchor-first blocks", "anchor_first", cause, remedy, shift=1)
    head, table = case.target.get_output_embeddings().weight, case.target.get_input_embeddings().weight
    is_tied = head.data_ptr() == table.data_ptr() or head.shape != table.shape
    if not case.draft.config.has_own_head and not is_tied:
        cause = "the target's head is no longer its embedding, as it was in training: replaced, or a norm is folded in"
        own = nn.Linear(*reversed(table.shape), bias=False, device="meta")
        own.weight = nn.Parameter(table, requires_grad=False)
        yield Experiment("the embedding as head", "head", cause, TRAIN_AGAIN, head=own)


# 3. Another target, or other texts.


def _target_window(case: Case) -> Iterator[Experiment]:
    window = _window_of(case.target)
    if window is None:
        return
    wide = with_own_config(case.target)
    for module in wide.modules():
        if "config" in vars(module):  # a copy
            module.config.get_text_config().sliding_window = 2**30
            if getattr(module, "sliding_window", None):
                module.sliding_window = 2**30
    cause = f"the target slides over {window} tokens, and did not when the drafter was trained for it"
    change = {"model": wide, "texts": partial(case.answered, case.prompts, wide)}
    yield Experiment("target without its window", "target_window", cause, TRAIN_AGAIN, **change)


def _modes(case: Case) -> Iterator[Experiment]:
    """With and without thinking, and without the chat template."""
    now, template = dict(case.encoder.chat_template_kwargs), str(case.encoder.tokenizer.chat_template or "")
    others, tried = [], [case.prompts]
    switch = next((name for name in ("enable_thinking", "thinking") if name in template), None)
    for value in (False, True, None) if switch else ():
        wanted = {key: one for key, one in {**now, switch: value}.items() if one is not None}
        cause = f"the drafter was not trained with chat_template_kwargs={json.dumps(now)}, but in another mode"
        remedy = f"use it with --template-args {shlex.quote(json.dumps(wanted))}"
        prompts = case.asked(chat_template_kwargs=wanted)
        others.append((f"{switch} {value}", "thinking", cause, remedy, prompts))
    cause = "the drafter was trained without the chat template, or it is not the target's template"
    remedy = "use it without the template, as `dflash eval --raw` does, or train it with the template"
    others.append(("without the chat template", "raw", cause, remedy, case.asked(raw=True)))
    for *words, prompts in others:
        if prompts not in tried:
            tried.append(prompts)
            yield Experiment(*words, texts=partial(case.answered, prompts))


def _base(case: Case) -> Iterator[Experiment]:
    if case.base is not None:
        cause = "the target's layers have changed since the drafter was trained, by quantisation or further training"
        yield Experiment("features of the base", "base", cause, TRAIN_AGAIN, model=case.base)
        cause = "the drafter fits the base, and no longer the model made from it"
        own = {"model": case.base, "head": case.base.get_output_embeddings()}
        texts = partial(case.answered, case.prompts, case.base)
        yield Experiment("the base itself, on its own text", "base", cause, TRAIN_AGAIN, **own, texts=texts)


def _window_of(target) -> int | None:
    """The window of a target's sliding layers; `None` if it has none."""
    config = target.config.get_text_config()
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return getattr(config, "sliding_window", None) if slides else None


def _quantisation(draft) -> str | None:
    """How a drafter is quantised; `None` if it is not."""
    given = getattr(draft.config, "quantization_config", None)
    return None if given is None else given["quant_method"] if isinstance(given, dict) else given.quant_method


# ------------------------------------------------------------------------------------------------------- the diagnosis


@dataclass
class Diagnosis:
    """
    The result of [`diagnose`].

    Args:
        as_given (`Counts`): Teacher-forced counts of the unchanged pair.
        results (`list[Result]`): What the experiments gave.
        cause (`Experiment`, *optional*): The likeliest cause.
        loss, guess (`float`): The target's loss on the prompts, in nats per token, and a uniform guess's.
        unlike (`list[str]`): `tokenizer` and `template`, if they differ from those of the drafter's training.
    """

    as_given: Counts
    results: list[Result]
    cause: Experiment | None
    loss: float
    guess: float
    unlike: list[str]

    def lines(self) -> list[str]:
        """Lines for a terminal: the cause and its remedy first, then what was tried."""
        cause = "none of these: no change is better by more than chance"
        remedy = "more of the target's own answers, and more training; more --prompts show smaller faults"
        if self.cause is not None:
            cause, remedy = self.cause.cause, self.cause.remedy
        elif self.unlike:
            remedy = f"use the {' and '.join(self.unlike)} of training, or train with the new one"
        return [
            f"as it is          tau {self.as_given.tau:.2f}, teacher-forced, over {self.as_given.blocks} blocks",
            f"prompts           cost the target {self.loss:.2f} nats per token; guessing costs {self.guess:.2f}",
            *[f"noticed           the {what} differs from the drafter's training" for what in self.unlike],
            "",
            f"likeliest cause   {cause}",
            f"remedy            {remedy}",
            "",
            f"{'tried':44}{'tau':>6}{'change':>9}{'std. errors':>13}{'nats':>8}{'std. errors':>13}",
            *[self._row(result) for result in self.results if not self._is_idle(result)],
            *self._idle_line(),
        ]

    def _is_idle(self, result: Result) -> bool:
        """Whether a row would show no change at all, or one that is shown as +0.00."""
        return not result.is_better and all(abs(result.figures.get(name, 0.0)) < 0.005 for name in ("gain", "nats"))

    def _idle_line(self) -> list[str]:
        """One line for all changes that changed nothing."""
        names = [result.experiment.name for result in self.results if self._is_idle(result) and result.after.blocks]
        names += [
            f"{one.experiment.name} (no text)" for one in self.results if self._is_idle(one) and not one.after.blocks
        ]
        return [f"no difference     {', '.join(names)}"] if names else []

    def _row(self, one: Result) -> str:
        cells = map(str.format, ("{:+9.2f}", "{:+13.1f}", "{:+8.2f}", "{:+13.1f}"), one.figures.values())
        found = "  <- likeliest cause" if one.experiment is self.cause else "  better" * one.is_better
        return f"{f'{one.experiment.name:44}{one.after.tau:6.2f}' + ''.join(cells):93}{found}".rstrip()

    def facts(self) -> dict:
        """The data for `--json`."""
        return {
            "tau": self.as_given.tau,
            "prompt_nats": {"target": self.loss, "guess": self.guess},
            "unlike": self.unlike,
            "tried": [
                {"key": one.experiment.key, "name": one.experiment.name, "tau": one.after.tau, "better": one.is_better}
                | one.figures
                for one in self.results
            ],
            "cause": self.cause and {name: getattr(self.cause, name) for name in ("key", "cause", "remedy")},
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
    # 1. All experiments; the unchanged pair comes first.
    known = list(experiments(case))
    as_given, *counts = measure(case.target, case.draft, case.texts, [Experiment(), *known], progress)
    results = [Result(one, as_given, after) for one, after in zip(known, counts, strict=True)]
    # 2. Whether the target can read its prompts, and what has changed since training.
    loss, guess = loss_on(case.target, case.prompts), math.log(case.target.get_input_embeddings().weight.shape[0])
    before, now = case.draft.config.dflash_config.get("trained_with", {}), digests_of_tokenizer(case.encoder.tokenizer)
    unlike = [name for name in ("tokenizer", "template") if name in before and before[name] != now[name]]
    # 3. The cause: prompts that the target cannot read, or else the best change.
    best = likeliest(results)
    cause = None if best is None else best.experiment
    if loss > guess:  # wrong ids, or a damaged target
        is_damaged = case.base is not None and loss_on(case.base, case.prompts) <= guess
        cause = known[-1] if is_damaged else _OTHER_TOKENIZER  # the last experiment is the base itself
    elif best is None and _is_by_heart(case.training, as_given.tau):
        cause = _by_heart(case.training, as_given.tau)
    elif max(as_given.tau, 1.0 if best is None else best.after.tau) < HARDLY:
        cause = _nothing_helps(case)
    return Diagnosis(as_given, results, cause, loss, guess, unlike)


_OTHER_TOKENIZER = Experiment(
    *("", "tokenizer", "the tokenizer or chat template is not the one that the target was trained with"),
    "save the tokenizer of the model that the target was made from beside the target",
)


def _is_by_heart(training: Training | None, tau: float) -> bool:
    """Whether few rows were read so often that the drafter knows them, and little else: tau is far lower here."""
    if training is None or training.passes < MANY_PASSES or training.rows > FEW_ROWS:
        return False
    return training.tau is None or learned_by_heart(training.tau, tau)


def _by_heart(training: Training, tau: float) -> Experiment:
    """The cause where a drafter knows its training rows alone."""
    there = "" if training.tau is None else f": tau {training.tau:.2f} there, {tau:.2f} here"
    cause = f"{training.rows} rows were learned by heart, in {training.passes:.0f} passes{there}"
    return Experiment(
        "", "by_heart", cause, "train on more rows, with few passes: `dflash prompts`, `dflash regenerate`"
    )


def _nothing_helps(case: Case) -> Experiment:
    """The cause where no change lets more than a few drafts be accepted."""
    method = _quantisation(case.draft)
    if method is None:
        cause = "hardly any draft is accepted: the drafter was trained for another target, or hardly at all"
        return Experiment("", "target", cause, TRAIN_AGAIN)
    cause = f"hardly any draft is accepted, and the drafter is quantised ({method}): few bits of a small model ruin it"
    return Experiment("", "quantised", cause, "draft with the drafter as it was before; it costs little memory")
