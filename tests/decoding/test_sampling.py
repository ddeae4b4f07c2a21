"""Sampling: the distribution is the target's, whatever was drafted."""

import itertools

import pytest
import torch
from support.pairs import make_draft
from support.sampling import STEPS, VOCAB, assert_follows, exact_distribution, sample
from support.scripted_draft import scripted

from dflash_hf.decoding import sampling_noise
from dflash_hf.decoding.acceptance import argmax_token


CASES = [  # rows, temperature, top_p, samples, nodes of trees, whether torch's own draws are foreseen
    (250, 0.7, 1.0, 12_000, None, True),
    (250, 1.0, 0.9, 12_000, 5, False),
    (1, 1.0, 0.9, 500, None, False),
    (1, 0.7, 1.0, 500, 5, True),
]
LONG_CASES = [
    (1000, 1.0, 1.0, 200_000, None, False),
    (1000, 1.0, 1.0, 200_000, 5, True),
    (1000, 0.8, 0.9, 200_000, None, True),
    (1000, 0.8, 0.9, 200_000, 5, False),
    (1, 1.0, 1.0, 10_000, None, False),
    (1, 1.0, 1.0, 10_000, 5, True),
    (1, 0.8, 0.9, 10_000, None, True),
    (1, 0.8, 0.9, 10_000, 5, False),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in LONG_CASES]


@pytest.mark.parametrize(("rows", "temperature", "top_p", "draws", "nodes", "foreseen"), CASES)
def test_samples_follow_the_target(small, monkeypatch, rows, temperature, top_p, draws, nodes, foreseen):
    """Drafts are right and wrong on purpose; with the noise of torch's own draws, and with other noise."""
    monkeypatch.setattr(sampling_noise, "multinomial_is_predictable", lambda device: foreseen)
    prompt = [3, 1, 4]
    expected = exact_distribution(small, prompt, temperature, top_p)
    likely = torch.tensor([[*prompt, *max(expected, key=expected.get), 0]] * rows)
    draft = make_draft(small, block_size=4)
    draft.decoding_config.tree_nodes = nodes
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=STEPS), 0)
    accepted = set()
    torch.manual_seed(0)
    for number in range(draws // rows):
        draft = scripted(draft, likely, error_rate=0.2, seed=number)
        output = sample(small, draft, prompt, rows, temperature, top_p)
        accepted.update(n for lengths in output.acceptance_lengths for n in lengths)
        for text in output.sequences[:, 3:].tolist():
            counts[tuple(text)] += 1
    assert accepted >= {1, 2}
    assert_follows(counts, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 96, 1000, 1024, 2304])
def test_likeliest_is_the_first_maximum(size, dtype):
    """However a vocabulary divides into chunks; with ties, infinities and NaN as `argmax`."""
    torch.manual_seed(0)
    scores = torch.randint(0, 9, (3, 4, size)).to(dtype)  # many ties
    scores[0, 0] = -torch.inf
    scores[0, 1, size // 2] = torch.inf
    scores[0, 2, size // 3] = torch.nan
    for some in (scores, scores.transpose(0, 1), scores[0, 0]):
        assert argmax_token(some).tolist() == some.float().argmax(-1).tolist()
