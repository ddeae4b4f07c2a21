"""
A drafter that sees only the last tokens of a text, and the first: a draft that sees one token more, or fewer, is not
recognised, and nothing is accepted. What is drafted within a window is tested in `test_same_text.py`.
"""

import copy
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.calls import Call
from support.heads import opened
from support.rows import ragged_prompts
from support.scripted_draft import recognising
from transformers import DynamicCache

from dflash_hf.decoding.draft_context import KEPT_CONTEXTS, KeptContext, KeptContexts
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.modeling.candidates_dflash import CACHE_NAME


def known_text(target, rows: int, longest: int, window: int):
    """A call, its text, and a drafter with a window that knows the text."""
    options = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    call = Call(target, *ragged_prompts(rows, longest), options)
    text = call().sequences
    assert len(set(text[:, longest:].flatten().tolist())) > 12, "a constant text proves nothing"
    return call, text, recognising(target, call.texts(text), window=window)


def test_another_window_is_not_recognised(target):
    """The test of the tests: one token more or fewer, and drafts are rejected."""
    call, text, draft = known_text(target, 1, 40, window=11)
    for window in (10, 11, 12, None):
        draft.decoding_config.window = window
        drafted = call(draft)
        assert torch.equal(drafted.sequences, text) and (max(drafted.lengths[0]) > 3) == (window == 11)


@pytest.mark.parametrize(("longest", "window"), [(130, 13), (40, 1), (40, 500)])
def test_text_may_be_far_longer_than_the_window(longest, window, target):
    call, text, draft = known_text(target, 2, longest, window)
    for nodes in (None, 9):
        draft.decoding_config.tree_nodes = nodes
        drafted = call(draft)
        assert torch.equal(drafted.sequences, text)
        for lengths in drafted.lengths:
            assert sum(lengths) == 59 and 59 / len(lengths) > 2 and min(lengths) < max(lengths)


@pytest.mark.parametrize("window", [1, 12, 100])
def test_features_outside_the_window_do_not_matter(window, target):
    """A block sees the features of the first four tokens and of the window before it, and no others."""
    draft = recognising(target, [torch.arange(40)], window=window)
    features = torch.randn(1, 40, draft.fc.in_features, generator=torch.Generator().manual_seed(0))
    blocks = []
    for changed in (None, 3, 4, 39 - window, 40 - window):
        mine = features.clone()
        if changed is not None and changed >= 0:
            mine[:, changed] += 5.0
        blocks.append(opened(draft, target, mine).hidden_states(torch.tensor([5])))
    whole, sink, between, before, first = blocks
    assert window > 40 or torch.equal(whole, between) and torch.equal(whole, before)
    assert not torch.allclose(whole, sink) and (window > 40 or not torch.allclose(whole, first))


def test_window_is_the_longest_text_learned_from(target):
    """By itself; a drafter that does not know sees all, and so does one that is told to."""
    call, text, draft = known_text(target, 1, 40, window=11)
    of_all = recognising(target, call.texts(text))
    for drafter, trained_length, window, accepts in (
        (draft, 11, "trained", True),
        (draft, None, "trained", False),
        (of_all, 11, "trained", False),
        (of_all, None, "trained", True),
        (of_all, 11, None, True),
    ):
        drafter.config.trained_length = trained_length
        drafter.decoding_config.window = window
        drafted = call(drafter)
        assert torch.equal(drafted.sequences, text) and (max(drafted.lengths[0]) > 3) == accepts


