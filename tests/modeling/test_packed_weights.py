"""Packed weights: the same products, as long as the weights stay; nothing of it outlives the call."""

import gc
import importlib.util
import logging

import pytest
import torch
from support.pairs import make_draft, make_target
from torch import nn
from torch._dynamo.utils import counters

from dflash_hf.modeling import packing_dflash
from dflash_hf.modeling.packing_dflash import PackedLinear, mark, packable, packed_weights


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(packing_dflash, "SMALLEST", 0)


@pytest.fixture
def pair():
    target = make_target()
    draft = make_draft(target)
    draft.decoding_config.pack_weights = True
    return target, draft


def prompt(length: int) -> torch.Tensor:
    return (torch.arange(length) * 7 % 90 + 2)[None]


def decode(target, ids, draft=None, new=16):
    return target.generate(ids, max_new_tokens=new, do_sample=False, assistant_model=draft)


@pytest.fixture
def products(monkeypatch):
    """Counts the products with packed weights."""
    seen, linear = [], packing_dflash._linear

    def counted(x, *args):
        seen.append(tuple(x.shape))
        return linear(x, *args)

    monkeypatch.setattr(packing_dflash, "_linear", counted)
    return seen


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_products_are_those_of_the_layer(dtype, bias, products):
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias).to(dtype)
    x = torch.randn(2, 5, 48, dtype=dtype)
    if not packable(layer):
        pytest.skip(f"oneDNN multiplies no {dtype} here")
    expected = layer(x)
    with packed_weights(layer, tokens=10):
        assert isinstance(layer, PackedLinear)
        torch.testing.assert_close(layer(x), expected)
        # Other numbers of tokens than it was packed for.
        torch.testing.assert_close(layer(x[:1, :1]), expected[:1, :1])
        torch.testing.assert_close(layer(x[1]), expected[1])
        assert len(products) == 3
    assert type(layer) is nn.Linear and not packing_dflash._in_use
    assert torch.equal(layer(x), expected)


@torch.no_grad()
def test_another_type_than_that_of_the_weights_is_multiplied_as_ever(products):
    layer = nn.Linear(8, 8)
    with packed_weights(layer, tokens=4), pytest.raises(RuntimeError, match="same dtype"):
        layer(torch.randn(2, 8, dtype=torch.float64))
    with torch.autocast("cpu", torch.bfloat16), packed_weights(layer, tokens=4):
        assert layer(torch.randn(2, 8)).dtype == torch.bfloat16
    assert not products


def test_texts_are_equal_and_every_linear_layer_is_packed(pair, products):
    target, draft = pair
    layers = sum(type(module) is nn.Linear for model in pair for module in model.modules())
    for length in (5, 30):
        assert torch.equal(decode(target, prompt(length), draft), decode(target, prompt(length)))
    assert len(products) > layers
    assert not any(isinstance(module, PackedLinear) for model in pair for module in model.modules())


def test_changed_weights_are_packed_again(pair, monkeypatch):
    """An adapter is merged, a drafter is trained, weights are loaded: what was packed before is out of date."""
    target, draft = pair
    packed, pack = [], packing_dflash._pack
    monkeypatch.setattr(packing_dflash, "_pack", lambda *args: packed.append(1) or pack(*args))
    before = decode(target, prompt(9))
    for _ in range(2):
        assert torch.equal(decode(target, prompt(9), draft), before)
    count = len(packed)
    for number, weight in enumerate([target.model.layers[1].mlp.up_proj.weight, target.lm_head.weight], start=1):
        weight.data += torch.randn_like(weight)
        assert torch.equal(decode(target, prompt(9), draft), decode(target, prompt(9)))
        assert len(packed) == count + number
    assert not torch.equal(decode(target, prompt(9)), before)


def test_a_weight_is_known_by_what_it_holds():
    weight = make_target().model.norm.weight
    marks = [mark(weight)]
    assert mark(weight) == marks[0]
    with torch.no_grad():
        weight[3] += 1.0
    marks.append(mark(weight))
    weight.data *= 2.0
    marks.append(mark(weight))
    marks.append(mark(weight.detach().clone()))
    assert len(set(marks)) == 4


