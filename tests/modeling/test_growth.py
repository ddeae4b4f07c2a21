"""Long texts, no limits and no cache: what must neither raise nor cost memory before it is used."""

import importlib.util
import resource
from pathlib import Path

import pytest
import torch
from support.pairs import make_draft, make_target
from support.scripted_draft import recognising
from support.stress_calls import prompt
from transformers import LogitsProcessor, LogitsProcessorList

from dflash_hf import DFlashDecodingConfig


class EveryThird(LogitsProcessor):
    """A processor of somebody's own, which reads the text."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids.shape[1] % 3 :: 3] += 1.0
        return scores


@pytest.fixture(scope="module")
def target():
    return make_target(max_position_embeddings=2048)


def known(target, rows: int, length: int, **options):
    """A prompt, the target's text, and a drafter that knows it."""
    inputs, pads = prompt(rows, 11, seed=rows)
    text = target.generate(**inputs, **options, do_sample=False, max_new_tokens=length)
    return inputs, text, recognising(target, [row[pad:] for row, pad in zip(text, pads)], error_rate=0.02)


@pytest.mark.parametrize("length", [300, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rows", "own"), [(1, False), (3, False), (1, True)])
def test_trees_grow_with_the_text(rows, own, length, target):
    """Slots that grow in the middle of a call."""
    options = {"logits_processor": LogitsProcessorList([EveryThird()])} if own else {}
    inputs, text, draft = known(target, rows, length, **options)
    draft.decoding_config.tree_nodes = 15
    options |= {"max_new_tokens": length, "do_sample": False, "return_dict_in_generate": True}
    output = target.generate(**inputs, **options, assistant_model=draft)
    assert torch.equal(output.sequences, text)
    assert max(max(lengths) for lengths in output.acceptance_lengths) > 4
    # The cache is an ordinary one, which the caller may write to.
    assert not any(t.is_inference() for layer in output.past_key_values.layers for t in (layer.keys, layer.values))


@pytest.fixture
def address_space():
    """A gigabyte more than the process has, so that a buffer for 10^9 tokens is refused and not waited for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def live_bytes():
    path = Path(__file__).parents[2] / "examples" / "benchmarks" / "prompt_memory.py"
    spec = importlib.util.spec_from_file_location("prompt_memory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LiveBytes()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("fields", [{}, {"tree_nodes": 15}], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_no_limit_allocates_nothing(rows, fields, target, address_space):
    """10^9 new tokens and tokens that end the text is how callers say "until it stops"."""
    inputs, text, draft = known(target, rows, 40)
    draft.decoding_config = DFlashDecodingConfig(**fields)
    options, peaks, outputs = {"do_sample": False, "eos_token_id": text[:, 40].tolist()}, [], []
    for limit in (100, 10**9):
        with live_bytes() as counted:
            outputs.append(target.generate(**inputs, **options, max_new_tokens=limit, assistant_model=draft))
        peaks.append(counted.peak)
    assert torch.equal(*outputs) and outputs[0].shape[1] <= 41
    assert peaks[1] < peaks[0] + 2**20, peaks


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("rows", [1, 3])
def test_without_a_cache_it_decodes_plainly(family, rows):
    target = make_target(family, attn=None)
    inputs, _ = prompt(rows, 9, seed=7)
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": False, "return_dict_in_generate": True}
    expected = target.generate(**inputs, **options)
    output = target.generate(**inputs, **options, assistant_model=make_draft(target))
    assert torch.equal(output.sequences, expected.sequences) and output.past_key_values is None
    assert output.acceptance_lengths == [[]] * rows
