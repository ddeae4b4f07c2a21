"""Copies of earlier text as drafts: found where the text repeats itself, and never seen in what is generated."""

import random
import types

import pytest
import torch
from support.pairs import make_draft, make_draft2, make_target, shallow_pair
from support.sampling import assert_follows, exact_distribution, sample
from support.scripted_draft import scripted
from torch._dynamo.utils import counters

from dflash_hf.modeling import compile_dflash
from dflash_hf.modeling.cache_dflash import SlotCache
from dflash_hf.modeling.cost_dflash import CostTable
from dflash_hf.modeling.drafting_dflash import STEPS_AT_ONCE
from dflash_hf.modeling.few_plans_dflash import FewPlans
from dflash_hf.modeling.lookup_dflash import Copier, CopyRecord, Lookup
from dflash_hf.modeling.plan_dflash import FastestPlan, Pace, Plan, Round
from dflash_hf.modeling.reliability_dflash import Reliability
from dflash_hf.modeling.target_dflash import CACHE_NAME


CPU = torch.device("cpu")
LOOP = [3, 8, 1, 9]


def read(tokens, **options) -> Lookup:
    lookup = Lookup(96, Reliability())
    lookup.extend(list(tokens), **options)
    return lookup


@pytest.fixture
def copying(monkeypatch):
    """
    Counts what is copied: whatever is found, up to a number of tokens that changes every round; else random tokens.
    """
    draws, made = random.Random(0), []

    def always(self, text):
        if self.copier is None:
            return None
        most = min(self.round.left - 1, self.widest.nodes, draws.randint(0, 8))
        tokens = self.copier.worth_copying(text, most, 0.0, [0.0] * (most + 1))
        if tokens is None and most:
            tokens = torch.tensor([[draws.randrange(8) for _ in range(most)] for _ in self.round.alive])
        made.append(most and tokens.shape[1])
        return tokens

    monkeypatch.setattr(FastestPlan, "_worth_copying", always)
    monkeypatch.setattr(FastestPlan, "_measures_nothing", lambda self: False)
    return made


def test_what_followed_last_is_copied():
    assert read([1, 2, 3, 4, 1, 2, 5, 6, 9, 1, 2]).copied(3)[0] == [5, 6, 9]
    assert read([1, 2, 3, 4, 5]).copied(3) == ([], [])
    assert read([]).copied(3) == ([], [])


def test_a_loop_is_copied_beyond_its_end():
    assert read([7, *LOOP, *LOOP]).copied(10)[0] == [3, 8, 1, 9, 3, 8, 1, 9, 3, 8]
    assert read([5, 5, 5]).copied(4)[0] == [5, 5, 5, 5]


def test_the_place_is_followed_while_the_text_agrees():
    lookup = read([1, 2, 3, 4, 5, 6, 1, 2])
    for token in (3, 4, 5):
        lookup.extend([token])
    assert lookup.agreeing == 5 and lookup.copied(1)[0] == [6]
    lookup.extend([9])
    assert lookup.copied(4) == ([], [])


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_occurred_before(seed):
    draws = random.Random(seed)
    text = [draws.randrange(4) for _ in range(300)]
    lookup = Lookup(96, Reliability())
    for end, token in enumerate(text, start=1):
        lookup.extend([token])
        before = [i for i in range(2, end) if text[i - 2 : i] == text[end - 2 : end]]
        assert (lookup.source is not None) == bool(before)
        if before:
            source, agreeing = lookup.source, lookup.agreeing
            assert text[source - agreeing : source] == text[end - agreeing : end]


def test_reliability_is_learned_from_what_was_generated():
    assert not any(seen for seen, *_ in read(LOOP * 9, generated=False).reliability.seen)
    good, bad = read(LOOP * 9), Lookup(96, Reliability())
    for number in range(9):
        bad.extend([1, 2, 10 + number])
    assert good.copied(1)[1][0] > 0.9 > 0.1 > bad.reliability(Lookup.said(2))
    chances = good.copied(8)[1]
    assert chances == sorted(chances, reverse=True)


