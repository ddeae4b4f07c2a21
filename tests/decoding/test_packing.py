"""Packed weights: the same products, whatever happens to the weights, to the models or in other threads meanwhile."""

import copy
import gc
import logging
import pickle
import re
import threading

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from support.runs import make_trainer
from support.threads import at_once
from torch import nn
from torch._dynamo.utils import counters

from dflash_hf import DFlashDraftModel, packed_weights
from dflash_hf.decoding import cpu_dtypes, packing
from dflash_hf.decoding.packing import PackedLinear, packable


pytestmark = pytest.mark.usefixtures("packs_of_any_size")


@pytest.fixture
def pair():
    target = make_target()
    return target, make_draft(target)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def prompt(length: int) -> torch.Tensor:
    return (torch.arange(length) * 7 % 90 + 2)[None]


def decode(target, ids, draft=None, new=16):
    return target.generate(ids, max_new_tokens=new, do_sample=False, assistant_model=draft)


def linear_layers(*models) -> list[nn.Linear]:
    return [module for model in models for module in model.modules() if isinstance(module, nn.Linear)]


def are_plain(*models) -> bool:
    return not packing._packs and all(type(layer) is nn.Linear for layer in linear_layers(*models))


# -------------------------------------------------------------------------------------------------------- one layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_packed_products_equal_the_layers(dtype, bias, products):
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias).to(dtype)
    x = torch.randn(2, 5, 48, dtype=dtype)
    if not packable(layer):
        pytest.skip(f"oneDNN multiplies no {dtype} here")
    expected = layer(x)
    with packed_weights(layer, tokens=10) as packed:
        assert type(layer) is PackedLinear and packed.layers == [layer]
        torch.testing.assert_close(layer(x), expected)
        # Other numbers of tokens than it was packed for, and other strides.
        torch.testing.assert_close(layer(x[:1, :1]), expected[:1, :1])
        torch.testing.assert_close(layer(x[1, 2]), expected[1, 2])
        torch.testing.assert_close(layer(x.transpose(0, 1)), expected.transpose(0, 1))
        assert layer(x[:0]).shape == (0, 5, 80)
        assert len(products) == (3 if dtype == torch.float32 else 5)  # in fp32 single tokens are faster without
    assert are_plain(layer) and torch.equal(layer(x), expected)


def test_frozen_weights_are_packed_once(packings):
    """A packed target stays packed while its drafter is trained."""
    frozen = nn.Linear(16, 16).requires_grad_(False)
    trained = nn.Linear(16, 16)
    x = torch.randn(3, 16)
    with packed_weights(frozen, trained):
        stepped(trained, torch.optim.AdamW, fused=True)
        with torch.no_grad():
            frozen(x), trained(x), trained(x)
    assert len(packings) == 3


def test_compiled_optimizer_steps_are_seen(fresh_compiler):
    """PyTorch counts what they write, and the hook is no reason to compile again."""
    layer = nn.Linear(16, 16)
    x = torch.randn(3, 16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=torch.tensor(0.1))
    step = torch.compile(optimizer.step, backend="aot_eager")
    with packed_weights(layer):
        for _ in range(4):
            layer(x).square().sum().backward()
            step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert counters["stats"]["unique_graphs"] <= 2  # the first step makes the optimizer's state


def test_packed_drafter_is_evaluated_as_trained(tmp_path, products):
    """By the trainer's default optimizer, which does not count what it writes."""
    target = make_target()
    rows = counting_rows(4)
    trainer = make_trainer(tmp_path, target, rows, make_draft(target), rows, max_steps=5, warmup_steps=0)
    with packed_weights(trainer.model):
        trainer.evaluate()
        trainer.train()
        assert trainer.args.optim == "adamw_torch_fused"
        products.clear()
        loss = trainer.evaluate()["eval_loss"]
        assert products
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-5)


@torch.no_grad()
def test_other_types_and_autocast_multiply_plainly(products):
    layer = nn.Linear(8, 8)
    with packed_weights(layer):
        with pytest.raises(RuntimeError, match="same dtype"):
            layer(torch.randn(2, 8, dtype=torch.float64))
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(2, 8)).dtype == torch.bfloat16
    assert not products


def test_gradients_flow_through_packed_layers(products):
    layer = nn.Linear(8, 8).train()
    x = torch.randn(2, 8)
    with packed_weights(layer):
        layer(x).sum().backward()
        assert layer.weight.grad.abs().sum() > 0 and not products
        layer.requires_grad_(False)
        y = x.clone().requires_grad_()  # a frozen head under a drafter in training
        layer(y).sum().backward()
        assert y.grad.abs().sum() > 0 and not products
        layer(x)
        assert len(products) == 1


