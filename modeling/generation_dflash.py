"""
Decoding with a DFlash drafter: draft a block or a tree, verify it with one forward of the target, accept, commit.

`decode` is the whole loop. It is what `target.generate(**inputs, assistant_model=draft)` runs.
"""

import functools
from dataclasses import dataclass

import torch
from transformers import GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .accept_dflash import Draft, Judge, Verdict
from .call_dflash import Call, warn_of_ignored_settings
from .compile_dflash import CompiledRound
from .drafting_dflash import Context
from .packing_dflash import warn_if_emulated
from .plan_dflash import Plan
from .planner_dflash import planner_of
from .prefill_dflash import Pair, opened_pair
from .target_dflash import CACHE_NAME
from .text_dflash import Continuation, Writer


logger = logging.get_logger(__name__)


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """
    `GenerateDecoderOnlyOutput` with `acceptance_lengths` (`list[list[int]]`): for each row, the number of tokens that
    each verification committed, bonus token included. A row's first token is excluded: the prompt's forward wrote it.

    If sizes were chosen, not set: `draft_sizes` (`list[int]`), the number of drafted or copied tokens that each round
    verified in every row, and `estimated_speedup` (`float`), the speed of the call relative to the target alone,
    packed as here: estimated from acceptance, the costs that sizes were chosen by, and the time for the prompt.
    """

    acceptance_lengths: list[list[int]] | None = None
    draft_sizes: list[int] | None = None
    estimated_speedup: float | None = None


def draft_and_verify(pair: Pair, start: torch.LongTensor, context: Context, plan: Plan) -> tuple:
    """
    The two forwards of [`one_round`]: the drafter's, then the target's.

    Returns:
        [`Draft`], and the target's logits `[R, n, V]`, features `[R, n, L * H]` and, if requested, hidden states
        `[R, n, H]` of each layer after each of its tokens.
    """
    drafter, session, tap, continuation = pair.drafter, pair.session, pair.tap, pair.continuation
    if plan.drafts:
        draft = drafter.propose(plan, continuation.last, start, context.features, context.start)
        draft = continuation.padded(draft if plan.cut is None else plan.cut(draft))
    else:
        anchors = continuation.last[:, None]
        draft = Draft(anchors if plan.copied is None else torch.cat([anchors, plan.copied], dim=1))
    output = session.verify(draft, start)
    hidden_states = output.hidden_states if "hidden_states" in continuation.writer.listed else None
    return draft, output.logits, tap.take(), hidden_states


def one_round(
    pair: Pair, start: torch.LongTensor, context: Context, plan: Plan, forwards=draft_and_verify
) -> tuple[Verdict, Context]:
    """
    Draft, verify, accept and commit one block, or tree, for each row.

    Args:
        pair (`Pair`): The parts of this call.
        start (`torch.LongTensor`): `[R]`, index of each row's anchor, its last committed token.
        context (`Context`): Features of the tokens before the anchors.
        plan (`Plan`): How much is drafted and verified.
        forwards (`callable`): [`draft_and_verify`], or its compiled form.

    Returns:
        [`Verdict`], and what this round adds to the context.
    """
    # 2. Draft a block for each row, and 3. verify it with one forward of the target.
    draft, logits, features, hidden_states = forwards(pair, start, context, plan)
    # 4. Accept the tokens that the target agrees with, plus one token of its own.
    verdict = pair.continuation.judge(draft, logits, hidden_states, pair.session.most(start))
    # 5. Commit: the accepted tokens stay; everything after them will be overwritten.
    pair.session.commit(start, verdict)
    return verdict, Context(verdict.along(features), start)


def _runner(call: Call, pair: Pair):
    """
    [`one_round`] in its cheapest form: compiled as a whole if acceptance needs only tensors, else its two forwards.
    """
    by_tensors = pair.continuation.rules.by_tensors
    piece = one_round if by_tensors else draft_and_verify
    # Inference mode dispatches fastest, but tensors that it creates in a cache could not be modified later, and hooks
    # could not use those that they get with autograd.
    fast = pair.session.rollback_is_free and not call.facts.observed
    run = torch.inference_mode()(piece) if fast else piece
    if call.compile:
        run = CompiledRound(
            piece, run, call.target, call.draft, call.compile, (pair.drafter.cache, pair.session.cache)
        )
    return run if by_tensors else functools.partial(one_round, forwards=run)


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

    The output is what `target` generates alone: the same tokens if greedy, the same sample for the same seed. If
    drafts are drawn, or a batch is compiled or runs ahead of the host, samples have the same distribution only.

    Returns:
        `torch.LongTensor` `[R, S]` or [`DFlashGenerateOutput`].
    """
    rules = (logits_processor, stopping_criteria, generation_config)
    call = Call(target, draft, input_ids, rules, model_kwargs, synced_gpus, streamer)
    warn_of_ignored_settings(generation_config)
    warn_if_emulated(target)
    if call.plain_reason is not None:
        logger.warning_once(f"Decoding without the drafter: {call.plain_reason}.")
        output = GenerationMixin._sample(target, input_ids, *rules, synced_gpus, streamer, **model_kwargs)
        if isinstance(output, torch.Tensor):
            return output
        return DFlashGenerateOutput(**output, acceptance_lengths=[[] for _ in input_ids])

    judge = Judge(call.rows, rules, call.pace, call.generators, call.noise)
    writer = Writer(input_ids, judge.pad, generation_config, streamer)
    continuation = Continuation(input_ids, judge, writer, call.max_new, call.look_ahead)
    # 1. Prefill as the target does; along the way, the prompt's features become the drafter's context.
    with opened_pair(call, continuation) as (pair, start):
        drafter, run = pair.drafter, _runner(call, pair)
        planner = planner_of(call, pair)
        context = drafter.no_features(start, draft.config.block_tokens)
        begun = continuation.seconds
        while not continuation.done:
            plan = planner.next(continuation)
            pair.reserve(plan.size)
            of_one_shape = call.of_one_shape and plan.drafts
            if of_one_shape:
                context = drafter.shaped(context, start)
            verdict, fresh = run(pair, start, context, plan)
            continuation.commit(verdict)
            planner.learn(continuation, verdict)
            start = start + verdict.counts
            committed = None if of_one_shape else max(1, *continuation.host.committed)  # as of the last sync
            context = drafter.follow(None if plan.drafts else context, fresh, committed)
        rounds = continuation.seconds - begun

    if streamer is not None:
        streamer.end()
    chosen = planner.summary()
    if speedup := chosen.get("estimated_speedup"):
        chosen["estimated_speedup"] = pair.speedup(speedup, rounds)
    if not generation_config.return_dict_in_generate:
        return continuation.sequences
    return DFlashGenerateOutput(
        sequences=continuation.sequences,
        acceptance_lengths=continuation.host.acceptance_lengths,
        **{CACHE_NAME: pair.cache},
        **writer.listed,
        **chosen,
    )
