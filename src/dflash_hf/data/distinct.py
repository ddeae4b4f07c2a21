"""Filters for texts: near-duplicates, and cheap signs of bad quality."""

import re
from array import array
from hashlib import blake2b


_MIN_SIMILARITY = 7  # tenths: texts that are more similar are near-duplicates
_PROMPT_CHARACTERS = range(16, 1001)  # shorter and longer prompts are left out


class DistinctTexts:
    """
    Texts without near-duplicates: the Jaccard similarity of their word 3-grams (size of the intersection over size of
    the union), without case and punctuation, is below 0.7. Texts of fewer than three words are compared as a whole. Of
    each 3-gram, 8 bytes of its hash are kept.
    """

    def __init__(self):
        self._grams: list[array] = []
        self._by_gram: dict[int, int | array] = {}  # numbers of texts; most 3-grams are in one

    def add(self, text: str) -> bool:
        """Add a text unless a similar one is there; returns whether it was added."""
        grams = _hashed_grams(text)
        # Two sets that share enough share at least one of these: the rest alone would be too few.
        enough = -(-_MIN_SIMILARITY * len(grams) // 10)
        rarest = sorted(grams, key=lambda gram: (len(self._texts_with(gram)), gram))[: len(grams) - enough + 1]
        candidates: set[int] = set()
        for gram in rarest:
            candidates.update(self._texts_with(gram))
        for number in candidates:
            other = self._grams[number]
            common = len(grams.intersection(other))
            if 10 * common >= _MIN_SIMILARITY * (len(grams) + len(other) - common):
                return False
        number = len(self._grams)
        for gram in grams:
            numbers = self._by_gram.setdefault(gram, number)
            if isinstance(numbers, array):
                numbers.append(number)
            elif numbers != number:
                self._by_gram[gram] = array("I", [numbers, number])
        self._grams.append(array("Q", grams))
        return True

    def _texts_with(self, gram: int) -> "tuple | array":
        """The numbers of the texts that have a 3-gram."""
        numbers = self._by_gram.get(gram, ())
        return (numbers,) if isinstance(numbers, int) else numbers


def _hashed_grams(text: str) -> set[int]:
    """The hashes of the word 3-grams of a text, or of all of its words if it has fewer than three."""
    words = re.findall(r"\w+", text.casefold())
    grams = {" ".join(gram) for gram in zip(words, words[1:], words[2:], strict=False)}
    if not grams:
        grams = {" ".join(words)}
    return {int.from_bytes(blake2b(gram.encode(), digest_size=8).digest(), "big") for gram in grams}


def quality_issue(text: str) -> str | None:
    """Why a text is not a useful prompt, or `None`."""
    if len(text) not in _PROMPT_CHARACTERS:
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
