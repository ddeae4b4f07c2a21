"""The losses of blocks through the target's frozen head."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class LossTerms(NamedTuple):
    """The weight of each term of a loss."""

    cross_entropy: float = 0.0  # with the label
    total_variation: float = 0.0  # between the teacher's distribution and the drafter's
    kl: float = 0.0  # divergence of the drafter's distribution from the teacher's


# How a token is compared, by kind. A kind is part of a `loss_type`, see `LOSSES` below.
LOSS_TERMS = {
    "ce": LossTerms(cross_entropy=1.0),
    "kl": LossTerms(kl=1.0),
    # DSpark: 0.9 times the L1 distance, which is twice the total variation.
    "dspark": LossTerms(cross_entropy=0.1, total_variation=1.8),
}


@dataclass
class TokenLosses:
    """The results of one pass through the head, for every token."""

    loss: torch.Tensor  # [...]  in the terms of the run's kind of loss, differentiable; 0 where not draftable
    nll: torch.Tensor  # [...]  negative log-likelihood of the label, without gradient; 0 where not draftable
    correct: torch.BoolTensor  # [...]  whether the drafted token is the label; false where not draftable
    draftable: torch.BoolTensor  # [...]  counted in the loss, and in the drafter's vocabulary
    correct_without_head: torch.BoolTensor  # [...]  as `correct`, for the argmax of the logits without the token head


# Weights that depend on what is drafted: from losses and counted tokens `[N, A, T]` to weights `[N, A, T]`.
AdaptiveWeights: TypeAlias = Callable[[TokenLosses, torch.BoolTensor], torch.Tensor]
# How tokens are weighed: fixed weights `[T]` of the tokens of a block, or adaptive ones.
Weights: TypeAlias = torch.Tensor | AdaptiveWeights


@dataclass
class Teacher:
    """The target's own distributions: its head on the state `states[state_index[...]]` for each token."""

    states: torch.Tensor  # [P, H]  the target's final hidden states
    state_index: torch.LongTensor  # [...]  of the state that predicts each token, that at a + k - 1
    head: Callable[[torch.Tensor], torch.Tensor]  # [M, H] -> [M, V]
    kind: str = "kl"  # how the drafter's distribution is compared with it, a key of `LOSS_TERMS`


@dataclass
class DraftedTokens:
    """
    `M` draftable tokens, from which a drafter learns: what [`TokenHead.loss`] is given.

    Heads are published with the weights of drafters. So the names of these fields, and of the methods `divergence`,
    `distance` and `selection`, are an interface: they stay as they are.
    """

    scores: torch.Tensor  # [M, V]  the token head's scores, differentiable; [M, k] of `ids`
    logits: torch.Tensor  # [M, V]  the draft logits without the token head, differentiable
    ids: torch.LongTensor | None  # [M, k]  the candidates of a head that does not choose among all tokens
    labels: torch.LongTensor  # [M]
    teacher: torch.Tensor | None  # [M, V]  the target's logits
    hidden: torch.Tensor  # [M, H]
    query: torch.Tensor | None  # [M, q]  what the token head scores by, see `TokenHead.step`
    kind: str = "ce"  # kind of loss, a key of `LOSS_TERMS`

    @cached_property
    def log_probabilities(self) -> torch.Tensor:
        """Those of the `scores`, `[M, V]` or `[M, k]`, differentiable, for loss and metrics."""
        return log_softmax(self.scores)

    def divergence(self, scores: torch.Tensor) -> torch.Tensor:
        """The run's loss for scores `[M, V]`, `[M]`."""
        log_q = self.log_probabilities if scores is self.scores else log_softmax(scores)
        return divergence(log_q, self.labels, self.teacher, self.kind)

    def distance(self, scores: torch.Tensor) -> torch.Tensor:
        """The total variation between the teacher and scores `[M, V]`, `[M]`, from 0 to 1."""
        return total_variation(log_softmax(scores).exp(), self.teacher)

    def selection(self) -> torch.Tensor:
        """
        The loss of choosing among candidates, `[M]`: the divergence of their scores from the teacher's distribution
        over them, or from the label; 0 if the label is no candidate.
        """
        log_q = self.log_probabilities
        target_share = self.ids == self.labels[:, None]  # [M, k]
        if self.teacher is not None:
            target_share = self.teacher.to(_at_least_fp32(self.teacher.dtype)).softmax(-1).gather(1, self.ids)
        target_share = target_share.to(log_q)
        total_share = target_share.sum(-1, keepdim=True).clamp(min=1e-30)
        return (torch.xlogy(target_share, target_share / total_share) - target_share * log_q).sum(-1)

    @torch.no_grad()
    def metrics(self) -> "TokenMetrics":
        """What the log says of these tokens."""
        labels = self.labels
        log_q = self.log_probabilities
        best = self.scores.max(-1).indices  # `argmax` takes twice as long in fp32, and four times as long in bf16
        best_without_head = best if self.logits is self.scores else self.logits.max(-1).indices
        correct_without_head = best_without_head == labels
        if self.ids is None:
            nll = functional.nll_loss(log_q, labels, reduction="none")
            return TokenMetrics(nll, best == labels, correct_without_head)
        is_label = self.ids == labels[:, None]
        nll = -log_q.masked_fill(~is_label, -math.inf).amax(-1)  # infinite if it is no candidate
        return TokenMetrics(nll, is_label.gather(1, best[:, None])[:, 0], correct_without_head)


