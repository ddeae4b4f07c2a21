"""Filters for texts: near-duplicates, and cheap signs of bad quality."""

import re
from array import array
from hashlib import blake2b


_NEAR = 7  # tenths
_CHARS = range(16, 1001)  # of a request


class DistinctTexts:
    """
    Texts without near-duplicates: the Jaccard similarity of their word 3-grams (shared over all), without case and
    punctuation, is below 0.7. Texts of fewer than three words are compared as a whole. Of each 3-gram, 8 bytes of its
    hash are kept.
    """

    def __init__(self):
        self._grams: list[array] = []
        self._by_gram: dict[int, int | array] = {}  # numbers of texts; most 3-grams are in one

    def add(self, text: str) -> bool:
        """Add a text unless a similar one is there; returns whether it was added."""
        words = re.findall(r"\w+", text.casefold())
        found = {" ".join(gram) for gram in zip(words, words[1:], words[2:], strict=False)} or {" ".join(words)}
        grams = {int.from_bytes(blake2b(gram.encode(), digest_size=8).digest(), "big") for gram in found}
        # Two sets that share enough share at least one of these: the rest alone would be too few.
        enough = -(-_NEAR * len(grams) // 10)
        rarest = sorted(grams, key=lambda gram: (len(self._texts_with(gram)), gram))[: len(grams) - enough + 1]
        for number in {number for gram in rarest for number in self._texts_with(gram)}:
            other = self._grams[number]
            common = len(grams.intersection(other))
            if 10 * common >= _NEAR * (len(grams) + len(other) - common):
                return False
        number = len(self._grams)
        for gram in grams:
            known = self._by_gram.setdefault(gram, number)
            if isinstance(known, array):
                known.append(number)
            elif known != number:
                self._by_gram[gram] = array("I", [known, number])
        self._grams.append(array("Q", grams))
        return True

    def _texts_with(self, gram: int) -> "tuple | array":
        numbers = self._by_gram.get(gram, ())
        return (numbers,) if isinstance(numbers, int) else numbers


def flaw(text: str) -> str | None:
    """Why a text is not a useful request, or `None`."""
    if len(text) not in _CHARS:
        return "too short or too long"
    if not all(char.isprintable() or char in "\n\t" for char in text) or "\ufffd" in text:
        return "not printable"
    if sum(char.isalnum() for char in text) < 0.5 * len(text):
        return "mostly punctuation"
    words = text.split()
    grams = list(zip(words, words[1:], words[2:], strict=False))
    if len(set(grams)) < 0.6 * len(grams):
        return "repeats itself"
    return None