def test_an_interruption_leaves_plain_layers(pair):
    target, draft = pair

    def interrupt(module, args):
        if args[0].shape[1] == 4:
            raise KeyboardInterrupt

    hook = target.lm_head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        decode(target, prompt(6), draft)
    hook.remove()
    assert not packing_dflash._in_use
    assert not any(isinstance(module, PackedLinear) for model in pair for module in model.modules())


def test_what_was_packed_goes_with_its_layer():
    gc.collect()
    before = len(packing_dflash._kept)
    layer = nn.Linear(8, 8)
    with packed_weights(layer, tokens=4):
        assert len(packing_dflash._kept) == before + 1
    del layer
    gc.collect()
    assert len(packing_dflash._kept) == before


def test_other_layers_stay_as_they_are(monkeypatch):
    class Own(nn.Linear):
        pass

    moved = nn.Linear(8, 8)
    moved.forward = lambda x: x  # as accelerate's hooks do
    assert not any(
        map(packable, (Own(8, 8), moved, nn.Linear(8, 8).double(), nn.Linear(8, 8, device="meta"), nn.ReLU()))
    )
    assert packable(nn.Linear(8, 8))
    monkeypatch.setattr(packing_dflash, "SMALLEST", 65)
    assert not packable(nn.Linear(8, 8)) and packable(nn.Linear(9, 8))
    monkeypatch.setattr(packing_dflash, "_linear", None)  # a PyTorch without oneDNN
    assert not packable(nn.Linear(9, 8))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_rounds_multiply_by_them_and_serve_new_weights(pair, backend, products):
    target, draft = pair
    torch._dynamo.reset()
    draft.decoding_config.compile = backend
    counters.clear()
    for number in range(3):
        assert torch.equal(decode(target, prompt(8), draft), decode(target, prompt(8)))
        assert counters["stats"]["unique_graphs"] == 1 and products
        products.clear()
        target.lm_head.weight.data += torch.randn_like(target.lm_head.weight) * number
    torch._dynamo.reset()


def test_the_file_may_be_loaded_again(pair):
    """As upstream does with remote code that has changed: its operator has the name of the one before."""
    target, draft = pair
    torch._dynamo.reset()
    draft.decoding_config.compile = "aot_eager"
    expected = decode(target, prompt(8))
    assert torch.equal(decode(target, prompt(8), draft), expected)
    path = packing_dflash.__file__
    twin = importlib.util.spec_from_file_location(packing_dflash.__name__, path)
    for _ in range(2):
        module = importlib.util.module_from_spec(twin)
        twin.loader.exec_module(module)
        module.SMALLEST = 0
        layer = nn.Linear(8, 8)
        compiled = torch.compile(layer, backend="aot_eager")
        with torch.no_grad(), module.packed_weights(layer, tokens=4):
            torch.testing.assert_close(
                compiled(torch.ones(4, 8)), nn.functional.linear(torch.ones(4, 8), layer.weight, layer.bias)
            )
    torch._dynamo.reset()


def test_a_target_in_two_calls_at_once_keeps_its_text(pair):
    """The second call ends first; the first goes on without packed weights."""
    target, draft = pair
    expected = decode(target, prompt(9))

    class Nested:
        def __init__(self):
            self.called = False

        def put(self, token):
            if not self.called and token.numel() == 1:
                self.called = True
                assert torch.equal(decode(target, prompt(9), draft), expected)

        def end(self):
            pass

    output = target.generate(prompt(9), max_new_tokens=16, do_sample=False, assistant_model=draft, streamer=Nested())
    assert torch.equal(output, expected)


def test_nothing_is_said_of_it(pair, caplog):
    with caplog.at_level(logging.WARNING):
        decode(pair[0], prompt(5), pair[1])
    assert not caplog.records
