"""LoRA on a drafter: only the adapter moves, and merged it is a plain drafter that decodes as it was trained."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from support.runs import BLOCK, history, make_trainer

from dflash_hf import DFlashDraftModel, DFlashTrainer
from dflash_hf.hub.check import check
from dflash_hf.training.adapters import TARGET_MODULES, add_adapter, merged


peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def target():
    return make_target()


def adapted_trainer(folder, target, peft_config, draft=None, **overrides):
    """As `make_trainer`, with a drafter that was saved and loaded."""
    trainer = make_trainer(folder, target, counting_rows(8, modulus=10), **overrides)
    draft = make_draft(target, block_size=BLOCK, target_layer_ids=[0, 1, 2]) if draft is None else draft
    model = (
        add_adapter(draft, peft_config) if isinstance(peft_config, dict) else peft.get_peft_model(draft, peft_config)
    )
    return DFlashTrainer(model, target, trainer.args, trainer.train_dataset, trainer.eval_dataset)


@pytest.mark.parametrize("kind", ["LoraConfig", "dict"])
def test_adapter_alone_moves_and_merges_into_a_drafter(kind, target, tmp_path):
    make_draft(target, block_size=BLOCK, target_layer_ids=[0, 1, 2]).save_pretrained(tmp_path / "draft")
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    before = load_file(tmp_path / "draft" / "model.safetensors")
    config = {"r": 4, "lora_alpha": 8}
    config = peft.LoraConfig(**config, target_modules=TARGET_MODULES) if kind == "LoraConfig" else config
    trainer = adapted_trainer(
        tmp_path / "run", target, config, draft, max_steps=30, learning_rate=2e-2, warmup_steps=0
    )
    start = {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}
    trainer.train()

    # 1. What moved: every B matrix, and nothing outside of the adapter.
    matrices = len(TARGET_MODULES) * draft.config.num_hidden_layers
    for name, tensor in trainer.model.named_parameters():
        moved = not torch.equal(tensor, start[name])
        assert moved == tensor.requires_grad == ("lora_" in name), name
    assert sum("lora_B" in name for name in start) == matrices
    assert history(trainer, "loss")[-1] < history(trainer, "loss")[0]

    # 2. What is saved: the adapter alone, which knows its drafter.
    trainer.save_model()
    saved = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert len(saved) == 2 * matrices and not (tmp_path / "run" / "model.safetensors").exists()
    adapter = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "draft") and adapter["r"] == 4
    facts = json.loads((tmp_path / "run" / "card_facts.json").read_text())
    assert facts["training"]["optimizer_steps"] == 30

    # 3. Merged: a plain drafter, by the trainer's model or by the saved adapter.
    merged_draft = merged(trainer.model)
    assert type(merged_draft) is DFlashDraftModel and "lora_A" in str(trainer.model)
    merged_draft.save_pretrained(tmp_path / "merged")
    assert check(tmp_path / "merged", target=target.config) == []
    reloaded = DFlashDraftModel.from_pretrained(tmp_path / "merged")
    fresh = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    by_hand = peft.PeftModel.from_pretrained(fresh, tmp_path / "run").merge_and_unload()
    assert set(reloaded.state_dict()) == set(before)
    for name, tensor in reloaded.state_dict().items():
        assert torch.equal(tensor, by_hand.state_dict()[name]), name
        changed = any(f".{module}." in name for module in TARGET_MODULES)
        assert torch.equal(tensor, before[name]) != changed, name

    # 4. It decodes as the adapted one, and as a drafter that the adapter is put on: the same text in the same
    # verifications.
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    prompt = torch.tensor([[5, 9, 11, 60]])
    with_adapter = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    with_adapter.load_adapter(tmp_path / "run", "domain")
    outputs = []
    target_only = target.generate(prompt, **options).sequences
    for drafter in (trainer.draft, reloaded, with_adapter):
        drafter.decoding_config.block_size = BLOCK
        outputs.append(target.generate(prompt, assistant_model=drafter.eval(), **options))
        assert torch.equal(outputs[-1].sequences, target_only)
        assert outputs[-1].acceptance_lengths == outputs[0].acceptance_lengths


def test_resumed_adapter_equals_an_uninterrupted_run(target, tmp_path):
    fields = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 0}
    uninterrupted = adapted_trainer(tmp_path, target, {"r": 2}, **fields)
    uninterrupted.train()
    resumed = adapted_trainer(tmp_path, target, {"r": 2}, **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert history(resumed, "loss") == pytest.approx(history(uninterrupted, "loss"), abs=1e-6)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"rank": 4}, "peft_config={'rank': 4} is not a PEFT configuration"),
        ({"peft_type": "MAGIC"}, "is not a PEFT configuration"),
        ({"target_modules": ["nothing"]}, "does not fit the drafter"),
    ],
)
def test_wrong_configurations_are_named(config, message, target, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        adapted_trainer(tmp_path, target, config)


def test_adapter_leaves_a_path_selector_and_says_so(target, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr("dflash_hf.training.trainer_setup.logger.warning", warnings.append)
    draft = make_draft(target, block_size=BLOCK, selector_rank=4, selector_top_k=4)
    trainer = adapted_trainer(tmp_path, target, {"r": 2}, draft)
    assert not any(parameter.requires_grad for parameter in trainer.draft.candidate_selector.parameters())
    assert warnings == ["peft_config trains an adapter: the path selector itself is not trained."]
