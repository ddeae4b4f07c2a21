"""
A drafter that sees only the last tokens of a text, and the first: texts stay the target's, and drafts are those of a
forward over the whole text in which all other tokens are masked, which `recognising` computes block by block. A draft
that sees one token more, or fewer, is not recognised: then nothing is accepted.
"""

import pytest
import torch
from support.heads import opened
from support.rows import ragged_prompts
from support.scripted_draft import recognising


NEW_TOKENS = 60
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


def written(target, rows: int = 1, longest: int = 40):
    """Prompts, the options to continue them, and the target's own texts, each without its padding."""
    inputs, pads = ragged_prompts(rows, longest)
    options = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(**options).sequences
    assert len(set(expected[:, longest:].flatten().tolist())) > 12, "a constant text proves nothing"
    return options, expected, [text[pad:] for text, pad in zip(expected, pads, strict=True)]


def check(output, expected):
    """The target's texts, with drafts that were accepted and others that were rejected."""
    assert torch.equal(output.sequences, expected)
    for lengths in output.acceptance_lengths:
        assert sum(lengths) == NEW_TOKENS - 1
        assert sum(lengths) / len(lengths) > 2 and min(lengths) < max(lengths), lengths


def test_another_window_is_not_recognised(target):
    """The test of the tests: one token more or fewer, and drafts are rejected."""
    options, expected, texts = written(target)
    draft = recognising(target, texts, window=11)
    for window in (10, 12, None):
        draft.decoding_config.window = window
        output = target.generate(**options, assistant_model=draft)
        assert torch.equal(output.sequences, expected) and set(output.acceptance_lengths[0]) == {1}


def test_texts_may_be_far_longer_than_the_window(target):
    options, expected, texts = written(target, rows=2, longest=130)
    check(target.generate(**options, assistant_model=recognising(target, texts, window=13)), expected)


@pytest.mark.parametrize("window", [1, 12, 100])
def test_features_outside_the_window_do_not_matter(window, target):
    """A block sees the features of the first four tokens and of the window before it, and no others."""
    draft = recognising(target, [torch.arange(40)], window=window)
    features = torch.randn(1, 40, draft.fc.in_features, generator=torch.Generator().manual_seed(0))
    blocks = []
    for changed in (None, 3, 4, 39 - window, 40 - window):
        mine = features.clone()
        if changed is not None and changed >= 0:
            mine[:, changed] += 5.0
        blocks.append(opened(draft, target, mine).hidden_states(torch.tensor([5])))
    whole, sink, between, before, first = blocks
    assert window > 40 or torch.equal(whole, between) and torch.equal(whole, before)
    assert not torch.allclose(whole, sink) and (window > 40 or not torch.allclose(whole, first))
