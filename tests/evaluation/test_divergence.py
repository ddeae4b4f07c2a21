"""Rounding or a fault: answers that are not the target's own, in fp32, in bf16, and with faults put in."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from support.pairs import make_draft, make_target

from dflash_hf.decoding.acceptance import Block
from dflash_hf.evaluation import divergence
from dflash_hf.evaluation.divergence import EQUAL, NEAR_TIE, WRONG, find_divergences, gap_at, measure_rounding
from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.methods import TARGET_ALONE, WHOLE_BLOCKS
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.evaluation.text import summary_lines


PROMPTS = [[5 + i, 9, 11 + 2 * i, 60, 7] for i in range(12)]
NEW = 40


def pair(dtype):
    """Logits of a real model's size: near-ties are as rare as there."""
    target = make_target(dtype=torch.float32)
    target = target.to(dtype)
    return target, make_draft(target)


@pytest.fixture(scope="module")
def bf16():
    return pair(torch.bfloat16)


def plain(target, prompts=PROMPTS, new=NEW):
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": new}
        answers.append(target.generate(ids, **options)[0, len(prompt) :].tolist())
    return answers


def test_fp32_answers_equal_with_little_rounding():
    target, draft = pair(torch.float32)
    report = evaluate(target, draft, PROMPTS[:4], max_new_tokens=NEW, runs=1, methods=(TARGET_ALONE, WHOLE_BLOCKS))
    assert report.verdict() == EQUAL and report.rounding is None and not report.divergences
    rounding = measure_rounding(target, list(zip(PROMPTS, plain(target), strict=True)), 4)
    assert rounding.positions == min(divergence.POSITIONS, NEW * len(PROMPTS))
    assert 0 < rounding.size < 1e-3 and len(rounding.ways) == 3


def test_bf16_differs_from_target_only_at_near_ties(bf16):
    target, draft = bf16
    report = evaluate(target, draft, PROMPTS, max_new_tokens=NEW, runs=1, methods=(TARGET_ALONE, WHOLE_BLOCKS))
    assert 0 < report.methods[WHOLE_BLOCKS].equal < len(PROMPTS)  # else nothing is tested
    assert report.verdict() == NEAR_TIE and not report.is_wrong
    assert all(divergence.gap <= 2 * report.rounding.size for divergence in report.divergences)
    table = "\n".join(summary_lines(report))
    assert "differs at a near-tie" in table and "rounding moves two logits" in table and WRONG not in table
    again = EvalReport.from_json(report.to_json())
    assert again.divergences == report.divergences and again.rounding == report.rounding
    assert json.loads(report.to_json())["summary"]["verdict"] == NEAR_TIE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_token_too_many_is_wrong(dtype, monkeypatch):
    """Verification that accepts a draft unseen, now and then."""
    target, draft = pair(dtype)
    original = Block.longest_match
    rounds = []

    def careless(self, chosen):
        counts, path = original(self, chosen)
        rounds.append(1)
        return counts if len(rounds) % 9 else (counts + 1).clamp(max=chosen.shape[1]), path

    monkeypatch.setattr(Block, "longest_match", careless)
    report = evaluate(target, draft, PROMPTS[:4], max_new_tokens=NEW, runs=1, methods=(TARGET_ALONE, WHOLE_BLOCKS))
    assert report.verdict() == WRONG and report.is_wrong
    assert WRONG in "\n".join(summary_lines(report))


@pytest.mark.parametrize("rank", [1, 3])
def test_token_beyond_rounding_is_wrong(bf16, rank):
    """The second best token in place of the best is wrong wherever the two are well apart."""
    target, _ = bf16
    own = plain(target, PROMPTS[:6], 20)
    changed_answers = copy.deepcopy(own)
    for prompt, answer, changed in zip(PROMPTS, own, changed_answers):
        ids = torch.tensor([[*prompt, *answer[:10]]])
        changed[10] = int(target(ids).logits[0, -1].topk(rank + 1).indices[rank])
    divergences, rounding = find_divergences(target, PROMPTS[:6], own, {"x": changed_answers}, 4)
    assert [difference.position for difference in divergences] == [10] * 6
    for difference in divergences:
        text = [*PROMPTS[difference.prompt], *own[difference.prompt][:10]]
        gap = gap_at(target, text, difference.own, difference.other)
        assert difference.gap == gap and difference.verdict == (WRONG if gap > 2 * rounding.size else NEAR_TIE)
    assert any(difference.verdict == WRONG for difference in divergences)


def test_text_that_ends_elsewhere_is_wrong(bf16):
    target, _ = bf16
    own = plain(target, PROMPTS[:2], 12)
    (difference,), _ = find_divergences(target, PROMPTS[:2], own, {"x": [own[0][:7], own[1]]}, 4)
    assert (difference.prompt, difference.position, difference.other) == (0, 7, -1)
    assert difference.gap is None and difference.verdict == WRONG


def test_gap_respects_processors_of_the_target(bf16):
    """A token that the target's configuration forbids has no score."""
    target = copy.deepcopy(bf16[0])
    text = PROMPTS[0]
    own, other = target(torch.tensor([text])).logits[0, -1].topk(2).indices.tolist()
    target.generation_config.suppress_tokens = [other]
    assert gap_at(target, text, own, other) is None
    assert gap_at(bf16[0], text, own, other) is not None


def test_faulty_forward_does_not_widen_rounding(bf16, monkeypatch):
    """A model that reads a block wrongly would excuse everything."""
    target, _ = bf16
    texts = list(zip(PROMPTS[:3], plain(target, PROMPTS[:3]), strict=True))
    honest = measure_rounding(target, texts, 4)
    original = divergence._two_best

    def garbled(target, ids, images, start, step, chosen=None):
        best, gaps = original(target, ids, images, start, step, chosen)
        return (best.flip(1), gaps + 100) if step == 4 else (best, gaps)

    monkeypatch.setattr(divergence, "_two_best", garbled)
    rounding = measure_rounding(target, texts, 4)
    assert "in blocks" not in rounding.ways and rounding.size <= honest.size


def test_cache_has_the_name_of_the_targets_argument(monkeypatch):
    """Before transformers 5.24, a target whose forward takes `cache_params` got an argument that it does not have."""
    monkeypatch.setattr("dflash_hf.targets.features.CACHE_NAME", "past_key_values")

    class OfStates(torch.nn.Module):
        """As Mamba: it takes its state under no other name."""

        device = torch.device("cpu")

        def forward(self, input_ids, cache_params=None, use_cache=False):
            if cache_params is None and use_cache:
                cache_params = torch.zeros(0)
            return SimpleNamespace(
                logits=torch.nn.functional.one_hot(input_ids, 12).float(), cache_params=cache_params
            )

    rounding = measure_rounding(OfStates(), [([1, 2], [3, 4, 5])], block_size=2)
    assert rounding.positions == 3 and rounding.size == 0 and len(rounding.ways) == 3
