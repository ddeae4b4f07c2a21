"""Calls inside, beside and before one another: each writes what the target writes alone, and leaves nothing behind."""

import asyncio
import contextvars
import copy
import dataclasses
import io
import itertools
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.calls import Call, Collected, StopAfter, shape_of
from support.pairs import make_target
from support.scripted_draft import features_of, recognising
from support.threads import BLOCK_SIZE, PLAIN, TARGETS, Pair, Turns, Window, at_once

from dflash_hf.modeling.modeling_dflash import raw_embedding
from dflash_hf.targets.features import FeatureTap


PAIRS: dict[tuple, Pair] = {}
NAMES = ("greedy", "batch", "penalty")
BOTH = pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])  # by slots, and by replay


@pytest.fixture
def pair_of():
    """Pairs, made once, and a look at them when the test is over."""
    used = {}

    def get(family: str, seed: int = 0) -> Pair:
        if (family, seed) not in PAIRS:
            PAIRS[family, seed] = Pair.of(family, seed, names=NAMES)
        pair = PAIRS[family, seed]
        used[family, seed] = pair, shape_of(*pair.models)
        return pair

    yield get
    for key, (pair, before) in used.items():
        if shape_of(*pair.models) != before:
            PAIRS.pop(key, None)
            raise AssertionError(f"{key}: a call left something behind")


def outcome_of(call: Call, draft=None, **more):
    """Text and acceptance lengths; without a drafter, the text."""
    outcome = call(draft, **more)
    return outcome.sequences.tolist(), outcome.lengths


def alone(pair: Pair, draft_name: str, name: str):
    """What `outcome_of` must give: the target's text, and how drafts are accepted when nothing else runs."""
    text, lengths = outcome_of(pair.calls[name], pair.drafts[draft_name])
    assert text == pair.text(name)
    assert pair.family in PLAIN or max(lengths[0]) > 3, "drafts that are never accepted prove nothing"
    return text, lengths


def without_errors(results: list) -> list:
    raised = [repr(result) for result in results if isinstance(result, BaseException)]
    assert not raised, raised
    return results


# --------------------------------------------------------------------------------------------------------------- turns


@pytest.mark.parametrize("family", TARGETS)
def test_interleaved_calls_write_their_own_texts(family, pair_of):
    """Two drafted calls and a plain one; threads change in the middle of each layer, by a seed."""
    pair = pair_of(family)
    turns = Turns(0, often=0.6)
    expected = [alone(pair, "block", "greedy"), alone(pair, "tree", "batch"), (pair.text("penalty"), None)]
    with turns.inside():
        results = turns.run(
            lambda: outcome_of(pair.calls["greedy"], pair.drafts["block"]),
            lambda: outcome_of(pair.calls["batch"], pair.drafts["tree"]),
            lambda: outcome_of(pair.calls["penalty"]),
        )
    assert without_errors(results) == expected and turns.changes > 20


@BOTH
def test_interleaved_first_calls_probe_correctly(family, pair_of):
    """How a target is rolled back is found out by its first call: not by what another call made of it."""
    expected = alone(pair_of(family), "block", "greedy")
    fresh = Pair.of(family, names=NAMES)
    turns = Turns(1)
    with turns.inside():
        results = turns.run(*[lambda: outcome_of(fresh.calls["greedy"], fresh.drafts["block"])] * 4)
    assert without_errors(results) == [expected] * 4
    assert alone(fresh, "block", "greedy") == expected, "what a race decided was remembered"


@BOTH
def test_interleaved_calls_may_share_models(family, pair_of):
    """Two drafters of one target, and two targets of one drafter, which does not know the texts of the other."""
    pair = pair_of(family)
    other = pair_of(family, seed=1)
    turns = Turns(0)
    calls = [(pair.calls["greedy"], pair.drafts[draft_name]) for draft_name in ("block", "tree")]
    calls.append((other.calls["greedy"], pair.drafts["block"]))
    expected = [outcome_of(*call) for call in calls]
    assert expected[2][0] == other.text("greedy")
    with turns.inside():
        results = turns.run(*[lambda call=call: outcome_of(*call) for call in calls])
    assert without_errors(results) == expected


