"""Drafters with quantised weights, loaded by upstream's quantisers: they draft alike, and the text is the target's."""

import pytest
import torch
from support.pairs import make_draft, make_target

from dflash_hf import DFlashDraftModel
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

    block, context = torch.randn(1, 4, 64), torch.randn(1, 7, 192)
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
    target, own = make_target(), torch.randn(32)
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
    block, context = torch.randn(1, 4, 32), torch.randn(1, 7, 96)
    with torch.no_grad():
        hidden = again(block, context).last_hidden_state
        block[:, 1:] = own  # behind the anchor
        assert torch.equal(hidden, quantised(block, context).last_hidden_state)
