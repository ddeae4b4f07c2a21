"""Calls that decode without the drafter: the reason is logged, the text is the target's, the next call drafts."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from support.calls import Call, EveryOther, difference
from support.cuda_driver import needs_driver
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from support.runs import CHECKPOINTING
from support.scripted_draft import recognising
from support.tiny_models import tiny_model
from transformers import DynamicCache, GenerationMixin, QuantizedCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf.decoding import probe
from dflash_hf.decoding.attention import is_replaceable, takes_slot_masks
from dflash_hf.decoding.fallback import fallback_reason
from dflash_hf.decoding.probe import capabilities_of
from dflash_hf.decoding.recurrent import ReplaySession
from dflash_hf.decoding.session import SlotSession
from dflash_hf.modeling.candidates_dflash import CACHE_NAME


def call_of(family="qwen3", rows=1, dtype=torch.float32, attn=None, **options) -> Call:
    options = {"max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True, **options}
    return Call(make_target(family, dtype, attn), *ragged_prompts(rows), options)


def static(call):
    return StaticCache(call.target.config, max_cache_len=64)


def gap(call):
    mask = call.inputs["attention_mask"].clone()
    mask[:, 5:7] = 0
    return mask


ONE_BY_ONE = "computes different logits for several tokens than for one"
REASONS = [  # the reason, and the call
    ("hidden states of each token are requested", {"output_hidden_states": True}),
    ("attentions of each token are requested", {"output_attentions": True, "attn": "eager"}),
    ("scores of several rows are requested", {"rows": 3, "output_scores": True}),
    ("logits of several rows are requested", {"rows": 3, "output_logits": True}),
    ("EveryOther may read several rows at once", {"rows": 3, "logits_processor": lambda call: [EveryOther()]}),
    ("use_cache=False", {"use_cache": False}),
    ("use_cache=False", {"use_cache": False, "rows": 3, "family": "qwen3_5_text"}),
    ("leaves out tokens that are not padding on the left", {"attention_mask": gap}),
    ("the cache is a StaticCache of", {"family": "gemma3", "cache_implementation": "static"}),
    ("the cache is a StaticCache of", {"family": "qwen3_5_text", CACHE_NAME: static}),
    ("cannot be rolled back", {"family": "falcon_mamba"}),
    ("cannot be rolled back", {"family": "bloom"}),
    (ONE_BY_ONE, {"family": "nemotron_h"}),
]


@pytest.mark.parametrize(
    ("reason", "arguments"), REASONS, ids=[" ".join([reason, *map(str, arguments)]) for reason, arguments in REASONS]
)
def test_plain_decoding_warns_with_its_reason(reason, arguments, caplog):
    call = call_of(**arguments)
    draft = make_draft(call.target)
    plain = call()
    drafted = call(draft)
    assert difference(plain, drafted, tolerance=0.0) is None and drafted.lengths == [[]] * len(call.pads)
    warnings = [line for line in caplog.messages if line.startswith("Decoding without the drafter")]
    assert len(warnings) == 1 and reason in warnings[0] and warnings[0].endswith(".")
    if not arguments.keys() & {"family", "attn"}:  # the same target drafts in another call
        assert call_of(rows=2)(draft).lengths[0]


def test_fallback_reason_follows_the_streamed_text(caplog):
    order = []
    streamer = SimpleNamespace(put=lambda tokens: order.append(len(caplog.messages)), end=order.copy)
    call = call_of(use_cache=False, streamer=streamer)
    call(make_draft(call.target))
    assert {*order} == {0} and "use_cache=False" in caplog.text


def test_reason_is_logged_if_plain_decoding_raises(caplog):
    """It was lost with the exception, whose cause it may explain."""

    def put(tokens):
        if tokens.numel() == 1:  # `generate` itself puts the prompt
            raise ConnectionError("the reader is gone")

    call = call_of(use_cache=False, streamer=SimpleNamespace(put=put))
    with pytest.raises(ConnectionError):
        call(make_draft(call.target))
    assert "Decoding without the drafter: use_cache=False." in caplog.text


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("backend", "package"), [("hqq", "hqq"), ("quanto", "optimum"), ("fp8", "torch")])
def test_quantised_cache_decodes_plainly(backend, package, named, caplog):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    target = make_target(attn=None, hidden_size=256, head_dim=64)
    try:
        QuantizedCache(backend, target.config)
    except ValueError as error:
        pytest.skip(str(error))  # fp8, in versions that do not know it
    call = call_of(cache_implementation="quantized", cache_config={"backend": backend})
    call.target = target
    if not named:
        call.options[CACHE_NAME] = lambda call: QuantizedCache(backend, target.config)
        del call.options["cache_implementation"], call.options["cache_config"]
    plain = call()
    drafted = call(make_draft(target))
    assert difference(plain, drafted) is None and drafted.lengths == [[]]
    assert "the cache is a QuantizedCache" in caplog.text


@needs_driver
@pytest.mark.parametrize("named", [False, True])
def test_offloaded_cache_decodes_plainly(named, caplog, monkeypatch):
    """Upstream's offloading runs with CUDA only, so plain decoding is left out."""
    monkeypatch.setattr(GenerationMixin, "_sample", lambda target, input_ids, *args, **kwargs: input_ids)
    call = call_of("gemma3", cache_implementation="offloaded_static" if named else None)
    config = call.target.config
    call(make_draft(call.target), **{CACHE_NAME: None if named else DynamicCache(config=config, offloading=True)})
    assert "Layer, offloaded to the CPU, whose tokens cannot be moved into slots" in caplog.text


