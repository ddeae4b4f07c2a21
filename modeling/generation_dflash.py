"""
Decoding with a DFlash drafter: draft tokens, verify them with one forward of the target, accept, keep.

`decode` is the whole loop. It is what `target.generate(**inputs, assistant_model=draft)` runs.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation import utils as generation_utils
from transformers.utils import logging

from .accept_dflash import Block, Rules, Verdict
from .cache_dflash import cached_columns
from .drafting_dflash import Drafter, padding_of
from .session_dflash import SlotSession
from .target_dflash import CACHE_NAME, FeatureTap, cache_argument, first_positions, support_of, why_hidden
from .text_dflash import Text


logger = logging.get_logger(__name__)

# Arguments that a round sets itself, and arguments that only the prompt has.
_OWN_ARGUMENTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache"}
_OWN_ARGUMENTS |= {"output_attentions", "output_hidden_states", CACHE_NAME, "past_key_values", "cache_params"}
_OF_IMAGES = getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", None)
_PROMPT_ARGUMENTS = {"mm_token_type_ids", "logits_to_keep", "cache_position", *(_OF_IMAGES or ())}


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """
    `GenerateDecoderOnlyOutput` with `acceptance_lengths` (`list[list[int]]`): for each row, the number of tokens that
    each verification committed, bonus token included. A row's first token is excluded: the prompt's forward wrote it.

    If sizes were chosen, not set: `draft_sizes` (`list[int]`), the number of drafted or copied tokens that each round
    verified in every row, and `estimated_speedup` (`float`), the speed of the call relative to the target alone with
    the same weights, packed or not: from acceptance, the costs that sizes were chosen by, and the time for the prompt.

    As long as a returned cache of one row lives, so does what the drafter has read of it, for the call that goes on.
    """

    acceptance_lengths: list[list[int]] | None = None
    draft_sizes: list[int] | None = None
    estimated_speedup: float | None = None


@dataclass(frozen=True)
class Call:
    """
    One call of `generate` with a drafter, as its caller made it.

    Args:
        target (`PreTrainedModel`), draft (`DFlashDraftModel`): Both models, which other calls may be using too.
        prompt (`torch.LongTensor`): `[R, S]`.
        rules (`Rules`): How tokens are chosen.
        config (`GenerationConfig`): The settings.
        model_kwargs (`dict`): Arguments of the target's forward.
    """

    target: Any
    draft: Any
    prompt: torch.LongTensor
    rules: Rules
    config: Any
    model_kwargs: dict

    @property
    def cache(self):
        """The cache that the prompt is read into."""
        return self.model_kwargs.get(cache_argument(self.target))

    @property
    def columns(self) -> int:
        """Columns of the prompt, those that a cache holds included."""
        mask, embeds = map(self.model_kwargs.get, ("attention_mask", "inputs_embeds"))
        new = max(self.prompt.shape[1], 0 if embeds is None else embeds.shape[1])
        # Upstream drops a mask of ones, and notes its length: the ids may be those of the cache, too.
        known = getattr(self.config, "_mask_length", None) if mask is None else mask.shape[1]
        return max(known or cached_columns(self.cache) + new, new)

    @property
    def asked_for(self) -> int | None:
        """`num_assistant_tokens`, if the caller or the target's settings name it."""
        default = 20  # which upstream fills in; without the hook nobody knows who asked for it
        asked = self.config.num_assistant_tokens
        asked = getattr(self.config, "_dflash_num_assistant_tokens", None if asked == default else asked)
        return None if asked is None else max(int(asked), 0)


