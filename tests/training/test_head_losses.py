"""Training a head over the whole vocabulary: its loss behind the frozen head, what moves, and what training says."""

import pytest
import torch
from support.pairs import make_draft, make_target
from support.recurrent_head import SIZES, RecurrentHead, use_heads
from support.rows import counting_rows
from support.runs import BLOCK, history, make_trainer

from dflash_hf import DFlashDraftModel
from dflash_hf.modeling.head_dflash import TokenHead
from dflash_hf.pairs.draft_vocabulary import set_draft_vocabulary
from dflash_hf.training.losses import LogitsHead, Teacher, block_loss, dpace_weights, token_losses


@pytest.fixture(autouse=True)
def heads(monkeypatch):
    use_heads(monkeypatch, RecurrentHead)


def a_batch(with_teacher, tokens=7, vocab=12):
    """Everything that a loss is made of, in fp64: the parameters that learn, and what they learn from."""
    random = torch.Generator().manual_seed(0)

    def of(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    hidden = of(1, 1, tokens, 6)
    queries = of(tokens - 2, 3)
    bias = of(3, vocab)
    weight = of(vocab, 6)
    states = of(tokens, 6)
    labels = torch.randint(vocab, (1, 1, tokens), generator=random)
    counted = torch.ones_like(labels, dtype=torch.bool)
    counted[..., 0] = counted[..., 4] = False
    teacher = Teacher(states, torch.arange(tokens)[None, None], lambda rows: rows @ weight.T) if with_teacher else None
    return [hidden, queries, bias], (weight, labels, counted, teacher)


class BiasHead(LogitsHead):
    """Adds a bias of each query to the logits, and learns from both."""

    def __init__(self, weight, queries, bias):
        super().__init__(lambda hidden: hidden @ weight.T)
        self.queries = queries
        self.bias = bias

    def score(self, queries, logits):
        return None, logits + queries @ self.bias

    def loss(self, tokens):
        return tokens.divergence(tokens.scores) + 0.3 * tokens.divergence(tokens.logits)


@pytest.mark.parametrize("with_teacher", [False, True], ids=["labels", "teacher"])
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_loss_of_all_scores_equals_the_oracle(with_teacher, chunk_size):
    """Two terms, of the scores and of the logits, chunk by chunk, against all at once; and all their gradients."""
    learned, (weight, labels, counted, teacher) = a_batch(with_teacher)
    gradients = []
    for chunked in (True, False):
        hidden, queries, bias = (parameter.clone().requires_grad_() for parameter in learned)
        if chunked:
            head = BiasHead(weight, queries, bias)
            losses = token_losses(hidden, head, labels, counted, chunk_size, teacher)
            values = losses.loss
            figures = losses
        else:
            values = torch.zeros(labels.shape, dtype=torch.float64)
            for number, slot in enumerate(counted[0, 0].nonzero().flatten().tolist()):
                logits = weight @ hidden[0, 0, slot]
                scores = logits + queries[number] @ bias
                gold = labels[0, 0, slot]
                p = (
                    (weight @ teacher.states[slot]).softmax(0)
                    if with_teacher
                    else torch.nn.functional.one_hot(gold, 12)
                )
                for share, q in ((1.0, scores.log_softmax(0)), (0.3, logits.log_softmax(0))):
                    values[0, 0, slot] += share * (torch.xlogy(p, p) - p * q).sum()
                assert figures.nll[0, 0, slot].item() == pytest.approx(-scores.log_softmax(0)[gold].item())
                assert figures.correct[0, 0, slot] == (scores.argmax() == gold)
                assert figures.correct_without_head[0, 0, slot] == (logits.argmax() == gold)
            torch.testing.assert_close(values.detach(), figures.loss.detach())
            assert torch.equal(figures.draftable, counted) and not figures.correct[~counted].any()
        gradients.append(torch.autograd.grad((values * torch.arange(7.0)).sum(), (hidden, queries, bias)))
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("chooses", [False, True])
def test_loss_without_tokens_is_zero_and_has_gradients(chooses):
    """On a rank without any, the gradients of the others are reduced all the same."""
    learned, (weight, labels, counted, _) = a_batch(with_teacher=False)
    hidden, queries, bias = (parameter.clone().requires_grad_() for parameter in learned)

    class ChoosingHead(BiasHead):
        def score(self, queries, logits):
            ids, scores = super().score(queries, logits)
            return (scores.topk(4).indices, scores.topk(4).values) if chooses else (ids, scores)

        def loss(self, tokens):
            return TokenHead.loss(None, tokens, progress=0.0)

    nothing_counted = torch.zeros_like(counted)
    losses = token_losses(hidden, ChoosingHead(weight, queries[:0], bias), labels, nothing_counted)
    block_loss(losses, nothing_counted, dpace_weights).sum().backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in (hidden, queries, bias))


@pytest.mark.parametrize(("loss_type", "vocabulary"), [("ce", None), ("dpace", 60), ("dpace_kl", None)])
def test_every_parameter_learns(loss_type, vocabulary, tmp_path):
    target = make_target()
    rows = counting_rows(4)
    draft = make_draft(target, block_size=BLOCK, draft_vocab_size=vocabulary, **SIZES)
    if vocabulary:
        set_draft_vocabulary(draft, target, torch.arange(96))
    options = {"warmup_steps": 0, "max_steps": 30, "loss_type": loss_type, "learning_rate": 5e-3}
    trainer = make_trainer(tmp_path, target, rows, draft, rows, **options)
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    start = trainer.evaluate()
    assert start["eval_simulated_tau"] == start["eval_simulated_tau_argmax"]  # a fresh head changes nothing
    trainer.train()
    for name, parameter in draft.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("lm_head."), name
    assert trainer.evaluate()["eval_loss"] < 0.7 * start["eval_loss"]
    assert trainer.progress == 1 and history(trainer, "simulated_tau_argmax")
    trainer.save_model(tmp_path / "out")
    reloaded = DFlashDraftModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in reloaded.state_dict().items())
