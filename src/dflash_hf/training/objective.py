"""
The objective of training: from a batch of sequences to the weighted loss of a drafter's blocks.

`Objective.__call__` is one training step in five numbered parts. Its pieces are in files of their own: the positions
at which blocks begin (`anchors.py`), their inputs and labels (`blocks.py`), which keys they see (`block_mask.py`), and
the losses of their tokens (`losses.py`).

For each optimizer step the trainer calls [`Objective.draw_anchors`] and [`Objective.normalizer`] for every
micro-batch, and then the objective itself, micro-batch by micro-batch: the loss is divided by the normalizer of all of
them. So the blocks of a micro-batch are built twice, for the normalizer from the batch in main memory, and for the
loss on the device. That costs less than keeping the blocks of all micro-batches on the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dflash_hf.modeling.head_dflash import TokenHead
from dflash_hf.modeling.modeling_dflash import additive_mask
from dflash_hf.pairs.draft_vocabulary import draft_ids
from dflash_hf.targets.frozen import TargetOutput
from dflash_hf.targets.logits import target_logits
from dflash_hf.training.anchors import example_seeds, sample_anchors
from dflash_hf.training.block_attention import takes_groups
from dflash_hf.training.block_mask import block_groups, block_mask, flex_mask
from dflash_hf.training.blocks import Blocks, build_blocks, by_token
from dflash_hf.training.losses import (
    DraftedTokens,
    LogitsHead,
    Teacher,
    TokenLosses,
    Weights,
    block_loss,
    default_gamma,
    loss_normalizer,
    slot_weights,
    token_losses,
)
from dflash_hf.training.metrics import Statistics, block_statistics


Batch = dict[str, torch.Tensor]


class Objective:
    """
    The loss of a drafter against its frozen target. It keeps no state between batches.

    What follows from the arguments and the drafter's configuration is computed once, at construction: after a change
    of either, make another one.

    Args:
        draft (`DFlashDraftModel`): The drafter itself.
        target (`PreTrainedModel`): Its target; the embedding and the head are read here.
        args (`DFlashTrainingArguments`): Anchors, loss, and attention over blocks.
        read_target (`Callable`): Maps a batch to the [`~dflash_hf.targets.frozen.TargetOutput`] of its sequences: by a
            forward of the target, or from stored features.
    """

    def __init__(self, draft, target, args, read_target: Callable[[Batch], TargetOutput]):
        self.draft = draft
        self.target = target
        self.args = args
        self.read_target = read_target
        self.config = draft.config
        self.uses_flex = uses_flex(args.block_attention, draft.config, args.device)
        self.weights = weights_of(args, draft.config)
        half_dtype = None
        if args.bf16:
            half_dtype = torch.bfloat16
        elif args.fp16:
            half_dtype = torch.float16
        self.precision = partial(torch.autocast, args.device.type, dtype=half_dtype, enabled=half_dtype is not None)
        self.draft_ids = draft_ids(draft, target.get_input_embeddings().weight.shape[0])  # [V] or None
        draftable_target_ids = None  # [V_draft]
        if draft.config.has_own_lm_head:
            draftable_target_ids = draft.target_ids(torch.arange(len(draft.d2t)))
        self.teacher_head = partial(target_logits, target, ids=draftable_target_ids)  # [M, H_t] -> [M, V_draft]

    def draft_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The draft logits `[M, V]` of hidden states `[M, H]`, in the precision of the run."""
        with self.precision():
            return self.draft.draft_logits(hidden, self.target.get_output_embeddings())

    def draw_anchors(self, batch: Batch, step: int) -> None:
        """Add `anchors` and `valid` `[N, A]` to a batch; they depend only on each sequence, the seed and the step."""
        seeds = example_seeds(batch["input_ids"], batch["attention_mask"], self.args.seed, step)
        num_anchors = min(self.args.num_anchors, batch["input_ids"].shape[1])  # more would all be invalid
        every = self.config.block_size if self.args.anchor_sampling == "regular" else None
        batch["anchors"], batch["valid"] = sample_anchors(batch["loss_mask"], num_anchors, seeds=seeds, every=every)

    def normalizer(self, batch: Batch) -> torch.Tensor:
        """The divisor of the summed loss of a batch with anchors, `[]`."""
        return loss_normalizer(self.build_blocks(batch).counted, self.weights).sum()

    def __call__(self, model, batch: Batch, progress: float = 0.0) -> tuple[torch.Tensor, Statistics]:
        """
        One pass of the drafter over a batch.

        Args:
            model: The drafter in its wrappers for training, if it has any.
            batch (`dict`): A collated batch, with anchors.
            progress (`float`): Share of the run that is done, for token heads whose loss depends on it.

        Returns:
            The loss of each sequence `[N]`, differentiable, and its statistics. Their normalizer is the weights that
            the loss is a sum over; it is to be divided by their sum over all micro-batches and ranks.
        """
        args = self.args
        config = self.config

        # 1. The frozen target reads the sequences: features [N, S, L*H_t] of every token.
        output = self.read_target(batch)

        # 2. Blocks of B slots at A anchors: [anchor, MASK, ..., MASK].
        blocks = self.build_blocks(batch)
        block_embeds = self.draft.embed(self.target, blocks.input_ids)  # [N, A*B, H]
        if self.draft.layers[0].gradient_checkpointing and model.training:
            block_embeds.requires_grad_()  # reentrant checkpoints take their parameters' gradients from their inputs'

        # 3. One pass of the drafter over [context | blocks].
        dtype = self.draft.dtype
        hidden = model(
            noise_embeds=block_embeds.to(dtype),  # the reference's name; nothing in it is noisy
            context_hidden_states=output.features.to(dtype),
            attention_mask=self.attention_masks(batch),
            position_ids=blocks.position_ids,
        ).last_hidden_state.to(dtype)  # [N, A*B, H]; mixed precision returns fp32
        hidden = by_token(hidden, config.block_size, config.sample_from_anchor)  # [N, A, T, H]

        # 4. Token losses through the target's head, chunk by chunk.
        labels = blocks.labels if self.draft_ids is None else self.draft_ids.to(blocks.labels.device)[blocks.labels]
        previous_ids = batch["input_ids"].flatten()[blocks.previous_index]  # [N, A, T]
        teacher = None
        if args.has_teacher:
            states = output.last_hidden_state.flatten(0, 1)  # [N*S, H_t]
            teacher = Teacher(states, blocks.previous_index, self.teacher_head, args.loss.kind)
        losses = self.head_losses(hidden, labels, blocks.counted, previous_ids, teacher, progress)

        # 5. Their weighted sum over each sequence.
        loss = block_loss(losses, blocks.counted, self.weights)  # [N]
        normalizer = loss_normalizer(blocks.counted, self.weights)  # [N]
        drafted_tokens = (..., slice(config.max_block_tokens))  # without a last token that is only trained
        statistics = block_statistics(
            losses.correct[drafted_tokens],
            blocks.counted[drafted_tokens],
            loss,
            normalizer,
            losses.correct_without_head[drafted_tokens],
        )
        return loss, statistics

    def build_blocks(self, batch: Batch) -> Blocks:
        """The blocks of a batch with anchors, see [`~dflash_hf.training.blocks.build_blocks`]."""
        return build_blocks(
            batch["input_ids"],
            batch["loss_mask"],
            batch["anchors"],
            batch["valid"],
            self.config.block_size,
            self.config.mask_token_id,
            anchor_first=self.config.sample_from_anchor,
            contiguous_only=self.args.loss.contiguous_only,
        )

    def attention_masks(self, batch: Batch) -> dict[str, Any]:
        """
        The mask of each layer type: a `BlockMask` for flex attention, else groups of blocks, where the layers take
        them; else, and for sinks, which are a column of the mask, additive `[N, 1, A*B, S + A*B]`.
        """

        def mask(window: int | None, is_causal: bool):
            """The mask of one layer type."""
            rule = (batch["anchors"], batch["attention_mask"], self.config.block_size, window, is_causal)
            if self.uses_flex:
                return flex_mask(*rule)
            if takes_groups(self.config) and not self.config.attention_sink_bias:
                return block_groups(*rule)
            return additive_mask(block_mask(*rule), self.draft.dtype)

        return self.config.map_layer_types(mask)

    def head_losses(self, hidden, labels, counted, previous_ids, teacher, progress: float = 0.0) -> TokenLosses:
        """
        The losses of the drafter's head on the blocks, `[N, A, T]`, from hidden states `[N, A, T, H]`.

        Args:
            hidden, labels, counted, teacher: As for [`~dflash_hf.training.losses.token_losses`].
            previous_ids (`torch.LongTensor`): `[N, A, T]`, the token before each one.
            progress (`float`): Share of the run that is done.
        """
        draft = self.draft
        head = LogitsHead(self.draft_head)
        if self.config.has_token_head:
            token_head = self.config.token_head_class(draft, partial(draft.embed, self.target))
            # A head with candidates gives no gradient to the slots among whose candidates it chooses.
            head_input = hidden if token_head.top_k is None else hidden.detach()
            draftable = counted & (labels >= 0)
            queries = forced_queries(token_head, draft.clamp_to_vocabulary(previous_ids), head_input, draftable)
            head = ForcedTokenHead(self.draft_head, token_head, queries, draft.target_ids, progress)
        return token_losses(hidden, head, labels, counted, self.args.loss_chunk_size, teacher)


