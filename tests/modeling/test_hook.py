"""The hook changes nothing for anybody else, and bad calls get a sentence that names the remedy."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch
from support.pairs import VOCAB, make_draft, make_target
from support.scripted_draft import scripted
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin

from dflash_hf import DFlashCandidateGenerator, DFlashDraftConfig, DFlashDraftModel, install_hook, remove_hook
from dflash_hf.modeling import hook_dflash


@pytest.fixture
def unhooked():
    remove_hook()
    yield
    install_hook()


PROMPT = torch.tensor([[5, 9, 17, 33, 5, 9, 17, 33, 5, 9]])


def everybody_else(target, assistant):
    torch.manual_seed(0)
    calls = [
        {"assistant_model": assistant, "do_sample": False},
        {"assistant_model": assistant, "do_sample": True},
        {"prompt_lookup_num_tokens": 3, "do_sample": False},
        {"assistant_early_exit": 2, "do_sample": False},
        {"assistant_model": assistant, "assistant_confidence_threshold": 0.2, "num_assistant_tokens": 3},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True},
    ]
    return [target.generate(PROMPT, max_new_tokens=12, **call) for call in calls]


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_other_generation_modes_are_unchanged(unhooked, family):
    target = make_target(family)
    assistant = make_target(seed=1)
    before = everybody_else(target, assistant)
    install_hook()
    after = everybody_else(target, assistant)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_hook_installs_once_and_comes_off(unhooked):
    upstream = GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode
    assert not any(hasattr(method, "_dflash_original") for method in upstream)
    install_hook()
    hooked = GenerationMixin._assisted_decoding
    install_hook()
    assert GenerationMixin._assisted_decoding is hooked
    assert inspect.signature(hooked) == inspect.signature(upstream[0])
    remove_hook()
    assert (GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode) == upstream


def test_candidate_generator_is_an_assistant():
    """A real `CandidateGenerator`: upstream's `_assisted_decoding` drives it to the same tokens."""
    target = make_target()
    forwards = []
    target.register_forward_hook(lambda *args: forwards.append(1))
    for mask in (None, torch.tensor([[0, 0, 0] + [1] * 7])):
        options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
        wanted = target.generate(PROMPT, **options)
        draft = scripted(make_draft(target, block_size=5), wanted, error_rate=0.2)
        draft.origin -= 0 if mask is None else 3  # padding has no positions
        forwards.clear()
        generator = DFlashCandidateGenerator(draft, target, PROMPT.shape[1] + 30)
        output = target.generate(PROMPT, **options, assistant_model=generator)
        assert torch.equal(output, wanted) and len(forwards) < 20  # 30 tokens in fewer forwards


def test_native_speculation_type_runs_the_drafter(target, draft):
    """Upstream's own DFlash path takes our model as it is: its forward has the native contract."""
    expected = target.generate(PROMPT, max_new_tokens=30, do_sample=False)
    output = target.generate(
        PROMPT, max_new_tokens=30, do_sample=False, assistant_model=draft, speculation_type="dflash"
    )
    assert torch.equal(output, expected)


@torch.no_grad()
def test_cache_argument_may_have_either_name():
    """It is `cache` since transformers 5.24: the loop's cache stayed empty, and drafts saw the last tokens only."""
    draft = make_draft(make_target(), block_size=4, target_layer_ids=[0, 1, 2])
    outputs = []
    for name in ("past_key_values", "cache"):
        torch.manual_seed(0)
        cache = DynamicCache(config=draft.config)
        for length in (5, 3):
            features = torch.randn(1, length, draft.fc.in_features)
            output = draft(torch.randn(1, 4, draft.config.hidden_size), features, **{name: cache})
            cache.crop(-4)
        outputs.append(output.last_hidden_state)
    assert cache.get_seq_length() == 8 and torch.equal(*outputs)


def test_drafts_equal_those_of_the_native_loop(monkeypatch):
    """Same contexts, same drafts: our slots and upstream's cache. (No tap on the last layer, whose norm it reads.)"""
    target = make_target()
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    for ids, overrides in (([0, 1, 2], {}), ([0, 1, 2], sliding), ([2, -1, 0], {})):
        draft = make_draft(target, block_size=4, target_layer_ids=ids, **overrides)
        traces = []
        original_forward = DFlashDraftModel.forward

        def record(self, *args, original_forward=original_forward, traces=traces, **kwargs):
            output = original_forward(self, *args, **kwargs)
            traces[-1].append(output.last_hidden_state)
            return output

        monkeypatch.setattr(DFlashDraftModel, "forward", record)
        for options in ({}, {"speculation_type": "dflash"}):
            traces.append([])
            target.generate(PROMPT, max_new_tokens=12, do_sample=False, assistant_model=draft, **options)
        monkeypatch.setattr(DFlashDraftModel, "forward", original_forward)
        own, native = traces
        assert len(own) >= 8
        for a, b in zip(own, native, strict=False):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 16, "head_dim": 4}, "hidden_size=16"),
        ({"vocab_size": VOCAB * 5 // 4, "mask_token_id": 3}, "vocab_size"),
        ({"vocab_size": VOCAB * 3 // 4, "mask_token_id": 3}, "vocab_size"),
        ({"vocab_size": None, "mask_token_id": VOCAB}, "mask_token_id"),
        ({"num_target_layers": None, "target_layer_ids": [1, 9]}, "target_layer_ids"),
        ({"num_target_layers": 7}, "num_target_layers"),
        ({"target_hidden_size": 64}, "target_hidden_size"),
    ],
)
def test_a_drafter_of_another_target_is_refused(target, changes, named):
    fields = DFlashDraftConfig.for_target(target.config, 95, 2, target_layer_ids=[0, 2, 3]).to_dict()
    fields = {k: v for k, v in fields.items() if k != "dflash_config"}
    draft = DFlashDraftModel(DFlashDraftConfig(**{**fields, **changes}))
    with pytest.raises(ValueError, match=named) as error:
        target.generate(PROMPT, max_new_tokens=5, assistant_model=draft)
    assert "Load the drafter" in str(error.value)


def test_bad_calls_raise_as_without_a_drafter(target, draft):
    with pytest.raises(ValueError, match="num_beams"):
        target.generate(PROMPT, max_new_tokens=5, num_beams=3, assistant_model=draft)
    for limits in ({"max_new_tokens": 0}, {"max_length": 3}):
        with pytest.raises(ValueError) as plain:
            target.generate(PROMPT, **limits)
        with pytest.raises(ValueError) as drafted:
            target.generate(PROMPT, **limits, assistant_model=draft)
        assert str(plain.value) == str(drafted.value)
    with pytest.raises(Exception) as plain:
        target.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=3)
    with pytest.raises(type(plain.value)):
        target.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=3, assistant_model=draft)


