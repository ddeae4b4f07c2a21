"""Drafted calls multiply by packed weights by themselves: in their own copies of the modules, never by old weights."""

import copy
import functools
import gc
import importlib.util
import pickle
import threading
import weakref

import pytest
import torch
from support.pairs import make_draft, make_target
from torch import nn

from dflash_hf import packed_weights
from dflash_hf.modeling import packing_dflash
from dflash_hf.modeling.packing_dflash import TOKENS, PackedLinear, packed_layers


NEW = 32


pytestmark = pytest.mark.usefixtures("packs_of_any_size")


@pytest.fixture
def pair():
    target = make_target()
    return target, make_draft(target)


def decode(target, draft=None, new=NEW, **options):
    ids = (torch.arange(20) * 7 % 90 + 2)[None]
    return target.generate(ids, max_new_tokens=new, do_sample=False, assistant_model=draft, **options)


def linear_layers(*models) -> list[nn.Linear]:
    return [module for model in models for module in model.modules() if isinstance(module, nn.Linear)]


# ----------------------------------------------------------------------------------------------------- what is packed


def test_both_models_are_packed_once_for_all_calls(pair, products, packings):
    target, draft = pair
    expected = decode(target)
    assert not products
    assert torch.equal(decode(target, draft), expected)
    layers = linear_layers(target, draft)
    assert products and len(packings) == len(layers)
    assert torch.equal(decode(target, draft), expected)
    assert len(packings) == len(layers)
    # The models stay as they are.
    assert all(type(layer) is nn.Linear for layer in layers)
    count = len(products)
    assert torch.equal(decode(target), expected) and len(products) == count


def test_the_models_of_a_call_are_its_own(pair, products):
    """In a round, the shared model is plain: for copies, pickles and other threads' calls."""
    target, draft = pair
    expected, kinds, others = decode(target), set(), []

    def criterion(ids, scores, **kwargs):
        copies = copy.deepcopy(target), pickle.loads(pickle.dumps(target))
        kinds.update(map(type, linear_layers(target, draft, *copies)))
        if not others:
            count = len(products)
            thread = threading.Thread(target=lambda: others.append(decode(target)))
            thread.start()
            thread.join()
            assert len(products) == count
        return torch.zeros(len(ids), dtype=torch.bool)

    assert torch.equal(decode(target, draft, stopping_criteria=[criterion]), expected)
    assert kinds == {nn.Linear} and torch.equal(others[0], expected)


def test_threads_pack_once(pair, packings):
    target, draft = pair
    expected, texts = decode(target), []
    threads = [threading.Thread(target=lambda: texts.append(decode(target, draft))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4 and all(torch.equal(text, expected) for text in texts)
    assert len(packings) == len(linear_layers(target, draft))


def test_what_was_packed_goes_with_its_model():
    target = make_target()
    draft = make_draft(target)
    decode(target, draft)
    made = [weakref.ref(packing_dflash._kept[layer].made[1]) for layer in linear_layers(target, draft)]
    del target, draft
    gc.collect()
    assert not any(one() is not None for one in made)


def test_a_model_that_was_cast_frees_its_packs(pair, products):
    target, draft = pair
    decode(target, draft)
    target.double(), draft.double()
    count = len(products)
    assert torch.equal(decode(target, draft), decode(target))
    assert len(products) == count and not any(layer in packing_dflash._kept for layer in linear_layers(*pair))


REASONS = ["switched off", "a short text", "memory", "no psutil", "oneDNN off", "own forward", "own product"]


@pytest.mark.parametrize("why", REASONS)
def test_what_prevents_it(pair, products, monkeypatch, why):
    target, draft = pair
    expected = decode(target)
    if why == "switched off":
        draft.decoding_config.packed = False
    elif why == "memory":
        monkeypatch.setattr(packing_dflash, "fit_memory", lambda layers: not layers)
    elif why == "no psutil":
        monkeypatch.setitem(packing_dflash.sys.modules, "psutil", None)
    elif why == "own forward":
        forward = nn.Linear.forward
        own = functools.wraps(forward)(lambda self, x: forward(self, x))
        monkeypatch.setattr(nn.Linear, "forward", own)
    elif why == "own product":
        product = nn.functional.linear
        monkeypatch.setattr(nn.functional, "linear", lambda *args: product(*args))
    with torch.backends.mkldnn.flags(enabled=why != "oneDNN off"):
        text = decode(target, draft, new=31 if why == "a short text" else NEW)
    assert torch.equal(text, expected[:, : text.shape[1]]) and not products


def test_a_forward_that_was_replaced_before_this_file_was_loaded(monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: nn.functional.linear(x, self.weight) * 2)
    optimizers = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizers, "register_optimizer_step_post_hook", lambda hook: None)
    spec = importlib.util.spec_from_file_location("loaded_later", packing_dflash.__file__)
    loaded_later = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded_later)
    loaded_later.SMALLEST = 0
    layer = nn.Linear(8, 8)
    assert loaded_later.packable(layer) and loaded_later.packed_layers(layer) == []


