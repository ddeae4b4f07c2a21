"""A batch that is always full: the texts of `generate`, whatever decodes beside them, and no row that waits."""

import copy
import itertools
import random

import pytest
import torch
from support.pairs import make_target
from support.tiny_models import tiny_model
from support.watch import Watch
from transformers import GenerationConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash_hf.decoding.session import SlotSession
from dflash_hf.synthetic import continuous_batch, sampling
from dflash_hf.synthetic import responses as module
from dflash_hf.synthetic.continuous_batch import BatchCache, NextToken
from dflash_hf.synthetic.prompt_queue import PromptQueue
from dflash_hf.synthetic.responses import (
    generate_responses,
    rows_that_fit,
    stream_responses,
    supports_continuous_batch,
)
from dflash_hf.synthetic.sampling import TokenSampler, sample_tokens
from dflash_hf.targets.generation import cut_reason


STOPS = [7, 11, 13, 17, 19, 23]
SAMPLED = GenerationConfig(do_sample=True, temperature=1.3, top_p=0.9, eos_token_id=STOPS[:3])


def make_prompts(count=12, longest=30, seed=1):
    draw = random.Random(seed)
    return [[draw.randrange(2, 90) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def all_of(target, prompts, max_new, config, rows, seed=0):
    answers = list(stream_responses(target, enumerate(prompts), max_new, config, rows, seed))
    assert sorted(number for number, _ in answers) == list(range(len(prompts)))  # each once
    return [text for _, text in sorted(answers)]


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_greedy_texts_equal_generate(family):
    """Full and sliding attention; prompts longer than a window, texts that outgrow the first slots, long ones last."""
    target = make_target(family)
    prompts = [*make_prompts(), *make_prompts(1, 90, seed=3)]
    config = copy.deepcopy(target.generation_config)
    config.eos_token_id = STOPS[:1]
    config.suppress_tokens = [60]
    assert supports_continuous_batch(target, config)
    config.max_new_tokens = 100
    expected = [target.generate(torch.tensor([p]), generation_config=config)[0, len(p) :].tolist() for p in prompts]
    for rows in (1, 5):
        assert all_of(target, prompts, 100, config, rows) == expected
    assert len({len(text) for text in expected}) > 5 and max(map(len, expected)) > 35


@pytest.mark.parametrize("in_slots", [True, False])
def test_sample_depends_on_seed_and_number_alone(target, in_slots, monkeypatch):
    """Not on the rows of the batch, on the prompts beside it, or on a kill: the same in slots and by `generate`."""
    monkeypatch.setattr(module, "supports_continuous_batch", lambda *args: in_slots)
    prompts = make_prompts()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    reference = all_of(target, prompts, 40, SAMPLED, 5, seed=3)
    assert torch.rand(1) == expected  # the caller's randomness is left alone
    for rows in (1, 64):
        assert all_of(target, prompts, 40, SAMPLED, rows, seed=3) == reference
    later = dict(stream_responses(target, ((i, prompts[i]) for i in (10, 4, 9)), 40, SAMPLED, 2, seed=3))
    assert later == {i: reference[i] for i in (10, 4, 9)}
    assert all_of(target, prompts, 40, SAMPLED, 5, seed=4) != reference
    monkeypatch.setattr(module, "supports_continuous_batch", lambda *args: not in_slots)
    assert all_of(target, prompts, 40, SAMPLED, 5, seed=3) == reference


def test_finished_row_is_replaced_at_once(target, monkeypatch):
    """No step with a row that is free while a prompt waits, and no prompt is taken before there is a row for it."""
    taken_numbers = []
    running = set()
    steps = []
    rows = 4
    step = BatchCache.step

    def counted(self, tokens):
        steps.append((len(tokens), self.rows, len(taken_numbers)))
        return step(self, tokens)

    def prompts():
        for number, ids in enumerate(make_prompts(40)):
            assert len(running) < rows
            taken_numbers.append(number)
            running.add(number)
            yield number, ids

    monkeypatch.setattr(BatchCache, "step", counted)
    config = GenerationConfig(eos_token_id=STOPS)
    for number, text in stream_responses(target, prompts(), 60, config, rows):
        running.remove(number)
        assert text[-1] in STOPS or len(text) == 60
    # Those whose first token ends them leave in the step that they would have begun with.
    while_waiting = [active for active, _, count in steps if count < 40]
    assert sum(while_waiting) > 0.9 * rows * len(while_waiting)
    assert steps[-1][1] < rows  # free rows are dropped when no prompt is left
    assert not running and len(taken_numbers) == 40


def test_repeated_prompts_are_prefilled_once(target, monkeypatch):
    prefills = []
    verify = SlotSession.verify
    config = GenerationConfig(eos_token_id=STOPS)
    expected = all_of(target, make_prompts(2), 30, config, 2)

    monkeypatch.setattr(SlotSession, "verify", lambda *of: prefills.append(of[1].tokens.shape) or verify(*of))
    texts = all_of(target, make_prompts(2) * 10, 30, config, 3)
    assert texts == expected * 10
    prefill_lengths = [size for rows, size in prefills if rows == 1]
    # Of ten times; a prompt is read again only where no slot holds it.
    assert sum(prefill_lengths) < 3 * sum(map(len, make_prompts(2)))
    monkeypatch.setattr(continuous_batch, "_MAX_CACHED_LOGITS", 1)
    assert all_of(target, make_prompts(2) * 10, 30, config, 3) == expected * 10


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_common_prefix_is_prefilled_once(family, monkeypatch):
    """Longer than windows and chunks; prompts that begin others, end where they begin, or come again."""
    target = make_target(family, attn="eager" if family == "gpt_oss" else "sdpa")
    begin, *ends = make_prompts(9, 12, seed=5)
    begin = (begin * 60)[:40]
    ends[0] = (ends[0] * 60)[:170]
    prompts = [begin + end for end in ends] + [begin, begin + ends[0], begin[:5], [*begin[:38], 1]]
    config = GenerationConfig(eos_token_id=STOPS[:2], pad_token_id=0, max_new_tokens=24)
    expected = [target.generate(torch.tensor([p]), generation_config=config)[0, len(p) :].tolist() for p in prompts]
    assert supports_continuous_batch(target, config)
    prefills = []
    verify = SlotSession.verify

    monkeypatch.setattr(SlotSession, "verify", lambda *of: prefills.append(of[1].tokens.shape) or verify(*of))
    assert all_of(target, prompts, 24, config, 16) == expected
    sizes = [size for rows, size in prefills if rows == 1]
    new_lengths = [max(len(end), 1) for end in ends[1:]]
    assert sizes[: len(ends)] == [len(prompts[0]), *new_lengths]  # but for what two ends have in common
    assert sum(sizes) < 350 < sum(map(len, prompts)) / 2
    monkeypatch.setattr(continuous_batch, "_PREFILL_CHUNK", 7)
    assert all_of(target, prompts, 24, config, 3) == expected


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_next_turn_prefills_only_new_tokens(family, monkeypatch):
    """Its next prompt is asked for at once, and only what is new of it is read; full batches all the time."""
    target = make_target(family)
    config = GenerationConfig(eos_token_id=STOPS[:2], pad_token_id=0, max_new_tokens=9)
    prompts = {}
    expected = {}
    answers = {}
    prefills = []
    steps = []
    for number, ids in enumerate(make_prompts(7, 40, seed=5)):
        prompts[number, 0] = ids
        for turn in range(3):
            text = target.generate(torch.tensor([ids]), generation_config=config)[0, len(ids) :].tolist()
            expected[number, turn] = text
            ids = [*ids, *text, 50 + turn, 60]

    def counted_step(self, next_tokens):
        num_unanswered = len(prompts) - len(answers)
        steps.append((len(next_tokens), num_unanswered))
        return step(self, next_tokens)

    verify = SlotSession.verify
    step = BatchCache.step
    monkeypatch.setattr(SlotSession, "verify", lambda *of: prefills.append(of[1].tokens.shape) or verify(*of))
    monkeypatch.setattr(BatchCache, "step", counted_step)
    queue = PromptQueue(list(prompts.items()))
    for (number, turn), text in stream_responses(target, queue, 9, config, 4):
        answers[number, turn] = text
        if turn < 2:
            prompts[number, turn + 1] = [*prompts[number, turn], *text, 50 + turn, 60]
            queue.push((number, turn + 1), prompts[number, turn + 1])
    assert answers == expected
    sizes = [size for rows, size in prefills if rows == 1 and size > 1]
    assert sum(size <= 3 for size in sizes) >= 12  # of 14 next turns: the last token, and two that are new
    assert all(rows == min(4, num_unanswered) for rows, num_unanswered in steps)


def test_pushed_prompts_are_taken_first():
    """The last one before the others; and a queue that was empty goes on when more are pushed."""
    queue = PromptQueue((number, [number]) for number in range(3))
    queue.push("a", [7])
    queue.push("b", [8])
    assert queue.pop_up_to(3) == [("b", [8]), ("a", [7]), (0, [0])]
    assert queue.pop_up_to(9) == [(1, [1]), (2, [2])]
    assert queue.pop() is None
    queue.push("c", [9])
    assert queue.pop() == ("c", [9])
    assert queue.pop_up_to(2) == []


def test_looking_at_a_queue_takes_nothing():
    """Iterating over the list that was the queue emptied it."""
    queue = PromptQueue([(0, [5])])
    with pytest.raises(TypeError):
        list(queue)
    assert queue.pop() == (0, [5])


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_text"])
def test_recurrent_targets_decode_batch_by_batch(family):
    target = make_target(family, attn=None)
    prompts = make_prompts(5, 11)
    config = GenerationConfig(eos_token_id=STOPS, pad_token_id=0)
    assert not supports_continuous_batch(target, config)
    outputs = [target.generate(torch.tensor([p]), generation_config=config, max_new_tokens=12) for p in prompts]
    expected = [row[0, len(p) :].tolist() for row, p in zip(outputs, prompts, strict=True)]
    assert all_of(target, prompts, 12, config, 1) == expected


def test_unsupported_settings_decode_batch_by_batch(target):
    prompts = make_prompts(7)
    for fields in ({"repetition_penalty": 1.5}, {"min_p": 0.1, "do_sample": True}, {"num_beams": 2}):
        assert not supports_continuous_batch(target, GenerationConfig(**fields))
    penalty = GenerationConfig(repetition_penalty=5.0, pad_token_id=0)
    outputs = [target.generate(torch.tensor([p]), generation_config=penalty, max_new_tokens=20) for p in prompts]
    expected = [row[0, len(p) :].tolist() for row, p in zip(outputs, prompts, strict=True)]
    assert all_of(target, prompts, 20, penalty, 1) == expected


@pytest.mark.parametrize("in_slots", [True, False])
@pytest.mark.parametrize(("family", "name"), [("gpt2", "n_positions"), ("qwen3", "max_position_embeddings")])
def test_row_ends_where_the_context_is_full(family, name, in_slots, monkeypatch):
    """Learned positions ended in an `IndexError`, rotary ones went on beyond those that the target was trained on."""
    monkeypatch.setattr(module, "supports_continuous_batch", lambda *args: in_slots)
    target = make_target(family, **{name: 48})
    prompts = [*make_prompts(6), [5] * 47]
    texts = all_of(target, prompts, 100, target.generation_config, 3)
    for ids, text in zip(prompts, texts, strict=True):
        output = target.generate(torch.tensor([ids]), max_new_tokens=48 - len(ids))
        assert text == output[0, len(ids) :].tolist()
    assert rows_that_fit(target, target.generation_config, 1152, 8) == (4 if in_slots else 16)
    with pytest.raises(ValueError, match="The prompt has 48 tokens; prompt and answer together may have at most 48"):
        all_of(target, [[5] * 48], 8, target.generation_config, 3)


def test_each_prompt_has_one_answer(target):
    """`num_return_sequences` gave prompts the answers to others, `return_dict_in_generate` was a `TypeError`."""
    prompts = make_prompts(5)
    for config in (SAMPLED, GenerationConfig(repetition_penalty=5.0, pad_token_id=0)):
        several = copy.deepcopy(config)
        several.num_return_sequences = 2
        several.return_dict_in_generate = True
        assert all_of(target, prompts, 20, several, 3) == all_of(target, prompts, 20, config, 3)


@pytest.mark.parametrize(
    ("likely", "top_k", "top_p"),
    [(2, 0, 0.95), (2, 5, 0.3), (16, 0, 0.3), (16, 5, 1.0), (16, 5, 0.95), (1024, 0, 1.0), (1024, 5, 0.95)],
)
def test_distribution_equals_that_of_transformers(likely, top_k, top_p, monkeypatch):
    """Evenly spread draws find each token as often as its probability says, in narrow rows and in wide ones."""
    monkeypatch.setattr(sampling, "_NUM_TOP_TOKENS", likely)
    scores = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[9], [4], [2], [1], [0.1], [99]]
    )
    scores[:, 3] = -torch.inf
    count = 4000
    uniforms = (torch.arange(count, dtype=torch.double) + 0.5) / count
    sampler = TokenSampler(GenerationConfig(do_sample=True, temperature=0.7, top_k=top_k, top_p=top_p), seed=0)
    expected = TemperatureLogitsWarper(0.7)(None, scores)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    for row, probabilities in zip(scores, expected.softmax(-1), strict=True):
        tokens = sample_tokens(row.expand(count, -1) / sampler.temperature, uniforms, sampler.top_k, sampler.top_p)
        frequencies = torch.bincount(tokens, minlength=64) / count
        assert (frequencies - probabilities).abs().max() < 2 / count


