"""Hidden states while drafting: entry by entry those of plain decoding, as which attentions are listed."""

from collections import Counter

import pytest
import torch
from support import families
from support.listed import assert_alike
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from support.scripted_draft import scripted
from transformers import DynamicCache

from dflash_hf.modeling.generation_dflash import DFlashGenerateOutput
from dflash_hf.modeling.target_dflash import CACHE_NAME


PROMPT = torch.tensor([[5, 9, 17, 33, 5, 9, 17, 33, 5, 9]])
HIDDEN = {"output_hidden_states": True}


def both(target, draft, inputs, error_rate=0.15, seed=None, **options):
    """What the target gives alone, and with a drafter that is right most of the time."""
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, **HIDDEN, **options}
    outputs = []
    for drafted in (False, True):
        assistant = scripted(draft, outputs[0].sequences, error_rate) if drafted else None
        if seed is not None:
            torch.manual_seed(seed)
        outputs.append(target.generate(**inputs, **options, assistant_model=assistant))
    expected, output = outputs
    assert torch.equal(output.sequences, expected.sequences)
    assert type(output) is DFlashGenerateOutput
    return expected, output


# The window of gemma3 and gemma4 here is 8. Two layers of gemma4 have no keys of their own.
FAMILIES = [
    ("qwen3", {}),
    ("gemma3", {}),
    ("gemma4", {"num_kv_shared_layers": 2}),
    ("gpt2", {}),
    ("deepseek_v3", {}),
    ("llama4_text", {}),
    ("qwen3_5_text", {}),
    ("lfm2", {}),
    ("jamba", {}),
    ("mamba", {}),
]


# A prompt that is shorter than the window, where there is one.
CASES = [(family, fields, 11) for family, fields in FAMILIES]
CASES += [
    pytest.param(family, fields, 5, marks=[] if family in ("gemma3", "gemma4", "llama4_text") else pytest.mark.slow)
    for family, fields in FAMILIES
]


@pytest.mark.parametrize(("family", "fields", "longest"), CASES)
def test_entries_are_those_of_plain_decoding(family, fields, longest):
    """One row and a ragged batch. In an fp64 target norms, softmax and recurrences are still computed in fp32."""
    seen = Counter()
    close = 1e-5 if family not in families.REPLAY else 5e-4
    # Padded rows under eager attention are NaN in fp64 upstream; a random Mamba is chaotic in fp32.
    if family == "mamba":
        cases = [(1, torch.float64, None, 1e-9), (4, torch.float64, None, 1e-9)]
    else:
        cases = [(1, torch.float64, "eager", close), (4, torch.float32, "eager", 1e-3)]
        cases += [(4, torch.float64, "sdpa", close)]
    for rows, dtype, attn, tolerance in cases:
        target = make_target(family, dtype, attn, **fields)
        inputs, _ = ragged_prompts(rows, longest)
        expected, output = both(target, make_draft(target, 6), inputs)
        assert len(output.hidden_states) == 20
        assert_alike(output, expected, tolerance)
        seen.update(length for lengths in output.acceptance_lengths for length in lengths)
    assert len(seen) >= 4 and min(seen) < max(seen) == 6, seen


@pytest.fixture(scope="module")
def eager():
    return make_target(dtype=torch.float64, attn="eager")


def test_entries_end_with_the_text_inside_a_block(eager):
    draft = make_draft(eager, 8)
    free = eager.generate(PROMPT, max_new_tokens=20, do_sample=False)[0, 10:].tolist()
    stop = next(token for token in free[5:] if token not in free[:5])
    expected, output = both(eager, draft, {"input_ids": PROMPT}, error_rate=0.0, eos_token_id=stop)
    assert len(output.hidden_states) == free.index(stop) + 1 < 20
    assert_alike(output, expected, 1e-5)
    # In a batch the row goes on with padding, until the last one stops.
    target = make_target(attn="eager")
    inputs, _ = ragged_prompts(3)
    free = target.generate(**inputs, max_new_tokens=20, do_sample=False)[:, 11:].tolist()
    expected, output = both(target, make_draft(target, 8), inputs, 0.0, eos_token_id=free[1][3])
    assert_alike(output, expected, 2e-3)


def test_sampled_texts(eager):
    """One row; several that are samples of one prompt: in step, and so the same sample for the same seed."""
    for options in ({}, {"temperature": 0.7, "top_k": 20}, {"num_return_sequences": 3}):
        options = {"do_sample": True, "seed": 5, **options}
        expected, output = both(eager, make_draft(eager), {"input_ids": PROMPT}, output_scores=True, **options)
        assert_alike(output, expected, 1e-5)
        torch.testing.assert_close(output.scores, expected.scores, atol=1e-3, rtol=1e-3)
        assert max(n for lengths in output.acceptance_lengths for n in lengths) > 1


def test_a_users_cache_and_a_chunked_prompt():
    target = make_target("gemma3", torch.float64, "eager")
    draft, results = make_draft(target), []
    for assistant in (None, draft):
        cache = DynamicCache(config=target.config)
        target(PROMPT[:, :4], **{CACHE_NAME: cache}, use_cache=True)
        options = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, **HIDDEN}
        if assistant is not None:
            assistant = scripted(draft, results[0].sequences)
        results.append(target.generate(PROMPT, **{CACHE_NAME: cache}, assistant_model=assistant, **options))
    assert_alike(*results[::-1], 1e-5)
    expected, output = both(target, draft, {"input_ids": PROMPT}, prefill_chunk_size=3)
    assert_alike(output, expected, 1e-5)


def test_only_what_was_asked_for(eager):
    draft, inputs = make_draft(eager), {"input_ids": PROMPT}
    expected, output = both(eager, draft, inputs, output_hidden_states=False)
    assert output.hidden_states is output.attentions is None
    # Without a result to hold them there is nothing to list.
    output = eager.generate(
        PROMPT, max_new_tokens=5, do_sample=False, output_hidden_states=True, assistant_model=draft
    )
    assert isinstance(output, torch.Tensor)


def test_attentions_are_listed_by_plain_decoding(eager, caplog):
    expected, output = both(eager, make_draft(eager), {"input_ids": PROMPT}, output_attentions=True)
    assert_alike(output, expected, 0.0)
    assert len(output.attentions) == 20 and output.acceptance_lengths == [[]]
    assert any("attentions of each token are requested" in record.getMessage() for record in caplog.records)


def test_compiled_rounds_are_run_eagerly(eager, monkeypatch):
    draft = make_draft(eager)
    draft.decoding_config.compile = "aot_eager"
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
    expected, output = both(eager, draft, {"input_ids": PROMPT})
    assert_alike(output, expected, 1e-5)
