"""Requests that share a pair: drafted alone or decoded together, and the caches of conversations."""

import asyncio
import concurrent.futures
import copy
import threading
from concurrent.futures import wait
from typing import NamedTuple

import psutil
import pytest
import torch
from support.pairs import make_draft, make_target
from support.scripted_draft import recognising
from support.serving import MAX_TOKENS, chat_ids, save_readable_target, scripted
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Gemma3TextConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.continuous_batching import continuous_api

from dflash_hf import DFlashDraftModel
from dflash_hf.decoding.draft_context import KEPT_CONTEXTS, KeptContext
from dflash_hf.decoding.state import GenerationState
from dflash_hf.serving import decoder as decoder_module
from dflash_hf.serving.decoder import Decoder, DecoderEnded
from dflash_hf.serving.prefix_caches import PrefixCaches
from dflash_hf.serving.request import Request, RequestStatus
from dflash_hf.serving.server import Server


PROMPTS = [f"Say {number}" for number in range(5)]


class Served(NamedTuple):
    """A target and its drafter; for each of `PROMPTS`, the inputs of `generate` and the target's own text as ids."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: DFlashDraftModel
    inputs: list[dict]
    texts: list[list[int]]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = save_readable_target(tmp_path_factory.mktemp("decoder") / "target")
    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = [chat_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    texts = [target.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0].tolist() for ids in inputs]
    return Served(target, tokenizer, scripted(folder, PROMPTS, MAX_TOKENS), inputs, texts)


@pytest.fixture
def decoder(served):
    target, tokenizer, draft, *_ = served
    decoder = Decoder(target, tokenizer, draft)
    yield decoder
    decoder.stop()
    assert not decoder.thread.is_alive()  # torch at work while the interpreter ends aborts the process


def request(decoder, inputs, streamer=None, stops=None, seed=None, **settings) -> Request:
    config = copy.deepcopy(decoder.target.generation_config)
    config.update(**{"max_new_tokens": MAX_TOKENS, "do_sample": False, **settings})
    return Request(decoder, dict(inputs), config, streamer, stops, seed)


def answered(decoder, served, numbers, stops=None, streamers=(), **settings) -> list[Request]:
    """
    Requests with the prompts of these numbers, answered: all of them wait when the first one is decoded.

    Args:
        numbers (`Sequence[int]`): Of `PROMPTS`.
        stops (`list[list[str]]`, *optional*): The stop strings of each prompt.
        streamers (`Sequence`): Streamers of the first requests; the others have none.
        settings: Fields of the generation config of all requests.
    """
    ready = threading.Event()

    class BlockingStreamer:
        def put(self, value):
            ready.wait()

        def end(self):
            pass

    # While this request waits for its streamer, the others queue up. It joins no batch, and its cache is not kept.
    alone = {"repetition_penalty": 1.1, "cache_implementation": "dynamic"}
    decoder.submit(request(decoder, served.inputs[0], BlockingStreamer(), max_new_tokens=1, **alone))
    streamers = [*streamers, *[None] * len(numbers)]
    requests = []
    for number, streamer in zip(numbers, streamers):
        stops_of_request = None if stops is None else stops[number]
        requests.append(request(decoder, served.inputs[number], streamer, stops_of_request, **settings))
    for waiting in requests:
        decoder.submit(waiting)
    ready.set()
    wait([waiting.future for waiting in requests], timeout=50)
    return requests


def texts_of(requests) -> list[list[int]]:
    return [done.token_ids for done in requests]


class CallbackStreamer:
    """A streamer that does something at the first token."""

    def __init__(self, act):
        self.act = act
        self.seen = 0

    def put(self, value):
        self.seen += 1
        if self.seen == 2:  # after the prompt
            self.act()

    def end(self):
        pass


@pytest.mark.parametrize("number", [1, 5])
def test_texts_equal_the_targets_own(number, decoder, served):
    requests = answered(decoder, served, range(number))
    assert texts_of(requests) == served.texts[:number]
    for done in requests:
        if number == 1:
            assert done.rounds > 0
            assert 0 < done.accepted <= done.drafted
            assert done.tokens_before_batch == 0
        else:
            assert done.rounds == 0
            assert done.accepted == done.drafted == 0
            assert done.tokens_before_batch > 0


@pytest.mark.parametrize("number", [1, 5])
def test_stop_strings_end_answers_as_upstream(number, decoder, served):
    target, tokenizer, _, inputs, texts = served
    written = [tokenizer.decode(ids[len(prompt["input_ids"][0]) :]) for ids, prompt in zip(texts, inputs, strict=True)]
    stops = [["~", text[len(text) // 2 :][:2], text[-1]] for text in written]
    expected = [
        target.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False, stop_strings=stop, tokenizer=tokenizer)
        for ids, stop in zip(inputs, stops, strict=True)
    ]
    requests = answered(decoder, served, range(number), stops=stops)
    assert texts_of(requests) == [ids[0].tolist() for ids in expected[:number]]
    assert all(done.status is RequestStatus.FINISHED_STOPPED and len(done.tokens) < MAX_TOKENS for done in requests)


def test_target_has_its_stop_strings_back(served):
    """A model that had been served had lost them for good."""
    target, tokenizer, draft, *_ = served
    target.generation_config.stop_strings = ["~"]
    try:
        decoder = Decoder(target, tokenizer, draft)
        assert target.generation_config.stop_strings is None
        assert request(decoder, served.inputs[0]).stop_strings == ["~"]
        decoder.stop()
        assert target.generation_config.stop_strings == ["~"]
    finally:
        target.generation_config.stop_strings = None


def test_server_that_cannot_start_leaves_the_target(served):
    """Its thread went on, and the target had lost its stop strings."""
    target, tokenizer, *_ = served
    stranger = make_draft(make_target(num_hidden_layers=8), target_layer_ids=[0, 6])
    threads = threading.active_count()
    target.generation_config.stop_strings = ["~"]
    try:
        with pytest.raises(ValueError):
            Server(target, tokenizer, stranger, "one", print)
        assert target.generation_config.stop_strings == ["~"] and threading.active_count() == threads
    finally:
        target.generation_config.stop_strings = None


def test_drafted_request_joins_a_later_request(decoder, served):
    """Nobody waits for the whole of another's answer."""
    late: list[Request] = []
    streamer = CallbackStreamer(lambda: late.append(decoder.submit(request(decoder, served.inputs[1]))))
    (first,) = answered(decoder, served, [0], streamers=[streamer])
    assert texts_of([first, late[0].future.result(timeout=60)]) == served.texts[:2]
    assert len(first.prompt) < first.tokens_before_batch < len(first.token_ids)
    assert late[0].tokens_before_batch and late[0].rounds == 0
    assert streamer.seen == 1 + len(first.tokens)  # the prompt once, and each token once
    assert first.accepted <= first.drafted


