"""Filters for texts: near-duplicates, and cheap signs of bad quality."""

import re
from collections import defaultdict


_NEAR = 7  # tenths


class DistinctTexts:
    """
    Texts without near-duplicates: the Jaccard similarity of their word 3-grams (shared over all), without case and
    punctuation, is below 0.7. Texts of fewer than three words are compared as a whole.
    """

    def __init__(self):
        self._grams: list[frozenset] = []
        self._by_gram: dict[tuple, list[int]] = defaultdict(list)

    def add(self, text: str) -> bool:
        """Add a text unless a similar one is there; returns whether it was added."""
        words = re.findall(r"\w+", text.casefold())
        grams = frozenset(zip(words, words[1:], words[2:], strict=False)) or frozenset([tuple(words)])
        # Two sets that share enough share at least one of these: the rest alone would be too few.
        enough = -(-_NEAR * len(grams) // 10)
        rarest = sorted(grams, key=lambda gram: (len(self._by_gram.get(gram, ())), gram))[: len(grams) - enough + 1]
        for number in {number for gram in rarest for number in self._by_gram.get(gram, ())}:
            other = self._grams[number]
            common = len(grams & other)
            if 10 * common >= _NEAR * (len(grams) + len(other) - common):
                return False
        for gram in grams:
            self._by_gram[gram].append(len(self._grams))
        self._grams.append(grams)
        return True


def flaw(text: str, min_chars: int, max_chars: int) -> str | None:
    """Why a text is not a useful request, or `None`."""
    if not min_chars <= len(text) <= max_chars:
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
