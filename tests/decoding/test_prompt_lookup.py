"""Copies of earlier text as drafts: found where the text repeats itself, and as reliable as they were."""

import random

import pytest
import torch
from support.pairs import make_draft, make_target

from dflash_hf.decoding.calibration import AcceptanceCalibration
from dflash_hf.decoding.prompt_lookup import PromptLookup, copies_of_batch


LOOP = [3, 8, 1, 9]


def read(prompt, generated=()) -> PromptLookup:
    lookup = PromptLookup(list(prompt), 96, AcceptanceCalibration())
    for token in generated:
        lookup.extend([token])
    return lookup


@pytest.mark.parametrize(
    ("text", "limit", "copied"),
    [
        ([1, 2, 3, 4, 1, 2, 5, 6, 9, 1, 2], 3, [5, 6, 9]),  # what followed last
        ([1, 2, 3, 4, 5], 3, []),
        ([], 3, []),
        ([7, *LOOP, *LOOP], 10, [3, 8, 1, 9, 3, 8, 1, 9, 3, 8]),  # beyond the end of a loop
        ([5, 5, 5], 4, [5, 5, 5, 5]),
        (LOOP * 30, 64, LOOP * 4),
        # Placeholders of a prompt given as embeddings, which the target has no embedding for.
        ([7, 11, 12, 13, -200, -200, 20, 5000, 21, 11, 12], 5, [13]),
        ([7, 11, 12, 13, -200, -200, 20, 13, -200], 4, []),
    ],
)
def test_text_is_copied_where_it_repeats_itself(text, limit, copied):
    for read_before in (len(text), len(text) // 2):
        tokens, expected = read(text[:read_before], text[read_before:]).propose(limit)
        assert tokens == copied and len(expected) == len(tokens) + 1
        assert expected == sorted(expected) and expected[0] == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_copied_passage_occurred_before(seed):
    """It is followed while the text agrees with it; else the last place of the last two tokens is found."""
    draws = random.Random(seed)
    text = [draws.randrange(4) for _ in range(300)]
    passage = None
    lookup = read([])
    for end, token in enumerate(text, start=1):
        lookup.extend([token])
        passage = passage + 1 if passage is not None and text[passage] == token else None
        if passage is None:
            passage = max((i for i in range(2, end) if text[i - 2 : i] == text[end - 2 : end]), default=None)
        tokens, _ = lookup.propose(1)
        assert tokens == ([] if passage is None else [text[passage]])


def test_calibration_learns_from_generated_text():
    fresh = read(LOOP * 9)
    good = read(LOOP, LOOP * 9)
    bad = read([], [token for number in range(9) for token in (1, 2, 10 + number)] + [1, 2])
    expected = [lookup.propose(4)[1] for lookup in (bad, fresh, good)]
    assert expected[0][1] < 0.15 < expected[1][1] < expected[2][1] and expected[2][4] > 3.3


def test_copies_are_drafted_in_a_call():
    """Those of an untrained drafter are rejected: what is accepted was copied, and what follows a prompt's loop is."""
    target = make_target()
    prompt = torch.tensor([[*LOOP * 3, 40, 41, *LOOP]])
    draft = make_draft(target, block_size=6)
    draft.decoding_config.block_size = None
    options = {"input_ids": prompt, "max_new_tokens": 90, "do_sample": False, "return_dict_in_generate": True}
    options["sequence_bias"] = {
        (3,): 1.0,
        (3, 8): 90.0,
        (8, 1): 90.0,
        (1, 9): 90.0,
        (9, 3): 90.0,
        (9, 3, 8, 1, 9): 2.0,
    }
    expected = target.generate(**options).sequences
    for _ in range(2):
        output = target.generate(**options, assistant_model=draft)
        assert torch.equal(output.sequences, expected)
    assert output.estimated_speedup > 2 and max(output.acceptance_lengths[0]) > 6
    draft.decoding_config.block_size = 4
    assert max(target.generate(**options, assistant_model=draft).acceptance_lengths[0]) <= 4


def test_placeholders_of_a_prompt_are_not_copied():
    ids = [7, 11, 12, 13, -200, -200, 20, 5000, 21, 11, 12]
    target = make_target()
    draft = make_draft(target, block_size=6)
    draft.decoding_config.block_size = None
    embeds = torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(0))
    options = {"inputs_embeds": embeds, "input_ids": torch.tensor([ids]), "max_new_tokens": 30, "do_sample": False}
    options["sequence_bias"] = {(11,): 30.0, (11, 12): 60.0}  # so that the text comes back to the placeholders
    plain = target.generate(**options)
    assert plain[0, 11:].tolist().count(12) > 3
    assert torch.equal(target.generate(**options, assistant_model=draft), plain)


def test_copies_of_batch_count_for_its_slowest_row():
    """A batch is done when its slowest row is. With the sum of all gains, four rows took up to 1.4 times as long."""
    candidates = [([5, 6, 7], [0.0, 0.9, 1.7, 2.0]), ([], [0.0]), ([8], [0.0, 0.5])]
    tokens, expected = copies_of_batch(candidates, [20, 10, 20], [True, False, True])
    assert tokens == [[5, 6, 7], [0, 0, 0], [8, 0, 0]] and expected == [0.0, 1.0, 1.0, 1.0]
    assert copies_of_batch(candidates, [20, 20, 20], [True] * 3)[1] == [0.0] * 4
    assert copies_of_batch(candidates, [20, 21, 30], [True] * 3)[1] == pytest.approx([0.0, 2.7, 3.0, 3.0])
    assert copies_of_batch([([], [0.0])] * 2, [3, 4], [True, True]) == ([[], []], [0.0])


def test_two_rows_copy_in_a_call():
    target = make_target()
    draft = make_draft(target, block_size=6)
    draft.decoding_config.block_size = None
    prompt = torch.tensor([[*LOOP * 3, 40, 41, *LOOP], [0, 0, 0, 0, 50, 51, *LOOP * 3]])
    options = {"input_ids": prompt, "attention_mask": (prompt > 0).long(), "max_new_tokens": 60, "do_sample": False}
    options |= {"sequence_bias": {(9,): 30.0, (9, 3): 60.0, (3, 8): 60.0, (8, 1): 60.0, (1, 9): 60.0}}
    options |= {"return_dict_in_generate": True, "pad_token_id": 0}
    expected = target.generate(**options).sequences
    output = target.generate(**options, assistant_model=draft)
    assert torch.equal(output.sequences, expected)
    assert min(max(rounds) for rounds in output.acceptance_lengths) > 6
