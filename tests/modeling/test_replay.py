"""Recurrent targets: their states cannot be cropped, and yet the text is what they write alone."""

from collections import Counter

import pytest
import torch
from support import families
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from support.scripted_draft import scripted

from dflash_hf.modeling import probe_dflash
from dflash_hf.modeling.probe_dflash import facts_of
from dflash_hf.modeling.recurrent_dflash import ReplaySession, StepSession
from dflash_hf.modeling.sessions_dflash import SlotSession


KINDS = {
    **dict.fromkeys(families.SLOTS, SlotSession),
    **dict.fromkeys(families.REPLAY, ReplaySession),
    **dict.fromkeys(families.STEP, StepSession),
}
QUICK = ("qwen3_5_text", "falcon_h1", "lfm2", "mamba2", "nemotron_h", "jamba")


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in KINDS]
)
def test_more_families_are_lossless(family):
    seen = Counter()
    for dtype, rows, block_size in ((torch.float32, 1, 8), (torch.float64, 4, 8), (torch.float32, 4, 5)):
        target = make_target(family, dtype, attn=None)
        assert facts_of(target).session_class is KINDS[family]
        inputs, _ = ragged_prompts(rows)
        expected = target.generate(**inputs, max_new_tokens=30, do_sample=False)
        draft = scripted(make_draft(target, block_size), expected, error_rate=0.15)
        output = target.generate(
            **inputs,
            max_new_tokens=30,
            do_sample=False,
            assistant_model=draft,
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, expected), (dtype, rows)
        seen.update(length for lengths in output.acceptance_lengths for length in lengths)
    assert len(seen) >= 4, seen


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "jamba"])
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


def test_a_wrong_state_is_noticed(monkeypatch):
    """The probe takes no way of rolling back that leaves the rejected tokens in the state."""
    probe_dflash._alike.clear()
    for kind in (ReplaySession, StepSession):
        monkeypatch.setattr(kind, "_go_back", lambda self, size, count: None)
    assert facts_of(make_target("qwen3_5_text")).session_class is None


@pytest.mark.parametrize("family", families.NONE)
def test_targets_with_a_cache_of_their_own_decode_alone(family, caplog):
    """No cache that can be rolled back: the text is the target's, and a sentence says why."""
    target = make_target(family, attn=None)
    assert facts_of(target).session_class is None
    inputs, _ = ragged_prompts(1)
    expected = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    draft = make_draft(target)
    output = target.generate(
        **inputs, max_new_tokens=20, do_sample=False, assistant_model=draft, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, expected) and output.acceptance_lengths == [[]]
    # With transformers 5.20 the probe can open a session on RecurrentGemma's cache, and finds other logits in a block.
    reasons = ["cannot be rolled back", *["computes different logits"] * (family == "recurrent_gemma")]
    assert any(reason in record.getMessage() for record in caplog.records for reason in reasons)
