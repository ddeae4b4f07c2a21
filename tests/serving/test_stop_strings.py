"""Stop strings: a text in pieces ends where the whole text does, and nothing of a stop string is passed on."""

import random

import pytest
import torch
from support.tiny_chat import END, SPECIAL, make_tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers.generation.stopping_criteria import StopStringCriteria

from dflash_hf.serving.stop_strings import StopStringFilter, StopStringMatcher, text_before_stop


class Reasoning(str):
    """Not of the answer."""


@pytest.mark.parametrize("seed", range(20))
def test_any_split_ends_as_the_whole_text(seed):
    chance = random.Random(seed)

    def drawn(longest: int) -> str:
        return "".join(chance.choices("ab", k=chance.randint(1, longest)))

    for _ in range(100):
        text = drawn(12)
        stops = [drawn(4) for _ in range(chance.randint(1, 3))]
        passed = []
        place = 0
        begun = (text[: i + 1] for i in range(len(text)))
        complete = next((part for part in begun if part.endswith(tuple(stops))), text)
        whole = min((complete.removesuffix(stop) for stop in stops), key=len)
        assert text_before_stop(text, stops) == whole
        piece_of = StopStringFilter(passed.append, stops)
        while place < len(text):
            length = chance.randint(1, 4)
            piece_of(text[place : place + length])
            place += length
            expected = whole[:place]
            passed_text = "".join(passed)
            # Only what may be the beginning of a stop string waits.
            assert expected.startswith(passed_text) and any(
                stop.startswith(expected[len(passed_text) :]) for stop in stops
            )
        piece_of(None)
        assert "".join(passed[:-1]) == whole and passed[-1] is None and "" not in passed


def test_held_back_text_precedes_other_items():
    passed = []
    pass_on = StopStringFilter(passed.append, ["stop"])
    for item in (Reasoning("a st"), "b st", Reasoning("c stop"), "d", "op st", "op e", "f", None):
        pass_on(item)
    assert passed == ["a st", "b ", "st", "c stop", "d", "op ", None]


@pytest.mark.parametrize("kind", ["pieces", "bytes"])
def test_stop_token_sets_equal_upstreams(kind):
    """Upstream's criterion took 1.5 s for a vocabulary of 152k, in each call."""
    alphabet = [*"abcd ", "\u00e9", "\u20ac", "\U0001f600"]
    chance = random.Random(0)
    text = "".join(chance.choices(alphabet, k=4000))
    tokenizer = make_tokenizer()
    if kind == "pieces":
        trainer = BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=ByteLevel.alphabet())
        tokenizer._tokenizer.train_from_iterator([text], trainer)
    ids = tokenizer(text).input_ids
    stopped = 0
    for _ in range(100):
        written = chance.choices([*ids, END], k=24)  # parts of characters, too
        stops = ["".join(chance.choices([*alphabet[:-1], "<|im_end|>"], k=chance.choice([1, 2, 3]))) for _ in "12"]
        criterion = StopStringCriteria(tokenizer, stops)
        matcher = StopStringMatcher(tokenizer.decode, stops)
        for length, token in enumerate(written, start=1):
            expected = bool(criterion(torch.tensor([written[:length]]), None))
            assert matcher.completes(token) == expected, (stops, written[:length])
            if expected:
                stopped += 1
                break
    assert 20 < stopped < 100
