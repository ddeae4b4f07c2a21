"""
A drafter as a `CandidateGenerator`, and the hook that plugs it into `target.generate(assistant_model=draft)`.

The loop is upstream's own, `GenerationMixin._assisted_decoding`: it asks for candidates, verifies them with one
forward of the target and keeps those that the target would have chosen. That is right for one row, plain attention
caches, and transformers' own stateless processors and criteria; everything else decodes without the drafter, with one
line that says why. The package `dflash-hf` replaces this loop by an engine that drafts all of it.
"""

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import nn
from transformers import DynamicCache, masking_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import (
    CandidateGenerator,
    EosTokenCriteria,
    GenerationMode,
    MaxLengthCriteria,
    logits_process,
)
from transformers.utils import logging


logger = logging.get_logger(__name__)

# The name of a cache in forwards, outputs and masks; transformers 5.24 renamed `past_key_values`.
CACHE_NAME = "past_key_values"
if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters:
    CACHE_NAME = "cache"

# Upstream's processors without a state that judge each row by its own text: they may be called for tokens that are
# rejected later.
STATELESS_PROCESSORS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.LogitNormalization,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
)
UPSTREAM_DEFAULT = 20  # `num_assistant_tokens` where nobody sets it
# Arguments of a target's forward that upstream's loop advances rightly over several tokens.
_SUPPORTED_ARGUMENTS = {CACHE_NAME, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}


# Whose forwards run now, in this thread: other calls of the same target are not read.
_running: ContextVar["DFlashCandidateGenerator | None"] = ContextVar("dflash_candidates", default=None)