def test_later_requests_join_a_batch(decoder, served):
    """Those of another kind wait for its end, and keep others from joining: first come, first served."""
    late: list[Request] = []

    def arrive():
        for number, settings in ((2, {}), (3, {"repetition_penalty": 1.2}), (4, {})):
            late.append(decoder.submit(request(decoder, served.inputs[number], **settings)))

    first = answered(decoder, served, [0, 1], streamers=[CallbackStreamer(arrive)])
    assert texts_of(first) == served.texts[:2]
    late = [waiting.future.result(timeout=60) for waiting in late]
    assert [bool(done.tokens_before_batch) for done in late] == [True, False, False]
    assert late[0].token_ids == served.texts[2] and late[2].token_ids == served.texts[4]


@pytest.mark.parametrize("number", [1, 2])
def test_status_says_how_a_request_ended(number, decoder, served):
    """Decoded on its own, and in a batch."""
    statuses = []
    first: list[Request] = []

    def note_and_abort():
        statuses.append(first[0].status)
        first[0].abort()

    first.append(request(decoder, served.inputs[0], CallbackStreamer(note_and_abort)))
    assert first[0].status is RequestStatus.WAITING
    decoder.submit(first[0])
    assert first[0].future.result(timeout=60).status is RequestStatus.FINISHED_ABORTED
    assert statuses == [RequestStatus.RUNNING]
    streamers = [Broken("put", TypeError("injected"), 3)]
    broken, *cut = answered(decoder, served, range(number), streamers=streamers, max_new_tokens=SHORT)
    assert broken.status is RequestStatus.FINISHED_ERROR and broken.is_finished
    assert [done.status for done in cut] == [RequestStatus.FINISHED_LENGTH] * (number - 1)
    (done,) = answered(decoder, served, [0], stops=[["~", served.tokenizer.decode(first[0].tokens[:1])]])
    assert done.status is RequestStatus.FINISHED_STOPPED
    done.fail(TypeError("late"))  # what is finished stays so
    done.pause()
    assert done.status is RequestStatus.FINISHED_STOPPED


