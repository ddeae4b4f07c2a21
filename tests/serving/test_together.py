"""Requests that are decoded together: who joins a batch and when, texts that go on in one, and a batch that fails."""

import asyncio
import random
import time

import pytest
from support.serving import MAX_TOKENS, chat_ids, save_readable_target, scripted
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.import_utils import is_serve_available


if not is_serve_available():
    pytest.skip("serving needs `pip install '.[serving]'`", allow_module_level=True)
from dflash_hf.serving.server import DraftedManager
from dflash_hf.serving.together import Together


PROMPTS = [f"Say {number}" for number in range(5)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = save_readable_target(tmp_path_factory.mktemp("together") / "target")
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = [chat_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    texts = [target.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0].tolist() for ids in asked]
    return target, tokenizer, scripted(folder, PROMPTS, MAX_TOKENS), asked, texts


@pytest.fixture
def manager(world):
    target, _, draft, *_ = world
    lines: list[str] = []
    manager = DraftedManager(target, draft, lines.append)
    manager.lines = lines
    yield manager
    manager.stop()


def answers(manager, world, which, pause: float = 0.0, stops=None, **settings):
    """The texts of requests that arrive one after the other, `pause` seconds apart; `stops` of each number."""
    target, tokenizer, _, asked, _ = world

    async def one(place: int, number: int):
        await asyncio.sleep(pause * place)
        config = GenerationConfig(**{"max_new_tokens": MAX_TOKENS, "do_sample": False, **settings})
        config.eos_token_id, config.pad_token_id = target.generation_config.eos_token_id, 0
        config._stops = stops and stops[number]
        output = await manager.generate_non_streaming(target, tokenizer, dict(asked[number]), config, f"r{number}")
        return asked[number]["input_ids"][0].tolist() + list(map(int, output[2]))

    async def all_of_them():
        return await asyncio.gather(*(one(place, number) for place, number in enumerate(which)))

    return asyncio.run(all_of_them())


def test_a_request_that_is_alone_is_drafted(manager, world):
    assert answers(manager, world, [1]) == [world[4][1]]
    assert "tau" in manager.lines[0] and "together" not in manager.lines[0]
    assert not manager.together.managers and manager.together.rates.keys() == {1}


def test_requests_at_once_are_decoded_together(manager, world):
    assert answers(manager, world, range(5)) == world[4]
    assert all("together with others" in line for line in manager.lines)


@pytest.mark.parametrize("number", [1, 5], ids=["drafted", "batched"])
def test_a_stop_string_ends_an_answer_as_upstream_s(number, manager, world):
    """A request with stop strings joined no batch, and waited for a search of the whole vocabulary."""
    target, tokenizer, _, asked, texts = world
    written = [tokenizer.decode(ids[len(prompt["input_ids"][0]) :]) for ids, prompt in zip(texts, asked, strict=True)]
    stops = [["~", text[len(text) // 2 :][:2], text[-1]] for text in written]
    expected = [
        target.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False, stop_strings=stop, tokenizer=tokenizer)[
            0
        ].tolist()
        for ids, stop in zip(asked, stops, strict=True)
    ]
    assert all(len(short) < len(whole) for short, whole in zip(expected, texts, strict=True))
    assert answers(manager, world, range(number), stops=stops) == expected[:number]
    assert all(("together with others" in line) == (number > 1) for line in manager.lines)
    assert manager.together.rates  # timed, though they ended early
    assert number > 1 or "tau" in manager.lines[0]


def test_drafted_and_batched_requests_do_not_see_each_other(manager, world, monkeypatch):
    """Upstream's batch changes the model's configuration while a forward of it runs."""
    draw, pays = random.Random(0), Together.pays
    monkeypatch.setattr(Together, "pays", lambda self, sampled: draw.random() < 0.1 and pays(self, sampled))
    for _ in range(6):
        assert answers(manager, world, [*range(5), *range(5)]) == [*world[4], *world[4]]
    joined = sum("together with others" in line for line in manager.lines)
    assert 10 < joined < 55


@pytest.mark.parametrize("after", [0, 1, 9])
def test_an_answer_that_was_begun_goes_on_in_the_batch(after, manager, world, monkeypatch):
    """Others arrive after so many of its tokens."""
    target, _, draft, asked, texts = world
    pays = Together.pays
    before = asked[0]["input_ids"].shape[1]

    def pays_then(self, sampled):
        return begun[0] > after and pays(self, sampled)

    begun = [-before]
    monkeypatch.setattr(Together, "pays", pays_then)
    monkeypatch.setattr(type(manager), "alone", lambda self, function, *args: slowly(function, begun, *args))

    def slowly(function, begun, kwargs):
        request = function.__self__
        put = request.put

        def counted(value):
            begun[0] += value.numel()
            time.sleep(0.02)  # others arrive
            put(value)

        request.put = counted
        return DraftedManager.__mro__[1].submit(manager, function, kwargs).result()

    assert answers(manager, world, [0, 1], pause=0.01) == texts[:2]
    assert sum("together with others" in line for line in manager.lines) == 2


def test_a_batch_that_fails_is_the_last_one(manager, world, monkeypatch):
    def fail(*args, **kwargs):
        raise NotImplementedError("no such cache")

    monkeypatch.setattr(world[0], "init_continuous_batching", fail, raising=False)
    assert answers(manager, world, range(3)) == world[4][:3]
    assert manager.together.failed and not any("failed" in line for line in manager.lines)


def test_a_batch_that_fails_in_the_middle_loses_nothing(manager, world, monkeypatch):
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    step, steps = ContinuousBatchProcessor._generation_step, []

    def fails_later(self, model):
        steps.append(1)
        if len(steps) > 5:
            raise MemoryError("no more pages")
        return step(self, model)

    monkeypatch.setattr(ContinuousBatchProcessor, "_generation_step", fails_later)
    assert answers(manager, world, range(3)) == world[4][:3]
    assert manager.together.failures == 1 and len(steps) > 5
    monkeypatch.undo()
    monkeypatch.setattr(Together, "pays", lambda self, sampled: self.able > 1)  # by their number, not by the clock
    assert answers(manager, world, range(3)) == world[4][:3]
    assert all("together with others" in line for line in manager.lines[-3:])


def test_a_batch_that_takes_no_more_requests_is_stopped(manager, world, monkeypatch):
    """Its thread ran on, with its cache, for as long as the server."""
    monkeypatch.setattr(Together, "pays", lambda self, sampled: self.able > 1)
    assert answers(manager, world, range(3)) == world[4][:3]
    (batch,) = manager.together.managers.values()
    monkeypatch.setattr(batch, "add_request", lambda *args, **kwargs: None)
    assert answers(manager, world, range(3)) == world[4][:3]
    assert manager.together.failures == 1 and not batch.is_running()


def test_a_way_that_lost_is_tried_again_later(manager, world, monkeypatch):
    together = manager.together
    with together.request(True, False), together.request(True, False):
        together.note(1, 50, 1.0)
        together.note(2, 20, 1.0)
        assert not together.pays(False)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 301)
        assert together.pays(False)


def test_what_a_batch_cannot_do_is_decoded_alone(manager, world):
    target, _, _, asked, _ = world
    plain = {"max_new_tokens": 20}
    for settings, joins in [
        (plain, True),
        (plain | {"do_sample": True}, True),
        (plain | {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8}, True),
        (plain | {"repetition_penalty": 1.2}, False),
        (plain | {"sequence_bias": [[[5], 2.0]]}, False),
        (plain | {"num_beams": 2}, False),
        ({}, False),
    ]:
        kind = manager.together.kind_of(dict(asked[0]), GenerationConfig(**settings))
        assert (kind is not None) == joins, settings
    assert manager.together.kind_of({**asked[0], "pixel_values": 0}, GenerationConfig(**plain)) is None


def test_samples_of_a_batch_follow_each_request_s_settings(manager, world):
    """Nearly cold, the sample is the greedy text; and another request of the batch is hot."""
    answers(manager, world, [0, 1], do_sample=True, temperature=2.0, top_p=0.9)
    assert answers(manager, world, range(5), do_sample=True, temperature=1e-4, top_p=0.5) == world[4]
    assert len(manager.together.managers) == 1


def test_the_way_that_was_faster_is_taken(world):
    together = Together(world[0])
    with together.request(True, False), together.request(False, False):
        assert not together.pays(False)
        with together.request(True, False):
            assert together.pays(False)  # not timed yet
            together.note(1, 50, 1.0)
            together.note(2, 20, 1.0)
            assert not together.pays(False)
            with together.request(True, False):
                assert together.pays(False)
                together.note(3, 20, 1.0)
                assert together.pays(False)


def test_a_seed_waits_for_the_batch_that_samples(world):
    together, order = Together(world[0]), []

    async def seeded():
        def wait():
            with together.request(False, True):
                order.append("seeded")
                with together.joining(True) as joins:
                    order.append(joins)

        await asyncio.to_thread(wait)

    async def sampled():
        with together.joining(True) as joins:
            waiting = asyncio.create_task(seeded())
            await asyncio.sleep(0.1)
            order.append("sampled")
            assert joins
        await waiting

    asyncio.run(sampled())
    assert order == ["sampled", "seeded", False]
