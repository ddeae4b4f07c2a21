"""Metrics of the log: sums over blocks, and the figures that they give."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    accepted_alone: torch.Tensor  # [...]  tokens, for each slot's argmax without the head
    blocks: torch.Tensor  # [...]
    loss: torch.Tensor  # [...]
    normalizer: torch.Tensor  # [...]  the divisor of `loss`
    tokens: torch.Tensor  # [...]  of the sequences

    @classmethod
    def none(cls, device: torch.device) -> "Statistics":
        """Zeros, to which those of batches are added."""
        return cls(*torch.zeros(len(cls._fields), device=device))

    def plus(self, batch: "Statistics") -> "Statistics":
        """These sums and those of each sequence of a batch, `[N, ...]`."""
        return Statistics(*(total + one.sum(0) for total, one in zip(self, batch, strict=True)))


def block_statistics(
    correct: torch.BoolTensor,
    counted: torch.BoolTensor,
    loss: torch.Tensor,
    normalizer: torch.Tensor,
    tokens: torch.Tensor,
    alone: torch.BoolTensor | None = None,
) -> Statistics:
    """
    The [`Statistics`] of each sequence, `[N, ...]`.

    Args:
        correct, counted (`torch.BoolTensor`): `[N, A, B]`.
        loss, normalizer (`torch.Tensor`): `[N]`, from [`~dflash_hf.training.losses.block_loss`] and
            [`~dflash_hf.training.losses.loss_normalizer`].
        tokens (`torch.Tensor`): `[N]`, the length of each sequence.
        alone (`torch.BoolTensor`): `[N, A, B]`, as `correct`, for each slot's argmax without the head. Default:
            `correct`.
    """
    counted = counted[..., 1:]  # [N, A, B-1]
    slots = slot_counts(correct[..., 1:] & counted, counted)  # [4, N, A, B-1]
    accepted_alone = slots[3] if alone is None else slot_counts(alone[..., 1:] & counted, counted)[3]
    blocks = counted.any(-1).sum(1)  # [N]
    return Statistics._make([*slots.sum(2), accepted_alone.sum((1, 2)), blocks, loss.detach(), normalizer, tokens])


def slot_counts(correct: torch.BoolTensor, counted: torch.BoolTensor) -> torch.Tensor:
    """
    Which slots 1..B-1 are counted, correct, reached (all earlier slots correct) and accepted (reached and correct):
    `[4, ..., B-1]` from `[..., B-1]`.
    """
    # Verification stops at the first mistake: the accepted prefix, not the product of marginal accuracies.
    accepted = correct.int().cumprod(-1)
    reached = torch.nn.functional.pad(accepted[..., :-1], (1, 0), value=1) * counted
    return torch.stack([counted.int(), correct.int(), reached, accepted])


def statistics_to_metrics(sums: Statistics, has_head: bool = False) -> dict[str, float]:
    """
    Metrics from summed statistics: `loss`; `accuracy` over all counted tokens and `accuracy_k` of slot `k`;
    `acceptance_k`, the same given that all slots before `k` are correct, as in verification; `simulated_tau`, the mean
    over blocks of the accepted prefix plus the bonus token. A block cut short by the end of its response counts with
    its remaining tokens. If a head depends on other tokens (`has_head`), also `simulated_tau_argmax`, the value that
    each slot's argmax without the head would reach. 0 for a slot that no block reached; empty without blocks.
    """
    counted, correct, reached, accepted, accepted_alone, blocks, loss, normalizer, _ = (one.tolist() for one in sums)
    if blocks == 0:
        return {}
    metrics = {"loss": loss / normalizer, "accuracy": sum(correct) / sum(counted)}
    metrics["simulated_tau"] = sum(accepted) / blocks + 1
    if has_head:
        metrics["simulated_tau_argmax"] = accepted_alone / blocks + 1
    for name, hits, totals in (("accuracy", correct, counted), ("acceptance", accepted, reached)):
        for slot, total in enumerate(totals, start=1):
            metrics[f"{name}_{slot}"] = hits[slot - 1] / total if total else 0.0
    return metrics


class Meter:
    """
    What a line of the training log is computed from: statistics and time since the previous line.

    Args:
        device (`torch.device`): Where statistics are summed, so that the training never waits for them.
    """

    def __init__(self, device: torch.device):
        self.statistics = Statistics.none(device)
        self.clock: float | None = None  # when time began to count

    def start(self) -> None:
        """Let the time count, unless it does already."""
        if self.clock is None:
            self.clock = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in this context does not count."""
        start = time.perf_counter()
        yield
        if self.clock is not None:
            self.clock += time.perf_counter() - start

    def take(self, accelerator, has_head: bool) -> dict[str, float]:
        """The metrics since the last call, over all processes."""
        sums = accelerator.reduce(self.statistics, "sum")
        metrics, now = statistics_to_metrics(sums, has_head), time.perf_counter()
        metrics["tokens_per_second"] = sums.tokens.item() / (now - self.clock)
        self.statistics, self.clock = Statistics.none(sums.tokens.device), now
        return metrics