@BOTH
def test_copied_contextvars_do_not_join_a_call(family, pair_of):
    """A streamer hands its context to another thread: a copied context is no sign of whose forward it is."""
    pair = pair_of(family)
    turns = Turns(0)
    copied = []
    expected = alone(pair, "block", "greedy")

    def other(draft):
        deadline = time.monotonic() + 30
        while not copied and time.monotonic() < deadline:
            turns.change(always=True)
        return copied[0].copy().run(outcome_of, pair.calls["batch"], draft)[0]

    hand_over = Collected(lambda step: step == 3 and copied.append(contextvars.copy_context()))
    with turns.inside():
        results = turns.run(
            lambda: outcome_of(pair.calls["greedy"], pair.drafts["block"], streamer=hand_over),
            lambda: other(None),
            lambda: other(pair.drafts["tree"]),
        )
    assert without_errors(results) == [expected] + [pair.text("batch")] * 2


def test_calls_run_in_a_thread_pool_of_asyncio(pair_of):
    """`asyncio.to_thread` and servers built on it give each thread a copy of the caller's context."""
    pairs = [pair_of("qwen3"), pair_of("qwen3_5_text")]
    work = [*itertools.product(NAMES, pairs, (None, "block", "tree"))]

    async def serve():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        answers = [
            asyncio.to_thread(outcome_of, pair.calls[name], pair.drafts.get(draft_name))
            for name, pair, draft_name in work
        ]
        return await asyncio.gather(*answers, return_exceptions=True)

    results = without_errors(asyncio.run(serve()))
    assert [text for text, _ in results] == [pair.text(name) for name, pair, _ in work]


# ------------------------------------------------------------------------------------------------------------- nesting

FAMILIES = ("qwen3", "gemma3", "qwen3_5_text")
CASES = [(family, place, False) for family in FAMILIES for place in ("streamer", "criterion")]


@pytest.mark.parametrize(("family", "place", "compiled"), [*CASES, ("qwen3", "streamer", "eager")])
def test_calls_run_inside_a_call(family, place, compiled, pair_of):
    """A drafted one, a plain one, and a forward of the target."""
    pair = pair_of(family)
    inside = []
    draft = pair.drafts["block"]
    other = pair.calls["batch"]

    def nested(step: int) -> None:
        if step in (2, 5):
            inside.append(outcome_of(other, draft if step == 2 else None)[0])
        elif step == 13:
            pair.target(torch.tensor(pair.text("batch")))

    own = {"streamer": Collected(nested)} if place == "streamer" else {"stopping_criteria": [StopAfter(100, nested)]}
    draft.decoding_config.compile = compiled
    try:
        expected = alone(pair, "block", "greedy")
        assert outcome_of(pair.calls["greedy"], draft, **own) == expected
    finally:
        draft.decoding_config.compile = False
        torch._dynamo.reset()
    assert inside == [pair.text("batch")] * 2


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
@pytest.mark.parametrize("another_thread", [False, True])
def test_forked_worker_generates_beside_its_parent(another_thread, pair_of):
    pair = pair_of("qwen3_5_text")
    expected = alone(pair, "block", "greedy")
    answers = []
    call = pair.calls["greedy"]
    draft = pair.drafts["block"]
    arrived = threading.Event()
    go_on = threading.Event()

    def answer():
        answers.append(forked(lambda: outcome_of(call, draft) == expected))

    def meanwhile(step):
        if step == 5 and another_thread:
            arrived.set()
            go_on.wait(40)
        elif step == 5:
            answer()

    def waiting():
        assert arrived.wait(60)
        answer()
        go_on.set()
        return expected

    functions = [lambda: outcome_of(call, draft, streamer=Collected(meanwhile))]
    if another_thread:
        functions.append(waiting)
    results = at_once(*functions)
    assert without_errors(results)[0] == expected and answers == [True]


