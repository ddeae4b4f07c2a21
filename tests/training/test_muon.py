"""Muon for the matrices, AdamW for the rest: torch's own steps, behind one schedule and one checkpoint."""

import copy

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from support.runs import BLOCK, history, make_trainer

from dflash_hf.training.muon import muon_of


def test_muon_takes_the_steps_of_torch(tmp_path):
    target = make_target()
    draft = make_draft(target, block_size=BLOCK, selector_rank=4, selector_top_k=4)
    args = make_trainer(tmp_path, target, counting_rows(4), draft, muon=True, weight_decay=0.1).args
    reference = copy.deepcopy(draft)
    combined = muon_of(draft, args)
    groups = [{id(parameter) for parameter in group["params"]} for group in combined.param_groups]
    names = [[name for name, parameter in draft.named_parameters() if id(parameter) in group] for group in groups]
    assert "fc.weight" in names[0] and len(names[0]) == 1 + 7 * len(draft.layers)
    assert "norm.weight" in names[1] and any(name.startswith("candidate_selector") for name in names[1])
    assert len(names[0]) + len(names[1]) == sum(parameter.requires_grad for parameter in draft.parameters())
    matrices, other_parameters = (
        [dict(reference.named_parameters())[name] for name in group_names] for group_names in names
    )
    muon = torch.optim.Muon(matrices, lr=args.learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(other_parameters, lr=args.learning_rate, weight_decay=0.0)
    random = torch.Generator().manual_seed(0)
    for _ in range(2):
        for parameter, reference_parameter in zip(draft.parameters(), reference.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=random)
            reference_parameter.grad = parameter.grad.clone()
        for optimizer in (combined, muon, adamw):
            optimizer.step()
    for parameter, reference_parameter in zip(draft.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, reference_parameter)


def test_muon_run_resumes_as_if_uninterrupted(tmp_path):
    fields = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 0, "muon": True}
    uninterrupted, resumed = (make_trainer(tmp_path, make_target(), counting_rows(8), **fields) for _ in range(2))
    uninterrupted.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert history(resumed, "loss") == history(uninterrupted, "loss") and len(history(uninterrupted, "loss")) == 4
    for expected, parameter in zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(expected, parameter)
    rates = [group["lr"] for group in uninterrupted.optimizer.param_groups]
    assert rates[0] == rates[1] == pytest.approx(uninterrupted.lr_scheduler.get_last_lr()[0])


def test_muon_and_adamw_do_not_share_a_checkpoint(tmp_path):
    fields = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, make_target(), counting_rows(8), **fields).train()
    muon = make_trainer(tmp_path, make_target(), counting_rows(8), **fields, muon=True)
    with pytest.raises(ValueError, match="holds the optimizer of other parameters or another one .*muon and optim"):
        muon.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    make_trainer(tmp_path, make_target(), counting_rows(8), **fields, muon=True).train()
    with pytest.raises(ValueError, match="or another one"):
        make_trainer(tmp_path, make_target(), counting_rows(8), **fields).train(str(tmp_path / "checkpoint-1"))


def test_muon_of_an_old_torch_is_named(tmp_path, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ImportError, match="muon=True needs torch 2.9"):
        make_trainer(tmp_path, make_target(), counting_rows(4), muon=True)


def test_muon_needs_matrices_and_others(tmp_path):
    target = make_target()
    trainer = make_trainer(tmp_path, target, counting_rows(4), make_draft(target, block_size=BLOCK), muon=True)
    for name, parameter in trainer.draft.named_parameters():
        parameter.requires_grad_(name.endswith("q_proj.weight"))
    with pytest.raises(ValueError, match="2 are such matrices and 0 are not; leave it out"):
        trainer.train()
