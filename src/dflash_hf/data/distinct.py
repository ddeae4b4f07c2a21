"""Which texts are worth keeping: none that is nearly another, none that has a flaw."""

import re
from collections import defaultdict


_NEAR = 7  # tenths


class DistinctTexts:
    """
    Texts of which no two are nearly equal: the Jaccard similarity of their word 3-grams (those of both over those of
    either), without case and punctuation, stays below 0.7. Texts of less than three words are compared whole.
    """

    def __init__(self):
        self._grams: list[frozenset] = []
        self._by_gram: dict[tuple, list[int]] = defaultdict(list)

    def add(self, text: str) -> bool:
        """Take a text in, unless one like it is there; whether it was taken."""
        words = re.findall(r"\w+", text.casefold())
        grams = frozenset(zip(words, words[1:], words[2:], strict=False)) or frozenset([tuple(words)])
        # Two sets that share enough share one of these: were all their common ones among the rest, too few would be.
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
    """Why a text is no request worth an answer, by cheap signs, or `None`."""
    if not min_chars <= len(text) <= max_chars:
        return "too short or too long"
    if not all(char.isprintable() or char in "\n\t" for char in text) or "\ufffd" in text:
        return "not printable"
    if sum(char.isalnum() for char in text) < 0.5 * len(text):
        return "mostly signs"
    words = text.split()
    grams = list(zip(words, words[1:], words[2:], strict=False))
    if len(set(grams)) < 0.6 * len(grams):
        return "repeats itself"
    return None