def test_unsupported_layers_are_not_packed(monkeypatch, caplog):
    class Own(nn.Linear):
        pass

    moved = nn.Linear(8, 8)
    moved.forward = lambda x: x  # as accelerate's hooks do
    with torch.inference_mode():
        uncounted = nn.Linear(8, 8)
    emptied = nn.Linear(8, 8)
    emptied.weight.data = torch.empty(0)
    unsupported = (
        Own(8, 8),
        moved,
        uncounted,
        emptied,
        nn.Linear(8, 8).double(),
        nn.Linear(8, 8, device="meta"),
        nn.ReLU(),
    )
    assert not any(map(packable, unsupported))
    with caplog.at_level(logging.WARNING, "dflash_hf"):
        packed_weights(*unsupported)
    assert "can be packed" in caplog.text and "units" not in caplog.text
    assert packable(nn.Linear(8, 8))
    monkeypatch.setattr(packing, "MIN_FP32_WEIGHTS", 65)
    assert not packable(nn.Linear(8, 8)) and packable(nn.Linear(9, 8))
    monkeypatch.setattr(packing, "_linear", None)  # a PyTorch without oneDNN
    assert not packable(nn.Linear(9, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_emulated_dtype_is_warned_of_once(dtype, pair, caplog, monkeypatch):
    for module in (cpu_dtypes, packing):
        monkeypatch.setattr(module, "is_emulated", lambda dtype: dtype != torch.float32)
    target, draft = (model.to(dtype) for model in pair)
    with caplog.at_level(logging.WARNING, "dflash_hf"), packed_weights(target, draft):
        target.generate(prompt(9), assistant_model=draft, max_new_tokens=4, do_sample=False)
    remedy = f'no hardware support for {str(dtype)[6:]}: .* Load target and drafter with dtype="float32"'
    assert len(re.findall(remedy, caplog.text)) == (dtype != torch.float32)


@pytest.mark.parametrize(
    ("arguments", "tokens", "message"),
    [((), 16, r"but got \[\]"), (("target",), 16, r"\['str'\]"), ((nn.ReLU(),), 0, "tokens=0")],
)
def test_wrong_packing_arguments_are_refused(arguments, tokens, message):
    with pytest.raises(ValueError, match=message):
        packed_weights(*arguments, tokens=tokens)


# ------------------------------------------------------------------------------------------------- changing weights

OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def stepped(layer, optimizer, **options) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer([layer.weight], lr=0.1, **options).step()
    layer.weight.grad = None


def frozen_after_a_step(layer) -> None:
    stepped(layer, torch.optim.AdamW, fused=True)
    layer.requires_grad_(False)


def stepped_by_a_copy(layer) -> None:
    """As DeepSpeed does: the optimizer has weights of its own, which are then copied without being counted."""
    own = nn.Linear(16, 16)
    stepped(own, torch.optim.AdamW, fused=True)
    layer.weight.data.copy_(own.weight)


CHANGES = {
    **{f"fused {kind.__name__}": lambda layer, kind=kind: stepped(layer, kind, fused=True) for kind in OPTIMIZERS},
    "foreach AdamW": lambda layer: stepped(layer, torch.optim.AdamW, foreach=True),
    "a step, then frozen": frozen_after_a_step,
    "a step of a copy": stepped_by_a_copy,
    "in place": lambda layer: layer.weight.add_(1.0),
    "in inference mode": torch.inference_mode()(lambda layer: layer.weight.add_(1.0)),
    "by an optimizer": lambda layer: torch._foreach_add_([layer.weight], [torch.ones_like(layer.weight)]),
    "a view of it": lambda layer: layer.weight[3].mul_(2.0),
    "loaded": lambda layer: layer.load_state_dict(nn.Linear(16, 16).state_dict()),
    "other data": lambda layer: setattr(layer.weight, "data", torch.randn(16, 16)),
    "uncounted data": lambda layer: setattr(layer.weight, "data", torch.inference_mode()(torch.randn)(16, 16)),
    "transposed": lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),
    "other data twice": lambda layer: [setattr(layer.weight, "data", torch.randn(16, 16)) for _ in range(2)],
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(16, 16))),
    "assigned": lambda layer: layer.load_state_dict(nn.Linear(16, 16).state_dict(), assign=True),
    "cast": lambda layer: layer.double().weight.mul_(2.0),
    "cast and back": lambda layer: layer.to(torch.bfloat16).float(),  # a little coarser now
}


IN_A_GRAPH = ("fused AdamW", "a step of a copy", "in place", "other data", "another parameter", "cast and back")


