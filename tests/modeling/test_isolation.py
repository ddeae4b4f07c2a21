"""Hooks and wrapped forwards of a target: all works as it does without a drafter, and no copy stays."""

import copy
import functools
import gc

import pytest
import torch
from support.pairs import make_draft, make_target
from support.scripted_text import PROMPT, drafted, drafter, text
from torch import nn

from dflash_hf.modeling import probe_dflash


@pytest.mark.parametrize("compiled", [False, "eager"])
def test_hooks_that_know_modules_by_their_identity(compiled):
    """One hook on every layer that changes one of them; one that looks names up."""
    target, seen = make_target(), set()
    layers, names = target.model.layers, {module: name for name, module in target.named_modules()}
    plain = text(target)
    for module in target.modules():
        module.register_forward_hook(lambda module, *_: seen.add(names[module]))
    for layer in layers:
        layer.register_forward_hook(lambda layer, _, output: output * 1.5 + 1 if layer is layers[2] else None)
    target.register_forward_pre_hook(lambda module, *_: seen.add(module is target), with_kwargs=True)
    assert text(target) != plain
    known = set(seen)
    draft = drafter(target)
    draft.decoding_config.compile = compiled
    seen.clear()
    drafted(target, draft)
    assert seen == known >= {True, "", "model.layers.2"}


@pytest.mark.parametrize("known", [False, True])
def test_hooks_that_remove_themselves_are_called_once(known):
    """By a call; they are there again after the target was tried out with them."""
    target = make_target()
    draft, calls = make_draft(target), []

    def once(module, args, output):
        calls.append(module)
        handle.remove()
        return output + 5.0

    def written(draft):
        nonlocal handle
        handle = target.model.layers[0].register_forward_hook(once)
        return text(target, draft)[0]

    handle = None
    if known:
        text(target, draft)
    assert written(draft) == written(None) != text(target)[0]
    calls.clear()
    assert written(draft) == written(None)
    assert calls == [target.model.layers[0]] * 2


def test_hooks_and_forwards_find_what_the_other_has_stored():
    """A hook reads what the forward has left on a layer, and sets what the next forward takes."""

    class Gated(type(make_target().model.layers[0])):
        gate, turns = 1.0, 0

        def forward(self, *args, **kwargs):
            self.turns = self.turns + 1
            self.size = args[0].shape[1]
            return super().forward(*args, **kwargs) * self.gate

    target, sizes = make_target(), []
    for layer in target.model.layers:
        layer.__class__ = Gated

    def set_gate(layer, args, output):
        sizes.append((layer.turns, layer.size))
        layer.gate = 1.5

    target.model.layers[2].register_forward_hook(set_gate)
    text(target)
    drafted(target, drafter(target))
    assert [turn for turn, _ in sizes] == list(range(1, len(sizes) + 1))
    assert {size for _, size in sizes} >= {1, 6, PROMPT.shape[1]}


def wrapped(module) -> None:
    """As whoever times or logs a forward replaces it."""
    forward, calls = module.forward, 0

    @functools.wraps(forward)
    def counting(*args, **kwargs):
        nonlocal calls
        calls += 1
        counting.calls = calls
        return forward(*args, **kwargs)

    module.forward = counting


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ["", "model", "model.layers.0", "model.layers.0.linear_attn"])
def test_forwards_that_were_wrapped_in_a_function(name, first):
    """Before and after the first drafted call; the function calls the copy, and its own variables stay its own."""
    target = make_target("qwen3_5_text", dtype=torch.float64)
    draft = drafter(target)
    if not first:
        drafted(target, draft)
    module = target.get_submodule(name)
    wrapped(module)
    wrapped(module)  # twice
    before = module.forward
    drafted(target, draft)
    assert module.forward is before
    counts = [cell.cell_contents for cell in before.__closure__ if isinstance(cell.cell_contents, int)]
    assert counts[0] > 24


def in_a_closure(module):
    original = module.forward

    def forward(*args, **kwargs):
        return original(*args, **kwargs)

    return forward


def in_a_global(module):
    """As in a notebook."""
    space = {"original": module.forward}
    exec("def forward(*args, **kwargs):\n    return original(*args, **kwargs)", space)
    return space["forward"]


def in_a_default(module):
    def forward(*args, original=module.forward, **kwargs):
        return original(*args, **kwargs)

    return forward


class Calling:
    def __init__(self, module):
        self.original = module.forward

    def __call__(self, *args, **kwargs):
        return self.original(*args, **kwargs)


# Each way in each place, each of both before the first call and after it.
REPLACED = [
    (name, way, (i + j) % 2 == 0)
    for i, way in enumerate((in_a_closure, in_a_global, in_a_default, Calling))
    for j, name in enumerate(("", "model", "model.layers.1"))
]


