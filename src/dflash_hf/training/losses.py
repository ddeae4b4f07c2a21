"""The losses of blocks through the target's frozen head."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


# For each kind of loss, the weights of the labels' cross-entropy, total variation and divergence from the teacher.
DIVERGENCES = {
    "ce": (1.0, 0.0, 0.0),
    "kl": (0.0, 0.0, 1.0),
    "dspark": (0.1, 1.8, 0.0),  # the paper's distance, 0.9 of it, is twice the total variation
}


@dataclass
class TokenLosses:
    """The results of one pass through the head, for every token."""

    values: torch.Tensor  # [...]  negative log-likelihood or divergence, differentiable; 0 where not draftable
    nll: torch.Tensor  # [...]  negative log-likelihood of the label, without gradient; 0 where not draftable
    correct: torch.BoolTensor  # [...]  whether the drafted token is the label; false where not draftable
    draftable: torch.BoolTensor  # [...]  counted, and in the drafter's vocabulary
    correct_without_head: torch.BoolTensor | None = None  # [...]  as `correct`, for argmax of the slots


@dataclass
class Teacher:
    """The target's own distributions: its head on the state `states[rows[...]]` for each token."""

    states: torch.Tensor  # [P, H]  the target's final hidden states
    rows: torch.LongTensor  # [...]   the state that predicts each token: the state at a + k - 1
    head: Callable[[torch.Tensor], torch.Tensor]  # [M, H] -> [M, V]
    kind: str = "kl"  # how the drafter's distribution is compared with it, a key of `DIVERGENCES`


