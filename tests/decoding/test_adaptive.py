"""
The adaptive draft length: chosen by what rounds cost and what is accepted, and never seen in the text; its latency
model, calibration and back-off.
"""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from support.pairs import make_draft, make_target
from support.scripted_draft import recognising, scripted

from dflash_hf.decoding import latency as latency_module
from dflash_hf.decoding import timing
from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.adaptive import AdaptiveLength, DraftStatistics
from dflash_hf.decoding.calibration import (
    AcceptanceCalibration,
    HostTree,
    acceptance_outcomes,
    expected_accepted,
)
from dflash_hf.decoding.latency import NO_DRAFT, DraftSize, LatencyModel, RoundTimer, latency_model_of
from dflash_hf.decoding.policies import DraftPolicy
from dflash_hf.decoding.timing import TimedStreamer
from dflash_hf.decoding.trees import Tree


CPU = torch.device("cpu")
ROW = torch.tensor([[5, 9, 17, 33]])


def with_adaptive_length(draft):
    """The drafter, with the default policy: in every round it chooses how much to verify."""
    draft.decoding_config.block_size = None
    return draft


# ------------------------------------------------------------------------------------------------- drafts of any kind


@pytest.mark.parametrize("fast", [0, 1])
def test_row_that_has_ended_changes_no_other(fast, monkeypatch):
    """Its features are collected, for many rounds without a draft, with those of the row that goes on."""
    target = make_target()
    prompt = torch.randint(5, 90, (2, 38), generator=torch.Generator().manual_seed(38))
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
    """Nothing is measured: latencies are those of `set_latencies`."""
    monkeypatch.setattr(latency_module, "clock", lambda device: 0.0)


def set_latencies(target, draft, drafted, rows: int = 1, copied=lambda size: 99.0) -> None:
    """How long rounds take, by their size, in units of one without a draft."""
    seconds = {NO_DRAFT: 1.0}
    for tokens in (0, 1, 2, 4, 8, 16):
        seconds[DraftSize(tokens, True)] = drafted(tokens)
    for tokens in (1, 16):
        seconds[DraftSize(tokens, False)] = copied(tokens)
    latency_model_of(target, draft).record(rows, [(60, size, value) for size, value in seconds.items()] * 3)


class Situation:
    """Calls of a pair: an unscripted drafter is always wrong, a scripted one as often as it says."""

    def __init__(self, drafted, error_rate: float = 1.0, rows: int = 1, new: int = 60):
        self.target = make_target()
        prompt = ROW.repeat(rows, 1)
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
        set_latencies(self.target, with_adaptive_length(self.draft), drafted, rows)

    def call(self):
        output = self.target.generate(**self.options, assistant_model=self.draft)
        assert torch.equal(output.sequences, self.expected)
        assert len(output.draft_sizes) == max(map(len, output.acceptance_lengths))
        return output


@pytest.mark.parametrize("rows", [1, 4])
def test_drafting_that_pays_does_not_back_off(rows, standing_clock):
    situation = Situation(lambda size: 1.4, error_rate=0.0, rows=rows)
    for _ in range(2):
        output = situation.call()
    assert output.draft_sizes.count(0) <= 2 and max(output.draft_sizes) >= 5 and output.estimated_speedup > 2


def test_drafting_that_loses_backs_off_and_warns_once(standing_clock, caplog):
    situation = Situation(lambda size: 1.4)
    for _ in range(3):
        output = situation.call()
        assert output.draft_sizes.count(0) > 0.8 * len(output.draft_sizes) and 0.9 < output.estimated_speedup <= 1
    (line,) = (record.getMessage() for record in caplog.records if "mostly without drafts" in record.getMessage())
    assert "with 1 row(s)" in line and "x the speed of the target alone" in line


def test_back_off_outlasts_a_call_and_ends(standing_clock):
    """Or answers that are shorter than a back-off would never be drafted again."""
    situation = Situation(lambda size: 2.0, new=9)
    sizes = [situation.call().draft_sizes for _ in range(12)]
    assert not any(sizes[0]) and any(map(any, sizes))


def test_back_off_ends_with_a_call_if_drafts_have_paid(standing_clock):
    """A text that is hard to draft says little about the next one, of a drafter that has been fast."""
    situation = Situation(lambda size: 1.1 + 0.1 * size, error_rate=0.0)
    situation.call()
    draft = situation.draft
    right = draft.likely
    for _ in range(4):  # each ends in a pause
        draft.likely = (right + 1) % 96
        assert not situation.call().draft_sizes[-1]
        draft.likely = right
        sizes = situation.call().draft_sizes
        assert all(sizes[:8])


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3])
def test_lengths_follow_latencies(slope, standing_clock):
    """Of a drafter that is always right, no more is verified than is worth its cost."""
    situation = Situation(lambda size: 1.1 + slope * size, error_rate=0.0)
    situation.call()
    sizes = situation.call().draft_sizes
    assert min(sizes[:-1]) >= 5 if slope < 0.3 else sum(sizes) / len(sizes) < 5