class Strategy:
    """
    How a call decodes. This is all of it without the package; the package overrides any of these methods, and none
    can change the text.

    Args:
        call (`Call`): The call.
    """

    SESSIONS: tuple[type[SlotSession], ...] = (SlotSession,)  # ways to roll the target back, the simplest first
    draft_tree = None  # makes a tree to try, see `support_of`

    def __init__(self, call: Call):
        self.call = call
        text_config = call.target.config.get_text_config(decoder=True)
        longest = getattr(text_config, "max_position_embeddings", None) or math.inf
        self.positions_left = longest - call.columns  # for new tokens
        trained, asked = call.draft.config.block_tokens, call.asked_for
        self.size = min(call.draft.decoding_config.block_size or trained, trained if asked is None else asked + 1)

    @functools.cached_property
    def support(self):
        """What the target supports."""
        return support_of(self.call.target, self.SESSIONS, self.draft_tree)

    @property
    def largest(self) -> int:
        """Maximum number of tokens of a draft."""
        return self.size

    def drafter(self) -> Drafter:
        """The drafter of this call."""
        return Drafter(self.call.draft, self.call.target, self.call.rules.noise, self.size)

    def session(self, *prompt) -> SlotSession:
        """How the target verifies; the arguments are those of [`SlotSession`], after the target."""
        return self.support.session(self.call.target, *prompt)

    def room(self, text: Text) -> int:
        """Maximum number of tokens to verify: those left, and no position past the end of the target's table."""
        left = self.positions_left - text.longest + 1  # the anchor has one of them
        return int(min(text.left, left)) if left > 0 else text.left

    def draft(self, drafter: Drafter, text: Text):
        """What to verify next: a block, as long as the text may still grow."""
        size = min(self.size, self.room(text))
        return drafter.block(text.last, text.next_draws, size) if size > 1 else Block(text.last[:, None])

    def learn(self, text: Text, verdict: Verdict) -> None:
        """After each round."""

    def summary(self) -> dict:
        """Fields of the output."""
        return {}


