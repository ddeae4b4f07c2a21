"""The experiments of the doctor on a pair: the smallest changes first."""

import json
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import nn

from dflash_hf.doctor.case import PairCase
from dflash_hf.doctor.measuring import Cause, Experiment
from dflash_hf.modeling.target_dflash import num_decoder_layers
from dflash_hf.targets.clones import with_own_config
from dflash_hf.targets.generation import eos_ids
from dflash_hf.targets.mask_token import spare_token_id


WINDOWS = (64, 256, 1024, 4096)  # tokens of context
MAX_SPECIAL_TOKENS = 8  # which are tried as mask tokens
NO_WINDOW = 2**30  # tokens: longer than any text
TRAIN_AGAIN = "train a drafter on this target's own answers: `dflash prompts`, `dflash regenerate`, `dflash train`"
FITS_BASE_ONLY = Cause("base", "the drafter fits the base, and no longer the model made from it", TRAIN_AGAIN)


def plan_experiments(case: PairCase) -> Iterator[Experiment]:
    """
    All experiments on a pair, the smallest changes first: of changes that gain about the same, the first is the cause.
    A quantised drafter's settings stay as they are, since its weights fit no other model.
    """
    if quantisation_of(case.draft) is None:
        yield from _other_settings(case)
    yield from _other_readings_of_weights(case)
    yield from _target_without_window(case)
    yield from _other_prompt_modes(case)
    yield from _base_of_target(case)


# 1. Other values in the drafter's configuration.

# What is changed, for the table, and the fields' values.
NamedFields = Iterator[tuple[str, dict]]


def _other_settings(case: PairCase) -> Iterator[Experiment]:
    for setting in SETTINGS:
        for name, fields in setting.other_values(case):
            first = next(iter(fields))
            text = f"{first}={getattr(case.draft.config, first)!r} is not {setting.right_value}"
            values = ", ".join(f"{json.dumps(field)}: {json.dumps(value)}" for field, value in fields.items())
            remedy = f"write {values} into the drafter's config.json"
            yield Experiment(name, Cause(setting.key, text, remedy), config=fields)


def _other_masks(case: PairCase) -> NamedFields:
    """The usual mask tokens and the tokenizer's special tokens, except tokens that the texts hold."""
    tokenizer = case.encoder.template.tokenizer
    vocab_size = case.target.get_input_embeddings().weight.shape[0]
    excluded = {*eos_ids(case.target.generation_config), case.draft.config.mask_token_id}
    for text in case.texts:
        if text is not None:
            excluded.update(text.input_ids[0].tolist())
    added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    special |= {token_id: added[token_id] for token_id in sorted(added)[-MAX_SPECIAL_TOKENS:]}
    names = {vocab_size - 1: "last row", spare_token_id(case.target, tokenizer): "first spare row", **special}
    for token_id, name in names.items():
        is_possible = token_id is not None and 0 <= token_id < vocab_size and token_id not in excluded
        if is_possible and not case.draft.config.own_mask_embedding:
            yield f"mask id {token_id} ({name})", {"mask_token_id": token_id}


def _other_layers(step: int, case: PairCase) -> NamedFields:
    moved = [i + step for i in case.draft.config.target_layer_ids]
    if 0 <= min(moved) and max(moved) < num_decoder_layers(case.target.config):
        yield f"layer ids one {'up' if step > 0 else 'down'}, {moved}", {"target_layer_ids": moved}


def _other_causality(case: PairCase) -> NamedFields:
    config = case.draft.config
    layers_are_causal = [config.layer_is_causal(i) for i in range(config.num_hidden_layers)]
    if not all(layers_are_causal):
        yield "causal blocks", {"is_causal": True}
    if any(layers_are_causal):
        yield "bidirectional blocks", {"is_causal": False}


