"""Attentions and hidden states while drafting: entry by entry those of plain decoding."""

from collections import Counter

import pytest
import torch
from support import families
from support.listed import assert_alike
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from transformers import DynamicCache

from dflash_hf.modeling import generation_dflash, outputs_dflash
from dflash_hf.modeling.generation_dflash import DFlashGenerateOutput
from dflash_hf.modeling.verify_dflash import CropSession


PROMPT = torch.tensor([[5, 9, 17, 33, 5, 9, 17, 33, 5, 9]])
BOTH = {"output_hidden_states": True, "output_attentions": True}


def both(target, draft, oracle, inputs, pads=(0,), error_rate=0.15, seed=None, **options):
    """What the target gives alone, and with a drafter that is right most of the time."""
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, **BOTH, **options}
    outputs = []
    for assistant in ({}, {"assistant_model": draft}):
        if seed is not None:
            torch.manual_seed(seed)
        outputs.append(target.generate(**inputs, **options, **assistant))
        oracle(outputs[0].sequences, pads, error_rate)
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
    ("bloom", {}),
]


@pytest.mark.parametrize(("family", "fields"), FAMILIES, ids=[family for family, _ in FAMILIES])
@pytest.mark.parametrize("longest", [11, 5])
def test_entries_are_those_of_plain_decoding(family, fields, longest, oracle):
    """One row and a ragged batch. In an fp64 target norms, softmax and recurrences are still computed in fp32."""
    seen, hidden = Counter(), {**BOTH, "output_attentions": False}
    close = 1e-5 if family not in families.REPLAY else 5e-4
    # Padded rows under eager attention are NaN in fp64 upstream; a random Mamba is chaotic in fp32.
    if family == "mamba":
        cases = [(1, torch.float64, None, hidden, 1e-9), (4, torch.float64, None, hidden, 1e-9)]
    else:
        cases = [(1, torch.float64, "eager", BOTH, close), (4, torch.float32, "eager", BOTH, 1e-3)]
        cases += [(4, torch.float64, "sdpa", hidden, close)] if family != "bloom" else []
    for rows, dtype, attn, options, tolerance in cases:
        target = make_target(family, dtype, attn, **fields)
        inputs, pads = ragged_prompts(rows, longest)
        expected, output = both(target, make_draft(target, 6), oracle, inputs, pads, **options)
        assert len(output.hidden_states) == 20
        assert_alike(output, expected, tolerance)
        seen.update(length for lengths in output.acceptance_lengths for length in lengths)
    assert len(seen) >= 4 and min(seen) < max(seen) == 6, seen


@pytest.mark.parametrize("pad", [0, 3])
def test_windows_under_crop(pad, oracle, monkeypatch):
    """A cropped sliding layer shows a block more columns than plain decoding shows a token."""
    target = make_target("gemma3", torch.float32, "eager")
    inputs, _ = ragged_prompts(1)
    inputs["attention_mask"][:, :pad] = 0
    monkeypatch.setattr(generation_dflash, "probe_rollback", lambda target: CropSession)
    expected, output = both(target, make_draft(target, 5), oracle, inputs, [pad])
    assert_alike(output, expected, 1e-3)
    assert max(output.acceptance_lengths[0]) == 5


@pytest.fixture(scope="module")
def eager():
    return make_target(dtype=torch.float64, attn="eager")


def test_entries_end_with_the_text_inside_a_block(eager, oracle):
    draft = make_draft(eager, 8)
    free = eager.generate(PROMPT, max_new_tokens=20, do_sample=False)[0, 10:].tolist()
    stop = next(token for token in free[5:] if token not in free[:5])
    expected, output = both(eager, draft, oracle, {"input_ids": PROMPT}, error_rate=0.0, eos_token_id=stop)
    assert len(output.hidden_states) == len(output.attentions) == free.index(stop) + 1 < 20
    assert_alike(output, expected, 1e-5)
    # In a batch the row goes on with padding, until the last one stops.
    target = make_target(attn="eager")
    inputs, pads = ragged_prompts(3)
    free = target.generate(**inputs, max_new_tokens=20, do_sample=False)[:, 11:].tolist()
    expected, output = both(target, make_draft(target, 8), oracle, inputs, pads, 0.0, eos_token_id=free[1][3])
    assert_alike(output, expected, 2e-3)