@pytest.mark.parametrize(
    ("change", "graph"), [(change, False) for change in CHANGES] + [(change, True) for change in IN_A_GRAPH]
)
@torch.no_grad()
def test_next_product_sees_a_changed_weight(change, graph, fresh_compiler):
    layer = nn.Linear(16, 16)
    multiply = torch.compile(layer, backend="aot_eager", fullgraph=True) if graph else layer
    x = torch.randn(3, 16)
    with packed_weights(layer):
        before = multiply(x).clone()
        CHANGES[change](layer)
        x = x.to(layer.weight.dtype)
        after = multiply(x)
        torch.testing.assert_close(after, nn.functional.linear(x, layer.weight, layer.bias))
        assert not torch.allclose(after.float(), before, atol=1e-5)
    assert are_plain(layer)


UNCOUNTED = {
    "through data": lambda weight: weight.data.add_(0.01),
    "through numpy": lambda weight: weight.detach().view(torch.int16).numpy().__iadd__(1),
}


@pytest.mark.parametrize("change", UNCOUNTED)
@torch.no_grad()
def test_only_a_new_call_sees_uncounted_changes(change):
    """As documented: merging an adapter by `weight.data += delta` is not counted."""
    layer = nn.Linear(48, 32, bias=False)
    x = torch.randn(3, 48)
    first = packed_weights(layer)
    expected = layer(x)
    UNCOUNTED[change](layer.weight)
    assert torch.equal(layer(x), expected), "if this is seen by now, say so in the docstring"
    second = packed_weights(layer)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight))
    assert len(packing._packs) == 1
    first.restore()
    assert type(layer) is PackedLinear
    second.restore()
    assert are_plain(layer)


def test_weights_of_any_shape_are_packed():
    """Rows that are no multiple of 8 bytes, and a row of a larger matrix."""
    odd = nn.Linear(7, 8)
    part = nn.Linear(8, 1, bias=False)
    part.weight = nn.Parameter(torch.randn(3, 9)[:1, :8])  # contiguous, and rows would lie 9 apart
    for layer in (odd, part):
        x = torch.randn(2, layer.in_features)
        with torch.no_grad(), packed_weights(layer) as packed:
            assert packed.layers == [layer]
            torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@torch.no_grad()
def test_shared_weight_is_packed_once(packings):
    """Two layers with one weight, and two calls; the last that is restored unpacks."""
    first = nn.Linear(16, 16)
    second = nn.Linear(16, 16)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    x = torch.randn(3, 16)
    expected = model(x)
    outer = packed_weights(model)
    model(x)
    assert len(packing._packs) == 1
    with packed_weights(second, model), packed_weights(first):
        torch.testing.assert_close(model(x), expected)
    assert type(first) is type(second) is PackedLinear and len(packing._packs) == 1
    count = len(packings)
    model(x)
    assert len(packings) == count
    outer.restore()
    outer.restore()
    assert are_plain(model) and torch.equal(model(x), expected)


# ----------------------------------------------------------------------------------------------------- life and copies


def test_packed_copy_is_freed_with_its_layer():
    layer = nn.Linear(8, 8)
    packed_weights(layer)  # for good: nobody keeps what it returns
    assert type(layer) is PackedLinear and len(packing._packs) == 1
    del layer
    gc.collect()
    assert not packing._packs and not len(packing._owners)


def test_unpacking_frees_memory_at_once():
    """Without the garbage collector: the copies are as large as the models."""
    layer = nn.Linear(8, 8)
    gc.disable()
    try:
        with packed_weights(layer):
            (pack,) = packing._packs.values()
            copies = [pack.packed_copy.tensor]
            del pack
        assert not packing._packs
        assert gc.get_referrers(copies[0]) == [copies]
    finally:
        gc.enable()