class ForcedTokenHead(LogitsHead):
    """
    The token head of a drafter in training, where the token before each one is that of the text (teacher forcing).

    Args:
        logits (`Callable`): The draft logits, `[M, H] -> [M, V]`, see [`~dflash_hf.training.losses.LogitsHead`].
        token_head (`TokenHead`): The drafter's token head.
        queries (`torch.Tensor`): `[M, q]`, from [`forced_queries`].
        target_ids (`Callable`): Maps ids of the drafter's vocabulary to the target's.
        progress (`float`): Share of the run that is done.
    """

    def __init__(self, logits: Callable, token_head: TokenHead, queries: torch.Tensor, target_ids, progress: float):
        super().__init__(logits)
        self.token_head = token_head
        self.queries = queries
        self.target_ids = target_ids
        self.progress = progress

    def score(self, queries, logits):
        """The candidates of the token head, `None` for all tokens, and their scores."""
        has_candidates = self.token_head.top_k is not None
        if has_candidates:
            logits = logits.detach()
        ids, logits = self.token_head.candidates(logits.to(queries.device))
        scores = self.token_head.scores(queries, self.target_ids(ids), logits)
        return ids if has_candidates else None, scores

    def loss(self, tokens: DraftedTokens) -> torch.Tensor:
        """The token head's own loss, `[M]`."""
        return self.token_head.loss(tokens, progress=self.progress)


