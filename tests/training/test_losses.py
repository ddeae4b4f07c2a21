"""Slot weights, the chunked loss against the dense one, and figures that are never means of means."""

import itertools
import math
import typing
from dataclasses import replace

import pytest
import torch
from torch import nn

from dflash_hf.training.arguments import LossType
from dflash_hf.training.losses import (
    LOSS_TERMS,
    LOSSES,
    LogitsHead,
    Teacher,
    TokenLosses,
    auf_weights,
    block_loss,
    dpace_weights,
    loss_normalizer,
    slot_weights,
    token_losses,
)
from dflash_hf.training.metrics import Statistics, block_statistics, statistics_to_metrics


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
    """Hidden states, a head, labels, which tokens count (never slot 0), and a teacher over the same head."""
    random = torch.Generator().manual_seed(0)
    head = RecordingHead(width, vocab, torch.float32)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocab, width, generator=random))
    head = head.to(dtype)
    hidden = torch.randn(*shape, width, generator=random).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, shape, generator=random)
    drafted_right = torch.rand(shape, generator=random) < 0.5
    labels = torch.where(drafted_right, (hidden @ head.weight.T).argmax(-1), labels)
    counted = torch.rand(shape, generator=random) < 0.8
    counted[..., 0] = False
    states = torch.randn(7, width, generator=random).to(dtype)
    teacher_weight = torch.randn(vocab, width, generator=random).to(dtype)
    state_index = torch.randint(0, 7, shape, generator=random)
    teacher = Teacher(states, state_index, lambda chosen: chosen @ teacher_weight.T)
    return hidden, head, labels, counted, teacher


def dense_values(hidden, head, labels, counted, teacher=None):
    """All logits at once."""
    log_q = (hidden @ head.weight.T).log_softmax(-1)
    if teacher is None:
        values = -log_q.gather(-1, labels[..., None])[..., 0]
    else:
        log_p = teacher.head(teacher.states[teacher.state_index]).log_softmax(-1)
        apart = (log_p.exp() - log_q.exp()).abs().sum(-1)
        gold = log_q.gather(-1, labels[..., None])[..., 0]
        kinds = {"kl": (log_p.exp() * (log_p - log_q)).sum(-1), "dspark": 0.9 * apart - 0.1 * gold}
        values = kinds[teacher.kind]
    return values * counted


