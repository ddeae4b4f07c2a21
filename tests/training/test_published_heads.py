"""Training the heads that are published: their losses written out, and what training says of what decoding drafts."""

import pytest
import torch
from support.pairs import make_draft, make_draft2, make_target
from support.recurrent_head import SIZES, RecurrentHead, use_heads
from support.reference import gru_step, markov_bias
from support.rows import counting_rows
from support.runs import BLOCK, make_trainer

from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.training.blocks import build_blocks


MARKOV = {"markov_rank": 6, "enable_confidence_head": True, "confidence_head_with_markov": True}
DOMINO = {"gru_hidden_dim": 9, "emb_dim": 7, "pure_draft_prefix_len": 1}
FIRST = {"sample_from_anchor": True}
PUBLISHED = {
    "vanilla": {**MARKOV, **FIRST},
    "gated": {**MARKOV, "markov_head_type": "gated"},
    "rnn": {**MARKOV, **FIRST, "markov_head_type": "rnn"},
    "Domino": DOMINO,
    "Domino, shifted": {**DOMINO, **FIRST},
    "no head": FIRST,
}


def trained(target, fields):
    """A drafter whose head matters."""
    draft = make_draft(target, block_size=BLOCK, **fields)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.startswith(("markov_head.", "prefix_gru.", "embed_proj.", "confidence_head.", "memory.")):
                parameter += torch.randn(parameter.shape, generator=random)
    return draft


def watched(trainer, monkeypatch):
    """What a batch's loss was made of."""
    recorded = {}
    losses_of = trainer.objective.head_losses

    def head_losses(*args):
        recorded.update(args=args, losses=losses_of(*args))
        return recorded["losses"]

    monkeypatch.setattr(trainer.objective, "head_losses", head_losses)
    batch = trainer.data_collator(trainer.train_dataset)
    trainer.objective.draw_anchors(batch, step=0)
    loss = trainer.compute_loss(trainer.model, batch)
    return loss, trainer.objective.build_blocks(batch), recorded


@pytest.mark.parametrize(
    ("kind", "loss_type"),
    [*((kind, "dspark") for kind in PUBLISHED), ("Domino, shifted", "ce"), ("rnn", "kl"), ("Domino", "kl")],
)
def test_loss_of_a_head_equals_the_oracle(kind, loss_type, tmp_path, monkeypatch):
    """Token by token from the published formulas, in fp64, and the weights of the slots."""
    target = make_target(dtype=torch.float64)
    draft = trained(target, PUBLISHED[kind])
    rows = counting_rows(2)
    trainer = make_trainer(tmp_path, target, rows, draft, loss_type=loss_type, max_steps=4, num_anchors=3)
    trainer.state.max_steps = 4
    trainer.state.global_step = 1
    loss, blocks, recorded = watched(trainer, monkeypatch)
    hidden, labels, counted, before, _ = recorded["args"][:5]
    tensors = draft.state_dict()
    config = draft.config
    embedding = target.get_input_embeddings().weight
    head = target.lm_head.weight
    total = weights = 0.0
    gamma = {4: 2.0, 5: 2.5}[config.max_block_tokens]
    for i in range(labels.shape[0]):
        with torch.no_grad():
            texts = target(torch.tensor(rows[i]["input_ids"])[None]).logits[0]
        for j in range(labels.shape[1]):
            state = torch.zeros(config.gru_hidden_dim or config.markov_rank or 0, dtype=torch.float64)
            for k in range(1, labels.shape[2]):
                h = hidden[i, j, k].detach()
                x = int(before[i, j, k])
                U = head @ h
                S = U
                if config.markov_rank:
                    bias, state = markov_bias(tensors, vars(config), state, x, h)
                    S = U + bias
                if config.gru_hidden_dim:
                    state = gru_step(tensors, state, embedding[x])
                    if k > config.pure_draft_prefix_len:
                        mixed = torch.nn.functional.silu(tensors["embed_proj.0.weight"] @ torch.cat([h, state]))
                        S = U + tensors["embed_proj.2.weight"] @ mixed
                if not counted[i, j, k]:
                    continue
                gold = int(labels[i, j, k])
                position = int(trainer_anchor(blocks, rows[i], j, i) + k - 1)
                p = texts[position].softmax(0)

                def of(scores, gold=gold, p=p):
                    q = scores.softmax(0)
                    ce = -q[gold].log()
                    l1 = (p - q).abs().sum()
                    kl = (p * (p.log() - q.log())).sum()
                    return {"ce": ce, "dspark": 0.1 * ce + 0.9 * l1, "kl": kl}[loss_type], l1

                value, l1 = of(S)
                if config.gru_hidden_dim:
                    value = 0.25 * value + 0.75 * of(U)[0]  # a quarter of the run is over
                if config.enable_confidence_head and loss_type != "ce":
                    sees = torch.cat([h, tensors["markov_head.markov_w1.weight"][x]])
                    c = torch.sigmoid(
                        tensors["confidence_head.proj.weight"][0] @ sees + tensors["confidence_head.proj.bias"][0]
                    )
                    value = value - ((1 - l1 / 2) * c.log() + l1 / 2 * (1 - c).log())
                torch.testing.assert_close(
                    recorded["losses"].loss[i, j, k].detach().double(), value, atol=2e-5, rtol=1e-5
                )
                weight = 2.718281828459045 ** (-(k - 1) / gamma)
                total = total + weight * value
                weights += weight
    torch.testing.assert_close(loss.detach().double(), total / weights, atol=2e-5, rtol=1e-5)