def planner(speed: float, accepted: float, slope: float = 0.05) -> FastestPlan:
    pace = Pace(tokens=speed, cost=1.0)
    pace.copies.reliability.seen = [(100.0, accepted, 50.0)] * len(pace.copies.reliability.seen)
    made = FastestPlan(Plan(9), CostTable(0.1, 8, CPU), {"key": pace}, "key", (1, 60), 96)
    made.widest, made.round = types.SimpleNamespace(nodes=16), Round([True], 100, [])
    made.known = types.SimpleNamespace(curve=lambda *place, drafted: [1.0 + slope * n for n in range(17)])
    made.place = (1, 9)
    return made


def copied(planner) -> list[int]:
    ids = torch.tensor([LOOP * 4])
    writer = types.SimpleNamespace(buffer=ids, prompt_length=ids.shape[1])
    host = types.SimpleNamespace(lengths=[0], longest=0, alive=[True], acceptance_lengths=[[]])
    text = types.SimpleNamespace(writer=writer, host=host, max_new=planner.round.left, last=ids[:, -1])
    tokens = planner._worth_copying(text)
    return [] if tokens is None else tokens[0].tolist()


@pytest.mark.parametrize(("speed", "accepted", "copies"), [(1.8, 99.0, 16), (1.8, 5.0, 0), (1.0, 99.0, 16)])
def test_copies_must_be_faster_than_the_drafter(speed, accepted, copies):
    made = planner(speed, accepted)
    assert copied(made) == (LOOP * 4)[:copies]


def test_no_more_is_copied_than_pays_or_is_left():
    assert 1 < len(copied(planner(1.8, 50.0))) < 16
    assert not copied(planner(1.8, 99.0, slope=0.6))
    made = planner(1.8, 99.0)
    made.round.left = 5
    assert len(copied(made)) == 4


def test_copies_cost_what_they_were_measured_to_cost():
    """Not what drafted rounds let one guess: here a forward takes as long as its tokens are many."""
    table = CostTable(0.1, 8, CPU)
    for _ in range(3):
        for size in (2, 4, 8):
            table.note([(1, 60, (size, True), 3.0 + size)])
        table.note([(1, 60, (0, False), 1.0)])
    drafted = table.copy().curve(1, 60, 16)
    for _ in range(3):
        for copies in (4, 16):
            table.note([(1, 60, (copies, False), 1.0 + copies)])
    known = table.copy()
    assert known.curve(1, 60, 16) == drafted and drafted[4] == pytest.approx(7.0)
    copied = known.curve(1, 60, 16, drafted=False)
    assert [copied[n] for n in (0, 4, 16)] == pytest.approx([1.0, 5.0, 17.0])
    assert copied[8] == pytest.approx(9.0, rel=0.1) and copied == sorted(copied)
    assert CostTable(0.1, 8, CPU).curve(1, 60, 16, drafted=False)[0] == 1.0


def test_copies_are_measured(monkeypatch):
    """In every round that copies, under sizes of their own."""
    monkeypatch.setattr(Pace, "speed", 1.0)
    target, draft = make_target(), make_draft(make_target(), block_size=6)
    draft.decoding_config.block_size = None
    noted, note = [], CostTable.note
    monkeypatch.setattr(CostTable, "note", lambda self, rounds: (noted.extend(rounds), note(self, rounds)))
    output = target.generate(torch.tensor([LOOP * 3]), max_new_tokens=90, do_sample=False, assistant_model=draft)
    assert output.shape[1] == 12 + 90 and max(size for _, _, (size, drafted), _ in noted if not drafted) > 1