@pytest.mark.parametrize(("limit", "fits"), [("max", True), (str(10**12), True), ("1269", True), ("1268", False)])
def test_a_container_has_less_memory(tmp_path, monkeypatch, limit, fits):
    for name, text in (("limit", limit), ("used", "500")):
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
    monkeypatch.setattr(packing_dflash, "_CONTAINERS", [("/none", "/none"), (tmp_path / "limit", tmp_path / "used")])
    assert packing_dflash.fit_memory([nn.Linear(8, 8)]) == fits


def test_packs_stay_when_memory_runs_short(pair, products, monkeypatch):
    target, draft = pair
    decode(target, draft)
    monkeypatch.setattr(packing_dflash, "fit_memory", lambda layers: not layers)
    products.clear()
    decode(target, draft)
    assert products


def test_packed_by_the_user_for_other_forwards(pair, monkeypatch):
    """The layout that an earlier call had chosen stayed."""
    laid_out, reorder = [], packing_dflash._reorder
    monkeypatch.setattr(packing_dflash, "_reorder", lambda *args: laid_out.append(args[1]) or reorder(*args))
    target, draft = pair
    expected, layers = decode(target, draft), linear_layers(target, draft)
    with packed_weights(target, draft, tokens=8):
        assert laid_out == [TOKENS] * len(layers) + [8] * len(layers)
        assert torch.equal(decode(target, draft), expected) and torch.equal(decode(target), expected)
        assert len(laid_out) == 2 * len(layers)
    assert torch.equal(decode(target, draft), expected)
    assert laid_out[2 * len(layers) :] == [TOKENS] * len(layers)


def test_packed_by_the_user(pair, packings):
    """Nothing is made twice, and what a call has made outlives the user's own packing."""
    target, draft = pair
    with packed_weights(target, draft):
        expected, count = decode(target), len(packings)
        assert torch.equal(decode(target, draft), expected) and len(packings) == count
    for _ in range(2):
        assert torch.equal(decode(target, draft), expected)
        with packed_weights(target):
            decode(target)
    assert len(packings) == count + len(linear_layers(target, draft))  # the first call's own
    assert all(type(layer) is nn.Linear for layer in linear_layers(target, draft))


def test_an_invalid_switch(pair):
    target, draft = pair
    draft.decoding_config.packed = "yes"
    with pytest.raises(ValueError, match=r"decoding_config.packed='yes' must be True or False"):
        decode(target, draft)


# ---------------------------------------------------------------------------------------------------- hooks, adapters


def test_hooks_of_linear_layers_get_their_own_module(pair):
    target, draft = pair
    layer, seen = target.model.layers[0].mlp.up_proj, []
    layer.register_forward_hook(lambda module, args, output: seen.append(module))
    assert torch.equal(decode(target, draft), decode(target))
    assert set(seen) == {layer}


def test_an_adapter_that_is_merged_between_calls(pair):
    """PEFT writes to `weight.data`, which nothing counts."""
    peft = pytest.importorskip("peft")
    target, draft = pair
    decode(target, draft)
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, r=4)
    adapted = peft.get_peft_model(target, config)
    assert torch.equal(decode(adapted, draft), decode(adapted))
    merged = adapted.merge_and_unload()
    text = decode(merged, draft)
    assert torch.equal(text, decode(merged)) and not torch.equal(text, decode(pair[0], None, new=4))


def test_a_merged_adapter_that_is_disabled(pair):
    """The first forward of the call takes it out of the weights."""
    peft = pytest.importorskip("peft")
    target, draft = pair
    expected = decode(target)
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, r=4)
    adapted = peft.get_peft_model(target, config)
    adapted.merge_adapter()
    assert not torch.equal(decode(adapted, draft), expected)
    with adapted.disable_adapter():
        assert torch.equal(decode(adapted, draft), expected)


@pytest.mark.parametrize("why", ["another forward", "memory"])
def test_layers_that_share_a_weight(pair, monkeypatch, why):
    """One of them cannot be packed: it stays plain, since the call has no copy of it."""
    target, draft = pair
    one, other = (layer.mlp.up_proj for layer in target.model.layers[:2])
    decode(target, draft)
    other.weight = one.weight
    if why == "another forward":
        other.forward = lambda x: nn.functional.linear(x, other.weight)
    else:
        monkeypatch.setattr(packing_dflash, "fit_memory", lambda layers: not layers)
    assert torch.equal(decode(target, draft), decode(target)) and type(other) is nn.Linear


def test_a_layer_without_a_weight(pair):
    target, draft = pair
    target.unused = nn.Linear(8, 8)
    del target.unused.weight
    assert torch.equal(decode(target, draft), decode(target))


