"""From a prompt to the parts that rounds work with: the target reads it as it always does, the drafter on the way."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import Cache

from .call_dflash import Call, extra_arguments, prompt_arguments, usable_cache
from .compile_dflash import slots_of
from .drafting_dflash import DFlashCandidateGenerator, first_positions, padding_of
from .isolation_dflash import isolated
from .sessions_dflash import SlotSession, cache_argument, filled_columns
from .target_dflash import FeatureTap, decoder_layers
from .text_dflash import Continuation


class Models(NamedTuple):
    """Both models as one call runs them, which no other call sees."""

    target: torch.nn.Module
    drafter: DFlashCandidateGenerator
    tap: FeatureTap
    pools: list  # slots that outlive the call, of the drafter and of the target; `None` where rounds are not compiled


class Prefilled(NamedTuple):
    """What the target's forward over a prompt leaves."""

    logits: torch.Tensor  # [R, 1, V], after the last token
    cache: Cache
    columns: int  # that the cache holds, padding included
    padding: list[int]  # columns at the start of each row
    offset: torch.LongTensor  # [R, 1] or [axes, R, 1], position of a row's first token
    hidden_states: tuple | None  # of all its tokens


@dataclass
class Pair:
    """The parts that one call works with: drafter, session of the target, tap for its features, text."""

    drafter: DFlashCandidateGenerator
    session: SlotSession
    tap: FeatureTap
    continuation: Continuation
    columns: int  # of the prompt, padding included
    cache: Cache | None = None  # returned to the caller at the end

    def reserve(self, breadth: int) -> None:
        """Make room in both caches for a round that writes `breadth` tokens."""
        for cache in (self.drafter.cache, self.session.cache):
            cache.reserve(self.columns + self.continuation.longest_possible + breadth)


@contextmanager
def models_of(call: Call, target, draft):
    """
    The two models of a call, and a tap on the target's layers. Hooks and switches go onto copies of the modules: other
    calls may be running both models.

    Yields:
        [`Models`]
    """
    with ExitStack() as opened:
        layers, layer_ids = decoder_layers(target), draft.config.target_layer_ids
        watched = [layers[max(i, 0)] for i in layer_ids] + [target.get_submodule(name) for name in call.facts.moving]
        own = opened.enter_context(isolated(target, watched))
        pools = [opened.enter_context(slots_of(model)) if call.compile else None for model in (draft, target)]
        if draft.training:
            draft = opened.enter_context(isolated(draft, draft.modules(), training=False))
        drafter = DFlashCandidateGenerator(draft, own, generators=call.generators, temperature=call.temperature)
        tap = opened.enter_context(FeatureTap(own, layer_ids, consume=drafter.absorb))
        yield Models(own, drafter, tap, pools)


def prefill(call: Call, models: Models, input_ids, generation_config, model_kwargs) -> Prefilled:
    """Run the prompt through the target as it does it itself; its features become the drafter's context."""
    target, drafter, name = models.target, models.drafter, cache_argument(models.target)
    model_kwargs |= prompt_arguments(target, model_kwargs)
    padding, positions = padding_of(model_kwargs.get("attention_mask"), call.rows), []
    watch = target.register_forward_pre_hook(
        lambda _, args, kwargs: positions.append(kwargs.get("position_ids")), with_kwargs=True
    )
    outputs = target._prefill(input_ids, generation_config, model_kwargs)
    watch.remove()
    models.tap.consume = None
    cache = outputs.get(name, model_kwargs[name])  # Phi-3 starts a new one where a long prompt takes other frequencies
    columns = filled_columns(target, cache, call.past, drafter.absorbed)
    offset = first_positions(positions[-1], columns, padding, drafter.device, call.facts.counts_columns)
    logits = outputs.logits[:, -1:].to(drafter.device, copy=True)  # a copy: the rest can be freed
    return Prefilled(logits, cache, columns, padding, offset, outputs.get("hidden_states"))


@contextmanager
def opened_pair(call: Call, target, draft, continuation: Continuation, input_ids, generation_config, model_kwargs):
    """
    Prefill, and open what the rounds work with on what this leaves; in the end the caller's cache is written back.

    Yields:
        [`Pair`], and the indices of the first anchors `[R]`.
    """
    name = cache_argument(target)
    given = model_kwargs[name] = usable_cache(
        target, model_kwargs[name], call.facts.session_class, generation_config.cache_implementation
    )
    keep_cache = generation_config.return_dict_in_generate or getattr(given, "_is_user_defined", False)
    with models_of(call, target, draft) as models:
        drafter, (draft_pool, pool) = models.drafter, models.pools
        prompt = prefill(call, models, input_ids, generation_config, model_kwargs)
        columns, padding, offset = prompt.columns, prompt.padding, prompt.offset
        room = columns + draft.config.block_tokens + (0 if call.compile else min(call.max_new, 256))  # grows
        drafter.open(padding, columns, room, offset, draft_pool)
        extra = extra_arguments(target, generation_config, model_kwargs)
        session = call.facts.open_session(models.target, prompt.cache, padding, room, offset, extra, pool)
        session.end_at(columns + call.max_new - 1)
        pair = Pair(drafter, session, models.tap, continuation, columns)
        try:
            listed = prompt.hidden_states if continuation.lists_hidden_states else None
            continuation.commit(continuation.judge(None, prompt.logits, listed))
            del prompt, listed
            yield pair, torch.tensor([columns - pad for pad in padding], device=drafter.device)
        finally:
            if keep_cache:  # also after an interruption
                pair.cache = session.close(columns + max(continuation.longest - 1, 0))
            for holder in (drafter.cache, session):
                holder.clear()
