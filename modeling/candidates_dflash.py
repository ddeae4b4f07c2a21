"""
A drafter as a `CandidateGenerator`, and generation with it.

The loop is upstream's own, `GenerationMixin._assisted_decoding`: it asks for candidates, verifies them with one
forward of the target and keeps those that the target would have chosen. That is right for one row, plain attention
caches, and transformers' own stateless processors and criteria; everything else decodes without the drafter, with one
line that says why. The package `dflash-hf` replaces this loop by an engine that drafts all of it.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from transformers import DynamicCache, masking_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import (
    CandidateGenerator,
    EosTokenCriteria,
    MaxLengthCriteria,
    logits_process,
)
from transformers.utils import logging

from .target_dflash import decoder_layers


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
        self.block_tokens = min(block_tokens or draft.config.max_block_tokens, draft.config.max_block_tokens)
        self.head = draft.config.token_head_class(draft, functools.partial(draft.embed, target))
        # Keys and values of what the drafter has read; its masks know about windows, so that all layers keep all.
        self.cache = DynamicCache()
        self.length = 0  # tokens of the text when the drafter last drafted
        # Layer id -> [1, n, H] of the target's first forward after a draft, which is the verification. Later forwards,
        # as of a streamer that calls the target itself, are not read.
        self.features: dict[int, torch.Tensor] = {}

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

    @property
    def is_reading(self) -> bool:
        """Whether the target's forwards of this thread are collected."""
        return _running.get() is self

    def _note_input(self, layer_id: int, layer, args, kwargs) -> None:
        if self.is_reading:
            self.features.setdefault(layer_id, args[0] if args else kwargs["hidden_states"])

    def _note_output(self, layer_id: int, layer, args, output) -> None:
        if self.is_reading:
            self.features.setdefault(layer_id, output if isinstance(output, torch.Tensor) else output[0])

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
        if is_first_iteration:  # also of a generator that has drafted another text
            self.cache = DynamicCache()
            self.length = 0
            self.features.clear()
            return input_ids, None
        room = min(self.block_tokens, self.max_length - input_ids.shape[1]) - 1
        if room < 1:
            return input_ids, None
        # 1. The target's features of all tokens that were committed since the last draft, except the anchor.
        if not self.features:
            raise RuntimeError("No features of the target: run the loop in `with generator.reading_features():`.")
        layers = [self.features[i] for i in self.draft.config.target_layer_ids]
        self.features.clear()
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
        slots = self.block_tokens - (config.max_block_tokens - config.block_size)
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
