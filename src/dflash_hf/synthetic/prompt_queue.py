"""The prompts that a target still has to answer."""

from collections.abc import Hashable, Iterable, Iterator
from typing import Any


class PromptQueue:
    """
    Prompts that wait for a response, each with a key that names it. More may be pushed while earlier ones are being
    answered: the next turn of a conversation, once its last response is there.

    The prompt that was pushed last is taken first. A next turn is then read in the row whose cache still holds its
    beginning, and conversations are finished before others begin.

    Args:
        prompts (`Iterable`, *optional*): Keys and prompts that are taken in this order when no pushed one waits. Read
            lazily, one by one; may have no end.
    """

    def __init__(self, prompts: Iterable[tuple[Hashable, Any]] = ()):
        self._initial_prompts: Iterator[tuple[Hashable, Any]] = iter(prompts)
        self._pushed: list[tuple[Hashable, Any]] = []

    def push(self, key: Hashable, prompt) -> None:
        """Add a prompt, which is taken before all others."""
        self._pushed.append((key, prompt))

    def pop(self) -> tuple[Hashable, Any] | None:
        """Take the next key and prompt; `None` if none waits now, though more may be pushed later."""
        if self._pushed:
            return self._pushed.pop()
        return next(self._initial_prompts, None)

    def pop_up_to(self, count: int) -> list[tuple[Hashable, Any]]:
        """Take up to `count` keys and prompts; fewer if no more wait now."""
        taken: list[tuple[Hashable, Any]] = []
        while len(taken) < count:
            item = self.pop()
            if item is None:
                break
            taken.append(item)
        return taken