@pytest.mark.parametrize("family", ["lfm2", "gemma3"])
def test_cache_of_assisted_decoding_can_continue(family):
    """It records its past from then on: shapes that LFM2's states did not have, and its keys were lost."""
    target = make_target(family)
    ids = ragged_prompts(1)[0]["input_ids"]
    options = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 12}
    read = target.generate(ids, prompt_lookup_num_tokens=3, **options)
    text = target.generate(read.sequences, **options).sequences
    inputs = {"input_ids": read.sequences, CACHE_NAME: read[CACHE_NAME]}
    output = target.generate(**inputs, assistant_model=make_draft(target), **options)
    assert torch.equal(output.sequences, text) and output[CACHE_NAME].get_seq_length() == text.shape[1] - 1


def test_target_with_new_attention_is_probed_again():
    target = tiny_model("qwen3_vl", True)
    for attention in ("sdpa", {"text_config": "eager"}):
        target.set_attn_implementation(attention)
        capabilities_of(target)
    assert len(probe._capabilities[target]) == 2


@pytest.mark.parametrize("family", ["gemma3", "gpt_neox"])
def test_cache_of_the_whole_prompt_decodes_plainly(family):
    """Upstream feeds the prompt a second time, with a mask that is too short: nobody could draft what that means."""

    def whole(call):
        cache = DynamicCache(config=call.target.config)
        call.target(**call.inputs, **{CACHE_NAME: cache})
        return cache

    call = call_of(family, rows=2, **{CACHE_NAME: whole})
    assert difference(call(), call(make_draft(call.target))) is None


