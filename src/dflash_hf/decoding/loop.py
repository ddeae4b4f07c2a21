"""
Decoding with a DFlash drafter. [`decode`] is the whole loop: what `target.generate(**inputs, assistant_model=draft)`
runs.

First [`prefilled`] reads the prompt: the target computes its keys and values, which move into slots, and the features
that become the drafter's context. Then rounds, until all rows have ended. One round, object by object:

1. Draft. The [`DraftPolicy`] decides what to verify and has the [`DraftSession`] draft it: the candidates, a `Block`
   or a `Tree` of tokens `[R, n]`. The first is the anchor.
2. Verify. The [`SlotSession`] runs one forward of the target over the candidates: logits `[R, n, V]` and features
   `[R, n, L * H]`.
3. Accept. The [`GenerationState`] writes the longest path that agrees with the target's own choices, which the
   [`TokenSelector`] makes, and one token more, the target's own: an [`Acceptance`].
4. Commit. The `SlotSession` keeps the slots of the accepted tokens, the `DraftSession` keeps their features, and the
   policy learns.

On exit [`prefilled`] gives back what it took, in the order of its docstring. `dflash_hf.decoding` says which object
lives how long.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from dflash_hf.decoding.arguments import extra_arguments
from dflash_hf.decoding.call import GenerateCall
from dflash_hf.decoding.cuda_graphs import CallCudaGraphs
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.decoding.fallback import fallback_reason
from dflash_hf.decoding.graphs import CallGraphs
from dflash_hf.decoding.policies import SUMMARY_FIELDS, DraftPolicy
from dflash_hf.decoding.policy_choice import policy_for
from dflash_hf.decoding.probe import first_positions
from dflash_hf.decoding.selection import TokenSelector
from dflash_hf.decoding.slots import cached_length
from dflash_hf.decoding.state import GenerationState
from dflash_hf.decoding.timing import TimedStreamer
from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.targets.features import FeatureTap, cache_argument


logger = logging.get_logger(__name__)


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """
    `GenerateDecoderOnlyOutput` with `acceptance_lengths` (`list[list[int]]`): for each row, the number of tokens that
    each verification committed, bonus token included. A row's first token is excluded: the prompt's forward wrote it.

    If the default policy chose the sizes: `draft_sizes` (`list[int]`), the number of drafted or copied tokens that a
    round verified in every row, and `estimated_speedup` (`float`), the speed of the call relative to target-only
    decoding with the same weights, packed or not: from acceptance, the measured costs by which sizes were chosen, and
    the time for the prompt.

    As long as a returned cache of one row lives, so does what the drafter has read of it, for the call that continues
    the cache.
    """

    acceptance_lengths: list[list[int]] | None = None
    draft_sizes: list[int] | None = None
    estimated_speedup: float | None = None


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
    Generate with `target`, drafted by `draft`; the arguments are those of `GenerationMixin._assisted_decoding`, also
    those that are not used here: `inputs_tensor` and both tokenizers.

    The output is what `target` generates without a drafter: the same tokens if greedy, the same sample for the same
    seed.

    Returns:
        `torch.LongTensor` `[R, S]` or [`DFlashGenerateOutput`].

    Raises:
        `ValueError`: a field of `draft.decoding_config` is invalid, or its policy returns a summary with other fields
            than `SUMMARY_FIELDS`.
    """
    draft.check_decoding_config()
    timed_streamer = None if streamer is None else TimedStreamer(streamer, target.device)
    selector = TokenSelector(input_ids, logits_processor, stopping_criteria, generation_config, timed_streamer)
    call = GenerateCall(target, draft, input_ids, selector, generation_config, model_kwargs)
    reason = fallback_reason(call, synced_gpus)
    if reason is not None:
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        try:
            output = target._sample(*arguments, **model_kwargs)
        finally:  # after a streamed text, not inside it; also if the target raises
            logger.warning_once(f"Decoding without the drafter: {reason}.")
        if isinstance(output, torch.Tensor):
            return output
        return DFlashGenerateOutput(**output, acceptance_lengths=[[] for _ in input_ids])

    graphs = CallGraphs.for_call(call)
    drafter_graph = None if graphs is None else graphs.drafter_forward()
    cuda_graphs = CallCudaGraphs.for_call(call)
    drafter_cuda_graphs = None if cuda_graphs is None else cuda_graphs.drafter
    draft_session = DraftSession(draft, target, selector.noise, call.block_tokens, drafter_graph, drafter_cuda_graphs)
    policy = policy_for(call, draft_session)
    with prefilled(call, draft_session, policy, graphs, cuda_graphs) as (session, state):
        while not state.done:
            with session.inference_context():
                # 1. Draft: a block, or whatever the policy prefers.
                candidates = policy.get_candidates(state)
                # 2. Verify: one forward of the target.
                logits, features = session.verify(candidates)
            # 3. Accept what the target agrees with, and a token of its own.
            acceptance = state.accept(candidates, logits)
            # 4. Commit: what is not kept will be overwritten.
            session.keep(acceptance)
            draft_session.read(features, acceptance)
            policy.update_candidate_strategy(state, candidates, acceptance)

    if timed_streamer is not None:
        timed_streamer.end()
    policy.finish()
    if graphs is not None:
        graphs.log_failures()
    if cuda_graphs is not None:
        cuda_graphs.log_failures()
    if not generation_config.return_dict_in_generate:
        return state.sequences
    outputs: dict[str, Any] = {name: tuple(tensors) for name, tensors in state.outputs.items()}
    return DFlashGenerateOutput(
        sequences=state.sequences,
        acceptance_lengths=state.acceptance_lengths,
        **{CACHE_NAME: session.caller_cache},
        **outputs,
        **_summary_of(policy),
    )


