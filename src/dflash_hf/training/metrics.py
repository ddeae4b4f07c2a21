"""Metrics of the log: sums over blocks, and the figures that they give."""

from typing import NamedTuple

import torch


class Statistics(NamedTuple):
    """
    Sums over blocks, of each sequence or of all. They add up over sequences, batches and ranks, so that no figure is
    ever a mean of means.
    """

    counted: torch.Tensor  # [..., B-1]  tokens that the loss counts, for slots 1..B-1
    correct: torch.Tensor  # [..., B-1]
    reached: torch.Tensor  # [..., B-1]  all earlier slots are correct
    accepted: torch.Tensor  # [..., B-1]  reached and correct
    accepted_without_head: torch.Tensor  # [...]  tokens, for each slot's argmax without the head
    blocks: torch.Tensor  # [...]
    loss: torch.Tensor  # [...]
    normalizer: torch.Tensor  # [...]  the divisor of `loss`

    @classmethod
    def zeros(cls, device: torch.device) -> "Statistics":
        """Zeros, to which those of batches are added."""
        return cls(*torch.zeros(len(cls._fields), device=device))

    def add(self, batch: "Statistics") -> "Statistics":
        """These sums and those of each sequence of a batch, `[N, ...]`."""
        return Statistics(*(total + per_sequence.sum(0) for total, per_sequence in zip(self, batch, strict=True)))


def block_statistics(
    correct: torch.BoolTensor,
    counted: torch.BoolTensor,
    loss: torch.Tensor,
    normalizer: torch.Tensor,
    correct_without_head: torch.BoolTensor | None = None,
) -> Statistics:
    """
    The [`Statistics`] of each sequence, `[N, ...]`.

    Args:
        correct, counted (`torch.BoolTensor`): `[N, A, B]`.
        loss, normalizer (`torch.Tensor`): `[N]`, from [`~dflash_hf.training.losses.block_loss`] and
            [`~dflash_hf.training.losses.loss_normalizer`].
        correct_without_head (`torch.BoolTensor`): `[N, A, B]`, as `correct`, for each slot's argmax without the
            head. Default: `correct`.
    """
    counted = counted[..., 1:]  # [N, A, B-1]
    correct = correct[..., 1:] & counted
    accepted = accepted_slots(correct)
    reached = torch.nn.functional.pad(accepted[..., :-1], (1, 0), value=1) * counted
    accepted_without_head = accepted
    if correct_without_head is not None:
        accepted_without_head = accepted_slots(correct_without_head[..., 1:] & counted)
    return Statistics(
        counted=counted.int().sum(1),
        correct=correct.int().sum(1),
        reached=reached.sum(1),
        accepted=accepted.sum(1),
        accepted_without_head=accepted_without_head.sum((1, 2)),
        blocks=counted.any(-1).sum(1),
        loss=loss.detach(),
        normalizer=normalizer,
    )


def accepted_slots(correct: torch.BoolTensor) -> torch.Tensor:
    """
    Which slots 1..B-1 verification accepts, `[..., B-1]` of 0 and 1: it stops at the first mistake, so these are the
    correct ones whose earlier slots are all correct.
    """
    return correct.int().cumprod(-1)


def statistics_to_metrics(sums: Statistics, has_token_head: bool = False) -> dict[str, float]:
    """
    Metrics from summed statistics: `loss`; `accuracy` over all counted tokens and `accuracy_k` of slot `k`;
    `acceptance_k`, the same given that all slots before `k` are correct, as in verification; `simulated_tau`, the mean
    over blocks of the accepted prefix plus the bonus token. A block cut short by the end of its response counts with
    its remaining tokens. If a head depends on other tokens (`has_token_head`), also `simulated_tau_argmax`, the value
    that each slot's argmax without the head would reach. 0 for a slot that no block reached; empty without blocks.
    """
    values = Statistics(*(tensor.tolist() for tensor in sums))
    if values.blocks == 0:
        return {}
    metrics = {
        "loss": values.loss / values.normalizer,
        "accuracy": sum(values.correct) / sum(values.counted),
        "simulated_tau": sum(values.accepted) / values.blocks + 1,
    }
    if has_token_head:
        metrics["simulated_tau_argmax"] = values.accepted_without_head / values.blocks + 1
    shares = (("accuracy", values.correct, values.counted), ("acceptance", values.accepted, values.reached))
    for name, hits, totals in shares:
        for slot, total in enumerate(totals, start=1):
            metrics[f"{name}_{slot}"] = hits[slot - 1] / total if total else 0.0
    return metrics