@pytest.mark.parametrize("number", [1, 3])
def test_abandoned_requests_end(number, decoder, served):
    first = []
    leaves = CallbackStreamer(lambda: first[0].abort())
    first.append(request(decoder, served.inputs[0], leaves))
    decoder.submit(first[0])
    assert texts_of(answered(decoder, served, range(1, number))) == served.texts[1:number]
    assert len(first[0].future.result(timeout=60).tokens) < 8
    abandoned = request(decoder, served.inputs[0])
    abandoned.abort()
    assert decoder.submit(abandoned).future.result(timeout=60).tokens == []


def test_samples_follow_settings_of_each_request(decoder, served):
    """Nearly cold, the sample is the greedy text, though another request made the batch hot."""
    answered(decoder, served, [0, 1], do_sample=True, temperature=2.0, top_p=0.9)
    assert texts_of(answered(decoder, served, range(5), do_sample=True, temperature=1e-4, top_p=0.5)) == served.texts
    assert len(decoder.batch_managers) == 1
    first, second = answered(decoder, served, [0, 0], do_sample=True, temperature=1.5, seed=3)
    assert first.tokens == second.tokens and not first.tokens_before_batch


def test_seeded_request_restores_the_random_state(decoder, served):
    """Those of requests without one would follow from it."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    decoder.submit(request(decoder, served.inputs[0], do_sample=True, seed=3)).future.result(timeout=60)
    assert torch.equal(torch.get_rng_state(), before)


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
        ({"begin_suppress_tokens": [5]}, False),
        ({"exponential_decay_length_penalty": (2, 1.5)}, False),
        ({"bad_words_ids": []}, False),
    ],
)
def test_unbatchable_settings_are_decoded_alone(settings, batched, decoder, served):
    config = GenerationConfig(**{"max_new_tokens": 20, **settings})
    waiting = Request(decoder, dict(served.inputs[0]), config)
    assert (decoder.batch_key_of(waiting) is not None) == batched
    waiting.inputs["pixel_values"] = 0
    assert decoder.batch_key_of(waiting) is None


def test_begin_suppressed_token_does_not_begin(decoder, served):
    """Which processors a request has was asked without the length of its prompt: a TypeError for the client."""
    inputs = served.inputs[0]
    unrestricted = decoder.submit(request(decoder, inputs)).future.result(timeout=60).tokens
    options = {"max_new_tokens": 4, "do_sample": False, "begin_suppress_tokens": [unrestricted[0]]}
    expected = served.target.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()
    answer = Request(decoder, dict(inputs), GenerationConfig(**options))
    assert decoder.submit(answer).future.result(timeout=60).tokens == expected != unrestricted[:4]


@pytest.mark.parametrize(("free", "expected"), [(2**30, 0.25 * 2**30), (2**40, 2**32)])
def test_batch_cache_fits_a_container_and_a_large_machine(free, expected, monkeypatch):
    """It was a tenth of the machine's memory, zeroed before the first token, also where a container may use less."""
    monkeypatch.setattr(decoder_module, "_BATCH_CACHE_SHARE", 0.25)
    monkeypatch.setattr(decoder_module, "free_memory", lambda device: free)
    share = decoder_module._batch_cache_share(torch.device("cpu"))
    assert share * psutil.virtual_memory().total == pytest.approx(expected)


def test_batching_is_given_up_after_three_failures(decoder, served, monkeypatch):
    def fail(*args, **kwargs):
        calls.append(1)
        raise NotImplementedError("no such cache")

    calls: list[int] = []
    monkeypatch.setattr(served.target, "init_continuous_batching", fail, raising=False)
    for _ in range(5):
        assert texts_of(answered(decoder, served, range(3))) == served.texts[:3]
    assert len(calls) == 3