# --------------------------------------------------------------------------------------------------- changing weights


def swap(weight, one, other):
    """Two blocks of 8 bytes."""
    size = 8 // weight.itemsize
    a, b = slice(one * size, (one + 1) * size), slice(other * size, (other + 1) * size)
    weight.data[:, a], weight.data[:, b] = weight.data[:, b].clone(), weight.data[:, a].clone()


# None of these is counted by PyTorch.
CHANGES = {
    "all": lambda weight: weight.data.add_(0.01),
    "one value": lambda weight: weight.data[3, 5:6].mul_(1.01),
    "one sign": lambda weight: weight.data[3, 3:4].neg_(),
    "two signs of the upper bits": lambda weight: (
        weight.data[3, [3, 7]].neg_() is None or weight.data.__setitem__((3, [3, 7]), -weight.data[3, [3, 7]])
    ),
    "two columns of signs": lambda weight: weight.data.__setitem__((slice(None), [3, 7]), -weight.data[:, [3, 7]]),
    "all signs": lambda weight: weight.data.neg_(),
    "two places of a row": lambda weight: swap(weight, 1, 4),
    "two rows": lambda weight: weight.data.copy_(weight.data[[1, 0, *range(2, len(weight))]]),
    "columns in another order": lambda weight: weight.data.copy_(weight.data.flip(1)),
    "through numpy": lambda weight: weight.detach().view(torch.int16).numpy().__iadd__(1),
    "by a copy": lambda weight: weight.data.copy_(torch.randn(weight.shape)),
    "the last bit": lambda weight: weight.detach().view(torch.int16).numpy()[2, 4:5].__ixor__(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_found_by_the_next_call(change, dtype, packings):
    torch.manual_seed(0)
    layer = nn.Linear(48, 32, bias=False, dtype=dtype)
    if not packing_dflash.packable(layer):
        pytest.skip(f"oneDNN multiplies no {dtype} here")
    before, marks = layer.weight.detach().clone(), packing_dflash._mark(layer.weight)
    packed_layers(layer), packed_layers(layer)
    assert len(packings) == 1
    CHANGES[change](layer.weight)
    assert not torch.equal(layer.weight, before) and packing_dflash._mark(layer.weight) == marks
    packed_layers(layer)
    assert len(packings) == 2
    x, own = torch.randn(3, 48, dtype=dtype), PackedLinear(48, 32, bias=False, dtype=dtype)
    own.weight = layer.weight
    with torch.no_grad():
        torch.testing.assert_close(own(x), layer(x))


@pytest.mark.parametrize("compiled", [False, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_texts_follow_the_weights(pair, compiled):
    target, draft = pair
    draft.decoding_config.compile = compiled
    texts = []
    for _ in range(3):
        texts.append(decode(target))
        assert torch.equal(decode(target, draft), texts[-1])
        for layer in linear_layers(target):
            layer.weight.data += 0.02 * torch.randn_like(layer.weight)
    assert not torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_that_change_the_sum_of_no_row(dtype):
    """As in a layer of differences."""
    weight = torch.cat([torch.eye(8), -torch.eye(8)], dim=1).to(dtype)
    for one in range(1, 8):
        for other in range(one + 1, weight.shape[1]):
            changed = weight.clone()
            changed[:, [one, other]] *= -1
            assert not torch.equal(packing_dflash._sums(changed), packing_dflash._sums(weight))


def test_one_row_of_a_larger_matrix():
    layer = nn.Linear(8, 1, bias=False)
    layer.weight = nn.Parameter(torch.randn(3, 9)[:1, :8])  # contiguous, and rows would lie 9 apart
    assert packed_layers(layer) == [layer]


@pytest.mark.parametrize("packed_by", ["the user", "a forward"])
def test_a_change_that_was_packed_and_is_taken_back(pair, packed_by):
    """A pack that something else has made anew is not taken for that of the earlier call."""
    target, draft = pair
    expected, layers = decode(target), linear_layers(target)
    decode(target, draft)
    weights = [layer.weight.detach().clone() for layer in layers]

    def change(*_, **__):
        for layer in layers if torch.equal(layers[0].weight, weights[0]) else ():
            noise = 0.05 * torch.randn_like(layer.weight)
            layer.weight.add_(noise) if packed_by == "a forward" else layer.weight.data.add_(noise)
        return torch.zeros(1, dtype=torch.bool)

    if packed_by == "the user":
        change()
        packed_weights(target).restore()
    else:
        decode(target, draft, stopping_criteria=[change])
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data.copy_(weight)
    assert torch.equal(decode(target, draft), expected)


def test_a_weight_that_cannot_be_summed_is_not_packed():
    odd, fitting = nn.Linear(7, 8), nn.Linear(8, 8)
    assert packed_layers(nn.Sequential(odd, fitting)) == [fitting]
