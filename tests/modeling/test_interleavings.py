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
from support.stress_calls import BLOCK_SIZE, PLAIN, TARGETS, Call, Collected, Pair, StopAfter, Turns, at_once, shape_of
from torch import nn
from transformers import StoppingCriteriaList
from transformers.utils import logging

from dflash_hf.modeling import probe_dflash
from dflash_hf.modeling.target_dflash import raw_embedding


ROUNDS: list[int] = []  # one entry for each compiled round of the backend below
IN_ROUND: list = []  # what is called in the middle of the next ones


@torch._dynamo.register_backend(name="counted")
def counted(graph, inputs):
    def run(*args):
        ROUNDS.append(1)
        if IN_ROUND:
            IN_ROUND.pop()()
        return graph.forward(*args)

    return run


class Window(nn.Module):
    """A module through which a test looks out of the middle of a forward; it can be copied."""

    look = None

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        if Window.look is not None:
            Window.look()
        return self.module(*args, **kwargs)


KNOWN: dict[tuple, Pair] = {}
NAMES = ("greedy", "batch", "penalty")


@pytest.fixture
def pair_of():
    """Pairs, made once, and a look at them when the test is over."""
    used = {}

    def get(family: str, seed: int = 0, fresh: bool = False) -> Pair:
        pair = Pair.of(family, seed, names=NAMES) if fresh or (family, seed) not in KNOWN else KNOWN[family, seed]
        if not fresh and (family, seed) not in KNOWN:
            layer = next(module for module in pair.target.modules() if isinstance(module, nn.ModuleList))[1]
            name = next(name for name in ("mlp", "mixer", "feed_forward") if hasattr(layer, name))
            setattr(layer, name, Window(getattr(layer, name)))
            KNOWN[family, seed] = pair
        used[family, seed, fresh] = pair, shape_of(*pair.models)
        return pair

    yield get
    for (family, seed, _), (pair, before) in used.items():
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
    """Two drafted calls and a plain one; threads change before any module, as a seed says."""
    pair, turns = pair_of(family), Turns(0)
    expected = [alone(pair, "block", "greedy"), alone(pair, "tree", "batch"), pair.call("penalty").expected.tolist()]
    with turns.inside(*pair.models):
        results = turns.run(
            lambda: greedy(pair.target, pair.drafts["block"], pair.call("greedy")),
            lambda: greedy(pair.target, pair.drafts["tree"], pair.call("batch")),
            lambda: greedy(pair.target, None, pair.call("penalty"))[0],
        )
    assert not raised(results), raised(results)
    assert results == expected and turns.changes > 50


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "mamba"])
def test_the_first_calls_of_a_target_take_turns(family, pair_of):
    """How a target is rolled back is found out by its first call: not by what another call made of it."""
    expected = alone(pair_of(family), "block", "greedy")
    fresh, turns = pair_of(family, fresh=True), Turns(1)
    probe_dflash._alike.clear()
    with turns.inside(fresh.target):
        results = turns.run(*[lambda: greedy(fresh.target, fresh.drafts["block"], fresh.call("greedy"))] * 4)
    assert not raised(results), raised(results)
    assert results == [expected] * 4
    assert alone(fresh, "block", "greedy") == expected, "what a race decided was remembered"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_two_drafters_of_one_target_and_two_targets_of_one_drafter(family, pair_of):
    pair, other = pair_of(family), pair_of(family, seed=1)
    call = pair.call("greedy")
    expected = [alone(pair, way, "greedy") for way in ("block", "tree")]
    turns = Turns(0)
    with turns.inside(pair.target):
        assert expected == turns.run(
            *[lambda way=way: greedy(pair.target, pair.drafts[way], call) for way in ("block", "tree")]
        )
    # The drafter does not know the texts of the other target, whose shape is the same.
    theirs, draft = other.call("greedy"), pair.drafts["block"]
    strange = greedy(other.target, draft, theirs)
    assert strange[0] == theirs.expected.tolist()
    turns = Turns(1)
    with turns.inside(pair.target, other.target, draft):
        results = turns.run(lambda: greedy(pair.target, draft, call), lambda: greedy(other.target, draft, theirs))
    assert results == [expected[0], strange]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5_text", "mamba"])
@pytest.mark.parametrize("place", ["streamer", "criterion"])
def test_calls_inside_a_call(place, family, pair_of):
    """A drafted one, a plain one, and a forward of the target."""
    pair, inside = pair_of(family), []
    target, draft, other = pair.target, pair.drafts["block"], pair.call("batch")
    expected = alone(pair, "block", "greedy")

    def nested(step: int) -> None:
        if step in (2, 5):
            inside.append(greedy(target, draft if step == 2 else None, other)[0])
        elif step == 13:
            target(other.expected)

    own = {"streamer": Collected(nested)}
    if place == "criterion":
        own = {"stopping_criteria": StoppingCriteriaList([StopAfter(100, nested)])}
    assert greedy(target, draft, pair.call("greedy"), **own) == expected
    assert inside == [other.expected.tolist()] * 2