def test_placeholders_are_not_copied():
    """A prompt given as embeddings may have ids that the target has no embedding for."""
    ids = [7, 11, 12, 13, -200, -200, 20, 5000, 21, 11, 12]
    assert read(ids).copied(5)[0] == [13]
    assert read([*ids[:7], 13, -200]).copied(4)[0] == []
    assert len(read(LOOP * 30).copied(64)[0]) == Lookup.LONGEST < STEPS_AT_ONCE, "a ring of slots has room for it"
    target = make_target()
    draft = make_draft(target, block_size=6)
    draft.decoding_config.block_size = None
    embeds, prompt = torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([ids])
    options = {"inputs_embeds": embeds, "input_ids": prompt, "max_new_tokens": 30, "do_sample": False}
    options["sequence_bias"] = {(11,): 30.0, (11, 12): 60.0}  # so that the text comes back to the placeholders
    plain = target.generate(**options)
    assert plain[0, 11:].tolist().count(12) > 3
    assert torch.equal(target.generate(**options, assistant_model=draft), plain)


FAMILIES = ["qwen3", "gemma3", "gpt2", "lfm2", "qwen3_next"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [make_draft, make_draft2])
@pytest.mark.parametrize("window", [None, 8])
def test_texts_with_copies_are_the_targets(family, make, window, copying):
    """Copies that are right, partly right and wrong; and the cache that comes back goes on."""
    target = make_target(family, torch.float64, attn=None)
    prompt = torch.tensor([[5, 9, 17, 33, 75, 50, 5, 9, 17, 33, 2, 5, 9]])
    options = {"max_new_tokens": 70, "do_sample": False}
    expected = target.generate(prompt, **options)
    draft = scripted(make(target, block_size=6), expected, error_rate=0.15, ranks=2)
    draft.decoding_config.block_size, draft.decoding_config.window = None, window
    output = target.generate(prompt, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    rounds = list(zip(copying, output.acceptance_lengths[0], strict=True))
    assert any(0 < size for size, _ in rounds) and any(size == 0 for size, _ in rounds)
    more, turn = torch.cat([expected, prompt], dim=1), {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(prompt, **options, return_dict_in_generate=True).past_key_values
    again = target.generate(more, **{CACHE_NAME: output.past_key_values}, assistant_model=draft, **turn)
    assert torch.equal(again, target.generate(more, **{CACHE_NAME: plain}, **turn))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("window", "options"), [(None, {}), (8, {"eos_token_id": [3, 8, 20]}), (None, {"repetition_penalty": 1.2})]
)
def test_every_row_of_a_batch_copies_from_itself(family, window, options, copying):
    """Rows of several lengths, some of which find nothing or end early."""
    target = make_target(family, torch.float64, attn=None)
    prompt = torch.tensor([[0, 0, 0, *LOOP, *LOOP], [5, 9, 17, 5, 9, 17, 33, 2, 5, 9, 17], list(range(30, 41))])
    mask = torch.tensor([[0] * 3 + [1] * 8, [1] * 11, [1] * 11])
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **options}
    expected = target.generate(prompt, **options)
    draft = scripted(make_draft(target, block_size=6), expected, error_rate=0.15, ranks=2)
    draft.decoding_config.block_size, draft.decoding_config.window = None, window
    output = target.generate(prompt, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert 0 in copying and max(copying) > 1


@pytest.mark.parametrize("fast", [0, 1])
def test_a_row_that_has_ended_writes_no_slot_of_another(fast, monkeypatch):
    """Its features are collected with those of the row that goes on, whose keys stay as they are."""
    target = make_target(dtype=torch.float64)
    prompt = torch.randint(5, 90, (2, 38), generator=torch.Generator().manual_seed(38))
    options = {"max_new_tokens": 200, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(prompt, **options)
    script = expected.clone()
    script[1 - fast, 38:] = (script[1 - fast, 38:] + 7) % 90
    draft, rounds, past = scripted(make_draft(target, block_size=6), script, error_rate=0.0), [], []
    next_plan, place = FastestPlan.next, SlotCache.place

    def seldom(self, text):
        """As soon as the fast row has ended, a draft in every 36th round."""
        rounds.append(all(text.host.alive))
        self.pace.resting = int(not rounds[-1] and len(rounds) % 36 > 0)
        return next_plan(self, text)

    def watched(self, *slots):
        past.extend(int(group.max()) - self.capacity for group in slots)
        place(self, *slots)

    monkeypatch.setattr(FastestPlan, "next", seldom)
    monkeypatch.setattr(FastestPlan, "_worth_copying", lambda self, text: None)
    monkeypatch.setattr(SlotCache, "place", watched)
    draft.decoding_config.block_size = None
    assert torch.equal(target.generate(prompt, **options, assistant_model=draft), expected)
    assert sum(rounds) < 60 < len(rounds) - 60 and max(past) == -1


def test_what_a_row_that_is_ahead_copies_is_worth_less():
    """A batch is done when its slowest row is."""
    lengths, alive = [0, 0], [True, True]

    def copied(rows, most=8):
        copier = Copier(2, 96, CopyRecord())
        buffer = torch.tensor(rows)
        text = types.SimpleNamespace(
            writer=types.SimpleNamespace(buffer=buffer, prompt_length=16),
            host=types.SimpleNamespace(
                lengths=lengths, longest=max(lengths), alive=alive, acceptance_lengths=[[2] * 12, [1] * 12]
            ),
            last=torch.tensor([row[15 + length] for row, length in zip(rows, lengths, strict=True)]),
            max_new=100,
        )
        return copier.worth_copying(text, most, 1.0, [1 + 0.2 * n for n in range(most + 1)])

    loop, other = LOOP * 10, list(range(40, 80))
    assert copied([other, other]) is None
    both = copied([loop, loop]).tolist()
    assert both == [(LOOP * 2)[: len(both[0])]] * 2
    one = copied([loop, other]).tolist()
    assert one[0] == (LOOP * 2)[: len(one[0])] and set(one[1]) == {0} and len(one[0]) < len(both[0])
    lengths[0] = 24
    assert copied([loop, other]) is None
    one = copied([other, loop]).tolist()
    assert one == [[0] * len(one[0]), both[0][: len(one[0])]]
    alive[1] = False
    assert copied([loop, loop]) is not None


def test_of_a_gain_only_what_reaches_the_slowest_row_counts():
    """If one row finds nothing, a batch soon stops copying for the others, and tries again later."""
    record = CopyRecord()
    text = types.SimpleNamespace(
        writer=types.SimpleNamespace(buffer=torch.tensor([LOOP * 4, range(40, 56)]), prompt_length=16),
        host=types.SimpleNamespace(lengths=[0, 0], longest=0, alive=[True, True], acceptance_lengths=[[], []]),
        last=torch.tensor([9, 55]),
        max_new=100,
    )

    def copied(copier):
        return copier.worth_copying(text, 8, 1.0, [1 + 0.1 * n for n in range(9)]) is not None

    copier, tried = Copier(2, 96, record), []
    for _ in range(1000):
        tried.append(copied(copier))
        if tried[-1]:
            copier.learn([9, 1], [True, True])
    assert 3 <= sum(tried[:20]) <= 12 and 1 <= sum(tried[500:]) <= 15
    copier.gained = [40, 0]
    copier.learn([1, 0], [True, False])
    assert record.gained == 0, "the others' gains are not the gain of the round in which the slowest row ends"
    assert record.share(8) < record.share(2) < 0.6
    assert CopyRecord().share(8) < CopyRecord().share(2) == 1.0


def test_copies_are_accepted_and_rejected(copying):
    """Of a text that loops for a while and then does not."""
    target = make_target(dtype=torch.float64)
    prompt = torch.tensor([[*LOOP, *LOOP, *LOOP, 40, 41, *LOOP]])
    options = {"max_new_tokens": 120, "do_sample": False}
    expected = target.generate(prompt, **options)
    draft = make_draft(target, block_size=6)
    draft.decoding_config.block_size = None
    output = target.generate(prompt, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    copied = [(size, n) for size, n in zip(copying, output.acceptance_lengths[0], strict=True) if size]
    assert any(n == size + 1 for size, n in copied) and any(n <= size for size, n in copied)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 4}, {"stop_strings": None}])
