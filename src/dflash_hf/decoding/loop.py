"""
Decoding with a DFlash drafter: draft tokens, verify them with one forward of the target, accept, keep.

`decode` is the whole loop. It is what `target.generate(**inputs, assistant_model=draft)` runs. One round, object by
object:

1. The [`DraftPolicy`] decides what to verify, and lets the [`Drafter`] draft it: a `Block` or a `Tree`.
2. The [`SlotSession`] verifies it: one forward of the target, whose cache lies in slots.
3. The [`GenerationState`] commits what the target agrees with and one token of its own, as the [`TokenSelector`]
   chooses tokens; the result is an [`Acceptance`].
4. The session keeps the accepted tokens' slots, the drafter reads their features, and the policy learns.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from dflash_hf.decoding.arguments import extra_arguments
from dflash_hf.decoding.call import GenerateCall
from dflash_hf.decoding.drafter import Drafter, padding_of
from dflash_hf.decoding.fallback import fallback_reason
from dflash_hf.decoding.graphs import CallGraphs
from dflash_hf.decoding.policies import DraftPolicy
from dflash_hf.decoding.policy_choice import policy_for
from dflash_hf.decoding.probe import first_positions
from dflash_hf.decoding.selection import TokenSelector
from dflash_hf.decoding.slots import cached_columns
from dflash_hf.decoding.state import GenerationState
from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.targets.features import FeatureTap, cache_argument


logger = logging.get_logger(__name__)


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
    draft.check_decoding_config()
    selector = TokenSelector(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    call = GenerateCall(target, draft, input_ids, selector, generation_config, model_kwargs)
    reason = fallback_reason(call, synced_gpus)
    if reason is not None:
        plain = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        output = target._sample(*plain, **model_kwargs)
        logger.warning_once(f"Decoding without the drafter: {reason}.")  # below a text that is streamed
        if isinstance(output, torch.Tensor):
            return output
        return DFlashGenerateOutput(**output, acceptance_lengths=[[] for _ in input_ids])

    graphs = CallGraphs.of(call)
    draft_graph = None if graphs is None else graphs.of_drafter()
    drafter = Drafter(draft, target, selector.noise, call.block_tokens, draft_graph)
    policy = policy_for(call, drafter)
    # 1. Read the prompt: the target as usual, the drafter its features.
    with prefilled(call, drafter, policy, graphs) as (session, state):
        while not state.done:
            with session.without_gradients():
                candidates = policy.get_candidates(state)  # 2. draft: a block, or whatever the policy prefers
                logits, features = session.verify(candidates)  # 3. verify: one forward of the target
            acceptance = state.accept(candidates, logits)  # 4. accept what it agrees with, plus a token of its own
            session.keep(acceptance)  # 5. keep that; the rest will be overwritten
            drafter.read(features, acceptance)  # 6. read the features of what was kept
            policy.update_candidate_strategy(state, candidates, acceptance)

    if streamer is not None:
        streamer.end()
    summary = policy.summary()
    if graphs is not None:
        graphs.log_failures()
    if not generation_config.return_dict_in_generate:
        return state.sequences
    outputs: dict[str, Any] = {name: tuple(tensors) for name, tensors in state.outputs.items()}
    return DFlashGenerateOutput(
        sequences=state.sequences,
        acceptance_lengths=state.acceptance_lengths,
        **{CACHE_NAME: session.source},
        **outputs,
        **summary,
    )


@contextlib.contextmanager
def prefilled(call: GenerateCall, drafter: Drafter, policy: DraftPolicy, graphs: CallGraphs | None = None):
    """
    Run the prompt through the target as usual; its features become the drafter's context. Then its tokens are moved
    into slots. On exit, the caller's cache is written back.

    Yields:
        [`SlotSession`] and [`GenerationState`], which has its first token.
    """
    target = call.target
    model_kwargs = call.model_kwargs
    returns_cache = call.config.return_dict_in_generate or getattr(call.cache, "_is_user_defined", False)
    if "logits_to_keep" in model_kwargs and getattr(target.config.get_text_config(), "num_kv_shared_layers", False):
        # An index, not a count: with a count, Gemma 4 drops all other tokens before the layers that share keys.
        model_kwargs["logits_to_keep"] = torch.tensor([-1])
    state = GenerationState(call.prompt, call.selector)
    context = drafter.context
    with FeatureTap(target, call.draft.config.target_layer_ids, consume=context.append) as tap:
        # 1. The prompt, read by both.
        past = cached_columns(call.cache)
        padding = padding_of(model_kwargs.get("attention_mask"), call.rows)
        with tap.running():
            outputs = target._prefill(call.prompt, call.config, model_kwargs)
        tap.consume = None
        cache = outputs.get(cache_argument(target), call.cache)  # Phi-3 starts a new one if a long prompt needs it
        columns = _filled_columns(target, cache, past, context.appended)
        logits = outputs.logits[:, -1:].to(call.prompt.device, copy=True)
        del outputs  # a copy of the logits, so that the rest is freed
        # 2. The caches of both models in slots.
        offset = first_positions(tap.positions, columns, padding, call.prompt.device)
        session = call.capabilities.session(
            target,
            cache,
            padding,
            offset,
            extra_arguments(call),
            tap,
            last_slot=columns + call.selector.max_new - 2,  # the last token of the text is never read
            largest_draft=1 + policy.max_draft,
            graph=None if graphs is None else graphs.of_target(tap.layer_ids),
        )
        continued_cache = None
        # Exits run the last first, even after an interruption: the cache is written back before the slots are freed,
        # the generator is rewound, and the drafter's context goes last, with the cache that it belongs to.
        with contextlib.ExitStack() as on_exit:
            on_exit.callback(lambda: context.release(continued_cache))
            on_exit.callback(session.clear)
            if call.selector.noise is not None:
                on_exit.callback(lambda: call.selector.noise.close(state.longest))
            if returns_cache:
                on_exit.callback(lambda: session.close(state.interrupted))
            context.prefill(padding, columns, offset, cache if past > 0 else None)
            state.begin(logits)
            del logits
            yield session, state
            if returns_cache:
                continued_cache = session.source  # whose context the next call continues


def _filled_columns(target, cache, past: int, appended: int) -> int:
    """
    Columns that a cache holds after a prompt of `appended` columns: these plus the `past` ones that it held before,
    unless the target started a new cache.

    Raises:
        `ValueError`: it holds another number of columns.
    """
    columns = cached_columns(cache) or appended
    if columns not in (appended, past + appended):
        raise ValueError(
            f"The cache of {type(target).__name__} holds {columns} tokens after {past} earlier ones and a prompt of "
            f"{appended}, so a drafter cannot tell its tokens apart: call `generate` without `assistant_model`."
        )
    return columns
