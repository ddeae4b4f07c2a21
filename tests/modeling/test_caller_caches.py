"""Caches that a caller asks for or brings along: the text is that of plain decoding."""

import importlib.util

import pytest
import torch
from support.cuda_driver import needs_driver
from support.pairs import make_draft, make_target
from support.scripted_draft import scripted
from transformers import DynamicCache, GenerationMixin, QuantizedCache, StaticCache

from dflash_hf.modeling.target_dflash import CACHE_NAME


PROMPT = torch.tensor([[5, 9, 17, 33, 5, 9, 17, 33, 5, 9]])
OPTIONS = {"max_new_tokens": 20, "do_sample": False}


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5_text"])
def test_cache_implementations(family):
    target = make_target(family, attn=None)
    draft = make_draft(target)
    for implementation in ("hybrid", "dynamic"):  # one is the other, since transformers 5
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


def plain(target, caplog, words, make_cache=lambda: None, **arguments):
    """The call decodes without the drafter and says so in these words; the next call drafts."""
    caches, draft = (make_cache(), make_cache()), make_draft(target)
    expected = target.generate(PROMPT, **OPTIONS, **arguments, **{CACHE_NAME: caches[0]})
    caplog.clear()
    arguments |= {"assistant_model": draft, "return_dict_in_generate": True}
    output = target.generate(PROMPT, **OPTIONS, **arguments, **{CACHE_NAME: caches[1]})
    assert torch.equal(output.sequences, expected) and output.acceptance_lengths == [[]]
    said = [line for line in caplog.messages if line.startswith("Decoding without the drafter")]
    assert len(said) == 1 and f": the cache is a {words}" in said[0] and "not offloaded" in said[0]
    if caches[0] is not None:
        assert caches[0].get_seq_length() == caches[1].get_seq_length() > 0
    expected = target.generate(PROMPT, **OPTIONS)
    output = target.generate(PROMPT, **OPTIONS, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and output.acceptance_lengths[0]


# A target in slots, one with recurrent layers.
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5_text"])
def test_a_static_cache_decodes_plainly(family, named, caplog):
    """The caller's raised; one that `cache_implementation` asked for was replaced without a word."""
    target = make_target(family, attn=None)
    if named:
        plain(target, caplog, "StaticCache", cache_implementation="static")
    else:
        plain(target, caplog, "StaticCache", lambda: StaticCache(target.config, max_cache_len=64))


@needs_driver
@pytest.mark.parametrize("named", [False, True])
def test_an_offloaded_cache_decodes_plainly(named, caplog, monkeypatch):
    """Upstream's offloading runs with CUDA only, so plain decoding is left out."""
    monkeypatch.setattr(GenerationMixin, "_sample", lambda target, input_ids, *args, **kwargs: input_ids)
    target = make_target("gemma3", attn=None)
    cache = None if named else DynamicCache(config=target.config, offloading=True)
    implementation = "offloaded_static" if named else None
    target.generate(
        PROMPT,
        **OPTIONS,
        **{CACHE_NAME: cache},
        cache_implementation=implementation,
        assistant_model=make_draft(target),
    )
    assert "Layer, offloaded to the CPU, whose tokens cannot be moved into slots" in caplog.text


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("backend", "package"), [("hqq", "hqq"), ("quanto", "optimum"), ("fp8", "torch")])
def test_a_quantised_cache_decodes_plainly(backend, package, named, caplog):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    target = make_target(attn=None, hidden_size=256, head_dim=64)
    try:
        QuantizedCache(backend, target.config)
    except ValueError as error:
        pytest.skip(str(error))  # fp8, in versions that do not know it
    if named:
        plain(target, caplog, "QuantizedCache", cache_implementation="quantized", cache_config={"backend": backend})
    else:
        plain(target, caplog, "QuantizedCache", lambda: QuantizedCache(backend, target.config))


@pytest.mark.parametrize("family", ["gemma3", "gpt_neox"])
def test_a_cache_that_holds_the_whole_prompt_is_decoded_plainly(family):
    """Upstream feeds the prompt a second time, with a mask that is too short: nobody could draft what that means."""
    target = make_target(family, attn=None)
    draft = make_draft(target)
    ids = torch.tensor([[0, 0, 5, 9, 7], [4, 8, 15, 16, 23]])
    inputs, texts = {"input_ids": ids, "attention_mask": (ids != 0).long()}, []
    for assistant in (None, draft):
        cache = DynamicCache(config=target.config)
        target(**inputs, **{CACHE_NAME: cache})
        texts.append(target.generate(**inputs, **OPTIONS, **{CACHE_NAME: cache}, assistant_model=assistant))
    assert torch.equal(*texts)
