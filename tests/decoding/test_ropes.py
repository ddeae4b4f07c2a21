"""Rotary frequencies that depend on the length of the text: at, across and beyond the length where they change."""

import functools

import pytest
import torch
from support.pairs import make_draft, make_target
from support.scripted_draft import scripted

from dflash_hf.modeling.candidates_dflash import CACHE_NAME


ORIGINAL = 64
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
FIXED = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
# Where the prompt ends, and how far the text goes, against the threshold.
LENGTHS = {
    "below": (11, 29),
    "up to it": (11, ORIGINAL - 11),
    "one past it": (11, ORIGINAL - 10),
    "block past it": (ORIGINAL - 24, 20),
    "across": (ORIGINAL - 14, 40),
    "prompt at it": (ORIGINAL, 30),
    "prompt one past it": (ORIGINAL + 1, 30),
    "beyond": (ORIGINAL + 16, 30),
}


CASES = [("longrope", length, turn) for length in LENGTHS for turn in (0, 1)]
CASES += [("dynamic", length, number % 2) for number, length in enumerate(LENGTHS)] + [("dynamic", "across", 1)]
CASES += [(rope, "across", number % 2) for number, rope in enumerate(FIXED)]


def target_with(rope: str):
    """A new one for each series of calls: `dynamic` keeps the frequencies of the longest forward for later calls."""
    if rope == "longrope":
        return make_target("phi3", rope_parameters=LONG, original_max_position_embeddings=ORIGINAL)
    if rope == "dynamic":
        return make_target("llama", rope_parameters=DYNAMIC, max_position_embeddings=ORIGINAL)
    return make_target("llama", rope_parameters=FIXED[rope])


def prompt_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 95, (1, length), generator=torch.Generator().manual_seed(seed))


def two_turns(rope: str, length: str, texts=(None, None), drafted=(False, False)):
    """The outputs of two turns, the second on the cache of the first."""
    target = target_with(rope)
    prompt, new = LENGTHS[length]
    ids = prompt_of(prompt)
    cache = None
    outputs = []
    for text, is_drafted, count in zip(texts, drafted, (new, 20), strict=True):
        draft = scripted(make_draft(target, 8), text, error_rate=0.1) if is_drafted else None
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            **{CACHE_NAME: cache},
            assistant_model=draft,
        )
        outputs.append(output)
        cache = output.past_key_values
        ids = torch.cat([output.sequences, prompt_of(3, seed=1)], dim=1)
    return outputs


@functools.cache
def plain_texts(rope: str, length: str) -> list[torch.Tensor]:
    texts = [output.sequences for output in two_turns(rope, length)]
    assert len(set(texts[0][0, LENGTHS[length][0] :].tolist())) > 10, "a constant text proves nothing"
    return texts


@pytest.mark.parametrize(("rope", "length", "turn"), CASES)
def test_length_dependent_ropes_are_lossless(rope, length, turn):
    """
    Phi-3 drops its cache in a prompt beyond the threshold, and takes other factors from there on; `dynamic` scales by
    the longest forward so far: a block that reaches past the threshold would give its first tokens other keys.

    The turn that is not drafted decodes plainly, on the cache that the drafted one left, or leaves the cache.
    """
    expected = plain_texts(rope, length)
    outputs = two_turns(rope, length, expected, [turn == 0, turn == 1])
    assert torch.equal(outputs[0].sequences, expected[0]), "first turn"
    assert torch.equal(outputs[1].sequences, expected[1]), "second turn"
    if rope in FIXED or length == "below":  # where nothing changes, plain decoding would be no answer
        assert max(outputs[turn].acceptance_lengths[0]) > 2
