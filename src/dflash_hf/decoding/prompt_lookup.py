"""
Prompt lookup (Saxena 2023): drafts that cost no drafter forward, copied from where the last tokens occurred before in
the prompt or in the generated text.
"""

import torch

from dflash_hf.decoding.calibration import AcceptanceCalibration


class PromptLookup:
    """
    Proposes what followed the last tokens of one row where they last occurred before.

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
        self.tokens = torch.tensor(prompt, dtype=torch.long)  # `[>= length]`: with space to grow
        self.length = len(prompt)
        self.source_index: int | None = None  # of the token that comes next if the text repeats itself
        self.num_matched = 0  # tokens before it that equal the last tokens of the text
        self._search()

    def extend(self, tokens: list[int]) -> None:
        """Read committed tokens."""
        if self.length + len(tokens) > len(self.tokens):
            with torch.inference_mode(False):  # the tokens are also written outside of inference mode
                space = torch.empty(len(self.tokens) + len(tokens), dtype=torch.long)
                self.tokens = torch.cat([self.tokens, space])
        for token in tokens:
            if self.source_index is not None:
                matches = int(self.tokens[self.source_index]) == token
                self.calibration.record(prior_probability(self.num_matched), matches)
                self.source_index = self.source_index + 1 if matches else None
                self.num_matched = self.num_matched + 1 if matches else 0
            self.tokens[self.length] = token
            self.length += 1
        self._search()

    def _search(self) -> None:
        """If no passage is followed, find the latest earlier occurrence of the last `NGRAM` tokens."""
        if self.source_index is not None or self.length <= self.NGRAM:
            return
        last = self.tokens[self.length - self.NGRAM : self.length]
        before = self.tokens[: self.length - 1].unfold(0, self.NGRAM, 1)  # [S - NGRAM, NGRAM]
        matches = (before == last).all(dim=1).nonzero()
        if len(matches):
            self.source_index = int(matches[-1]) + self.NGRAM
            self.num_matched = self.NGRAM

    def propose(self, max_tokens: int) -> tuple[list[int], list[float]]:
        """
        Up to `max_tokens` next tokens if the text repeats itself, and how many of the first 0, 1, ... of them the
        target is expected to accept.
        """
        tokens: list[int] = []
        expected = [0.0]
        if self.source_index is None:
            return tokens, expected
        path_probability = 1.0
        for step in range(min(max_tokens, self.MAX_TOKENS)):
            token = int(self.tokens[self.source_index + step % (self.length - self.source_index)])
            if not 0 <= token < self.vocab_size:
                break
            path_probability *= self.calibration(prior_probability(self.num_matched + step))
            tokens.append(token)
            expected.append(expected[-1] + path_probability)
        return tokens, expected


def prior_probability(num_matched: int) -> float:
    """
    The probability that one more token matches, before any was observed: 0.2 after two matching tokens, near 1 after
    many. The formula need not be exact: it orders copies by how many tokens have matched, and calibration learns how
    often copies of each order are right.
    """
    return (num_matched - 1) / (num_matched + 3)


def copies_of_batch(copies: list[tuple[list[int], list[float]]], lengths: list[int], unfinished: list[bool]):
    """
    The copies of several rows as one draft. A batch is done when its slowest row is: a copy is worth the expected
    growth of the shortest active row, times the number of active rows.

    Args:
        copies (`list[tuple]`): For each row, what [`PromptLookup.propose`] returns.
        lengths (`list[int]`): Tokens generated in each row.
        unfinished (`list[bool]`): Rows that have not ended.

    Returns:
        The tokens `[R][d]`, zeros past the end of a row's copy, and how many of the first 0, 1, ... of them the target
        is expected to accept, over all rows.
    """
    longest = max(len(tokens) for tokens, _ in copies)
    padded = [tokens + [0] * (longest - len(tokens)) for tokens, _ in copies]
    shortest = []
    for num_copied in range(longest + 1):
        grown = [
            length + expected[min(num_copied, len(expected) - 1)]
            for length, (_, expected), is_unfinished in zip(lengths, copies, unfinished, strict=True)
            if is_unfinished
        ]
        shortest.append(min(grown))
    return padded, [sum(unfinished) * (length - shortest[0]) for length in shortest]
