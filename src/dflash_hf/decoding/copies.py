"""Drafts that cost nothing: what followed the last tokens of a text where they occurred before in it."""

import torch

from dflash_hf.decoding.reliability import Reliability


class Copies:
    """
    Finds the last tokens of a text earlier in it, and copies what followed them there: prompt lookup decoding (Saxena
    2023), over the generated text too.

    As long as the text keeps matching that passage, it is followed. Each token of the text shows whether a copy would
    have been right, verified or not: so how reliable copies are, given how many tokens agree so far, is learned at no
    cost.

    Args:
        prompt (`list[int]`): The tokens of a row; those of the prompt say nothing about the target.
        vocab_size (`int`): Of the target: placeholders in a prompt, for images or the like, are not copied.
        reliability (`Reliability`): The drafter's statistics of its copies; extended.
    """

    SHORTEST, LONGEST = 2, 16  # tokens that must agree before anything is copied; that are copied at most

    def __init__(self, prompt: list[int], vocab_size: int, reliability: Reliability):
        self.vocab_size, self.reliability = vocab_size, reliability
        self.tokens, self.count = torch.tensor(prompt), len(prompt)  # with room to grow
        self.source: int | None = None  # index of the token that comes next if the text repeats itself
        self.agreeing = 0  # tokens before it that equal the last tokens of the text
        self._search()

    def extend(self, tokens: list[int]) -> None:
        """Read the tokens that were committed."""
        if self.count + len(tokens) > len(self.tokens):
            with torch.inference_mode(False):  # calls go on outside of it
                room = torch.empty(len(self.tokens) + len(tokens), dtype=torch.long)
                self.tokens = torch.cat([self.tokens, room])
        for token in tokens:
            if self.source is not None:
                agrees = int(self.tokens[self.source]) == token
                self.reliability.note(_prior(self.agreeing), agrees)
                self.source, self.agreeing = (self.source + 1, self.agreeing + 1) if agrees else (None, 0)
            self.tokens[self.count] = token
            self.count += 1
        self._search()

    def _search(self) -> None:
        """If nothing is followed, find what followed the last tokens when they occurred last."""
        last, before = self.tokens[self.count - self.SHORTEST : self.count], self.tokens[: self.count - 1]
        if self.source is None and self.count > self.SHORTEST:
            found = ((before[:-1] == last[0]) & (before[1:] == last[1])).nonzero()
            if len(found):
                self.source, self.agreeing = int(found[-1]) + self.SHORTEST, self.SHORTEST

    def next(self, limit: int) -> tuple[list[int], list[float]]:
        """
        Up to `limit` next tokens if the text repeats itself, and the number of tokens that verifying the first 0, 1,
        ... of them should gain.
        """
        tokens, gains, chance = [], [0.0], 1.0
        while self.source is not None and len(tokens) < min(limit, self.LONGEST):
            step = len(tokens)
            token = int(self.tokens[self.source + step % (self.count - self.source)])
            if not 0 <= token < self.vocab_size:
                break
            chance *= self.reliability(_prior(self.agreeing + step))
            tokens.append(token)
            gains.append(gains[-1] + chance)
        return tokens, gains


def together(offers: list[tuple[list[int], list[float]]], lengths: list[int], alive: list[bool]):
    """
    The copies of several rows as one draft. A batch is done when its slowest row is: a copy is worth the expected
    growth of the shortest active row, times the number of active rows.

    Args:
        offers (`list[tuple]`): For each row, what [`Copies.next`] returns.
        lengths (`list[int]`): Tokens generated in each row.
        alive (`list[bool]`): Rows that have not ended.

    Returns:
        The tokens `[R][n]`, zeros past the end of a row's, and what the first 0, 1, ... of them are worth.
    """
    longest = max(len(tokens) for tokens, _ in offers)
    padded = [gains + gains[-1:] * (longest - len(tokens)) for tokens, gains in offers]
    active = [(length, gains) for length, gains, one in zip(lengths, padded, alive) if one]
    shortest = [min(length + gains[n] for length, gains in active) for n in range(longest + 1)]
    values = [len(active) * (length - shortest[0]) for length in shortest]
    return [tokens + [0] * (longest - len(tokens)) for tokens, _ in offers], values


def _prior(agreeing: int) -> float:
    """The assumed chance that one more token agrees, before any was seen."""
    return (agreeing - 1) / (agreeing + 3)