def test_processors_that_read_the_text_see_copies_token_by_token(options, copying):
    target, prompt = make_target(dtype=torch.float64), torch.tensor([[*LOOP, *LOOP, *LOOP]])
    options = {"max_new_tokens": 60, **options}
    draft = make_draft(target, block_size=6)
    draft.decoding_config.block_size = None
    plain = target.generate(prompt, **options, do_sample=False)
    assert torch.equal(target.generate(prompt, **options, do_sample=False, assistant_model=draft), plain)
    torch.manual_seed(3)
    plain = target.generate(prompt, **options, do_sample=True, top_k=4)
    torch.manual_seed(3)
    assert torch.equal(target.generate(prompt, **options, do_sample=True, top_k=4, assistant_model=draft), plain)
    assert any(copying)


@pytest.mark.parametrize("make", [make_draft, make_draft2])
def test_samples_follow_the_target_between_copies_and_drafts(small, make, copying):
    prompt = [3, 1, 4, 2, 3, 1, 4, 6, 3, 1]
    expected = exact_distribution(small, prompt, 1.0, 0.9)
    draft = make(small, block_size=4)
    draft.decoding_config.block_size = None
    counts = dict.fromkeys(expected, 0)
    torch.manual_seed(0)
    for _ in range(500):
        (text,) = sample(small, draft, prompt, 1, 1.0, 0.9).sequences[:, len(prompt) :].tolist()
        counts[tuple(text)] += 1
    assert_follows(counts, expected)
    assert any(copying)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("make", [make_draft, make_draft2])
