"""Pairs that were loaded differently: dtypes, offloading, adapters, compiled and resized targets."""

import pytest
import torch
from support.pairs import VOCAB, make_draft, make_target
from support.scripted_draft import scripted

from dflash_hf.targets.unsafe_hooks import unsafe_hook


PROMPT = torch.tensor([[5, 9, 17, 33, 5, 9, 17, 33, 5, 9]])


def check(target, draft, **options):
    """Equal texts, of drafts that are accepted and rejected."""
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    expected = target.generate(PROMPT, **options)
    draft = scripted(draft, expected, error_rate=0.2)
    output = target.generate(PROMPT, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert len(set(output.acceptance_lengths[0])) >= 2
    return expected


@pytest.mark.parametrize(("family", "where"), [("gemma3", "disk"), ("qwen3_5_text", "cpu")])
def test_offloaded_target_drafts_losslessly(family, where, tmp_path):
    """Weights on the meta device, fetched for each forward: the embedding and the head that are shared, too."""
    from accelerate import cpu_offload, disk_offload

    target = make_target(family)
    draft = make_draft(target)
    expected = check(target, draft)
    if where == "cpu":
        cpu_offload(target, execution_device=torch.device("cpu"))
    else:
        disk_offload(target, tmp_path, execution_device=torch.device("cpu"))
    assert target.get_input_embeddings().weight.device.type == "meta"
    assert torch.equal(check(target, draft), expected)
    assert target.get_input_embeddings().weight.device.type == "meta"


def test_target_with_adapter_drafts_losslessly():
    from peft import LoraConfig, get_peft_model

    target = make_target()
    draft = make_draft(target)
    plain = target.generate(PROMPT, max_new_tokens=24, do_sample=False)
    tuned = get_peft_model(target, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False, r=4))
    assert not torch.equal(check(tuned, draft), plain), "the adapter changes nothing"
    with tuned.disable_adapter():
        assert torch.equal(check(tuned, draft), plain)


def forward_alone(target):
    target.forward = torch.compile(target.forward, backend="eager", dynamic=True)


def in_place(target):
    target.compile(backend="eager")


def layer_by_layer(target):
    for layer in target.model.layers:
        layer.compile(backend="eager", dynamic=True)


@pytest.mark.parametrize("compiled", [forward_alone, in_place, layer_by_layer])
def test_compiled_targets_decode_plainly(compiled):
    """Their graphs were made for other caches, and before there was a hook that reads features."""
    target = make_target()
    compiled(target)
    assert "is compiled; pass the model as it was before" in unsafe_hook(target)


@pytest.mark.parametrize("overrides", [{"tie_word_embeddings": True}, {}])
def test_resized_or_tied_embeddings_draft_losslessly(overrides):
    target = make_target(**overrides)
    draft = make_draft(target)
    check(target, draft, suppress_tokens=[PROMPT[0, -1].item()])
    target.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    check(target, draft, suppress_tokens=[PROMPT[0, -1].item()])


def test_biased_head_drafts_losslessly():
    target = make_target("phi")
    assert target.lm_head.bias is not None
    with torch.no_grad():
        target.lm_head.bias.normal_(std=3.0)
    check(target, make_draft(target))


def test_training_mode_changes_no_text(caplog):
    """Gradients on, a drafter left in train mode: nothing of it shows. Its dropout would draw random numbers."""
    target = make_target().requires_grad_(True)
    draft = make_draft(target).train()
    with torch.enable_grad():
        expected = check(target, draft)
    assert draft.training and not expected.requires_grad
    dropping = make_draft(target, attention_dropout=0.5).train()
    assert torch.equal(
        target.generate(PROMPT, max_new_tokens=4, do_sample=False, assistant_model=dropping)[0, :10], PROMPT[0]
    )
    assert "dropout of the drafter is in training mode" in caplog.text
    assert all(parameter.grad is None for parameter in [*target.parameters(), *draft.parameters()])


def test_eight_bit_target_drafts_losslessly():
    quantization = pytest.importorskip("torchao.quantization")
    target = make_target()
    quantization.quantize_(target, quantization.Int8WeightOnlyConfig())
    check(target, make_draft(make_target()))
