"""Prefill: the target reads the prompt as usual, the drafter its features; then everything rounds need is set up."""

import inspect
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from .cache_dflash import cached_columns
from .call_dflash import Call
from .compile_dflash import slots_of
from .drafting_dflash import DFlashCandidateGenerator, first_positions, padding_of
from .isolation_dflash import isolated
from .packing_dflash import multiply_packed, packable
from .sessions_dflash import SlotSession
from .target_dflash import CACHE_NAME, FeatureTap, decoder_layers
from .text_dflash import Continuation


# Arguments that a round sets itself, and arguments that only the prompt has.
_OWN_ARGUMENTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache"}
_OWN_ARGUMENTS |= {"output_attentions", "output_hidden_states", CACHE_NAME, "past_key_values", "cache_params"}
_PROMPT_ARGUMENTS = {"mm_token_type_ids", "logits_to_keep", "cache_position"}
_UNBOUNDED = 2**40  # more positions than any text has


@dataclass
class Pair:
    """The parts that one call works with: drafter, session of the target, tap for its features, text."""

    drafter: DFlashCandidateGenerator
    session: SlotSession
    tap: FeatureTap
    continuation: Continuation
    columns: int  # of the prompt, padding included
    cache: Cache | None = None  # returned to the caller at the end
    setup: float = 0.0  # seconds before the prompt was read, which the target alone does not need
    reading: float = 0.0  # seconds for the prompt

    def speedup(self, of_rounds: float, seconds: float) -> float:
        """Of the whole call over the target alone, whose rounds took `seconds` and are faster than its by a factor."""
        return (self.reading + of_rounds * seconds) / (self.setup + self.reading + seconds)

    def reserve(self, size: int) -> None:
        """Make room in both caches for a round that verifies `size` tokens, in every unfinished row."""
        used = self.columns + self.continuation.longest_possible
        self.drafter.cache.reserve(used + max(size, self.drafter.config.block_tokens))
        self.session.cache.reserve(used + size)


@contextmanager
def opened_pair(call: Call, continuation: Continuation):
    """
    Prefill and set up everything that rounds need; on exit, the caller's cache is written back.

    Yields:
        [`Pair`], and the indices of the first anchors `[R]`.
    """
    cache = call.model_kwargs[call.facts.cache_name]
    keep_cache = call.generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    begun = continuation.seconds
    with opened_models(call) as (target, drafter, tap, pools):
        ready = continuation.seconds
        session, columns, logits, hidden_states = prefilled_session(call, target, drafter, pools)
        tap.consume = None
        pair = Pair(drafter, session, tap, continuation, columns)
        start = torch.tensor([columns - pad for pad in session.padding], device=drafter.device)
        try:
            continuation.commit(continuation.judge(None, logits, hidden_states))
            del logits, hidden_states
            pair.setup, pair.reading = ready - begun, continuation.seconds - ready
            yield pair, start
        finally:
            if keep_cache:  # even after an interruption
                before, accepted = continuation.cached, continuation.interrupted
                if accepted is not None:
                    session.commit(start + before, accepted)
                    before += accepted.path.shape[1]
                pair.cache = session.close(columns + before)
            if call.noise is not None:
                call.noise.close()
            for holder in (drafter.cache, session):
                holder.clear()


@contextmanager
def opened_models(call: Call):
    """
    Both models for one call, and a tap on the target's layers. Hooks and flags are set on copies of the modules: other
    calls may be running both models.

    Yields:
        The target, a [`DFlashCandidateGenerator`], a [`FeatureTap`], and, if rounds are compiled, the buffers of the
        drafter's and the target's slots.
    """
    target, draft, layer_ids = call.target, call.draft, call.draft.config.target_layer_ids
    layers = decoder_layers(target)
    watched = [layers[max(i, 0)] for i in layer_ids] + [target.get_submodule(name) for name in call.facts.moving]
    with ExitStack() as opened:
        pools = [opened.enter_context(slots_of(one)) if call.compile else None for one in (draft, target)]
        linear = filter(packable, target.modules()) if call.packs else ()
        target = opened.enter_context(isolated(target, [*watched, *linear]))
        draft = opened.enter_context(isolated(draft, draft.modules(), training=False))
        if call.packs:
            multiply_packed(target, call.target)
            multiply_packed(draft, call.draft)
        drafter = DFlashCandidateGenerator(draft, target, generators=call.generators, temperature=call.temperature)
        drafter.foresight = call.foresight
        tap = opened.enter_context(FeatureTap(target, layer_ids, consume=drafter.absorb))
        yield target, drafter, tap, pools


