"""
A drafter as a `CandidateGenerator`, and generation with it.

The loop is upstream's own, `GenerationMixin._assisted_decoding`: it asks for candidates, verifies them with one
forward of the target and keeps those that the target would have chosen. This is correct for one row, attention caches
that can be cropped, and transformers' own stateless processors and criteria. Any other call decodes without the
drafter, and logs why.

The package `dflash-hf` has a loop of its own, `dflash_hf.decoding`, which drafts nearly all of these calls, while this
file must run without the package. So two things exist twice, and a change of one may concern the other: what reads
features (here `reading_features`, there `FeatureTap`), and the reasons not to draft (here `_fallback_reasons`, there
`decoding/fallback.py`, with fewer of them). Both loops give the target's own text.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, masking_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import (
    CandidateGenerator,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    logits_process,
)
from transformers.utils import logging

from .target_dflash import decoder_layers, feature_hook, length_dependent_rope


logger = logging.get_logger(__name__)

# The name of a cache in forwards, outputs and masks; transformers 5.24 renamed `past_key_values`.
CACHE_NAME = "past_key_values"
if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters:
    CACHE_NAME = "cache"

# Upstream's processors that read the scores of one position, and nothing else: one call serves all rows and positions.
POSITIONWISE_PROCESSORS = (
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
)
# Upstream's processors that keep no state and treat each row by its own sequence: calling them for a token that is
# rejected later has no effect.
STATELESS_PROCESSORS = (
    *POSITIONWISE_PROCESSORS,
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
UPSTREAM_ASSISTANT_TOKENS = 20  # upstream's default of `num_assistant_tokens`
# Arguments of a target's forward that upstream's loop updates correctly when it commits several tokens at once.
_SUPPORTED_ARGUMENTS = {CACHE_NAME, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}

# The generator that reads features in this thread or task. Calls of the same target may run in others.
_current_generator: ContextVar["DFlashCandidateGenerator | None"] = ContextVar("dflash_candidates", default=None)


class DFlashCandidateGenerator(CandidateGenerator):
    """
    Drafts whole blocks of one row. `target.generate(**inputs, assistant_model=generator)` decodes with it. Any other
    loop that takes a `CandidateGenerator` must run in `with generator.reading_features():`, which puts hooks on the
    target's layers for that time.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        target (`PreTrainedModel`): The target, whose embedding and LM head the drafter shares.
        max_length (`int`): Maximum length of the sequence in tokens, prompt included.
        block_tokens (`int`, *optional*): Tokens of a block, the last committed token (the anchor) included. Default
            and maximum: `draft.config.max_block_tokens`.
    """

    # Both are read by upstream's loop. A generator that requires outputs runs after the prompt's forward.
    requires_model_outputs = True
    # Not `output_hidden_states`: its last entry is taken after the final norm.
    model_kwargs_overrides: dict = {}

    def __init__(
        self, draft: PreTrainedModel, target: PreTrainedModel, max_length: int, block_tokens: int | None = None
    ):
        self.draft = draft
        self.target = target
        self.max_length = max_length
        self.block_tokens = min(block_tokens or draft.config.max_block_tokens, draft.config.max_block_tokens)
        self.token_head = draft.config.token_head_class(draft, functools.partial(draft.embed, target))
        # The drafter's keys and values of the tokens that it has read. No layer drops any: the drafter's own masks
        # apply its windows.
        self.cache = DynamicCache()
        # Tokens of the sequence at the last draft; 0: the drafter has read nothing.
        self.length_at_last_draft = 0
        # Layer id -> output [1, n, H] of the target's first forward since the last draft, its verification. Later
        # forwards, such as those of a streamer that calls the target itself, are ignored.
        self.features: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def reading_features(self):
        """Read the outputs of the target's layers in the forwards that run in this context."""
        layers = decoder_layers(self.target)
        handles = []
        for layer_id in sorted({*self.draft.config.target_layer_ids}):
            if layer_id < 0:
                hook = functools.partial(self._read_input, layer_id)
                handles.append(layers[0].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                hook = functools.partial(self._read_output, layer_id)
                handles.append(layers[layer_id].register_forward_hook(hook))
        token = _current_generator.set(self)
        try:
            yield self
        finally:
            _current_generator.reset(token)
            for handle in handles:
                handle.remove()

    @property
    def is_reading(self) -> bool:
        """Whether forwards of the target in this thread or task are read."""
        return _current_generator.get() is self

    @feature_hook
    def _read_input(self, layer_id: int, layer, args, kwargs) -> None:
        if self.is_reading:
            self.features.setdefault(layer_id, args[0] if args else kwargs["hidden_states"])

    @feature_hook
    def _read_output(self, layer_id: int, layer, args, output) -> None:
        if self.is_reading:
            self.features.setdefault(layer_id, output if isinstance(output, torch.Tensor) else output[0])

    def get_candidates(self, input_ids, model_kwargs=None, is_first_iteration: bool = False, **kwargs):
        """
        The sequence with a block of drafted tokens after it. Called by upstream's loop before each verification.

        Args:
            input_ids (`torch.LongTensor`): `[1, S]`, the sequence so far.
            model_kwargs (`dict`): Arguments of the target's forwards, of which `attention_mask` is read for padding.
            is_first_iteration (`bool`): Whether no forward has run yet, so that nothing can be drafted.

        Returns:
            `torch.LongTensor` `[1, S + n]`, and `None` instead of logits: upstream then compares the candidates with
            the target's own choices.
        """
        if is_first_iteration:  # the generator may have drafted another sequence before
            self.cache = DynamicCache()
            self.length_at_last_draft = 0
            self.features.clear()
            return input_ids, None
        num_drafted = min(self.block_tokens, self.max_length - input_ids.shape[1]) - 1
        if num_drafted < 1:
            return input_ids, None
        # 1. The features of all tokens that were committed since the last draft, except the anchor.
        features = self._take_features(input_ids, (model_kwargs or {}).get("attention_mask"))
        # 2. One pass over the anchor and the mask tokens. The block's own keys are dropped again.
        anchors = input_ids[:, -1]
        embeds = self.draft.embed_block(self.target, anchors, self.block_tokens).to(features)  # [1, B, H]
        num_slots = embeds.shape[1]
        past_length = self.cache.get_seq_length()
        new_length = features.shape[1] + num_slots
        positions = torch.arange(past_length, past_length + new_length, device=features.device)[None]
        output = self.draft(embeds, features, position_ids=positions, past_key_values=self.cache)
        self.cache.crop(-num_slots)
        # 3. The tokens of the slots that draft, from left to right.
        hidden = self.draft.states_of_drafting_slots(output.last_hidden_state)[:, :num_drafted]
        logits = self.draft.draft_logits(hidden, self.target.get_output_embeddings())
        previous_ids = self.draft.clamp_to_vocabulary(anchors.to(features.device))
        tokens = self.token_head.decode_block(previous_ids, hidden, logits, self.draft.target_ids)
        return torch.cat([input_ids, tokens.to(input_ids.device)], dim=1), None

    def _take_features(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """`[1, n, L * H]`, features of the tokens that the drafter has not seen, before the anchor."""
        if not self.features:
            raise RuntimeError("No features of the target: run the loop in `with generator.reading_features():`.")
        layers = [self.features[layer_id] for layer_id in self.draft.config.target_layer_ids]
        self.features.clear()
        if self.length_at_last_draft == 0:
            # The features are those of the prompt; padding on its left is left out.
            padding = 0 if attention_mask is None else int(attention_mask.shape[1] - attention_mask.sum())
            layers = [layer[:, padding:] for layer in layers]
        else:
            # The features are those of the last draft; the last anchor and the accepted tokens come first.
            num_committed = input_ids.shape[1] - self.length_at_last_draft
            layers = [layer[:, :num_committed] for layer in layers]
        self.length_at_last_draft = input_ids.shape[1]
        device = self.draft.fc.weight.device
        dtype = self.draft.dtype  # not that of a weight, which may hold a quantiser's codes
        return torch.cat([layer.to(device, dtype) for layer in layers], dim=-1)

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing to adapt: all blocks have the same size."""


def generate_with_candidates(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    **kwargs,
):
    """
    Generate with `target`, drafted by `draft`. The other arguments are those of `GenerationMixin._assisted_decoding`;
    `kwargs` are the target's own arguments, and those that only upstream's assistants read.

    Returns:
        What the target generates without a drafter: the same tokens if greedy, a sample of the same distribution
        otherwise.
    """
    assistant_arguments = ("inputs_tensor", "tokenizer", "assistant_tokenizer", "assistant_model")
    model_kwargs = {key: value for key, value in kwargs.items() if key not in assistant_arguments}
    arguments = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
    processors_and_criteria = (*logits_processor, *stopping_criteria)
    reasons = _fallback_reasons(
        target, input_ids, processors_and_criteria, generation_config, synced_gpus, model_kwargs
    )
    reason = next(reasons, None)
    if reason is not None:
        logger.warning_once(f"Decoding without the drafter: {reason}; the package dflash-hf drafts most of this.")
        return target._sample(*arguments, **model_kwargs)
    # A caller's own 20 cannot be told from upstream's default here, and so means a whole block, too.
    requested = generation_config.num_assistant_tokens
    block_tokens = None
    if requested not in (None, UPSTREAM_ASSISTANT_TOKENS):
        block_tokens = 1 + int(requested)  # the anchor and the drafted tokens
    generator = DFlashCandidateGenerator(draft, target, generation_config.max_length, block_tokens)
    with generator.reading_features():
        return target._assisted_decoding(*arguments, assistant_model=generator, **model_kwargs)


def _fallback_reasons(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    processors_and_criteria: tuple,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    model_kwargs: dict,
) -> Iterator[str]:
    """
    Why upstream's loop cannot draft this call, or would not give the target's own text. Each reason is sufficient, and
    the first is logged: what a caller can change most easily comes first.

    Args:
        processors_and_criteria (`tuple`): Logits processors and stopping criteria of the call.
        model_kwargs (`dict`): Arguments of the target's forward, its cache included.
        The others are those of `generate_with_candidates`.
    """
    name = type(target).__name__
    # 1. The call.
    if len(input_ids) > 1:
        yield f"{len(input_ids)} rows; this loop decodes one"
    if not model_kwargs.get("use_cache", True):
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
    # Upstream's loop calls processors for tokens that it rejects later, and criteria once for several tokens.
    for processor_or_criterion in processors_and_criteria:
        if type(processor_or_criterion) not in (*STATELESS_PROCESSORS, MaxLengthCriteria, EosTokenCriteria):
            yield f"{type(processor_or_criterion).__name__} may keep state, or may stop in the middle of a block"
    # 2. The cache. Recurrent states cannot be cropped: up to transformers 5.23 that silently changed the text.
    cache = model_kwargs.get(CACHE_NAME)
    layers = [] if cache is None else cache.layers
    is_plain = type(cache) is DynamicCache and not cache.offloading
    if not is_plain or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        layer_kinds = f"of {kinds}" if kinds else "without layers"
        yield f"{name} has a {type(cache).__name__} {layer_kinds}, which cannot be cropped"
    elif cache.get_seq_length() > 0:
        yield "the cache holds tokens that the drafter has not read"
    # 3. The target.
    try:
        decoder_layers(target)
    except ValueError as error:
        yield str(error)
    if length_dependent_rope(target.config):
        yield f"rotary frequencies of {name} depend on the length of its text"
