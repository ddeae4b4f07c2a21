"""Drafts that cost nothing: what followed the last tokens of a text where they occurred before in it."""

import torch


class Lookup:
    """
    Finds the last tokens of a text earlier in it, and copies what followed them there: prompt lookup decoding (Saxena
    2023), over the generated text too.

    While the text goes on as it did there, that place is followed. Each token of the text shows whether a copy would
    have been right, verified or not: so how reliable copies are, given how many tokens agree so far, is learned at no
    cost.

    Args:
        reliability (`plan_dflash.Reliability`): The drafter's statistics of its copies; extended.
    """

    SHORTEST = 2  # tokens that must agree before anything is copied

    def __init__(self, reliability):
        self.reliability, self.tokens = reliability, []
        self.places: dict[tuple, int] = {}  # what followed each sequence of tokens when it occurred last
        self.source, self.agreeing = None, 0  # index of the token that comes next if the text repeats itself

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
        if self.source is None:
            return [], []
        period, chances, chance = len(self.tokens) - self.source, [], 1.0
        for step in range(most):
            chance *= self.reliability(self.said(self.agreeing + step))
            chances.append(chance)
        return [self.tokens[self.source + step % period] for step in range(most)], chances

    def worth_copying(self, text, most: int, speed: float, cost) -> torch.LongTensor | None:
        """
        The next tokens of a text that are worth verifying without a draft, `[n]`, or `None`.

        Args:
            text (`Continuation`): The text, of a single row; what is new in it is read.
            most (`int`): Maximum number of tokens.
            speed (`float`): Tokens per cost of the rounds that compete with it.
            cost (`callable`): The cost of a round that verifies so many tokens without a draft.
        """
        self.extend(text.sequences[0, len(self.tokens) :].tolist(), generated=bool(self.tokens))
        tokens, chances = self.copied(most)
        expected, size, best = 1.0, 0, 0.0
        for count, chance in enumerate(chances, start=1):
            expected += chance
            worth = expected - speed * cost(count)
            if worth > best:
                size, best = count, worth
        return text.last.new_tensor(tokens[:size]) if size else None