def weights_of(args, config) -> Weights:
    """How a run weighs the tokens of a block: adaptively if its loss does, or by slot."""
    if args.loss.adaptive_weights is not None:
        return args.loss.adaptive_weights
    num_tokens = config.block_size + config.sample_from_anchor
    gamma = args.loss_decay_gamma or default_gamma(config.max_block_tokens)
    return slot_weights(num_tokens, gamma).to(args.device)  # [T]


def forced_queries(
    head: TokenHead, previous_ids: torch.LongTensor, hidden: torch.Tensor, draftable: torch.BoolTensor
) -> torch.Tensor:
    """
    The queries of a token head for whole blocks, teacher-forced: the token before each one is that of the text. A
    query is the vector from which the head scores a token's candidates, see `TokenHead.step`.

    Args:
        head (`TokenHead`): The drafter's token head.
        previous_ids (`torch.LongTensor`): `[..., T]`, the token before each token of a block, anchor included. `T` is
            `block_size`, and one more if the anchor's slot drafts, too.
        hidden (`torch.Tensor`): `[..., T, H]`.
        draftable (`torch.BoolTensor`): `[..., T]`, the tokens to learn from; never the first, the anchor.

    Returns:
        `torch.Tensor` `[M, q]`, the queries of these tokens.
    """
    if head.order <= 1:  # without a state, all tokens at once
        return head.step(None, previous_ids[draftable], hidden[draftable])[0]
    previous_ids = previous_ids.flatten(0, -2)  # [R, T]
    hidden = hidden.flatten(0, -3)  # [R, T, H]
    state = head.start(previous_ids[:, 1])
    queries = []
    for token in range(1, previous_ids.shape[1]):
        query, state = head.step(state, previous_ids[:, token], hidden[:, token])
        queries.append(query)
    return torch.stack(queries, dim=1).unflatten(0, draftable.shape[:-1])[draftable[..., 1:]]


def uses_flex(choice: str, config, device: torch.device) -> bool:
    """Whether blocks use flex attention; `"auto"` does on CUDA if its kernels support this drafter."""
    if choice == "flex" and config.attention_sink_bias:
        raise ValueError(
            "block_attention='flex' cannot train a drafter with attention_sink_bias=True, whose sinks are a column of "
            "a dense mask; use 'dense'."
        )
    fits = not config.attention_sink_bias and min(config.head_dim, config.v_head_dim) >= 16
    return choice == "flex" or (choice == "auto" and device.type == "cuda" and fits)