def _other_block_sizes(case: PairCase) -> NamedFields:
    for size in (case.draft.config.block_size // 2, case.draft.config.block_size * 2):
        if size > 1:
            yield f"blocks of {size}", {"block_size": size}


def _other_embedding_scales(case: PairCase) -> NamedFields:
    config = case.draft.config
    for name, scale in (("raw", 1.0), ("times the square root of the width", round(config.hidden_size**0.5, 4))):
        if abs(scale - config.input_embedding_scale) > 1e-3:
            yield f"embedding {name}", {"input_embedding_scale": scale}


def _rope_of_target(case: PairCase) -> NamedFields:
    config = case.draft.config
    config_for_target = type(config).for_target(case.target.config, 0, target_layer_ids=config.target_layer_ids)
    target_rope = config_for_target.rope_parameters
    if not target_rope:
        return
    if any(target_rope.get(key) != config.rope_parameters.get(key) for key in ("rope_type", "rope_theta", "factor")):
        yield "rotary embedding of the target", {"rope_parameters": target_rope}


def _other_windows(case: PairCase) -> NamedFields:
    config = case.draft.config
    layers = config.num_hidden_layers
    causality = {"is_causal": config.layer_is_causal(0)}
    if "sliding_attention" in config.layer_types:
        yield "no window", {"layer_types": ["full_attention"] * layers, **causality}
    for window in sorted({*WINDOWS, _window_of(case.target) or WINDOWS[0]}):
        if config.block_size < window != config.sliding_window:
            layer_types = ["sliding_attention"] * layers
            yield f"context of {window} tokens", {"sliding_window": window, "layer_types": layer_types, **causality}


_LAYERS = "the list of layers of training: ids count from 0, and id i is the output of layer i"


class Setting(NamedTuple):
    """
    A setting of the drafter's configuration that may be wrong.

    Args:
        key (`str`): The key of the cause, in `--json`.
        right_value (`str`): What the value must be; ends the sentence "FIELD=VALUE is not ...".
        other_values (`Callable`): Yields the other values to try for a pair.
    """

    key: str
    right_value: str
    other_values: Callable[[PairCase], NamedFields]


SETTINGS = (
    Setting("mask", "the mask token of training", _other_masks),
    Setting("layers_down", _LAYERS, partial(_other_layers, -1)),
    Setting("layers_up", _LAYERS, partial(_other_layers, 1)),
    Setting("causal", "the attention mask of training", _other_causality),
    Setting("block_size", "the size of the blocks in training", _other_block_sizes),
    Setting("embedding", "the scale of training", _other_embedding_scales),
    Setting("rope", "the rotary embedding of training", _rope_of_target),
    Setting("window", "the window of training, or of the target", _other_windows),
)


# 2. The weights read in another way.


def _other_readings_of_weights(case: PairCase) -> Iterator[Experiment]:
    text = "the weights are anchor-first: slot k drafts the token at anchor + 1 + k; with DFlash's, at anchor + k"
    remedy = f"{TRAIN_AGAIN}; or serve it with an engine that supports sample_from_anchor"
    cause = Cause("anchor_first", text, remedy)
    yield Experiment("anchor-first blocks", cause, switches_anchor_first=True)
    head = case.target.get_output_embeddings().weight  # [V, H]
    embedding = case.target.get_input_embeddings().weight  # [V, H]
    is_tied = head.data_ptr() == embedding.data_ptr() or head.shape != embedding.shape
    if not case.draft.config.has_own_lm_head and not is_tied:
        text = "the target's head is no longer its embedding, as it was in training: replaced, or a norm is folded in"
        vocab_size, hidden_size = embedding.shape
        embedding_as_head = nn.Linear(hidden_size, vocab_size, bias=False, device="meta")
        embedding_as_head.weight = nn.Parameter(embedding, requires_grad=False)
        cause = Cause("head", text, TRAIN_AGAIN)
        yield Experiment("the embedding as head", cause, output_head=embedding_as_head)


# 3. Another target, or other texts.


def _target_without_window(case: PairCase) -> Iterator[Experiment]:
    window = _window_of(case.target)
    if window is None:
        return
    without_window = with_own_config(case.target)
    for module in without_window.modules():
        if "config" in vars(module):  # a copy; other modules are shared with the target
            module.config.get_text_config().sliding_window = NO_WINDOW
            if getattr(module, "sliding_window", None):
                module.sliding_window = NO_WINDOW
    text = f"the target has a sliding window of {window} tokens, and had none when the drafter was trained for it"
    texts = partial(case.answer_prompts, case.prompts, without_window)
    cause = Cause("target_window", text, TRAIN_AGAIN)
    yield Experiment("target without its window", cause, target=without_window, texts=texts)


def _other_prompt_modes(case: PairCase) -> Iterator[Experiment]:
    """With and without thinking, and without the chat template; prompts that were tried already are left out."""
    current_kwargs = dict(case.encoder.template.chat_template_kwargs)
    template = str(case.encoder.template.tokenizer.chat_template or "")
    prompts_of_experiment: list[tuple[Experiment, list[list[int]]]] = []
    switch = next((name for name in ("enable_thinking", "thinking") if name in template), None)
    if switch is not None:
        for value in (False, True, None):
            kwargs = {
                key: setting for key, setting in {**current_kwargs, switch: value}.items() if setting is not None
            }
            text = (
                f"the drafter was not trained with chat_template_kwargs={json.dumps(current_kwargs)}, "
                "but in another mode"
            )
            remedy = f"use it with --template-args {shlex.quote(json.dumps(kwargs))}"
            experiment = Experiment(f"{switch} {value}", Cause("thinking", text, remedy))
            prompts_of_experiment.append((experiment, case.encode_prompts(chat_template_kwargs=kwargs)))
    text = "the drafter was trained without the chat template, or it is not the target's template"
    remedy = "use it without the template, as `dflash eval --raw` does, or train it with the template"
    experiment = Experiment("without the chat template", Cause("raw", text, remedy))
    prompts_of_experiment.append((experiment, case.encode_prompts(raw=True)))
    tried_prompts = [case.prompts]
    for experiment, prompts in prompts_of_experiment:
        if prompts not in tried_prompts:
            tried_prompts.append(prompts)
            experiment.texts = partial(case.answer_prompts, prompts)
            yield experiment


def _base_of_target(case: PairCase) -> Iterator[Experiment]:
    if case.base is None:
        return
    text = "the target's layers have changed since the drafter was trained, by quantisation or further training"
    yield Experiment("features of the base", Cause("base", text, TRAIN_AGAIN), target=case.base)
    yield Experiment(
        "the base itself, on its own text",
        FITS_BASE_ONLY,
        target=case.base,
        output_head=case.base.get_output_embeddings(),
        texts=partial(case.answer_prompts, case.prompts, case.base),
    )


def _window_of(target) -> int | None:
    """The window of a target's sliding layers; `None` if it has none."""
    config = target.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or ()
    if "sliding_attention" not in layer_types:
        return None
    return getattr(config, "sliding_window", None)


def quantisation_of(draft) -> str | None:
    """The method by which a drafter is quantised; `None` if it is not."""
    settings = getattr(draft.config, "quantization_config", None)
    if settings is None:
        return None
    if isinstance(settings, dict):
        return settings["quant_method"]
    return settings.quant_method
