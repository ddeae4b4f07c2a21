"""The losses of blocks through the target's frozen head."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


# For each kind of loss, the weights of the labels' cross-entropy, total variation and divergence from the teacher.
DIVERGENCES = {
    "ce": (1.0, 0.0, 0.0),
    "kl": (0.0, 0.0, 1.0),
    "tv": (0.0, 1.0, 0.0),
    "dspark": (0.1, 1.8, 0.0),  # the paper's distance, 0.9 of it, is twice the total variation
}


@dataclass
class Candidates:
    """The likely tokens of each of the `M` known tokens' slots, among which a drafter's head chooses."""

    ids: torch.LongTensor  # [M, k]  in the drafter's vocabulary
    logits: torch.Tensor  # [M, k]  the drafter's, without gradient
    wanted: torch.Tensor  # [M, k]  the teacher's probabilities; without a teacher, 1 for the label


@dataclass
class TokenLosses:
    """The results of one pass through the head, for every token."""

    values: torch.Tensor  # [...]  negative log-likelihood or divergence, differentiable; 0 where not known
    nll: torch.Tensor  # [...]  negative log-likelihood of the label, without gradient; 0 where not known
    correct: torch.BoolTensor  # [...]  whether the drafted token is the label; false where not known
    known: torch.BoolTensor  # [...]  counted, and in the drafter's vocabulary
    candidates: Candidates | None = None
    alone: torch.BoolTensor | None = None  # [...]  as `correct`, for each slot's argmax without the head


@dataclass
class Teacher:
    """The target's own distributions: its head on the state `states[rows[...]]` for each token."""

    states: torch.Tensor  # [P, H]  the target's final hidden states
    rows: torch.LongTensor  # [...]   the state that predicts each token: the state at a + k - 1
    head: Callable[[torch.Tensor], torch.Tensor]  # [M, H] -> [M, V]
    kind: str = "kl"  # how the drafter's distribution is compared with it, a key of `DIVERGENCES`


@dataclass
class Rows:
    """`M` known tokens, from which a head over all tokens learns."""

    scores: torch.Tensor  # [M, V]  the head's scores, differentiable
    logits: torch.Tensor  # [M, V]  the slots' own draft logits, differentiable
    labels: torch.LongTensor  # [M]
    teacher: torch.Tensor | None  # [M, V]  the target's logits
    hidden: torch.Tensor  # [M, H]
    query: torch.Tensor  # [M, q]
    kind: str = "kl"  # kind of loss, as in [`Teacher`]

    def divergence(self, scores: torch.Tensor) -> torch.Tensor:
        """`[M]`, the run's loss for scores `[M, V]`."""
        return divergence(scores, self.labels, self.teacher, self.kind)

    def distance(self, scores: torch.Tensor) -> torch.Tensor:
        """`[M]`, the total variation between the teacher and scores `[M, V]`, from 0 to 1."""
        return variation(scores, self.teacher)


def divergence(
    logits: torch.Tensor, labels: torch.LongTensor, teacher: torch.Tensor | None = None, kind: str = "kl"
) -> torch.Tensor:
    """
    The loss of logits `[M, V]` against labels `[M]` and a teacher's logits `[M, V]`, by `DIVERGENCES[kind]`; without a
    teacher, the labels' cross-entropy.
    """
    log_q = logits.to(_wide(logits.dtype)).log_softmax(-1)
    of_labels, distance, total = DIVERGENCES["ce" if teacher is None else kind]
    loss = 0.0
    if of_labels:
        loss = loss + of_labels * functional.nll_loss(log_q, labels, reduction="none")
    if distance:
        loss = loss + distance * variation(logits, teacher)
    if total:
        log_p = teacher.to(log_q).log_softmax(-1)
        loss = loss + total * functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    return loss


