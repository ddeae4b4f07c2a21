"""
Decoding with a DFlash drafter: draft a block, verify it with one forward of the target, accept, commit.

`decode` is the whole loop. It is what `target.generate(**inputs, assistant_model=draft)` runs.
"""

from dataclasses import dataclass

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .accept_dflash import Continuation
from .drafting_dflash import DFlashCandidateGenerator, layout
from .outputs_dflash import TokenOutputs, lists_attentions
from .probe_dflash import probe_rollback
from .round_dflash import CompiledRound, eager_round
from .target_dflash import FeatureTap
from .verify_dflash import activate_past_recording, cache_argument, cached_columns, extra_arguments


logger = logging.get_logger(__name__)


@dataclass
class DFlashDecodingConfig:
    """
    How a drafter decodes; lives on `draft.decoding_config`.

    Args:
        block_size (`int`, *optional*): Verify only the first so many tokens of a drafted block, anchor included. The
            block is always drafted at the trained size.
        draft_temperature (`float`, *optional*): Temperature at which drafts are drawn when the target samples; 0 takes
            the likeliest tokens. Default: that of `generate` for a drafter with a path selector, 0 for others.
        compile (`bool` or `str`): Compile draft, verification and acceptance as one graph of fixed shape, for each
            bucket of 256, 512, 1024, ... slots; a string names the `torch.compile` backend. The first use of a bucket
            takes a while, and the slots stay in memory for the next call. Rounds whose attentions or hidden states
            are asked for, or that draw by `generators`, are not compiled.
        freeze (`bool`): With `compile`: make the weights constants of the graph, packed for the processor's matrix
            products, which takes as much memory again. Faster on CPUs, most of all in half precision. Changed weights
            are noticed at the next call, and compiled again.
        look_ahead (`int`, *optional*): Rounds that are started before the host looks at what they committed. At the
            end of a text up to so many less one are computed in vain. Default: 1 on a CPU, else 4. Always 1 where each
            token is asked for as it comes: with a streamer, a time limit, processors and criteria that read the text.
        generators (`list[torch.Generator]`, *optional*): Where the target samples, one for each row, those of
            `num_return_sequences` included. Rows then advance in step, each token of a row is one draw of its
            generator, and a row's text is the one that its generator gives for its prompt alone. Drafts that are drawn
            too (`draft_temperature`) are drawn by the same generators: then equal calls give equal texts, but a row's
            draws depend on how far the batch has come. Default: torch's own generator for all rows.
    """

    block_size: int | None = None
    draft_temperature: float | None = None
    compile: bool | str = False
    freeze: bool = False
    look_ahead: int | None = None
    generators: list[torch.Generator] | None = None

    def rounds_ahead(self, device: torch.device) -> int:
        """`look_ahead`, or its default for a device."""
        return self.look_ahead or (1 if device.type == "cpu" else 4)

    def check(self, trained: int) -> None:
        """
        Args:
            trained (`int`): The block size of the drafter.

        Raises:
            `ValueError`: a field that no drafter of that block size can follow.
        """
        if not (self.block_size is None or _is_count(self.block_size) and self.block_size <= trained):
            raise ValueError(
                f"decoding_config.block_size={self.block_size!r} must be a number of tokens from 1 to {trained}, the "
                "trained block size, or None for that."
            )
        temperature = self.draft_temperature
        if not (temperature is None or 0 <= temperature < float("inf")):
            raise ValueError(
                f"decoding_config.draft_temperature={temperature!r} must be 0, for the likeliest tokens, or positive."
            )
        if not (self.look_ahead is None or _is_count(self.look_ahead)):
            raise ValueError(
                f"decoding_config.look_ahead={self.look_ahead!r} must be a positive number of rounds, or None."
            )

    def check_generators(self, rows: int, device: torch.device) -> None:
        """
        Args:
            rows (`int`): Rows of a batch to sample.
            device (`torch.device`): Where they are sampled.

        Raises:
            `ValueError`: there is not one generator for each row, on that device.
        """
        given = self.generators
        if len(given) != rows or len(set(map(id, given))) != rows:
            raise ValueError(
                f"decoding_config.generators holds {len(set(map(id, given)))} generators, but {rows} rows are sampled "
                "(num_return_sequences of each prompt): pass a generator of its own for each row, or None."
            )
        elsewhere = {str(generator.device) for generator in given if generator.device != device}
        if elsewhere:
            raise ValueError(
                f"decoding_config.generators on {', '.join(sorted(elsewhere))}, but tokens are sampled on {device}: "
                f'make them with `torch.Generator("{device}")`.'
            )


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """
    `GenerateDecoderOnlyOutput` with `acceptance_lengths` (`list[list[int]]`): for each row the tokens committed by
    each verification, bonus included. The first token of a row comes from the prompt's forward and is not counted.
    """

    acceptance_lengths: list[list[int]] | None = None