# ------------------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("block_size, gamma", [(16, 7), (10, 5), (8, 4)])
def test_slot_weights_of_the_paper(block_size, gamma):
    weights = slot_weights(block_size)
    expected = [0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    torch.testing.assert_close(weights, torch.tensor(expected))
    torch.testing.assert_close(slot_weights(block_size, float(gamma)), weights)


# -------------------------------------------------------------------------------------------------------- token losses


@pytest.mark.parametrize("kind", ["ce", "kl", "dspark"])
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_chunked_loss_equals_dense_loss(chunk_size, kind):
    dtype, tolerance = (torch.float64, 1e-13) if chunk_size == 7 else (torch.float32, 2e-6)
    hidden, head, labels, counted, teacher = tokens(dtype)
    teacher = None if kind == "ce" else replace(teacher, kind=kind)
    upstream = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    dense = dense_values(hidden, head, labels, counted, teacher)
    (dense_grad,) = torch.autograd.grad((dense * upstream).sum(), hidden)

    result = token_losses(hidden, LogitsHead(head), labels, counted, chunk_size, teacher)
    (grad,) = torch.autograd.grad((result.loss * upstream).sum(), hidden)
    torch.testing.assert_close(result.loss, dense, atol=tolerance, rtol=10 * tolerance)
    torch.testing.assert_close(grad, dense_grad, atol=tolerance, rtol=10 * tolerance)
    assert torch.equal(result.correct, ((hidden @ head.weight.T).argmax(-1) == labels) & counted)
    assert result.correct.any()


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_logits_never_exist_all_at_once(kind):
    hidden, head, labels, counted, teacher = tokens()
    teacher_rows = []
    teacher.head = lambda states, head=teacher.head: (teacher_rows.append(len(states)), head(states))[1]
    losses = token_losses(hidden, LogitsHead(head), labels, counted, 7, teacher if kind == "kl" else None)
    chunks = sizes_of_chunks(counted, 7)  # tokens that do not count never reach the head
    losses.loss.sum().backward()
    assert len(chunks) > 1 and head.rows == [0, *chunks]  # once; before, none, to see whether parameters are trained
    assert teacher_rows == (head.rows if kind == "kl" else [])
    assert head.weight.grad is None
    assert not hidden.grad[~counted].any()


def sizes_of_chunks(counted, size):
    total = int(counted.sum())
    return [min(size, total - start) for start in range(0, total, size)]


class Scaled(LogitsHead):
    """Multiplies the logits by a parameter."""

    def __init__(self, logits, scale):
        super().__init__(logits)
        self.scale = scale

    def score(self, queries, logits):
        return None, logits * self.scale


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("chunk_size", [7, 1000])
def test_trained_parameter_gets_its_gradient(chunk_size, is_trained):
    """It is a sum over weighted tokens, whose weights the forward pass does not know: the logits are needed again."""
    hidden, head, labels, counted, _ = tokens(torch.float64)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=is_trained)
    learned = [hidden, scale] if is_trained else [hidden]
    losses = token_losses(hidden, Scaled(head, scale), labels, counted, chunk_size).loss
    gradients = torch.autograd.grad((losses * weights).sum(), learned)
    chunks = sizes_of_chunks(counted, chunk_size)
    assert head.rows == [0, *chunks, *(reversed(chunks) if is_trained and chunk_size == 7 else ())]
    log_q = (hidden @ head.weight.T * scale).log_softmax(-1)
    dense = -(log_q.gather(-1, labels[..., None])[..., 0] * counted * weights).sum()
    for gradient, expected in zip(gradients, torch.autograd.grad(dense, learned), strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("kind", LOSS_TERMS)
def test_no_logits_are_kept_for_the_backward_pass(kind):
    """Not even those of the only chunk."""
    hidden, head, labels, counted, teacher = tokens()
    losses = token_losses(hidden, LogitsHead(head), labels, counted, 1000, replace(teacher, kind=kind)).loss
    largest = max(math.prod(shape) for shape in shapes_of_graph(losses))
    assert hidden.numel() >= largest > 0  # logits would be 5 times as many


def shapes_of_graph(tensor):
    """The shapes of what the nodes of a graph keep."""
    shapes = [torch.Size([])]
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        saved = getattr(node, "saved_tensors", ())
        saved = [*saved, *(getattr(node, name) for name in dir(node) if name.startswith("_saved_"))]
        shapes += [value.shape for value in saved if isinstance(value, torch.Tensor)]
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return shapes


def test_evaluation_needs_no_gradient():
    hidden, head, labels, counted, _ = tokens()
    with torch.no_grad():
        result = token_losses(hidden, LogitsHead(head), labels, counted, chunk_size=7)
    assert not result.loss.requires_grad
    assert sum(head.rows) == counted.sum()


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_loss_without_counted_tokens_is_zero(kind):
    hidden, head, labels, counted, teacher = tokens()
    nothing = torch.zeros_like(counted)
    result = token_losses(hidden, LogitsHead(head), labels, nothing, 7, teacher if kind == "kl" else None)
    result.loss.sum().backward()
    assert not result.loss.any() and set(head.rows) == {0}
    assert not hidden.grad.any() and hidden.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_half_precision_is_summed_in_single(kind):
    """A bf16 sum stops growing long before a thousand tokens: 256 + 1 == 256."""
    hidden, head, labels, counted, teacher = tokens(torch.bfloat16, shape=(1, 400, 5))
    teacher = teacher if kind == "kl" else None
    result = token_losses(hidden, LogitsHead(head), labels, counted, 64, teacher)
    log_q = (hidden @ head.weight.T).float().log_softmax(-1)
    expected = -log_q.gather(-1, labels[..., None])[..., 0]
    if kind == "kl":
        log_p = teacher.head(teacher.states[teacher.state_index]).float().log_softmax(-1)
        expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss.sum(), (expected * counted).sum(), rtol=1e-5, atol=0)
    result.loss.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16 and hidden.grad.isfinite().all()


# -------------------------------------------------------------------------------------------------------- block losses


def dpace_oracle(nll, counted, alpha):
    """Credit by credit, in the words of the paper."""
    weights = torch.zeros_like(nll)
    for block in itertools.product(*map(range, nll.shape[:-1])):
        credit = []
        product = 1.0
        for j in range(nll.shape[-1]):
            if counted[block][j]:
                product *= (1 - alpha) * math.exp(-nll[block][j]) + alpha
            credit.append(product if counted[block][j] else 0.0)
        for j in range(nll.shape[-1]):
            weights[block][j] = sum(credit[j:]) if counted[block][j] else 0.0
    return weights


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_equal_the_oracle(alpha):
    random = torch.Generator().manual_seed(0)
    nll = -torch.rand(3, 4, 6, generator=random, dtype=torch.float64).log()
    counted = torch.rand(nll.shape, generator=random) < 0.7
    counted[..., 0] = False
    losses = TokenLosses(nll * counted, nll * counted, counted, counted, counted)
    weights = dpace_weights(losses, counted, alpha)
    torch.testing.assert_close(weights, dpace_oracle(nll, counted, alpha), rtol=1e-12, atol=0)


def weighted_oracle(values, counted, weights):
    return sum(
        weights[n, a, k] * values[n, a, k]
        for n, a, k in itertools.product(*map(range, values.shape))
        if counted[n, a, k]
    )


