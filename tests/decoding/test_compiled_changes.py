"""What changes a forward after it was compiled: the next call writes the changed model's text."""

import contextlib
import gc
import threading
import weakref

import accelerate.hooks
import peft
import pytest
import torch
from support.pairs import shallow_pair
from support.rows import ragged_prompts
from support.scripted_draft import scripted
from transformers.models.qwen3 import modeling_qwen3

from dflash_hf.decoding.graphs import ModelGraphs, no_graph_reason


PROMPT = {"input_ids": (torch.arange(9) * 7 % 90 + 2)[None]}
SETTINGS = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture
def pair():
    torch._dynamo.reset()
    target, draft = shallow_pair(block_size=6)
    draft.decoding_config.compile = "eager"
    yield target, draft
    torch._dynamo.reset()


def checked_text(model, draft, inputs=PROMPT, **options) -> list:
    """The text of a model, which a drafter that is often right does not change."""
    options = {**SETTINGS, **inputs, **options}
    expected = model.generate(**options).sequences
    output = model.generate(**options, assistant_model=scripted(draft, expected, error_rate=0.2))
    assert torch.equal(output.sequences, expected)
    assert max(max(lengths) for lengths in output.acceptance_lengths) > 1
    return expected.tolist()


def lora(target, *names: str):
    """A PEFT model with random adapters on the first layer, the first one active."""
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(target, config, adapter_name=names[0]).eval()
    for name in names[1:]:
        model.add_adapter(name, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(20.0)
    return model.eval()


# Each: the model to call before, given the target; how it is changed, given that model and the target. A change gives
# the options of the next call, or nothing.


def switches(model, target):
    model.set_adapter("b")


def adds(model, target):
    lora(target, "a")


def disables(model, target):
    for layer in target.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.enable_adapters(False)


def merges_and_scales(model, target):
    """Merged weights, with the second adapter instead of the first."""
    model.base_model.merge_adapter(["b"])


def names_rows(model, target):
    return {"adapter_names": ["b"]}


def mixes_rows(model, target):
    return {"adapter_names": ["b", "__base__", "a"], "inputs": ragged_prompts(3)[0]}


def switches_attention(model, target):
    target.set_attn_implementation("eager")


def writes_weights(model, target):
    with torch.no_grad():
        target.model.layers[0].mlp.down_proj.weight.mul_(-1.0)


def replaces_weights(model, target):
    layer = target.model.layers[1].self_attn.v_proj
    layer.weight = torch.nn.Parameter(-layer.weight.detach())


def resizes_weights(model, target):
    target.resize_token_embeddings(100)
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(-1.0)


def hooks_of_accelerate(model, target):
    class Doubled(accelerate.hooks.ModelHook):
        def post_forward(self, module, output):
            return -2 * output

    accelerate.hooks.add_hook_to_module(target.model.layers[0].mlp, Doubled())


def hooks_of_torch(model, target):
    torch.nn.utils.parametrizations.weight_norm(target.model.layers[0].mlp.up_proj, dim=0)
    with torch.no_grad():
        target.model.layers[0].mlp.up_proj.parametrizations.weight.original0.mul_(-3.0)


def replaces_a_module(model, target):
    target.model.layers[0].mlp.act_fn = torch.nn.Tanh()


CHANGES_TEXT = {
    "an adapter is added": (None, adds),
    "an adapter is switched": (("a", "b"), switches),
    "adapters are named for rows": (("a", "b"), names_rows),
    "rows have different adapters": (("a", "b"), mixes_rows),
    "adapters are disabled": (("a",), disables),
    "adapters are merged": (("a", "b"), merges_and_scales),
    "weights are written": (None, writes_weights),
    "weights are replaced": (None, replaces_weights),
    "weights are resized": (None, resizes_weights),
    "a module is replaced": (None, replaces_a_module),
    "accelerate hooks a module": (None, hooks_of_accelerate),
    "torch parametrises a weight": (None, hooks_of_torch),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES_TEXT)
def test_change_after_compiling_is_seen(change, pair):
    target, draft = pair
    adapters, changes = CHANGES_TEXT[change]
    model = target if adapters is None else lora(target, *adapters)
    before = checked_text(model, draft)
    assert ModelGraphs.for_model(target).compiled, "nothing was compiled before the change"
    after = checked_text(model, draft, **(changes(model, target) or {}))
    assert after != before, "a change that changes no text proves nothing"


def test_changed_attention_is_compiled_again(pair):
    target, draft = pair
    checked_text(target, draft)
    switches_attention(target, target)
    checked_text(target, draft)
    assert len(ModelGraphs.for_model(target).compiled) == 2


def test_changed_class_is_compiled_again(pair, monkeypatch):
    target, draft = pair
    before = checked_text(target, draft)
    original = modeling_qwen3.Qwen3MLP.forward
    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", lambda self, states: -original(self, states))
    assert checked_text(target, draft) != before


def test_drafters_adapter_is_compiled_again(pair):
    target, draft = pair
    counts = []
    for compiled in ("eager", False):
        draft.decoding_config.compile = compiled
        options = {**SETTINGS, **PROMPT, "assistant_model": draft}
        if compiled:
            target.generate(**options)
            lora(draft, "a")
        counts.append(target.generate(**options).acceptance_lengths)
    assert counts[0] == counts[1]


def test_hooks_and_replaced_forwards_decode_eagerly(pair, caplog):
    """`no_graph_reason` names what graphs would not see; feature taps are part of each graph's key."""
    target, draft = pair
    assert no_graph_reason(target) is None
    with contextlib.closing(_Hook(target.model.norm)):
        assert no_graph_reason(target) == "a hook is registered on a Qwen3RMSNorm"
    target.model.norm.forward = target.model.norm.forward
    assert no_graph_reason(target) == "the forward of a Qwen3RMSNorm is replaced"
    del target.model.norm.forward
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    try:
        assert no_graph_reason(target) == "a hook is registered on all modules"
    finally:
        handle.remove()
    model = lora(target, "a")
    draft.decoding_config.compile = False  # the first call tries the target on two rows, which one name does not fit
    checked_text(model, draft)
    draft.decoding_config.compile = "eager"
    checked_text(model, draft, adapter_names=["a"])
    assert not ModelGraphs.for_model(target).compiled
    assert "Qwen3ForCausalLM are not compiled: a hook is registered on a Linear" in caplog.text


class _Hook:
    def __init__(self, module):
        self.close = module.register_forward_hook(lambda *_: None).remove


def test_two_threads_compile_at_once(pair):
    """Both compile the same forwards for other numbers of rows, beside a call that compiles nothing."""
    target, draft = pair
    _, other = shallow_pair(block_size=6)
    calls = []
    for rows, drafter in ((1, draft), (2, draft), (3, draft), (2, other)):
        options = {**SETTINGS, **ragged_prompts(rows)[0]}
        expected = target.generate(**options).sequences
        calls.append((options, expected, scripted(drafter, expected, error_rate=0.2)))
    errors = []
    start = threading.Barrier(len(calls))

    def run(options, expected, drafter):
        start.wait()
        try:
            for _ in range(2):
                output = target.generate(**options, assistant_model=drafter)
                assert torch.equal(output.sequences, expected)
                assert max(max(lengths) for lengths in output.acceptance_lengths) > 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert not ModelGraphs.for_model(target).failures


def test_graphs_are_freed_with_their_models():
    torch._dynamo.reset()
    target, draft = shallow_pair(block_size=6)
    draft.decoding_config.compile = "eager"
    target.generate(**PROMPT, **SETTINGS, assistant_model=draft)
    graphs = weakref.ref(ModelGraphs.for_model(target))
    models = weakref.ref(target), weakref.ref(draft)
    del target, draft
    gc.collect()
    assert [reference() for reference in (*models, graphs)] == [None] * 3


def test_transient_failure_is_compiled_again(pair, caplog):
    target, draft = pair
    failures = ["full disk"]

    @torch._dynamo.register_backend(name="failing_once")
    def failing_once(graph, inputs):
        if failures:
            raise OSError(failures.pop())
        return graph.forward

    draft.decoding_config.compile = "failing_once"
    text = checked_text(target, draft)
    assert "cannot be compiled" in caplog.text and "full disk" in caplog.text
    assert checked_text(target, draft) == text
    assert ModelGraphs.for_model(target).compiled


def test_without_dynamo_a_call_is_eager(pair):
    """As with TORCHDYNAMO_DISABLE=1: the features were missing, and the target was said not to compile."""
    target, draft = pair
    with torch.compiler.set_stance("force_eager"):
        text = checked_text(target, draft)
    assert not ModelGraphs.for_model(target).failures and not ModelGraphs.for_model(target).messages
    assert checked_text(target, draft) == text
