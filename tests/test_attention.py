"""Attention of a single query per row by matrix products: in half precision on a CPU."""

import copy

import pytest
import torch
from support.pairs import make_target
from support.tiny_models import tiny_config, tiny_model
from transformers import AttentionInterface, AutoModelForImageTextToText, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.generic import is_flash_attention_requested

from dflash_hf.attention import SINGLE_QUERIES, single_query_attention, use_single_queries
from dflash_hf.responses import _Slots, decodes_in_slots, responses


class Module(torch.nn.Module):
    """What upstream's functions read of an attention module."""

    is_causal = True

    def __init__(self, groups=1):
        super().__init__()
        self.num_key_value_groups = groups


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("masked_heads", [0, 1, 6])
def test_the_result_is_that_of_sdpa(groups, masked_heads):
    torch.manual_seed(0)
    query, (key, value) = torch.randn(5, 6, 1, 8), torch.randn(2, 5, 6 // groups, 11, 8)
    mask = None
    if masked_heads:
        hidden = torch.rand(5, masked_heads, 1, 11).lt(0.4).index_fill(3, torch.tensor(0), False)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    for scaling in (None, 0.5):
        ours = single_query_attention(Module(groups), query, key, value, mask, scaling=scaling)[0]
        theirs = sdpa_attention_forward(Module(groups), query, key, value, mask, scaling=scaling)[0]
        assert ours.shape == theirs.shape == (5, 1, 6, 8)
        torch.testing.assert_close(ours, theirs)


def test_what_only_sdpa_supports_is_left_to_it():
    torch.manual_seed(0)
    query, (key, value) = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 4, 11, 8)
    mask = torch.zeros(2, 1, 3, 11)
    ours, theirs = (f(Module(), query, key, value, mask)[0] for f in (single_query_attention, sdpa_attention_forward))
    assert torch.equal(ours, theirs)
    bias = torch.randn(2, 4, 1, 11)
    one = {"query": query[:, :, :1], "key": key, "value": value, "attention_mask": mask[:, :, :1]}
    ours, theirs = (
        f(Module(), **one, position_bias=bias)[0] for f in (single_query_attention, sdpa_attention_forward)
    )
    assert torch.equal(ours, theirs)
    visible = torch.rand(2, 1, 1, 11) < 0.6
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    two = (single_query_attention(Module(), **{**one, "attention_mask": some})[0] for some in (visible, added))
    torch.testing.assert_close(*two)
    with pytest.raises(ValueError, match="softcap"):
        single_query_attention(Module(), **one, softcap=30.0)


def test_only_half_precision_with_sdpa_is_swapped():
    for target, name in (
        (make_target("llama"), "sdpa"),
        (make_target("llama", attn="eager").bfloat16(), "eager"),
        (make_target("llama").bfloat16(), SINGLE_QUERIES),
    ):
        use_single_queries(target)
        assert target.config._attn_implementation == name
        assert target.model.layers[0].self_attn.config._attn_implementation == name


def test_a_configuration_that_refuses_flash_attention():
    """Upstream takes any name with `flash` in it for flash attention, which HRM-Text's configuration refuses."""
    assert not is_flash_attention_requested(requested_attention_implementation=SINGLE_QUERIES)
    target = tiny_model("hrm_text").half()
    use_single_queries(target)
    config = copy.deepcopy(make_target("llama").generation_config)
    assert decodes_in_slots(target, config)
    ((_, text),) = responses(target, [(0, [3, 5, 8])], 4, config)
    assert len(text) == 4


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_wrapper_s_text_may_attend_eagerly(family):
    """Softcaps were an error, and sinks were left out; the wrapper's own attention is that of images."""
    config = tiny_config("internvl")
    config.text_config = tiny_config(family)
    target = AutoModelForImageTextToText.from_config(config).bfloat16()
    assert target.config._attn_implementation == "sdpa"
    use_single_queries(target)
    layer = target.model.language_model.layers[0]
    assert layer.self_attn.config._attn_implementation == (SINGLE_QUERIES if family == "llama" else "eager")
    assert target.model.vision_tower.config._attn_implementation == "sdpa"
    ((_, text),) = responses(target, [(0, [3, 5, 8])], 4, GenerationConfig())
    assert len(text) == 4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_step_computes_the_same(family):
    """In fp32, where rounding does not hide an error; whole buffers, which are not copied; texts grow and shrink."""
    target, own, seen = make_target(family), make_target(family), []

    def spy(module, query, key, value, mask, **options):
        seen.append((key.is_contiguous() and value.is_contiguous(), key.shape[2]))
        return single_query_attention(module, query, key, value, mask, **options)

    AttentionInterface.register(SINGLE_QUERIES, spy)
    try:
        with torch.no_grad():
            own.config._attn_implementation = SINGLE_QUERIES
            ours, theirs = _Slots(own, 3), _Slots(target, 3)
            for length in (40, 200, 201, 90, 60):
                for slots in (ours, theirs):
                    slots.read(1, list(range(2, 2 + min(length, 90))), {})
                tokens = {0: (5, 3), 1: (7, length), 2: (9, length // 2)}
                seen.clear()
                torch.testing.assert_close(ours.step(tokens), theirs.step(tokens), atol=1e-4, rtol=1e-4)
                for whole, slots in seen:
                    assert whole and length < slots <= 9 / 8 * (length + 1) + 16
                assert seen
    finally:
        AttentionInterface.register(SINGLE_QUERIES, single_query_attention)


def test_texts_in_half_precision():
    """As likely as those of the target alone, whose rounding differs."""
    target = make_target("llama")
    config = copy.deepcopy(target.generation_config)
    prompts = [[3, 5, 8, 13], [21, 34], [55, 89, 4]]
    half = copy.deepcopy(target).bfloat16()
    use_single_queries(half)
    found = dict(responses(half, enumerate(prompts), 40, config, 2))
    for number, text in found.items():
        ids = torch.tensor([prompts[number] + text])
        chances = target(ids).logits[0, len(prompts[number]) - 1 : -1].log_softmax(-1)
        assert (chances.max(-1).values - chances[range(len(text)), text]).max() < 1.0
