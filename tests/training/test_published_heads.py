"""Training the heads that are published: their losses written out, and what training says of what decoding drafts."""

import pytest
import torch
from support.pairs import make_draft, make_target
from support.reference import gru_step, markov_bias
from support.rows import counting_rows
from support.runs import BLOCK, history, make_trainer

from dflash_hf import DFlashDraftModel
from dflash_hf.modeling.drafting_dflash import Drafter
from dflash_hf.training.blocks import build_blocks
from dflash_hf.training.losses import Teacher, token_losses
from dflash_hf.training.recipe import HEADS, read_recipe
from dflash_hf.training.start import with_parts


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
            if name.startswith(("markov_head.", "prefix_gru.", "embed_proj.", "confidence_head.")):
                parameter += torch.randn(parameter.shape, generator=random)
    return draft


def watched(trainer, monkeypatch):
    """What a batch's loss was made of."""
    seen, losses_of = {}, trainer.objective.head_losses

    def head_losses(*args):
        seen.update(args=args, losses=losses_of(*args))
        return seen["losses"]

    monkeypatch.setattr(trainer.objective, "head_losses", head_losses)
    batch = trainer.data_collator(trainer.train_dataset)
    trainer.objective.draw_anchors(batch, step=0)
    loss = trainer.compute_loss(trainer.model, batch)
    return loss, trainer.objective.build_blocks(batch), seen


@pytest.mark.parametrize(
    ("kind", "loss_type"),
    [*((kind, "dspark") for kind in PUBLISHED), ("Domino, shifted", "ce"), ("rnn", "kl"), ("Domino", "tv")],
)
def test_the_loss_written_out(kind, loss_type, tmp_path, monkeypatch):
    """Token by token from the published formulas, in fp64, and the weights of the slots."""
    target = make_target(dtype=torch.float64)
    draft, rows = trained(target, PUBLISHED[kind]), counting_rows(2)
    trainer = make_trainer(tmp_path, target, rows, draft, loss_type=loss_type, max_steps=4, num_anchors=3)
    trainer.state.max_steps, trainer.state.global_step = 4, 1
    loss, blocks, seen = watched(trainer, monkeypatch)
    hidden, labels, counted, before, _ = seen["args"][:5]
    tensors, config = draft.state_dict(), draft.config
    embedding, head = target.get_input_embeddings().weight, target.lm_head.weight
    total = weights = 0.0
    gamma = {4: 2.0, 5: 2.5}[config.block_tokens]
    for i in range(labels.shape[0]):
        with torch.no_grad():
            texts = target(torch.tensor(rows[i]["input_ids"])[None]).logits[0]
        for j in range(labels.shape[1]):
            state = torch.zeros(config.gru_hidden_dim or config.markov_rank or 0, dtype=torch.float64)
            for k in range(1, labels.shape[2]):
                h, x = hidden[i, j, k].detach(), int(before[i, j, k])
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
                place = int(trainer_anchor(blocks, rows[i], j, i) + k - 1)
                p = texts[place].softmax(0)

                def of(scores, gold=gold, p=p):
                    q = scores.softmax(0)
                    ce, l1 = -q[gold].log(), (p - q).abs().sum()
                    kl = (p * (p.log() - q.log())).sum()
                    return {"ce": ce, "dspark": 0.1 * ce + 0.9 * l1, "kl": kl, "tv": l1 / 2}[loss_type], l1

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
                    seen["losses"].values[i, j, k].detach().double(), value, atol=2e-5, rtol=1e-5
                )
                weight = 2.718281828459045 ** (-(k - 1) / gamma)
                total, weights = total + weight * value, weights + weight
    torch.testing.assert_close(loss.detach().double(), total / weights, atol=2e-5, rtol=1e-5)


def trainer_anchor(blocks, row, j, i):
    return blocks.position_ids[i, len(row["input_ids"]) :].view(-1, BLOCK)[j, 0]


@pytest.mark.parametrize("kind", PUBLISHED)
@torch.no_grad()
def test_training_counts_what_decoding_drafts(kind, tmp_path, monkeypatch):
    """Which tokens are right after the true ones before, slot by slot: integers, from the code that drafts."""
    target = make_target(dtype=torch.float64)
    draft, rows = trained(target, PUBLISHED[kind]), counting_rows(4)
    trainer = make_trainer(tmp_path, target, rows, draft)
    _, blocks, seen = watched(trainer, monkeypatch)
    hidden, labels, counted, before, _ = seen["args"][:5]
    drafter = Drafter(draft, target)
    ours, theirs = [], []
    for i, j in counted.any(-1).nonzero().tolist():
        anchors = before[i, j, 1:2]
        states = hidden[i, j : j + 1, 1 : draft.config.block_tokens]
        ids, logits = drafter.candidates(states, [])
        state, x = drafter.head.start(anchors), anchors
        for k in range(1, draft.config.block_tokens):
            query, state = drafter.head.step(state, x, states[:, k - 1])
            choice = drafter.head.scores(query, ids[:, k - 1], logits[:, k - 1]).argmax(-1)
            x = labels[i, j, k][None]
            if counted[i, j, k]:
                ours.append(bool(seen["losses"].correct[i, j, k]))
                theirs.append(bool(ids[0, k - 1, choice] == x))
        # And from the walk: its tokens agree with the labels just as far.
        walked = drafter.walk(anchors, states, [])[0, 1:]
        right = (walked == labels[i, j, 1 : draft.config.block_tokens]) & counted[i, j, 1 : draft.config.block_tokens]
        assert int(right.long().cumprod(0).sum()) == int(
            (seen["losses"].correct[i, j, 1 : draft.config.block_tokens]).long().cumprod(0).sum()
        )
    assert ours == theirs and len(ours) > 20