class TokenMetrics(NamedTuple):
    """The metrics of `M` tokens, without gradients; as the fields of [`TokenLosses`]."""

    nll: torch.Tensor  # [M]
    correct: torch.BoolTensor  # [M]
    correct_without_head: torch.BoolTensor  # [M]


class LogitsHead:
    """
    The head of a drafter without a token head: the scores of tokens are their logits. Subclasses score otherwise.

    Args:
        logits (`Callable`): The target's head, `[M, H] -> [M, V]`, applied to each hidden state independently; its
            parameters get no gradient.

    Attributes:
        queries (`torch.Tensor`, *optional*): `[M, q]`, of the draftable tokens, for heads that score by them.
    """

    queries: torch.Tensor | None = None

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]):
        self.logits = logits

    def score(
        self, queries: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.LongTensor | None, torch.Tensor]:
        """From queries `[M, q]` and logits `[M, V]` the candidates `[M, k]`, or `None` for all tokens; and scores."""
        return None, logits

    def loss(self, tokens: DraftedTokens) -> torch.Tensor:
        """The loss of tokens, `[M]`."""
        return tokens.divergence(tokens.scores)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of logits `[..., V]`, in fp32 at least."""
    return functional.log_softmax(logits, dim=-1, dtype=_at_least_fp32(logits.dtype))


def divergence(
    log_q: torch.Tensor, labels: torch.LongTensor, teacher: torch.Tensor | None = None, kind: str = "kl"
) -> torch.Tensor:
    """
    The loss `[M]` of log-probabilities `[M, V]` against labels `[M]` and a teacher's logits `[M, V]`, in the terms of
    `LOSS_TERMS[kind]`; without a teacher, the labels' cross-entropy.
    """
    terms = LOSS_TERMS["ce" if teacher is None else kind]
    loss = 0.0
    if terms.cross_entropy:
        loss = loss + terms.cross_entropy * functional.nll_loss(log_q, labels, reduction="none")
    if terms.total_variation:
        loss = loss + terms.total_variation * total_variation(log_q.exp(), teacher)
    if terms.kl:
        log_p = log_softmax(teacher.to(log_q))
        loss = loss + terms.kl * functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    return loss


def total_variation(q: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The total variation between probabilities and those of a teacher's logits, `[M, V]` each: `[M]`, from 0 to 1."""
    return 0.5 * (q - teacher.to(q).softmax(-1)).abs().sum(-1)


