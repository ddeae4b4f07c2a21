"""How heads learn: the queries of blocks whose tokens are known, and the loss of each head's scores."""

from collections.abc import Callable

import torch
from torch.nn import functional

from dflash_hf.modeling.heads_dflash import DominoHead, Head, MarkovHead


def forced_queries(
    head: Head, before: torch.LongTensor, hidden: torch.Tensor, draftable: torch.BoolTensor
) -> torch.Tensor:
    """
    The queries of whole blocks whose tokens are known.

    Args:
        head (`Head`): The drafter's head.
        before (`torch.LongTensor`): `[..., B]`, the token before each slot; slot 0 is the anchor's own.
        hidden (`torch.Tensor`): `[..., B, H]`.
        draftable (`torch.BoolTensor`): `[..., B]`, the slots to learn from, never slot 0.

    Returns:
        `torch.Tensor` `[M, q]`, the queries of these slots.
    """
    if head.order <= 1:
        return head.step(None, before[draftable], hidden[draftable])[0]
    before = before.flatten(0, -2)  # [R, B]
    hidden = hidden.flatten(0, -3)  # [R, B, H]
    state = head.start(before[:, 1])
    queries = []
    for slot in range(1, before.shape[1]):
        query, state = head.step(state, before[:, slot], hidden[:, slot])
        queries.append(query)
    return torch.stack(queries, dim=1).unflatten(0, draftable.shape[:-1])[draftable[..., 1:]]


def needs_teacher(config) -> bool:
    """Whether part of the head learns only from the target's distribution."""
    return config.head is MarkovHead and config.enable_confidence_head


def _markov_loss(head: MarkovHead, rows, progress: float) -> torch.Tensor:
    """The run's loss, plus the confidence's cross-entropy with the overlap of `p` and `q`."""
    loss = rows.divergence(rows.scores)
    if not head.config.enable_confidence_head or rows.teacher is None:
        return loss
    acceptance = 1.0 - rows.distance(rows.scores.detach())  # acceptance probability of rejection sampling
    confidence = rows.query[..., head.width].to(acceptance)
    return loss + functional.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")


def _domino_loss(head: DominoHead, rows, progress: float) -> torch.Tensor:
    """From the draft logits alone to the corrected ones, linearly over the run."""
    return progress * rows.divergence(rows.scores) + (1.0 - progress) * rows.divergence(rows.logits)


# The losses of heads that have more than the run's own.
LOSSES: dict[type[Head], Callable] = {MarkovHead: _markov_loss, DominoHead: _domino_loss}


def head_loss(head: Head, rows, progress: float) -> torch.Tensor:
    """
    The differentiable loss `[M]` of a head. One with candidates learns to choose among them, and leaves the loss of
    the independent slots unchanged.

    Args:
        head (`Head`): The drafter's head.
        rows (`Rows` of `training.losses`): Scores, logits, labels and teacher of some draftable tokens.
        progress (`float`): Progress of the run, from 0 to 1.
    """
    if rows.ids is not None:
        return rows.divergence(rows.logits) + rows.selection()
    loss = LOSSES.get(type(head))
    return rows.divergence(rows.scores) if loss is None else loss(head, rows, progress)