def trainer_anchor(blocks, row, j, i):
    return blocks.position_ids[i, len(row["input_ids"]) :].view(-1, BLOCK)[j, 0]


@pytest.mark.parametrize("kind", ["plain", "selector", "recurrent", *PUBLISHED])
@torch.no_grad()
def test_training_scores_equal_decoding_drafts(kind, tmp_path, monkeypatch):
    """
    Given the true tokens before it: one place early or late, and a head learns what decoding cannot know. The walk
    agrees with the labels just as far.
    """
    use_heads(monkeypatch, RecurrentHead)
    target = make_target(dtype=torch.float64)
    rows = counting_rows(4)
    draft = trained(target, PUBLISHED.get(kind, SIZES if kind == "recurrent" else {}))
    draft = make_draft2(target, block_size=BLOCK) if kind == "selector" else draft
    _, blocks, recorded = watched(make_trainer(tmp_path, target, rows, draft), monkeypatch)
    hidden, labels, counted, before, _ = recorded["args"][:5]
    losses = recorded["losses"]
    drafter = DraftSession(draft, target)
    compared = 0
    slots = slice(1, draft.config.max_block_tokens)
    for i, j in counted.any(-1).nonzero().tolist():
        anchors = before[i, j, 1:2]
        states = hidden[i, j : j + 1, slots]
        ids, logits = drafter.candidates(states)
        state = drafter.token_head.start(anchors)
        x = anchors
        for k in range(1, draft.config.max_block_tokens):
            query, state = drafter.token_head.step(state, x, states[:, k - 1])
            scores = drafter.token_head.scores(query, ids[:, k - 1], logits[:, k - 1])[0].double()
            x = labels[i, j, k][None]
            if counted[i, j, k]:
                is_label = ids[0, k - 1] == x
                compared += 1
                nll = -scores.log_softmax(-1)[is_label].sum() if is_label.any() else torch.tensor(torch.inf).double()
                torch.testing.assert_close(losses.nll[i, j, k].double(), nll, atol=1e-4, rtol=1e-4)
                assert losses.correct[i, j, k] == is_label[scores.argmax()]
        correct = (drafter.decode_block(anchors, states)[0, 1:] == labels[i, j, slots]) & counted[i, j, slots]
        assert correct.long().cumprod(0).sum() == losses.correct[i, j, slots].long().cumprod(0).sum()
    assert compared > 20


def test_uncounted_token_ends_a_dspark_block():
    ids = torch.arange(12)[None]
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, 5] = 0
    arguments = (ids, mask, torch.tensor([[3, 7]]), torch.tensor([[True, True]]), 4, 11)
    counted = build_blocks(*arguments, anchor_first=True, contiguous_only=True).counted
    assert counted[0].tolist() == [[False, True, False, False, False], [False, True, True, True, True]]
    counted = build_blocks(*arguments, anchor_first=True).counted
    assert counted[0, 0].tolist() == [False, True, False, True, True]
