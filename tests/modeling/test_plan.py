"""How much a round drafts and verifies: chosen by what it costs and what is accepted, and never seen in the text."""

import functools
import gc
import itertools
import random
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.pairs import SLIDING, make_draft, make_draft2, make_target, shallow_pair
from support.rows import ragged_prompts
from support.sampling import assert_follows, exact_distribution, sample
from support.scripted_draft import recognising, scripted
from torch._dynamo.utils import counters
from transformers import MaxLengthCriteria, StoppingCriteriaList

from dflash_hf.modeling import compile_dflash, cost_dflash, plan_dflash, planner_dflash, text_dflash
from dflash_hf.modeling.accept_dflash import Draft, Proposal
from dflash_hf.modeling.cost_dflash import NOTHING, CostTable
from dflash_hf.modeling.few_plans_dflash import FewPlans, Record
from dflash_hf.modeling.plan_dflash import FastestPlan, Pace, Round, SlowestRow
from dflash_hf.modeling.prefill_dflash import Pair
from dflash_hf.modeling.reliability_dflash import Reliability
from dflash_hf.modeling.tree_dflash import every_path, likeliest_tree


CPU = torch.device("cpu")


def opened(draft):
    """A drafter that chooses its sizes."""
    draft.decoding_config.block_size = None
    return draft


@pytest.fixture
def planners(monkeypatch):
    """The planners of the calls of a test."""
    made, original = [], FastestPlan.__init__

    def init(self, *args):
        original(self, *args)
        self.begun = sum(seen[0] for seen in self.pace.reliability.seen)  # observations of earlier calls
        made.append(self)

    monkeypatch.setattr(FastestPlan, "__init__", init)
    return made


@pytest.fixture
def any_size(monkeypatch, planners):
    """In every round another size, drawn at random: none, a part of the tree, or all of it."""
    draws = random.Random(0)

    monkeypatch.setattr(FastestPlan, "_measures_nothing", lambda self: draws.random() < 0.1)
    monkeypatch.setattr(FastestPlan, "_worth", lambda self, gains: draws.randrange(self.widest.nodes + 1))
    monkeypatch.setattr(FastestPlan, "_worth_copying", lambda self, text: None)
    monkeypatch.setattr(Pace, "note", lambda *args, **kwargs: None)  # it never rests
    return planners