@dataclass
class Rows:
    """`M` draftable tokens, from which a drafter learns."""

    scores: torch.Tensor  # [M, V]  the head's scores, differentiable; [M, k] of `ids`
    logits: torch.Tensor  # [M, V]  the slots' own draft logits, differentiable
    ids: torch.LongTensor | None  # [M, k]  the candidates of a head that does not choose among all tokens
    labels: torch.LongTensor  # [M]
    teacher: torch.Tensor | None  # [M, V]  the target's logits
    hidden: torch.Tensor  # [M, H]
    query: torch.Tensor | None  # [M, q]
    kind: str = "ce"  # kind of loss, a key of `DIVERGENCES`

    def divergence(self, scores: torch.Tensor) -> torch.Tensor:
        """`[M]`, the run's loss for scores `[M, V]`."""
        return divergence(scores, self.labels, self.teacher, self.kind)

    def distance(self, scores: torch.Tensor) -> torch.Tensor:
        """`[M]`, the total variation between the teacher and scores `[M, V]`, from 0 to 1."""
        return variation(scores, self.teacher)

    def selection(self) -> torch.Tensor:
        """`[M]`, the divergence of the candidates' scores from the teacher's share of them, or from the label."""
        log_q = self.scores.log_softmax(-1)
        wanted = self.ids == self.labels[:, None]  # a label that is no candidate has no effect
        if self.teacher is not None:
            wanted = self.teacher.to(_at_least_fp32(self.teacher.dtype)).softmax(-1).gather(1, self.ids)
        wanted = wanted.to(log_q)
        share = wanted.sum(-1, keepdim=True).clamp(min=1e-30)
        return (torch.xlogy(wanted, wanted / share) - wanted * log_q).sum(-1)

    @torch.no_grad()
    def figures(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[M]` each: the label's negative log-likelihood, whether it is drafted, and whether the slot alone does."""
        labels = self.labels
        scores = self.scores.to(_at_least_fp32(self.scores.dtype))
        best = scores.max(-1).indices  # `argmax` takes twice as long in fp32, and four times as long in bf16
        best_without_head = best if self.logits is self.scores else self.logits.max(-1).indices
        correct_without_head = best_without_head == labels
        if self.ids is None:
            return functional.cross_entropy(scores, labels, reduction="none"), best == labels, correct_without_head
        is_label = self.ids == labels[:, None]
        nll = -scores.log_softmax(-1).masked_fill(~is_label, -math.inf).amax(-1)  # infinite if it is no candidate
        return nll, is_label.gather(1, best[:, None])[:, 0], correct_without_head


def divergence(
    logits: torch.Tensor, labels: torch.LongTensor, teacher: torch.Tensor | None = None, kind: str = "kl"
) -> torch.Tensor:
    """
    The loss of logits `[M, V]` against labels `[M]` and a teacher's logits `[M, V]`, by `DIVERGENCES[kind]`; without a
    teacher, the labels' cross-entropy.
    """
    log_q = logits.to(_at_least_fp32(logits.dtype)).log_softmax(-1)
    ce_weight, variation_weight, kl_weight = DIVERGENCES["ce" if teacher is None else kind]
    loss = 0.0
    if ce_weight:
        loss = loss + ce_weight * functional.nll_loss(log_q, labels, reduction="none")
    if variation_weight:
        loss = loss + variation_weight * variation(logits, teacher)
    if kl_weight:
        log_p = teacher.to(log_q).log_softmax(-1)
        loss = loss + kl_weight * functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    return loss


def variation(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """`[M]`, the total variation between the distributions of two logits `[M, V]`, from 0 to 1."""
    q = logits.to(_at_least_fp32(logits.dtype)).softmax(-1)
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


def dpace_weights(nll: torch.Tensor, counted: torch.BoolTensor, alpha: float = 0.5) -> torch.Tensor:
    """
    D-PACE (arXiv 2605.18810): a slot's weight is its contribution to the expected accepted prefix.

    With `q_i = exp(-nll_i)` and `s_i = (1 - alpha) q_i + alpha`, the credit of slot `j` is `C_j = s_1 ... s_j` and its
    weight the sum of the credits from `j` on. A slot that is not counted has factor 1 and credit 0.

    Args:
        nll (`torch.Tensor`): `[..., B]`, of the labels; its gradient is not used.
        counted (`torch.BoolTensor`): `[..., B]`.
        alpha (`float`): 1 weighs each slot by the number of slots from it on, 0 uses the plain product.

    Returns:
        `torch.Tensor` `[..., B]`, 0 where not counted.
    """
    smoothed = (1 - alpha) * (-nll.detach()).exp() + alpha  # [..., B]
    credit = smoothed.masked_fill(~counted, 1.0).cumprod(-1) * counted
    return credit.flip(-1).cumsum(-1).flip(-1) * counted


def token_losses(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    labels: torch.LongTensor,
    counted: torch.BoolTensor,
    chunk_size: int = 512,
    teacher: Teacher | None = None,
    queries: torch.Tensor | None = None,
    score: Callable[[torch.Tensor | None, torch.Tensor], tuple] = lambda query, logits: (None, logits),
    loss: Callable[[Rows], torch.Tensor] = lambda rows: rows.divergence(rows.scores),
) -> TokenLosses:
    """
    The losses of tokens through the target's frozen head, with at most `chunk_size` rows of logits in memory at a
    time; of more rows than one chunk, the logits are computed again in the backward pass.

    Only counted tokens of the drafter's vocabulary reach the head. Half-precision logits are summed in fp32.

    Args:
        hidden (`torch.Tensor`): `[..., H]`, the drafter's final hidden states.
        head (`Callable`): The target's head, `[M, H] -> [M, V]`, row by row; its parameters get no gradient.
        labels (`torch.LongTensor`): `[...]`, ids in the drafter's vocabulary, -1 for tokens outside it.
        counted (`torch.BoolTensor`): `[...]`.
        chunk_size (`int`): Rows of one pass through the head.
        teacher (`Teacher`): A loss against the target's distribution, instead of the cross-entropy of `labels`.
        queries (`torch.Tensor`): `[M, q]`, the queries of the drafter's head for the draftable tokens.
        score (`Callable`): Maps queries and logits `[M, V]` to the head's candidates, `[M, k]` or `None` for all
            tokens, and their scores. Default: the logits themselves.
        loss (`Callable`): Maps [`Rows`] to losses `[M]`.
    """
    draftable = counted & (labels >= 0)
    draftable_hidden = hidden[draftable]  # [M, H]
    draftable_labels = labels[draftable]  # [M]
    teacher_rows = None if teacher is None else teacher.rows[draftable].to(teacher.states.device)  # [M]
    kind = "ce" if teacher is None else teacher.kind

    def chunk_losses(chunk_hidden, query, chunk_labels, states):
        """The loss and the figures of `M` rows of one pass through the head, `[M]` each."""
        logits = head(chunk_hidden)  # [M, V]
        ids, scores = score(query, logits)
        logits = logits.to(scores.device)
        teacher_logits = None
        if states is not None:
            # The target's head may have rows past the drafter's vocabulary.
            teacher_logits = teacher.head(states)[..., : logits.shape[-1]].to(scores.device)
        rows = Rows(scores, logits, ids, chunk_labels.to(scores.device), teacher_logits, chunk_hidden, query, kind)
        return loss(rows), *rows.figures()

    count = len(draftable_hidden)
    recompute = count > chunk_size and torch.is_grad_enabled()
    chunks = []
    for start in range(0, max(count, 1), chunk_size):  # even without tokens: every rank runs its backward
        part = slice(start, start + chunk_size)
        query = None if queries is None else queries[part]
        states = None if teacher_rows is None else teacher.states[teacher_rows[part]]
        arguments = (draftable_hidden[part], query, draftable_labels[part], states)
        if recompute:
            chunks.append(checkpoint(chunk_losses, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(chunk_losses(*arguments))
    columns = (torch.cat(column).to(hidden.device) for column in zip(*chunks, strict=True))
    values, nll, correct, correct_without_head = (_scatter(column, draftable) for column in columns)
    return TokenLosses(values, nll, correct, draftable, correct_without_head)


def first_failure_weights(correct: torch.BoolTensor, counted: torch.BoolTensor) -> torch.Tensor:
    """
    Spec-AUF (arXiv 2607.01893): 1 up to and including the first counted token of a block that is drafted wrong, and 0
    behind it, where verification has stopped; `[..., B]`.
    """
    right = (correct | ~counted).long().cumprod(-1)  # [..., B]
    return functional.pad(right[..., :-1], (1, 0), value=1) * counted


def block_loss(
    losses: TokenLosses,
    counted: torch.BoolTensor,
    slot_weights: torch.Tensor | None,
    weighting: str = "dpace",
) -> torch.Tensor:
    """
    The weighted sum of the token losses of each sequence, to be divided by [`loss_normalizer`] of the whole batch.

    Args:
        losses (`TokenLosses`): `[N, A, B]`.
        counted (`torch.BoolTensor`): `[N, A, B]`.
        slot_weights (`torch.Tensor`): `[B]`. `None`: weights that depend on what is drafted.
        weighting (`str`): Which these are: `"dpace"`: [`dpace_weights`]; `"auf"`: [`first_failure_weights`].

    Returns:
        `torch.Tensor` `[N]`, differentiable.
    """
    if slot_weights is not None:
        weights = counted * slot_weights
    elif weighting == "auf":
        weights = first_failure_weights(losses.correct, counted)
    else:
        nll = losses.nll.masked_fill(counted & ~losses.draftable, math.inf)  # never drafted
        weights = dpace_weights(nll, counted)
    return (losses.values * weights).sum((1, 2))


def loss_normalizer(counted: torch.BoolTensor, slot_weights: torch.Tensor | None) -> torch.Tensor:
    """
    The divisor of [`block_loss`], `[N]`, to be summed over the whole batch: slot weights, or valid anchors for weights
    that depend on what is drafted, and would cancel out.
    """
    if slot_weights is None:
        return counted.any(-1).sum(1)
    return (counted * slot_weights.to(counted.device)).sum((1, 2))  # a batch is counted before it is moved


def _scatter(values: torch.Tensor, mask: torch.BoolTensor) -> torch.Tensor:
    """Values `[M]` at the `M` true places of a mask `[...]`, and 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits of a dtype are summed."""
    return torch.promote_types(dtype, torch.float32)