def test_one_graph_serves_all_copies(make, rows, monkeypatch):
    """Rounds that are compiled copy as many tokens as a block has, and other tokens every time."""
    draws, made = random.Random(0), []

    def copying(self, text):
        if draws.random() < 0.4:
            return None
        tokens = self.copier.worth_copying(text, 5, 0.0, [0.0] * 6)
        if tokens is None or tokens.shape[1] < 5:
            tokens = torch.tensor([[draws.randrange(8) for _ in range(5)] for _ in text.host.alive])
        made.append(self.plans[1]._replace(copied=tokens))
        return made[-1]

    monkeypatch.setattr(FewPlans, "_copying", copying)
    monkeypatch.setattr(FewPlans, "_fastest", lambda self: self.plans[1])
    monkeypatch.setattr(FewPlans, "EARNED", 3)
    target, draft = shallow_pair(make, block_size=6)
    prompt = torch.tensor([LOOP * 3, [*LOOP[::-1], 20, 21, 22, 23, *LOOP]])[:rows]
    options = {"max_new_tokens": 60, "do_sample": False}
    expected = target.generate(prompt, **options)
    draft = scripted(draft, expected, error_rate=0.15, ranks=2)
    draft.decoding_config.block_size, draft.decoding_config.compile = None, "eager"
    torch._dynamo.reset()
    counters.clear()
    for _ in range(2):
        output = target.generate(prompt, **options, assistant_model=draft, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
    assert len({str(plan.copied.tolist()) for plan in made}) > 4 and len({plan.key for plan in made}) == 1
    assert counters["stats"]["unique_graphs"] == 2, "of whole blocks, and of copies"
    assert max(output.acceptance_lengths[0]) > 2 and not compile_dflash.failed_on(target, draft)
    torch._dynamo.reset()


def test_set_sizes_and_rows_in_step_copy_nothing(copying):
    target, prompt = make_target(), torch.tensor([LOOP * 3] * 2)
    draft = make_draft(target, block_size=6)
    draft.decoding_config.block_size = 4
    for rows in (1, 2):
        target.generate(prompt[:rows], max_new_tokens=30, do_sample=False, assistant_model=draft)
    draft.decoding_config.block_size = None
    unknown = [lambda ids, scores: scores + 0.0]
    target.generate(prompt, max_new_tokens=30, do_sample=False, assistant_model=draft, logits_processor=unknown)
    assert not copying