def test_lengths_follow_what_is_accepted(standing_clock):
    """Always right in texts before, never in this one: drafting ends, and nothing but tries follow."""
    situation = Situation(lambda size: 1.1 + 0.1 * size, error_rate=0.0)
    for _ in range(3):
        right = situation.call().draft_sizes
    draft = situation.draft
    draft.likely = (draft.likely + 1) % 96
    wrong = situation.call().draft_sizes
    assert min(right[:4]) >= 5 and wrong[0] >= 5
    assert len(wrong) == 59 and wrong[40:].count(0) > 15


def test_first_call_of_a_process_is_always_the_same(monkeypatch):
    """However slow its rounds are: within a call, sizes do not follow a clock."""
    chosen = []
    for speed in (1.0, 50.0):
        ticks = itertools.count()
        monkeypatch.setattr(latency_module, "clock", lambda device: next(ticks) ** 1.1 * speed)  # noqa: B023
        target = make_target()
        options = {"input_ids": ROW, "max_new_tokens": 60, "do_sample": False}
        draft = with_adaptive_length(
            scripted(make_draft(target, block_size=6), target.generate(**options), error_rate=0.2)
        )
        chosen.append(target.generate(**options, assistant_model=draft, return_dict_in_generate=True).draft_sizes)
    assert chosen[0] == chosen[1] and len(set(chosen[0])) > 2


def test_drafter_is_not_blamed_where_copies_are_fast(standing_clock, caplog):
    """Setting a block size, as the warning says, would end them."""
    target = make_target()
    prompt = torch.tensor([[3, 8, 1, 9] * 4])
    draft = with_adaptive_length(make_draft(target, block_size=6))
    set_latencies(target, draft, lambda size: 2.0, copied=lambda size: 1.0)
    options = {"sequence_bias": {(3,): 1.0, (3, 8): 90.0, (8, 1): 90.0, (1, 9): 90.0, (9, 3): 90.0}}
    options |= {"max_new_tokens": 90, "do_sample": False, "return_dict_in_generate": True}
    for _ in range(2):
        output = target.generate(prompt, **options, assistant_model=draft)
    assert output.estimated_speedup > 2 and "mostly without drafts" not in caplog.text


def test_copies_do_not_displace_faster_drafts(standing_clock):
    """A pair of tokens that was there before gains less than a drafter that is always right."""
    target = make_target()
    options = {"max_new_tokens": 300, "do_sample": False}
    text = target.generate(ROW, **options)
    draft = with_adaptive_length(scripted(make_draft(target, block_size=6), text, error_rate=0.0))
    set_latencies(target, draft, lambda size: 1.1, copied=lambda size: 1.0)
    output = target.generate(ROW, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, text) and output.estimated_speedup > 5.3  # 4.4 if they do


@pytest.mark.parametrize("setting", [{"block_size": 4}, {"tree_nodes": 5}, {"num_assistant_tokens": 2}], ids=str)
def test_sizes_that_were_set_are_kept(setting, target):
    draft = with_adaptive_length(make_draft(target))
    options = {"max_new_tokens": 30, "do_sample": False}
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
    target = make_target()
    options = {"max_new_tokens": 30, "do_sample": False}
    prompts = [torch.tensor([[5, 9, 17, first]]) for first in range(20, 26)]
    texts = [target.generate(prompt, **options)[0] for prompt in prompts]
    draft = with_adaptive_length(recognising(target, texts))
    set_latencies(target, draft, lambda size: 1.2)

    def call(number: int) -> list[int]:
        output = target.generate(prompts[number], **options, assistant_model=draft, return_dict_in_generate=True)
        assert torch.equal(output.sequences[0], texts[number])
        return output.draft_sizes

    first = call(0)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(call, range(len(prompts))))
    assert sum(call(0)[:3]) >= sum(first[:3]) and max(call(0)) > 1


# ------------------------------------------------------------------------------------------------------------- latency


def measured(seconds: dict, rows: int = 1, context: int = 100, times: int = 3) -> LatencyModel:
    model = LatencyModel(0.25, "cpu")
    model.record(rows, [(context, DraftSize(*size), value) for size, value in seconds.items()] * times)
    return model


def test_latencies_are_those_that_were_measured():
    model = measured({(0, False): 0.020, (0, True): 0.025, (4, True): 0.026, (8, True): 0.040})
    latencies = model.latencies(1, 100, 16, drafted=True)
    assert [latencies[n] for n in (0, 4, 8)] == pytest.approx([1.25, 1.3, 2.0], rel=0.12)
    assert latencies == sorted(latencies) and 1.3 < latencies[6] < 2.0 < latencies[16]
    assert model.latencies(1, 900, 16, drafted=True) == latencies, "of the nearest context length"
    assert model.latencies(2, 100, 16, drafted=True) != latencies, "other rows"
    assert model.latencies(1, 100, 16, drafted=False)[0] == 1.0