def plain_reason(target, session_class, generation_config, model_kwargs, synced_gpus) -> str | None:
    """Why this call decodes without the drafter, or `None`."""
    positions = model_kwargs.get("position_ids")
    if synced_gpus:
        return "the ranks of a sharded target must run the same number of forwards"
    if session_class is None:
        return f"the cache of {type(target).__name__} cannot be rolled back"
    if positions is not None and positions.shape[-1] == 0:
        return "the prompt is empty"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or bool((mask.long().diff(dim=1) < 0).any())):
        return "attention_mask leaves out tokens that are not padding on the left"
    if generation_config.return_dict_in_generate and generation_config.output_attentions:
        cache = model_kwargs[cache_argument(target)]
        if not session_class.takes(cache):
            return f"in a {type(cache).__name__} attentions have a column for each token that it could hold"
        if not lists_attentions(target, cache):
            return f"the attentions of {type(target).__name__} cannot be told apart by layer"
    return None


def usable_cache(target, cache, session_class, implementation: str | None):
    """
    The cache to prefill: what `generate` made, or a dynamic one in place of a static one, whose shapes slots replace.

    Raises:
        `ValueError`: a static cache that the caller passed, a quantised or an offloaded one: their tokens cannot be
            moved into slots.
    """
    if session_class.takes(cache) and not cache.offloading:
        return cache
    from_caller = getattr(cache, "_is_user_defined", False)
    if cache.is_compileable and not from_caller and not cache.offloading:
        return DynamicCache(config=target.config.get_text_config(decoder=True))
    argument = "past_key_values is" if from_caller else f"cache_implementation={implementation!r} makes"
    kind = f"a {type(cache).__name__} of {type(cache.layers[0]).__name__}" if cache.layers else type(cache).__name__
    raise ValueError(
        f"{argument} {kind}{', offloaded to the CPU' * cache.offloading}, which a drafter cannot decode with: pass a "
        "`DynamicCache` that is not offloaded, leave `past_key_values` and `cache_implementation` out, or drop "
        "`assistant_model`."
    )


def draft_temperature(draft, generation_config) -> float:
    """The temperature at which a drafter draws its tokens; 0 when it takes the likeliest."""
    if not generation_config.do_sample:
        return 0.0
    temperature = draft.decoding_config.draft_temperature
    if temperature is None:
        samples = draft.config.selector_rank is not None
        temperature = 1.0 if generation_config.temperature is None else generation_config.temperature
        return float(temperature) if samples else 0.0
    return float(temperature)


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
    compiled = config.compile if session_class.free and not listed.asked else False and generators is None
    run, pools = eager_round, (None, None)
    if compiled:
        room = past + new + draft.config.block_size
        run = CompiledRound(target, draft, None if compiled is True else compiled, config.freeze)
        pools = run.pool(draft), run.pool(target)
    generator = DFlashCandidateGenerator(draft, target, generators=generators)
    padding, offset = layout(model_kwargs, rows, generator.device)
    generator.open(padding, past, room, offset, pools[0])
    if session_class.records_past:
        activate_past_recording(cache)
    was_training, session = draft.training, None
    keep_cache = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    if was_training:
        draft.eval()
    try:
        with FeatureTap(target, draft.config.target_layer_ids, consume=generator.absorb) as tap, listed:
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
            whole = compiled or text.look_ahead > 1  # every block has one shape, also at the end of the text
            while not text.done:
                # 2. Draft a block for each row and verify it with one forward of the target.
                used = text.reach + columns + draft.config.block_size
                size = block_size if whole else min(block_size, text.room)
                if compiled:  # the shapes of the bucket
                    used = max(generator.cache.reserve(used), session.cache.reserve(used))
                block, proposal, logits, features, verdict = run(
                    generator, session, tap, text, start, features, features_start, size, used, temperature
                )
                # 3. Accept what the target agrees with, and its own next token.
                counts = text.accept(logits, block, proposal, verdict)  # [R]
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
