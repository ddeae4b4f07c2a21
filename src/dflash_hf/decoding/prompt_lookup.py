"""
Prompt lookup (Saxena 2023): drafts that cost no drafter forward, copied from where the last tokens occurred before in
the prompt or in the generated text.
"""

import torch

from dflash_hf.decoding.calibration import AcceptanceCalibration


class PromptLookup:
    """
    Copies what followed the last tokens of one row where they occurred last.

    As long as the text goes on like that passage, the passage is followed. Each new token shows whether a copy would
    have been right, verified or not: how reliable copies are, given how many tokens have matched, is learned at no
    cost.

    Args:
        prompt (`list[int]`): The row's tokens. Repetitions inside of it are not used for calibration.
        vocab_size (`int`): Of the target: placeholders in a prompt, for images or the like, are not copied.
        calibration (`AcceptanceCalibration`): Of copies; extended.
    """

    NGRAM = 2  # tokens that must match before anything is copied
    MAX_TOKENS = 16  # that are copied at once

    def __init__(self, prompt: list[int], vocab_size: int, calibration: AcceptanceCalibration):
        self.vocab_size = vocab_size
        self.calibration = calibration
        self.tokens = torch.tensor(prompt, dtype=torch.long)  # `[>= length]`: with room to grow
        self.length = len(prompt)
        self.source: int | None = None  # index of the token that comes next if the text repeats itself
        self.matched = 0  # tokens before it that equal the last tokens of the text
        self._search()

    def extend(self, tokens: list[int]) -> None:
        """Read committed tokens."""
        if self.length + len(tokens) > len(self.tokens):
            with torch.inference_mode(False):  # calls go on outside of it
                room = torch.empty(len(self.tokens) + len(tokens), dtype=torch.long)
                self.tokens = torch.cat([self.tokens, room])
        for token in tokens:
            if self.source is not None:
                matches = int(self.tokens[self.source]) == token
                self.calibration.record(prior_probability(self.matched), matches)
                self.source = self.source + 1 if matches else None
                self.matched = self.matched + 1 if matches else 0
            self.tokens[self.length] = token
            self.length += 1
        self._search()

    def _search(self) -> None:
        """If no passage is followed, find the latest earlier occurrence of the last `NGRAM` tokens."""
        if self.source is not None or self.length <= self.NGRAM:
            return
        last = self.tokens[self.length - self.NGRAM : self.length]
        before = self.tokens[: self.length - 1].unfold(0, self.NGRAM, 1)  # [S - NGRAM, NGRAM]
        matches = (before == last).all(dim=1).nonzero()
        if len(matches):
            self.source = int(matches[-1]) + self.NGRAM
            self.matched = self.NGRAM

    def candidates(self, limit: int) -> tuple[list[int], list[float]]:
        """
        Up to `limit` next tokens if the text repeats itself, and the number of tokens that the target should accept
        of the first 0, 1, ... of them.
        """
        tokens: list[int] = []
        expected = [0.0]
        if self.source is None:
            return tokens, expected
        path_probability = 1.0
        for step in range(min(limit, self.MAX_TOKENS)):
            token = int(self.tokens[self.source + step % (self.length - self.source)])
            if not 0 <= token < self.vocab_size:
                break
            path_probability *= self.calibration(prior_probability(self.matched + step))
            tokens.append(token)
            expected.append(expected[-1] + path_probability)
        return tokens, expected


def prior_probability(matched: int) -> float:
    """The probability that one more token matches, before any was observed; copies are calibrated by it."""
    return (matched - 1) / (matched + 3)


def copies_of_batch(candidates: list[tuple[list[int], list[float]]], lengths: list[int], unfinished: list[bool]):
    """
    The copies of several rows as one draft. A batch is done when its slowest row is: a copy is worth the expected
    growth of the shortest active row, times the number of active rows.

    Args:
        candidates (`list[tuple]`): For each row, what [`PromptLookup.candidates`] returns.
        lengths (`list[int]`): Tokens generated in each row.
        unfinished (`list[bool]`): Rows that have not ended.

    Returns:
        The tokens `[R][n]`, zeros past the end of a row's copy, and the tokens that verifying the first 0, 1, ... of
        them should add over all rows.
    """
    longest = max(len(tokens) for tokens, _ in candidates)
    padded = [tokens + [0] * (longest - len(tokens)) for tokens, _ in candidates]
    shortest = []
    for size in range(longest + 1):
        grown = [
            length + expected[min(size, len(expected) - 1)]
            for length, (_, expected), is_unfinished in zip(lengths, candidates, unfinished, strict=True)
            if is_unfinished
        ]
        shortest.append(min(grown))
    return padded, [sum(unfinished) * (length - shortest[0]) for length in shortest]