def _summary_of(policy: DraftPolicy) -> dict:
    """
    Raises:
        `ValueError`: a policy's summary holds something that the output has no field for.
    """
    summary = policy.summary()
    if not isinstance(summary, dict) or not summary.keys() <= set(SUMMARY_FIELDS):
        raise ValueError(
            f"{type(policy).__name__}.summary() returned {summary!r}: it must be a dictionary of {SUMMARY_FIELDS} or "
            "some of them. Keep other results as attributes of the policy or of its class."
        )
    return summary


@contextlib.contextmanager
def prefilled(
    call: GenerateCall,
    draft_session: DraftSession,
    policy: DraftPolicy,
    graphs: CallGraphs | None = None,
    cuda_graphs: CallCudaGraphs | None = None,
):
    """
    Run the prompt through the target as `generate` does; its features become the drafter's context. Then move its keys
    and values into slots.

    On exit, also after an error or an interruption, everything goes back to its owner, in this order:

    1. The target's keys and values go back to the caller's cache, if the caller will get it.
    2. The generator is rewound to the first draw that no row has used.
    3. The session's slots are freed.
    4. The drafter's context is kept with the returned cache, if the call ended without an error, or freed.

    Each step runs even if one before it fails.

    Yields:
        [`SlotSession`] and [`GenerationState`], which has its first token.
    """
    returns_cache = call.config.return_dict_in_generate or getattr(call.cache, "_is_user_defined", False)
    state = GenerationState(call.prompt, call.selector)
    context = draft_session.context
    with FeatureTap(call.target, call.draft.config.target_layer_ids, consume=context.append) as tap:
        # 1. One forward over the prompt. The drafter's context receives its features while it runs.
        past_length = cached_length(call.cache)
        padding = call.padding
        cache, logits = _prefill_target(call, tap)
        tap.consume = None  # from now on `verify` takes the features
        # 2. The caches of both models in slots.
        prompt_length = _length_after_prompt(call.target, cache, past_length, context.appended_length)
        position_of_first = first_positions(tap.positions, prompt_length, padding, call.prompt.device)
        session = call.capabilities.session(
            call.target,
            cache,
            padding,
            position_of_first,
            extra_arguments(call),
            tap,
            last_index=prompt_length + call.selector.max_new_tokens - 2,  # the last generated token is never read
            max_candidates=1 + policy.max_draft,
            graph=None if graphs is None else graphs.target_forward(tap.layer_ids),
            cuda_graphs=None if cuda_graphs is None else cuda_graphs.target,
            omits_masks=call.capabilities.maskless,
        )
        is_complete = False
        # Steps 4, 3, 2 and 1 of the docstring: an exit stack runs its callbacks from the last to the first.
        with contextlib.ExitStack() as on_exit:
            on_exit.callback(lambda: context.keep_for(cache) if is_complete and returns_cache else context.free())
            on_exit.callback(session.free)
            if call.selector.noise is not None:
                on_exit.callback(lambda: call.selector.noise.rewind(state.longest))
            if returns_cache:
                on_exit.callback(lambda: session.write_back(state.interrupted))
            context.prefill(padding, prompt_length, position_of_first, cache if past_length > 0 else None)
            state.begin(logits)
            del logits
            yield session, state
            is_complete = True


def _prefill_target(call: GenerateCall, tap: FeatureTap) -> tuple[Any, torch.Tensor]:
    """One forward of the target over the prompt: the cache that it filled, and the logits `[R, 1, V]` after it."""
    target = call.target
    arguments = dict(call.model_kwargs)  # a copy: upstream's prefill changes it
    if "logits_to_keep" in arguments and getattr(target.config.get_text_config(), "num_kv_shared_layers", False):
        # An index, not a count: with a count, Gemma 4 drops all other tokens before the layers that share keys.
        arguments["logits_to_keep"] = torch.tensor([-1])
    with tap.running():
        outputs = target._prefill(call.prompt, call.config, arguments)
    cache = outputs.get(cache_argument(target), call.cache)  # Phi-3 starts a new one if a long prompt needs it
    # A copy, since the output also holds the logits of other tokens, which are freed with it.
    return cache, outputs.logits[:, -1:].to(call.prompt.device, copy=True)


def _length_after_prompt(target, cache, past_length: int, appended_length: int) -> int:
    """
    Tokens of each row, padding included, that a cache holds after a prompt of `appended_length`: these plus the
    `past_length` that it held before, unless the target started a new cache.

    Raises:
        `ValueError`: it holds another number of tokens.
    """
    length = cached_length(cache) or appended_length
    if length not in (appended_length, past_length + appended_length):
        raise ValueError(
            f"The cache of {type(target).__name__} holds {length} tokens after {past_length} earlier ones and a "
            f"prompt of {appended_length}, so a drafter cannot tell its tokens apart: call `generate` without "
            "`assistant_model`."
        )
    return length