def variation(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """`[M]`, the total variation between the distributions of two logits `[M, V]`, from 0 to 1."""
    q = logits.to(_wide(logits.dtype)).softmax(-1)
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
    kept = (1 - alpha) * (-nll.detach()).exp() + alpha  # [..., B]
    credit = kept.masked_fill(~counted, 1.0).cumprod(-1) * counted
    return credit.flip(-1).cumsum(-1).flip(-1) * counted


class _TokenLoss(torch.autograd.Function):
    """
    The loss of each row, without holding all logits in memory.

    The head acts on each row separately, so the gradient of row `i` is `grad_output[i]` times a vector that is known
    as soon as the row's logits are. It is kept, `[M, H]` instead of `[M, V]` logits, and the head is never run again.
    """

    @staticmethod
    def forward(ctx, hidden, head, labels, teacher, chunk_size, likely):
        losses = torch.empty(hidden.shape[0], device=hidden.device, dtype=_wide(hidden.dtype))  # [M]
        nll = torch.empty_like(losses)  # [M]
        correct = torch.empty_like(labels, dtype=torch.bool)  # [M]
        needs_grad = ctx.needs_input_grad[0]
        grads = torch.empty_like(hidden) if needs_grad else None  # [M, H]
        candidates = []
        at_least = 0 if likely is None else 1  # run even an empty chunk, so that candidates have the right shape
        for start in range(0, max(hidden.shape[0], at_least), chunk_size):
            rows = slice(start, start + chunk_size)
            gold, wanted = labels[rows], None
            if teacher is not None:
                states = teacher.states[teacher.rows[rows].to(teacher.states.device)]  # [chunk, H]
                wanted = teacher.head(states)  # [chunk, V]
            with torch.set_grad_enabled(needs_grad):
                chunk = hidden[rows].detach().requires_grad_(needs_grad)
                logits = head(chunk)  # [chunk, V]
                gold = gold.to(logits.device)
                wanted = None if wanted is None else wanted[..., : logits.shape[-1]].to(logits.device)
                values = divergence(logits, gold, wanted, "ce" if teacher is None else teacher.kind)
            if needs_grad:
                (grads[rows],) = torch.autograd.grad(values, chunk, torch.ones_like(values))
            losses[rows] = nll[rows] = values.detach()
            wide = logits.detach().to(_wide(logits.dtype))
            if wanted is not None:
                nll[rows] = functional.cross_entropy(wide, gold, reduction="none")
            correct[rows] = wide.argmax(-1) == gold
            if likely is not None:
                ids, unary = likely(wide)  # [chunk, k]
                shares = ids == gold[:, None] if wanted is None else wanted.to(wide).softmax(-1).gather(1, ids)
                candidates.append((ids, unary, shares.to(wide)))
            del logits, wide, wanted  # before those of the next chunk are allocated
        ctx.save_for_backward(grads)
        found = [torch.cat(parts).to(hidden.device) for parts in zip(*candidates, strict=True)]
        ctx.mark_non_differentiable(nll, correct, *found)
        return losses, nll, correct, *found

    @staticmethod
    def backward(ctx, grad_losses, *_):
        (grads,) = ctx.saved_tensors
        return (grads * grad_losses[:, None]).to(grads.dtype), None, None, None, None, None


def token_losses(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    labels: torch.LongTensor,
    counted: torch.BoolTensor,
    chunk_size: int = 512,
    teacher: Teacher | None = None,
    likely: Callable[[torch.Tensor], tuple[torch.LongTensor, torch.Tensor]] | None = None,
) -> TokenLosses:
    """
    Cross-entropies, or divergences from a teacher, through a frozen head, with at most `chunk_size` rows of logits in
    memory at a time.

    Only counted tokens of the drafter's vocabulary reach the head. Half-precision logits are summed in fp32.

    Args:
        hidden (`torch.Tensor`): `[..., H]`, the drafter's final hidden states.
        head (`Callable`): The target's head, `[M, H] -> [M, V]`, row by row; its parameters get no gradient.
        labels (`torch.LongTensor`): `[...]`, ids in the drafter's vocabulary, -1 for tokens outside it.
        counted (`torch.BoolTensor`): `[...]`.
        chunk_size (`int`): Rows of one pass through the head.
        teacher (`Teacher`): A loss against the target's distribution, instead of the cross-entropy of `labels`.
        likely (`Callable`): For a head with candidates: `[M, V]` logits -> ids and logits of these, both `[M, k]`.
    """
    known = counted & (labels >= 0)
    if teacher is not None:
        teacher = replace(teacher, rows=teacher.rows[known])
    of_known = _TokenLoss.apply(hidden[known], head, labels[known], teacher, chunk_size, likely)  # [M], then [M, k]
    # Even without tokens `values` depends on `hidden`, so that every rank takes part in backward.
    (values, nll, correct), found = (_spread(one, known) for one in of_known[:3]), of_known[3:]
    return TokenLosses(values, nll, correct, known, Candidates(*found) if found else None, correct)


def selected(
    losses: TokenLosses, scores: Callable[[Candidates], torch.Tensor], labels: torch.LongTensor
) -> TokenLosses:
    """
    Losses of a head that chooses among the likely tokens of a slot, given the true previous tokens.

    The head is trained towards the teacher's probabilities, or the label, among its candidates; a label that is not a
    candidate has no effect. Its loss is added to the slot's own loss.

    Args:
        losses (`TokenLosses`): `[...]`, with candidates.
        scores (`Callable`): The head's scores of the candidates, `[M, k]`, differentiable.
        labels (`torch.LongTensor`): `[...]`, as for [`token_losses`].
    """
    candidates, known = losses.candidates, losses.known
    scored = scores(candidates)  # [M, k]
    log_q = scored.log_softmax(-1)
    wanted = candidates.wanted.to(log_q)
    share = wanted.sum(-1, keepdim=True)  # of the target's probability mass
    loss = (torch.xlogy(wanted, wanted / share.clamp(min=1e-30)) - wanted * log_q).sum(-1)  # [M]
    is_label = candidates.ids == labels[known][:, None]  # [M, k]
    nll = -log_q.detach().masked_fill(~is_label, -math.inf).amax(-1)  # infinite if the label is not a candidate
    chosen = candidates.ids.gather(-1, scored.argmax(-1, keepdim=True))[:, 0] == labels[known]
    values, nll, correct = (_spread(one, known) for one in (loss, nll, chosen))
    return replace(losses, values=losses.values + values, nll=nll, correct=correct)


def scored_losses(
    hidden: torch.Tensor,
    queries: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    scores: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    loss: Callable[[Rows], torch.Tensor],
    labels: torch.LongTensor,
    known: torch.BoolTensor,
    chunk_size: int = 512,
    teacher: Teacher | None = None,
) -> TokenLosses:
    """
    Losses of a head that scores all tokens, given the true previous tokens. Logits are computed chunk by chunk, and
    again in the backward pass, since they depend on parameters of the head.

    Args:
        hidden (`torch.Tensor`): `[..., H]`.
        queries (`torch.Tensor`): `[M, q]`, the head's queries for the known tokens.
        head (`Callable`): The target's head, `[M, H] -> [M, V]`.
        scores (`Callable`): Maps queries and logits `[M, V]` to the logits and scores of the drafter's head.
        loss (`Callable`): Maps [`Rows`] to losses `[M]`.
        labels, known: As in [`TokenLosses`].
        chunk_size, teacher: As for [`token_losses`].
    """
    kept, gold = hidden[known], labels[known]
    rows = None if teacher is None else teacher.rows[known].to(teacher.states.device)
    kind = "ce" if teacher is None else teacher.kind

    def of_chunk(chunk, query, gold, states):
        logits, scored = scores(query, head(chunk))  # [chunk, V]
        gold = gold.to(scored.device)
        # The target's head may have rows past the drafter's vocabulary.
        wanted = None if states is None else teacher.head(states)[..., : scored.shape[-1]].to(scored.device)
        values = loss(Rows(scored, logits, gold, wanted, chunk, query, kind))
        wide = scored.detach().to(_wide(scored.dtype))
        nll = functional.cross_entropy(wide, gold, reduction="none")
        return values, nll, wide.argmax(-1) == gold, logits.argmax(-1) == gold

    parts = []
    for start in range(0, max(len(kept), 1), chunk_size):  # even without tokens: every rank runs its backward
        part = slice(start, start + chunk_size)
        states = None if rows is None else teacher.states[rows[part]]
        arguments = (kept[part], queries[part], gold[part], states)
        parts.append(checkpoint(of_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
    figures = [torch.cat(one).to(hidden.device) for one in zip(*parts, strict=True)]
    values, nll, correct, alone = (_spread(one, known) for one in figures)
    return TokenLosses(values, nll, correct, known, alone=alone)


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
    alpha: float = 0.5,
    weighting: str = "dpace",
) -> torch.Tensor:
    """
    The weighted sum of the token losses of each sequence, to be divided by [`loss_normalizer`] of the whole batch.

    Args:
        losses (`TokenLosses`): `[N, A, B]`.
        counted (`torch.BoolTensor`): `[N, A, B]`.
        slot_weights (`torch.Tensor`): `[B]`. `None`: weights that depend on what is drafted.
        alpha (`float`): Smoothing of D-PACE.
        weighting (`str`): Which these are: `"dpace"`: [`dpace_weights`]; `"auf"`: [`first_failure_weights`].

    Returns:
        `torch.Tensor` `[N]`, differentiable.
    """
    if slot_weights is not None:
        weights = counted * slot_weights
    elif weighting == "auf":
        weights = first_failure_weights(losses.correct, counted)
    else:
        nll = losses.nll.masked_fill(counted & ~losses.known, math.inf)  # never drafted
        weights = dpace_weights(nll, counted, alpha)
    return (losses.values * weights).sum((1, 2))


def loss_normalizer(counted: torch.BoolTensor, slot_weights: torch.Tensor | None) -> torch.Tensor:
    """
    The divisor of [`block_loss`], `[N]`, to be summed over the whole batch: slot weights, or valid anchors for weights
    that depend on what is drafted, and would cancel out.
    """
    if slot_weights is None:
        return counted.any(-1).sum(1)
    return (counted * slot_weights.to(counted.device)).sum((1, 2))  # a batch is counted before it is moved


def _spread(of_known: torch.Tensor, known: torch.BoolTensor) -> torch.Tensor:
    """Values `[M]` at their `[...]` places, and 0 elsewhere."""
    return of_known.new_zeros(known.shape).masked_scatter(known, of_known)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