def saved_whole(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_whole])
def test_copies_made_during_a_call_decode(how, pair_of, monkeypatch):
    """Of target and drafter, from a streamer and in the middle of a forward."""
    pair = pair_of("qwen3_5_text")
    call = pair.calls["greedy"]
    draft = pair.drafts["block"]
    expected = alone(pair, "block", "greedy")
    copies = []
    looks = []

    def make(step, steps=(9,)):
        if step in steps:
            copies.append((how(pair.target), how(draft)))

    def look(*_):
        looks.append(1)
        make(len(looks), (1, 30))  # the prompt's forward, and a verification

    monkeypatch.setattr(Window, "look", look)
    assert outcome_of(call, draft, streamer=Collected(make)) == expected
    monkeypatch.setattr(Window, "look", None)
    assert len(copies) == 3
    for target, drafter in copies:
        copied = dataclasses.replace(call, target=target)
        assert outcome_of(copied, drafter) == expected == outcome_of(copied, drafter, prefill_chunk_size=2)
        assert outcome_of(copied)[0] == expected[0]


# ---------------------------------------------------------------------------------------------------------------- taps


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_foreign_hooks_see_no_drafts(register, pair_of, caplog):
    """A target with hooks of a caller decodes plainly: they see the tokens that they see without a drafter."""
    pair = pair_of("qwen3")
    seen = []
    handle = getattr(pair.target.get_input_embeddings(), register)(lambda _, args, *__: seen.append(args[0].tolist()))
    outcome_of(pair.calls["greedy"])
    without = [*seen]
    seen[:] = []
    assert outcome_of(pair.calls["greedy"], pair.drafts["block"]) == (pair.text("greedy"), [[]]) and seen == without
    handle.remove()
    assert f"a hook of {__name__} on a Embedding would see drafted tokens" in caplog.text
    alone(pair, "block", "greedy")


@BOTH
def test_features_are_the_layers_own_outputs(family):
    """`output_hidden_states=[i]` changed its meaning in 5.23, and upstream's last entry is after the final norm."""
    target = make_target(family, torch.float64)
    with torch.no_grad(), FeatureTap(target, [0, 2, 3]) as tap, tap.running():
        every = target(torch.tensor([[5, 9, 17, 33, 2]]), output_hidden_states=True).hidden_states
        features = tap.take()
    assert torch.equal(features[..., :64], torch.cat([every[1], every[3]], dim=-1))
    assert torch.equal(target.model.norm(features[..., 64:]), every[4])


def test_copied_target_captures_features_once():
    """A copy made during a call keeps the hooks; a drafter that reads one layer got its features twice."""
    target = make_target()
    call = Call(target, {"input_ids": torch.tensor([[5, 9, 17, 33, 2]])}, [0], {"max_new_tokens": 24})
    call.options |= {"do_sample": False, "return_dict_in_generate": True}
    text = call().sequences
    draft = recognising(target, [text[0]], target_layer_ids=[2])
    with FeatureTap(target, [2]):
        copied = dataclasses.replace(call, target=copy.deepcopy(target))
    written, lengths = outcome_of(copied, draft)
    assert written == text.tolist() and max(lengths[0]) > 3
    for module in copied.target.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._forward_pre_hooks_with_kwargs


@pytest.mark.parametrize("wrong", [None, "feature", "position"])
def test_recognising_drafters_depend_on_their_context(wrong):
    """It drafts the text only in its own context; otherwise the tests above would notice no mix-up."""
    pair = Pair.of("qwen3", names=NAMES)
    draft = pair.drafts["block"]
    text = pair.expected["greedy"].sequences[0]
    features = features_of(pair.target, text[:20], draft.config.target_layer_ids)
    positions = torch.arange(20 + BLOCK_SIZE)[None] + (wrong == "position")
    if wrong == "feature":
        features[:, 7] = features[:, 6]
    block = torch.tensor([[text[20]] + [draft.config.mask_token_id] * (BLOCK_SIZE - 1)])
    hidden = draft(raw_embedding(pair.target, block), features, position_ids=positions).last_hidden_state[:, 1:]
    drafted = draft.draft_logits(hidden, pair.target.lm_head).argmax(dim=-1)[0]
    agreed = int((drafted == text[21 : 20 + BLOCK_SIZE]).sum())
    assert agreed == 0 if wrong else agreed >= BLOCK_SIZE - 2
