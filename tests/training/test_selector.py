"""Training DFlash 2's path selector: its loss, what moves, and drafts that are better for it."""

import json

import pytest
import torch
from support.pairs import VOCAB, make_draft, make_draft2, make_target
from support.rows import counting_rows
from support.runs import BLOCK, history, make_trainer

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.data.examples import make_example
from dflash_hf.modeling.head_dflash import TokenHead
from dflash_hf.pairs.draft_vocabulary import set_draft_vocabulary
from dflash_hf.training.arguments import ScriptArguments
from dflash_hf.training.losses import DraftedTokens, LogitsHead, Teacher, token_losses
from dflash_hf.training.rows import validate_and_count
from dflash_hf.training.start import with_parts
from dflash_hf.training.train import train


SELECTOR = {"selector_rank": 8, "selector_top_k": 6}


def forked_rows(count, length=26):
    """
    Pairs of tokens. The likeliest first one, 20, is followed by 50, but most second ones are 51, after 21 and 22: what
    is likeliest in either slot by itself never stands together.
    """
    draws = torch.rand(count, length // 2, generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [[(20, 50) if draw < 0.4 else (21 + (draw < 0.7), 51) for draw in row] for row in draws]
    texts = [[token for pair in row for token in pair] for row in pairs]
    return [make_example(text[:4], text[4:]) for text in texts]


# ---------------------------------------------------------------------------------------------------------------- loss


def losses_of_a_block(with_teacher, chunk_size=3, shift=None, tokens=7, k=4):
    """Losses of one block's slots, in fp64, whose candidates' scores are shifted, and all that they were made of."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 1, tokens, 6, generator=random, dtype=torch.float64).requires_grad_()
    weight = torch.randn(12, 6, generator=random, dtype=torch.float64)
    states = torch.randn(tokens, 6, generator=random, dtype=torch.float64)
    labels = (hidden @ weight.T).topk(k + 1).indices[..., -2]  # the least likely candidate
    labels[..., 2] = (hidden[..., 2, :] @ weight.T).argmin(-1)  # none
    labels[..., 3] = -1  # a token that the drafter does not have
    counted = torch.ones_like(labels, dtype=torch.bool)
    counted[..., 0] = False
    teacher = Teacher(states, torch.arange(tokens)[None, None], lambda rows: rows @ weight.T) if with_teacher else None

    class Selector(LogitsHead):
        queries = shift

        def score(self, queries, logits):
            ids = logits.topk(k).indices.sort().values
            return ids, logits.detach().gather(-1, ids) + queries

        def loss(self, tokens):
            return TokenHead.loss(None, tokens, progress=0.0)

    head_class = LogitsHead if shift is None else Selector
    losses = token_losses(hidden, head_class(lambda rows: rows @ weight.T), labels, counted, chunk_size, teacher)
    return losses, hidden, weight, labels, states


@pytest.mark.parametrize("with_teacher", [False, True], ids=["labels", "teacher"])
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_loss_among_candidates_equals_the_oracle(with_teacher, chunk_size):
    """And the slots learn what they would without the selector."""
    shift = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    without_selector, hidden_without_selector, *_ = losses_of_a_block(with_teacher, chunk_size)
    with_selector, hidden, weight, labels, states = losses_of_a_block(with_teacher, chunk_size, shift)
    draftable_slots = [1, 2, 4, 5, 6]
    assert with_selector.draftable[0, 0].nonzero().flatten().tolist() == draftable_slots
    for number, slot in enumerate(draftable_slots):
        logits = weight @ hidden[0, 0, slot].detach()
        ids = logits.topk(4).indices.sort().values
        log_q = (logits[ids] + shift[number].detach()).log_softmax(0)
        p = (weight @ states[slot]).softmax(0)[ids] if with_teacher else (ids == labels[0, 0, slot]).double()
        extra = sum(w * ((w / p.sum()).log() - q) for w, q in zip(p, log_q, strict=True) if w > 0)
        assert with_selector.loss[0, 0, slot].item() == pytest.approx(
            without_selector.loss[0, 0, slot].item() + float(extra)
        )
        index = (ids == labels[0, 0, slot]).nonzero().flatten().tolist()
        assert with_selector.nll[0, 0, slot].item() == (
            pytest.approx(-float(log_q[index[0]])) if index else float("inf")
        )
        assert with_selector.correct[0, 0, slot].item() == (log_q.argmax().item() in index)
        assert (
            with_selector.correct_without_head[0, 0, slot]
            == without_selector.correct[0, 0, slot]
            == (logits.argmax() == labels[0, 0, slot])
        )
    for losses in (without_selector, with_selector):
        losses.loss.sum().backward()
    # Of the labels, one that is no candidate teaches the selector nothing; a teacher's candidates always do.
    assert shift.grad.abs().amax(1).gt(0).tolist() == [True, with_teacher, True, True, True]
    assert torch.equal(hidden.grad, hidden_without_selector.grad)


def test_certain_candidate_has_no_loss():
    scores = torch.tensor([[0.0, 40.0]])
    ids = torch.tensor([[3, 5]])
    tokens = DraftedTokens(scores, torch.zeros(1, 9), ids, torch.tensor([5]), teacher=None, hidden=None, query=None)
    nll, correct, _ = tokens.metrics()
    assert tokens.selection().item() == nll.item() == 0 and correct.item()


# ------------------------------------------------------------------------------------------------------------- a run


def test_arguments_of_the_caller_stay(tmp_path):
    """`ddp_find_unused_parameters` was set in them, also for a later drafter without a head."""
    target = make_target()
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = DFlashTrainer(make_draft2(target, block_size=BLOCK), target, args, counting_rows(4))
    assert trainer.args.ddp_find_unused_parameters is False and args.ddp_find_unused_parameters is None


def test_every_dflash2_parameter_learns(tmp_path):
    target = make_target()
    draft = make_draft2(target, block_size=BLOCK)
    trainer = make_trainer(tmp_path, target, counting_rows(4), draft, warmup_steps=0, max_steps=2)
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    trainer.train()
    for name, parameter in draft.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_selector_alone_raises_tau(tmp_path):
    """It finds the second token of a pair once the first is drafted; the rest of the drafter stays as it is."""
    target = make_target()
    rows = forked_rows(256)
    options = {"loss_type": "dpace", "per_device_train_batch_size": 8, "num_anchors": 12, "warmup_steps": 0}
    plain = make_draft(target, block_size=BLOCK)
    make_trainer(tmp_path / "plain", target, rows, plain, max_steps=25, learning_rate=5e-3, **options).train()
    draft = with_parts(plain, SELECTOR)
    trainer = make_trainer(
        tmp_path, target, rows, draft, rows[:32], max_steps=25, learning_rate=3e-2, head_only=True, **options
    )
    start = trainer.evaluate()
    assert start["eval_simulated_tau"] == start["eval_simulated_tau_argmax"]
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    trainer.train()
    for name, parameter in draft.named_parameters():
        of_selector = name.startswith("candidate_selector.")
        assert torch.equal(parameter, before[name]) != of_selector == parameter.requires_grad, name
    end = trainer.evaluate()
    assert end["eval_simulated_tau_argmax"] == start["eval_simulated_tau_argmax"]
    gain = end["eval_simulated_tau"] - start["eval_simulated_tau"]
    assert gain > 0.3, (start, end)
    assert history(trainer, "simulated_tau_argmax")
    with pytest.raises(ValueError, match="head_only=False, but an earlier run"):
        make_trainer(tmp_path, target, rows, draft)


# ------------------------------------------------------------------------------------------- adding it to a drafter


def test_drafter_with_new_parts_drafts_as_before(tmp_path):
    target = make_target()
    plain = make_draft(target, draft_vocab_size=40)
    set_draft_vocabulary(plain, target, torch.arange(VOCAB))
    wider = with_parts(with_parts(plain, SELECTOR), {"conv_kernel_size": 2, "conv_group_size": 4})
    wider.save_pretrained(tmp_path)
    reloaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert reloaded.config.selector_rank == 8 and reloaded.config.conv_kernel_size == 2
    assert plain.config.selector_rank is None and not hasattr(plain, "candidate_selector")
    ids = torch.randint(2, 90, (1, 9), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    outputs = [target.generate(ids, assistant_model=draft, **options) for draft in (plain, wider, reloaded)]
    assert len({tuple(output.sequences[0].tolist()) for output in outputs}) == 1
    assert len({str(output.acceptance_lengths) for output in outputs}) == 1


def test_new_parts_keep_device_and_mode():
    """It came back on the CPU, and in training mode, in which dropout changes its drafts."""
    draft = make_draft(make_target()).to("meta")
    for training in (False, True):
        wider = with_parts(draft.train(training), SELECTOR)
        assert wider.device.type == "meta" and wider.training == training


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"selector_rank": 9, "selector_top_k": 6}, "draft_config.selector_rank=9 differs from its 8"),
        ({"block_size": 8}, "draft_config.block_size=8 is not a part that can be added"),
        ({"conv_kernel_size": 2}, "conv_kernel_size=2 and conv_group_size=None must be set together"),
        ({"selector_top_k": 6, "selector_rank": 8}, None),
    ],
)
def test_part_that_cannot_be_added_is_refused(fields, message):
    draft = with_parts(make_draft(make_target()), SELECTOR)
    if message is None:
        assert with_parts(draft, fields).config.selector_rank == 8
        return
    with pytest.raises(ValueError, match=message):
        with_parts(draft, fields)


def test_recipe_adds_a_selector_to_a_trained_drafter(tmp_path, capsys):
    target = make_target()
    rows = counting_rows(6)
    target.save_pretrained(tmp_path / "target")
    draft = make_draft(target, block_size=BLOCK, draft_vocab_size=48)
    set_draft_vocabulary(draft, target, validate_and_count(rows))
    draft.save_pretrained(tmp_path / "draft")
    lines = [json.dumps({name: list(map(int, row[name])) for name in ("input_ids", "loss_mask")}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    script = ScriptArguments(
        target=str(tmp_path / "target"),
        draft=str(tmp_path / "draft"),
        draft_config=SELECTOR,
        data=str(tmp_path / "rows.jsonl"),
    )
    options = {"output_dir": str(tmp_path / "out"), "max_steps": 2, "num_anchors": 4, "use_cpu": True, "report_to": []}
    options |= {"head_only": True, "warmup_steps": 0, "save_steps": 1}
    train(script, options)
    trained = DFlashDraftModel.from_pretrained(tmp_path / "out")
    assert trained.config.selector_rank == 8 and trained.config.draft_vocab_size == 48
    assert trained.candidate_selector.successor_codebook.abs().max() > 0
    assert torch.equal(trained.fc.weight, draft.fc.weight)
    resuming = {**options, "resume_from_checkpoint": "auto", "max_steps": 3}
    with pytest.raises(ValueError, match="holds the optimizer of other parameters .*head_only"):
        train(script, {**resuming, "head_only": False})
    script.draft_config = {"intermediate_size": 48, "selecter_rank": 8, **SELECTOR}
    train(script, resuming)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "draft_config" in line]
    assert warnings == [f"draft_config.selecter_rank=8 is for a fresh drafter: {script.draft} is not changed"]