@pytest.mark.parametrize("rows", [1, 2, 8, 64, 500])
def test_batches_consider_whole_blocks_where_wide_forwards_are_cheap(rows):
    assert planner_dflash.widest_tree(rows, on_cpu=False) >= 15
    assert 2 <= planner_dflash.widest_tree(rows, on_cpu=True) <= max(32 // rows, 2)


FAMILIES = ["qwen3", "gemma3", "gpt2", "lfm2", "qwen3_next"]


@functools.cache
def double(family):
    return make_target(family, torch.float64, attn=None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", [make_draft, make_draft2])
def test_texts_do_not_depend_on_sizes(family, rows, make, any_size):
    target = double(family)
    inputs, _ = ragged_prompts(rows)
    expected = target.generate(**inputs, max_new_tokens=40, do_sample=False)
    draft = opened(scripted(make(target, block_size=6), expected, error_rate=0.15, ranks=2))
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    output = target.generate(**inputs, **options, assistant_model=draft)
    assert torch.equal(output.sequences, expected)
    lengths = {n for row in output.acceptance_lengths for n in row}
    assert len(lengths) >= 3 and len(set(any_size[-1].sizes)) >= 4
    # And the cache that comes back goes on.
    more = torch.cat([output.sequences, torch.full((rows, 2), 7)], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(rows, 42, dtype=torch.long)], dim=1)
    turn = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    again = target.generate(more, past_key_values=output.past_key_values, assistant_model=draft, **turn)
    assert torch.equal(again, target.generate(more, **turn))


ROWWISE = [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 12, "eos_token_id": [7, 9, 11]},
    {"min_length": 25, "eos_token_id": [7, 9, 11]},
    {"bad_words_ids": [[5, 9], [17]]},
    {"sequence_bias": {(11,): 2.0, (5, 6): -3.0}},
    {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": [7, 9]},
    {"forced_eos_token_id": 3},
    {"begin_suppress_tokens": [4, 6, 8]},
    {"repetition_penalty": 1.2, "do_sample": True},
]


@pytest.mark.parametrize("options", ROWWISE, ids=str)
@pytest.mark.parametrize("nodes", [None, 9])
def test_rows_keep_their_own_pace_with_processors_that_judge_rows(options, nodes):
    """Each row commits what it commits alone, and writes what the plain call writes."""
    target = make_target(dtype=torch.float64)
    inputs, pads = ragged_prompts(4)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, **options}
    draws = {} if not options["do_sample"] else {"seeds": [3, 4, 5, 6]}
    prompts = [ids[pad:][None] for ids, pad in zip(inputs["input_ids"], pads, strict=True)]
    draft = make_draft(target, block_size=6)
    if draws:
        texts = []
        for prompt, seed in zip(prompts, draws["seeds"], strict=True):
            torch.manual_seed(seed)
            texts.append(target.generate(prompt, **options)[0, prompt.shape[1] :])
        expected = torch.cat([inputs["input_ids"], torch.stack(texts)], dim=1)
    else:
        expected = target.generate(**inputs, **options)
    draft = scripted(draft, expected, error_rate=0.2, ranks=1 if nodes is None else 2)
    draft.decoding_config.tree_nodes = nodes
    if draws:
        draft.decoding_config.generators = [torch.Generator().manual_seed(seed) for seed in draws["seeds"]]
    output = target.generate(**inputs, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    counts = [len(row) for row in output.acceptance_lengths]
    assert max(n for row in output.acceptance_lengths for n in row) > 2
    assert len({tuple(row) for row in output.acceptance_lengths}) > 1, "the rows advanced in step"
    assert min(counts) < 30


def test_a_criterion_takes_the_place_of_the_limit(target, draft):
    """Upstream says that a criterion of the caller's wins."""
    prompt = torch.tensor([[5, 9, 17, 33]])
    for length, limit in ((15, 32), (60, 32), (5, 8)):
        criteria = StoppingCriteriaList([MaxLengthCriteria(length)])
        options = {"max_new_tokens": limit, "do_sample": False, "stopping_criteria": criteria}
        expected = target.generate(prompt, **options)
        assert expected.shape[1] == length
        assert torch.equal(target.generate(prompt, **options, assistant_model=draft), expected)


@pytest.mark.parametrize("nodes", [None, 7])
def test_a_block_of_one_token_draws_nothing(nodes):
    """Then a seed gives the sample that it gives without a drafter, whatever else is set."""
    target = make_target()
    draft = make_draft2(target)
    draft.decoding_config.block_size, draft.decoding_config.tree_nodes = 1, nodes
    inputs, _ = ragged_prompts(3)
    samples = []
    for assistant in (None, draft):
        torch.manual_seed(5)
        samples.append(target.generate(**inputs, max_new_tokens=20, do_sample=True, assistant_model=assistant))
    assert torch.equal(*samples)


@pytest.mark.parametrize("rows", [1, 200])
def test_samples_follow_the_target_at_any_size(small, rows, any_size):
    prompt = [3, 1, 4]
    expected = exact_distribution(small, prompt, 1.0, 0.9)
    likely = torch.tensor([[*prompt, *max(expected, key=expected.get), 0]] * rows)
    draft = opened(make_draft(small, block_size=4))
    counts, draws = dict.fromkeys(expected, 0), 500 if rows == 1 else 12_000
    torch.manual_seed(0)
    for number in range(draws // rows):
        output = sample(small, scripted(draft, likely, error_rate=0.2, seed=number), prompt, rows, 1.0, 0.9)
        for text in output.sequences[:, 3:].tolist():
            counts[tuple(text)] += 1
    assert_follows(counts, expected)
    assert len({size for planner in any_size for size in planner.sizes}) >= 3


# ------------------------------------------------------------------------------------- transformers' own settings


@pytest.mark.parametrize("make", [make_draft, make_draft2])
def test_a_schedule_is_that_of_transformers(make):
    target, prompt = make_target(), torch.tensor([[5, 9, 17, 33]])
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, "num_assistant_tokens": 2}
    expected = target.generate(prompt, **options).sequences

    def sizes(draft, schedule):
        output = target.generate(prompt, **options, assistant_model=draft, num_assistant_tokens_schedule=schedule)
        assert torch.equal(output.sequences, expected)
        assert all(n <= size + 1 for n, size in zip(output.acceptance_lengths[0], output.draft_sizes, strict=True))
        return output.draft_sizes

    right = opened(scripted(make(target, block_size=8), expected, error_rate=0.0))
    assert sizes(right, "heuristic_transient")[:4] == [2, 4, 6, 7]
    assert sizes(right, "heuristic_transient")[0] == 2
    assert sizes(right, "heuristic")[:4] == [2, 4, 6, 7] and sizes(right, "heuristic")[0] == 7
    wrong = opened(scripted(make(target, block_size=8), expected, error_rate=1.0))
    assert sizes(wrong, "heuristic")[:4] == [2, 1, 1, 1]


def test_no_block_goes_on_after_a_token_of_which_the_drafter_is_not_sure():
    chances = torch.tensor([[0.9, 0.8, 0.3, 0.9], [0.9, 0.1, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]])
    tokens = torch.arange(15).view(3, 5)
    proposal = Proposal(tokens[:, 1:, None], chances[..., None])
    for drawn in (False, True):
        for alive, room, size in (([1, 1, 0], 4, 3), ([0, 1, 0], 4, 2), ([1, 1, 1], 4, 4), ([1, 0, 0], 2, 2)):
            plan = plan_dflash.AssistantPlan(plan_dflash.Plan(5), 4, 0.5, "constant", {}, drawn)
            plan.alive, plan.room, plan.sizes = alive, room, [room]
            cut = plan.cut(Draft(tokens[:, : room + 1], proposal.at(0, room)))
            assert cut.tokens.tolist() == tokens[:, : size + 1].tolist() and plan.sizes == [size]
            assert cut.proposal.ids.shape[1] == size if drawn else cut.proposal is None


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
@pytest.mark.parametrize("make", [make_draft, make_draft2])
def test_a_threshold_changes_sizes_and_no_text(family, make):
    target, (inputs, _) = double(family), ragged_prompts(3)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected, seen = target.generate(**inputs, **options), set()
    for threshold in (0.02, 0.6, 1.0):
        more = {"assistant_confidence_threshold": threshold, "return_dict_in_generate": True}
        output = target.generate(**inputs, **options, **more, assistant_model=opened(make(target, block_size=6)))
        assert torch.equal(output.sequences, expected)
        seen.add(max(output.draft_sizes))
    assert min(seen) == 1 and max(seen) > 1


def test_a_threshold_is_compared_with_the_drafter_s_own_probability():
    """Not with what the noise of the next samples makes of it: of no token is this drafter sure."""
    target, (inputs, _) = make_target(), ragged_prompts(1)
    draft, options = opened(make_draft(target, block_size=6)), {"max_new_tokens": 30, "do_sample": True, "top_k": 0}
    torch.manual_seed(3)
    expected = target.generate(**inputs, **options)
    options |= {"assistant_confidence_threshold": 0.5, "return_dict_in_generate": True}
    torch.manual_seed(3)
    output = target.generate(**inputs, **options, assistant_model=draft)
    assert torch.equal(output.sequences, expected) and set(output.draft_sizes[:-1]) == {1}


@pytest.mark.parametrize("threshold", [0.9999, 1.0])
def test_a_threshold_may_be_close_to_one(threshold):
    """Whole blocks are drafted by a drafter that is certain."""
    target, (inputs, _) = make_target(), ragged_prompts(2)
    options = {"max_new_tokens": 20, "do_sample": False}
    draft = opened(scripted(make_draft(target, block_size=6), target.generate(**inputs, **options), error_rate=0.0))
    more = {"assistant_confidence_threshold": threshold, "return_dict_in_generate": True}
    assert target.generate(**inputs, **options, **more, assistant_model=draft).draft_sizes[0] == 5


@pytest.mark.parametrize("rows", [1, 200])
def test_samples_follow_the_target_with_a_threshold_and_drawn_drafts(small, rows):
    prompt = [3, 1, 4]
    expected = exact_distribution(small, prompt, 1.0, 0.9)
    draft, sizes = opened(make_draft(small, block_size=4)), set()
    draft.decoding_config.draft_temperature = 1.0
    small.generation_config.assistant_confidence_threshold = 0.15
    counts, draws = dict.fromkeys(expected, 0), 500 if rows == 1 else 12_000
    torch.manual_seed(0)
    try:
        for _ in range(draws // rows):
            output = sample(small, draft, prompt, rows, 1.0, 0.9)
            sizes.update(output.draft_sizes)
            for text in output.sequences[:, 3:].tolist():
                counts[tuple(text)] += 1
    finally:
        small.generation_config.assistant_confidence_threshold = None
    assert_follows(counts, expected)
    assert len(sizes) > 1


# ------------------------------------------------------------------------------------ rounds of one shape: few plans


@pytest.fixture
def any_plan(monkeypatch):
    """For each look of the host another plan, compiled or not, drawn at random."""
    draws, made, init = random.Random(0), [], FewPlans.__init__

    def remember(self, *args):
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(FewPlans, "__init__", remember)
    monkeypatch.setattr(FewPlans, "_fastest", lambda self: draws.choice(self.plans))
    monkeypatch.setattr(FewPlans, "EARNED", 3)
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


# A compiled case takes ten seconds: two of them have every value of every argument.
COMPILED = {
    (make_draft, "qwen3", "eager", 1, 3),
    (make_draft2, "gemma3", "eager", 4, 1),
}
CASES = itertools.product((make_draft, make_draft2), ("qwen3", "gemma3"), (False, "eager"), (1, 3, 4), (1, 3))
CASES = [case for case in CASES if (case[3] == 3) == (not case[2])]


@pytest.mark.parametrize(
    ("make", "family", "compiled", "ahead", "rows"),
    [pytest.param(*case, marks=pytest.mark.slow if case[2] and case not in COMPILED else ()) for case in CASES],
)
def test_texts_do_not_depend_on_plans(make, family, compiled, ahead, rows, any_plan):
    layers = {"num_hidden_layers": 2, **({"layer_types": SLIDING[:2]} if family == "gemma3" else {})}
    target = make_target(family, torch.float64, attn=None, **layers)
    inputs, _ = ragged_prompts(rows)
    expected = target.generate(**inputs, max_new_tokens=50, do_sample=False)
    draft = make(target, block_size=6, num_hidden_layers=1)
    draft = opened(scripted(draft, expected, error_rate=0.15, ranks=2))
    draft.decoding_config.compile, draft.decoding_config.look_ahead = compiled, ahead
    options = {"max_new_tokens": 50, "do_sample": False, "return_dict_in_generate": True}
    for _ in range(2):
        output = target.generate(**inputs, **options, assistant_model=draft)
        assert torch.equal(output.sequences, expected)
    assert set(any_plan[-1].sizes) <= {plan.size - 1 for plan in any_plan[-1].plans}
    assert len({size for planner in any_plan for size in planner.sizes}) >= 3
    assert len(output.draft_sizes) == max(map(len, output.acceptance_lengths))
    assert max(n for row in output.acceptance_lengths for n in row) > 2
    assert not compile_dflash.failed_on(target, draft)


def test_a_plan_is_compiled_when_it_has_earned_it(any_plan, monkeypatch):
    target, draft = shallow_pair(block_size=6)
    monkeypatch.setattr(FewPlans, "EARNED", 10)
    monkeypatch.setattr(FewPlans, "_fastest", lambda self: self.plans[(0, 3)[len(self.sizes) % 2]])
    opened(draft).decoding_config.compile = "eager"
    counters.clear()
    prompt, graphs = torch.tensor([[5, 9, 17, 33]]), []
    for _ in range(3):
        target.generate(prompt, max_new_tokens=14, do_sample=False, assistant_model=draft)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [0, 2, 2]


def few(costs: dict[int, float], record: Record) -> FewPlans:
    plans = [plan_dflash.Plan(1), plan_dflash.Plan(8), plan_dflash.Plan(4)]
    plans += [plan_dflash.Plan(8, every_path(nodes, 7, 4, CPU)) for nodes in (7, 15)]
    made = FewPlans(plans, CostTable(0.2, 8, CPU), {"key": record}, "key", (1, 9), False)
    made.cost = lambda size, drafted: costs.get(size - 1, 1.0)
    return made


def test_the_fastest_of_a_few_plans_is_taken():
    flat, steep = {7: 1.2, 3: 1.2, 15: 1.2}, {7: 1.8, 3: 1.1, 15: 2.5}
    new = Record([0.0] * 7, [0.0] * 7)
    assert few(flat, new)._fastest().nodes == 7, "a tree is tried"
    tried = Record([0.0] * 7, [0.0] * 7, trees={7: (20.0, 10.0), 15: (40.0, 10.0)})
    assert few(flat, tried)._fastest().nodes == 15
    for _ in range(30):
        tried.note(plan_dflash.Plan(8), [2], [1])
    tried.trees |= {7: (20.0, 10.0), 15: (22.0, 10.0)}
    assert few(steep, tried)._fastest().block == 4 and few(steep, tried)._fastest().nodes == 0
    tried.pace.resting = 3
    assert few(flat, tried)._fastest().size == 1
    assert tried.tokens(plan_dflash.Plan(8)) == pytest.approx(2.0, abs=0.1)
    ended = Record([0.0] * 7, [0.0] * 7)
    ended.note(plan_dflash.Plan(8), [3, 0], [0, 0])
    assert ended.reached[:3] == [1.0, 1.0, 0.0] and ended.passed[:3] == [1.0, 1.0, 0.0]


def test_a_record_can_be_copied_while_a_call_adds_to_it():
    """A copy in another thread goes through its dictionaries, which must not grow meanwhile."""
    made = few({}, Record([0.0] * 7, [0.0] * 7))
    trees, used = made.record.trees, made.record.used
    made.record.note(made.plans[3], [2], [1])
    made.window = 1
    made.next(None)
    assert made.record.trees and made.record.used and not trees and not used


@pytest.mark.parametrize("ahead", [1, 4])
def test_rounds_are_timed_and_chosen_at_the_length_of_the_text(ahead, monkeypatch):
    """Not at the prompt's, or all rounds of a long answer would count as those of a short text."""
    asked, curve = [], CostTable.curve

    def looked_up(self, rows, columns, *args, **kwargs):
        asked.append(columns)
        return curve(self, rows, columns, *args, **kwargs)

    monkeypatch.setattr(CostTable, "curve", looked_up)
    monkeypatch.setattr(CostTable, "bucket", staticmethod(lambda columns: columns // 16))
    target, prompt = make_target(), torch.tensor([[5, 9, 17, 33]])
    expected = target.generate(prompt, max_new_tokens=80, do_sample=False)
    draft = opened(scripted(make_draft(target, block_size=6), expected, error_rate=0.5))
    draft.decoding_config.look_ahead = ahead
    target.generate(prompt, max_new_tokens=80, do_sample=False, assistant_model=draft)
    table = cost_dflash.table_of(target, draft, False, ahead, target)
    assert len(table.samples) > 3 and max(asked) > 60 and asked == sorted(asked)


def test_blocks_that_do_not_pay_make_way_for_the_target_alone():
    target, prompt = make_target(), torch.tensor([[5, 9, 17, 33]])
    draft = opened(make_draft(target, block_size=6))
    draft.decoding_config.look_ahead = 3
    options = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    output = target.generate(prompt, **options, assistant_model=draft)
    assert torch.equal(output.sequences, target.generate(prompt, **options).sequences)
    assert output.draft_sizes.count(0) > len(output.draft_sizes) / 2 and max(output.draft_sizes) > 0


# --------------------------------------------------------------------------------------------------------- which size


def planner(costs: list[float], nodes: int = 8, pace: Pace | None = None) -> FastestPlan:
    class Table(CostTable):
        def curve(self, *_):
            return costs

    table = Table(0.2, 8, CPU)
    table.pinned = True  # all of them are known
    made = FastestPlan(plan_dflash.Plan(9, None), table, {"key": pace or Pace()}, "key", (1, 60), None)
    made.round, made.place = Round([True], 100, costs), (1, 9)
    return made


@pytest.mark.parametrize("seed", range(20))
def test_the_size_is_the_best_of_all(seed):
    """Over any curve, with steps, and any chances: no other size gains more at that speed."""
    draws = random.Random(seed)
    costs = list(itertools.accumulate([1.2, *(draws.choice([0.0, 0.0, 0.1, 0.4]) for _ in range(8))]))
    gains = [0.0, *sorted((draws.random() for _ in range(8)), reverse=True)]
    pace = Pace(tokens=draws.uniform(0, 30), cost=10.0)
    worth = [sum(gains[: n + 1]) - pace.speed * (costs[n] - costs[0]) for n in range(9)]
    assert worth[planner(costs, pace=pace)._worth(gains)] == pytest.approx(max(worth))


def test_a_size_of_unknown_cost_is_preferred_a_little():
    made = planner([1.2, 1.2, 1.3, 1.4, 1.5, 1.9, 2.3, 2.7, 3.1])
    gains = [0.0, 0.5, 0.25, 0.12, 0.05, *[0.01] * 4]
    assert made._worth(gains) == 3
    made.known.pinned, made.tried = False, {(1, True): FastestPlan.ENOUGH, (2, True): FastestPlan.ENOUGH}
    assert made._worth(gains) == 4
    made.tried[4, True] = FastestPlan.ENOUGH
    assert made._worth(gains) == 3


@pytest.mark.parametrize("cost", [1.1, 1.3, 2.0, 4.0])
def test_a_drafter_that_does_not_pay_loses_little_and_is_tried_again(cost):
    def speed(tokens: float, rounds: int) -> float:
        """How long as many tokens take without drafts, over how long they took."""
        written = took = 0.0
        for _ in range(rounds):
            rests = pace.resting > 0
            pace.resting -= rests
            written, took = written + (1.0 if rests else tokens), took + (1.0 if rests else cost)
            if not rests:
                pace.note(tokens, cost)
        return written / took

    pace = Pace()
    pace.begin(cost)
    assert (pace.resting > 0) == (cost > 1.5), "what is expected of a drafter decides before anything was seen"
    assert 0.975 < speed(1.0, 600) < 1
    assert speed(3.0 * cost, 400) > 1.8 and pace.speed > 2, "it has become good"


def test_a_drafter_s_word_is_taken_as_far_as_it_holds():
    reliability, draws = Reliability(), random.Random(0)
    assert [reliability(p) for p in (0.01, 0.5, 1.0)] == [0.01, 0.5, 1.0]
    for _ in range(3000):
        word = draws.random()
        reliability.note(word, draws.random() < word * 0.4)  # overconfident
    for word in (0.2, 0.5, 0.9):
        assert reliability(word) == pytest.approx(0.4 * word, rel=0.25)
    assert all(counts[0] <= Reliability.MEMORY + 1 for counts in reliability.seen)


def test_a_drafter_is_believed_as_far_as_it_is_right_in_this_text(planners, monkeypatch):
    """Always right in texts before, never in this one: a few rounds are enough to verify less."""
    rising = [1.2 + 0.1 * n for n in range(17)]
    monkeypatch.setattr(CostTable, "curve", lambda self, rows, columns, most, drafted=True: rising[: most + 1])
    target, prompt = make_target(), torch.tensor([[5, 9, 17, 33]])
    expected = target.generate(prompt, max_new_tokens=24, do_sample=False)
    for error_rate in (0.0, 0.0, 0.0, 1.0):
        draft = opened(scripted(make_draft(target, block_size=6), expected, error_rate=error_rate))
        known = planner_dflash._paces.setdefault(draft, {}).setdefault(target, {})
        if planners:
            known |= planners[-1].paces
        monkeypatch.setattr(FastestPlan, "_worth_copying", lambda self, text: None)
        target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=draft)
    right, wrong = planners[-2:]
    assert right.here.ratio > 0.8 and wrong.here.ratio < 0.5
    assert wrong.sizes[0] == max(right.sizes) > 2 * wrong.sizes[3]


def test_what_a_row_says_after_its_end_is_not_counted(planners, monkeypatch):
    """The last token of a row that ends is no rejection of what was drafted behind it."""
    monkeypatch.setattr(CostTable, "curve", lambda self, rows, columns, most, drafted=True: [1.2] * (most + 1))
    target = make_target()
    prompt = torch.tensor([[5, 9, 17, 33]])
    expected = target.generate(prompt, max_new_tokens=24, do_sample=False)
    draft = opened(scripted(make_draft(target, block_size=6), expected, error_rate=0.0))
    for _ in range(4):
        target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=draft)
    seen = [sum(counts) for counts in zip(*planners[-1].pace.reliability.seen, strict=True)]
    drafted = sum(planners[-1].sizes)
    assert drafted and seen[0] > 8
    likely = planners[-1].pace.reliability.seen[-1]
    assert likely[0] == likely[1] > 8  # what it was sure of was always right


def test_a_rest_goes_on_in_the_next_call_and_ends(planners, monkeypatch):
    """Or answers that are shorter than a rest would never be drafted again."""
    monkeypatch.setattr(CostTable, "curve", lambda self, rows, columns, most, drafted=True: [1.6] * (most + 1))
    target = make_target()
    draft = opened(make_draft(target, block_size=6))
    for _ in range(8):
        target.generate(torch.tensor([[5, 9, 17, 33]]), max_new_tokens=9, do_sample=False, assistant_model=draft)
    drafted = [sum(seen[0] for seen in planner.pace.reliability.seen) for planner in planners]
    assert drafted[0] == 0 < drafted[-1]


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
    table.note([(1, 900, (4, True), 0.5)])  # once is too little to count there, too
    assert table.copy().curve(1, 900, 16)[4] == pytest.approx(1.3)


def test_a_call_on_a_busy_machine_changes_no_ratio():
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


def test_a_few_slow_rounds_do_not_make_larger_ones_slow():
    """The first rounds of a process had 2 tokens: with the highest cost so far, all larger sizes cost as much."""
    table = CostTable(0.25, 8, CPU)
    drafted = ((2, 0.172, 3), (4, 0.119, 24), (8, 0.138, 24), (13, 0.176, 24))
    for work, seconds, times in ((NOTHING, 0.072, 24), *(((size, True), *rest) for size, *rest in drafted)):
        table.note([(1, 100, work, seconds)] * times)
    curve = table.copy().curve(1, 100, 16)
    assert curve[2] == pytest.approx(curve[4]) and curve[4] < 1.75 and curve[8] == pytest.approx(0.138 / 0.072)


def test_within_a_call_sizes_do_not_follow_a_stopwatch(planners, monkeypatch):
    """The same table, prompt and memory: the same sizes, however slow the rounds are."""
    target = make_target()
    prompt = torch.tensor([[5, 9, 17, 33]])
    expected = target.generate(prompt, max_new_tokens=60, do_sample=False)
    sizes = []
    for speed in (1.0, 50.0):
        planner_dflash._paces.clear()
        cost_dflash._tables.clear()
        clock = itertools.count()
        monkeypatch.setattr(text_dflash, "clock", lambda device: next(clock) * speed)  # noqa: B023
        draft = opened(scripted(make_draft(target, block_size=6), expected, error_rate=0.2))
        target.generate(prompt, max_new_tokens=60, do_sample=False, assistant_model=draft)
        sizes.append(planners[-1].sizes)
    assert sizes[0] == sizes[1] and len(set(sizes[0])) > 2


def test_nothing_is_remembered_of_a_target_that_is_gone():
    """Memory was found by the target's address, where another target may stand next."""
    draft = opened(make_draft(make_target(), block_size=6))
    for seed in range(2):
        target = make_target(seed=seed)
        target.generate(torch.tensor([[5, 9, 17, 33]]), max_new_tokens=8, do_sample=False, assistant_model=draft)
        assert list(planner_dflash._paces[draft]) == [target]
        del target
        gc.collect()
    assert not planner_dflash._paces[draft]


def test_the_output_tells_what_was_chosen_and_a_drafter_that_does_not_pay_is_named_once(monkeypatch):
    target, prompt, said = make_target(), torch.tensor([[5, 9, 17, 33]]), []
    monkeypatch.setattr(plan_dflash.logger, "warning", said.append)
    monkeypatch.setattr(FastestPlan, "_worth_copying", lambda self, text: None)  # the target's text repeats itself
    options = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(prompt, **options)
    good = opened(scripted(make_draft(target, block_size=6), expected.sequences, error_rate=0.0))
    monkeypatch.setattr(CostTable, "curve", lambda self, rows, columns, most, drafted=True: [1.4] * (most + 1))
    output = target.generate(prompt, **options, assistant_model=good)
    assert len(output.draft_sizes) == len(output.acceptance_lengths[0]) and max(output.draft_sizes) > 2
    assert output.estimated_speedup > 1.5 and not said
    bad = opened(make_draft(target, block_size=6))
    for _ in range(2):
        output = target.generate(prompt, **options, assistant_model=bad)
        assert output.draft_sizes.count(0) > len(output.draft_sizes) / 2 and output.estimated_speedup <= 1
    (line,) = said
    assert "mostly without drafts: with 1 row(s)" in line and "x the speed of the target alone" in line
    fixed = make_draft(target)
    output = target.generate(prompt, **options, assistant_model=fixed)
    assert output.draft_sizes is None and output.estimated_speedup is None


def test_an_estimate_covers_the_whole_call(monkeypatch):
    """It was that of the rounds: 1.67 where 1.39 was measured, since the prompt takes the target as long."""
    target, seen, speedup = make_target(), [], Pair.speedup
    monkeypatch.setattr(Pair, "speedup", lambda *given: seen.append(given) or speedup(*given))
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    draft = opened(make_draft(target, block_size=6))
    output = target.generate(torch.tensor([[5, 9, 17, 33]]), **options, assistant_model=draft)
    ((pair, of_rounds, seconds),) = seen
    assert min(pair.setup, pair.reading, of_rounds, seconds) > 0
    assert output.estimated_speedup == pair.speedup(of_rounds, seconds)
    known = Pair(None, None, None, None, 4, setup=1.0, reading=2.0)
    assert known.speedup(2.0, 5.0) == (2 + 10) / (1 + 2 + 5)


def test_a_drafter_is_not_blamed_where_copies_are_fast(monkeypatch):
    """Setting a block size, as the warning says, would end them."""
    target, said = make_target(), []
    monkeypatch.setattr(plan_dflash.logger, "warning", said.append)
    monkeypatch.setattr(
        CostTable, "curve", lambda self, rows, columns, most, drafted=True: [1.0 + drafted] * (most + 1)
    )
    draft = opened(make_draft(target, block_size=6))
    prompt = torch.tensor([[3, 8, 1, 9] * 4])
    options = {"sequence_bias": {(3,): 1.0, (3, 8): 90.0, (8, 1): 90.0, (1, 9): 90.0, (9, 3): 90.0}}
    options |= {"max_new_tokens": 90, "do_sample": False, "return_dict_in_generate": True}
    for _ in range(2):
        output = target.generate(prompt, **options, assistant_model=draft)
    assert output.estimated_speedup > 2 and not said


def test_calls_in_threads_share_what_is_known_of_a_drafter(planners, monkeypatch):
    """Each writes what the target writes alone; the next call begins with what all of them learned."""
    monkeypatch.setattr(CostTable, "curve", lambda self, rows, columns, most, drafted=True: [1.2] * (most + 1))
    target, options = make_target(), {"max_new_tokens": 30, "do_sample": False}
    prompts = [torch.tensor([[5, 9, 17, first]]) for first in range(20, 26)]
    texts = [target.generate(prompt, **options)[0] for prompt in prompts]
    draft = opened(recognising(target, texts))

    def call(number: int) -> bool:
        return torch.equal(target.generate(prompts[number], **options, assistant_model=draft)[0], texts[number])

    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(call, range(len(prompts))))
    assert call(0) and len(planners) == 13
    begun = [planner.begun for planner in planners]
    assert begun[0] == 0 and begun[-1] > 8 and max(planners[-1].sizes) > 1


def test_sizes_that_were_set_are_kept(planners):
    target = make_target()
    draft = make_draft(target)
    prompt = torch.tensor([[5, 9, 17, 33]])
    for setting in ({"block_size": 4}, {"tree_nodes": 5}, {"draft_temperature": 0.5}):
        draft.decoding_config.block_size = None
        for name, value in setting.items():
            setattr(draft.decoding_config, name, value)
        target.generate(prompt, max_new_tokens=9, assistant_model=draft)
        for name in setting:
            setattr(draft.decoding_config, name, None)
    target.generate(prompt, max_new_tokens=9, assistant_model=opened(draft), num_assistant_tokens=2)
    assert not planners
    target.generate(prompt, max_new_tokens=9, assistant_model=opened(draft))
    assert len(planners) == 1


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("slow", [False, True], ids=["equal", "one-slow"])
def test_pace_of_the_slowest_row(rows, slow):
    """Over all rounds of a text: of equal rows it is known early; of one slow row, in the end."""
    draws, left = random.Random(rows), 300
    slowest, got, estimates = SlowestRow(rows), [0] * rows, []
    while min(got) < left:
        counts = [1 if slow and row == 0 else draws.choice((1, 1, 2, 4, 8, 9)) for row in range(rows)]
        estimates.append(slowest.after(counts, [one < left for one in got], left - min(got)))
        got = [one + count for one, count in zip(got, counts, strict=True)]
    true = left / len(estimates)
    if slow:
        assert true == 1 and estimates[200] < 1.15 and estimates == sorted(estimates, reverse=True)
    else:
        assert min(estimates) > 0.45 * true and abs(estimates[40] / true - 1) < 0.25


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_large_batches_draft_from_their_first_call_where_that_pays(rows):
    """Half of all slots are right, and a round that drafts costs 1.2 of one that does not."""
    draws, table = random.Random(0), CostTable(0.1, 8, CPU)
    table.samples[rows, table.bucket(100)] = {NOTHING: [1.0] * 3, **{(size, True): [1.2] * 3 for size in range(8)}}
    host, most = types.SimpleNamespace(alive=[True] * rows, longest=0, committed=[]), 120
    text = types.SimpleNamespace(host=host, tokens_left=most, seconds=0.0, last=torch.zeros(1, dtype=torch.long))
    text.sequences = torch.zeros(rows, 0, dtype=torch.long)
    plan = planner_dflash.Plan(8, every_path(7, 7, 1, CPU))
    planner = FastestPlan(plan, table, {}, (rows,), (rows, 60), None)
    got = [0] * rows
    while any(host.alive):
        drafted, counts = planner.next(text), [1] * rows
        if drafted.block > 1:
            tree = likeliest_tree(
                torch.zeros(rows, dtype=torch.long),
                torch.arange(1, 8).expand(rows, 7),
                torch.full((rows, 7), 0.5).log().cumsum(1),
                plan.paths,
            )
            size = drafted.cut(Draft(tree.tokens, tree=tree)).tokens.shape[1]
            counts = [1 + next((i for i in range(size - 1) if draws.random() > 0.5), size - 1) for _ in range(rows)]
        counts = [min(count, most - done) for count, done in zip(counts, got, strict=True)]
        got = [done + count for done, count in zip(got, counts, strict=True)]
        host.committed, host.alive, text.tokens_left = counts, [done < most for done in got], most - min(got)
        tokens = torch.tensor([[draws.randrange(10**6) for _ in range(max(counts))]] * rows)  # which repeat nothing
        planner.learn(text, types.SimpleNamespace(path=None, tokens=tokens))
    assert sum(size > 0 for size in planner.sizes) > 0.8 * len(planner.sizes)
