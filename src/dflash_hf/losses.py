"""The weighted cross-entropy of blocks through the target's frozen head, and the figures that come with it."""

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class ChunkedLoss:
    """What one pass through the head tells about every token."""

    loss: torch.Tensor  # []     sum of weights * nll
    nll: torch.Tensor  # [...]  negative log-likelihood, detached; 0 where the weight is 0
    correct: torch.BoolTensor  # [...]  whether the label is the argmax; false where the weight is 0


def default_gamma(block_size: int) -> float:
    """
    The decay of the slot weights for a block size: 4, 5 and 7 for 8, 10 and 16 (DFlash, arXiv 2602.06036).

    Between and beyond these, the lines through them: half the block size up to 10, then a third of each further slot.
    """
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def slot_weights(block_size: int, gamma: float | None = None) -> torch.Tensor:
    """
    `w_k = exp(-(k - 1) / gamma)` for slots `k >= 1`, and 0 for the anchor: an early mistake costs all later slots.

    Args:
        block_size (`int`): Slots of a block.
        gamma (`float`): Default: [`default_gamma`]. `math.inf` weighs all slots alike.

    Returns:
        `torch.Tensor` `[B]`.

    Raises:
        `ValueError`: `gamma` is not positive.
    """
    gamma = default_gamma(block_size) if gamma is None else gamma
    if not gamma > 0:
        raise ValueError(
            f"loss_decay_gamma={gamma} must be positive; leave it out for the default of this block size "
            f"({default_gamma(block_size):g})."
        )
    weights = [0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    return torch.tensor(weights)


class _TokenNLL(torch.autograd.Function):
    """
    Negative log-likelihood of each row, without all logits at once.

    The head acts on every row alone, so the gradient of row `i` is `grad_output[i]` times a vector that is known as
    soon as the row's logits are: it is kept, `[M, H]` instead of `[M, V]` logits, and the head is never run again.
    """

    @staticmethod
    def forward(ctx, hidden, head, labels, chunk_size):
        nll = torch.empty(hidden.shape[0], device=hidden.device, dtype=_wide(hidden.dtype))  # [M]
        correct = torch.empty_like(labels, dtype=torch.bool)  # [M]
        needs_grad = ctx.needs_input_grad[0]
        grads = torch.empty_like(hidden) if needs_grad else None  # [M, H]
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            with torch.set_grad_enabled(needs_grad):
                chunk = hidden[rows].detach().requires_grad_(needs_grad)
                logits = head(chunk)  # [chunk, V]
                wide = logits.to(_wide(logits.dtype))
                chunk_nll = nn.functional.cross_entropy(wide, labels[rows], reduction="none")  # [chunk]
                total = chunk_nll.sum()
            if needs_grad:
                (grads[rows],) = torch.autograd.grad(total, chunk)
            nll[rows] = chunk_nll.detach()
            correct[rows] = logits.detach().argmax(-1) == labels[rows]
        ctx.save_for_backward(grads)
        ctx.mark_non_differentiable(correct)
        return nll, correct

    @staticmethod
    def backward(ctx, grad_nll, _):
        (grads,) = ctx.saved_tensors
        return (grads * grad_nll[:, None]).to(grads.dtype), None, None, None


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head: nn.Module,
    labels: torch.LongTensor,
    weights: torch.Tensor,
    chunk_size: int = 1024,
) -> ChunkedLoss:
    """
    Weighted sum of cross-entropies through a frozen head, of whose logits at most `chunk_size` rows exist at a time.

    Only tokens with a nonzero weight reach the head. Half-precision logits are summed in fp32.

    Args:
        hidden (`torch.Tensor`): `[..., H]`, the drafter's final hidden states.
        head (`nn.Module`): The target's head, `[M, H] -> [M, V]`, row by row; its parameters get no gradient.
        labels (`torch.LongTensor`): `[...]`.
        weights (`torch.Tensor`): `[...]`.
        chunk_size (`int`): Rows of one pass through the head.
    """
    counted = weights != 0  # [...]
    kept_nll, kept_correct = _TokenNLL.apply(hidden[counted], head, labels[counted], chunk_size)  # [M]
    loss = (kept_nll * weights[counted]).sum()  # an empty sum still hangs on `hidden`: no rank is left out of backward
    nll = kept_nll.new_zeros(labels.shape)
    nll[counted] = kept_nll.detach()
    correct = torch.zeros_like(counted)
    correct[counted] = kept_correct
    return ChunkedLoss(loss=loss, nll=nll, correct=correct)


def block_statistics(result: ChunkedLoss, counted: torch.BoolTensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Sums over each sequence's blocks that [`statistics_to_metrics`] turns into figures. They add up over sequences,
    batches and ranks, so that no figure is ever a mean of means.

    Args:
        result (`ChunkedLoss`): Of tensors `[N, A, B]`.
        counted, weights: `[N, A, B]`.

    Returns:
        `torch.Tensor` `[N, 2 * (B - 1) + 4]`: correct and counted tokens of slots 1..B-1, accepted tokens, blocks,
        weighted loss, weights.
    """
    counted = counted[..., 1:]  # [N, A, B-1]
    correct = result.correct[..., 1:] & counted
    # Verification stops at the first mistake: the accepted prefix, not the product of marginal accuracies.
    accepted = correct.int().cumprod(-1).sum((1, 2))  # [N]
    columns = [
        correct.sum(1),
        counted.sum(1),
        accepted[:, None],
        counted.any(-1).sum(1)[:, None],
        (result.nll * weights).sum((1, 2))[:, None],
        weights.sum((1, 2))[:, None],
    ]
    return torch.cat([column.float() for column in columns], dim=1)


def statistics_to_metrics(sums: torch.Tensor) -> dict[str, float]:
    """
    Figures from summed [`block_statistics`] `[2 * (B - 1) + 4]`: `loss`, `accuracy` over all counted tokens,
    `accuracy_k` of slot `k`, and `simulated_tau`, the mean over blocks of the accepted prefix plus the bonus token. A
    block that the end of its response cuts short counts with the tokens that are left. Empty without blocks.
    """
    *slots, accepted, blocks, loss, weight = sums.tolist()
    if blocks == 0:
        return {}
    half = len(slots) // 2
    correct, counted = slots[:half], slots[half:]
    metrics = {"loss": loss / weight, "accuracy": sum(correct) / sum(counted), "simulated_tau": accepted / blocks + 1}
    for slot, (hits, total) in enumerate(zip(correct, counted, strict=True), start=1):
        if total:
            metrics[f"accuracy_{slot}"] = hits / total
    return metrics


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
