"""Tau by the published definition, from an independent loop over the same models."""

import statistics

import pytest
import torch
from support.pairs import make_draft, make_target
from support.reference import published_loop

from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.methods import TARGET_ALONE, WHOLE_BLOCKS


NEW = 40
PROMPTS = [[2 + i, 9, 3, 10 - i, 7] for i in range(4)]


@pytest.fixture(scope="module")
def pair():
    """Over few tokens, so that an untrained drafter is often right."""
    target = make_target(vocab_size=24, bos_token_id=None, seed=1)
    return target, make_draft(target, block_size=16, seed=5)


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_tau_equals_the_published_loop(block_size, pair):
    """A block of `block_size` slots is drafted, not a larger one of which a part is verified."""
    target, draft = pair
    names = ("target_layer_ids", "mask_token_id")
    config = {"block_size": block_size, **{name: getattr(draft.config, name) for name in names}}

    def draft_hidden(features, block):
        assert len(block) == block_size
        return draft(noise_embeds=block[None], context_hidden_states=features[None]).last_hidden_state[0]

    expected_lengths = []
    for prompt in PROMPTS:
        _, lengths = published_loop(draft_hidden, target, config, torch.tensor([prompt]), NEW, [])
        # The published loop counts a last block as a whole, though the text ends within it.
        lengths[-1] -= 1 + sum(lengths) - NEW
        expected_lengths.append(lengths)
    methods = (TARGET_ALONE, WHOLE_BLOCKS)
    report = evaluate(target, draft, PROMPTS, max_new_tokens=NEW, runs=1, methods=methods, block_size=block_size)
    assert report.acceptance_lengths == expected_lengths
    assert len(set(report.verifications)) > 2
    expected_tau = statistics.fmean(statistics.fmean(lengths) for lengths in expected_lengths)
    assert report.methods[WHOLE_BLOCKS].tau_of_responses == pytest.approx(expected_tau)
    assert report.block_size == report.setting["block_size"] == block_size