@pytest.mark.parametrize(("device", "lowest", "highest"), [("cuda", 1.0, 1.1), ("mps", 1.8, 2.4)])
def test_large_trees_are_assumed_to_be_cheap_where_memory_decides(device, lowest, highest):
    """Before anything was measured: 63 tokens beside 15."""
    model = LatencyModel(0.1, latency_module._processor(SimpleNamespace(device=torch.device(device))))
    latencies = model.latencies(1, 100, 63, drafted=True)
    assert lowest < latencies[63] / latencies[15] < highest


class Quantised(torch.nn.Linear):
    """Stands for a layer of another kind, packed or quantised."""


@pytest.mark.parametrize("changed", ["target", "draft"])
def test_latencies_belong_to_dtype_and_kinds_of_layers(changed):
    """Those of an fp32 drafter were taken for those of a packed one, whose forward costs less."""
    target = make_target()
    draft = make_draft(target)
    model = {"target": target, "draft": draft}[changed]
    plain = latency_model_of(target, draft)
    layer = next(module for module in model.modules() if type(module) is torch.nn.Linear)
    layer.__class__ = Quantised
    packed = latency_model_of(target, draft)
    model.to(torch.bfloat16)
    in_bf16 = latency_model_of(target, draft)
    assert len({id(each) for each in (plain, packed, in_bf16)}) == 3
    model.to(torch.float32)
    layer.__class__ = torch.nn.Linear
    assert latency_model_of(target, draft) is plain


def test_few_samples_are_not_believed():
    model = measured({(0, False): 0.020})
    assumed = model.latencies(1, 100, 16, drafted=True)
    model.record(1, [(100, DraftSize(4, True), 9.0)])
    assert model.latencies(1, 100, 16, drafted=True) == assumed


def test_few_slow_small_rounds_make_no_larger_ones_slow():
    """The first rounds of a process had 2 tokens, and nothing else that slowed them down."""
    model = measured({(0, False): 0.072, (4, True): 0.119, (8, True): 0.138}, times=24)
    model.record(1, [(100, DraftSize(2, True), 0.172)] * 3)
    latencies = model.latencies(1, 100, 16, drafted=True)
    assert latencies[4] == pytest.approx(0.119 / 0.072, rel=0.1)
    assert latencies[8] == pytest.approx(0.138 / 0.072, rel=0.1)


def test_noise_decides_little_between_like_lengths():
    """Lengths that cost the same, of which one had luck: the longer ones stay worth their tokens."""
    model = measured({(0, False): 0.020, (8, True): 0.030}, times=24)
    model.record(1, [(100, DraftSize(13, True), 0.0285), (100, DraftSize(15, True), 0.0305)] * 12)
    latencies = model.latencies(1, 100, 15, drafted=True)
    assert latencies[15] / latencies[13] < 1.06


def test_load_of_the_machine_changes_no_ratio():
    """A neighbour slows down a call without drafts: else drafting would look fast ever after."""
    model = measured({(0, False): 0.020, (4, True): 0.030}, times=24)
    before = model.latencies(1, 100, 16, drafted=True)
    assert before[4] == pytest.approx(1.5)
    model.record(1, [(100, NO_DRAFT, 0.032)] * 24)
    assert model.latencies(1, 100, 16, drafted=True) == pytest.approx(before)
    model.record(1, [(100, NO_DRAFT, 0.032), (100, DraftSize(4, True), 0.036)] * 24)
    assert model.latencies(1, 100, 16, drafted=True)[4] == pytest.approx(0.036 / 0.032), "what one call says counts"


def test_snapshot_does_not_change():
    model = measured({(0, False): 0.020})
    snapshot = model.snapshot()
    before = snapshot.latencies(1, 100, 16, drafted=True)
    model.record(1, [(100, DraftSize(4, True), 0.1)] * 3)
    assert snapshot.latencies(1, 100, 16, drafted=True) == before
    assert model.latencies(1, 100, 16, drafted=True) != before


def test_noise_adds_up_to_no_drift():
    """What is scaled to the lower quartile of what was scaled before would soon take no time at all."""
    model = measured({(0, False): 0.020, (4, True): 0.030}, times=24)
    draws = random.Random(0)
    for _ in range(50):
        model.record(1, [(100, DraftSize(4, True), 0.030 * draws.lognormvariate(0.0, 0.1)) for _ in range(20)])
    assert 1.25 < model.latencies(1, 100, 16, drafted=True)[4] < 1.75


