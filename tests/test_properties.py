"""Any prompt, padding, processor, length, block size and stop token: the text is what the target writes alone."""

from collections import Counter

import pytest
import torch
from conftest import VOCAB, make_draft, make_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_hf.modeling.generation_dflash import DFlashCandidateGenerator


TARGETS = {family: make_target(family) for family in ("qwen3", "gemma3", "gpt2")}
DRAFTS = {}
COMMITTED = Counter()


def drafter(family, block_size):
    if (family, block_size) not in DRAFTS:
        DRAFTS[family, block_size] = make_draft(TARGETS[family], block_size)
    return DRAFTS[family, block_size]


PROCESSORS = st.sampled_from(
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 6},
        {"suppress_tokens": [3, 4, 5]},
        {"bad_words_ids": [[7], [8, 9]]},
        {"forced_eos_token_id": 11},
        {"sequence_bias": [[[12], 4.0]]},
        {"exponential_decay_length_penalty": (4, 1.2)},
    ]
)


@st.composite
def cases(draw):
    longest = draw(st.integers(1, 12))
    rows = draw(st.integers(1, 3))
    pads = [0] + [draw(st.integers(0, longest - 1)) for _ in range(rows - 1)]
    return {
        "family": draw(st.sampled_from(sorted(TARGETS))),
        "prompt": torch.tensor([[draw(st.integers(2, VOCAB - 2)) for _ in range(longest)] for _ in range(rows)]),
        "pads": pads,
        "block_size": draw(st.sampled_from([16, 8, 4, 3, 2])),
        "verified": draw(st.sampled_from([None, None, None, 2, 5])),
        "max_new_tokens": draw(st.sampled_from([30, 20, 30, 9, 3, 2, 1])),
        "error_rate": draw(st.sampled_from([0.0, 0.1, 0.3, 0.7])),
        "stops": draw(st.sampled_from([0, 0, 0, 1, 3])),
        "processor": draw(PROCESSORS),
        "scores": draw(st.booleans()),
        "seed": draw(st.integers(0, 10_000)),
    }


def check(case):
    target, pads = TARGETS[case["family"]], case["pads"]
    prompt, mask = case["prompt"].clone(), torch.ones_like(case["prompt"])
    for row, pad in enumerate(pads):
        prompt[row, :pad], mask[row, :pad] = 0, 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": case["max_new_tokens"],
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": case["scores"],
    }
    # Stop tokens that really occur, at places chosen by the case.
    free = target.generate(prompt, **options).sequences[:, prompt.shape[1] :].flatten().tolist()
    stops = [free[(case["seed"] * 31 + i * 7) % len(free)] for i in range(case["stops"])]
    if stops:
        options["eos_token_id"] = stops
    if stops or "exponential_decay_length_penalty" not in case["processor"]:  # that one needs a stop token
        options |= case["processor"]
    expected = target.generate(prompt, **options)

    random = torch.Generator().manual_seed(case["seed"])
    original = DFlashCandidateGenerator.draft

    def draft_known(self, anchors, start, *args, **kwargs):
        block = original(self, anchors, start, *args, **kwargs)
        for row in range(block.shape[0]):
            known = expected.sequences[row, pads[row] + int(start[row]) + 1 :][: block.shape[1] - 1]
            block[row, 1 : 1 + len(known)] = known
        wrong = torch.rand(block.shape, generator=random) < case["error_rate"]
        wrong[:, 0] = False
        return torch.where(wrong, (block + 1) % VOCAB, block)

    draft = drafter(case["family"], case["block_size"])
    draft.decoding_config.block_size = case["verified"]
    DFlashCandidateGenerator.draft = draft_known
    try:
        output = target.generate(prompt, **options, assistant_model=draft)
    finally:
        DFlashCandidateGenerator.draft = original
    assert torch.equal(output.sequences, expected.sequences)
    if case["scores"]:
        for ours, theirs in zip(output.scores, expected.scores, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
    for lengths in output.acceptance_lengths:
        COMMITTED.update(lengths)


ANY = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=True)


@given(cases())
@settings(ANY, max_examples=150)
def some_cases(case):
    check(case)


def test_texts_are_equal():
    COMMITTED.clear()
    some_cases()
    # Drafts were accepted whole, in part and not at all.
    assert len(COMMITTED) >= 10 and COMMITTED[1] > 20 and sum(COMMITTED[n] for n in range(4, 17)) > 50, COMMITTED


@pytest.mark.slow
@given(cases())
@settings(ANY, max_examples=5000)
def test_texts_are_equal_in_many_cases(case):
    check(case)
