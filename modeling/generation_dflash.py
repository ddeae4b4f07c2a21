"""
Decoding with a DFlash drafter: draft a block or a tree, verify it with one forward of the target, accept, commit.

`decode` is the whole loop. It is what `target.generate(**inputs, assistant_model=draft)` runs.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .accept_dflash import Continuation
from .calls_dflash import draft_temperature, plain_reason, tree_nodes, usable_cache
from .drafting_dflash import DFlashCandidateGenerator, layout
from .outputs_dflash import TokenOutputs
from .packing_dflash import packed_weights
from .probe_dflash import probe_rollback
from .round_dflash import CompiledRound, eager_round, straighten
from .target_dflash import FeatureTap
from .verify_dflash import activate_past_recording, cache_argument, cached_columns, extra_arguments


logger = logging.get_logger(__name__)


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """
    `GenerateDecoderOnlyOutput` with `acceptance_lengths` (`list[list[int]]`): for each row the tokens committed by
    each verification, bonus included. The first token of a row comes from the prompt's forward and is not counted.
    """

    acceptance_lengths: list[list[int]] | None = None


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
    if not model_kwargs["use_cache"]:
        raise ValueError("use_cache=False, but decoding with a drafter needs the cache; drop it or `assistant_model`.")
    config = draft.decoding_config
    config.check(draft.config.block_size)
    generators = config.generators if generation_config.do_sample else None
    if generators is not None:
        config.check_generators(len(input_ids), input_ids.device)
    session_class = None if synced_gpus else probe_rollback(target)
    reason = plain_reason(target, session_class, generation_config, model_kwargs, synced_gpus)
    if reason is not None and generators is not None:
        raise ValueError(f"decoding_config.generators cannot be followed: {reason}; set it to None to decode plainly.")
    if reason is not None:
        logger.warning_once(f"Decoding without the drafter: {reason}.")
        output = GenerationMixin._sample(
            target,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            streamer,
            **model_kwargs,
        )
        if isinstance(output, torch.Tensor):
            return output
        return DFlashGenerateOutput(**output, acceptance_lengths=[[] for _ in input_ids])

    # 1. Prefill by the target's own path; the features of the prompt become the drafter's context on the way.
    name = cache_argument(target)
    cache = model_kwargs[name] = usable_cache(
        target, model_kwargs[name], session_class, generation_config.cache_implementation
    )
    if "logits_to_keep" in model_kwargs and getattr(target.config.get_text_config(), "num_kv_shared_layers", 0):
        # An index: told a number, Gemma 4 takes those tokens alone through the layers that share keys.
        model_kwargs["logits_to_keep"] = torch.tensor([-1])
    past, rows = cached_columns(cache), input_ids.shape[0]
    embeds = model_kwargs.get("inputs_embeds")
    block_size = config.block_size or draft.config.block_size
    text = Continuation(
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer,
        in_step=session_class.in_step,
        block_size=block_size,
        look_ahead=config.rounds_ahead(input_ids.device) if session_class.free else 1,
        generators=generators,
    )
    new = input_ids.shape[1] if embeds is None else max(input_ids.shape[1], embeds.shape[1])
    # Slots for the prompt, which may hold the past too, and some more to come; they grow with the text.
    room = past + new + min(text.max_new, 256) + draft.config.block_size
    listed = TokenOutputs(target, generation_config)
    compilable = session_class.free and not listed.asked and generators is None
    compiled = config.compile if compilable else False
    run, pools = eager_round, (None, None)
    if compiled:
        room = past + new + draft.config.block_size
        run = CompiledRound(target, None if compiled is True else compiled)
        pools = run.pool(draft), run.pool(target)
    generator = DFlashCandidateGenerator(draft, target, generators=generators)
    padding, offset = layout(model_kwargs, rows, generator.device)
    generator.open(padding, past, room, offset, pools[0])
    if session_class.records_past:
        activate_past_recording(cache)
    was_training, session = draft.training, None
    keep_cache = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    packed = packed_weights(target, draft, tokens=rows * block_size) if config.pack_weights else nullcontext()
    if was_training:
        draft.eval()
    try:
        with FeatureTap(target, draft.config.target_layer_ids, consume=generator.absorb) as tap, listed, packed:
            outputs = target._prefill(input_ids, generation_config, model_kwargs)
            tap.consume = None
            logits = outputs.logits[:, -1:].to(generator.device, copy=True)  # of all others nothing stays
            del outputs
            generator.write_context()
            columns = generator.columns
            if session_class.records_past:
                cache.crop(0)
            extra = {**extra_arguments(target, model_kwargs), **listed.arguments}
            session = session_class(target, cache, padding, room, offset, extra, pools[1])
            text.accept(logits)
            listed.add_prompt(cache, columns)

            temperature = draft_temperature(draft, generation_config)
            start = torch.tensor([columns - pad for pad in padding], device=generator.device)  # [R], the anchors
            features, features_start = generator.no_features(start, block_size)
            session.last_slot = start.new_tensor(columns + text.max_new - 1)
            nodes = tree_nodes(config, session_class, text, listed)
            if nodes:
                generator.plan_trees(nodes, block_size - 1)
            whole = compiled or text.look_ahead > 1  # every block has one shape, also at the end of the text
            while not text.done:
                # 2. Draft a block or a tree for each row and verify it with one forward of the target.
                used = text.reach + columns + max(draft.config.block_size, nodes + 1)
                size = block_size if whole else min(block_size, text.room)
                if compiled:  # the shapes of the bucket
                    used = max(generator.cache.reserve(used), session.cache.reserve(used))
                block, proposal, tree, logits, features, verdict = run(
                    generator, session, tap, text, start, features, features_start, size, used, temperature
                )
                # 3. Accept what the target agrees with, and its own next token.
                counts, way = text.accept(logits, block, proposal, verdict, tree)  # [R]
                if tree is not None and verdict is None:
                    features = straighten(session, features, start, way)
                listed.add_block(session, size, text.committed[0])
                # 4. Commit: the accepted tokens stay, everything after them will be written over.
                session.commit(size, text.committed)
                features_start, start = start, start + counts
                if not whole:
                    features = features[:, : max(text.committed)]
    finally:
        if was_training:
            draft.train()
        if session is not None and keep_cache:  # whole again for the caller, also after an interruption
            cache = session.close(columns + max(text.longest - 1, 0))
        for holder in filter(None, (generator.cache, session)):
            holder.clear()

    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return text.sequences
    return DFlashGenerateOutput(
        sequences=text.sequences,
        scores=text.scores,
        logits=text.raw_logits,
        attentions=listed.attentions,
        hidden_states=listed.hidden_states,
        past_key_values=cache,
        acceptance_lengths=text.acceptance_lengths,
    )