def test_rounds_that_a_coarse_clock_misses_are_skipped():
    model = measured({(0, False): 0.020, (4, True): 0.030}, times=24)
    before = model.latencies(1, 100, 16, drafted=True)
    model.record(1, [(100, DraftSize(4, True), 0.0)] * 9)
    assert model.latencies(1, 100, 16, drafted=True) == before


def test_timer_leaves_out_streamer_and_first_round(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    for module in (latency_module, timing):
        monkeypatch.setattr(module, "clock", lambda device: now.seconds)
    inner = SimpleNamespace(put=lambda value: setattr(now, "seconds", now.seconds + 5.0))
    streamer = TimedStreamer(inner, CPU)
    timer = RoundTimer(CPU, streamer)
    for _ in range(3):
        started = timer.now()
        now.seconds += 1.0
        streamer.put(torch.tensor([1]))
        timer.record(10, NO_DRAFT, started)
    assert [seconds for _, _, seconds in timer.rounds] == [1.0, 1.0]


# ---------------------------------------------------------------------------------------------------------- acceptance


def test_calibration_follows_what_is_accepted():
    calibration = AcceptanceCalibration()
    assert calibration(0.5) == 0.5
    draws = random.Random(0)
    for _ in range(3000):
        probability = draws.random()
        calibration.record(probability, draws.random() < 0.4 * probability)  # overconfident
    for probability in (0.25, 0.55, 0.95):
        assert calibration(probability) == pytest.approx(0.4 * probability, abs=0.05)


def test_calibration_follows_a_change_of_text():
    calibration = AcceptanceCalibration()
    for accepted in (True, False):
        for _ in range(4000):
            calibration.record(0.5, accepted)
    assert calibration(0.5) < 0.1


def small_tree() -> Tree:
    """Two nodes below the anchor, the first with a child, for one row."""
    log_probs = torch.tensor([[0.0, 0.5, 0.3, 0.25]]).log()
    log_probs[0, 0] = 0.0
    return Tree(
        tokens=torch.tensor([[1, 2, 3, 4]]),
        depths=torch.tensor([[0, 1, 1, 2]]),
        ancestors=torch.ones(1, 4, 4, dtype=torch.bool),
        parents=torch.tensor([[0, 0, 0, 1]]),
        log_probs=log_probs,
    )


def test_expected_tokens_sum_path_chances():
    tree = HostTree.of(small_tree())
    assert tree.probabilities[0][1:] == pytest.approx([0.5, 0.3, 0.5])
    calibration = AcceptanceCalibration()
    expected = expected_accepted(tree, [True], 9, calibration)
    assert expected == pytest.approx([0.0, 0.5, 0.8, 1.05])
    assert expected_accepted(tree, [True], 2, calibration) == pytest.approx([0.0, 0.5, 0.8, 0.8])
    assert expected_accepted(tree, [False], 9, calibration) == [0.0] * 4


def test_outcomes_are_children_of_accepted_nodes():
    tree = HostTree.of(small_tree())
    rejected = list(acceptance_outcomes(tree, 4, Acceptance.from_counts([1]), [True]))
    assert [accepted for _, accepted in rejected] == [False, False]
    accepted = Acceptance.from_paths([[0, 1, 3]])
    assert [was_accepted for _, was_accepted in acceptance_outcomes(tree, 4, accepted, [True])] == [
        True,
        False,
        True,
    ]
    ended = Acceptance.from_paths([[0, 1]])
    assert [was_accepted for _, was_accepted in acceptance_outcomes(tree, 4, ended, [False])] == [
        True,
        False,
    ]


# ------------------------------------------------------------------------------------------------------------ back-off


@pytest.mark.parametrize("latency", [1.1, 1.3, 2.0, 4.0])
def test_useless_drafter_loses_little_and_recovers(latency):
    statistics = DraftStatistics()
    statistics.assume_unless_measured(latency)

    def speed(tokens: float, rounds: int) -> float:
        written = 0.0
        seconds = 0.0
        for _ in range(rounds):
            if statistics.rounds_to_pause:
                statistics.rounds_to_pause -= 1
                written += 1.0
                seconds += 1.0
            else:
                written += tokens
                seconds += latency
                statistics.record(tokens, latency)
        return written / seconds

    assert 0.97 < speed(1.0, 600) < 1
    assert speed(3.0 * latency, 600) > 1.5 and statistics.speed > 2


# -------------------------------------------------------------------------------------------------------------- length


@pytest.mark.parametrize("slope, length", [(0.0, 4), (0.1, 3), (0.25, 2), (0.5, 1), (2.0, 0)])
def test_length_follows_what_a_token_costs(slope, length):
    policy = AdaptiveLength.__new__(AdaptiveLength)
    expected = [0.0, 1.2, 1.8, 2.1, 2.2]
    latencies = [1.2 + slope * tokens for tokens in range(5)]
    assert policy.choose_length(expected, latencies, active=1) == length