@pytest.fixture(scope="module")
def compiled_pair():
    """A pair whose rounds are compiled, and have been."""
    torch._dynamo.reset()
    pair = Pair.of("qwen3", ways={"block": {"compile": "counted"}}, names=("greedy", "streamer", "batch"))
    before = shape_of(*pair.models)
    alone(pair, "block", "greedy")
    yield pair
    assert shape_of(*pair.models) == before
    torch._dynamo.reset()


def test_a_compiled_call_inside_a_compiled_call(compiled_pair):
    """The inner one has as many rows, so that it would use the same slots."""
    pair = compiled_pair
    call, other = pair.call("greedy"), pair.call("streamer")
    inside = []

    def nested(step):
        if step in (2, 9):
            inside.append(greedy(pair.target, pair.drafts["block"], other, streamer=None)[0])

    expected = alone(pair, "block", "greedy")
    assert greedy(pair.target, pair.drafts["block"], call, streamer=Collected(nested)) == expected
    assert inside == [other.expected.tolist()] * 2


def test_compiled_rounds_take_turns(compiled_pair):
    """Each round of a call comes between two of another."""
    pair, turns = compiled_pair, Turns(0, often=1.0)
    draft = pair.drafts["block"]
    calls = [pair.call("greedy"), pair.call("streamer")]
    expected = [call.expected.tolist() for call in calls]
    results = turns.run(
        *[lambda call=call: greedy(pair.target, draft, call, streamer=Collected(turns.change))[0] for call in calls]
    )
    assert not raised(results), raised(results)
    assert results == expected and turns.changes > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_race_does_not_make_a_pair_uncompilable(seed):
    """Four threads compile and run the rounds of a new pair; afterwards they are compiled still."""
    torch._dynamo.reset()
    pair = Pair.of("qwen3", seed, ways={"block": {"compile": "counted"}}, names=("greedy", "streamer", "batch"))
    calls, draft = [pair.call(name) for name in ("greedy", "batch", "streamer", "batch")], pair.drafts["block"]
    said = io.StringIO()
    handler = logging.logging.StreamHandler(said)
    logging.add_handler(handler)
    try:
        results = at_once(*[lambda call=call: [greedy(pair.target, draft, call)[0] for _ in "123"] for call in calls])
    finally:
        logging.remove_handler(handler)
    assert not raised(results), raised(results)
    assert results == [[call.expected.tolist()] * 3 for call in calls]
    assert "cannot be compiled" not in said.getvalue(), said.getvalue()
    ROUNDS.clear()
    assert greedy(pair.target, draft, calls[0])[0] == calls[0].expected.tolist()
    assert len(ROUNDS) > 3, "remembered as uncompilable"
    torch._dynamo.reset()


def test_compiled_functions_of_others_keep_their_guards(compiled_pair):
    """In the middle of a compiled round another thread calls a function of its own, made for other arguments."""

    factor = [2]

    @torch.compile(backend="eager")
    def scaled(x):
        return x * factor[0]

    one, values = torch.ones(()), []
    assert scaled(one) == 2
    factor[0] = 3
    IN_ROUND[:] = [lambda: None, lambda: None, lambda: values.extend(at_once(lambda: float(scaled(one))))][::-1]
    try:
        alone(compiled_pair, "block", "greedy")
    finally:
        IN_ROUND.clear()
    assert values == [3.0]


def test_plain_and_drafted_calls_in_a_thread_pool_of_asyncio(pair_of):
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


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "mamba"])
def test_a_thread_with_a_copy_of_a_calls_context_is_no_part_of_that_call(family, pair_of):
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

    with turns.inside(pair.target):
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
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("thread", ["the same thread", "another thread"])
def test_a_forked_worker_generates_while_its_parent_does(family, thread, pair_of):
    pair = pair_of(family)
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


COPIES = [("qwen3", copy.deepcopy), ("qwen3", pickled), ("qwen3", saved_whole)]
COPIES += [("qwen3_5_text", copy.deepcopy), ("mamba", saved_whole)]


@pytest.mark.parametrize(("family", "how"), COPIES)
def test_copies_made_during_a_call_are_clean(family, how, pair_of, monkeypatch):
    """Of target and drafter, from a streamer and in the middle of a forward: no hook and no class goes with them."""
    pair = pair_of(family)
    call, draft = pair.call("greedy"), pair.drafts["block"]
    before, expected, copies, looks = shape_of(pair.target, draft), alone(pair, "block", "greedy"), [], []

    def look(*_):
        looks.append(1)
        if len(looks) in (1, 4):  # the prompt's forward, and a verification
            copies.append((how(pair.target), how(draft)))

    def put(step):
        if step == 9:
            copies.append((how(pair.target), how(draft)))

    monkeypatch.setattr(Window, "look", look)
    assert greedy(pair.target, draft, call, streamer=Collected(put)) == expected
    monkeypatch.setattr(Window, "look", None)
    assert len(copies) == 3
    for models in copies:
        assert shape_of(*models) == before
        assert greedy(*models, call) == expected
        assert greedy(models[0], None, call)[0] == expected[0]


@pytest.mark.parametrize("wrong", [None, "feature", "position"])
def test_the_scripted_drafter_is_as_good_as_its_context(wrong):
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
