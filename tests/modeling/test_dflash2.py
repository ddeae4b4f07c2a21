"""DFlash 2: the convolution and its initialisation; heads are in `test_heads.py`."""

import itertools

import pytest
import torch
from support.pairs import make_draft, make_draft2, make_target
from support.reference import convolve
from support.rows import ragged_prompts

from dflash_hf.modeling.modeling_dflash import BlockConvolution, additive_mask
from dflash_hf.training.block_mask import block_mask


# ------------------------------------------------------------------------------------------------------- convolution


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [4, 12, 3, 2, 1])
@torch.no_grad()
def test_convolution_equals_the_element_wise_oracle(taps, length):
    """One block of four slots, three blocks, and shorter blocks: two slots were an error of shapes with four taps."""
    target = make_target()
    draft = make_draft2(target, conv_kernel_size=taps)
    convolution = draft.layers[0].attention_conv
    x = torch.randn(2, length, 32)
    output = torch.randn(2, length, 32)
    before, after = convolution.corrections(x)
    kernel = (convolution.kernel_projection.weight, convolution.base_kernel)
    for row, start in itertools.product(range(2), range(0, length, 4)):
        part = slice(start, start + 4)  # a block of its own
        expected = convolve(x[row, part], x[row, part], *kernel, 0, 4, taps)
        torch.testing.assert_close(
            convolution(x, before, after_sublayer=False)[row, part], expected, atol=1e-5, rtol=1e-5
        )
        # After the sublayer its output is convolved, with corrections that come from its input.
        expected = convolve(output[row, part], x[row, part], *kernel, 1, 4, taps)
        torch.testing.assert_close(
            convolution(output, after, after_sublayer=True)[row, part], expected, atol=1e-5, rtol=1e-5
        )


@torch.no_grad()
def test_convolution_stays_inside_its_block():
    draft = make_draft2(make_target(), conv_kernel_size=3)
    convolution = draft.layers[0].mlp_conv
    x = torch.randn(1, 12, 32)
    y = convolution(x, convolution.corrections(x)[0], after_sublayer=False)
    for slot in range(12):
        moved = x.clone()
        moved[0, slot] += 1.0
        changed = (convolution(moved, convolution.corrections(moved)[0], after_sublayer=False) != y).any(-1)[0]
        reached = [t for t in range(slot, 12) if t // 4 == slot // 4 and t - slot < 3]
        assert changed.nonzero().flatten().tolist() == reached
    with pytest.raises(ValueError, match="10 slots"):
        convolution(x[:, :10], convolution.corrections(x[:, :10])[0], after_sublayer=False)


@torch.no_grad()
def test_blocks_of_one_forward_equal_separate_blocks():
    """Training's layout `[context | A blocks]` gives what each block gives by itself."""
    draft = make_draft2(make_target())
    features = torch.randn(1, 10, 96)
    noise = torch.randn(1, 12, 32)
    anchors = torch.tensor([[3, 6, 9]])
    mask = additive_mask(block_mask(anchors, torch.ones(1, 10), 4), torch.float32)
    positions = torch.cat([torch.arange(10)[None], (anchors[..., None] + torch.arange(4)).view(1, -1)], dim=1)
    together = draft(noise, features, attention_mask=mask, position_ids=positions).last_hidden_state
    for i, anchor in enumerate(anchors[0].tolist()):
        part = slice(4 * i, 4 * i + 4)
        alone = draft(noise[:, part], features[:, :anchor]).last_hidden_state
        torch.testing.assert_close(together[:, part], alone, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------- initialisation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_fresh_dflash2_equals_dflash_bit_for_bit(dtype):
    target = make_target(dtype=dtype)
    plain = make_draft(target)
    fresh = make_draft2(target, trained=False)
    assert {name for name, _ in fresh.named_parameters()} > {name for name, _ in plain.named_parameters()}
    fresh.load_state_dict(plain.state_dict(), strict=False)
    noise = torch.randn(3, 4, 32, dtype=dtype)
    features = torch.randn(3, 9, 96, dtype=dtype)
    assert torch.equal(fresh(noise, features).last_hidden_state, plain(noise, features).last_hidden_state)
    inputs, _ = ragged_prompts(3)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    of_fresh, of_plain = (target.generate(**inputs, **options, assistant_model=draft) for draft in (fresh, plain))
    assert torch.equal(of_fresh.sequences, of_plain.sequences)
    assert of_fresh.acceptance_lengths == of_plain.acceptance_lengths


def test_initial_dflash2_parameters_change_nothing():
    draft = make_draft2(make_target(), trained=False)
    for module in draft.modules():
        if isinstance(module, BlockConvolution):
            assert module.base_kernel[:, 0].eq(1).all() and module.base_kernel[:, 1:].eq(0).all()
            assert module.kernel_projection.weight.eq(0).all()
    selector = draft.candidate_selector
    assert selector.successor_codebook.eq(0).all()
    assert 0.01 < selector.predecessor_codebook.std() < 0.03 and 0.01 < selector.hidden_projection.weight.std() < 0.03


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"conv_group_size": None}, "conv_group_size=None"),
        ({"conv_group_size": 5}, "conv_group_size=5"),
        ({"conv_kernel_size": 5}, "conv_kernel_size=5"),
        ({"selector_rank": None}, "selector_rank=None"),
        ({"selector_top_k": 97}, "selector_top_k=97"),
        ({"draft_vocab_size": 4}, "selector_top_k=5 must be at most draft_vocab_size=4"),
        ({"draft_vocab_size": 97}, "draft_vocab_size=97"),
        ({"output_multiplier": -1.0}, "output_multiplier=-1.0"),
        ({"final_logit_softcapping": float("nan")}, "final_logit_softcapping=nan"),
    ],
)
def test_errors_name_key_and_value(changes, named):
    with pytest.raises(ValueError) as error:
        make_draft2(make_target(), **changes)
    assert named in str(error.value)
