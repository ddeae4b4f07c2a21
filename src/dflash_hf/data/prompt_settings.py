"""Kinds of requests, and how they are sampled."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


# First words of a turn, by kind, without a trailing space, since tokens start with one. Without them, chat models
# seldom ask for code or arithmetic.
KINDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("kinds.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PromptSettings:
    """
    How requests are sampled and filtered. Equal settings give equal requests.

    Args:
        kinds (`Sequence[str]`): Kinds of [`KINDS`], in turn; a kind given twice is sampled twice as often.
            Default: `chat`, or none if `begin` is given.
        begin (`Sequence[str]`): First words of further requests, of the kind `begin`.
        system (`str`, *optional*): A system prompt, also kept in the rows. Default: the template's own.
        temperature, top_p (`float`): Sampling parameters.
        max_new_tokens (`int`): Maximum number of tokens; unfinished requests are left out.
        min_chars, max_chars (`int`): Allowed length of a request.
        seed (`int`): Seed of all samples, from which each gets its own.
        chat_template_kwargs (`dict`): Arguments of the chat template.

    Raises:
        `ValueError`: a kind is unknown, or a number is out of range.
    """

    kinds: Sequence[str] = ()
    begin: Sequence[str] = ()
    system: str | None = None
    temperature: float = 1.0
    top_p: float = 0.95
    max_new_tokens: int = 128
    min_chars: int = 16
    max_chars: int = 1000
    seed: int = 0
    chat_template_kwargs: dict = field(default_factory=dict)

    def __post_init__(self):
        for name in ("kinds", "begin"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r} is a text; give a list of texts.")
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"kinds: {kind!r} is unknown; choose from {', '.join(KINDS)}, or give `begin`.")
        if any(not text.strip() for text in self.begin):
            raise ValueError("begin: '' is empty; leave it out, since kinds=('chat',) starts with nothing.")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0: greedy decoding gives one request.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1.")
        for name in ("max_new_tokens", "max_chars"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.min_chars > self.max_chars:
            raise ValueError(f"min_chars={self.min_chars} must not exceed max_chars={self.max_chars}.")

    def of_sample(self, number: int) -> tuple[str, str]:
        """Kind and first words of a sample: kinds in turn, and within a kind its first words in turn."""
        kinds = [*self.kinds, *(["begin"] if self.begin else [])] or ["chat"]
        kind = kinds[number % len(kinds)]
        beginnings = self.begin if kind == "begin" else KINDS[kind]
        return kind, beginnings[number // len(kinds) % len(beginnings)]