def prefilled_session(call: Call, target, drafter: DFlashCandidateGenerator, pools: list):
    """
    Run the prompt through the target as usual; its features become the drafter's context. Then its tokens are moved
    into the slots of both models' caches.

    Returns:
        The target's [`SlotSession`], the columns in its cache, padding included, and of the prompt the logits
        `[R, 1, V]` after the last token, and the hidden states of all tokens if requested.
    """
    model_kwargs, facts = call.model_kwargs, call.facts
    if "logits_to_keep" in model_kwargs and getattr(target.config.get_text_config(), "num_kv_shared_layers", False):
        # An index, not a count: with a count, Gemma 4 drops all other tokens before the layers that share keys.
        model_kwargs["logits_to_keep"] = torch.tensor([-1])
    # 1. The prompt, read by both.
    padding, positions = padding_of(model_kwargs.get("attention_mask"), call.rows), []
    watch = target.register_forward_pre_hook(
        lambda _, args, kwargs: positions.append(kwargs.get("position_ids")), with_kwargs=True
    )
    outputs = target._prefill(call.input_ids, call.generation_config, model_kwargs)
    watch.remove()
    # Phi-3 starts a new cache if a long prompt needs other frequencies.
    cache = outputs.get(facts.cache_name, model_kwargs[facts.cache_name])
    columns = filled_columns(call, cache, drafter.absorbed)
    logits, hidden_states = outputs.logits[:, -1:].to(drafter.device, copy=True), outputs.get("hidden_states")
    del outputs  # a copy of the logits, so that the rest is freed
    # 2. The caches of both models in slots.
    offset = first_positions(positions[-1], columns, padding, drafter.device, facts.counts_columns)
    room = columns + drafter.config.block_tokens + (0 if call.compile else min(call.max_new, 256))  # grows
    drafter.open(padding, columns, room, offset, pools[0])
    extra, last_slot = extra_arguments(call), columns + call.max_new - 1
    session = facts.open_session(target, cache, padding, room, offset, extra, pools[1], last_slot)
    # Tables of positions end there, and some texts end in time.
    text = target.config.get_text_config(decoder=True)
    places = getattr(text, "max_position_embeddings", None) or _UNBOUNDED
    within = places - 1 - (offset if offset.dim() == 2 else offset[0])[:, 0].expand(len(padding))
    if call.compile or last_slot > int(within.min()):  # compiled rounds have one shape
        session.within = within
    return session, columns, logits, hidden_states


def extra_arguments(call: Call) -> dict:
    """
    Arguments of `generate` that are passed to every forward of the target, such as adapter names or a request for
    hidden states; see `block_arguments`.
    """
    accepted = inspect.signature(call.target.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    skip = {*_OWN_ARGUMENTS, *_PROMPT_ARGUMENTS, *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL}
    extra = {
        key: value[:, -1:] if key == "token_type_ids" and value is not None else value
        for key, value in call.model_kwargs.items()
        if key not in skip and (takes_any or key in accepted)
    }
    if call.lists_hidden_states:
        extra["output_hidden_states"] = call.generation_config.output_hidden_states
    return extra


def filled_columns(call: Call, cache, absorbed: int) -> int:
    """
    Columns that a cache holds after a prompt of `absorbed` columns: these plus the columns that it held before, unless
    the target started a new cache.

    Raises:
        `ValueError`: it holds another number of columns.
    """
    columns = cached_columns(cache) or absorbed
    if columns not in (absorbed, call.past + absorbed):
        raise ValueError(
            f"The cache of {call.facts.name} holds {columns} tokens after {call.past} earlier ones and a prompt of "
            f"{absorbed}, so a drafter cannot tell its tokens apart: call `generate` without `assistant_model`."
        )
    return columns
