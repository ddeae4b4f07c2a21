"""Recurrent targets: their states cannot be cropped; those that cannot be replayed decode plainly."""

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts

from dflash_hf.decoding.recurrent import ReplaySession
from dflash_hf.decoding.strategy import support


def test_trial_notices_a_wrong_state(monkeypatch):
    """The rejected tokens stay in the state."""
    monkeypatch.setattr(ReplaySession, "_advance", lambda self, kept: None)
    assert support(make_target("qwen3_5_text")).session is None


@pytest.mark.parametrize("family", ["falcon_mamba", "nemotron_h", "bloom"])
def test_other_families_decode_plainly(family, caplog):
    """States that cannot be replayed, caches without slots, other logits in a forward over several tokens."""
    target, options = make_target(family, attn=None), ragged_prompts(1)[0]
    options |= {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    output = target.generate(**options, assistant_model=make_draft(target))
    assert torch.equal(output.sequences, target.generate(**options).sequences) and output.acceptance_lengths == [[]]
    reasons = "cannot be rolled back", "computes different logits"
    assert any(reason in record.getMessage() for record in caplog.records for reason in reasons)
