"""
What a training run takes: tokens, disk and GPU hours of each stage, before anything is downloaded.

Floating-point operations (FLOPs) and bytes are counted from the shapes of target and drafter, which are built on
PyTorch's meta device, without weights. A card then does `share * peak` of them per second: [`Card`] has the peaks,
[`Assumptions`] the shares and the lengths of texts. So each figure can be checked by hand, and compared with what was
measured on another card. A multiply-add counts as two FLOPs; recomputation, norms and activations do not count.

- A *forward of the target* over `S` tokens: `2 * P * S + 4 * heads * head_dim * S * (S + 1) / 2` in each layer, with
  `P` the parameters that a token is multiplied with; of experts, those that it is sent to.
- *Answers*: one such forward over each prompt; then a step for each token, in which all rows of a batch read the
  weights once and their own keys and values. A step takes as long as the slower of reading and computing. Of experts,
  those are read that at least one row is sent to.
- *Features*: a forward of the target's layers up to the last one that the drafter reads, once for stored features,
  else in each pass. On disk they take `features * hidden_size * 2` bytes per token.
- A *step of the drafter* on a row of `S` tokens with `A` blocks of `B` slots: three times (forward, and twice that
  backward) `2 * P_block * A * B + 2 * P_context * S + 4 * heads * head_dim * layers * pairs`. `P_block` are its
  layers, `P_context` are `fc` and the layers' `k_proj` and `v_proj`, and `pairs` counts a slot with each key that it
  sees. Token heads are left out.
- The *head*, which is frozen: forward, and backward to its input: `4 * hidden_size * vocabulary` for each drafted
  token.
"""

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.layouts.precedence import first_not_none
from dflash_hf.modeling.target_dflash import decoder_layers
from dflash_hf.pairs.configs import read_config
from dflash_hf.training.arguments import DFlashOptions, ScriptArguments
from dflash_hf.training.losses import LOSSES
from dflash_hf.training.start import fresh_draft_config, vocabulary_size


# Configurations of the recipes' targets, as far as they decide shapes, from their pages on the Hub in November 2026.
_KNOWN_TARGETS: dict[str, dict] = json.loads(
    Path(__file__).with_name("known_targets.json").read_text(encoding="utf-8")
)
_BYTES = 2  # of a weight, a key, a value or a feature, in bf16
# Of the card's memory, what weights and caches may take while the target answers.
_USABLE_MEMORY = 0.9
_MIN_ROWS = 16  # that answer together; cards are added until so many fit
_NAMES_OF_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in configurations
# Weights in float32 with their gradients and AdamW's two moments.
_BYTES_PER_TRAINED_PARAMETER = 16
_ANSWER_BYTES_PER_TOKEN = 5  # text in JSON
# What the arguments of a run leave out has these values.
_DEFAULTS = {
    **{field.name: field.default for field in fields(DFlashOptions)},
    "max_steps": -1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
}


