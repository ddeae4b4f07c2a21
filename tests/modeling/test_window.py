"""
A drafter that sees only the last tokens of a text, and the first: texts stay the target's, and drafts are those of a
forward over the whole text in which all other tokens are masked, which `recognising` computes block by block. A draft
that sees one token more, or fewer, is not recognised: then nothing is accepted.
"""

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from support.scripted_draft import recognising
from transformers import LogitsProcessor, LogitsProcessorList

from dflash_hf.modeling.cache_dflash import SlotCache
from dflash_hf.modeling.drafting_dflash import DFlashCandidateGenerator


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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("window", [1, 7, 24, 500])
@pytest.mark.parametrize(
    "changes", [{}, {"tree_nodes": 9}, {"look_ahead": 3}, SLIDING], ids=["blocks", "trees", "look_ahead", "sliding"]
)
def test_drafts_see_the_window_and_the_first_tokens(changes, window, rows, target):
    options, expected, texts = written(target, rows)
    overrides = changes if changes is SLIDING else {}
    draft = recognising(target, texts, window=window, **overrides)
    for field, value in ({} if overrides else changes).items():
        setattr(draft.decoding_config, field, value)
    check(target.generate(**options, assistant_model=draft), expected)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_targets_with_other_caches(family):
    target = make_target(family, attn="eager" if family == "gemma3" else "sdpa")
    options, expected, texts = written(target)
    check(target.generate(**options, assistant_model=recognising(target, texts, window=11)), expected)


def test_another_window_is_not_recognised(target):
    """The test of the tests: one token more or fewer, and drafts are rejected."""
    options, expected, texts = written(target)
    draft = recognising(target, texts, window=11)
    for window in (10, 12, None):
        draft.decoding_config.window = window
        output = target.generate(**options, assistant_model=draft)
        assert torch.equal(output.sequences, expected) and set(output.acceptance_lengths[0]) == {1}


def test_compiled_rounds_follow_a_window_that_changes():
    torch._dynamo.reset()
    target = make_target()
    options, expected, texts = written(target, rows=2)
    for window in (7, None):
        draft = recognising(target, texts, window=window)
        draft.decoding_config.compile = "eager"
        check(target.generate(**options, assistant_model=draft), expected)


def test_calls_inside_a_call_have_their_own_windows(target):
    options, expected, texts = written(target)
    outer, inner = (recognising(target, texts, window=window) for window in (7, 24))
    answers = []

    class Asking(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] % 20 == 0:
                answers.append(target.generate(**options, assistant_model=inner))
            return scores

    output = target.generate(**options, assistant_model=outer, logits_processor=LogitsProcessorList([Asking()]))
    check(output, expected)
    assert answers
    for answer in answers:
        check(answer, expected)


@pytest.mark.parametrize("size", [6, None])
def test_a_text_far_longer_than_its_window(size, target, monkeypatch):
    """
    Undrafted rounds, whose features are read together, included. One copy writes no slot twice: which of the tokens
    stays would be a matter of luck on a GPU.
    """
    options, expected, texts = written(target, rows=2, longest=130)
    draft = recognising(target, texts, window=13)
    draft.decoding_config.block_size = size
    place, written_at = SlotCache.place, []

    def noted(self, *slots):
        if self.most is not None:
            for row in (row for group in slots for row in group.tolist()):
                kept = [slot for slot in row if slot != self.trash]
                written_at.append(kept)
                assert len(set(kept)) == len(kept) and max(kept) < self.most
        place(self, *slots)

    monkeypatch.setattr(SlotCache, "place", noted)
    output = target.generate(**options, assistant_model=draft)
    assert torch.equal(output.sequences, expected) and max(map(len, written_at)) > 60
    if size is not None:
        check(output, expected)


def test_features_outside_the_window_do_not_matter(target):
    """A block equals that of a context in which tokens before the window, past the first four, have other features."""
    _, _, texts = written(target)
    draft = recognising(target, texts, window=12)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 40, draft.fc.in_features, generator=generator)
    blocks = []
    for changed in (None, 3, 4, 27, 28):  # the window is 28..39
        drafter = DFlashCandidateGenerator(draft, target)
        mine = features.clone()
        if changed is not None:
            mine[:, changed] += 5.0
        drafter.absorb(mine)
        drafter.open([0], 40, 64, torch.zeros(1, 1, dtype=torch.long))
        drafter.cache.reserve(60)
        start = torch.tensor([40])
        blocks.append(drafter._hidden_states(torch.tensor([5]), start, *drafter.no_features(start, 6)[:2]))
    whole, sink, between, before, first = blocks
    assert torch.equal(whole, between) and torch.equal(whole, before)
    assert not torch.allclose(whole, sink) and not torch.allclose(whole, first)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sliding", [None, 6])
@pytest.mark.parametrize("window", [1, 6, 40])
def test_the_mask_of_a_ring_against_an_element_wise_oracle(window, sliding, causal, target):
    layers = {"layer_types": ["sliding_attention"] * 2, "sliding_window": sliding} if sliding else {}
    draft = make_draft(target, is_causal=causal, **layers)
    draft.decoding_config.window = window
    drafter = DFlashCandidateGenerator(draft, target)
    drafter.open([0, 0], 0, 8, torch.zeros(2, 1, dtype=torch.long))
    drafter.cache.reserve(1000)
    holds = [[None] * drafter.cache.capacity for _ in range(2)]  # the token that each slot of each row holds
    for step in range(60):
        block = torch.tensor([[3 * step], [5 * step]]) + torch.arange(4)
        for token in range(5 * step + 4):
            for row in range(2):
                if token <= int(block[row, -1]):
                    slot = int(drafter._slots(torch.full((2, 1), token))[row, 0])
                    holds[row][slot] = token
        if step % 10 not in (0, 9):
            continue
        (mask,) = drafter._masks(block).values()
        for row in range(2):
            start = int(block[row, 0])
            for i, query in enumerate(block[row].tolist()):
                for slot, token in enumerate(holds[row][: drafter.cache.view]):
                    seen = token is not None and (token < 4 or start - token <= window)
                    seen = seen and (not causal or token <= query) and (sliding is None or query - token < sliding)
                    assert bool(mask[row, 0, i, slot] == 0) == seen, (start, i, slot, token)
    assert drafter.cache.capacity <= window + 4 + 8 + 32 + 64
