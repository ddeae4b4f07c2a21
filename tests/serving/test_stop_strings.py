"""Stop strings: a text in pieces ends where the whole text does, and nothing of a stop string is passed on."""

import random

import pytest

from dflash_hf.serving.stop_strings import UpToStop, without_stop


class Reasoning(str):
    """Not of the answer."""


@pytest.mark.parametrize("seed", range(20))
def test_any_pieces_end_as_the_whole_text(seed):
    chance = random.Random(seed)

    def drawn(longest: int) -> str:
        return "".join(chance.choices("ab", k=chance.randint(1, longest)))

    for _ in range(100):
        text, stops, passed, place = drawn(12), [drawn(4) for _ in range(chance.randint(1, 3))], [], 0
        begun = (text[: i + 1] for i in range(len(text)))
        complete = next((part for part in begun if part.endswith(tuple(stops))), text)
        whole = min((complete.removesuffix(stop) for stop in stops), key=len)
        assert without_stop(text, stops) == whole
        piece_of = UpToStop(passed.append, stops)
        while place < len(text):
            length = chance.randint(1, 4)
            piece_of(text[place : place + length])
            place += length
            known, said = whole[:place], "".join(passed)
            # Only what may be the beginning of a stop string waits.
            assert known.startswith(said) and any(stop.startswith(known[len(said) :]) for stop in stops)
        piece_of(None)
        assert "".join(passed[:-1]) == whole and passed[-1] is None and "" not in passed


def test_what_waits_goes_before_other_items():
    passed = []
    pass_on = UpToStop(passed.append, ["stop"])
    for item in (Reasoning("a st"), "b st", Reasoning("c stop"), "d", "op st", "op e", "f", None):
        pass_on(item)
    assert passed == ["a st", "b ", "st", "c stop", "d", "op ", None]
