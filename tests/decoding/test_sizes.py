"""How much a round verifies: chosen by what it costs and what is accepted, and never seen in the text."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.pairs import make_draft, make_target
from support.scripted_draft import recognising, scripted

from dflash_hf.decoding import costs as costs_module
from dflash_hf.decoding.costs import NOTHING, CostTable, table_of
from dflash_hf.decoding.policies import DraftPolicy
from dflash_hf.decoding.reliability import Reliability, TextCalibration
from dflash_hf.decoding.sizes import Throughput


CPU = torch.device("cpu")
ROW = torch.tensor([[5, 9, 17, 33]])


def opened(draft):
    """A drafter that chooses its sizes."""
    draft.decoding_config.block_size = None
    return draft


# ------------------------------------------------------------------------------------------------- drafts of any kind


@pytest.mark.parametrize("fast", [0, 1])
def test_row_that_has_ended_changes_no_other(fast, monkeypatch):
    """Its features are collected, for many rounds without a draft, with those of the row that goes on."""
    target, prompt = make_target(), torch.randint(5, 90, (2, 38), generator=torch.Generator().manual_seed(38))
    options = {"max_new_tokens": 200, "do_sample": False, "return_dict_in_generate": True}
    texts = [*target.generate(prompt, **options).sequences]
    draft = recognising(target, texts, block_size=6, error_rate=0.0)
    slow = texts[1 - fast][38:].tolist()
    draft.likely[1 - fast, 38:] = draft.likely[1 - fast, 38:].flip(-1)  # this row is always wrong
    assert len(slow) == 200

    class Seldom(DraftPolicy):
        """As soon as the fast row has ended, a draft in every 36th round."""

        rounds = 0

        def get_candidates(self, state):
            self.rounds += not all(state.unfinished)
            if not all(state.unfinished) and self.rounds % 36:
                return self.no_draft(state)
            return super().get_candidates(state)

    draft.decoding_config.policy = Seldom
    output = target.generate(prompt, **options, assistant_model=draft)
    assert torch.equal(output.sequences, torch.stack(texts))
    assert len(output.acceptance_lengths[fast]) < 60 < len(output.acceptance_lengths[1 - fast]) - 60


# --------------------------------------------------------------------------------------------------------- whole calls


@pytest.fixture
def standing_clock(monkeypatch):
    """Nothing is measured: costs are those of `costs`."""
    monkeypatch.setattr(costs_module, "clock", lambda device: 0.0)


def costs(target, draft, drafted, rows: int = 1, copied=lambda size: 99.0) -> None:
    """What rounds cost, by their size, in units of one without a draft."""
    known = [
        (NOTHING, 1.0),
        *(((n, True), drafted(n)) for n in range(17)),
        *(((n, False), copied(n)) for n in (1, 16)),
    ]
    table_of(target, draft).note([(rows, 60, work, seconds) for work, seconds in known] * 3)


class Situation:
    """Calls of a pair: an unscripted drafter is always wrong, a scripted one as often as it says."""

    def __init__(self, drafted, error_rate: float = 1.0, rows: int = 1, new: int = 60):
        self.target, prompt = make_target(), ROW.repeat(rows, 1)
        prompt[:, 0] += torch.arange(rows)
        self.options = {
            "input_ids": prompt,
            "max_new_tokens": new,
            "do_sample": False,
            "return_dict_in_generate": True,
        }
        self.expected = self.target.generate(**self.options).sequences
        self.draft = make_draft(self.target, block_size=6)
        if error_rate < 1:
            self.draft = scripted(self.draft, self.expected, error_rate=error_rate)
        costs(self.target, opened(self.draft), drafted, rows)

    def call(self):
        output = self.target.generate(**self.options, assistant_model=self.draft)
        assert torch.equal(output.sequences, self.expected)
        assert len(output.draft_sizes) == max(map(len, output.acceptance_lengths))
        return output


@pytest.mark.parametrize("rows", [1, 4])
def test_drafting_that_pays_does_not_rest(rows, standing_clock):
    situation = Situation(lambda size: 1.4, error_rate=0.0, rows=rows)
    for _ in range(2):
        output = situation.call()
    assert output.draft_sizes.count(0) <= 2 and max(output.draft_sizes) >= 5 and output.estimated_speedup > 2


def test_drafting_that_does_not_pay_rests_and_warns_once(standing_clock, caplog):
    situation = Situation(lambda size: 1.4)
    for _ in range(3):
        output = situation.call()
        assert output.draft_sizes.count(0) > 0.8 * len(output.draft_sizes) and 0.9 < output.estimated_speedup <= 1
    (line,) = (record.getMessage() for record in caplog.records if "mostly without drafts" in record.getMessage())
    assert "with 1 row(s)" in line and "x the speed of the target alone" in line


def test_rest_goes_on_in_the_next_call_and_ends(standing_clock):
    """Or answers that are shorter than a rest would never be drafted again."""
    situation = Situation(lambda size: 1.6, new=9)
    sizes = [situation.call().draft_sizes for _ in range(8)]
    assert not any(sizes[0]) and any(map(any, sizes))


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3])
def test_sizes_follow_costs(slope, standing_clock):
    """Of a drafter that is always right, no more is verified than is worth its cost."""
    situation = Situation(lambda size: 1.1 + slope * size, error_rate=0.0)
    situation.call()
    sizes = situation.call().draft_sizes
    assert min(sizes[:-1]) >= 5 if slope < 0.3 else sum(sizes) / len(sizes) < 5


def test_sizes_follow_what_is_accepted(standing_clock):
    """Always right in texts before, never in this one: a few rounds are enough to verify less."""
    situation = Situation(lambda size: 1.1 + 0.1 * size, error_rate=0.0)
    for _ in range(3):
        right = situation.call().draft_sizes
    draft = situation.draft
    draft.likely = (draft.likely + 1) % 96
    wrong = situation.call().draft_sizes
    assert wrong[0] >= 5 and min(right[:4]) >= 5 > 2 * max(wrong[5:9])


def test_first_call_of_a_process_is_always_the_same(monkeypatch):
    """However slow its rounds are: within a call, sizes do not follow a clock."""
    chosen = []
    for speed in (1.0, 50.0):
        ticks = itertools.count()
        monkeypatch.setattr(costs_module, "clock", lambda device: next(ticks) ** 1.1 * speed)  # noqa: B023
        target = make_target()
        options = {"input_ids": ROW, "max_new_tokens": 60, "do_sample": False}
        draft = opened(scripted(make_draft(target, block_size=6), target.generate(**options), error_rate=0.2))
        chosen.append(target.generate(**options, assistant_model=draft, return_dict_in_generate=True).draft_sizes)
    assert chosen[0] == chosen[1] and len(set(chosen[0])) > 2


def test_drafter_is_not_blamed_where_copies_are_fast(standing_clock, caplog):
    """Setting a block size, as the warning says, would end them."""
    target, prompt = make_target(), torch.tensor([[3, 8, 1, 9] * 4])
    draft = opened(make_draft(target, block_size=6))
    costs(target, draft, lambda size: 2.0, copied=lambda size: 1.0)
    options = {"sequence_bias": {(3,): 1.0, (3, 8): 90.0, (8, 1): 90.0, (1, 9): 90.0, (9, 3): 90.0}}
    options |= {"max_new_tokens": 90, "do_sample": False, "return_dict_in_generate": True}
    for _ in range(2):
        output = target.generate(prompt, **options, assistant_model=draft)
    assert output.estimated_speedup > 2 and "mostly without drafts" not in caplog.text


def test_copies_do_not_displace_faster_drafts(standing_clock):
    """A pair of tokens that was there before gains less than a drafter that is always right."""
    target, options = make_target(), {"max_new_tokens": 300, "do_sample": False}
    text = target.generate(ROW, **options)
    draft = opened(scripted(make_draft(target, block_size=6), text, error_rate=0.0))
    costs(target, draft, lambda size: 1.1, copied=lambda size: 1.0)
    output = target.generate(ROW, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, text) and output.estimated_speedup > 5.3  # 4.4 if they do


@pytest.mark.parametrize("setting", [{"block_size": 4}, {"tree_nodes": 5}, {"num_assistant_tokens": 2}], ids=str)
def test_sizes_that_were_set_are_kept(setting, target):
    draft, options = opened(make_draft(target)), {"max_new_tokens": 30, "do_sample": False}
    if "num_assistant_tokens" not in setting:
        ((name, value),) = setting.items()
        setattr(draft.decoding_config, name, value)
    else:
        options |= setting
    draft = scripted(draft, target.generate(ROW, **options), error_rate=0.0)
    output = target.generate(ROW, **options, assistant_model=draft, return_dict_in_generate=True)
    assert output.draft_sizes is None and output.estimated_speedup is None
    assert set(output.acceptance_lengths[0][:-1]) == {3 if "num_assistant_tokens" in setting else 4}


def test_calls_in_threads_share_what_is_known(standing_clock):
    """Each writes what the target writes alone; the next call begins with what all of them learned."""
    target, options = make_target(), {"max_new_tokens": 30, "do_sample": False}
    prompts = [torch.tensor([[5, 9, 17, first]]) for first in range(20, 26)]
    texts = [target.generate(prompt, **options)[0] for prompt in prompts]
    draft = opened(recognising(target, texts))
    costs(target, draft, lambda size: 1.2)

    def call(number: int) -> list[int]:
        output = target.generate(prompts[number], **options, assistant_model=draft, return_dict_in_generate=True)
        assert torch.equal(output.sequences[0], texts[number])
        return output.draft_sizes

    first = call(0)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(call, range(len(prompts))))
    assert sum(call(0)[:3]) >= sum(first[:3]) and max(call(0)) > 1


# --------------------------------------------------------------------------------------------- costs and expectations


def test_costs_are_those_that_were_measured():
    table = CostTable(0.25, 8, CPU)
    expected = table.copy().curve(1, 100, 16)
    assert 1.0 < expected[0] < expected[4] < expected[16] < 3.0
    for _ in range(5):
        drafted = ((0, 0.025), (4, 0.026), (8, 0.040), (16, 0.030))
        table.note([(1, 100, NOTHING, 0.020), *((1, 100, (size, True), seconds) for size, seconds in drafted)])
    table.note([(1, 100, (2, True), 9.0)])  # once is too little to count
    curve = table.copy().curve(1, 100, 16)
    # Sixteen tokens cannot cost less than eight: the mean of both is likelier.
    assert [curve[n] for n in (0, 4, 8)] == pytest.approx([1.25, 1.3, 1.75]) and 1.74 < curve[16] < 1.8
    assert curve == sorted(curve) and len(curve) == 17
    assert table.copy().curve(1, 900, 16)[4] == pytest.approx(1.3), "of the nearest length, until it is measured"
    assert table.copy().curve(2, 100, 16) != curve
    # Copies have costs of their own.
    for _ in range(3):
        table.note([(1, 100, (copies, False), 0.020 * (1 + copies)) for copies in (4, 16)])
    copied = table.copy().curve(1, 100, 16, drafted=False)
    assert [copied[n] for n in (4, 16)] == pytest.approx([5.0, 17.0]) and table.copy().curve(1, 100, 16) == curve


def test_load_of_the_machine_changes_no_ratio():
    """A neighbour slows down a call that drafts nothing: else drafting would look free ever after."""
    table = CostTable(0.25, 8, CPU)
    drafts, rests = [(1, 100, (4, True), 0.030)] * 24, [(1, 100, NOTHING, 0.020)] * 24
    table.note(drafts + rests)
    before = table.copy().curve(1, 100, 16)
    assert before[4] == pytest.approx(1.5)
    table.note([(*of, 1.6 * seconds) for *of, seconds in rests])
    assert table.copy().curve(1, 100, 16) == pytest.approx(before)
    # What rounds of one call say about each other counts, whatever the load.
    table.note([(*of, factor * seconds) for some, factor in ((drafts, 1.6), (rests, 2.0)) for *of, seconds in some])
    assert table.copy().curve(1, 100, 16)[4] == pytest.approx(1.2)


def test_few_slow_rounds_do_not_make_larger_ones_slow():
    """The first rounds of a process had 2 tokens: with the highest cost so far, all larger sizes cost as much."""
    table = CostTable(0.25, 8, CPU)
    drafted = ((2, 0.172, 3), (4, 0.119, 24), (8, 0.138, 24), (13, 0.176, 24))
    for work, seconds, times in ((NOTHING, 0.072, 24), *(((size, True), *rest) for size, *rest in drafted)):
        table.note([(1, 100, work, seconds)] * times)
    curve = table.copy().curve(1, 100, 16)
    assert curve[2] == pytest.approx(curve[4]) and curve[4] < 1.75 and curve[8] == pytest.approx(0.138 / 0.072)


@pytest.mark.parametrize("cost", [1.1, 1.3, 2.0, 4.0])
def test_drafter_that_does_not_pay_loses_little(cost):
    """And is tried again, in case that it has become good."""

    def speed(tokens: float, rounds: int) -> float:
        """How long as many tokens take without drafts, over how long they took."""
        written = took = 0.0
        for _ in range(rounds):
            rests = throughput.resting > 0
            throughput.resting -= rests
            written, took = written + (1.0 if rests else tokens), took + (1.0 if rests else cost)
            if not rests:
                throughput.note(tokens, cost)
        return written / took

    throughput = Throughput()
    throughput.begin(cost)
    assert (throughput.resting > 0) == (cost > 1.5), "what is expected of a drafter decides before anything was seen"
    assert 0.975 < speed(1.0, 600) < 1
    assert speed(3.0 * cost, 400) > 1.8 and throughput.speed > 2


def test_drafter_is_believed_as_far_as_it_was_right():
    reliability, here, draws = Reliability(), TextCalibration(), random.Random(0)
    assert [reliability(p) for p in (0.01, 0.5, 1.0)] == [0.01, 0.5, 1.0] and here.ratio == 1.0
    for _ in range(3000):
        word = draws.random()
        reliability.note(word, draws.random() < word * 0.4)  # overconfident
    for word in (0.2, 0.5, 0.9):
        assert reliability(word) == pytest.approx(0.4 * word, rel=0.25)
    for _ in range(5):
        here.note(4.0, 1.0)
    assert 0.25 < here.ratio < 0.5
