"""What `generate` lists of each token, with a drafter as without."""

import pytest
import torch
from support.listed import assert_alike
from support.pairs import make_draft
from support.rows import ragged_prompts
from support.scripted_draft import scripted

from dflash_hf.modeling.generation_dflash import DFlashGenerateOutput


@pytest.mark.parametrize(
    ("rows", "listed", "reason"),
    [
        (1, "output_hidden_states", "hidden states of each token are requested"),
        (1, "output_attentions", "attentions of each token are requested"),
        (3, "output_scores", "scores of several rows are requested"),
        (3, "output_logits", "logits of several rows are requested"),
    ],
)
def test_lists_of_plain_decoding(target, draft, rows, listed, reason, caplog):
    inputs, _ = ragged_prompts(rows)
    target.set_attn_implementation("eager")
    options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True, listed: True}
    expected = target.generate(**inputs, **options)
    output = target.generate(**inputs, **options, assistant_model=draft)
    target.set_attn_implementation("sdpa")
    assert type(output) is DFlashGenerateOutput and output.acceptance_lengths == [[]] * rows
    assert torch.equal(output.sequences, expected.sequences) and f"{reason}." in caplog.text
    names = ("scores", "logits", "hidden_states", "attentions")
    assert_alike(output, expected, 0.0, names[2:])
    for name in names[:2]:
        for ours, theirs in zip(getattr(output, name) or (), getattr(expected, name) or (), strict=True):
            assert torch.equal(ours, theirs)
    assert len(getattr(output, listed.removeprefix("output_"))) == 9


def test_lists_without_a_result_are_not_made(target):
    """There is nothing to hold them, so the call is drafted."""
    inputs, _ = ragged_prompts(1)
    text = target.generate(**inputs, max_new_tokens=9, do_sample=False)
    draft, rounds = scripted(make_draft(target), text), []
    draft.register_forward_hook(lambda *_: rounds.append(1))
    options = {"output_hidden_states": True, "output_scores": True}
    output = target.generate(**inputs, max_new_tokens=9, do_sample=False, **options, assistant_model=draft)
    assert torch.equal(output, text) and rounds