@pytest.mark.parametrize(("name", "way", "first"), REPLACED)
def test_forwards_that_were_replaced_without_a_word(name, way, first):
    """
    What was known of a target was known of its forward: without `functools.wraps` it takes no positions, and counts
    columns. Where its original is, the copies may not be called; then it decodes plainly.
    """
    target = make_target()
    draft = drafter(target)
    if not first:
        drafted(target, draft)
    module = target.get_submodule(name)
    module.forward = way(module)
    ids, mask = PROMPT.repeat(2, 1), torch.ones(2, 10, dtype=torch.long)
    ids[1, :4], mask[1, :4] = 0, 0
    for inputs in ({"prompt": ids, "attention_mask": mask}, {}):
        written, lengths = text(target, draft, **inputs)
        assert written == text(target, **inputs)[0]
        followed = way is in_a_closure or "layers" in name
        assert bool(lengths[0]) == followed and (not followed or name == "" or max(lengths[0]) > 3)


@pytest.mark.parametrize("name", ["", "model"])
def test_a_hook_that_drops_the_positions_later(name):
    target = make_target()
    draft = drafter(target)
    drafted(target, draft)
    ids, mask = PROMPT.repeat(2, 1), torch.ones(2, 10, dtype=torch.long)
    ids[1, :4], mask[1, :4] = 0, 0

    def drop(module, args, kwargs):
        return args, {**kwargs, "position_ids": None}

    target.get_submodule(name).register_forward_pre_hook(drop, with_kwargs=True)
    expected = text(target, prompt=ids, attention_mask=mask)[0]
    assert text(target, draft, prompt=ids, attention_mask=mask)[0] == expected


def steer(module, args, output):
    return torch.cat([output[:, :-1], output[:, -1:] * 2.0 + 1.0], dim=1)


def steer_before(module, args, kwargs):
    return (steer(module, (), args[0]), *args[1:]), kwargs


HOOKED = {
    "layer": lambda t: t.model.layers[1].register_forward_hook(steer),
    "before a layer": lambda t: t.model.layers[2].register_forward_pre_hook(steer_before, with_kwargs=True),
    "head": lambda t: t.lm_head.register_forward_hook(lambda m, a, o: o if o.shape[1] > 1 else o.flip(-1)),
    "prompt": lambda t: t.model.layers[1].register_forward_hook(lambda m, a, o: o * 2 if o.shape[1] > 1 else o),
}


@pytest.mark.parametrize("hook", HOOKED)
def test_a_hook_of_some_positions_only_comes_and_goes(hook):
    """The text then depends on how many tokens a forward reads; targets that were known before wrote another one."""
    target = make_target()
    draft = drafter(target)
    drafted(target, draft)
    for _ in range(2):
        handle = HOOKED[hook](target)
        assert text(target, draft)[0] == text(target)[0]
        handle.remove()
        drafted(target, draft)


def test_a_wrapper_that_comes_and_goes_is_tried_out_once(monkeypatch):
    """A wrapper of the same code is the same target: what a call costs that is timed, and then not."""
    target, tried, found = make_target(), [], probe_dflash._Trial.found
    draft = drafter(target)
    probe_dflash._alike.clear()
    monkeypatch.setattr(probe_dflash._Trial, "found", lambda trial: tried.append(1) or found(trial))
    for _ in range(3):
        drafted(target, draft)
        target.forward = in_a_closure(target)
        drafted(target, draft)
        del target.forward
    assert len(tried) == 2


@pytest.mark.usefixtures("packs_of_any_size")
@pytest.mark.parametrize("packed", [False, True])
def test_a_first_forward_that_lists_hidden_states(packed):
    """It registers hooks, of which a drafted call must leave each where it belongs."""
    target = make_target(attn="eager")
    draft = drafter(target)
    draft.decoding_config.packed = packed
    expected = copy.deepcopy(target)(PROMPT, output_hidden_states=True, output_attentions=True)
    for _ in range(2):
        target.generate(
            PROMPT,
            max_new_tokens=32,
            assistant_model=draft,
            return_dict_in_generate=True,
            output_hidden_states=True,
        )
        found = target(PROMPT, output_hidden_states=True, output_attentions=True)
        assert len(expected.hidden_states) == len(found.hidden_states) == 5
        assert all(
            map(torch.equal, found.hidden_states + found.attentions, expected.hidden_states + expected.attentions)
        )


def test_copies_are_garbage_at_once():
    """Also those whose forward knows them."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    def modules() -> int:
        return sum(isinstance(thing, nn.Module) for thing in gc.get_objects())

    target = make_target()
    draft = make_draft(target).train()
    for module in (target, target.model.layers[0]):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    wrapped(target.model.layers[2])
    target.model.layers[2].register_forward_hook(lambda *_: None)
    text(target, draft)
    gc.collect()
    gc.disable()
    try:
        before = modules()
        text(target, draft)
        assert modules() == before
    finally:
        gc.enable()
