"""Calls inside, beside and before one another: each writes what the target writes alone, and leaves nothing behind."""

import asyncio
import contextvars
import copy
import io
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.scripted_draft import features_of
from support.stress_calls import (
    BLOCK_SIZE,
    PLAIN,
    TARGETS,
    Call,
    Collected,
    Pair,
    StopAfter,
    Turns,
    Window,
    at_once,
    shape_of,
)
from transformers import StoppingCriteriaList

from dflash_hf.modeling.target_dflash import raw_embedding


KNOWN: dict[tuple, Pair] = {}
NAMES = ("greedy", "batch", "penalty")


@pytest.fixture
def pair_of():
    """Pairs, made once, and a look at them when the test is over."""
    used = {}

    def get(family: str, seed: int = 0) -> Pair:
        if (family, seed) not in KNOWN:
            KNOWN[family, seed] = Pair.of(family, seed, names=NAMES)
        pair = KNOWN[family, seed]
        used[family, seed] = pair, shape_of(*pair.models)
        return pair

    yield get
    for (family, seed), (pair, before) in used.items():
        if shape_of(*pair.models) != before:
            KNOWN.pop((family, seed), None)
            raise AssertionError(f"{family}: a call left something behind")


def greedy(target, draft, call: Call, **more):
    """Text and acceptance lengths; without a drafter, the text."""
    output = call(target, draft, return_dict_in_generate=True, **more)[0]
    return output.sequences.tolist(), getattr(output, "acceptance_lengths", None)


def alone(pair: Pair, way: str, name: str):
    """What `greedy` must give: the target's text, and how drafts are accepted when nothing else runs."""
    text, lengths = greedy(pair.target, pair.drafts[way], pair.call(name))
    assert text == pair.call(name).expected.tolist()
    assert pair.family in PLAIN or max(lengths[0]) > 3, "drafts that are never accepted prove nothing"
    return text, lengths


def raised(results: list) -> list:
    return [repr(result) for result in results if isinstance(result, BaseException)]


@pytest.mark.parametrize("family", TARGETS)
def test_calls_take_turns_inside_their_forwards(family, pair_of):
    """Two drafted calls and a plain one; threads change in the middle of each layer, as a seed says."""
    pair, turns = pair_of(family), Turns(0, often=0.6)
    expected = [alone(pair, "block", "greedy"), alone(pair, "tree", "batch"), pair.call("penalty").expected.tolist()]
    with turns.inside():
        results = turns.run(
            lambda: greedy(pair.target, pair.drafts["block"], pair.call("greedy")),
            lambda: greedy(pair.target, pair.drafts["tree"], pair.call("batch")),
            lambda: greedy(pair.target, None, pair.call("penalty"))[0],
        )
    assert not raised(results), raised(results)
    assert results == expected and turns.changes > 20


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_first_calls_of_a_target_take_turns(family):
    """How a target is rolled back is found out by its first call: not by what another call made of it."""
    expected = alone(Pair.of(family, names=NAMES), "block", "greedy")
    fresh, turns = Pair.of(family, names=NAMES), Turns(1)
    with turns.inside():
        results = turns.run(*[lambda: greedy(fresh.target, fresh.drafts["block"], fresh.call("greedy"))] * 4)
    assert not raised(results), raised(results)
    assert results == [expected] * 4
    assert alone(fresh, "block", "greedy") == expected, "what a race decided was remembered"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_models_of_several_pairs_take_turns(family, pair_of):
    """Two drafters of one target, and two targets of one drafter."""
    pair, other = pair_of(family), pair_of(family, seed=1)
    call = pair.call("greedy")
    # The drafter does not know the texts of the other target, whose shape is the same.
    theirs, draft = other.call("greedy"), pair.drafts["block"]
    expected = [*(alone(pair, way, "greedy") for way in ("block", "tree")), greedy(other.target, draft, theirs)]
    assert expected[2][0] == theirs.expected.tolist()
    turns = Turns(0)
    with turns.inside():
        results = turns.run(
            *[lambda way=way: greedy(pair.target, pair.drafts[way], call) for way in ("block", "tree")],
            lambda: greedy(other.target, draft, theirs),
        )
    assert results == expected


CASES = [
    (family, place, False) for family in ("qwen3", "gemma3", "qwen3_5_text") for place in ("streamer", "criterion")
]


@pytest.mark.parametrize(("family", "place", "compiled"), [*CASES, ("qwen3", "streamer", "eager")])
def test_calls_run_inside_a_call(family, place, compiled, pair_of):
    """A drafted one, a plain one, and a forward of the target."""
    pair, inside = pair_of(family), []
    target, draft, other = pair.target, pair.drafts["block"], pair.call("batch")

    def nested(step: int) -> None:
        if step in (2, 5):
            inside.append(greedy(target, draft if step == 2 else None, other)[0])
        elif step == 13:
            target(other.expected)

    own = {"streamer": Collected(nested)}
    if place == "criterion":
        own = {"stopping_criteria": StoppingCriteriaList([StopAfter(100, nested)])}
    draft.decoding_config.compile = compiled
    try:
        expected = alone(pair, "block", "greedy")
        assert greedy(target, draft, pair.call("greedy"), **own) == expected
    finally:
        draft.decoding_config.compile = False
        torch._dynamo.reset()
    assert inside == [other.expected.tolist()] * 2


