"""Compiled rounds: as many graphs as buckets, whatever the prompts; memory that outlives a call; the way back."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from support.pairs import make_draft, make_target, shallow_pair
from torch._dynamo.utils import counters
from transformers.utils.import_utils import is_torch_greater_or_equal

from dflash_hf.modeling import call_dflash, compile_dflash, packing_dflash
from dflash_hf.modeling.compile_dflash import CompiledRound, _pools
from dflash_hf.modeling.drafting_dflash import Context
from dflash_hf.modeling.plan_dflash import Plan


@pytest.fixture
def pair():
    torch._dynamo.reset()
    target, draft = shallow_pair()
    draft.decoding_config.compile = "aot_eager"
    yield target, draft
    torch._dynamo.reset()


def prompt(length: int) -> torch.Tensor:
    return (torch.arange(length) * 7 % 90 + 2)[None]


def decode(target, ids, draft=None, new=12, **options):
    mask = torch.ones_like(ids)  # else the id of padding, where the text holds it, would be masked in a second turn
    options |= {"attention_mask": mask, "max_new_tokens": new, "do_sample": False}
    return target.generate(ids, assistant_model=draft, **options)


CACHES = ("drafter's slots", "target's slots")


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_the_number_of_graphs_is_that_of_the_buckets(pair, monkeypatch):
    """And who waits for a graph is told."""
    target, draft = pair
    warnings = []
    compile_dflash.logger.warning_once.cache_clear()
    monkeypatch.setattr(type(compile_dflash.logger), "warning", lambda self, text, *args: warnings.append(text))
    counters.clear()
    for length, new in ((5, 12), (9, 30), (40, 7), (70, 25)):
        assert torch.equal(decode(target, prompt(length), draft, new), decode(target, prompt(length), new=new))
        assert graphs() == 1
    # From the first bucket into the second, and back into the first.
    for length, new in ((245, 24), (255, 3), (20, 9)):
        assert torch.equal(decode(target, prompt(length), draft, new), decode(target, prompt(length), new=new))
    assert graphs() == 2
    slots = [text.split("of ")[-1] for text in warnings if text.startswith("Compiling a round of Qwen3ForCausalLM")]
    assert slots == ["256 slots. This takes a while, once.", "512 slots. This takes a while, once."]


def test_the_backend_is_the_one_that_was_named(pair):
    target, draft = pair
    counters.clear()
    graphs_seen = []

    @torch._dynamo.register_backend(name="seeing")
    def seeing(graph, inputs):
        graphs_seen.append(graph)
        return graph.forward

    draft.decoding_config.compile = "seeing"
    decode(target, prompt(8), draft)
    draft.decoding_config.compile = "eager"
    decode(target, prompt(8), draft)
    assert len(graphs_seen) == 1 and graphs() == 2


def test_slots_outlive_the_call_and_returned_caches_do_not_lie_in_them(pair):
    target, draft = pair
    options = {"return_dict_in_generate": True, "new": 20}
    first = decode(target, prompt(8), draft, **options)
    (slots,) = _pools[target]
    places = {key: buffer.data_ptr() for key, buffer in slots.items()}
    kept = [layer.keys.clone() for layer in first.past_key_values.layers]
    decode(target, prompt(30), draft, **options)
    assert {key: buffer.data_ptr() for key, buffer in _pools[target][0].items()} == places
    assert len(places) == 2 * target.config.num_hidden_layers
    for layer, keys in zip(first.past_key_values.layers, kept, strict=True):
        assert torch.equal(layer.keys, keys)
    # And so the first conversation goes on.
    more = torch.cat([first.sequences, torch.tensor([[11, 12, 13]])], dim=1)
    expected = decode(target, more)
    assert torch.equal(decode(target, more, draft, past_key_values=first.past_key_values), expected)


def test_calls_in_and_out_of_inference_mode_share_slots(pair):
    """Slots that were made in that mode could not be written outside of it."""
    target, draft = pair
    draft.decoding_config.tree_nodes = 9
    expected = decode(target, prompt(8))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(decode(target, prompt(8), draft), expected)


def test_a_seed_gives_the_sample_that_it_gives_eagerly(pair):
    target, draft = pair
    samples = []
    for compiled in (False, "aot_eager"):
        draft.decoding_config.compile = compiled
        torch.manual_seed(3)
        samples.append(target.generate(prompt(7), max_new_tokens=16, do_sample=True, top_p=0.9, assistant_model=draft))
    assert torch.equal(*samples)


def test_no_position_past_the_end_of_the_text():
    """A block keeps its size at the end; a table of learned positions has nothing there."""
    target = make_target("gpt2", n_positions=64, n_layer=2)
    draft = make_draft(target, 8, num_hidden_layers=1, target_layer_ids=[0, 1])
    draft.decoding_config.compile = "aot_eager"
    expected = decode(target, prompt(20), new=44)
    assert torch.equal(decode(target, prompt(20), draft, new=44), expected)
    assert not compile_dflash.failed_on(target, draft)


def test_what_cannot_be_compiled_decodes_eagerly_with_one_warning(pair, monkeypatch):
    target, draft = pair
    warnings = []
    monkeypatch.setattr(compile_dflash.logger, "warning", warnings.append)
    target.lm_head.register_forward_hook(lambda *args: torch._dynamo.graph_break())
    for length in (6, 11):
        assert torch.equal(decode(target, prompt(length), draft), decode(target, prompt(length)))
    assert ["cannot be compiled" in text for text in warnings if not text.startswith("Compiling")] == [True]


def test_what_fails_to_compile_bars_nothing_else(pair):
    """One failure kept every drafter and every backend from compiling with that target, in silence."""
    target, draft = pair
    other = make_draft(target, 4, num_hidden_layers=1, target_layer_ids=[1])
    for drafter in (draft, other):
        drafter.decoding_config.compile = "aot_eager"
    other.layers[0].register_forward_hook(lambda *args: torch._dynamo.graph_break())
    expected = decode(target, prompt(6))
    assert torch.equal(decode(target, prompt(6), other), expected)
    assert compile_dflash.failed_on(target, other) == {"aot_eager"} and not compile_dflash.failed_on(target, draft)
    counters.clear()
    assert torch.equal(decode(target, prompt(6), draft), expected) and graphs() == 1
    draft.decoding_config.compile = "defualt"
    with pytest.raises(ValueError, match="compile='defualt' must be True, a mode .*default.* or one of its backends"):
        decode(target, prompt(6), draft)


def test_graphs_of_one_plan_outlive_another_that_fails(pair, monkeypatch):
    """CUDA graphs overwrite their outputs in the next replay: those already there are still copied."""
    target, draft = pair
    decode(target, prompt(6), draft)
    rounds, first = [], CompiledRound._first

    def fails(self, key, *args):
        rounds.append(self)
        self.graphs_replay = True
        monkeypatch.setattr(self, "compiled", None)
        return first(self, key, *args)

    monkeypatch.setattr(CompiledRound, "_first", fails)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    assert torch.equal(decode(target, prompt(300), draft), decode(target, prompt(300)))
    assert rounds and rounds[0].graphs_replay


def test_an_error_of_the_target_is_not_hidden_by_the_way_back(pair):
    target, draft = pair
    broken = []

    def fail(module, args):
        if broken and args[0].shape[1] > 1:
            raise FloatingPointError("the target's own")

    target.lm_head.register_forward_pre_hook(fail)
    decode(target, prompt(6), draft)  # probes, which may fail in silence
    broken.append(True)
    with pytest.raises(FloatingPointError, match="the target's own"):
        decode(target, prompt(6), draft)


def other(output):
    """As a hook that steers a model changes what a module returns."""
    if isinstance(output, torch.Tensor):
        return output.flip(-1) * 3.0 + 1.0
    if isinstance(output, tuple):
        return (other(output[0]), *output[1:])
    return type(output)({**output, "logits": other(output.logits)})


def on_output(module, args, *more):
    return other(more[-1])


def on_input(module, args, *kwargs):
    states = (other(args[0]) if args[0].is_floating_point() else args[0].flip(-1), *args[1:])
    return (states, *kwargs) if kwargs else states


@contextlib.contextmanager
def replaced(kind, name: str):
    before = vars(kind)[name]
    setattr(kind, name, lambda self, *args, **kwargs: other(before(self, *args, **kwargs)))
    try:
        yield
    finally:
        setattr(kind, name, before)


CHANGES = {
    "forward hook of the head": lambda t: t.lm_head.register_forward_hook(on_output),
    "forward hook of a projection": lambda t: t.model.layers[1].self_attn.o_proj.register_forward_hook(on_output),
    "forward hook of the model": lambda t: t.register_forward_hook(on_output),
    "forward hook of a tapped layer": lambda t: t.model.layers[1].register_forward_hook(on_output, prepend=True),
    "with keywords": lambda t: t.model.layers[0].self_attn.register_forward_hook(on_output, with_kwargs=True),
    "always called": lambda t: t.model.norm.register_forward_hook(on_output, always_call=True),
    "before": lambda t: t.model.layers[0].mlp.register_forward_pre_hook(on_input),
    "before, with keywords": lambda t: t.model.norm.register_forward_pre_hook(on_input, with_kwargs=True),
    "method of a class": lambda t: replaced(type(t.model.layers[0].mlp), "forward"),
    "method of a class of torch": lambda t: replaced(torch.nn.Embedding, "forward"),
}


@pytest.fixture(scope="module", params=["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def with_a_graph(request):
    torch._dynamo.reset()
    target, draft = shallow_pair()
    draft.decoding_config.compile = request.param
    decode(target, prompt(8), draft)
    yield target, draft, decode(target, prompt(8))
    torch._dynamo.reset()


@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_is_not_used_for_a_target_that_was_changed_after(change, with_a_graph):
    """Hooks and methods of classes are not what Dynamo guards by itself."""
    target, draft, before = with_a_graph
    with CHANGES[change](target):
        expected = decode(target, prompt(8))
        assert not torch.equal(expected[:, 9:], before[:, 9:]), "the change changes nothing"
        assert torch.equal(decode(target, prompt(8), draft), expected)
    counters.clear()
    assert torch.equal(decode(target, prompt(8), draft), before)
    assert graphs() == 0, "made again"


def shapes(pair, start, context, plan):
    """Stands for a round: all that may change inside a call."""
    drafted, verified = pair
    steps = context.features.shape[1]
    return (
        start
        + drafted.capacity
        + 10**3 * verified.capacity
        + 10**6 * plan.block
        + 10**9 * plan.paths.nodes
        + 10**12 * steps
    )


@pytest.mark.parametrize("changed", ["drafter's slots", "target's slots", "block", "nodes", "steps of context"])
def test_whatever_changes_inside_a_call_names_a_graph(changed):
    """A graph runs without its guards once it is known: one that a change does not name would run on, wrongly."""

    def situation(change: str | None):
        drafted, verified = (SimpleNamespace(rows=1, capacity=64 * (1 + (change == who))) for who in CACHES)
        paths = SimpleNamespace(nodes=7 if change == "nodes" else 3)
        context = Context(torch.zeros(1, 5 if change == "steps of context" else 4, 2), torch.tensor([0]))
        return (drafted, verified), torch.tensor([0]), context, Plan(6 if change == "block" else 8, paths)

    torch._dynamo.reset()
    (pair, *rest), (other_pair, *other_rest) = situation(None), situation(changed)
    target, draft = torch.nn.Identity(), torch.nn.Identity()
    target.device = torch.device("cpu")
    compiled = CompiledRound(shapes, shapes, target, draft, "eager", pair)
    for number in range(3):
        assert compiled(pair, *rest) == shapes(pair, *rest)
        for cache, other_cache in zip(pair, other_pair, strict=True):
            cache.capacity, other_cache.capacity = other_cache.capacity, cache.capacity
        assert compiled(pair, *other_rest) == shapes(pair, *other_rest), number
        for cache, other_cache in zip(pair, other_pair, strict=True):
            cache.capacity, other_cache.capacity = other_cache.capacity, cache.capacity
    assert len(compiled.graphs) == 2


def test_a_hook_that_removes_itself_and_one_that_stays(pair):
    """They have the same code, so that only their being there tells graphs apart."""
    target, draft = pair
    draft.decoding_config.compile = "eager"
    kept = [False]

    def louder(module, args, output):
        if not torch.compiler.is_compiling() and not kept[0]:
            handle.remove()
        return output.flip(-1)

    for kept[0] in (False, True, False, True):
        texts = []
        for assistant in (None, draft):
            handle = target.model.layers[1].register_forward_hook(louder)
            texts.append(decode(target, prompt(8), assistant))
            handle.remove()
        assert torch.equal(*texts)


@pytest.mark.parametrize("packed", [False, True])
def test_adapters_of_rows_are_followed_by_compiled_rounds(pair, packed, monkeypatch):
    """PEFT chooses them by hooks; pairs of names come back, and find their graphs."""
    from peft import LoraConfig, get_peft_model

    if packed:
        monkeypatch.setattr(packing_dflash, "SMALLEST", 0)
        monkeypatch.setattr(call_dflash, "_WORTH_PACKING", 0)
    target, draft = pair
    draft.decoding_config.compile = "eager"
    lora = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(target, lora, adapter_name="one").eval()
    model.add_adapter("two", lora)
    model.requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(40.0)
    ids, texts, counts = prompt(8).repeat(2, 1), set(), []
    mask = torch.ones_like(ids)
    for names in (["one", "two"], ["two", "one"], ["__base__", "two"], ["one", "two"], None, ["two", "one"]):
        options = {} if names is None else {"adapter_names": names}
        written = [
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                assistant_model=assistant,
                max_new_tokens=12,
                do_sample=False,
                **options,
            )
            for assistant in (None, draft)
        ]
        assert torch.equal(*written), names
        texts.update(tuple(row) for row in written[0].tolist())
        counts.append(graphs())
    # Dynamo before torch 2.11 guards the numbers of hooks, which PEFT registers in every call: each call compiles.
    found = counts[3] == counts[2] and counts[5] == counts[4]
    assert len(texts) == 3 and found == is_torch_greater_or_equal("2.11")
