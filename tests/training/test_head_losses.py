"""Training a head over the whole vocabulary: its loss behind the frozen head, what moves, and what training says."""

import pytest
import torch
from support.pairs import make_draft, make_draft2, make_target
from support.recurrent_head import SIZES, RecurrentHead, use_heads
from support.rows import counting_rows
from support.runs import BLOCK, history, make_trainer

from dflash_hf import DFlashDraftModel
from dflash_hf.modeling.drafting_dflash import Drafter
from dflash_hf.training.losses import Teacher, block_loss, scored_losses
from dflash_hf.training.start import take_vocabulary, with_parts


@pytest.fixture(autouse=True)
def heads(monkeypatch):
    use_heads(monkeypatch, RecurrentHead)


def a_batch(teacher, tokens=7, vocab=12):
    """Everything that a loss is made of, in fp64: the parameters that learn, and what they learn from."""
    random = torch.Generator().manual_seed(0)

    def of(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    hidden, queries, bias = of(1, 1, tokens, 6), of(tokens - 2, 3), of(3, vocab)
    weight, states = of(vocab, 6), of(tokens, 6)
    labels = torch.randint(vocab, (1, 1, tokens), generator=random)
    known = torch.ones_like(labels, dtype=torch.bool)
    known[..., 0] = known[..., 4] = False
    one = Teacher(states, torch.arange(tokens)[None, None], lambda rows: rows @ weight.T) if teacher else None
    return [hidden, queries, bias], (weight, labels, known, one)


@pytest.mark.parametrize("teacher", [False, True], ids=["labels", "teacher"])
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_the_loss_of_all_scores_written_out(teacher, chunk_size):
    """Two terms, of the scores and of the logits, chunk by chunk, against all at once; and all their gradients."""
    learned, (weight, labels, known, one) = a_batch(teacher)
    gradients = []
    for chunked in (True, False):
        hidden, queries, bias = (one.clone().requires_grad_() for one in learned)
        if chunked:
            losses = scored_losses(
                hidden,
                queries,
                lambda rows: rows @ weight.T,
                lambda query, logits, bias=bias: (logits, logits + query @ bias),
                lambda rows: rows.divergence(rows.scores) + 0.3 * rows.divergence(rows.logits),
                labels,
                known,
                chunk_size,
                one,
            )
            values, figures = losses.values, losses
        else:
            values = torch.zeros(labels.shape, dtype=torch.float64)
            for number, slot in enumerate(known[0, 0].nonzero().flatten().tolist()):
                logits = weight @ hidden[0, 0, slot]
                scores, gold = logits + queries[number] @ bias, labels[0, 0, slot]
                wanted = (weight @ one.states[slot]).softmax(0) if teacher else torch.nn.functional.one_hot(gold, 12)
                for share, q in ((1.0, scores.log_softmax(0)), (0.3, logits.log_softmax(0))):
                    values[0, 0, slot] += share * (torch.xlogy(wanted, wanted) - wanted * q).sum()
                assert figures.nll[0, 0, slot].item() == pytest.approx(-scores.log_softmax(0)[gold].item())
                assert figures.correct[0, 0, slot] == (scores.argmax() == gold)
                assert figures.alone[0, 0, slot] == (logits.argmax() == gold)
            torch.testing.assert_close(values.detach(), figures.values.detach())
            assert torch.equal(figures.known, known) and not figures.correct[~known].any()
        gradients.append(torch.autograd.grad((values * torch.arange(7.0)).sum(), (hidden, queries, bias)))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)


def test_no_token_at_all_is_a_loss_of_zero_that_reaches_the_head():
    learned, (weight, labels, known, _) = a_batch(teacher=False)
    hidden, queries, bias = (one.clone().requires_grad_() for one in learned)
    losses = scored_losses(
        hidden,
        queries[:0],
        lambda rows: rows @ weight.T,
        lambda query, logits: (logits, logits + query @ bias),
        lambda rows: rows.divergence(rows.scores),
        labels,
        torch.zeros_like(known),
    )
    block_loss(losses, torch.zeros_like(known), None).sum().backward()
    assert all(one.grad.abs().max() == 0 for one in (hidden, queries, bias))


