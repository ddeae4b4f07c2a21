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
        vocab_size (`int`): Of the target: placeholders in a prompt, for images or the like, are not copied.
        reliability (`plan_dflash.Reliability`, *optional*): The drafter's statistics of its copies; extended. A
            planner sets it.
    """

    SHORTEST, LONGEST = 2, 16  # tokens that must agree before anything is copied; that are copied at most
    MARGIN = 0.1  # tokens that copies must gain

    def __init__(self, vocab_size: int, reliability=None):
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

    def worth_copying(self, text, most: int, speed: float, costs: list[float]) -> torch.LongTensor | None:
        """
        The next tokens of a text that are worth verifying without a draft, `[n]`, or `None`.

        Args:
            text (`Continuation`): The text, of a single row; what is new in it is read.
            most (`int`): Maximum number of tokens.
            speed (`float`): Tokens per cost of the rounds that compete with it.
            costs (`list[float]`): The costs of rounds that verify 0, 1, ... tokens without a draft.
        """
        self.extend(text.sequences[0, len(self.tokens) :].tolist(), generated=bool(self.tokens))
        tokens, chances = self.copied(most)
        expected, size, best = 1.0, 0, self.MARGIN
        for count, chance in enumerate(chances, start=1):
            expected += chance
            worth = expected - speed * costs[count]
            if worth > best:
                size, best = count, worth
        return text.last.new_tensor(tokens[:size]) if size else None