def test_draw_near_one_takes_a_possible_token(monkeypatch):
    scores = torch.full((1, 8), -torch.inf)
    scores[0, 2:4] = 0.0
    uniforms = torch.tensor([1 - 2**-53], dtype=torch.double)
    for top_k, top_p in itertools.product((0, 4), (0.9, 1.0)):
        assert int(sample_tokens(scores, uniforms, top_k, top_p)) in (2, 3)


def test_batch_size_follows_memory_and_text_count(target, monkeypatch):
    def rows(texts, **options):
        return rows_that_fit(target, GenerationConfig(**options), 40, texts)

    assert (rows(1000), rows(100), rows(1), rows(1000, num_beams=2)) == (128, 50, 1, 16)
    cache = BatchCache(target, 1)
    cache.step({0: NextToken(id=0, slot=40)})
    monkeypatch.setattr(module, "free_memory", lambda device: 2 * 5.5 * cache.nbytes)
    assert rows(1000) == 5


def test_free_memory_reads_only_the_targets_device(monkeypatch):
    """The library's function made a context on every visible card: half a GB of each, also for a target on the CPU."""
    devices = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: devices.append(str(device)) or (7, 9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("all cards"))
    assert module.free_memory(torch.device("cuda", 3)) == 7 and devices == ["cuda:3"]
    assert module.free_memory(torch.device("cpu")) > 7 and devices == ["cuda:3"]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_answers_keep_no_graph_and_no_memory(family):
    """With weights as they are loaded, which want gradients; the second has a state that is rolled back."""
    target = tiny_model(family).train().eval().requires_grad_(True)
    config = GenerationConfig(do_sample=True, eos_token_id=1, pad_token_id=0)
    prompts = make_prompts(40, longest=12)
    list(stream_responses(target, enumerate(prompts[:4]), 8, config, 4))  # what is found out once
    peaks = []
    with Watch() as watch:
        for _ in stream_responses(target, enumerate(prompts), 8, config, 4):
            peaks.append(watch.peak_since_last())
        rows_that_fit(target, config, 20, 40)
        generate_responses(target, prompts[:4], 8, None, generation_config=config)
    assert len(peaks) == 40 and not watch.graphs
    assert 0 < max(peaks[20:36]) < 1.05 * max(peaks[:20])  # the last rows leave the slots


def test_offloaded_target_has_a_batch_size():
    """Its first weight is on no device, which ended in `KeyError: 'mps'`."""
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(make_target("llama"), execution_device=torch.device("cpu"))
    assert rows_that_fit(offloaded, GenerationConfig(), 40, 16) == 8


def test_cut_answer_names_its_limit():
    """At `max_time` of the target's generation config it was said to fill the context."""
    config = GenerationConfig(eos_token_id=2)
    assert [cut_reason(ids, 3, config) for ids in ([], [5, 2], [5, 6, 2])] == ["", "", ""]
    assert cut_reason([5, 6, 7], 3, config) == "max_new_tokens=3"
    assert cut_reason([5, 6, 7], 3, config, "--max-new-tokens 3") == "--max-new-tokens 3"
    assert cut_reason([5, 6], 3, config) == "the target's context limit"
    config.max_time = 0.1
    assert cut_reason([5, 6], 3, config) == "the target's max_time"
