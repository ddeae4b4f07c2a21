"""Recurrent targets: their states cannot be cropped, and yet the text is what they write alone."""

from collections import Counter

import families
import pytest
import torch
from conftest import make_draft, make_target
from test_lossless import ragged_prompts

from dflash_hf.modeling.probe_dflash import probe_rollback
from dflash_hf.modeling.replay_dflash import ReplaySession, StepSession
from dflash_hf.modeling.verify_dflash import CropSession, SlotSession


KINDS = {
    **dict.fromkeys(families.SLOTS, SlotSession),
    **dict.fromkeys(families.REPLAY, ReplaySession),
    **dict.fromkeys(families.STEP, StepSession),
    **dict.fromkeys(families.CROP, CropSession),
}
QUICK = ("qwen3_5_text", "falcon_h1", "lfm2", "mamba2", "nemotron_h", "jamba", "bloom")


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in KINDS]
)
def test_more_families_are_lossless(family, oracle):
    seen = Counter()
    for dtype, rows, block_size in ((torch.float32, 1, 8), (torch.float64, 4, 8), (torch.float32, 4, 5)):
        target = make_target(family, dtype, attn=None)
        assert probe_rollback(target) is KINDS[family]
        inputs, pads = ragged_prompts(rows)
        expected = target.generate(**inputs, max_new_tokens=30, do_sample=False)
        oracle(expected, pads, error_rate=0.15)
        output = target.generate(
            **inputs,
            max_new_tokens=30,
            do_sample=False,
            assistant_model=make_draft(target, block_size),
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, expected), (dtype, rows)
        seen.update(length for lengths in output.acceptance_lengths for length in lengths)
    assert len(seen) >= 4, seen