@pytest.mark.parametrize("fault", ["step", "full", "stuck"])
def test_failed_batch_answers_its_requests(fault, decoder, served, monkeypatch):
    """Its requests go on at once: whoever waits for the end of its thread waits until they are answered."""
    manager = continuous_api.ContinuousBatchingManager
    steps = []
    answers_are_here = threading.Event()
    step = continuous_api.ContinuousBatchProcessor._generation_step

    def fails_later(self, model):
        steps.append(1)
        if len(steps) > 5:
            if fault == "step":
                raise MemoryError("no more pages")
            answers_are_here.wait(60)
        return step(self, model)

    monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "_generation_step", fails_later)
    monkeypatch.setattr(manager, "join", lambda *args: answers_are_here.wait(60))
    if fault == "full":
        monkeypatch.setattr(manager, "add_request", lambda *args, **kwargs: None)
    if fault == "stuck":
        monkeypatch.setattr(manager, "is_running", lambda self: self._generation_thread and len(steps) < 6)
    requests = answered(decoder, served, range(3))
    assert texts_of(requests) == served.texts[:3] and decoder.batch_failures and not decoder.batch_managers
    answers_are_here.set()
    monkeypatch.undo()
    decoder.batch_failures = 0
    requests = answered(decoder, served, range(3))
    assert texts_of(requests) == served.texts[:3] and all(done.tokens_before_batch for done in requests)


@pytest.mark.parametrize("number", [1, 3])
def test_error_fails_only_its_request(number, decoder, served):
    def breaks():
        raise TypeError("of ours")

    broken, *unbroken = answered(decoder, served, range(number), streamers=[CallbackStreamer(breaks)])
    with pytest.raises(TypeError, match="of ours"):
        broken.future.result()
    assert texts_of(unbroken) == served.texts[1:number]
    assert texts_of(answered(decoder, served, [1])) == [served.texts[1]] and not decoder.batch_failures


def test_cut_round_counts_its_drafts(decoder, served, monkeypatch):
    """The last token of a round is the target's own, but not if the answer has ended at a drafted one."""
    monkeypatch.setattr(served.draft.decoding_config, "block_size", served.draft.config.max_block_tokens)
    rounds: list[tuple[int, list[int]]] = []  # tokens before, drafted tokens
    commit = GenerationState._commit

    def noted(state, candidates, logits, paths):
        rounds.append((state.lengths[0], candidates.tokens[0, 1:].tolist()))
        return commit(state, candidates, logits, paths)

    monkeypatch.setattr(GenerationState, "_commit", noted)
    answer = served.tokenizer.decode(served.texts[0][served.inputs[0]["input_ids"].shape[1] :])
    ends_at_drafts = []
    for length in range(2, 12):
        rounds.clear()
        (done,) = answered(decoder, served, [0], stops=[[answer[:length]]])
        accepted = 0
        verifications = [(start, drafts) for start, drafts in rounds if start and drafts]
        ends = [start for start, _ in verifications[1:]] + [length]
        for (start, drafts), end in zip(verifications, ends, strict=True):
            equal = [token == draft for token, draft in zip(done.tokens[start:end], drafts, strict=False)]
            accepted += [*equal, False].index(False)
        ends_at_drafts.append(len(equal) == length - start and all(equal))
        assert len(done.tokens) == length and done.committed == length - 1
        assert done.accepted == accepted <= done.drafted
        assert f"tau {(length - 1) / done.rounds:.2f}" in done.summary()
    assert set(ends_at_drafts) == {False, True}


def test_continued_request_counts_once_in_a_pause(decoder, served):
    """A request that continued after a batch took another turn of the pause, as did one without a drafter."""
    decoder.drafter_pause.record(speedup=0.9)
    first = request(decoder, served.inputs[0])
    assert not decoder._decide_drafting(first)
    first.start()
    first.pause()
    assert not decoder._decide_drafting(first)
    drafted = request(decoder, served.inputs[0])
    assert decoder._decide_drafting(drafted)
    drafted.start()
    decoder.drafter_pause.record(speedup=0.9)
    assert decoder._decide_drafting(drafted)
    without = request(decoder, served.inputs[0])
    without.use_drafter = False
    assert not decoder._decide_drafting(without)
    assert [decoder.drafter_pause.take_turn() for _ in range(4)] == [False, False, False, True]


