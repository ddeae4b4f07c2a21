"""Streamed text breaks between words, however its words are cut into pieces."""

import random
import re
import textwrap

import pytest

from dflash_hf.serving.word_wrap import WordWrap, columns_of


def screen(written: str) -> list[str]:
    """The lines of a terminal: text, line breaks, cursor to the left, and clearing to the end of the line."""
    lines, column = [""], 0
    for found in re.finditer(r"\x1b\[(\d*)([A-Za-z])|(.)", written, re.DOTALL):
        number, command, char = found.groups()
        if command == "D":
            column -= int(number)
        elif command == "K":
            lines[-1] = lines[-1][:column]
        elif char == "\n":
            lines, column = [*lines, ""], 0
        elif char:
            lines[-1], column = lines[-1][:column] + char, column + 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("seed", range(20))
def test_it_breaks_where_textwrap_does(seed):
    chance = random.Random(seed)
    text = " ".join("x" * chance.randint(1, 25) for _ in range(60))
    wrap, written, left = WordWrap(20), "", text
    while left:
        size = chance.randint(1, 7)
        written += wrap(left[:size], chance.choice(("\x1b[0m", "\x1b[32m")))
        left = left[size:]
    ours = screen(written)
    assert "".join(ours).replace(" ", "") == text.replace(" ", "") and max(map(len, ours)) <= 20
    short = " ".join(word for word in text.split() if len(word) <= 20)
    assert screen(WordWrap(20)(short)) == textwrap.wrap(short, 20)


def test_a_word_keeps_its_colours_when_it_moves():
    wrap = WordWrap(10)
    written = wrap("one two ", "A") + wrap("th", "B") + wrap("ree", "C")
    assert written == "Aone two BthC\x1b[2D\x1b[K\nBtBhCree"
    assert columns_of("字") == 2 and columns_of("\u0301") == 0 and columns_of("\t", 3) == 5


def test_lines_of_code_stay_as_they_are():
    text = "def f(x):\n    return x\n\n"
    assert WordWrap(40)(text) == text