def test_sampled_texts(eager, oracle):
    """One row; several that are samples of one prompt: in step, and so the same sample for the same seed."""
    for options in ({}, {"temperature": 0.7, "top_k": 20}, {"num_return_sequences": 3}):
        options = {"do_sample": True, "seed": 5, **options}
        expected, output = both(
            eager, make_draft(eager), oracle, {"input_ids": PROMPT}, [0] * 3, output_scores=True, **options
        )
        assert_alike(output, expected, 1e-5)
        torch.testing.assert_close(output.scores, expected.scores, atol=1e-3, rtol=1e-3)
        assert max(n for lengths in output.acceptance_lengths for n in lengths) > 1


def test_a_users_cache_and_a_chunked_prompt(oracle):
    target = make_target("gemma3", torch.float64, "eager")
    draft, results = make_draft(target), []
    for assistant in (None, draft):
        cache = DynamicCache(config=target.config)
        target(PROMPT[:, :4], past_key_values=cache, use_cache=True)
        options = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, **BOTH}
        results.append(target.generate(PROMPT, past_key_values=cache, assistant_model=assistant, **options))
        oracle(results[0].sequences, [0])
    assert_alike(*results[::-1], 1e-5)
    expected, output = both(target, draft, oracle, {"input_ids": PROMPT}, prefill_chunk_size=3)
    assert_alike(output, expected, 1e-5)


def test_only_what_was_asked_for(eager, oracle):
    draft, inputs = make_draft(eager), {"input_ids": PROMPT}
    none = {"output_hidden_states": False, "output_attentions": False}
    for name in ("hidden_states", "attentions"):
        expected, output = both(eager, draft, oracle, inputs, **{**none, f"output_{name}": True})
        assert_alike(output, expected, 1e-5)
        assert len(getattr(output, name)) == 20 and max(output.acceptance_lengths[0]) > 1
    _, output = both(eager, draft, oracle, inputs, **none)
    assert output.hidden_states is output.attentions is None
    # Without a result to hold them there is nothing to list.
    output = eager.generate(
        PROMPT, max_new_tokens=5, do_sample=False, output_hidden_states=True, assistant_model=draft
    )
    assert isinstance(output, torch.Tensor)
    # Attention that returns no weights lists none.
    target = make_target(attn="sdpa")
    expected, output = both(target, make_draft(target), oracle, inputs)
    assert output.attentions == expected.attentions == ((),) * 20


def test_the_target_is_watched_only_while_something_is_listed(eager, draft, monkeypatch):
    watched = []
    verify = generation_dflash.eager_round

    def spy(*args):
        watched.append(len(eager._forward_hooks))
        if len(watched) == 3:
            raise KeyboardInterrupt
        return verify(*args)

    monkeypatch.setattr(generation_dflash, "eager_round", spy)
    options = {"do_sample": False, "return_dict_in_generate": True, "assistant_model": make_draft(eager)}
    eager.generate(PROMPT, max_new_tokens=2, **options)
    eager.generate(PROMPT, max_new_tokens=2, output_hidden_states=True, **options)
    with pytest.raises(KeyboardInterrupt):
        eager.generate(PROMPT, max_new_tokens=9, output_hidden_states=True, **options)
    assert watched == [0, 1, 1] and not eager._forward_hooks


def test_compiled_rounds_are_run_eagerly(eager, oracle, monkeypatch):
    draft = make_draft(eager)
    draft.decoding_config.compile = "aot_eager"
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
    expected, output = both(eager, draft, oracle, {"input_ids": PROMPT})
    assert_alike(output, expected, 1e-5)


def test_attentions_that_cannot_be_told_apart_are_listed_by_plain_decoding(oracle, monkeypatch, caplog):
    """A static cache, whose attentions have a column for every slot; layers that do not match those of the cache."""
    target = make_target("gemma3", attn="eager")
    draft, inputs = make_draft(target), {"input_ids": PROMPT}
    expected, output = both(target, draft, oracle, inputs, cache_implementation="static")
    assert_alike(output, expected, 0.0)
    assert output.acceptance_lengths == [[]]
    windows = outputs_dflash.attention_windows
    monkeypatch.setattr(outputs_dflash, "attention_windows", lambda *args: windows(*args[:2], args[2] and 3))
    expected, output = both(target, draft, oracle, inputs)
    assert_alike(output, expected, 0.0)
    assert output.acceptance_lengths == [[]]
    assert any("cannot be told apart" in record.getMessage() for record in caplog.records)
    # Hidden states have no columns.
    _, output = both(target, draft, oracle, inputs, output_attentions=False)
    assert max(output.acceptance_lengths[0]) > 1
