"""
Decoding with a DFlash drafter: draft a block, verify it with one forward of the target, accept, commit.

`decode` is the whole loop. It is what `target.generate(**inputs, assistant_model=draft)` runs.
"""

from dataclasses import dataclass

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.generation import CandidateGenerator, GenerateDecoderOnlyOutput
from transformers.utils import logging

from .accept_dflash import Continuation
from .cache_dflash import SlotCache, can_adopt, slot_mask
from .target_dflash import FeatureTap, raw_embedding
from .verify_dflash import activate_past_recording, extra_arguments, probe_rollback


logger = logging.get_logger(__name__)


@dataclass
class DFlashDecodingConfig:
    """
    How a drafter decodes; lives on `draft.decoding_config`.

    Args:
        block_size (`int`, *optional*): Verify only the first so many tokens of a drafted block, anchor included. The
            block is always drafted at the trained size.
        compile (`bool` or `str`): Compile draft and verification as one fixed-shape graph; a string names the
            `torch.compile` backend.
    """

    block_size: int | None = None
    compile: bool | str = False


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """
    `GenerateDecoderOnlyOutput` with `acceptance_lengths` (`list[list[int]]`): for each row the tokens committed by
    each verification, bonus included. The first token of a row comes from the prompt's forward and is not counted.
    """

    acceptance_lengths: list[list[int]] | None = None


