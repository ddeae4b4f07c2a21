"""Caches that a caller asks for or brings along: the text is that of plain decoding, or the call is refused whole."""

import importlib.util

import pytest
import torch
from support.cuda_driver import needs_driver
from support.pairs import make_draft, make_target
from support.scripted_draft import scripted
from transformers import DynamicCache, QuantizedCache, StaticCache


PROMPT = torch.tensor([[5, 9, 17, 33, 5, 9, 17, 33, 5, 9]])
OPTIONS = {"max_new_tokens": 20, "do_sample": False}


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5_text"])
def test_cache_implementations(family):
    target = make_target(family, attn=None)
    draft = make_draft(target)
    for implementation in ("static", "hybrid", "dynamic"):
        expected = target.generate(PROMPT, **OPTIONS, cache_implementation=implementation)
        draft = scripted(draft, expected)
        output = target.generate(
            PROMPT,
            **OPTIONS,
            cache_implementation=implementation,
            assistant_model=draft,
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, expected), implementation
        assert max(output.acceptance_lengths[0]) > 1


def refused(target, draft, words, **arguments):
    """The call is refused in these words, nothing was written, and the next call is as good as ever."""
    with pytest.raises(ValueError, match=words):
        target.generate(PROMPT, **OPTIONS, **arguments, assistant_model=draft)
    if "past_key_values" in arguments:
        assert arguments["past_key_values"].get_seq_length() == 0
    expected = target.generate(PROMPT, **OPTIONS)
    assert torch.equal(target.generate(PROMPT, **OPTIONS, assistant_model=draft), expected)


# A target in slots, one with recurrent layers.
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5_text"])
def test_static_and_offloaded_caches_of_the_caller_are_refused(family):
    target = make_target(family, attn=None)
    draft = make_draft(target)
    cache = StaticCache(target.config, max_cache_len=64)
    refused(target, draft, "past_key_values is a StaticCache .* `DynamicCache`", past_key_values=cache)
    cache = DynamicCache(config=target.config)
    cache.offloading = True  # where there is CUDA, an argument of its constructor
    refused(target, draft, "offloaded to the CPU", past_key_values=cache)


@needs_driver
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5_text"])
def test_an_offloaded_cache_by_its_name_is_refused(family):
    target = make_target(family, attn=None)
    draft = make_draft(target)
    refused(target, draft, "cache_implementation='offloaded_static' makes", cache_implementation="offloaded_static")


@pytest.mark.parametrize(("backend", "package"), [("hqq", "hqq"), ("quanto", "optimum"), ("fp8", "torch")])
@pytest.mark.parametrize("family", ["qwen3"])
def test_quantised_caches_are_refused(family, backend, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    target = make_target(family, attn=None, hidden_size=256, head_dim=64)
    try:
        cache = QuantizedCache(backend, target.config)
    except ValueError as error:
        pytest.skip(str(error))  # fp8, in versions that do not know it
    draft = make_draft(target)
    assert not torch.equal(  # the cache itself does run
        target.generate(PROMPT, **OPTIONS, past_key_values=cache), target.generate(PROMPT, **OPTIONS)
    ), "quantisation changes nothing"
    fresh = QuantizedCache(backend, target.config)
    refused(target, draft, "past_key_values is a QuantizedCache", past_key_values=fresh)
    arguments = {"cache_implementation": "quantized", "cache_config": {"backend": backend}}
    refused(target, draft, "cache_implementation='quantized' makes a QuantizedCache", **arguments)


@pytest.mark.parametrize("family", ["gemma3", "gpt_neox"])
def test_a_cache_that_holds_the_whole_prompt_is_decoded_plainly(family):
    """Upstream feeds the prompt a second time, with a mask that is too short: nobody could draft what that means."""
    target = make_target(family, attn=None)
    draft = make_draft(target)
    ids = torch.tensor([[0, 0, 5, 9, 7], [4, 8, 15, 16, 23]])
    inputs, texts = {"input_ids": ids, "attention_mask": (ids != 0).long()}, []
    for assistant in (None, draft):
        cache = DynamicCache(config=target.config)
        target(**inputs, past_key_values=cache)
        texts.append(target.generate(**inputs, **OPTIONS, past_key_values=cache, assistant_model=assistant))
    assert torch.equal(*texts)