def default_gamma(block_size: int) -> float:
    """
    The decay of the slot weights for a block size: 4, 5 and 7 for 8, 10 and 16 (DFlash, arXiv 2602.06036).

    Between and beyond these, piecewise linear: half the block size up to 10, then a third per additional slot.
    """
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def slot_weights(block_size: int, gamma: float | None = None) -> torch.Tensor:
    """
    `w_k = exp(-(k - 1) / gamma)` for slots `k >= 1`, and 0 for the anchor: an early mistake costs all later slots.

    Args:
        block_size (`int`): Slots of a block.
        gamma (`float`): Default: [`default_gamma`]. `math.inf` weighs all slots equally.

    Returns:
        `torch.Tensor` `[B]`.
    """
    gamma = default_gamma(block_size) if gamma is None else gamma
    weights = [0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    return torch.tensor(weights)


def token_losses(
    hidden: torch.Tensor,
    head: LogitsHead,
    labels: torch.LongTensor,
    counted: torch.BoolTensor,
    chunk_size: int = 512,
    teacher: Teacher | None = None,
) -> TokenLosses:
    """
    The losses of tokens through the target's frozen head, with the logits of at most `chunk_size` tokens in memory at
    a time.

    If no parameter of the head is trained, the gradient of each token's loss is computed in the forward pass, while
    its logits are in memory: it is known up to a factor, the token's weight. Otherwise the weights would be needed for
    the gradients of the parameters, and the logits of all chunks are computed again in the backward pass.

    Only counted tokens of the drafter's vocabulary reach the head. Half-precision logits are summed in fp32.

    Args:
        hidden (`torch.Tensor`): `[..., H]`, the drafter's final hidden states.
        head (`LogitsHead`): The target's head, and the drafter's token head if it has one. The loss of a token depends
            on its own hidden state and query, and on parameters.
        labels (`torch.LongTensor`): `[...]`, ids in the drafter's vocabulary, -1 for tokens outside it.
        counted (`torch.BoolTensor`): `[...]`.
        chunk_size (`int`): Tokens of one pass through the head.
        teacher (`Teacher`, *optional*): For a loss against the target's distribution, instead of the cross-entropy of
            `labels`.
    """
    draftable = counted & (labels >= 0)
    inputs = [hidden[draftable]]  # [M, H]
    if head.queries is not None:
        inputs.append(head.queries)  # [M, q]
    label_chunks = labels[draftable].split(chunk_size)  # without tokens one empty chunk: every rank runs its backward
    index_chunks = [None] * len(label_chunks)
    if teacher is not None:
        index_chunks = teacher.state_index[draftable].split(chunk_size)
    input_chunks = zip(*(rows.split(chunk_size) for rows in inputs), strict=True)

    compute: Callable[..., tuple[torch.Tensor, ...]] = _chunk_losses
    if torch.is_grad_enabled():
        if _depends_on_parameters(head, teacher, inputs):
            if len(label_chunks) > 1:
                compute = partial(checkpoint, _chunk_losses, use_reentrant=False, preserve_rng_state=False)
        elif any(rows.requires_grad for rows in inputs):
            compute = _losses_with_gradients
    chunks = [
        compute(head, teacher, chunk_labels, state_index, *chunk_inputs)
        for chunk_labels, state_index, chunk_inputs in zip(label_chunks, index_chunks, input_chunks, strict=True)
    ]
    columns = (torch.cat(column).to(hidden.device) for column in zip(*chunks, strict=True))
    loss, nll, correct, correct_without_head = (_scatter(column, draftable) for column in columns)
    return TokenLosses(loss, nll, correct, draftable, correct_without_head)


def _chunk_losses(
    head: LogitsHead,
    teacher: Teacher | None,
    labels: torch.LongTensor,
    state_index: torch.LongTensor | None,
    hidden: torch.Tensor,
    queries: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The loss and the [`TokenMetrics`] of `M` tokens in one pass through the head, `[M]` each."""
    logits = head.logits(hidden)  # [M, V]
    ids, scores = head.score(queries, logits)
    logits = logits.to(scores.device)
    teacher_logits = None
    if teacher is not None:
        states = teacher.states[state_index.to(teacher.states.device)]  # [M, H]
        # The target's head may have rows past the drafter's vocabulary.
        teacher_logits = teacher.head(states)[..., : logits.shape[-1]].to(scores.device)
    kind = "ce" if teacher is None else teacher.kind
    labels = labels.to(scores.device)
    tokens = DraftedTokens(scores, logits, ids, labels, teacher_logits, hidden, queries, kind)
    return head.loss(tokens), *tokens.metrics()


def _depends_on_parameters(head: LogitsHead, teacher: Teacher | None, inputs: list[torch.Tensor]) -> bool:
    """Whether trained parameters have a part in the loss: then it has a gradient although its inputs have none."""
    nothing = torch.empty(0, dtype=torch.long, device=inputs[0].device)
    loss, *_ = _chunk_losses(head, teacher, nothing, nothing, *(rows[:0].detach() for rows in inputs))
    return loss.requires_grad


def _losses_with_gradients(
    head: LogitsHead,
    teacher: Teacher | None,
    labels: torch.LongTensor,
    state_index: torch.LongTensor | None,
    *inputs: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """As [`_chunk_losses`], with the gradients of the loss computed now, so that no logits are kept."""
    leaves = [rows.detach().requires_grad_(rows.requires_grad) for rows in inputs]
    loss, *metrics = _chunk_losses(head, teacher, labels, state_index, *leaves)
    trained_leaves = [leaf for leaf in leaves if leaf.requires_grad]
    # The loss of a token depends on its own row, so the gradient of the sum has the gradient of each loss in its row.
    gradients = torch.autograd.grad(loss.sum(), trained_leaves, materialize_grads=True)
    trained_inputs = [rows for rows in inputs if rows.requires_grad]
    return _RowGradients.apply(loss.detach(), gradients, *trained_inputs), *metrics


class _RowGradients(torch.autograd.Function):
    """Losses `[M]` of the rows of inputs `[M, ...]`, from their values and their known gradients by these rows."""

    @staticmethod
    def forward(ctx, losses: torch.Tensor, gradients: tuple[torch.Tensor, ...], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*gradients)
        return losses.view_as(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx, weights: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weights = weights[:, None]  # [M, 1]
        scaled = [(gradient * weights.to(gradient.device)).to(gradient.dtype) for gradient in ctx.saved_tensors]
        return None, None, *scaled


def dpace_weights(losses: TokenLosses, counted: torch.BoolTensor, alpha: float = 0.5) -> torch.Tensor:
    """
    D-PACE (arXiv 2605.18810): a token's weight is its contribution to the expected accepted prefix.

    With `q_i = exp(-nll_i)` and `s_i = (1 - alpha) q_i + alpha`, the credit of token `j` is `C_j = s_1 ... s_j` and
    its weight the sum of the credits from `j` on. A token that is not counted has factor 1 and credit 0; one that is
    not draftable has `q_i = 0`.

    Args:
        losses (`TokenLosses`): `[..., T]`; their gradient is not used.
        counted (`torch.BoolTensor`): `[..., T]`.
        alpha (`float`): 1 weighs each token by the number of tokens from it on, 0 uses the plain product.

    Returns:
        `torch.Tensor` `[..., T]`, 0 where not counted.
    """
    nll = losses.nll.detach().masked_fill(counted & ~losses.draftable, math.inf)  # [..., T]
    smoothed = (1 - alpha) * (-nll).exp() + alpha  # [..., T]
    credit = smoothed.masked_fill(~counted, 1.0).cumprod(-1) * counted
    return credit.flip(-1).cumsum(-1).flip(-1) * counted


def auf_weights(losses: TokenLosses, counted: torch.BoolTensor) -> torch.Tensor:
    """
    Spec-AUF (arXiv 2607.01893): 1 up to and including the first counted token of a block that is drafted wrong, and 0
    after it, where verification has stopped; `[..., T]`.
    """
    correct_so_far = (losses.correct | ~counted).long().cumprod(-1)  # [..., T]
    return functional.pad(correct_so_far[..., :-1], (1, 0), value=1) * counted


class Loss(NamedTuple):
    """What a value of `loss_type` stands for."""

    kind: str  # how a token is compared, a key of `LOSS_TERMS`
    adaptive_weights: AdaptiveWeights | None = None  # how the tokens of a block are weighed; `None`: `slot_weights`
    contiguous_only: bool = False  # whether a block counts only up to its first token that is not supervised


LOSSES = {
    "ce": Loss("ce"),
    "dpace": Loss("ce", dpace_weights),
    "auf": Loss("ce", auf_weights),
    "kl": Loss("kl"),
    "dpace_kl": Loss("kl", dpace_weights),
    "auf_kl": Loss("kl", auf_weights),
    "dspark": Loss("dspark", contiguous_only=True),
}


def block_loss(losses: TokenLosses, counted: torch.BoolTensor, weights: Weights) -> torch.Tensor:
    """
    The weighted sum of the token losses of each sequence, to be divided by [`loss_normalizer`] of the whole batch.

    Args:
        losses (`TokenLosses`): `[N, A, T]`.
        counted (`torch.BoolTensor`): `[N, A, T]`.
        weights (`torch.Tensor` or `Callable`): [`slot_weights`] `[T]`; or weights that depend on what is drafted,
            [`dpace_weights`] or [`auf_weights`].

    Returns:
        `torch.Tensor` `[N]`, differentiable.
    """
    token_weights = weights(losses, counted) if callable(weights) else counted * weights
    return (losses.loss * token_weights).sum((1, 2))


def loss_normalizer(counted: torch.BoolTensor, weights: Weights) -> torch.Tensor:
    """
    The divisor of [`block_loss`], `[N]`, to be summed over the whole batch: the sum of fixed weights; the number of
    blocks for weights that depend on what is drafted, since dividing by their sum would cancel them out.
    """
    if callable(weights):
        return counted.any(-1).sum(1)
    return (counted * weights.to(counted.device)).sum((1, 2))  # a batch is counted before it is moved


def _scatter(values: torch.Tensor, mask: torch.BoolTensor) -> torch.Tensor:
    """Values `[M]` at the `M` true entries of a mask `[...]`, and 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits of a dtype are summed."""
    return torch.promote_types(dtype, torch.float32)