class DFlashCandidateGenerator(CandidateGenerator):
    """
    Drafts blocks from the target's features. Also runs inside upstream's own `_assisted_decoding` (one row), through
    `get_candidates`.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        target (`PreTrainedModel`): The target, for its embedding and head.
        max_length (`int`): Longest row, prompt included; for upstream's loop.
    """

    requires_model_outputs = True
    model_kwargs_overrides = {"output_hidden_states": True}

    def __init__(self, draft, target, max_length: int | None = None):
        self.draft_model, self.target = draft, target
        self.config = draft.config
        self.head = target.get_output_embeddings()
        self.device = target.get_input_embeddings().weight.device
        self.max_length = max_length
        self.noise = torch.full((1, self.config.block_size - 1), self.config.mask_token_id, device=self.device)
        self.cache: SlotCache | None = None

    def open(self, padding: list[int], past: int, room: int, offset: torch.Tensor) -> None:
        """
        Make room for a prompt.

        Args:
            padding (`list[int]`): Padding columns at the start of each row.
            past (`int`): Columns whose features were never seen: those of a prefilled cache.
            room (`int`): Tokens of a row at most, prompt and a last block included.
            offset (`torch.LongTensor`): `[R, 1]`, position of a row's first token.
        """
        self.padding = torch.tensor(padding, device=self.device)[:, None]  # [R, 1]
        self.first = (past - self.padding).clamp(min=0)  # [R, 1], the token that sits in slot 0
        self.offset = offset
        self.columns = past
        self.cache = SlotCache(len(padding), room)

    def absorb(self, features: torch.Tensor) -> None:
        """Add the features `[R, C, L * H]` of the prompt's next columns to the drafter's context."""
        columns = torch.arange(self.columns, self.columns + features.shape[1], device=self.device)
        tokens = columns - self.padding  # [R, C], the number of each token in its row; padding is negative
        slots = torch.where(tokens < 0, self.cache.trash, tokens - self.first)
        self.columns += features.shape[1]
        self.cache.place(slots, used=1)
        positions = (tokens + self.offset).clamp(min=0)
        self.draft_model.extend_context(self._to_draft(features), self._to_draft(positions), self.cache)

    def draft(self, anchors, start, features=None, features_start=None, used: int = 0) -> torch.LongTensor:
        """
        Fill one block for each row.

        Args:
            anchors (`torch.LongTensor`): `[R]`, the last committed token of each row.
            start (`torch.LongTensor`): `[R]`, the number of that token in its row.
            features (`torch.Tensor`, *optional*): `[R, n, L * H]`, features of the block verified last, rejected
                tokens included: their slots are covered by the new block.
            features_start (`torch.LongTensor`, *optional*): `[R]`, the number of the first of them.
            used (`int`): No row has a token at or past it once the block is written.

        Returns:
            `torch.LongTensor` `[R, B]`: the anchor and the drafted tokens.
        """
        rows, size = anchors.shape[0], self.config.block_size
        inside = torch.arange(size, device=self.device)
        block = start[:, None] + inside  # [R, B], token numbers
        tokens = block
        if features is not None:
            earlier = features_start[:, None] + torch.arange(features.shape[1], device=self.device)  # [R, n]
            tokens = torch.cat([earlier, block], dim=1)
        slots = tokens - self.first
        groups = slots.split([tokens.shape[1] - size, size], dim=1) if features is not None else (slots,)
        self.cache.place(*groups, used=used)

        noise = torch.cat([anchors[:, None], self.noise.expand(rows, -1)], dim=1)  # [R, B]
        hidden = self.draft_model(
            noise_embeds=self._to_draft(raw_embedding(self.target, noise)),
            context_hidden_states=None if features is None else self._to_draft(features),
            attention_mask=self._masks(slots[:, -size:]),
            position_ids=self._to_draft(tokens + self.offset),
            past_key_values=self.cache,
        ).last_hidden_state[:, 1:]  # slot 0 is the anchor and predicts nothing
        weight = self.head.weight
        logits = self.head(hidden.to(device=weight.device, dtype=weight.dtype))  # [R, B - 1, V]
        return torch.cat([anchors[:, None], logits.argmax(dim=-1).to(self.device)], dim=1)

    def _masks(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        masks = {}
        for layer_idx, layer_type in enumerate(self.config.layer_types):
            if layer_type not in masks:
                last_seen = slots if self.config.layer_is_causal(layer_idx) else slots[:, -1:].expand_as(slots)
                window = self.config.sliding_window if layer_type == "sliding_attention" else None
                mask = slot_mask(slots, last_seen, self.cache.view, window, None, self.draft_model.dtype)
                masks[layer_type] = mask.to(self.draft_model.device)
        return masks

    def _to_draft(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.draft_model.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self.draft_model.device, dtype=dtype)

    def get_candidates(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **kwargs):
        """Upstream's interface: one row; the first call comes before any forward of the target and drafts nothing."""
        length = input_ids.shape[1]
        room = self.max_length - length - 1
        if is_first_iteration or room <= 0:
            return input_ids, None
        layers = [model_outputs.hidden_states[i + 1] for i in self.config.target_layer_ids]
        features = torch.cat([layer.to(self.device) for layer in layers], dim=-1)
        if self.cache is None:
            padding, offset = layout(model_kwargs, 1, self.device)
            past = length - 1 - features.shape[1]
            self.open(padding, past, self.max_length + self.config.block_size, offset)
            self.absorb(features)
            features = features_start = None
        else:
            features_start = self.start
        self.start = torch.tensor([length - 1 - int(self.padding)], device=self.device)
        used = length + self.config.block_size
        block = self.draft(input_ids[:, -1].to(self.device), self.start, features, features_start, used)
        return torch.cat([input_ids, block[:, 1 : 1 + room].to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing to adapt: a block is always drafted whole. (Abstract upstream before 5.20.)"""


def layout(model_kwargs: dict, rows: int, device) -> tuple[list[int], torch.Tensor]:
    """
    Where a prompt's tokens stand: the padding columns of each row, and the position of its first token, `[R, 1]`.
    """
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    padding = torch.zeros(rows, dtype=torch.long, device=device)
    if mask is not None:
        padding = (mask.shape[1] - mask.long().sum(dim=1)).to(device)
    offset = torch.zeros(rows, dtype=torch.long, device=device)
    if positions is not None:
        offset = positions[:, -1].to(device).expand(rows) - (positions.shape[1] - 1 - padding)
    return padding.tolist(), offset[:, None]


def plain_reason(target, session_class, generation_config, model_kwargs, synced_gpus) -> str | None:
    """Why this call decodes without the drafter, or `None`."""
    positions = model_kwargs.get("position_ids")
    rows = 1 if positions is None else positions.shape[0]
    if session_class is None:
        return f"the cache of {type(target).__name__} cannot be rolled back"
    mask = model_kwargs.get("attention_mask")
    if session_class.kind == "crop" and max(rows, 1 if mask is None else mask.shape[0]) > 1:
        return f"the cache of {type(target).__name__} can only be cropped for all rows at once, and there are several"
    if positions is not None and positions.dim() > 2:
        return "position ids of several axes are not supported"
    if positions is not None and positions.shape[1] == 0:
        return "the prompt is empty"
    if generation_config.output_attentions or generation_config.output_hidden_states:
        return "attentions and hidden states for each token were asked for"
    if synced_gpus:
        return "the ranks of a sharded target must run the same number of forwards"
    return None


def usable_cache(target, cache, session_class):
    """
    The cache to prefill: what `generate` made, or a dynamic one in place of a static one, whose shapes slots replace.

    Raises:
        `ValueError`: a cache that the caller passed, or a quantised one, whose tokens cannot be moved into slots.
    """
    if session_class.kind == "crop" or can_adopt(cache):
        return cache
    if cache.is_compileable and not getattr(cache, "_is_user_defined", False):
        return DynamicCache(config=target.config.get_text_config(decoder=True))
    raise ValueError(
        f"past_key_values is a {type(cache).__name__} of {type(cache.layers[0]).__name__}, which a drafter cannot "
        "decode with: pass a `DynamicCache`, leave `past_key_values` and `cache_implementation` out, or drop "
        "`assistant_model`."
    )


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
    session_class = probe_rollback(target)
    reason = plain_reason(target, session_class, generation_config, model_kwargs, synced_gpus)
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
    cache = model_kwargs["past_key_values"] = usable_cache(target, model_kwargs["past_key_values"], session_class)
    past, rows = cache.get_seq_length(), input_ids.shape[0]
    embeds = model_kwargs.get("inputs_embeds")
    text = Continuation(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    prompt = past + max(
        input_ids.shape[1], 0 if embeds is None else embeds.shape[1]
    )  # at most; may count `past` twice
    room = prompt + text.max_new + draft.config.block_size
    generator = DFlashCandidateGenerator(draft, target)
    padding, offset = layout(model_kwargs, rows, generator.device)
    generator.open(padding, past, room, offset)
    if session_class.kind == "crop":
        activate_past_recording(cache)
    was_training = draft.training
    draft.eval()
    try:
        with FeatureTap(target, draft.config.target_layer_ids, consume=generator.absorb) as tap:
            outputs = target._prefill(input_ids, generation_config, model_kwargs)
            columns = cache.get_seq_length()
            if session_class.kind == "crop":
                cache.crop(0)
            tap.consume = None
            extra = extra_arguments(target, model_kwargs)
            session = session_class(target, cache, padding, room, offset, extra)
            logits = outputs.logits[:, -1:].to(generator.device)
            del outputs
            text.accept(logits)

            def draft_and_verify(anchors, start, features, features_start, size, used):
                block = text.drafted(generator.draft(anchors, start, features, features_start, used))
                logits = session.verify(block[:, :size], start, used)
                return block[:, :size], logits, tap.take()

            compiled = draft.decoding_config.compile
            if compiled:
                backend = {} if compiled is True else {"backend": compiled}
                draft_and_verify = torch.compile(draft_and_verify, fullgraph=True, dynamic=False, **backend)

            start = torch.tensor([columns - pad for pad in padding], device=generator.device)  # [R], the anchors
            features = features_start = None
            while not text.done:
                # 2. Draft a block for each row and verify it with one forward of the target.
                size = min(draft.decoding_config.block_size or draft.config.block_size, draft.config.block_size)
                size = size if compiled else min(size, text.room)
                used = room if compiled else text.longest + columns + draft.config.block_size
                block, logits, features = draft_and_verify(text.last, start, features, features_start, size, used)
                # 3. Accept what the target agrees with, and its own next token.
                counts = text.accept(logits, block)  # [R]
                # 4. Commit: the accepted tokens stay, everything after them will be written over.
                session.commit(rejected=size - int(counts[0]) if session.kind == "crop" else 0)
                features_start, start = start, start + counts
    finally:
        draft.train(was_training)

    if streamer is not None:
        streamer.end()
    if not (generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)):
        return text.sequences
    cache = session.close(columns + text.longest - 1)
    if not generation_config.return_dict_in_generate:
        return text.sequences
    return DFlashGenerateOutput(
        sequences=text.sequences,
        scores=text.scores,
        logits=text.raw_logits,
        past_key_values=cache,
        acceptance_lengths=text.acceptance_lengths,
    )
