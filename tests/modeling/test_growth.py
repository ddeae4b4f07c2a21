"""Long texts, no limits and no cache: what must neither raise nor cost memory before it is used."""

import importlib.util
import resource
from pathlib import Path

import pytest
import torch
from support.pairs import make_target
from support.scripted_draft import recognising
from support.stress_calls import StopAfter, prompt
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from dflash_hf import DFlashDecodingConfig


class EveryThird(LogitsProcessor):
    """A processor of somebody's own, which reads the text."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids.shape[1] % 3 :: 3] += 1.0
        return scores


OPTIONS = {
    "greedy": lambda: {},
    "sampling": lambda: {"do_sample": True, "temperature": 0.7},
    "sampling, most likely": lambda: {"do_sample": True, "top_k": 1},
    "penalty": lambda: {"repetition_penalty": 1.2},
    "processor": lambda: {"logits_processor": LogitsProcessorList([EveryThird()])},
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([StopAfter(10**9)])},
}


@pytest.fixture(scope="module")
def target():
    return make_target(max_position_embeddings=2048)


@pytest.fixture(scope="module")
def texts():
    """Greedy texts, and drafters that know them, made once for each option and length."""
    return {}


def known(texts, target, option: str, rows: int, length: int):
    if (option, rows, length) not in texts:
        inputs, pads = prompt(rows, 11, seed=rows)
        own = OPTIONS["greedy" if option == "sampling" else option]()
        text = target.generate(**inputs, **{"do_sample": False, **own}, max_new_tokens=length)
        draft = recognising(target, [row[pad:] for row, pad in zip(text, pads)], error_rate=0.02)
        texts[option, rows, length] = inputs, text, draft
    return texts[option, rows, length]


CASES = [(option, rows, 40) for option in OPTIONS for rows in (1, 3)] + [("sampling", 1, 300), ("criterion", 1, 300)]
LONGER = [(option, rows, length) for option in OPTIONS for rows in (1, 3) for length in (300, 1000)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in LONGER if case not in CASES]


@pytest.mark.parametrize(("option", "rows", "length"), CASES)
def test_trees_grow_with_the_text(option, rows, length, target, texts):
    """Slots that grow in the middle of a round, where some of what is accepted is found outside of it."""
    inputs, text, draft = known(texts, target, option, rows, length)
    draft.decoding_config.tree_nodes = 15
    output = target.generate(
        **inputs,
        **{"do_sample": False, **OPTIONS[option]()},
        max_new_tokens=length,
        assistant_model=draft,
        return_dict_in_generate=True,
    )
    assert output.sequences.shape == text.shape
    if option != "sampling":
        assert torch.equal(output.sequences, text)
        assert max(max(lengths) for lengths in output.acceptance_lengths) > 4 or rows > 1
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
@pytest.mark.parametrize(
    "fields", [{}, {"tree_nodes": 15}, pytest.param({"compile": "eager"}, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_no_limit_allocates_nothing(rows, fields, target, texts, address_space):
    """10^9 new tokens and a criterion is how callers say "until it stops"."""
    inputs, _, draft = known(texts, target, "greedy", rows, 40)
    peaks, outputs = [], []
    draft.decoding_config = DFlashDecodingConfig(**fields)
    for limit in (100, 10**9):
        with live_bytes() as counted:
            outputs.append(
                target.generate(
                    **inputs,
                    max_new_tokens=limit,
                    do_sample=False,
                    stopping_criteria=StoppingCriteriaList([StopAfter(33)]),
                    assistant_model=draft,
                )
            )
        peaks.append(counted.peak)
    assert torch.equal(*outputs) and outputs[0].shape == (rows, 11 + 33)
    assert peaks[1] < peaks[0] + 2**20, peaks


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("rows", [1, 3])
def test_without_a_cache_it_decodes_plainly(family, rows):
    target = make_target(family, attn=None)
    inputs, pads = prompt(rows, 9, seed=7)
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": False}
    expected = target.generate(**inputs, **options)
    draft = recognising(target, [row[pad:] for row, pad in zip(expected, pads)])
    output = target.generate(**inputs, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and output.past_key_values is None
    assert output.acceptance_lengths == [[]] * rows
    assert torch.equal(target.generate(**inputs, **options, assistant_model=draft), expected)