def test_drafter_without_speedup_backs_off(decoder, served, monkeypatch):
    """The loop that may draft takes time in any case; after 1, 3, 7, ... requests without it, it is tried again."""
    used_drafter = []
    gains = iter([0.9, 1.0, 1.5, 1.5])
    generate = served.target.generate

    def noted(**options):
        used_drafter.append(options["assistant_model"] is not None)
        output = generate(**options)
        if used_drafter[-1]:
            output["estimated_speedup"] = next(gains)
        return output

    monkeypatch.setattr(served.target, "generate", noted, raising=False)
    for _ in range(8):
        decoder.submit(request(decoder, served.inputs[0], max_new_tokens=3)).future.result(timeout=60)
    assert used_drafter == [True, False, True, False, False, False, True, True]


# ------------------------------------------------------------------------------------------------------ conversations


def test_next_turn_prefills_only_its_new_tokens(decoder, served):
    """And drafts as well as if the whole conversation were read: the drafter's context is kept, too."""
    target, _, draft, _, texts = served
    for cut in (len(texts[0]), len(texts[0]) - 12):  # all of the text so far, or a part of it
        longer = {"input_ids": torch.tensor([texts[0][:cut]])}
        decoder.prefix_caches.entries.clear()
        answered(decoder, served, [0])
        anew = target.generate(
            **longer, max_new_tokens=20, do_sample=False, assistant_model=draft, return_dict_in_generate=True
        )
        turn = decoder.submit(request(decoder, longer, max_new_tokens=20)).future.result(timeout=60)
        assert turn.token_ids == anew.sequences[0].tolist()
        assert turn.cached_tokens == cut - 1
        assert turn.accepted == sum(anew.acceptance_lengths[0]) - len(anew.acceptance_lengths[0])


def test_each_conversation_keeps_its_own_cache(served):
    """Though all begin with the same instructions, which only the first reads: one took the cache of another."""
    target, tokenizer, *_ = served
    system = {"role": "system", "content": "1" * 80}
    plain = {"max_new_tokens": 8, "do_sample": False}
    chats = [[system, {"role": "user", "content": prompt}] for prompt in PROMPTS[:3]]
    draft = recognising(target, [target.generate(**chat_ids(tokenizer, chat), **plain)[0] for chat in chats])
    draft.decoding_config.block_size = draft.config.max_block_tokens
    decoder = Decoder(target, tokenizer, draft)
    read = [0] * 3
    decoder.prefix_caches.max_tokens = 1000
    for turn in range(2):
        for number, chat in enumerate(chats):
            inputs = chat_ids(tokenizer, chat)
            done = decoder.submit(request(decoder, inputs, **plain)).future.result(timeout=60)
            assert done.token_ids == target.generate(**inputs, **plain)[0].tolist()
            if turn:
                assert done.cached_tokens == read[number]
            else:
                assert (done.cached_tokens > 80) == (number > 0)
            assert turn or done.accepted > 3  # the drafter has read the instructions, too
            read[number] = len(done.token_ids) - 1
            answer = {"role": "assistant", "content": tokenizer.decode(done.tokens)}
            chats[number] = [*chat, answer, {"role": "user", "content": "And?"}]


def test_caches_of_conversations_are_bounded(served):
    caches = PrefixCaches(served.target)

    def keep(token, length, prompt=5):
        cache = DynamicCache()
        cache.update(torch.zeros(1, 1, length - 1, 1), torch.zeros(1, 1, length - 1, 1), 0)
        caches.keep([token] * length, prompt, cache)
        return cache

    def first_tokens() -> list[int]:
        return [entry.token_ids[0] for entry in caches.entries]

    for token in range(6):
        keep(token, 60)
    assert first_tokens() == [2, 3, 4, 5] and len(caches.entries[0].token_ids) == 59  # of 256 positions
    caches.max_memory = 59 * 2 * 4 * 3
    keep(6, 60)
    assert first_tokens() == [4, 5, 6]
    keep(8, 300)  # the latest is kept in any case
    assert first_tokens() == [8]
    caches.keep([7] * 10, 5, "another cache")
    assert first_tokens() == [8]


