"""Sampling: the distribution is the target's, whatever was drafted."""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from support.pairs import make_draft
from support.sampling import STEPS, VOCAB, assert_follows, exact_distribution, sample
from support.scripted_draft import scripted

from dflash_hf.modeling.accept_dflash import likeliest


@pytest.mark.parametrize(
    ("rows", "temperature", "top_p"),
    [(250, 0.7, 1.0), (250, 1.0, 0.9), (1, 1.0, 0.9), pytest.param(1, 0.7, 1.0, marks=pytest.mark.slow)],
)
def test_samples_follow_the_target(small, rows, temperature, top_p):
    prompt = [3, 1, 4]
    expected = exact_distribution(small, prompt, temperature, top_p)
    # Draft a likely text with errors, so that drafts are accepted and rejected at every position.
    likely = torch.tensor([[*prompt, *max(expected, key=expected.get), 0]] * rows)
    draft = make_draft(small, block_size=4)
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=STEPS), 0)
    accepted = set()
    torch.manual_seed(0)
    draws = 500 if rows == 1 else 12_000
    for number in range(draws // rows):
        draft = scripted(draft, likely, error_rate=0.2, seed=number)
        output = sample(small, draft, prompt, rows, temperature, top_p)
        accepted.update(n for lengths in output.acceptance_lengths for n in lengths)
        for text in output.sequences[:, 3:].tolist():
            counts[tuple(text)] += 1
    assert accepted >= {1, 2}
    assert_follows(counts, expected)


def test_one_row_gives_the_same_sample_for_the_same_seed(target, draft):
    """Not asked of speculative decoding in general, but it is so here: one draw for each committed token, in order."""
    prompt = torch.tensor([[5, 9, 17, 33]])
    for options in ({}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 5, "repetition_penalty": 1.3}):
        torch.manual_seed(7)
        expected = target.generate(prompt, do_sample=True, max_new_tokens=40, **options)
        draft = scripted(draft, expected, error_rate=0.2)
        torch.manual_seed(7)
        output = target.generate(
            prompt, do_sample=True, max_new_tokens=40, assistant_model=draft, return_dict_in_generate=True, **options
        )
        assert torch.equal(output.sequences, expected)
        assert max(output.acceptance_lengths[0]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.8, 0.9)])
@pytest.mark.parametrize(("rows", "draws"), [(1000, 200_000), (1, 10_000)])
def test_many_samples_follow_the_target(small, temperature, top_p, rows, draws, draft_temperature):
    """Batches, and one prompt at a time; drafts that are right or wrong on purpose, and drafts that are drawn."""
    prompt = [3, 1, 4]
    expected = exact_distribution(small, prompt, temperature, top_p)
    likely = torch.tensor([[*prompt, *max(expected, key=expected.get), 0]] * rows)
    draft = make_draft(small, block_size=4)
    draft.decoding_config.draft_temperature = draft_temperature
    counts, accepted = torch.zeros(VOCAB**STEPS, dtype=torch.long), set()
    torch.manual_seed(0)
    for number in range(draws // rows):
        if draft_temperature == 0:
            draft = scripted(draft, likely, error_rate=0.2, seed=number)
        output = sample(small, draft, prompt, rows, temperature, top_p)
        accepted.update(n for lengths in output.acceptance_lengths for n in lengths)
        places = torch.tensor([VOCAB**2, VOCAB, 1])
        counts += torch.bincount((output.sequences[:, 3:] * places).sum(dim=1), minlength=VOCAB**STEPS)
    assert accepted >= {1, 2}
    wanted = torch.tensor([expected[text] for text in itertools.product(range(VOCAB), repeat=STEPS)]) * draws
    assert not counts[wanted == 0].any()
    common = wanted >= 5
    rare = [float(counts[~common].sum())], [float(wanted[~common].sum())]
    observed, wanted = counts[common].double().tolist(), wanted[common].double().tolist()
    if rare[1][0] > 1:
        observed, wanted = observed + rare[0], wanted + rare[1]
    scale = sum(observed) / sum(wanted)
    assert chisquare(observed, [w * scale for w in wanted]).pvalue > 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 96, 1000, 1024, 2304])
def test_the_likeliest_token_is_the_first_maximum(size, dtype):
    """However a vocabulary divides into chunks; with ties, infinities and NaN as `argmax`."""
    torch.manual_seed(0)
    scores = torch.randint(0, 9, (3, 4, size)).to(dtype)  # many ties
    scores[0, 0], scores[0, 1, size // 2], scores[0, 2, size // 3] = -torch.inf, torch.inf, torch.nan
    for some in (scores, scores.transpose(0, 1), scores[0, 0]):
        assert likeliest(some).tolist() == some.float().argmax(-1).tolist()
