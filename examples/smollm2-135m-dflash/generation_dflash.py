"""
Decoding with a DFlash drafter: draft a block or a tree, verify it with one forward of the target, accept, commit.

`decode` is the whole loop. It is what `target.generate(**inputs, assistant_model=draft)` runs.
"""

import functools
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import Cache, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .accept_dflash import Continuation, Draft
from .call_dflash import Call, extra_arguments, plan_call, usable_cache, warn_of_ignored_settings
from .compile_dflash import CompiledRound, slots_of
from .drafting_dflash import DFlashCandidateGenerator, first_positions, padding_of
from .isolation_dflash import isolated
from .sessions_dflash import SlotSession, cache_argument, filled_columns
from .target_dflash import FeatureTap, decoder_layers


logger = logging.get_logger(__name__)


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """
    `GenerateDecoderOnlyOutput` with `acceptance_lengths` (`list[list[int]]`): for each row the tokens committed by
    each verification, bonus included. The first token of a row comes from the prompt's forward and is not counted.
    """

    acceptance_lengths: list[list[int]] | None = None


class Context(NamedTuple):
    """Features of the target that the drafter has not read yet."""

    features: torch.Tensor  # [R, n, L * H]
    start: torch.LongTensor  # [R]  index in its row of the first of these tokens


class Verified(NamedTuple):
    """A draft, and the target's forward over it."""

    draft: Draft
    logits: torch.Tensor  # [R, n, V]
    features: torch.Tensor  # [R, n, L * H]
    hidden_states: tuple | None  # [R, n, H] of each layer, if the caller asks for them


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


def draft_and_verify(pair: Pair, start: torch.LongTensor, context: Context, size: int) -> Verified:
    """The two forwards of [`one_round`]: the drafter's, then the target's."""
    drafter, session, tap, continuation = pair.drafter, pair.session, pair.tap, pair.continuation
    draft = continuation.padded(drafter.propose(continuation.last, start, *context).prefix(size))
    output = session.verify(draft, start)
    hidden_states = None if continuation.hidden_states is None else output.hidden_states
    return Verified(draft, output.logits, tap.take(), hidden_states)


def one_round(pair: Pair, start: torch.LongTensor, context: Context, size: int, forwards=draft_and_verify):
    """
    Draft, verify, accept and commit one block, or tree, for each row.

    Args:
        pair (`Pair`): The parts of this call.
        start (`torch.LongTensor`): `[R]`, index of each row's anchor, its last committed token.
        context (`Context`): Features of the tokens before the anchors.
        size (`int`): How many tokens of a block to verify, anchor included.
        forwards (`callable`): [`draft_and_verify`], or its compiled form.

    Returns:
        [`Verdict`] and the [`Context`] of the next round.
    """
    # 2. Draft a block for each row, and 3. verify it with one forward of the target.
    draft, logits, features, hidden_states = forwards(pair, start, context, size)
    # 4. Accept what the target agrees with, and one token of its own.
    verdict = pair.continuation.judge(draft, logits, hidden_states)
    # 5. Commit: the accepted tokens stay; everything after them will be overwritten.
    pair.session.commit(start, verdict)
    return verdict, Context(verdict.along(features), start)


