"""Samples judged by the target's distribution: right ones pass, and each wrong sampler is caught."""

import statistics

import pytest
import torch
from support.pairs import make_draft, make_target

from dflash_hf.decoding.sampling_noise import SamplingNoise
from dflash_hf.evaluation.distribution import FOLLOWS, MAX_Z, TextScore, score_text
from dflash_hf.evaluation.divergence import EQUAL, WRONG
from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.methods import PROMPT_LOOKUP, TARGET_ALONE, WHOLE_BLOCKS
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.evaluation.text import summary_lines
from dflash_hf.targets.generation import generate_one


PROMPT = [5, 9, 11, 60, 7]
NEW = 24
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@pytest.fixture(scope="module")
def target():
    """With distributions that are neither flat nor certain."""
    target = make_target()
    with torch.no_grad():
        target.lm_head.weight.mul_(0.3)
    return target


def samples(target, rows=24, **options):
    torch.manual_seed(0)
    prompts = torch.tensor([PROMPT] * rows)
    options = {**SAMPLED, **options}
    return target.generate(prompts, attention_mask=torch.ones_like(prompts), **options)[:, len(PROMPT) :].tolist()


def scores_of(target, answers):
    return [score_text(target, PROMPT, answer, SAMPLED) for answer in answers]


def test_own_samples_follow_the_distribution(target):
    scores = scores_of(target, samples(target))
    assert abs(sum(scores, TextScore()).z) < 3
    assert 0.6 < statistics.stdev(score.z for score in scores) < 1.5


@pytest.mark.parametrize(
    ("answers_of", "sign"),
    [
        (lambda target: samples(target, temperature=0.7), -1),
        (lambda target: samples(target, temperature=1.6), 1),
        (lambda target: samples(target, top_p=0.8), -1),
        (lambda target: samples(target, rows=4, do_sample=False), -1),
        (lambda target: torch.randint(96, (2, NEW)).tolist(), 1),
    ],
    ids=["colder", "hotter", "nucleus", "greedy", "any token"],
)
def test_other_samplers_are_caught(answers_of, sign, target):
    assert sign * sum(scores_of(target, answers_of(target)), TextScore()).z > MAX_Z


def test_score_equals_sums_over_each_step(target):
    """With processors that read the text before each token, and tokens that are never drawn."""
    options = {**SAMPLED, "repetition_penalty": 1.3, "suppress_tokens": [4, 5], "min_new_tokens": 3}
    torch.manual_seed(1)
    output = generate_one(target, PROMPT, output_scores=True, **options)
    answer = output.sequences[0, len(PROMPT) :].tolist()
    excess = variance = 0.0
    for token, row in zip(answer, output.scores, strict=True):
        probabilities = [float(p) for p in row[0].double().softmax(-1)]
        surprises = [-torch.tensor(p).double().log().item() if p > 0 else 0.0 for p in probabilities]
        mean = sum(p * surprise for p, surprise in zip(probabilities, surprises))
        excess += surprises[token] - mean
        variance += sum(p * (surprise - mean) ** 2 for p, surprise in zip(probabilities, surprises))
    score = score_text(target, PROMPT, answer, options)
    assert (score.excess, score.variance) == pytest.approx((excess, variance), rel=1e-4)
    assert (score.tokens, score.impossible) == (NEW, 0)
    score = score_text(target, PROMPT, [4, *answer[1:]], options)
    assert score.impossible == 1 and abs(score.z) < MAX_Z


@pytest.fixture(scope="module")
def draft(target):
    return make_draft(target)


def evaluated(target, draft, prompts=4, **options):
    prompts = [[PROMPT[0] + i, *PROMPT[1:]] for i in range(prompts)]
    methods = (TARGET_ALONE, WHOLE_BLOCKS, PROMPT_LOOKUP)
    options = {"max_new_tokens": NEW, "runs": 1, "methods": methods, "temperature": 1.0, **options}
    return evaluate(target, draft, prompts, **options)


def test_samples_equal_or_follow_the_target(target, draft):
    """Whole blocks draw the target's own sample; prompt lookup draws several tokens at once, so another one."""
    state = torch.get_rng_state()
    report = evaluated(target, draft)
    assert torch.equal(torch.get_rng_state(), state)
    assert report.methods[WHOLE_BLOCKS].equal == 4 and report.verdict() == EQUAL
    assert len({tuple(response) for response in report.responses}) == 4
    assert [test.method for test in report.distribution_tests] == [TARGET_ALONE, PROMPT_LOOKUP]
    assert {test.verdict for test in report.distribution_tests} == {FOLLOWS}
    assert report.setting["temperature"] == 1.0 and report.setting["seed"] == 0
    again = EvalReport.from_json(report.to_json())
    assert again == report
    text = "\n".join(summary_lines(report))
    assert "4 of 4 samples with the drafter, at temperature 1, equal the target's own of the same seeds" in text
    assert (
        evaluated(target, draft, prompts=1, seed=7, methods=(TARGET_ALONE, WHOLE_BLOCKS)).responses
        != report.responses[:1]
    )


@pytest.mark.parametrize(("temperature", "verdict"), [(1e-4, WRONG), (1.0, FOLLOWS)])
def test_drafted_samples_are_judged(temperature, verdict, target, draft, monkeypatch):
    """A drafted call that samples at another temperature, or with other random numbers."""
    random = torch.Generator().manual_seed(3)

    def draw(self, scores, row, index):
        self.vocab_size = scores.shape[-1]
        return int(torch.multinomial((scores / temperature).softmax(-1), 1, generator=random))

    monkeypatch.setattr(SamplingNoise, "sample", draw)
    report = evaluated(target, draft, methods=(TARGET_ALONE, WHOLE_BLOCKS))
    assert report.verdict() == verdict and report.is_wrong == (verdict == WRONG)
    assert report.methods[WHOLE_BLOCKS].equal < 4
    assert (WRONG in "\n".join(summary_lines(report))) == report.is_wrong
