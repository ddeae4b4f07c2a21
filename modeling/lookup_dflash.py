"""Drafts that cost nothing: what followed the last tokens of a text where they occurred before in it."""

from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

import torch

from .reliability_dflash import Reliability


class Lookup:
    """
    Finds the last tokens of a text earlier in it, and copies what followed them there: prompt lookup decoding (Saxena
    2023), over the generated text too.

    While the text goes on as it did there, that place is followed. Each token of the text shows whether a copy would
    have been right, verified or not: so how reliable copies are, given how many tokens agree so far, is learned at no
    cost.

    Args:
        vocab_size (`int`): Of the target: placeholders in a prompt, for images or the like, are not copied.
        reliability (`Reliability`): The drafter's statistics of its copies; extended.
    """

    SHORTEST, LONGEST = 2, 16  # tokens that must agree before anything is copied; that are copied at most

    def __init__(self, vocab_size: int, reliability: Reliability):
        self.vocab_size, self.reliability, self.tokens = vocab_size, reliability, []
        self.places: dict[tuple, int] = {}  # what followed each sequence of tokens when it occurred last
        self.source: int | None = None  # index of the token that comes next if the text repeats itself
        self.agreeing = 0  # tokens before it that equal the last tokens of the text

    def extend(self, tokens: list[int], generated: bool = True) -> None:
        """Read the next tokens; tokens of the prompt say nothing about the target."""
        for token in tokens:
            if self.source is not None:
                agrees = self.tokens[self.source] == token
                if generated:
                    self.reliability.note(self.said(self.agreeing), agrees)
                self.source, self.agreeing = (self.source + 1, self.agreeing + 1) if agrees else (None, 0)
            self.tokens.append(token)
            last = tuple(self.tokens[-self.SHORTEST :])
            if self.source is None and last in self.places:
                self.source, self.agreeing = self.places[last], self.SHORTEST
            self.places[last] = len(self.tokens)

    @staticmethod
    def said(agreeing: int) -> float:
        """The assumed chance that one more token agrees, before any was seen."""
        return (agreeing - 1) / (agreeing + 3)

    def copied(self, most: int) -> tuple[list[int], list[float]]:
        """Up to `most` next tokens if the text repeats itself, and for each the chance that all up to it do."""
        tokens, chances, chance = [], [], 1.0
        while self.source is not None and len(tokens) < min(most, self.LONGEST):
            step = len(tokens)
            token = self.tokens[self.source + step % (len(self.tokens) - self.source)]
            if not 0 <= token < self.vocab_size:
                break
            chance *= self.reliability(self.said(self.agreeing + step))
            tokens.append(token)
            chances.append(chance)
        return tokens, chances


@dataclass
class CopyRecord:
    """A drafter's statistics of its copies, kept between calls."""

    TRUST = 4.0  # expected tokens that the first guess of the share is worth

    reliability: Reliability = field(default_factory=Reliability)
    expected: float = 0.0  # tokens per row that copies in batches were expected to gain
    gained: float = 0.0  # of these, by the slowest rows

    def share(self, rows: int) -> float:
        """The share of an expected gain that reaches the slowest of some rows; at first, less for more rows."""
        return 1.0 if rows == 1 else (self.gained + self.TRUST * min(2 / rows, 1.0)) / (self.expected + self.TRUST)

    def forget(self) -> None:
        """In every round: older rounds count less, so that copying is tried again."""
        self.expected, self.gained = 0.998 * self.expected, 0.998 * self.gained


class Copier:
    """
    What the rows of a text can copy from themselves, each row with a [`Lookup`] of its own.

    A batch is done when its slowest row is. So tokens count less in rows that have less to go, and of the gain that is
    expected only the share that used to reach the slowest row.

    Args:
        rows (`int`): Rows of the text.
        vocab_size (`int`): Of the target.
        record (`CopyRecord`): The drafter's statistics; extended.
    """

    MARGIN = 0.1  # tokens per row that copies must gain
    PRIOR = 4  # rounds of one token each that are taken to have come before the first
    POWER = 4  # a row with half as many rounds to go is worth half, to this power

    def __init__(self, rows: int, vocab_size: int, record: CopyRecord):
        self.lookups, self.record = [Lookup(vocab_size, record.reliability) for _ in range(rows)], record
        self.gained = [0] * rows  # tokens, by copying
        self.expected = 0.0  # tokens per row that the latest copies should gain

    def worth_copying(self, text, most: int, speed: float, costs: list[float]) -> torch.LongTensor | None:
        """
        The next tokens of a text that are worth verifying without a draft, `[R, n]`, or `None`. Rows that find fewer
        are filled with token 0; any would do.

        Args:
            text (`Continuation`): The text; what is new in it is read.
            most (`int`): Maximum number of tokens.
            speed (`float`): Tokens per row and cost of the rounds that compete with it.
            costs (`list[float]`): The costs of rounds that verify 0, 1, ... tokens without a draft.
        """
        copies, share = self._read(text, most), self.record.share(sum(text.host.alive))
        weights = self._weights(text, copies)
        self.record.forget()
        each = zip_longest(*([weights[row] * chance for chance in copies[row][1]] for row in copies), fillvalue=0.0)
        gains = [0.0, *accumulate(map(sum, each))]  # of all rows, by number of tokens
        worths = [1 + share * gain - speed * cost for gain, cost in zip(gains, costs)]
        worths[0] = self.MARGIN
        size = worths.index(max(worths))  # the smallest of those that are worth most
        if not size:
            return None
        self.expected = gains[size]
        rows = [copies.get(row, ([], []))[0][:size] for row in range(len(self.lookups))]
        return text.last.new_tensor([[*copied, *[0] * (size - len(copied))] for copied in rows])

    def learn(self, counts: list[int], alive: list[bool]) -> None:
        """Record what the latest copies gained: `counts` tokens were committed in the rows that were `alive`."""
        rows = [row for row, goes_on in enumerate(alive) if goes_on]
        before = min(self.gained[row] for row in rows)
        for row in rows:
            self.gained[row] += counts[row] - 1
        self.record.expected += self.expected
        self.record.gained += min(self.gained[row] for row in rows) - before

    def _weights(self, text, rows) -> dict[int, float]:
        """What a token is worth in each of the unfinished rows; in all 1. No end but `max_new` can be foreseen."""
        to_go = {}
        for row in rows:
            written, rounds = text.host.lengths[row], len(text.host.acceptance_lengths[row])
            to_go[row] = (text.max_new - written) * (rounds + self.PRIOR) / (written + self.PRIOR)
        total = sum(rounds**self.POWER for rounds in to_go.values())
        return {row: rounds**self.POWER / total for row, rounds in to_go.items()}

    def _read(self, text, most: int) -> dict[int, tuple[list[int], list[float]]]:
        """Read what is new in each unfinished row; returns its copies and their chances."""
        host, start = text.host, text.writer.prompt_length
        rows = [row for row, alive in enumerate(host.alive) if alive]
        first = min(len(self.lookups[row].tokens) for row in rows)
        written = text.writer.buffer[:, first : start + host.longest].tolist()
        copies = {}
        for row in rows:
            lookup, length = self.lookups[row], host.lengths[row]
            new = written[row][len(lookup.tokens) - first : start + length - first]
            lookup.extend(new, generated=bool(lookup.tokens))
            copies[row] = lookup.copied(min(most, text.max_new - length - 1))
        return copies
