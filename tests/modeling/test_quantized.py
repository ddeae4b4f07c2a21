"""Drafters with quantised weights, loaded by upstream's quantisers: they draft alike, and the text is the target's."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pairs import make_draft, make_target

from dflash_hf import DFlashDraftModel
from dflash_hf.layouts.loading import check_quantised_dtype
from dflash_hf.modeling.modeling_dflash import MASK_EMBEDDING


def torchao_int8():
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def bitsandbytes_nf4():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


@pytest.mark.parametrize("make_config, error", [(torchao_int8, 0.01), (bitsandbytes_nf4, 0.2)])
def test_a_quantised_drafter_drafts_and_is_lossless(make_config, error, tmp_path):
    config = make_config()
    target = make_target(hidden_size=64)
    draft = make_draft(target, intermediate_size=64, num_key_value_heads=4, head_dim=16)  # 4 bits: multiples of 64
    draft.save_pretrained(tmp_path / "draft")
    quantised = DFlashDraftModel.from_pretrained(tmp_path / "draft", quantization_config=config, dtype=torch.float32)
    quantised.save_pretrained(tmp_path / "quantised")  # before it runs: 4-bit weights are then packed for the CPU
    quantised.eval()

    block = torch.randn(1, 4, 64)
    context = torch.randn(1, 7, 192)
    with torch.no_grad():
        expected = draft(block, context).last_hidden_state
        hidden = quantised(block, context).last_hidden_state
    assert 0 < (hidden - expected).norm() < error * expected.norm()

    prompt = torch.tensor([[5, 9, 11, 60]])
    alone = target.generate(prompt, max_new_tokens=30, do_sample=False)
    output = target.generate(
        prompt, max_new_tokens=30, do_sample=False, assistant_model=quantised, return_dict_in_generate=True
    )
    assert len(set(alone[0].tolist())) > 10
    assert torch.equal(output.sequences, alone)
    assert sum(output.acceptance_lengths[0]) == 29

    again = DFlashDraftModel.from_pretrained(tmp_path / "quantised").eval()
    with torch.no_grad():
        assert torch.equal(again(block, context).last_hidden_state, hidden)


def test_quantised_drafter_reads_its_mask_embedding(tmp_path):
    """Where it lies in `mask_embedding.pt` alone, as engines read it, the tensor was called missing."""
    target = make_target()
    own = torch.randn(32)
    draft = make_draft(target)
    draft.save_pretrained(tmp_path / "draft")
    quantised = DFlashDraftModel.from_pretrained(
        tmp_path / "draft", quantization_config=torchao_int8(), dtype=torch.float32
    )
    quantised.save_pretrained(tmp_path / "quantised")
    stored = {"embedding": own, "mask_token_id": draft.config.mask_token_id}
    torch.save(stored, tmp_path / "quantised" / MASK_EMBEDDING)
    again = DFlashDraftModel.from_pretrained(tmp_path / "quantised", dtype=torch.float32)
    assert again.config.own_mask_embedding and torch.equal(again.mask_embedding, own)
    block = torch.randn(1, 4, 32)
    context = torch.randn(1, 7, 96)
    with torch.no_grad():
        hidden = again(block, context).last_hidden_state
        block[:, 1:] = own  # behind the anchor
        assert torch.equal(hidden, quantised(block, context).last_hidden_state)


def test_rows_without_kernel_are_refused(tmp_path, monkeypatch):
    """They ended in an assertion of bitsandbytes in the first forward, as those of a convolution do."""
    draft = make_draft(make_target(), intermediate_size=48, num_key_value_heads=4)
    draft.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.nn.Linear, "support_avx512bf16_for_cpu", True, raising=False)
    message = "gate_proj has 48 rows, but bitsandbytes .* multiples of 32: .*llm_int8_skip_modules=.'gate_proj'"
    with pytest.raises(ValueError, match=message):
        DFlashDraftModel.from_pretrained(tmp_path)


# ---------------------------------------------------------------------------------------------- as others publish them


def small_pair():
    target = make_target(hidden_size=128)
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
    return target, make_draft(target, intermediate_size=128, **sizes)


def publish(draft, folder, config, dtype, scale=None, key="quantization_config"):
    """A folder whose projections are stored in eight bits, with scales of this name and shape if there is one."""
    draft.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **({key: config} if config else {})}))
    stored = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            stored[name] = weight
            continue
        step = float(weight.abs().max()) / (127 if dtype == torch.int8 else 448)
        stored[name] = (weight / step).to(dtype)
        if scale is not None:
            suffix, rows, columns = scale
            stored[f"{name}{suffix}"] = torch.full((weight.shape[0] // rows, columns(weight)), step)
            stored[name.replace(".weight", ".input_scale")] = torch.ones(1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


EIGHT_BITS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "fc"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": EIGHT_BITS}},
}
FINE_GRAINED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
PUBLISHED = {
    "fine-grained": (FINE_GRAINED, ("_scale_inv", 32, lambda weight: weight.shape[1] // 32)),
    "compressed-tensors": (COMPRESSED, ("_scale", 1, lambda weight: 1)),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_eight_bit_drafter_is_loaded_as_a_plain_one(kind, tmp_path):
    """It loaded, and ended in its first product: `expected m1 and m2 to have the same dtype`."""
    if kind == "compressed-tensors":
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    target, draft = small_pair()
    config, scale = PUBLISHED[kind]
    folder = publish(draft, tmp_path / "draft", config, torch.float8_e4m3fn, scale)
    loaded = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    for (name, weight), expected in zip(loaded.named_parameters(), draft.parameters(), strict=True):
        assert weight.dtype == torch.float32 and (weight - expected).norm() < 0.05 * expected.norm(), name
    prompt = torch.tensor([[5, 9, 11, 60]])
    alone = target.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=loaded), alone)
    loaded.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    again = DFlashDraftModel.from_pretrained(tmp_path / "plain")
    for parameter, expected in zip(again.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_quantised_weights_of_another_dtype_are_refused():
    """Those of torchao stay in the dtype of quantisation, and the first product failed."""

    class Quantised(torch.nn.Parameter):
        def dequantize(self):
            raise NotImplementedError

    draft = small_pair()[1]
    draft.fc.weight = Quantised(draft.fc.weight.to(torch.bfloat16), requires_grad=False)
    with pytest.raises(
        ValueError,
        match="fc.weight is quantised in torch.bfloat16, and torch.float32 was asked for: .*dtype=bfloat16,",
    ):
        check_quantised_dtype("d", draft)
    check_quantised_dtype("d", draft.to(torch.bfloat16))


F8 = torch.float8_e4m3fn
I8 = torch.int8
REFUSED = {
    "eight bits": (
        None,
        F8,
        "has dtype F8_E4M3, not one of .*: it is quantised, but config.json has no quantization_",
    ),
    "integers": (None, I8, "has dtype I8, not one of .*: it is quantised, but config.json has no quantization_config"),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        F8,
        "is quantised with quant_method='modelopt', for which transformers has no quantiser: load its weights in bf16",
    ),
    "without scales": (
        FINE_GRAINED,
        F8,
        "q_proj.weight is still of torch.float8_e4m3fn after loading: the checkpoint",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_weights_that_cannot_be_read_are_refused(kind, tmp_path):
    """An unknown method was skipped by the library, and its integers were taken for weights."""
    config, dtype, message = REFUSED[kind]
    folder = publish(small_pair()[1], tmp_path / "draft", config, dtype)
    with pytest.raises(ValueError, match=f"{re.escape(str(folder))}.*{message}"):
        DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)


def test_weights_of_mlx_are_refused(tmp_path):
    folder = publish(small_pair()[1], tmp_path / "draft", {"group_size": 64, "bits": 4}, I8, key="quantization")
    with pytest.raises(ValueError, match="draft is quantised for MLX .*, which is not read: load its weights in bf16"):
        DFlashDraftModel.from_pretrained(folder)


def test_missing_library_is_named_with_the_drafter(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    monkeypatch.setattr("transformers.utils.quantization_config.is_compressed_tensors_available", lambda: False)
    folder = publish(small_pair()[1], tmp_path / "draft", COMPRESSED, F8, PUBLISHED["compressed-tensors"][1])
    with pytest.raises(ImportError, match="draft is quantised, and its library is missing: .*compressed-tensors"):
        DFlashDraftModel.from_pretrained(folder)