@pytest.mark.parametrize("loss_type", ["ce", "dpace", "dpace_kl"])
@pytest.mark.parametrize("vocabulary", [None, 60])
def test_every_parameter_learns(loss_type, vocabulary, tmp_path):
    target, rows = make_target(), counting_rows(4)
    draft = make_draft(target, block_size=BLOCK, draft_vocab_size=vocabulary, **SIZES)
    if vocabulary:
        take_vocabulary(draft, target, torch.arange(96))
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
    again = DFlashDraftModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_a_head_is_added_to_a_trained_drafter_and_learns_alone(tmp_path):
    target, rows = make_target(), counting_rows(4)
    plain = make_draft(target, block_size=BLOCK)
    with pytest.raises(ValueError, match="draft_config.block_size=8 is not a part that can be added"):
        with_parts(plain, {"block_size": 8})
    draft = with_parts(plain, {**SIZES, "memory_share": 0.0})
    with pytest.raises(ValueError, match="draft_config.memory_share=0.5 differs from its 0.0"):
        with_parts(draft, {"memory_share": 0.5})
    options = {"warmup_steps": 0, "max_steps": 20, "learning_rate": 3e-2}
    trainer = make_trainer(tmp_path, target, rows, draft, rows, head_only=True, **options)
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    start = trainer.evaluate()
    trainer.train()
    for name, parameter in draft.named_parameters():
        assert torch.equal(parameter, before[name]) != name.startswith("memory."), name
    end = trainer.evaluate()
    assert end["eval_simulated_tau_argmax"] == start["eval_simulated_tau_argmax"]
    assert end["eval_loss"] < 0.75 * start["eval_loss"]
    with pytest.raises(ValueError, match="head_only=False, but an earlier run"):
        make_trainer(tmp_path, target, rows, draft)


def recurrent(target, **overrides):
    draft = make_draft(target, **SIZES, **overrides)
    with torch.no_grad():
        for parameter in draft.memory.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(3))
    return draft


@pytest.mark.parametrize("make", [make_draft, make_draft2, recurrent])
def test_training_says_of_each_slot_what_the_walk_would_say(make, tmp_path, monkeypatch):
    """Given the true tokens before it: one place early or late, and a head learns what decoding cannot know."""
    target, rows, seen = make_target(), counting_rows(4), {}
    draft = make(target, block_size=BLOCK)
    trainer = make_trainer(tmp_path, target, rows, draft)
    losses_of = trainer.objective.head_losses
    monkeypatch.setattr(trainer.objective, "head_losses", lambda *args: seen.update(args=args) or losses_of(*args))
    batch = trainer.data_collator(rows)
    trainer.objective.draw_anchors(batch, step=0)
    with torch.no_grad():
        trainer.compute_loss(trainer.model, batch)
        hidden, labels, counted = seen["args"][:3]
        losses, drafter = losses_of(*seen["args"]), Drafter(draft, target)
        head, anchors = drafter.head, trainer.objective.build_blocks(batch).input_ids.view(labels.shape)[..., 0]
        for block in counted.any(-1).nonzero().tolist():
            i, j = block
            ids, logits = drafter.candidates(hidden[i, j : j + 1, 1:], [0])
            before, state = anchors[i, j : j + 1], head.start(anchors[i, j : j + 1])
            for slot in range(1, BLOCK):
                query, state = head.step(state, before, hidden[i, j : j + 1, slot])
                scores = head.scores(query, ids[:, slot - 1], logits[:, slot - 1])[0]
                before = labels[i, j, slot : slot + 1]
                if counted[i, j, slot]:
                    at = ids[0, slot - 1] == before
                    nll = -scores.log_softmax(-1)[at].sum() if at.any() else torch.tensor(torch.inf)
                    torch.testing.assert_close(losses.nll[i, j, slot], nll, atol=1e-4, rtol=1e-4)
                    assert losses.correct[i, j, slot] == at[scores.argmax()]
    assert losses.known.sum() > 20