def test_prefix_is_copied_and_own_turn_is_taken(served):
    """Another conversation's cache stays; a turn of the same may write what opened its last answer otherwise."""
    caches = PrefixCaches(served.target)
    cache = DynamicCache()
    cache.update(torch.randn(1, 1, 199, 2), torch.randn(1, 1, 199, 2), 0)
    text = [*range(200)]
    (text[144],) = caches.eos_ids = {-3}  # ends the last message of the prompt
    keys = cache.layers[0].keys
    caches.keep(text, 150, cache)
    context = KeptContext(first_index=0, length=199, pending=[])
    KEPT_CONTEXTS.keep(cache, served.draft, context)
    taken, length = caches.take([*range(100), -1, -2])
    (copied,) = KEPT_CONTEXTS.of_cache(taken)
    assert copied is not context and KEPT_CONTEXTS.of_cache(cache) == [context]  # calls write into what they take
    assert length == 100 == taken.get_seq_length() and cache.get_seq_length() == 199
    assert torch.equal(taken.layers[0].keys, keys[:, :, :100])
    taken.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 0)
    assert cache.layers[0].keys is keys
    assert caches.take([*range(60), -1]) == (None, 0)  # is read with the rest
    assert caches.take(text[:150])[0] is not cache  # the same question again
    taken, length = caches.take([*text[:145], *[-1] * 9])
    assert length == 145 == taken.get_seq_length() and not caches.entries


@pytest.mark.parametrize("has_template", [True, False], ids=["chat", "completion"])
def test_short_message_is_no_turn_of_another(has_template, served):
    """The end of a prompt with a message of a few tokens counted as its opening: any other message took the cache."""
    caches = PrefixCaches(served.target)
    end = next(iter(caches.eos_ids))
    beginning = [*range(100, 170)]

    def prompt(message):
        return [*beginning, message, end, 11, 12, 13] if has_template else [*beginning, message]

    cache = DynamicCache()
    tokens = [*prompt(20), 30, 31, 32]
    cache.update(torch.zeros(1, 1, len(tokens), 1), torch.zeros(1, 1, len(tokens), 1), 0)
    caches.keep(tokens, len(prompt(20)), cache)
    taken, length = caches.take([*prompt(21), 22, 23])
    assert length == 70 and taken is not cache and len(caches.entries) == 1
    taken, length = caches.take([*tokens, 33, 34])
    assert taken is cache and not caches.entries


def test_cache_that_cannot_be_cropped_is_kept(served):
    """As the caches of sliding windows: the layers before the window were cut, and the conversation was lost."""
    caches = PrefixCaches(served.target)
    cache = DynamicCache(config=Gemma3TextConfig(sliding_window=4, num_hidden_layers=6))
    for layer in (0, 5):  # of a window, and whole
        cache.update(torch.zeros(1, 1, 9, 1), torch.zeros(1, 1, 9, 1), layer)
    cache.layers = [cache.layers[5], cache.layers[0]]
    caches.keep([*range(10)], 5, cache)
    assert caches.take([*range(8), -1]) == (None, 0)
    assert caches.take([*range(12)]) == (cache, 9) and cache.layers[0].keys.shape[2] == 9


def test_memory_counts_storages_behind_views(served):
    """A cropped cache is a view, which keeps alive what was cropped; only its own tokens were counted."""
    caches = PrefixCaches(served.target)
    caches.max_memory = 2 * 59 * 4 * 2  # bytes of two caches with 59 tokens

    def keep(token, rows):
        cache = DynamicCache()
        cache.update(torch.zeros(1, 1, rows, 1), torch.zeros(1, 1, rows, 1), 0)
        if rows > 59:
            cache.crop(59 - rows)
        caches.keep([token] * 60, 5, cache)

    keep(1, rows=59)
    keep(2, rows=59)
    assert [entry.token_ids[0] for entry in caches.entries] == [1, 2]
    keep(3, rows=2 * 59)  # as much as the other two
    assert [entry.token_ids[0] for entry in caches.entries] == [3]


def test_memory_counts_a_shared_storage_once(served):
    """A prefix that two conversations share is not copied."""
    caches = PrefixCaches(served.target)
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 99, 1), torch.zeros(1, 1, 99, 1), 0)
    caches.max_memory = 99 * 4 * 2  # bytes
    caches.keep([*range(100)], 90, cache)
    taken, length = caches.take([*range(80), -1])
    caches.keep([*range(80)], 80, taken)
    assert length == 80 and len(caches.entries) == 2