@pytest.mark.parametrize(
    ("length", "cut", "fits"), [(60, 10, True), (60, 40, True), (300, 60, True), (300, 90, False)]
)
def test_ring_continues_after_a_cut_conversation(length, cut, fits, target):
    """A conversation that lost its last tokens: a ring still has those before, but for what they overwrote."""
    features = torch.randn(1, 310, 3 * target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    draft = recognising(target, [torch.arange(40)], window=20)
    features = features[..., : draft.fc.in_features]
    offset = torch.zeros(1, 1, dtype=torch.long)
    cache = DynamicCache()

    def read(start: int, stop: int, continued=None) -> DraftSession:
        drafter = DraftSession(draft, target)
        drafter.context.append(features[:, start:stop])
        drafter.context.prefill([0], stop, offset, continued)
        return drafter

    drafter = read(0, length)
    anchor = torch.tensor([7])
    drafter.hidden_states(anchor)  # a block takes slots past the text
    drafter.context.keep_for(cache)
    after = read(length - cut, length - cut + 3, cache)
    expected = read(0, length - cut + 3)
    same = torch.allclose(after.hidden_states(anchor), expected.hidden_states(anchor), atol=1e-5)
    assert (after.context.first_index == 0) == fits == same


def test_contexts_are_freed_with_their_caches(target):
    """Slots and their layers refer to each other: without a garbage collector, each output would keep a context."""
    draft = recognising(target, [torch.arange(40)], window=None)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            output = target.generate(
                torch.arange(2, 30)[None], assistant_model=draft, max_new_tokens=8, return_dict_in_generate=True
            )
            (context,) = KEPT_CONTEXTS.of_cache(getattr(output, CACHE_NAME))
            buffer = weakref.ref(context.cache.layers[0].keys)
            assert buffer() is not None
            del context, output
            assert buffer() is None
    finally:
        gc.enable()


def test_threads_share_kept_contexts():
    """Each context is taken once; looking at those of a cache while another thread took one was an error."""
    contexts = KeptContexts()
    caches = [DynamicCache() for _ in range(4)]
    drafts = [torch.nn.Identity() for _ in range(4)]
    taken = []

    def work(number: int) -> None:
        for step in range(400):
            cache = caches[step % len(caches)]
            context = KeptContext(first_index=number, length=step, pending=[])
            contexts.keep(cache, drafts[number], context)
            assert context in contexts.of_cache(cache)
            contexts.copy(cache, DynamicCache())
            taken.append(contexts.take(cache, drafts[number]))
            assert taken[-1] is context and contexts.take(cache, drafts[number]) is None

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(drafts)) as pool:
            list(pool.map(work, range(len(drafts))))
    finally:
        sys.setswitchinterval(interval)
    assert len({id(context) for context in taken}) == len(taken) == 1600
    assert not any(contexts.of_cache(cache) for cache in caches)


def test_moved_contexts_leave_their_cache():
    contexts = KeptContexts()
    draft = torch.nn.Identity()
    source = DynamicCache()
    destination = DynamicCache()
    context = KeptContext(first_index=0, length=0, pending=[])
    contexts.move(source, destination)  # nothing to move
    contexts.keep(source, draft, context)
    contexts.move(source, destination)
    assert contexts.take(source, draft) is None and contexts.take(destination, draft) is context


def test_context_that_failed_to_copy_can_be_freed(monkeypatch):
    """Its `__del__` raised: an attribute was missing that the copy had not reached."""
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)

    class Uncopyable:
        def __deepcopy__(self, memo):
            raise MemoryError

    context = KeptContext(first_index=0, length=0, pending=[Uncopyable()])
    with pytest.raises(MemoryError):
        copy.deepcopy(context)
    gc.collect()
    assert not errors


def test_context_in_another_dtype_is_not_continued(target):
    draft = recognising(target, [torch.arange(40)], window=None)
    options = {"assistant_model": draft, "max_new_tokens": 8, "return_dict_in_generate": True, "do_sample": False}
    output = target.generate(torch.arange(2, 30)[None], **options)
    draft.double()
    longer = torch.cat([output.sequences, torch.tensor([[5, 6]])], dim=1)
    cache = {CACHE_NAME: getattr(output, CACHE_NAME)}
    expected = target.generate(longer, max_new_tokens=8, do_sample=False)
    assert torch.equal(target.generate(longer, **options, **cache).sequences, expected)