@contextmanager
def prefilled(call: Call, target, draft, continuation: Continuation, input_ids, generation_config, model_kwargs):
    """
    Run the prompt through the target, and set up the rounds from the cache and the features that this leaves.

    Yields:
        [`Pair`], the indices of the first anchors `[R]`, and [`one_round`] as this call runs it, eager or compiled.
    """
    with ExitStack() as opened:
        # Hooks and switches go onto copies of the modules: other calls may be running both models.
        layers, layer_ids = decoder_layers(target), draft.config.target_layer_ids
        watched = [layers[i] for i in layer_ids] + [target.get_submodule(name) for name in call.facts.moving]
        own = opened.enter_context(isolated(target, watched))
        pools = [opened.enter_context(slots_of(model)) if call.compile else None for model in (draft, target)]
        if draft.training:
            draft = opened.enter_context(isolated(draft, draft.modules(), training=False))
        drafter = DFlashCandidateGenerator(draft, own, generators=call.generators, temperature=call.temperature)
        tap = opened.enter_context(FeatureTap(own, layer_ids, consume=drafter.absorb))

        name = cache_argument(target)
        given = model_kwargs[name] = usable_cache(
            target, model_kwargs[name], call.facts.session_class, generation_config.cache_implementation
        )
        if "logits_to_keep" in model_kwargs and getattr(target.config.get_text_config(), "num_kv_shared_layers", 0):
            # An index, not a count: given a count, Gemma 4 drops all other tokens before the layers that share keys.
            model_kwargs["logits_to_keep"] = torch.tensor([-1])
        padding, positions = padding_of(model_kwargs.get("attention_mask"), call.rows), []
        watch = own.register_forward_pre_hook(
            lambda _, args, kwargs: positions.append(kwargs.get("position_ids")), with_kwargs=True
        )
        outputs = own._prefill(input_ids, generation_config, model_kwargs)
        watch.remove()
        tap.consume = None
        cache = outputs.get(name, given)  # Phi-3 starts a new one where a long prompt takes other frequencies
        columns = filled_columns(target, cache, call.past, drafter.absorbed)
        offset = first_positions(positions[-1], columns, padding, drafter.device, call.facts.counts_columns)
        logits = outputs.logits[:, -1:].to(drafter.device, copy=True)  # a copy: the rest can be freed
        prompt_states = None if continuation.hidden_states is None else outputs.hidden_states
        del outputs

        room = (
            columns + draft.config.block_size + (0 if call.compile else min(call.max_new, 256))
        )  # grows with the text
        drafter.open(padding, columns, room, offset, pools[0])
        extra = extra_arguments(target, generation_config, model_kwargs)
        session = call.facts.open_session(own, cache, padding, room, offset, extra, pools[1])
        session.last_slot = torch.tensor(columns + call.max_new - 1, device=drafter.device)
        if call.tree_nodes and call.block_size > 1 and (call.rows == 1 or not continuation.step_by_step):
            drafter.plan_trees(call.tree_nodes, call.block_size - 1)
        pair = Pair(drafter, session, tap, continuation, columns)
        keep_cache = generation_config.return_dict_in_generate or getattr(given, "_is_user_defined", False)
        try:
            continuation.commit(continuation.judge(None, logits, prompt_states))
            start = torch.tensor([columns - pad for pad in padding], device=drafter.device)
            yield pair, start, _runner(call, target, pair)
        finally:
            if keep_cache:  # also after an interruption
                pair.cache = session.close(columns + max(continuation.longest - 1, 0))
            for holder in (drafter.cache, session):
                holder.clear()


def _runner(call: Call, target, pair: Pair):
    """
    [`one_round`] in its cheapest form: as a whole where acceptance needs nothing but tensors, else its two forwards.
    """
    piece = one_round if pair.continuation.by_tensors else draft_and_verify
    # Inference mode dispatches fastest, but tensors that it creates in a cache could not be written to later.
    run = torch.inference_mode()(piece) if pair.session.rollback_is_free else piece
    if call.compile:
        how = None if call.compile is True else call.compile
        run = CompiledRound(piece, run, target, how, (pair.drafter.cache, pair.session.cache))
    return run if pair.continuation.by_tensors else functools.partial(one_round, forwards=run)


@torch.no_grad()
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

    The output is what `target` generates alone: the same tokens when greedy, the same distribution when sampled (and,
    for one row, the same sample for the same seed).

    Returns:
        `torch.LongTensor` `[R, S]` or [`DFlashGenerateOutput`].
    """
    rules = (logits_processor, stopping_criteria, generation_config)
    call = plan_call(target, draft, input_ids, generation_config, model_kwargs, synced_gpus)
    warn_of_ignored_settings(generation_config)
    if call.plain_reason is not None:
        logger.warning_once(f"Decoding without the drafter: {call.plain_reason}.")
        output = GenerationMixin._sample(target, input_ids, *rules, synced_gpus, streamer, **model_kwargs)
        if isinstance(output, torch.Tensor):
            return output
        return DFlashGenerateOutput(**output, acceptance_lengths=[[] for _ in input_ids])

    continuation = Continuation(input_ids, *rules, streamer, call.block_size, call.look_ahead, call.generators)
    # 1. Prefill as the target does it; on the way, the features of the prompt become the drafter's context.
    prompt = (input_ids, generation_config, model_kwargs)
    with prefilled(call, target, draft, continuation, *prompt) as (pair, start, run):
        context = Context(*pair.drafter.no_features(start, call.block_size))
        whole = call.compile or continuation.look_ahead > 1  # then all blocks have one shape, the last ones too
        while not continuation.done:
            pair.reserve(max(draft.config.block_size, call.tree_nodes + 1))
            size = call.block_size if whole else min(call.block_size, continuation.tokens_left)
            verdict, context = run(pair, start, context, size)
            continuation.commit(verdict)
            start = start + verdict.counts
            if not whole:
                context = context._replace(features=context.features[:, : max(continuation.host.committed)])

    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return continuation.sequences
    return DFlashGenerateOutput(
        sequences=continuation.sequences,
        scores=continuation.scores,
        logits=continuation.raw_logits,
        hidden_states=continuation.hidden_states,
        past_key_values=pair.cache,
        acceptance_lengths=continuation.host.acceptance_lengths,
    )