class DFlashCandidateGenerator(CandidateGenerator):
    """
    Drafts whole blocks of one row: `target.generate(**inputs, assistant_model=generator)` is what
    `assistant_model=draft` does without the package. Another loop that takes a `CandidateGenerator` runs inside of
    `with generator.reading_features():`, which puts hooks on the target's layers for that time.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        target (`PreTrainedModel`): The target, for its embedding and head.
        max_length (`int`): Longest text in tokens, prompt included.
        block_tokens (`int`, *optional*): Tokens of a block, the last committed token (the anchor) included. Default:
            the trained size.
    """

    requires_model_outputs = True

    def __init__(self, draft, target, max_length: int, block_tokens: int | None = None):
        self.draft = draft
        self.target = target
        self.max_length = max_length
        self.block_tokens = min(block_tokens or draft.config.block_tokens, draft.config.block_tokens)
        self.head = draft.config.head(draft, functools.partial(draft.embed, target))
        # Keys and values of what the drafter has read; its masks know about windows, so that all layers keep all.
        self.cache = DynamicCache()
        self.length = 0  # tokens of the text when the drafter last drafted
        self.features: dict[int, torch.Tensor] = {}  # layer id -> [1, n, H] of the target's last forward

    model_kwargs_overrides: dict = {}  # not `output_hidden_states`: its last entry is taken after the final norm

    @contextlib.contextmanager
    def reading_features(self):
        """Collect the outputs of the target's layers in the forwards that run in this context."""
        layers = decoder_layers(self.target)
        handles = []
        for i in sorted({*self.draft.config.target_layer_ids}):
            if i < 0:
                note = functools.partial(self._note_input, i)
                handles.append(layers[0].register_forward_pre_hook(note, with_kwargs=True))
            else:
                handles.append(layers[i].register_forward_hook(functools.partial(self._note_output, i)))
        token = _running.set(self)
        try:
            yield self
        finally:
            _running.reset(token)
            for handle in handles:
                handle.remove()

    def _note_input(self, layer_id: int, layer, args, kwargs) -> None:
        if _running.get() is self:
            self.features[layer_id] = args[0] if args else kwargs["hidden_states"]

    def _note_output(self, layer_id: int, layer, args, output) -> None:
        if _running.get() is self:
            self.features[layer_id] = output if isinstance(output, torch.Tensor) else output[0]

    def get_candidates(self, input_ids, model_kwargs=None, is_first_iteration: bool = False, **kwargs):
        """
        The text with a block of drafted tokens after it.

        Args:
            input_ids (`torch.LongTensor`): `[1, S]`, the text so far.
            model_kwargs (`dict`): Arguments of the target's forwards; the attention mask tells padding.
            is_first_iteration (`bool`): Whether no forward has run yet: then nothing can be drafted.

        Returns:
            `torch.LongTensor` `[1, S + n]`, and `None`: candidates are compared with the target's own choices.
        """
        room = min(self.block_tokens, self.max_length - input_ids.shape[1]) - 1
        if is_first_iteration or room < 1:
            return input_ids, None
        # 1. The target's features of all tokens that were committed since the last draft, except the anchor.
        if not self.features:
            raise RuntimeError("No features of the target: run the loop in `with generator.reading_features():`.")
        layers = [self.features[i] for i in self.draft.config.target_layer_ids]
        if self.length == 0:  # the prompt's, without padding on the left
            mask = (model_kwargs or {}).get("attention_mask")
            first = 0 if mask is None else int(mask.shape[1] - mask.sum())
            layers = [layer[:, first:] for layer in layers]
        else:
            layers = [layer[:, : input_ids.shape[1] - self.length] for layer in layers]
        self.length = input_ids.shape[1]
        fc = self.draft.fc.weight
        features = torch.cat([layer.to(fc.device, fc.dtype) for layer in layers], dim=-1)  # [1, n, L * H]
        # 2. One pass over the anchor and the masked slots; the block's own keys are dropped again.
        config = self.draft.config
        slots = self.block_tokens - (config.block_tokens - config.block_size)
        anchor = input_ids[:, -1:]
        block = torch.cat([anchor, anchor.new_full((1, slots - 1), config.mask_token_id)], dim=1)
        embeds = self.draft.embed(self.target, block).to(fc.device, fc.dtype)
        start = self.cache.get_seq_length()
        positions = torch.arange(start, start + features.shape[1] + slots, device=fc.device)[None]
        hidden = self.draft(embeds, features, position_ids=positions, past_key_values=self.cache).last_hidden_state
        self.cache.crop(-slots)
        # 3. The tokens of the slots that draft: the anchor's own slot predicts the next token, or nothing.
        first_slot = 0 if config.sample_from_anchor else 1
        hidden = hidden[:, first_slot : first_slot + room]
        logits = self.draft.draft_logits(hidden, self.target.get_output_embeddings())
        before = anchor[:, 0].to(fc.device)
        if config.vocab_size is not None:  # a target with padding rows may sample ids past the drafter's vocabulary
            before = before.clamp(max=config.vocab_size - 1)
        tokens = self.head.decode_block(before, hidden, logits, self.draft.target_ids)
        return torch.cat([input_ids, tokens.to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing to learn: every block has the same size."""


def generate_with_candidates(
    draft,
    target,
    input_ids: torch.LongTensor,
    logits_processor,
    stopping_criteria,
    generation_config,
    synced_gpus: bool = False,
    streamer=None,
    **kwargs,
):
    """
    Generate with `target`, drafted by `draft`; the arguments are those of `GenerationMixin._assisted_decoding`.

    Returns:
        What the target generates alone: the same tokens if greedy, a sample of the same distribution otherwise.
    """
    own = ("inputs_tensor", "tokenizer", "assistant_tokenizer", "assistant_model")
    model_kwargs = {key: value for key, value in kwargs.items() if key not in own}
    arguments = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
    rules = (*logits_processor, *stopping_criteria)
    reasons = _fallback_reasons(draft, target, input_ids, rules, generation_config, synced_gpus, model_kwargs)
    reason = next(reasons, None)
    if reason is not None:
        logger.warning_once(f"Decoding without the drafter: {reason}; the package dflash-hf drafts most of this.")
        return target._sample(*arguments, **model_kwargs)
    asked = generation_config.num_assistant_tokens
    block_tokens = None if asked in (None, UPSTREAM_DEFAULT) else int(asked) + 1
    generator = DFlashCandidateGenerator(draft, target, generation_config.max_length, block_tokens)
    with generator.reading_features():
        return target._assisted_decoding(*arguments, assistant_model=generator, **model_kwargs)


def _fallback_reasons(draft, target, input_ids, rules, generation_config, synced_gpus, model_kwargs) -> Iterator[str]:
    """Why upstream's loop cannot draft this call, or would not give the target's own text; the cheapest come first."""
    name = type(target).__name__
    if len(input_ids) > 1:
        yield f"{len(input_ids)} rows, and this loop has one"
    if not model_kwargs["use_cache"]:
        yield "use_cache=False"
    if synced_gpus:
        yield "the ranks of a sharded target must run the same number of forwards"
    if target.training:
        yield f"{name} is in training mode; call its `eval()`"
    for output in ("attentions", "hidden_states"):
        if generation_config.return_dict_in_generate and getattr(generation_config, f"output_{output}"):
            yield f"{output.replace('_', ' ')} of each token are requested"
    for key, value in model_kwargs.items():
        if key not in _SUPPORTED_ARGUMENTS and value is not None:
            yield f"{key} is passed to the target"
    # Upstream calls processors for tokens that it rejects later, and criteria once for several tokens.
    for rule in rules:
        if type(rule) not in (*STATELESS_PROCESSORS, MaxLengthCriteria, EosTokenCriteria):
            yield f"{type(rule).__name__} may keep a state, or stop inside of a block"
    # Recurrent states cannot be cropped: up to 5.23 another text, in silence.
    cache = model_kwargs.get(CACHE_NAME)
    layers = [] if cache is None else cache.layers
    plain = type(cache) is DynamicCache and not cache.offloading
    if not plain or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers})
        yield f"{name} has a {type(cache).__name__} of {', '.join(kinds) or 'its own kind'}, which cannot be cropped"
    elif cache.get_seq_length() > 0:
        yield "the cache holds tokens that the drafter has not read"
    try:
        decoder_layers(target)
    except ValueError as error:
        yield str(error)
    rope = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            yield f"rotary frequencies of {name} depend on the length of its text"


def check_pair(target, config) -> None:
    """
    Check that a drafter fits a target, as far as shapes show. An embedding that has grown or shrunk by a few rows is
    still that of the same target: its drafter drafts the tokens that both know.

    Args:
        target (`PreTrainedModel`): The target.
        config (`DFlashDraftConfig`): The drafter's configuration.

    Raises:
        `ValueError`: names every mismatch, both values and the remedy.
    """
    name = type(target).__name__
    table = target.get_input_embeddings()
    head = target.get_output_embeddings()
    width = table.weight.shape[1] if hasattr(table, "weight") and hasattr(head, "weight") else None
    if target.config.is_encoder_decoder or width is None or getattr(head, "in_features", width) != width:
        raise ValueError(
            f"{name} cannot have a drafter, which shares the embedding and the head of a decoder-only target, single "
            f"layers of one width; here they are {table} and {head}. Load the target with `AutoModelForCausalLM`, or "
            "call `generate` without `assistant_model`."
        )
    text = target.config.get_text_config()
    rows = len(table.weight)
    depth = text_depth(target.config)
    vocab_size = config.vocab_size or rows
    resized = vocab_size == text.vocab_size or abs(vocab_size - rows) <= vocab_size * 0.1
    mismatches = []
    if config.target_hidden_size != text.hidden_size:
        mismatches.append(f"target_hidden_size={config.target_hidden_size}, not {text.hidden_size}")
    if config.hidden_size != width:
        mismatches.append(f"hidden_size={config.hidden_size}, not {width} as its embedding")
    if not resized:
        mismatches.append(f"vocab_size={vocab_size}, not {rows}")
    if config.mask_token_id >= rows:
        mismatches.append(f"mask_token_id={config.mask_token_id} of {rows} embeddings")
    if max(config.target_layer_ids) >= depth:
        mismatches.append(f"target_layer_ids={config.target_layer_ids} of {depth} layers")
    if config.num_target_layers not in (None, depth):
        mismatches.append(f"num_target_layers={config.num_target_layers}, not {depth}")
    if mismatches:
        raise ValueError(
            f"The drafter does not fit this {name}: {'; '.join(mismatches)}. Load the drafter that was trained for it."
        )


def text_depth(target_config) -> int:
    """Decoder layers of a target's text stack; LongCat counts the two attentions of a layer as `num_hidden_layers`."""
    text = target_config.get_text_config()
    return getattr(text, "num_layers", None) or text.num_hidden_layers


def decoder_layers(target) -> nn.ModuleList:
    """
    The decoder layers of a target's text stack (of a multimodal wrapper too).

    Raises:
        `ValueError`: no list with as many layers as the configuration counts is found.
    """
    depth = text_depth(target.config)
    for stack in (target.get_decoder(), target.base_model):  # ModernBERT's decoder is part of its head
        for module in stack.modules():
            if isinstance(module, nn.ModuleList) and len(module) == depth:
                return module
    raise ValueError(
        f"{type(target).__name__} has no list of {depth} decoder layers, so its features cannot be read; use a "
        "decoder-only transformer as the target."
    )


def check_mode(generation_mode, generation_config) -> None:
    """
    Raises:
        `ValueError`: the arguments of `generate` ask for something that a drafter cannot speed up.
    """
    if generation_config.dola_layers is not None:
        raise ValueError(
            f"dola_layers={generation_config.dola_layers!r} cannot be combined with a drafter: drop it or "
            "`assistant_model`."
        )
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"assistant_model is a DFlash drafter, which decodes greedily or by sampling, but the arguments of "
            f"`generate` ask for {generation_mode.value}: drop `assistant_model`, or `num_beams` and the like."
        )


# ---------------------------------------------------------------------------------------------------------- the hook
# An assistant with `dflash_decode` decodes as it likes; every other assistant, target and generation mode is
# unaffected. Drafters saved by earlier versions bring a hook of their own, which speaks the same protocol:
# `dflash_validate(target, mode, config, arguments)`, then `dflash_decode(target, *arguments)`.


def install_hook() -> None:
    """Wrap methods of `GenerationMixin`. Installing twice is a no-op; [`remove_hook`] undoes it."""
    # Not imported at the top of this file: the package calls this function as soon as that import is done.
    from transformers import GenerationMixin

    for name, wrap in _WRAPPERS.items():
        method = getattr(GenerationMixin, name, None)
        if method is None:  # the drafter can still be loaded, trained and converted
            warnings.warn(f"transformers has no GenerationMixin.{name}: `generate` cannot draft.", stacklevel=2)
        elif not hasattr(method, "_dflash_original"):
            wrapper = wrap(method)
            wrapper._dflash_original = method
            setattr(GenerationMixin, name, wrapper)


def remove_hook() -> None:
    """Put upstream's methods back."""
    from transformers import GenerationMixin

    for name in _WRAPPERS:
        method = getattr(GenerationMixin, name, None)
        if hasattr(method, "_dflash_original"):
            setattr(GenerationMixin, name, method._dflash_original)


def drafter_of(assistant_model):
    """
    The assistant itself if it implements the DFlash protocol, `None` if it is not a drafter. Wrappers of
    `torch.compile`, PEFT and distributed training are taken off.

    Raises:
        `ValueError`: a model that other code has built from a drafter's folder.
        `TypeError`: a name; `generate` takes a model.
    """
    if isinstance(assistant_model, str | os.PathLike):
        raise TypeError(
            f"assistant_model={str(assistant_model)!r} is a name; `generate` takes a model, so load the drafter: "
            f"`AutoModel.from_pretrained({str(assistant_model)!r})`."
        )
    wrapped = _wrapped_by(assistant_model)
    while wrapped is not None:
        assistant_model = wrapped
        wrapped = _wrapped_by(assistant_model)
    if assistant_model is None or callable(getattr(type(assistant_model), "dflash_decode", None)):
        return assistant_model
    config = getattr(assistant_model, "config", None)
    if getattr(config, "dflash_config", None) is not None:
        raise ValueError(
            f"assistant_model is a {type(assistant_model).__name__} that other code built from a DFlash drafter's "
            "folder: load it with `AutoModel.from_pretrained(folder)` after `import dflash_hf`."
        )
    return None


def _wrapped_by(model):
    """The model inside a wrapper; `None` if it is not a wrapper."""
    if callable(getattr(type(model), "get_base_model", None)):  # PEFT, whose adapters are inside the model
        return model.get_base_model()
    inside = getattr(model, "_modules", {})
    return inside.get("_orig_mod", inside.get("module"))


def _drafter_for(generation_config, assistant_model):
    """The drafter that decodes; `None` for upstream's own path, which is left alone if requested by name."""
    if assistant_model is None or isinstance(assistant_model, CandidateGenerator):
        return None
    if getattr(generation_config, "speculation_type", None) == "dflash":
        return None
    return drafter_of(assistant_model)


def _wrap_validation(original):
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if isinstance(generation_mode_kwargs.get("assistant_model"), CandidateGenerator):
            return check_mode(generation_mode, generation_config)
        draft = _drafter_for(generation_config, generation_mode_kwargs.get("assistant_model"))
        if draft is not None:
            return draft.dflash_validate(self, generation_mode, generation_config, generation_mode_kwargs)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _wrap_decoding(original):
    @functools.wraps(original)
    def _assisted_decoding(self, *args, **kwargs):
        draft = _drafter_for(kwargs.get("generation_config"), kwargs.get("assistant_model"))
        if draft is not None:
            kwargs.pop("assistant_model")
            return draft.dflash_decode(self, *args, **kwargs)
        generator = kwargs.get("assistant_model")
        if isinstance(generator, DFlashCandidateGenerator) and _running.get() is not generator:
            with generator.reading_features():
                return original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return _assisted_decoding


def _wrap_candidates(original):
    """Upstream's loop with a candidate generator that is there already."""

    @functools.wraps(original)
    def _get_candidate_generator(self, *args, assistant_model=None, **kwargs):
        if isinstance(assistant_model, CandidateGenerator):
            return assistant_model
        return original(self, *args, assistant_model=assistant_model, **kwargs)

    return _get_candidate_generator


_WRAPPERS = {
    "_validate_generation_mode": _wrap_validation,
    "_assisted_decoding": _wrap_decoding,
    "_get_candidate_generator": _wrap_candidates,
}