def test_memory_counts_contexts_of_drafters(decoder, served):
    """Those of a beginning that is shared are copies: eight of them took eight times as much."""
    answered(decoder, served, [0])
    (entry,) = decoder.prefix_caches.entries
    layers = KEPT_CONTEXTS.of_cache(entry.cache)[0].cache.layers
    contexts = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    targets = sum(layer.keys.nbytes + layer.values.nbytes for layer in entry.cache.layers)
    assert contexts > 0 and sum(entry.storages.values()) >= targets + contexts


# ------------------------------------------------------------------------------------------------------------- errors


class Unshowable(Exception):
    def __str__(self):
        raise ValueError("no text")


ERRORS = [TypeError("injected"), SystemExit("injected"), KeyboardInterrupt(), StopIteration("injected"), Unshowable()]
ERRORS += [MemoryError("injected"), asyncio.CancelledError(), concurrent.futures.CancelledError()]


class Broken:
    """A streamer, or a processor, whose calls of one name raise an error."""

    def __init__(self, name, error, after=0):
        self.name = name
        self.error = error
        self.after = after

    def _called(self, name):
        if name == self.name:
            self.after -= 1
            if self.after < 0:
                raise self.error

    def put(self, value):
        self._called("put")

    def next_round(self, num_drafted):
        self._called("next_round")

    def end(self):
        self._called("end")

    def on_token(self, token):
        self._called("on_token")

    def __call__(self, input_ids, scores):
        self._called("call")
        return scores


def failing(error):
    def fail(*args, **more):
        raise error

    return fail


def fails_once(owner, name, error, patch):
    """Replace a method by one that raises an error in its first call."""
    original = getattr(owner, name)
    calls = []

    def fail(*args, **more):
        calls.append(1)
        if len(calls) == 1:
            raise error
        return original(*args, **more)

    patch.setattr(owner, name, fail, raising=False)
    return calls


SHORT = 8  # tokens


def begun(served, numbers) -> list[list[int]]:
    """The target's own texts for these numbers of `PROMPTS`, cut after `SHORT` tokens of the answer."""
    return [served.texts[i][: served.inputs[i]["input_ids"].shape[1] + SHORT] for i in numbers]


def check_alive(decoder, served):
    """A request, and two at once, are answered as ever."""
    assert decoder.is_alive
    for numbers in ([1], [0, 1]):
        assert texts_of(answered(decoder, served, numbers, max_new_tokens=SHORT)) == begun(served, numbers)


def check_broken(request, error):
    """It fails with its error, or with one that can be shown."""
    with pytest.raises(Exception) as raised:
        request.future.result(timeout=60)
    assert type(raised.value) in (type(error), RuntimeError) and str(raised.value)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_broken_streamer_fails_its_request(error, decoder, served):
    """Errors that are no `Exception` ended the thread from a batch."""
    for name, after in (("put", 0), ("put", 3), ("next_round", 0), ("next_round", 1), ("end", 0)):
        (broken,) = answered(decoder, served, [0], streamers=[Broken(name, error, after)], max_new_tokens=SHORT)
        check_broken(broken, error)
    for name, after in (("put", 0), ("put", 3), ("end", 0)):
        streamers = [Broken(name, error, after)]
        broken, *unbroken = answered(decoder, served, range(2), streamers=streamers, max_new_tokens=SHORT)
        assert texts_of(unbroken) == begun(served, [1])
        check_broken(broken, error)
    assert not decoder.batch_failures
    check_alive(decoder, served)


@pytest.mark.parametrize("error", ERRORS[:3], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["call", "on_token"])
def test_broken_processor_fails_its_request(name, error, decoder, served):
    broken = request(decoder, served.inputs[0])
    broken.processors = [Broken(name, error, 2)]
    check_broken(decoder.submit(broken), error)
    check_alive(decoder, served)


@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "step",
    [
        "start",
        "token_ids",
        "remaining_tokens",
        "wants_tokens",
        "append",
        "next_round",
        "end_round",
        "finish",
        "at_end",
        "prompt",
        "generation_config",
        "inputs",
    ],
)
def test_broken_request_fails_no_other(step, error, decoder, served):
    """Each of these was read before the guard of a request that is decoded alone."""

    class Breaks(Request):
        pass

    for number in (1,) if step in ("next_round", "end_round", "inputs") else (1, 2):  # a batch needs neither
        requests = [request(decoder, served.inputs[i], max_new_tokens=SHORT) for i in range(number)]
        key = decoder.batch_key_of(requests[0])
        requests[0].__class__ = Breaks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Breaks, step, property(failing(error)), raising=False)
            patch.setattr(decoder, "batch_key_of", lambda request, key=key: key)
            for waiting in requests:
                decoder.submit(waiting)
            check_broken(requests[0], error)
            assert texts_of(waiting.future.result(timeout=60) for waiting in requests[1:]) == begun(
                served, range(1, number)
            )
    decoder.batch_failures = 0
    check_alive(decoder, served)