@pytest.mark.parametrize("kind", ["rnn", "Domino, shifted"])
def test_a_head_learns_alone_and_then_with_the_rest(kind, tmp_path):
    target, rows = make_target(), counting_rows(4)
    plain = make_draft(target, block_size=BLOCK, sample_from_anchor="sample_from_anchor" in PUBLISHED[kind])
    fields = {key: value for key, value in PUBLISHED[kind].items() if key != "sample_from_anchor"}
    draft = with_parts(plain, fields)
    assert draft.config.sample_from_anchor == plain.config.sample_from_anchor
    loss_type = "dspark" if "markov_rank" in fields else "kl"
    options = {"warmup_steps": 0, "max_steps": 6, "learning_rate": 2e-2, "loss_type": loss_type}
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    trainer = make_trainer(tmp_path, target, rows, draft, rows, head_only=True, **options)
    start = trainer.evaluate()
    assert start["eval_simulated_tau"] == start["eval_simulated_tau_argmax"]  # a fresh head changes nothing
    trainer.train()
    own = tuple(f"{name}." for name in draft.config.head.modules(draft.config))
    for name, parameter in draft.named_parameters():
        assert torch.equal(parameter, before[name]) != name.startswith(own), name
    middle = trainer.evaluate()
    assert middle["eval_simulated_tau_argmax"] == start["eval_simulated_tau_argmax"]
    draft.requires_grad_(True)
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    trainer = make_trainer(tmp_path, target, rows, draft, rows, **{**options, "learning_rate": 5e-3})
    trainer.train()
    for name, parameter in draft.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    assert history(trainer, "simulated_tau_argmax")
    trainer.save_model(tmp_path / "out")
    again = DFlashDraftModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("kind", ["tv", "dspark"])
def test_the_gradient_behind_a_frozen_head(kind):
    """Kept row by row, against autograd through all logits."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 1, 6, 5, generator=random, dtype=torch.float64, requires_grad=True)
    weight, states = (torch.randn(n, 5, generator=random, dtype=torch.float64) for n in (11, 6))
    labels = torch.randint(11, (1, 1, 6), generator=random)
    teacher = Teacher(states, torch.arange(6)[None, None], lambda rows: rows @ weight.T, kind)
    losses = token_losses(hidden, lambda rows: rows @ weight.T, labels, labels >= 0, 4, teacher)
    q, p = (hidden @ weight.T).softmax(-1), (states @ weight.T).softmax(-1)
    apart = (q - p).abs().sum(-1)
    gold = q.gather(-1, labels[..., None])[..., 0]
    wanted = apart / 2 if kind == "tv" else 0.9 * apart - 0.1 * gold.log()
    torch.testing.assert_close(losses.values, wanted)
    share = torch.arange(6.0, dtype=torch.float64)
    gradients = (
        torch.autograd.grad((one * share).sum(), hidden, retain_graph=True)[0] for one in (losses.values, wanted)
    )
    torch.testing.assert_close(*gradients)


def test_a_hole_ends_a_block_of_dspark():
    ids, mask = torch.arange(12)[None], torch.ones(1, 12, dtype=torch.long)
    mask[0, 5] = 0
    arguments = (ids, mask, torch.tensor([[3, 7]]), torch.tensor([[True, True]]), 4, 11)
    counted = build_blocks(*arguments, anchor_first=True, unbroken=True).counted
    assert counted[0].tolist() == [[False, True, False, False, False], [False, True, True, True, True]]
    counted = build_blocks(*arguments, anchor_first=True).counted
    assert counted[0, 0].tolist() == [False, True, False, True, True]


def test_one_argument_makes_a_drafter_and_its_loss():
    for head, (fields, loss) in HEADS.items():
        recipe, arguments = read_recipe(None, ["target=t", "data=d", f"head={head}"])
        assert recipe.draft_config == fields and loss.items() <= arguments.items()
    given = ["target=t", "data=d", "head=dspark", "loss_type=kl", "draft_config.markov_rank=64"]
    recipe, arguments = read_recipe(None, given)
    assert recipe.draft_config["markov_rank"] == 64 and recipe.draft_config["enable_confidence_head"]
    assert arguments["loss_type"] == "kl"
    with pytest.raises(ValueError, match="head='gru' must be one of dspark, domino, jetspec, dflash2"):
        read_recipe(None, ["target=t", "data=d", "head=gru"])
