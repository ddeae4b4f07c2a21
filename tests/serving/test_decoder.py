"""Requests that share a pair: drafted alone or decoded together, and the caches of conversations."""

import copy
import threading
import time

import pytest
import torch
from support.serving import MAX_TOKENS, chat_ids, save_readable_target, scripted
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

from dflash_hf.serving.conversations import Conversations
from dflash_hf.serving.decoder import Decoder
from dflash_hf.serving.request import Request


PROMPTS = [f"Say {number}" for number in range(5)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = save_readable_target(tmp_path_factory.mktemp("decoder") / "target")
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = [chat_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    texts = [target.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0].tolist() for ids in asked]
    return target, tokenizer, scripted(folder, PROMPTS, MAX_TOKENS), asked, texts


@pytest.fixture
def decoder(world):
    target, tokenizer, draft, *_ = world
    decoder = Decoder(target, tokenizer, draft)
    yield decoder
    decoder.stop()


def request(decoder, inputs, streamer=None, stops=None, seed=None, **settings) -> Request:
    config = copy.deepcopy(decoder.target.generation_config)
    config.update(**{"max_new_tokens": MAX_TOKENS, "do_sample": False, **settings})
    return Request(decoder, dict(inputs), config, streamer, stops, seed)


def answered(decoder, world, which, stops=None, **more) -> list[Request]:
    """The requests of these numbers, which all wait when the first is decoded; `stops` of each."""
    ready = threading.Event()
    held = decoder.call(ready.wait)
    requests = [request(decoder, world[3][i], stops=stops and stops[i], **more) for i in which]
    for one in requests:
        decoder.submit(one)
    ready.set()
    assert held.result()
    return [one.done.result(timeout=60) for one in requests]


def texts_of(requests) -> list[list[int]]:
    return [one.prompt + one.tokens for one in requests]


@pytest.mark.parametrize("number", [1, 5])
def test_texts_are_the_target_s_own(number, decoder, world):
    found = answered(decoder, world, range(number))
    assert texts_of(found) == world[4][:number]
    for one in found:
        assert one.batched == (number > 1)
        assert (one.rounds > 0) == (number == 1) == (0 < one.accepted <= one.drafted)


@pytest.mark.parametrize("number", [1, 5])
def test_stop_strings_end_answers_as_upstream_s(number, decoder, world):
    target, tokenizer, _, asked, texts = world
    written = [tokenizer.decode(ids[len(prompt["input_ids"][0]) :]) for ids, prompt in zip(texts, asked, strict=True)]
    stops = [["~", text[len(text) // 2 :][:2], text[-1]] for text in written]
    expected = [
        target.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False, stop_strings=stop, tokenizer=tokenizer)
        for ids, stop in zip(asked, stops, strict=True)
    ]
    found = answered(decoder, world, range(number), stops=stops)
    assert texts_of(found) == [ids[0].tolist() for ids in expected[:number]]
    assert all(one.stopped and len(one.tokens) < MAX_TOKENS for one in found)


def test_later_requests_join_a_batch(decoder, world):
    """Those of another kind wait for its end, and keep others from joining: first come, first served."""
    late: list[Request] = []

    class Arriving:
        def put(self, value):
            if not late:
                late.append(decoder.submit(request(decoder, world[3][2])))
                late.append(decoder.submit(request(decoder, world[3][3], repetition_penalty=1.2)))
                late.append(decoder.submit(request(decoder, world[3][4])))

        def end(self):
            pass

    first = answered(decoder, world, [0, 1], streamer=Arriving())
    assert texts_of(first) == world[4][:2]
    found = [one.done.result(timeout=60) for one in late]
    assert [one.batched for one in found] == [True, False, False]
    assert found[0].prompt + found[0].tokens == world[4][2] and found[2].prompt + found[2].tokens == world[4][4]


@pytest.mark.parametrize("number", [1, 3])
def test_requests_that_nobody_waits_for_end(number, decoder, world):
    class Leaving:
        def put(self, value):
            if requests[0].tokens:
                requests[0].gone.set()

        def end(self):
            pass

    requests = [request(decoder, ids, Leaving() if i == 0 else None) for i, ids in enumerate(world[3][:number])]
    held = threading.Event()
    decoder.call(held.wait)
    for one in requests:
        decoder.submit(one)
    held.set()
    found = [one.done.result(timeout=60) for one in requests]
    assert len(found[0].tokens) < 8 and texts_of(found[1:]) == world[4][1:number]
    gone = request(decoder, world[3][0])
    gone.gone.set()
    assert decoder.submit(gone).done.result(timeout=60).tokens == []


def test_samples_follow_each_request_s_settings(decoder, world):
    """Nearly cold, the sample is the greedy text, though another request made the batch hot."""
    answered(decoder, world, [0, 1], do_sample=True, temperature=2.0, top_p=0.9)
    assert texts_of(answered(decoder, world, range(5), do_sample=True, temperature=1e-4, top_p=0.5)) == world[4]
    assert len(decoder.managers) == 1


def test_a_seed_is_a_request_s_own(decoder, world):
    one, two = answered(decoder, world, [0, 0], do_sample=True, temperature=1.5, seed=3)
    assert one.tokens == two.tokens and not one.batched


@pytest.mark.parametrize(
    ("settings", "batched"),
    [
        ({}, True),
        ({"do_sample": True}, True),
        ({"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8}, True),
        ({"repetition_penalty": 1.2}, False),
        ({"sequence_bias": [[[5], 2.0]]}, False),
        ({"num_beams": 2}, False),
        ({"bad_words_ids": [[5]]}, False),
        ({"max_time": 5.0}, False),
    ],
)
def test_what_a_batch_cannot_do_is_decoded_alone(settings, batched, decoder, world):
    config = GenerationConfig(**{"max_new_tokens": 20, **settings})
    one = Request(decoder, dict(world[3][0]), config)
    assert (decoder.kind_of(one) is not None) == batched
    one.inputs["pixel_values"] = 0
    assert decoder.kind_of(one) is None


def test_a_batch_that_cannot_start_is_not_tried_again(decoder, world, monkeypatch):
    def fail(*args, **kwargs):
        calls.append(1)
        raise NotImplementedError("no such cache")

    calls = []
    monkeypatch.setattr(world[0], "init_continuous_batching", fail, raising=False)
    assert texts_of(answered(decoder, world, range(3))) == world[4][:3] and len(calls) == 1


@pytest.mark.parametrize("fault", ["step", "full"])
def test_a_batch_that_fails_loses_nothing(fault, decoder, world, monkeypatch):
    """Its requests are continued; waiting for a thread that had ended once took minutes."""
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchingManager,
        ContinuousBatchProcessor,
    )

    step, steps = ContinuousBatchProcessor._generation_step, []

    def fails_later(self, model):
        steps.append(1)
        if len(steps) > 5:
            raise MemoryError("no more pages")
        return step(self, model)

    if fault == "step":
        monkeypatch.setattr(ContinuousBatchProcessor, "_generation_step", fails_later)
    else:
        monkeypatch.setattr(ContinuousBatchingManager, "add_request", lambda *args, **kwargs: None)
    start = time.thread_time()
    found = answered(decoder, world, range(3))
    assert texts_of(found) == world[4][:3] and 0 < decoder.failures and not decoder.managers
    assert time.thread_time() - start < 5
    monkeypatch.undo()
    decoder.failures = 0
    found = answered(decoder, world, range(3))
    assert texts_of(found) == world[4][:3] and all(one.batched for one in found)


@pytest.mark.parametrize("number", [1, 3])
def test_an_error_is_its_request_s_alone(number, decoder, world):
    class Broken:
        def put(self, value):
            if broken.tokens:
                raise TypeError("of ours")

    broken, held = request(decoder, world[3][0], Broken()), threading.Event()
    decoder.call(held.wait)
    others = [request(decoder, ids) for ids in world[3][1:number]]
    for one in (broken, *others):
        decoder.submit(one)
    held.set()
    with pytest.raises(TypeError, match="of ours"):
        broken.done.result(timeout=60)
    assert texts_of([one.done.result(timeout=60) for one in others]) == world[4][1:number]
    assert texts_of(answered(decoder, world, [1])) == [world[4][1]] and not decoder.failures


# ------------------------------------------------------------------------------------------------------ conversations


def test_the_next_turn_reads_what_is_new(decoder, world):
    """And drafts as well as if the whole conversation were read: the drafter's context is kept, too."""
    target, _, draft, _, texts = world
    for cut in (len(texts[0]), len(texts[0]) - 12):  # all of the text so far, or a part of it
        longer = {"input_ids": torch.tensor([texts[0][:cut]])}
        decoder.conversations.kept.clear()
        answered(decoder, world, [0])
        anew = target.generate(
            **longer, max_new_tokens=20, do_sample=False, assistant_model=draft, return_dict_in_generate=True
        )
        turn = decoder.submit(request(decoder, longer, max_new_tokens=20)).done.result(timeout=60)
        assert turn.prompt + turn.tokens == anew.sequences[0].tolist()
        assert turn.cached == cut - 1
        assert turn.accepted == sum(anew.acceptance_lengths[0]) - len(anew.acceptance_lengths[0])


def test_each_conversation_keeps_its_own_cache(decoder, world):
    for i in (0, 1, 2):
        answered(decoder, world, [i])
    for i in (0, 1, 2):
        longer = {"input_ids": torch.tensor([world[4][i]])}
        turn = decoder.submit(request(decoder, longer, max_new_tokens=8)).done.result(timeout=60)
        assert turn.cached == len(world[4][i]) - 1


def test_caches_of_conversations_are_bounded(world):
    kept = Conversations(world[0])

    def cache(length):
        one = DynamicCache()
        one.update(torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1), 0)
        return one

    for first in range(6):
        kept.keep([first] * 20, cache(19))
    assert [read[0] for read, _ in kept.kept] == [2, 3, 4, 5] and len(kept.kept[0][0]) == 19
    kept.keep([9] * 240, cache(239))  # of 256 positions
    assert [read[0] for read, _ in kept.kept] == [9]
    kept.keep([8] * 300, cache(299))  # the latest is kept in any case
    assert [read[0] for read, _ in kept.kept] == [8]
    assert kept.take([8] * 100) == (None, 0)  # less than half of it stays for the conversation itself
    found, length = kept.take([8] * 200)
    assert length == 199 == found.get_seq_length() and not kept.kept
    kept.keep([7] * 10, "another cache")
    assert not kept.kept


def test_what_cannot_be_cut_is_read_again(world):
    kept, cache = Conversations(world[0]), DynamicCache()
    cache.update(torch.zeros(1, 1, 9, 1), torch.zeros(1, 1, 9, 1), 0)
    cache.crop = lambda removed: (_ for _ in ()).throw(RuntimeError("recurrent"))
    kept.keep([*range(10)], cache)
    assert kept.take([*range(8)]) == (None, 0)
    kept.keep([*range(10)], cache)
    assert kept.take([*range(12)]) == (cache, 9)