def test_calls_run_in_a_thread_pool_of_asyncio(pair_of):
    """`asyncio.to_thread` and servers built on it give each thread a copy of the caller's context."""
    pairs = [pair_of("qwen3"), pair_of("qwen3_5_text")]
    work = [
        (pair, draft, call)
        for call in NAMES
        for pair in pairs
        for draft in (None, pair.drafts["block"], pair.drafts["tree"])
    ]

    async def serve():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        answers = [asyncio.to_thread(greedy, pair.target, draft, pair.call(call)) for pair, draft, call in work]
        return await asyncio.gather(*answers, return_exceptions=True)

    results = asyncio.run(serve())
    assert not raised(results), raised(results)
    assert [text for text, _ in results] == [pair.call(call).expected.tolist() for pair, _, call in work]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_copied_contexts_are_no_part_of_a_call(family, pair_of):
    """A streamer hands its context to another thread: a copied context is no sign of whose forward it is."""
    pair, turns, copied = pair_of(family), Turns(0), []
    expected = alone(pair, "block", "greedy")

    def hand_over(step):
        if step == 3:
            copied.append(contextvars.copy_context())

    def other(draft):
        deadline = time.monotonic() + 30
        while not copied and time.monotonic() < deadline:
            turns.change(always=True)
        return copied[0].copy().run(greedy, pair.target, draft, pair.call("batch"))[0]

    with turns.inside():
        results = turns.run(
            lambda: greedy(pair.target, pair.drafts["block"], pair.call("greedy"), streamer=Collected(hand_over)),
            lambda: other(None),
            lambda: other(pair.drafts["tree"]),
        )
    assert not raised(results), raised(results)
    assert results == [expected] + [pair.call("batch").expected.tolist()] * 2


def forked(function) -> bool:
    """Whether a function is true in a child of this process, within half a minute."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if function() else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("thread", ["the same thread", "another thread"])
def test_a_forked_worker_generates_beside_its_parent(thread, pair_of):
    pair = pair_of("qwen3_5_text")
    expected, answers = alone(pair, "block", "greedy"), []
    call, draft = pair.call("greedy"), pair.drafts["block"]
    arrived, go_on = threading.Event(), threading.Event()

    def answer():
        return forked(lambda: greedy(pair.target, draft, call) == expected)

    def meanwhile(step):
        if step == 5 and thread == "the same thread":
            answers.append(answer())
        elif step == 5:
            arrived.set()
            go_on.wait(40)

    def waiting():
        assert arrived.wait(60)
        answers.append(answer())
        go_on.set()
        return expected

    parent = [lambda: greedy(pair.target, draft, call, streamer=Collected(meanwhile))]
    results = at_once(*parent, *([waiting] if thread == "another thread" else []))
    assert not raised(results), raised(results)
    assert answers == [True] and results[0] == expected


def saved_whole(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("how", [copy.deepcopy, pickled, saved_whole])
def test_copies_made_during_a_call_decode(how, pair_of, monkeypatch):
    """Of target and drafter, from a streamer and in the middle of a forward."""
    pair = pair_of("qwen3_5_text")
    call, draft = pair.call("greedy"), pair.drafts["block"]
    expected, copies, looks = alone(pair, "block", "greedy"), [], []

    def look(*_):
        looks.append(1)
        if len(looks) in (1, 30):  # the prompt's forward, and a verification
            copies.append((how(pair.target), how(draft)))

    def put(step):
        if step == 9:
            copies.append((how(pair.target), how(draft)))

    monkeypatch.setattr(Window, "look", look)
    assert greedy(pair.target, draft, call, streamer=Collected(put)) == expected
    monkeypatch.setattr(Window, "look", None)
    assert len(copies) == 3
    for models in copies:
        assert greedy(*models, call) == expected == greedy(*models, call, prefill_chunk_size=2)
        assert greedy(models[0], None, call)[0] == expected[0]


@pytest.mark.parametrize("wrong", [None, "feature", "position"])
def test_recognising_drafters_depend_on_their_context(wrong):
    """It says the text only where all that it was given is right, or a mixed-up context would not be noticed above."""
    pair = Pair.of("qwen3", names=NAMES)
    draft, text = pair.drafts["block"], pair.call("greedy").expected[0]
    features = features_of(pair.target, text[:20], draft.config.target_layer_ids)
    positions = torch.arange(20 + BLOCK_SIZE)[None] + (wrong == "position")
    if wrong == "feature":
        features[:, 7] = features[:, 6]
    block = torch.tensor([[text[20]] + [draft.config.mask_token_id] * (BLOCK_SIZE - 1)])
    hidden = draft(raw_embedding(pair.target, block), features, position_ids=positions).last_hidden_state[:, 1:]
    drafted = draft.draft_logits(hidden, pair.target.lm_head).argmax(dim=-1)[0]
    agreed = int((drafted == text[21 : 20 + BLOCK_SIZE]).sum())
    assert agreed == 0 if wrong else agreed >= BLOCK_SIZE - 2