class Card(NamedTuple):
    """
    A GPU. The figures are those of its data sheet.

    Args:
        name (`str`): Its name.
        flops (`float`): Peak per second in bf16 with accumulation in float32, without sparsity.
        bandwidth (`float`): Bytes per second of its memory.
        memory (`float`): Bytes.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.flops / 1e12:.0f} TFLOP/s in bf16, {self.bandwidth / 1e12:.2f} TB/s, "
            f"{self.memory / 1e9:.0f} GB)"
        )


CARDS = {
    "A100": Card("A100 SXM 80 GB", 312e12, 2.039e12, 80e9),
    "B200": Card("B200", 2250e12, 8.0e12, 180e9),
    "H100": Card("H100 SXM", 989e12, 3.35e12, 80e9),
    "H200": Card("H200 SXM", 989e12, 4.8e12, 141e9),
    "RTX4090": Card("RTX 4090", 165e12, 1.008e12, 24e9),
}


@dataclass(frozen=True)
class Assumptions:
    """
    What an estimate assumes. None of it is measured; `dflash prepare` counts the tokens of real answers.

    Args:
        rows (`int`): Rows of the data, one answer each.
        prompt_tokens (`float`): Mean length of a prompt.
        answer_tokens (`float`): Mean length of an answer.
        batch_rows (`int`): Answers that are written at a time, where memory holds them.
        bandwidth_share (`float`): Of the card's peak, while answers are written.
        flops_share (`float`): Of the card's peak, in all forwards over many tokens, and in training.

    Raises:
        `ValueError`: names the value and its bounds.
    """

    rows: int
    prompt_tokens: float = 250
    answer_tokens: float = 700
    batch_rows: int = 256
    bandwidth_share: float = 0.5
    flops_share: float = 0.4

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name}={value} must be a positive number.")
            if field.name.endswith("_share") and value > 1:
                raise ValueError(f"{field.name}={value} must be at most 1, the card's peak.")


THINKING_ANSWER_TOKENS = 2800  # the default of `answer_tokens` where answers have thoughts, which recipes cut


def make_assumptions(rows: int | None, thinks: bool, words: list[str]) -> Assumptions:
    """
    The assumptions of an estimate.

    Args:
        rows (`int`, *optional*): Rows of the recipe's mixture.
        thinks (`bool`): Whether answers have thoughts.
        words (`list[str]`): Others, as `name=value`.

    Raises:
        `ValueError`: an unknown name, a value that is not a number, or nobody says how many rows there are.
    """
    values: dict[str, Any] = {}
    if rows is not None:
        values["rows"] = rows
    if thinks:
        values["answer_tokens"] = THINKING_ANSWER_TOKENS
    names = [field.name for field in fields(Assumptions)]
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in names:
            raise ValueError(f"assume={word!r} must be name=value with one of {', '.join(names)}.")
        try:
            values[name] = float(text) if name in ("prompt_tokens", "answer_tokens") else _number(text)
        except ValueError as error:
            raise ValueError(f"assume={word!r}: {text!r} is not a number.") from error
    if "rows" not in values:
        raise ValueError("The number of rows is not known; add rows=800000 to `assume`, or a `mixture` to the recipe.")
    return Assumptions(**values)


def _number(text: str) -> int | float:
    """A number, whole if it is written without a point."""
    return int(text) if text.lstrip("-").isdecimal() else float(text)


# ---------------------------------------------------------------------------------------------------------- the shapes


@dataclass(frozen=True)
class LayerShape:
    """
    A decoder layer of a target.

    Args:
        matrices (`int`): Parameters that every token is multiplied with.
        experts (`int`): Parameters of all experts.
        expert_share (`float`): Share of the experts that a token is sent to; 0 without experts.
        attends (`bool`): Whether it has keys and values of every token.
    """

    matrices: int
    experts: int
    expert_share: float
    attends: bool

    @property
    def active(self) -> float:
        """Parameters that a token is multiplied with, those of its experts included."""
        return self.matrices + self.experts * self.expert_share

    def read(self, rows: int) -> float:
        """Parameters that a step of so many rows reads: of the experts, those of at least one row."""
        return self.matrices + self.experts * (1 - (1 - self.expert_share) ** rows)


@dataclass(frozen=True)
class TargetShape:
    """
    The shape of a target.

    Args:
        layers (`tuple[LayerShape, ...]`): Its decoder layers.
        parameters (`int`): All of it, embedding and head included.
        hidden_size, vocab_size (`int`): Of the embedding and the head.
        heads, kv_heads, head_dim (`int`): Of its attention.
    """

    layers: tuple[LayerShape, ...]
    parameters: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def head(self) -> int:
        """Parameters of the head."""
        return self.hidden_size * self.vocab_size

    @property
    def cache_bytes(self) -> int:
        """Keys and values of a token, in bytes."""
        return sum(layer.attends for layer in self.layers) * 2 * self.kv_heads * self.head_dim * _BYTES

    def forward_flops(self, tokens: float, num_layers: int | None = None) -> float:
        """FLOPs of a causal forward over the tokens of a text, without the head; of the first layers, or of all."""
        layers = self.layers[:num_layers]
        pairs = tokens * (tokens + 1) / 2
        attention = 4 * self.heads * self.head_dim * pairs * sum(layer.attends for layer in layers)
        return 2 * sum(layer.active for layer in layers) * tokens + attention

    def step_flops(self, context: float) -> float:
        """FLOPs of one more token of a text after so many others."""
        attention = 4 * self.heads * self.head_dim * context * sum(layer.attends for layer in self.layers)
        return 2 * (sum(layer.active for layer in self.layers) + self.head) + attention

    def step_bytes(self, rows: int, context: float) -> float:
        """Bytes that one more token of each of so many texts reads."""
        weights = sum(layer.read(rows) for layer in self.layers) + self.head
        return weights * _BYTES + rows * context * self.cache_bytes


@dataclass(frozen=True)
class DraftShape:
    """
    The shape of a drafter.

    Args:
        block (`int`): Parameters that each slot of a block is multiplied with.
        context (`int`): Parameters that each token of the context is multiplied with.
        attention (`int`): `4 * heads * head_dim * layers`: FLOPs of a slot for each key that it sees.
        parameters (`int`): Its own, all of them trained.
        num_features (`int`): Target layers that it reads.
        last_layer (`int`): The last of these.
        vocab_size (`int`): Tokens that it drafts.
        block_size (`int`): Slots of a block, and `drafts` of them draft a token.
    """

    block: int
    context: int
    attention: int
    parameters: int
    num_features: int
    last_layer: int
    vocab_size: int
    block_size: int
    drafts: int


def target_config_of(name: str, revision: str | None = None):
    """
    The configuration of a target, without asking the Hub for those of the recipes.

    Raises:
        `ValueError`, `OSError`: as [`~dflash_hf.pairs.configs.read_config`].
    """
    fields_of_config = _KNOWN_TARGETS.get(name)
    if fields_of_config is None:
        fields_of_config = read_config(name, f"target={name}", revision)
    model_type = fields_of_config.get("model_type")
    other_fields = {key: value for key, value in fields_of_config.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(model_type, **other_fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"target={name}: transformers has no model of the type {model_type!r}.") from error


def shape_of_target(config) -> TargetShape:
    """The shape of a target with this configuration."""
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
    text = target.config.get_text_config(decoder=True)
    layer_types = getattr(text, "layer_types", None) or ["full_attention"] * len(decoder_layers(target))
    per_token = getattr(text, "num_experts_per_tok", None) or 0
    num_experts = first_not_none(*(getattr(text, name, None) for name in _NAMES_OF_EXPERT_COUNTS)) or 0
    layers = []
    for layer, layer_type in zip(decoder_layers(target), layer_types, strict=True):
        experts = [parameter for name, parameter in layer.named_parameters() if ".experts." in f".{name}"]
        in_experts = sum(parameter.numel() for parameter in experts)
        in_matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)
        share = per_token / num_experts if num_experts else 0.0
        layers.append(LayerShape(in_matrices - in_experts, in_experts, share, layer_type != "linear_attention"))
    heads = text.num_attention_heads
    return TargetShape(
        layers=tuple(layers),
        parameters=sum(parameter.numel() for parameter in target.parameters()),
        hidden_size=text.hidden_size,
        vocab_size=target.get_output_embeddings().weight.shape[0],
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )


def shape_of_draft(script: ScriptArguments, target_config, supervised_tokens: float) -> DraftShape:
    """The shape of the new drafter of a run on so many supervised tokens, which decide a `draft_vocab_size` of -1."""
    counts = torch.tensor([int(supervised_tokens)])
    vocab_size = vocabulary_size(script, counts, target_config.get_text_config(decoder=True).vocab_size)
    script = replace(script, draft_vocab_size=vocab_size)
    config = fresh_draft_config(script, target_config, script.mask_token_id or 0)
    with torch.device("meta"):
        draft = DFlashDraftModel(config)
    context = [draft.fc]
    for layer in draft.layers:
        context += [layer.self_attn.k_proj, layer.self_attn.v_proj]
    return DraftShape(
        block=sum(parameter.numel() for parameter in draft.layers.parameters() if parameter.dim() == 2),
        context=sum(module.weight.numel() for module in context),
        attention=4 * config.num_attention_heads * config.head_dim * len(draft.layers),
        parameters=sum(parameter.numel() for parameter in draft.parameters()),
        num_features=len(config.target_layer_ids),
        last_layer=max(config.target_layer_ids),
        vocab_size=config.draft_vocab_size or config.vocab_size,
        block_size=config.block_size,
        drafts=config.max_block_tokens - 1,
    )


# ----------------------------------------------------------------------------------------------------------- the costs


@dataclass(frozen=True)
class Row:
    """
    The mean row of the data, in tokens.

    Args:
        prompt, answer (`float`): What is trained on of them: rows are cut at `max_length`.
        anchors (`float`): Blocks of a row that count; the forward has `num_anchors` of them.
        slots (`int`): Slots of all blocks of the forward.
    """

    prompt: float
    answer: float
    anchors: float
    slots: int

    @property
    def tokens(self) -> float:
        """All of it."""
        return self.prompt + self.answer


def mean_row(assumed: Assumptions, draft: DraftShape, max_length: int, num_anchors: int, is_regular: bool) -> Row:
    """The mean row of a run."""
    prompt = min(assumed.prompt_tokens, max_length)
    answer = min(assumed.answer_tokens, max_length - prompt)
    eligible = answer / draft.block_size if is_regular else max(answer - 1, 0)
    slots = min(num_anchors, math.ceil(prompt + answer)) * draft.block_size
    return Row(prompt, answer, min(num_anchors, eligible), slots)


def step_flops(target: TargetShape, draft: DraftShape, row: Row, has_teacher: bool = False) -> dict[str, float]:
    """
    FLOPs of a training step on one row, by part: `"target"`, `"drafter"` and `"head"`; with stored features there is
    no `"target"`.
    """
    num_layers = None if has_teacher else draft.last_layer + 1
    keys = row.prompt + row.answer / 2 + draft.block_size  # that a slot sees
    pairs = row.anchors * draft.block_size * keys
    head = 4 * target.hidden_size * draft.vocab_size
    if has_teacher:
        head += 2 * target.hidden_size * draft.vocab_size
    return {
        "target": target.forward_flops(row.tokens, num_layers),
        "drafter": 3 * (2 * draft.block * row.slots + 2 * draft.context * row.tokens + draft.attention * pairs),
        "head": head * row.anchors * draft.drafts,
    }


@dataclass(frozen=True)
class Costs:
    """
    What the stages of a run take on a card; hours are those of one card.

    Args:
        tokens (`float`): Of all rows, once, as they are trained on.
        passes (`float`): Passes over them.
        answer_rows (`int`): Answers that are written at a time.
        answer_cards (`int`): Cards that hold the target and their caches.
        prefill_hours, decode_hours (`float`): Of the answers.
        answer_bytes (`float`): Their file.
        feature_bytes (`float`): Stored features.
        feature_hours (`float`): The target's forward over all rows, once.
        draft_hours (`float`): The drafter's training without the target's forward, all passes.
        step_tflop (`dict[str, float]`): TFLOPs of a step on one row, by part.
        memory (`float`): Bytes of target, drafter, gradients and optimizer on a card, without activations.
    """

    tokens: float
    passes: float
    answer_rows: int
    answer_cards: int
    prefill_hours: float
    decode_hours: float
    answer_bytes: float
    feature_bytes: float
    feature_hours: float
    draft_hours: float
    step_tflop: dict[str, float]
    memory: float

    @property
    def answer_hours(self) -> float:
        """Of all answers."""
        return self.prefill_hours + self.decode_hours

    @property
    def online_hours(self) -> float:
        """All stages, with the target's forward in each pass."""
        return self.answer_hours + self.passes * self.feature_hours + self.draft_hours

    @property
    def offline_hours(self) -> float:
        """All stages, with stored features."""
        return self.answer_hours + self.feature_hours + self.draft_hours