def test_interrupted_packing_restores_all_layers(pair, monkeypatch):
    target, _ = pair
    pack = packing._packed_copy_of
    count = []

    def interrupted(*args):
        count.append(1)
        if len(count) == 5:
            raise KeyboardInterrupt
        return pack(*args)

    with packed_weights(target.lm_head):
        monkeypatch.setattr(packing, "_packed_copy_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            packed_weights(target)
        assert type(target.lm_head) is PackedLinear and len(packing._packs) == 1  # as before
    assert are_plain(target)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_are_plain(pair, how):
    target, _ = pair
    expected = decode(target, prompt(7))
    with packed_weights(target):
        layer = how(target.lm_head)
        twin = how(target)
        assert type(layer) is nn.Linear and vars(layer).keys() == vars(target.lm_head).keys()
        if how is not copy.copy:  # which shares the layers
            assert all(type(module) is nn.Linear for module in linear_layers(twin))
        assert torch.equal(decode(twin, prompt(7)), expected)
        with packed_weights(twin):
            assert torch.equal(decode(twin, prompt(7)), expected)
    assert are_plain(target, twin)


def test_packed_model_is_saved_unpacked(pair, tmp_path):
    target, draft = pair
    plain = {name: value.clone() for name, value in target.state_dict().items()}
    with packed_weights(target, draft):
        packed = target.state_dict()
        assert packed.keys() == plain.keys() and all(torch.equal(packed[name], plain[name]) for name in plain)
        target.save_pretrained(tmp_path / "target")
        draft.save_pretrained(tmp_path / "draft")
        torch.save(target, tmp_path / "whole.pt")
    again = type(target).from_pretrained(tmp_path / "target")
    twin = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    assert torch.equal(decode(again, prompt(7), twin), decode(target, prompt(7)))
    assert are_plain(torch.load(tmp_path / "whole.pt", weights_only=False))


# ------------------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, True), (torch.bfloat16, False)])
def test_packed_target_decodes_alone_and_drafted(dtype, tied, products, caplog):
    target = make_target(dtype=dtype, tie_word_embeddings=tied)
    draft = make_draft(target)
    prompts = [prompt(5), torch.cat([prompt(30), prompt(30) + 1])]
    plain = [decode(target, ids) for ids in prompts]
    with caplog.at_level(logging.WARNING), packed_weights(target, draft) as packed:
        assert set(packed.layers) == set(linear_layers(target, draft))
        assert (target.lm_head.weight is target.get_input_embeddings().weight) == tied
        for ids, expected in zip(prompts, plain, strict=True):
            products.clear()
            alone = decode(target, ids)
            # The first of the 16 is from the prompt's forward. In fp32 single tokens, and so its logits, are not
            # multiplied by packed weights.
            single = dtype == torch.float32 and len(ids) == 1
            layers = len(linear_layers(target))
            assert len(products) == (layers - 1 if single else 16 * layers)
            drafted = decode(target, ids, draft)
            if dtype == torch.float32:  # in half precision single tokens may differ
                assert torch.equal(alone, expected) and torch.equal(drafted, expected)
            assert drafted.shape == expected.shape
    assert are_plain(target, draft) and (dtype != torch.float32 or not caplog.records)


# ------------------------------------------------------------------------------------------------------------- threads


def test_threads_decode_while_others_pack(pair, products):
    target, draft = pair
    ids = [prompt(5), prompt(11)]
    expected = [decode(target, each) for each in ids]
    busy = [True, True]

    def work(which, drafter):
        try:
            for _ in range(4):
                assert torch.equal(decode(target, ids[which], drafter), expected[which])
        finally:
            busy[which] = False

    def pack():
        while any(busy):
            with packed_weights(target, draft), packed_weights(target):
                copy.deepcopy(draft)

    assert at_once(lambda: work(0, None), lambda: work(1, draft), pack, pack) == [None] * 4
    assert products and are_plain(target, draft)


@torch.no_grad()
def test_packing_waits_for_another_compilation(products, fresh_compiler):
    """Dynamo raised "Guard failed on the same frame", or guarded a plain graph as if the layer had been packed."""
    layer = nn.Linear(16, 16)
    x = torch.randn(3, 16)
    expected = layer(x)
    threads = [threading.Thread(target=packed_weights, args=(layer,))]

    def backend(graph, inputs):
        if threads[0].ident is None:
            threads[0].start()
            threads[0].join(0.3)
            assert threads[0].is_alive() and type(layer) is nn.Linear
        return graph.forward

    multiply = torch.compile(layer, backend=backend, fullgraph=True)
    assert torch.equal(multiply(x), expected)
    threads[0].join()
    assert not products and type(layer) is PackedLinear
    torch.testing.assert_close(multiply(x), expected)
    assert products


def test_models_are_packed_where_copies_fit(monkeypatch):
    from types import SimpleNamespace

    import psutil

    from dflash_hf.pairs.packing_choice import pack_if_chosen

    def free(memory: int, packed=None) -> bool:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory))
        model = nn.Sequential(nn.Linear(1024, 1024, dtype=torch.float32))
        done = pack_if_chosen(packed, model, None)
        assert done == isinstance(model[0], PackedLinear)
        return done

    assert free(13 * 2**20) and not free(12 * 2**20)
    assert free(0, packed=True) and not free(2**40, packed=False)
    assert pack_if_chosen(None, nn.Sequential(nn.Embedding(9, 9))) is False