@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", ["generate", "can_batch_next", "_take_cache", "_keep_cache"])
def test_error_of_a_step_fails_one_request(step, error, decoder, served, monkeypatch):
    owner = served.target if step == "generate" else decoder
    fails_once(owner, step, error, monkeypatch)
    check_broken(decoder.submit(request(decoder, served.inputs[0])), error)
    monkeypatch.undo()
    check_alive(decoder, served)


@pytest.mark.parametrize("step", ["take", "keep"])
def test_broken_conversation_cache_is_dropped(step, decoder, served, monkeypatch):
    """The caches that broke it are dropped, or each request would fail."""
    answered(decoder, served, [0])
    monkeypatch.setattr(decoder.prefix_caches, step, failing(TypeError("injected")))
    assert texts_of(answered(decoder, served, [1])) == [served.texts[1]]
    assert len(decoder.prefix_caches.entries) == (step == "take")  # what was read anew is kept
    monkeypatch.undo()
    check_alive(decoder, served)


@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "step",
    [
        "_batch_manager",
        "_add_to_batch",
        "_take_output",
        "add_request",
        "get_result",
        "is_running",
        "cancel_request",
        "start",
        "stop",
    ],
)
def test_batch_errors_leave_requests_answered(step, error, decoder, served, monkeypatch):
    """Its requests go on one by one, from where the batch has left them."""
    managers = continuous_api.ContinuousBatchingManager
    fails_once(decoder if step.startswith("_") else managers, step, error, monkeypatch)
    left = CallbackStreamer(lambda: None)
    requests = answered(decoder, served, range(2), streamers=[left], max_new_tokens=SHORT)
    assert texts_of(requests) == begun(served, range(2)) and left.seen == 1 + len(requests[0].tokens)
    monkeypatch.undo()
    decoder.batch_failures = 0
    check_alive(decoder, served)


def test_error_while_ending_a_batch_is_survived(decoder, served, monkeypatch):
    """The guard of a batch was itself unguarded."""
    managers = continuous_api.ContinuousBatchingManager
    monkeypatch.setattr(managers, "get_result", failing(Unshowable()))
    monkeypatch.setattr(managers, "cancel_request", failing(SystemExit()))
    assert texts_of(answered(decoder, served, range(3))) == served.texts[:3]
    monkeypatch.undo()
    decoder.batch_failures = 0
    check_alive(decoder, served)


def test_error_outside_of_requests_is_survived(decoder, served, monkeypatch):
    fails_once(decoder, "receive", SystemExit(), monkeypatch)
    check_alive(decoder, served)


def test_waiting_requests_fail_when_the_thread_ends(served):
    """They waited for ever."""
    target, tokenizer, draft, *_ = served
    decoder = Decoder(target, tokenizer, draft)
    ready = threading.Event()
    first = decoder.submit(request(decoder, served.inputs[0], CallbackStreamer(ready.wait)))
    waiting = [decoder.submit(request(decoder, served.inputs[0], repetition_penalty=1.2)) for _ in range(2)]
    decoder.inbox.put(None)
    ready.set()
    assert first.future.result(timeout=60).token_ids == served.texts[0]
    for later in waiting:
        with pytest.raises(DecoderEnded, match="restart the server"):
            later.future.result(timeout=60)
    decoder.thread.join(timeout=60)
    with pytest.raises(DecoderEnded):
        decoder.submit(request(decoder, served.inputs[0]))
    assert not decoder.is_alive
    # It may end between the look and the inbox.
    decoder.__class__ = type("Ending", (Decoder,), {"is_alive": property(lambda self: next(looks))})
    looks = iter([True, False])
    with pytest.raises(DecoderEnded):
        decoder.submit(request(decoder, served.inputs[0])).future.result(timeout=1)