def test_foreign_assistant_gets_upstreams_error(target):
    """An assistant without the protocol is upstream's business, with upstream's own error."""
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(Exception) as hooked:
        target.generate(PROMPT, max_new_tokens=5, assistant_model=linear)
    remove_hook()
    try:
        with pytest.raises(type(hooked.value)):
            target.generate(PROMPT, max_new_tokens=5, assistant_model=linear)
    finally:
        install_hook()


@pytest.mark.parametrize(("method", "warns"), [("_assisted_decoding", True), ("_prepare_generation_config", False)])
def test_only_missing_decoding_methods_warn(method, warns, monkeypatch, recwarn):
    remove_hook()
    with monkeypatch.context() as patch:
        patch.delattr(GenerationMixin, method)
        install_hook()
    remove_hook()  # what was put back is upstream's own
    assert any(f"no GenerationMixin.{method}" in str(warning.message) for warning in recwarn) == warns
    install_hook()
    assert hasattr(getattr(GenerationMixin, method), "_dflash_original")


def test_missing_or_narrow_context_is_refused(draft):
    block = torch.zeros(1, 4, 32)
    with pytest.raises(ValueError, match="context_hidden_states"):
        draft(noise_embeds=block)
    with pytest.raises(ValueError, match="width 64"):
        draft(noise_embeds=block, context_hidden_states=torch.zeros(1, 3, 64))


@pytest.mark.parametrize(
    ("target_dtype", "draft_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_drafter_of_another_dtype_still_drafts(target_dtype, draft_dtype):
    target = make_target(dtype=target_dtype)
    draft = make_draft(target).to(draft_dtype)
    output = target.generate(PROMPT, max_new_tokens=20, do_sample=False, assistant_model=draft)
    assert output.shape == (1, 30)
    if target_dtype == torch.float32:
        assert torch.equal(output, target.generate(PROMPT, max_new_tokens=20, do_sample=False))


def test_frequent_mistakes_name_the_remedy(target, draft, tmp_path):
    """They read `'str' object has no attribute 'config'`, hundreds of classes, and no attribute `generate`."""
    draft.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="is a name; `generate` takes a model, so load the drafter: `AutoModel"):
        target.generate(PROMPT, assistant_model=str(tmp_path))
    with pytest.raises(TypeError, match="cannot generate on its own; load it with `AutoModel.from_pretrained"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(AttributeError, match="swap the models: `target.generate"):
        draft.generate(PROMPT, assistant_model=target)
    assert not draft.can_generate() and not hasattr(draft, "generate")  # else remote code would be made generative


def test_hook_of_another_copy_serves_generators():
    """A drafter's own code, loaded first, knew generators by its class; one of the package then had no features."""
    folder = Path(hook_dflash.__file__).parent
    spec = importlib.util.spec_from_file_location(
        "copied_modeling", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules["copied_modeling"] = importlib.util.module_from_spec(spec)
    copied_hook = importlib.import_module("copied_modeling.hook_dflash")
    target = make_target()
    expected = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
    generator = DFlashCandidateGenerator(make_draft(target), target, PROMPT.shape[1] + 12)
    remove_hook()
    try:
        copied_hook.wrap_generation()
        output = target.generate(PROMPT, max_new_tokens=12, do_sample=False, assistant_model=generator)
    finally:
        copied_hook.unwrap_generation()
        install_hook()
        for name in [name for name in sys.modules if name.partition(".")[0] == "copied_modeling"]:
            del sys.modules[name]
    assert torch.equal(output, expected)


def test_mode_error_names_the_generator(target, draft):
    """It called every generator a DFlash drafter."""
    generator = DFlashCandidateGenerator(draft, target, 20)
    with pytest.raises(ValueError, match="assistant_model is a DFlashCandidateGenerator, .* beam"):
        target.generate(PROMPT, max_new_tokens=5, num_beams=3, assistant_model=generator)


def test_sinks_refuse_a_block_mask():
    """It failed with "'BlockMask' object has no attribute 'expand'"."""
    draft = make_draft(make_target(), attention_sink_bias=True, block_size=4)
    mask = create_block_mask(lambda batch, head, query, key: query >= 0, 1, 1, 4, 9, device="cpu")
    with pytest.raises(ValueError, match="attention_mask is a BlockMask"):
        draft(torch.zeros(1, 4, 32), torch.zeros(1, 5, draft.fc.in_features), attention_mask=mask)