@pytest.mark.filterwarnings("error:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("checkpoints", [False, True])
def test_target_in_training_decodes_plainly(checkpoints, caplog):
    """With dropout a seed gives the text that it gives alone; afterwards it is drafted for."""
    target = make_target(attention_dropout=0.3)
    call = Call(target, *ragged_prompts(1), {"max_new_tokens": 14, "return_dict_in_generate": True})
    text = call(do_sample=False).sequences
    draft = recognising(target, [text[0]])
    target.train()
    if checkpoints:
        getattr(target, f"{CHECKPOINTING}_enable")()
    with torch.enable_grad():
        for do_sample in (False, True):
            plain = call(do_sample=do_sample)
            assert difference(plain, call(draft, do_sample=do_sample)) is None
    assert "training mode; call its `eval()`" in caplog.text
    target.eval()
    drafted = call(draft, do_sample=False)
    assert torch.equal(drafted.sequences, text) and max(drafted.lengths[0]) > 3


def test_autocast_capabilities_hold_under_autocast():
    call = call_of("qwen3_5_text")
    plain = call()
    draft = recognising(call.target, [plain.sequences[0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(draft).sequences.shape == plain.sequences.shape
    drafted = call(draft)
    assert difference(plain, drafted) is None and max(drafted.lengths[0]) > 3


def test_probe_detects_a_wrong_state(monkeypatch):
    """The rejected tokens stay in the state."""
    monkeypatch.setattr(ReplaySession, "_replay", lambda self, path: None)
    assert capabilities_of(make_target("qwen3_5_text")).session is None


def test_dynamic_quantisation_is_named(target):
    """It read that its cache cannot be rolled back; its logits depend on how many tokens are computed together."""
    quantised = torch.ao.quantization.quantize_dynamic(target, {torch.nn.Linear}, dtype=torch.qint8)
    assert ONE_BY_ONE in capabilities_of(quantised).fallback_reason("A target", [0], None)


@pytest.mark.parametrize(
    ("family", "names"),
    [("qwen3", ["a"]), ("qwen3", ["a", "b"]), ("qwen3", ["a", "b", "__base__"]), ("qwen3_5_text", ["a", "b"])],
)
def test_adapters_per_row_decode_losslessly(family, names):
    """Named in the first call already, for another number of rows than the probe has."""
    from peft import LoraConfig, get_peft_model

    call = call_of(family, dtype=torch.float64)
    config = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False, r=4)
    draft = make_draft(call.target)
    call.target = get_peft_model(call.target, config, adapter_name="a")
    call.target.add_adapter("b", config)
    call.target.eval()
    rows = Call(call.target, {"input_ids": call.inputs["input_ids"].expand(len(names), -1)}, [0] * len(names))
    rows.options = {**call.options, "adapter_names": names}
    expected = rows()
    assert difference(expected, rows(draft)) is None
    plain = call()
    drafted = call(draft)
    assert difference(plain, drafted) is None
    assert drafted.lengths[0], "remembered as a target that cannot be drafted for"
    drafted = rows(draft)
    assert difference(expected, drafted) is None and drafted.lengths[0]


def test_training_target_is_probed_once_it_drafts():
    """Not by `compile=True` before: under dropout no cache can be rolled back, and that was remembered."""
    target = make_target("gpt2", attn_pdrop=0.5, resid_pdrop=0.5)
    draft = make_draft(target)
    draft.decoding_config.compile = True
    call = Call(target, *ragged_prompts(1), {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True})
    target.train()
    assert call(draft).lengths == [[]]
    target.eval()
    draft.decoding_config.compile = False
    assert sum(call(draft).lengths[0]) == 5


def test_out_of_memory_in_a_probe_is_not_remembered(monkeypatch, caplog):
    target = make_target()
    draft = make_draft(target)
    prompt = torch.tensor([[5, 9, 17]])
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "assistant_model": draft}

    def full(*args):
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patches:
        patches.setattr(SlotSession, "verify", full)
        assert target.generate(prompt, **options).acceptance_lengths == [[]]
    assert "could not be tried on a few tokens (OutOfMemoryError: no memory left)" in caplog.text
    assert sum(target.generate(prompt, **options).acceptance_lengths[0]) == 5


def test_ids_on_another_device_decode_plainly(monkeypatch):
    """Upstream moves them there for each forward; the drafter's tables would be on two devices."""
    target = make_target()
    monkeypatch.setattr(type(target), "device", torch.device("cuda"))
    call = SimpleNamespace(target=target, prompt=torch.ones(1, 4), model_kwargs={})
    assert "input_ids are on cpu, but Qwen3ForCausalLM is on cuda" in fallback_reason(call, None)


@pytest.mark.parametrize("masks", ["flash_attention_2", "flex_attention"])
def test_attention_without_masks_is_not_probed(masks, caplog, request):
    """Somebody's attention may read the mask of a draft as numbers of rows, which ends a CUDA process in the probe."""
    name = "own_" + masks.replace("flash", "rows")  # upstream looks for a library where the name says "flash"

    def attention(module, query, key, value, attention_mask, **kwargs):
        assert attention_mask is None or attention_mask.dim() == 2, "a mask of a draft"
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask=None, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    create = ALL_MASK_ATTENTION_FUNCTIONS[masks] if masks == "flash_attention_2" else lambda **kwargs: None
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, create)
    request.addfinalizer(lambda: ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name))
    request.addfinalizer(lambda: ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name))
    call = call_of(attn="sdpa")
    plain = call()
    draft = recognising(call.target, call.texts(plain.sequences), error_rate=0.2)
    call.target.set_attn_implementation(name)
    drafted = call(draft)
    assert drafted.lengths == [[]]
    assert (
        f"cannot be replaced (attn_implementation='{name}': it is not one of upstream's); load it with" in caplog.text
    )
    call.target.set_attn_implementation("sdpa")  # as the line says
    assert max(call(draft).lengths[0]) > 1


def test_kernels_hub_attentions_are_recognised():
    refused = ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2", "paged|flash_attention_2")
    assert not any(takes_slot_masks(name) for name in (*refused, "flex_attention"))
    assert all(takes_slot_masks(name) for name in ("sdpa", "eager", "somebodys_own", None))
    assert all(is_replaceable(name) for name in (*refused, "flex_attention", "sdpa"))
    assert not any(is_replaceable(name) for name in ("eager", "somebodys_own", None))