def estimate(script: ScriptArguments, training: dict, card: Card, assumed: Assumptions) -> Costs:
    """
    The costs of a run.

    Args:
        script (`ScriptArguments`), training (`dict`): From [`~dflash_hf.training.recipe.as_arguments`].
        card (`Card`): Where it runs.
        assumed (`Assumptions`): Rows, lengths and shares of the card's peak.

    Raises:
        `ValueError`: the run continues a trained drafter, or ends by the clock.
        `ValueError`, `OSError`: the target's configuration cannot be read.
    """
    if script.draft:
        raise ValueError(f"costs are counted for new drafters, not for draft={script.draft!r}; leave it out.")
    if training.get("max_minutes"):
        raise ValueError(f"max_minutes={training['max_minutes']:g} decides the time: there is nothing to count.")
    target_config = target_config_of(script.target, script.target_revision)
    target = shape_of_target(target_config)
    draft = shape_of_draft(script, target_config, assumed.rows * assumed.answer_tokens)
    settings = {**_DEFAULTS, **training}
    is_regular = settings["anchor_sampling"] == "regular"
    row = mean_row(assumed, draft, script.max_length, settings["num_anchors"], is_regular)
    flops_per_second = card.flops * assumed.flops_share

    # 1. Answers. The target and the caches of a few rows may need several cards, which share all of it.
    context = assumed.prompt_tokens + assumed.answer_tokens / 2
    row_bytes = (assumed.prompt_tokens + assumed.answer_tokens) * target.cache_bytes
    weights = target.parameters * _BYTES
    usable = card.memory * _USABLE_MEMORY
    cards = max(1, math.ceil((weights + _MIN_ROWS * row_bytes) / usable))
    rows = max(1, min(int(assumed.batch_rows), int((cards * usable - weights) / max(row_bytes, 1))))
    prefill = target.forward_flops(assumed.prompt_tokens) / flops_per_second
    reading = target.step_bytes(rows, context) / (card.bandwidth * assumed.bandwidth_share)
    computing = rows * target.step_flops(context) / flops_per_second
    decode = assumed.answer_tokens * max(reading, computing) / rows

    # 2. Features, and the drafter's training.
    step = step_flops(target, draft, row, LOSSES[settings["loss_type"]].kind != "ce")
    passes = settings["num_train_epochs"]
    if settings["max_steps"] > 0:
        rows_of_step = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
        passes = settings["max_steps"] * rows_of_step / assumed.rows
    hours = assumed.rows / 3600
    tokens = assumed.rows * row.tokens
    all_answers = assumed.rows * (assumed.prompt_tokens + assumed.answer_tokens)
    on_card = 0 if script.features else weights
    return Costs(
        tokens=tokens,
        passes=passes,
        answer_rows=rows,
        answer_cards=cards,
        prefill_hours=hours * prefill,
        decode_hours=hours * decode,
        answer_bytes=all_answers * _ANSWER_BYTES_PER_TOKEN,
        feature_bytes=tokens * draft.num_features * target.hidden_size * _BYTES,
        feature_hours=hours * step["target"] / flops_per_second,
        draft_hours=hours * passes * (step["drafter"] + step["head"]) / flops_per_second,
        step_tflop={part: flops / 1e12 for part, flops in step.items()},
        memory=on_card + draft.parameters * _BYTES_PER_TRAINED_PARAMETER,
    )


