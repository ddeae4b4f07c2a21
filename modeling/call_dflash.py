"""The settings of one call of `generate`, determined once, before the prompt is read."""

import math

import torch
from transformers.generation import MaxLengthCriteria, MaxTimeCriteria
from transformers.utils import logging

from .accept_dflash import listed_outputs, pace_of
from .cache_dflash import VIEW_STEP, cached_columns
from .compile_dflash import failed_on
from .decoding_config_dflash import DFlashDecodingConfig
from .noise_dflash import Foresight, Noise, foreseeable, generator_of
from .probe_dflash import TargetFacts, facts_of


logger = logging.get_logger(__name__)

# Settings of other kinds of assistants, and their values if the user does not set them.
_OTHER_ASSISTANTS = {
    "assistant_lookbehind": 10,
    "assistant_ensemble_weight": None,
    "assistant_early_exit": None,
    "prompt_lookup_num_tokens": None,
    "use_mtp": None,
}
_WORTH_PACKING = 32  # new tokens: looking for changed weights takes about as long as a forward


class Call:
    """
    One call of `generate` with a drafter: its inputs and settings, determined before the prompt is read.

    Args:
        target (`PreTrainedModel`), draft (`DFlashDraftModel`): Both models, which other calls may be using too.
        input_ids, model_kwargs, synced_gpus, streamer: As in `GenerationMixin._sample`.
        rules (`tuple`): Its `logits_processor`, `stopping_criteria` and `generation_config`.

    Attributes:
        facts (`TargetFacts`, *optional*): What the target supports.
        plain_reason (`str`, *optional*): Why this call decodes without the drafter, if it does.
        rows (`int`): Rows of the prompt.
        past (`int`): Columns of the prompt that a cache already holds, padding included.
        max_new (`int`): Maximum number of tokens to generate.
        temperature (`float`): Temperature at which drafts are drawn; 0 takes the likeliest tokens.
        pace (`str`): How rows advance, see [`pace_of`].
        noise ([`Noise`], *optional*): Of the samples of this call, if it can be drawn before it is needed.
        foresight ([`Foresight`], *optional*): The same for drafts, if they are to allow for it.
        generators (`list[torch.Generator]`, *optional*): One per sampled row.
        packs (`bool`): Whether linear layers multiply by packed weights, where that is possible.
        compile (`str` or `bool`): As in [`DFlashDecodingConfig`]; `False` if rounds cannot be compiled.
        look_ahead (`int`): Rounds that are started before the host reads what they committed.
        of_one_shape (`bool`): Whether all rounds of a plan have one shape, the last rounds too.
        lists_hidden_states (`bool`): Whether the caller requests the hidden states of each token.

    Raises:
        `ValueError`: a setting of the drafter cannot be applied.
    """

    facts: TargetFacts | None

    def __init__(self, target, draft, input_ids, rules: tuple, model_kwargs, synced_gpus=False, streamer=None):
        logits_processor, stopping_criteria, generation_config = rules
        self.target, self.draft, self.rows = target, draft, len(input_ids)
        self.input_ids, self.generation_config, self.model_kwargs = input_ids, generation_config, model_kwargs
        config = draft.decoding_config
        if not isinstance(config, DFlashDecodingConfig):
            raise ValueError(f"decoding_config={config!r} must be a DFlashDecodingConfig, whose fields have defaults.")
        config.check(draft.config.block_tokens)
        self.generators = config.generators if generation_config.do_sample else None
        if self.generators is not None:
            config.check_generators(len(input_ids), input_ids.device)
        # A criterion of the caller replaces the configuration's limit.
        limits = [criterion.max_length for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria]
        self.max_new = max(int(min(limits, default=generation_config.max_length)) - input_ids.shape[1], 1)
        self.lists_hidden_states = "hidden_states" in listed_outputs(generation_config)

        reason = _reason_before_probing(generation_config, model_kwargs, synced_gpus)
        self.facts = facts = None if reason else facts_of(target)
        reason = reason or facts.why_plain(draft.config.target_layer_ids, model_kwargs.get("attention_mask"))
        self.past = 0 if reason else cached_columns(model_kwargs.get(facts.cache_name))
        self.plain_reason = reason = reason or self._cache_reason() or self._length_reason() or self._rope_reason()
        if reason is not None and self.generators is not None:
            raise ValueError(f"decoding_config.generators cannot be used: {reason}; set it to None to decode plainly.")
        self.packs = config.packed and self.max_new >= _WORTH_PACKING
        free = reason is None and facts.session_class.rollback_is_free
        compilable = free and not self.lists_hidden_states and self.generators is None and self.facts.reach == math.inf
        self.compile = config.compile if compilable and config.compile not in failed_on(target, draft) else False
        # Where the host reads each round anyway, rounds do not run ahead of it.
        self.pace, foreseen = pace_of(self.rows, logits_processor, stopping_criteria, generation_config, streamer)
        if streamer is not None and not free and self.pace == "at once":
            self.pace = "row by row"  # a recurrent state cannot drop what a streamer that raises never got
        timed = any(isinstance(criterion, MaxTimeCriteria) for criterion in stopping_criteria)
        ahead = free and self.pace == "at once" and not timed and streamer is None
        self.look_ahead = config.rounds_ahead(input_ids.device) if ahead else 1
        # Whether the draws of a text are those that it takes without a drafter.
        alone = self.generators is not None or self.rows == 1
        follows = not config.draft_temperature and not self.compile and (alone or self.look_ahead == 1)
        temperature = 1.0 if generation_config.temperature is None else float(generation_config.temperature)
        drawn = temperature if draft.config.head.samples else 0.0
        drawn = drawn if config.draft_temperature is None else float(config.draft_temperature)
        self.temperature = 0.0 if follows or not generation_config.do_sample else drawn
        self.noise = self.foresight = None
        if generation_config.do_sample and reason is None:
            if follows and foreseen and foreseeable(input_ids.device):
                self.noise = Noise(self.generators or [generator_of(input_ids.device)], self.rows, self.max_new)
            elif alone and self.pace == "at once":
                self.pace = "row by row"  # token by token, so that a seed gives the same text as without a drafter
            self.look_ahead = 1 if alone or self.noise else self.look_ahead
        self.of_one_shape = bool(self.compile) or self.look_ahead > 1
        if self.noise is not None and config.draft_temperature is None:
            vocab_size = target.config.get_text_config(decoder=True).vocab_size
            self.foresight = Foresight(self.noise, vocab_size, draft.target_ids, temperature)

    def _cache_reason(self) -> str | None:
        """Why the cache of this call, made or passed by the caller, rules out drafting, if it does."""
        cache, mask = self.model_kwargs[self.facts.cache_name], self.model_kwargs.get("attention_mask")
        if cache.offloading or not self.facts.session_class.takes(cache):
            kind = " of ".join(type(one).__name__ for one in (cache, *cache.layers[:1]))
            return (
                f"the cache is a {kind}{', offloaded to the CPU' * cache.offloading}, whose tokens cannot be moved "
                "into slots, unlike those of a `DynamicCache` that is not offloaded"
            )
        if self.past and mask is not None and mask.shape[1] <= self.past:
            return f"past_key_values already holds all {mask.shape[1]} columns of attention_mask"
        return None

    @property
    def _columns(self) -> int:
        """Columns of the prompt, those that a cache holds included."""
        mask, embeds = map(self.model_kwargs.get, ("attention_mask", "inputs_embeds"))
        new = max(self.input_ids.shape[1], 0 if embeds is None else embeds.shape[1])
        return max(self.past + new if mask is None else mask.shape[1], new)

    def _length_reason(self) -> str | None:
        """Why the length of the text rules out drafting, if it does; see `TargetFacts.reach`."""
        slots = self._columns + self.max_new + self.draft.config.block_size + VIEW_STEP
        if slots < self.facts.reach:
            return None
        return (
            f"{self.facts.name} reads the length of its cache, which in slots is longer than the text: drafts are "
            f"right up to {self.facts.reach} slots, and this text may need {slots}"
        )

    def _rope_reason(self) -> str | None:
        """Why rotary frequencies that depend on the length of the text rule out drafting, if they do."""
        text = self.target.config.get_text_config(decoder=True)
        rope = getattr(text, "rope_parameters", None) or {}
        layers = [rope, *(value for value in rope.values() if isinstance(value, dict))]
        kinds = {parameters.get("rope_type"): parameters for parameters in layers}
        if not kinds.keys() & {"longrope", "dynamic"}:
            return None
        positions = self.model_kwargs.get("position_ids")
        length = self._columns if positions is None else int(positions.max()) + 1
        if "dynamic" in kinds and length + self.max_new >= text.max_position_embeddings:
            return (
                f"the text may reach {text.max_position_embeddings} tokens, beyond which its rotary frequencies "
                "depend on its length"
            )
        if "longrope" in kinds:
            threshold = kinds["longrope"]["original_max_position_embeddings"]
            if (self.past or length) <= threshold < length + self.max_new:
                return f"the text may cross {threshold} tokens, where its rotary frequencies change"
        return None


def warn_of_ignored_settings(generation_config) -> None:
    """Warn once about settings that only other kinds of assistants support."""
    ignored = {name: getattr(generation_config, name, None) for name in _OTHER_ASSISTANTS}
    ignored = {k: v for k, v in ignored.items() if v is not None and v != _OTHER_ASSISTANTS[k]}
    if ignored:
        settings = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
        logger.warning_once(f"A DFlash drafter ignores {settings}; see `draft.decoding_config` for its own settings.")


def _reason_before_probing(generation_config, model_kwargs, synced_gpus: bool) -> str | None:
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if torch.is_grad_enabled():  # by a caller who goes around the decorator of `generate`
        return "gradients are recorded"
    if not model_kwargs["use_cache"]:
        return "use_cache=False"
    if synced_gpus:
        return "the ranks of a sharded target must run the same number of forwards"
    if positions is not None and positions.shape[-1] == 0:
        return "the prompt is empty"
    if mask is not None and (mask.dim() != 2 or bool((mask.long().diff(dim=1) < 0).any())):
        return "attention_mask leaves out tokens that are not padding on the left"
    if generation_config.return_dict_in_generate and generation_config.output_attentions:
        return "attentions of each token are requested"
    return None
