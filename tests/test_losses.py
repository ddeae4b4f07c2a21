"""Slot weights, the chunked loss against the dense one, and figures that are never means of means."""

import math

import pytest
import torch
from torch import nn

from dflash_hf.losses import (
    ChunkedLoss,
    block_statistics,
    chunked_cross_entropy,
    default_gamma,
    slot_weights,
    statistics_to_metrics,
)


class RecordingHead(nn.Linear):
    """A frozen head that notes how many rows each pass asks for."""

    def __init__(self, width, vocab, dtype):
        super().__init__(width, vocab, bias=False, dtype=dtype)
        self.requires_grad_(False)
        self.rows = []

    def forward(self, hidden):
        self.rows.append(hidden.shape[0])
        return super().forward(hidden)


def tokens(dtype=torch.float32, shape=(2, 3, 5), width=8, vocab=40):
    random = torch.Generator().manual_seed(0)
    head = RecordingHead(width, vocab, torch.float32)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocab, width, generator=random))
    head = head.to(dtype)
    hidden = torch.randn(*shape, width, generator=random).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, shape, generator=random)
    weights = torch.rand(shape, generator=random).to(dtype if dtype == torch.float64 else torch.float32)
    weights[..., 0] = 0
    return hidden, head, labels, weights


# ------------------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("block_size, gamma", [(16, 7), (10, 5), (8, 4)])
def test_slot_weights_of_the_paper(block_size, gamma):
    weights = slot_weights(block_size)
    expected = [0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    torch.testing.assert_close(weights, torch.tensor(expected))
    torch.testing.assert_close(slot_weights(block_size, float(gamma)), weights)


def test_gamma_grows_with_the_block():
    gammas = [default_gamma(size) for size in range(2, 33)]
    assert all(a < b for a, b in zip(gammas, gammas[1:], strict=False))
    assert slot_weights(4, math.inf).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("gamma", [0, -1.0, math.nan])
def test_gamma_must_be_positive(gamma):
    with pytest.raises(ValueError, match="loss_decay_gamma.*must be positive"):
        slot_weights(8, gamma)


# --------------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("chunk_size", [1, 3, 24, 1000])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_chunked_equals_dense(dtype, tolerance, chunk_size):
    hidden, head, labels, weights = tokens(dtype)
    logits = hidden @ head.weight.T
    nll = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    dense = (nll * weights).sum()
    (dense_grad,) = torch.autograd.grad(dense * 3, hidden)

    result = chunked_cross_entropy(hidden, head, labels, weights, chunk_size)
    (grad,) = torch.autograd.grad(result.loss * 3, hidden)
    torch.testing.assert_close(result.loss, dense, atol=0, rtol=tolerance)
    torch.testing.assert_close(grad, dense_grad, atol=tolerance, rtol=10 * tolerance)
    counted = weights != 0
    torch.testing.assert_close(result.nll, (nll * counted).detach(), atol=tolerance, rtol=10 * tolerance)
    assert torch.equal(result.correct, (logits.argmax(-1) == labels) & counted)
    assert not result.nll.requires_grad


def test_gradient_of_the_chunked_loss_numerically():
    hidden, head, labels, weights = tokens(torch.float64, shape=(1, 2, 3))
    assert torch.autograd.gradcheck(lambda h: chunked_cross_entropy(h, head, labels, weights, 2).loss, hidden)


def test_logits_never_exist_all_at_once_nor_twice():
    hidden, head, labels, weights = tokens()
    chunked_cross_entropy(hidden, head, labels, weights, chunk_size=7).loss.backward()
    assert head.rows == [7, 7, 7, 3]  # 24 tokens: those of weight 0 never reach the head, backward asks for nothing
    assert head.weight.grad is None
    assert not hidden.grad[..., 0, :].any()


def test_evaluation_needs_no_gradient():
    hidden, head, labels, weights = tokens()
    with torch.no_grad():
        result = chunked_cross_entropy(hidden, head, labels, weights, chunk_size=7)
    assert not result.loss.requires_grad
    assert sum(head.rows) == 24


def test_without_a_counted_token_the_loss_is_zero_and_finite():
    hidden, head, labels, weights = tokens()
    result = chunked_cross_entropy(hidden, head, labels, torch.zeros_like(weights), chunk_size=7)
    result.loss.backward()
    assert result.loss == 0 and not head.rows
    assert not hidden.grad.any() and hidden.grad.isfinite().all()


def test_half_precision_is_summed_in_single():
    """A bf16 sum stops growing long before a thousand tokens: 256 + 1 == 256."""
    hidden, head, labels, weights = tokens(torch.bfloat16, shape=(1, 400, 5))
    result = chunked_cross_entropy(hidden, head, labels, weights, chunk_size=64)
    logits = (hidden @ head.weight.T).float()
    nll = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    assert result.loss.dtype == result.nll.dtype == torch.float32
    torch.testing.assert_close(result.loss, (nll * weights).sum(), rtol=1e-5, atol=0)
    result.loss.backward()
    assert hidden.grad.dtype == torch.bfloat16 and hidden.grad.isfinite().all()


# ------------------------------------------------------------------------------------------------------------ figures


def statistics_of(correct, counted):
    correct, counted = torch.tensor(correct, dtype=torch.bool), torch.tensor(counted, dtype=torch.bool)
    nll = torch.full(correct.shape, 2.0) * counted
    return block_statistics(ChunkedLoss(nll.sum(), nll, correct), counted, counted * 0.5)


def test_figures_written_out_by_hand():
    """Two sequences of two blocks of four slots; the last block is invalid, the third ends after two tokens."""
    correct = [[[0, 1, 1, 1], [0, 0, 1, 1]], [[0, 1, 1, 0], [0, 0, 0, 0]]]
    counted = [[[0, 1, 1, 1], [0, 1, 1, 1]], [[0, 1, 1, 0], [0, 0, 0, 0]]]
    metrics = statistics_to_metrics(statistics_of(correct, counted).sum(0))
    assert metrics == pytest.approx(
        {
            "loss": 2.0,
            "accuracy": 7 / 8,
            "accuracy_1": 2 / 3,
            "accuracy_2": 3 / 3,
            "accuracy_3": 2 / 2,
            # Accepted prefixes 3, 0 and 2. The product of marginal accuracies would give 2/3 + 2/3 + 2/3 + 1.
            "simulated_tau": (3 + 0 + 2) / 3 + 1,
        }
    )


def test_figures_pool_tokens_not_batches():
    long = statistics_of([[[0, 1, 1, 1]] * 9], [[[0, 1, 1, 1]] * 9])
    short = statistics_of([[[0, 0, 0, 0]]], [[[0, 1, 0, 0]]])
    metrics = statistics_to_metrics(long.sum(0) + short.sum(0))
    assert metrics["accuracy"] == pytest.approx(27 / 28)
    assert metrics["simulated_tau"] == pytest.approx(27 / 10 + 1)


def test_figures_without_blocks_are_absent():
    assert statistics_to_metrics(statistics_of([[[0, 0]]], [[[0, 0]]]).sum(0)) == {}