@pytest.mark.parametrize("kind", ["decay", "uniform", "dpace"])
def test_block_loss_equals_the_oracle_in_any_split(kind):
    """Sums and normalizers of the parts add up to those of the whole, sequence by sequence."""
    hidden, head, labels, counted, _ = tokens(torch.float64, shape=(4, 3, 5))
    counted[2] = False
    losses = token_losses(hidden, LogitsHead(head), labels, counted, 7)
    slots = {"decay": slot_weights(5, 2.0), "uniform": slot_weights(5, math.inf), "dpace": dpace_weights}[kind]
    if kind == "dpace":
        weights = dpace_oracle(losses.loss.detach(), counted, 0.5)
        blocks = sum(bool(counted[n, a].any()) for n in range(4) for a in range(3))
        normalizer = blocks  # never the sum of the weights
    else:
        gamma = {"decay": 2.0, "uniform": math.inf}[kind]
        decay = [0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, 5)]
        weights = torch.tensor(decay, dtype=torch.float64).expand(4, 3, 5)
        normalizer = sum(
            weights[n, a, k] for n, a, k in itertools.product(range(4), range(3), range(5)) if counted[n, a, k]
        )
    total = block_loss(losses, counted, slots)
    torch.testing.assert_close(total.sum(), weighted_oracle(losses.loss, counted, weights), rtol=1e-6, atol=0)
    assert loss_normalizer(counted, slots).sum().item() == pytest.approx(float(normalizer), rel=1e-6)
    assert total[2] == loss_normalizer(counted, slots)[2] == 0
    (grad,) = torch.autograd.grad(total.sum(), hidden, retain_graph=True)
    (expected,) = torch.autograd.grad((losses.loss * weights).sum(), hidden)
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------------------------------------ figures


def statistics_of(*batches):
    """The sums over batches, each of the correct and the counted slots."""
    sums = Statistics.zeros(torch.device("cpu"))
    for correct, counted in batches:
        correct = torch.tensor(correct, dtype=torch.bool)
        counted = torch.tensor(counted, dtype=torch.bool)
        normalizer = counted.sum((1, 2)) * 0.5
        sums = sums.add(block_statistics(correct, counted, 2 * normalizer, normalizer))
    return sums


def test_figures_equal_hand_computed_values():
    """Two sequences of two blocks of four slots; the last block is invalid, the third ends after two tokens."""
    correct = [[[0, 1, 0, 1], [0, 0, 1, 1]], [[0, 1, 1, 0], [0, 0, 0, 0]]]
    counted = [[[0, 1, 1, 1], [0, 1, 1, 1]], [[0, 1, 1, 0], [0, 0, 0, 0]]]
    metrics = statistics_to_metrics(statistics_of((correct, counted)))
    assert metrics == pytest.approx(
        {
            "loss": 2.0,
            "accuracy": 6 / 8,
            "accuracy_1": 2 / 3,
            "accuracy_2": 2 / 3,
            "accuracy_3": 2 / 2,
            # Given that the slots before are right; no block gets to slot 3, and its metric is there all the same.
            "acceptance_1": 2 / 3,
            "acceptance_2": 1 / 2,
            "acceptance_3": 0.0,
            # Accepted prefixes 1, 0 and 2. The product of marginal accuracies would give 2/3 + 4/9 + 4/9 + 1.
            "simulated_tau": (1 + 0 + 2) / 3 + 1,
        }
    )


def test_figures_pool_tokens_not_batches():
    long = [[[0, 1, 1, 1]] * 9], [[[0, 1, 1, 1]] * 9]
    short = [[[0, 0, 0, 0]]], [[[0, 1, 0, 0]]]
    metrics = statistics_to_metrics(statistics_of(long, short))
    assert metrics["accuracy"] == pytest.approx(27 / 28)
    assert metrics["simulated_tau"] == pytest.approx(27 / 10 + 1)


def test_figures_without_blocks_are_absent():
    assert statistics_to_metrics(statistics_of(([[[0, 0]]], [[[0, 0]]]))) == {}


@pytest.mark.parametrize("seed", range(5))
def test_auf_weights_equal_the_oracle(seed):
    """Oracle of Spec-AUF: walk over each block, as verification does."""
    random = torch.Generator().manual_seed(seed)
    correct, counted = (torch.rand(2, 3, 6, generator=random) < share for share in (0.7, 0.8))
    expected = torch.zeros(2, 3, 6)
    for row, block in itertools.product(range(2), range(3)):
        for k in counted[row, block].nonzero()[:, 0].tolist():
            expected[row, block, k] = 1
            if not correct[row, block, k]:
                break
    losses = TokenLosses(correct, correct, correct & counted, counted, correct)
    assert torch.equal(auf_weights(losses, counted).float(), expected)


def test_every_loss_type_is_in_the_table():
    assert tuple(LOSSES) == typing.get_args(LossType)
    assert {loss.kind for loss in LOSSES.values()} == set(LOSS_TERMS)
