"""Attention over slots: what it computes, that it repeats no keys, and that any target may be loaded with any."""

import types

import accelerate
import pytest
import torch
from support.flash import flash_attention, load_with_flash
from support.pairs import make_target
from support.rows import ragged_prompts
from support.scripted_draft import recognising
from torch.utils.flop_counter import FlopCounterMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from dflash_hf.decoding import probe
from dflash_hf.decoding.attention import SLOT_ATTENTION, attend_to_slots, with_slot_attention
from dflash_hf.decoding.probe import capabilities_of
from dflash_hf.modeling.modeling_dflash import additive_mask
from dflash_hf.targets.clones import original_of


class Layer(torch.nn.Module):
    """An attention layer of two key heads, each for three query heads."""

    num_key_value_groups = 3
    is_causal = True
    training = False


def states(num_queries: int, num_keys: int, dtype=torch.float32, rows: int = 2):
    """Random queries, keys and values, and an additive mask that hides a third of the keys."""
    torch.manual_seed(0)
    query = torch.randn(rows, 6, num_queries, 16, dtype=dtype)
    key = torch.randn(rows, 2, num_keys, 16, dtype=dtype)
    value = torch.randn(rows, 2, num_keys, 16, dtype=dtype)
    visible = torch.rand(rows, 1, num_queries, num_keys) > 0.3
    visible[..., 0] = True
    return query, key, value, additive_mask(visible, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("heads_in_mask", [1, 6])
def test_output_is_that_of_sdpa(dtype, heads_in_mask):
    query, key, value, mask = states(5, 24, dtype)
    mask = mask.repeat(1, heads_in_mask, 1, 1)
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=0.3)
    output, _ = attend_to_slots(Layer(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(output, expected)


def test_softcap_is_that_of_gemma2():
    query, key, value, mask = states(5, 24)
    expected, _ = modeling_gemma2.eager_attention_forward(Layer(), query, key, value, mask, scaling=0.3, softcap=2.0)
    output, _ = attend_to_slots(Layer(), query, key, value, mask, scaling=0.3, softcap=2.0)
    torch.testing.assert_close(output, expected)


def test_sinks_are_those_of_gpt_oss():
    query, key, value, mask = states(5, 24)
    layer = Layer()
    layer.sinks = torch.nn.Parameter(torch.randn(6))
    expected, _ = modeling_gpt_oss.eager_attention_forward(layer, query, key, value, mask, scaling=0.3)
    output, _ = attend_to_slots(layer, query, key, value, mask, scaling=0.3, s_aux=layer.sinks)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"s_aux": torch.ones(6)}, {"is_causal": False}])
def test_queries_without_mask_are_the_last_keys(options):
    query, key, value, _ = states(5, 24)
    expected, _ = flash_attention(Layer(), query, key, value, None, **options)
    output, _ = attend_to_slots(Layer(), query, key, value, None, **options)
    torch.testing.assert_close(output, expected)


def test_queries_without_mask_may_be_counted():
    """A profiler's mode must not change what is computed."""
    query, key, value, _ = states(3, 19)
    with FlopCounterMode(display=False):
        output, _ = attend_to_slots(Layer(), query, key, value, None)
    torch.testing.assert_close(output, flash_attention(Layer(), query, key, value, None)[0])


def texts_equal(target, rows: int = 1, **options) -> bool:
    """Whether a target writes the same text with a drafter, of whose drafts some are accepted and some rejected."""
    inputs = ragged_prompts(rows)[0]
    limits = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **limits).sequences
    padding = (inputs["attention_mask"] == 0).sum(dim=1)
    draft = recognising(target, [row[pad:] for row, pad in zip(plain, padding)], error_rate=0.2)
    for name, option in options.items():
        setattr(draft.decoding_config, name, option)
    drafted = target.generate(**inputs, assistant_model=draft, **limits)
    lengths = [length for row in drafted.acceptance_lengths for length in row]
    assert max(lengths) > 1 and min(lengths) < 6, lengths
    return torch.equal(drafted.sequences, plain)


