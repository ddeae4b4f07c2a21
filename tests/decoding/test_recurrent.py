"""Recurrent targets: their states cannot be cropped, and yet the text is what they write alone."""

from collections import Counter

import pytest
import torch
from support import families
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from support.scripted_draft import scripted

from dflash_hf.decoding.recurrent import ReplaySession
from dflash_hf.decoding.strategy import support
from dflash_hf.modeling.session_dflash import SlotSession


KINDS = {**dict.fromkeys(families.SLOTS, SlotSession), **dict.fromkeys(families.REPLAY, ReplaySession)}
QUICK = ("qwen3_5_text", "falcon_h1", "lfm2", "mamba2")


def slowly(families, quick):
    return [family if family in quick else pytest.param(family, marks=pytest.mark.slow) for family in families]


@pytest.mark.parametrize("family", slowly(KINDS, QUICK))
def test_text_of_more_families_is_the_targets(family):
    seen = Counter()
    for dtype, rows, block_size in ((torch.float32, 1, 8), (torch.float64, 4, 8), (torch.float32, 4, 5)):
        target = make_target(family, dtype, attn=None)
        assert support(target).session is KINDS[family]
        options = {**ragged_prompts(rows)[0], "max_new_tokens": 30, "do_sample": False}
        expected = target.generate(**options)
        draft = scripted(make_draft(target, block_size), expected, error_rate=0.15)
        output = target.generate(**options, assistant_model=draft, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected), (dtype, rows)
        seen.update(length for lengths in output.acceptance_lengths for length in lengths)
    assert len(seen) >= 4, seen


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_recurrent_cache_continues_the_conversation(family):
    """What comes back is what comes back without a drafter, and goes on with or without one."""
    target = make_target(family)
    inputs, _ = ragged_prompts(1)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(**inputs, **options)
    turn = torch.cat([expected.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    plain = target.generate(turn, past_key_values=expected.past_key_values, **options).sequences
    draft = scripted(make_draft(target, 8), plain)
    for assistant in (None, draft):
        first = target.generate(**inputs, **options, assistant_model=draft)
        again = target.generate(turn, past_key_values=first.past_key_values, **options, assistant_model=assistant)
        assert torch.equal(again.sequences, plain)


def test_trial_notices_a_wrong_state(monkeypatch):
    """The rejected tokens stay in the state."""
    monkeypatch.setattr(ReplaySession, "_advance", lambda self, kept: None)
    assert support(make_target("qwen3_5_text")).session is None


@pytest.mark.parametrize("family", slowly(families.PLAIN, ("jamba", "falcon_mamba", "nemotron_h", "bloom")))
def test_other_families_decode_plainly(family, caplog):
    """States that cannot be replayed, caches without slots, other logits in a forward over several tokens."""
    target, options = make_target(family, attn=None), ragged_prompts(1)[0]
    options |= {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    output = target.generate(**options, assistant_model=make_draft(target))
    assert torch.equal(output.sequences, target.generate(**options).sequences) and output.acceptance_lengths == [[]]
    reasons = "cannot be rolled back", "computes different logits"
    assert any(reason in record.getMessage() for record in caplog.records for reason in reasons)