def decode(
    target,
    draft,
    input_ids: torch.LongTensor,
    logits_processor,
    stopping_criteria,
    generation_config,
    synced_gpus: bool = False,
    streamer=None,
    inputs_tensor=None,
    tokenizer=None,
    assistant_tokenizer=None,
    **model_kwargs,
):
    """
    Generate with `target`, drafted by `draft`; the arguments are those of `GenerationMixin._assisted_decoding`.

    The output is what `target` generates alone: the same tokens if greedy, the same sample for the same seed.

    Returns:
        `torch.LongTensor` `[R, S]` or [`DFlashGenerateOutput`].
    """
    if not isinstance(draft.decoding_config, draft.decoding_config_class):
        raise ValueError(
            f"decoding_config={draft.decoding_config!r} must be a {draft.decoding_config_class.__name__}."
        )
    draft.decoding_config.check(draft.config.block_tokens)
    rules = Rules(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    call = Call(target, draft, input_ids, rules, generation_config, model_kwargs)
    strategy = draft.strategy(call)
    if (reason := why_plain(call, strategy, synced_gpus)) is not None:
        plain = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        output = target._sample(*plain, **model_kwargs)
        logger.warning_once(f"Decoding without the drafter: {reason}.")  # below a text that is streamed
        if isinstance(output, torch.Tensor):
            return output
        return DFlashGenerateOutput(**output, acceptance_lengths=[[] for _ in input_ids])

    # 1. Read the prompt: the target as usual, the drafter its features.
    with prefilled(call, strategy) as (drafter, session, text):
        while not text.done:
            with session.without_gradients():
                drafted = strategy.draft(drafter, text)  # 2. draft: a block, or whatever the strategy prefers
                logits, features = session.verify(drafted)  # 3. verify: one forward of the target
            verdict = text.accept(drafted, logits)  # 4. accept what it agrees with, plus one token of its own
            session.keep(verdict)  # 5. keep that; the rest will be overwritten
            drafter.read(features, verdict)  # 6. read the features of what was kept
            strategy.learn(text, verdict)

    if streamer is not None:
        streamer.end()
    chosen = strategy.summary()
    if not generation_config.return_dict_in_generate:
        return text.sequences
    listed: dict[str, Any] = {name: tuple(outputs) for name, outputs in text.listed.items()}
    return DFlashGenerateOutput(
        sequences=text.sequences,
        acceptance_lengths=text.rounds,
        **{CACHE_NAME: session.source},
        **listed,
        **chosen,
    )


def why_plain(call: Call, strategy: Strategy, synced_gpus: bool = False) -> str | None:
    """Why a call decodes without the drafter, which is lossless by definition; `None` if it drafts."""
    return next(filter(None, _reasons(call, strategy, synced_gpus)), None)


def _reasons(call: Call, strategy: Strategy, synced_gpus: bool) -> Iterator[str | None]:
    target, name, kwargs = call.target, type(call.target).__name__, call.model_kwargs
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    # 1. What is asked for.
    if call.prompt.device.type != target.device.type != "meta":  # whose weights are offloaded
        yield f"input_ids are on {call.prompt.device}, but {name} is on {target.device}"
    if torch.is_grad_enabled():  # by a caller who goes around the decorator of `generate`
        yield "gradients are recorded"
    if not kwargs["use_cache"]:
        yield "use_cache=False"
    if synced_gpus:
        yield "the ranks of a sharded target must run the same number of forwards"
    if positions is not None and positions.shape[-1] == 0:
        yield "the prompt is empty"
    if mask is not None and (mask.dim() != 2 or bool((mask.long().diff(dim=1) < 0).any())):
        yield "attention_mask leaves out tokens that are not padding on the left"
    if _OF_IMAGES is None and (names := sorted(extra_arguments(call))):
        yield f"transformers no longer says whether each forward needs {', '.join(names)}, or the prompt's alone"
    for asked in ("attentions", "hidden_states"):
        if call.config.return_dict_in_generate and getattr(call.config, f"output_{asked}"):
            yield f"{asked.replace('_', ' ')} of each token are requested"
    if len(call.prompt) > 1:
        yield call.rules.why_in_step()
    # 2. The target as it is now.
    if target.training:
        yield f"{name} is in training mode; call its `eval()`"
    parts = call.draft.modules()
    if any(one.training and (getattr(one, "attention_dropout", 0) or getattr(one, "p", 0)) for one in parts):
        yield "the dropout of the drafter is in training mode, and draws random numbers; call `eval()`"
    yield why_hidden(target)
    yield strategy.support.why_plain(name, call.draft.config.target_layer_ids, mask)
    # 3. Its cache, and the length of the text.
    past = cached_columns(call.cache)
    if past and mask is not None and mask.shape[1] <= past:
        yield f"the cache already holds all {mask.shape[1]} columns of attention_mask"
    yield _cache_reason(call, strategy.support.session)
    yield _rope_reason(call, past)


def _cache_reason(call: Call, session) -> str | None:
    """Why the tokens of a cache cannot be moved into slots, if so: it is static, offloaded, or quantised."""
    cache = call.cache
    if session.CACHE.can_adopt(cache) and not cache.offloading:
        return None
    kind = " of ".join(type(one).__name__ for one in (cache, *cache.layers[:1]))
    return (
        f"the cache is a {kind}{', offloaded to the CPU' * cache.offloading}, whose tokens cannot be moved into slots,"
        " unlike those of a `DynamicCache` that is not offloaded"
    )


def _rope_reason(call: Call, past: int) -> str | None:
    """Why rotary frequencies that depend on the length of the text rule out drafting, if they do."""
    text = call.target.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    layers = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    kinds = {parameters.get("rope_type"): parameters for parameters in layers}
    if not kinds.keys() & {"longrope", "dynamic"}:
        return None
    positions, most = call.model_kwargs.get("position_ids"), call.rules.max_new
    length = call.columns if positions is None else int(positions.max()) + 1
    if "dynamic" in kinds and length + most >= text.max_position_embeddings:
        return (
            f"the text may reach {text.max_position_embeddings} tokens, beyond which its rotary frequencies depend on "
            "its length"
        )
    if "longrope" in kinds:
        threshold = kinds["longrope"]["original_max_position_embeddings"]
        if (past or length) <= threshold < length + most:
            return f"the text may cross {threshold} tokens, where its rotary frequencies change"
    return None


@contextlib.contextmanager
def prefilled(call: Call, strategy: Strategy):
    """
    Run the prompt through the target as usual; its features become the drafter's context. Then its tokens are moved
    into slots. On exit, the caller's cache is written back.

    Yields:
        [`Drafter`], [`SlotSession`] and [`Text`], which has its first token.
    """
    target, draft, model_kwargs = call.target, call.draft, call.model_kwargs
    keep_cache = call.config.return_dict_in_generate or getattr(call.cache, "_is_user_defined", False)
    if "logits_to_keep" in model_kwargs and getattr(target.config.get_text_config(), "num_kv_shared_layers", False):
        # An index, not a count: with a count, Gemma 4 drops all other tokens before the layers that share keys.
        model_kwargs["logits_to_keep"] = torch.tensor([-1])
    drafter, text = strategy.drafter(), Text(call.prompt, call.rules)
    with FeatureTap(target, draft.config.target_layer_ids, consume=drafter.context.absorb) as tap:
        # 1. The prompt, read by both.
        past, padding = cached_columns(call.cache), padding_of(model_kwargs.get("attention_mask"), len(call.prompt))
        with tap.running():
            outputs = target._prefill(call.prompt, call.config, model_kwargs)
        tap.consume = None
        cache = outputs.get(cache_argument(target), call.cache)  # Phi-3 starts a new one if a long prompt needs it
        columns = _filled_columns(target, cache, past, drafter.context.absorbed)
        logits = outputs.logits[:, -1:].to(call.prompt.device, copy=True)
        del outputs  # a copy of the logits, so that the rest is freed
        # 2. The caches of both models in slots.
        offset = first_positions(tap.positions, columns, padding, call.prompt.device)
        last = columns + call.rules.max_new - 2  # the last token of the text is never read
        session = strategy.session(cache, padding, offset, extra_arguments(call), tap, last, strategy.largest)
        kept = None
        with contextlib.ExitStack() as on_exit:  # the last first, even after an interruption
            on_exit.callback(lambda: drafter.context.close(kept))
            on_exit.callback(session.clear)
            if call.rules.noise is not None:
                on_exit.callback(lambda: call.rules.noise.close(text.longest))
            if keep_cache:
                on_exit.callback(lambda: session.close(text.interrupted))
            drafter.context.open(padding, columns, offset, cache if past else None)
            text.begin(logits)
            del logits
            yield drafter, session, text
            kept = session.source if keep_cache else None  # whose context the next call continues


def extra_arguments(call: Call) -> dict:
    """Arguments of `generate` that are passed to every forward of the target, such as adapter names."""
    accepted = inspect.signature(call.target.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    return {
        key: value[:, -1:] if key == "token_type_ids" and value is not None else value
        for key, value in call.model_kwargs.items()
        if key not in _OWN_ARGUMENTS | _PROMPT_ARGUMENTS and (takes_any or key in accepted)
    }


def _filled_columns(target, cache, past: int, absorbed: int) -> int:
    """
    Columns that a cache holds after a prompt of `absorbed` columns: these plus the `past` ones that it held before,
    unless the target started a new cache.

    Raises:
        `ValueError`: it holds another number of columns.
    """
    columns = cached_columns(cache) or absorbed
    if columns not in (absorbed, past + absorbed):
        raise ValueError(
            f"The cache of {type(target).__name__} holds {columns} tokens after {past} earlier ones and a prompt of "
            f"{absorbed}, so a drafter cannot tell its tokens apart: call `generate` without `assistant_model`."
        )
    return columns