FLASH_FAMILIES = ["qwen3", "gemma2", "gemma3", "gpt_oss", "mistral_sliding", "qwen3_5_text"]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FLASH_FAMILIES)
def test_target_with_flash_attention_drafts(family, rows, monkeypatch):
    target = make_target(family, attn=None)
    load_with_flash(target, monkeypatch)
    assert texts_equal(target, rows)
    assert target.config._attn_implementation == "flash_attention_2"


def test_target_with_flash_attention_verifies_trees(monkeypatch):
    target = make_target()
    load_with_flash(target, monkeypatch)
    assert texts_equal(target, block_size=None, tree_nodes=12)


@pytest.mark.parametrize("name", ["flash_attention_3", "kernels-community/flash-attn2", "flex_attention"])
def test_target_with_attention_without_masks_drafts(name, monkeypatch):
    """All of these take the mask of a draft for something else. FlexAttention's own code is not compiled here."""
    target = make_target()
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, name, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    load_with_flash(target, monkeypatch, name)
    assert texts_equal(target)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_target_with_attention_with_masks_drafts(attention):
    assert texts_equal(make_target(attn=attention))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral_sliding", "qwen3_5_text"])
def test_block_of_one_row_may_be_verified_without_a_mask(family, monkeypatch):
    monkeypatch.setattr(probe, "prefers_no_mask", lambda target: True)
    target = make_target(family)
    assert capabilities_of(target).maskless
    assert texts_equal(target)


def test_target_that_would_attend_to_later_tokens_gets_masks(monkeypatch):
    monkeypatch.setattr(probe, "prefers_no_mask", lambda target: True)
    target = make_target()
    for layer in target.model.layers:
        layer.self_attn.is_causal = False
    assert not capabilities_of(target).maskless


def test_every_forward_over_slots_repeats_no_keys(monkeypatch):
    """The queries that attention gets belong to two key heads, not to the target's four heads."""
    target = make_target(num_key_value_heads=2)
    seen = []

    def attention(query, key, value, *args, **kwargs):
        seen.append((query.shape[1], key.shape[1], query.shape[2]))
        return original(query, key, value, *args, **kwargs)

    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr("dflash_hf.decoding.attention.scaled_dot_product_attention", attention)
    assert texts_equal(target)
    assert seen and all(heads == key_heads == 2 for heads, key_heads, _ in seen)


def test_clone_shares_weights_and_leaves_the_target_as_it_is():
    target = make_target()
    clone = with_slot_attention(target)
    assert target.config._attn_implementation == "sdpa"
    assert {module.config._attn_implementation for module in clone.modules() if "config" in vars(module)} == {
        SLOT_ATTENTION
    }
    assert [parameter.data_ptr() for parameter in clone.parameters()] == [
        parameter.data_ptr() for parameter in target.parameters()
    ]
    assert original_of(clone.model.layers[0]) is target.model.layers[0]


def test_target_with_accelerate_hooks_drafts():
    """Accelerate replaces the forwards of modules."""
    target = make_target()
    for module in target.modules():
        accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
    assert with_slot_attention(target) is not target
    assert texts_equal(target)


def test_replaced_methods_belong_to_the_clone():
    target = make_target()
    attention = target.model.layers[0].self_attn
    attention.forward = types.MethodType(lambda self, *args, **kwargs: self, attention)
    clone = with_slot_attention(target).model.layers[0].self_attn
    assert clone is not attention and clone.forward() is clone


def test_target_with_a_replaced_forward_of_unknown_kind_is_not_cloned():
    """A closure may call the target's own module."""
    target = make_target()
    attention = target.model.layers[0].self_attn
    original = attention.forward
    attention.forward = lambda *args, **kwargs: original(*args, **kwargs)
    assert with_slot_attention(target) is target


def test_flash_attention_that_cannot_be_replaced_decodes_plainly(monkeypatch, caplog):
    target = make_target()
    load_with_flash(target, monkeypatch)
    monkeypatch.setattr(type(target), "_can_set_attn_implementation", lambda *_: False)
    draft = recognising(target, [torch.arange(8)])
    limits = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    output = target.generate(**ragged_prompts(1)[0], assistant_model=draft, **limits)
    assert output.acceptance_lengths == [[]]
    assert "takes no mask of a draft, and its attention cannot be replaced" in caplog.text
    assert "attn_implementation='flash_attention_2': Qwen3ForCausalLM does not look it up" in caplog.text