def cost_lines(costs: Costs, card: Card, assumed: Assumptions, stores_features: bool) -> list[str]:
    """Costs as text for the user, a stage in each line."""
    several = f", {costs.answer_cards} cards for one copy" if costs.answer_cards > 1 else ""
    step = costs.step_tflop
    total = costs.offline_hours if stores_features else costs.online_hours
    way = "stored features" if stores_features else "features in each pass"
    online_hours = costs.passes * costs.feature_hours
    warning = "" if costs.memory < card.memory else ", more than this card has"
    listed = " ".join(f"{name}={value:g}" for name, value in asdict(assumed).items())
    return [
        f"costs on {card}: counted from shapes, not measured; hours are those of one card",
        f"tokens     {assumed.rows:,.0f} rows of {costs.tokens / assumed.rows:,.0f}: {_amount(costs.tokens)}; "
        f"{_amount(costs.tokens * costs.passes)} in {costs.passes:.3g} passes",
        f"answers    {_hours(costs.answer_hours)}: prompts {_hours(costs.prefill_hours)}, decoding "
        f"{_hours(costs.decode_hours)}, {costs.answer_rows} at a time{several}; {_size(costs.answer_bytes)} on disk",
        f"features   in each pass {_hours(online_hours)} and no disk, or once {_hours(costs.feature_hours)} and "
        f"{_size(costs.feature_bytes)} on disk",
        f"training   {_hours(costs.draft_hours)}: a row takes {step['drafter']:.3g} TFLOP in the drafter, "
        f"{step['head']:.3g} in the head ({step['target']:.3g} in the target)",
        f"in all     {_hours(total)} with {way}",
        f"memory     {costs.memory / 1e9:.0f} GB in training, without activations{warning}",
        f"assumed    {listed}",
    ]


def _hours(hours: float) -> str:
    return f"{hours:,.0f} h" if hours >= 10 else f"{hours:.2g} h"


def _amount(count: float) -> str:
    for unit, size in ((" G", 1e9), (" M", 1e6)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:,.0f}"


def _size(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e6:.3g} MB"
