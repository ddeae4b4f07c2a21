"""Stop strings, which end an answer and are not part of it."""

from collections import deque
from collections.abc import Callable, Sequence


def text_before_stop(text: str, stop_strings: Sequence[str]) -> str:
    """A text up to the stop string that is the first to be complete; the whole text if there is none."""
    ends_and_starts = []
    for string in stop_strings:
        if string in text:
            start = text.index(string)
            ends_and_starts.append((start + len(string), start))
    if not ends_and_starts:
        return text
    _, start = min(ends_and_starts)
    return text[:start]


class StopStringMatcher:
    """
    Recognises the token that completes a stop string.

    transformers' `StopStringCriteria` searches the whole vocabulary for each request, 0.5 s for 49k tokens and 1.5 s
    for 152k: its cache is keyed by the order of `tokenizer.get_vocab()`, which differs from call to call. It also
    stops at a string that begins in the prompt, and continuous batching ignores it.

    Args:
        decode (`Callable`): Turns token ids into text.
        stop_strings (`Sequence[str]`): The stop strings, none of them empty.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str]):
        self.decode = decode
        self.stop_strings = stop_strings
        # The last tokens of the answer. A token has at least a byte; one token more, because decoders may drop the
        # space of the first.
        max_bytes = max(len(string.encode()) for string in stop_strings)
        self._last_tokens: deque[int] = deque(maxlen=max_bytes + 1)

    def completes(self, token: int) -> bool:
        """Whether the next token of the answer completes a stop string; to be called with each of them in turn."""
        self._last_tokens.append(token)
        text = self.decode(list(self._last_tokens))
        return any(string in text for string in self.stop_strings)


class StopStringFilter:
    """
    Passes on the pieces of a text up to a stop string. What may be the beginning of a stop string waits for the next
    piece.

    Args:
        pass_on (`Callable`): Called with the pieces; and with all other items, such as tool calls and the end.
        stop_strings (`Sequence[str]`): The stop strings, none of them empty.
    """

    def __init__(self, pass_on: Callable, stop_strings: Sequence[str]):
        self.pass_on = pass_on
        self.stop_strings = stop_strings
        self._held_back = ""
        self._is_stopped = False

    def __call__(self, item) -> None:
        if type(item) is not str:  # the call of a tool, a thought or the end: the text before it is complete
            self._pass(self._held_back)
            self._held_back = ""
            self.pass_on(item)
        elif not self._is_stopped:
            text = self._held_back + item
            before_stop = text_before_stop(text, self.stop_strings)
            self._is_stopped = before_stop != text
            end = len(before_stop) if self._is_stopped else self._possible_start(before_stop)
            self._pass(before_stop[:end])
            self._held_back = before_stop[end:]

    def _possible_start(self, text: str) -> int:
        """Where the end of a text may be the beginning of a stop string; the length of the text if nowhere."""
        for i in range(len(text)):
            if any(string.startswith(text[i:]) for string in self.stop_strings):
                return i
        return len(text)

    def _pass(self, text: str) -> None:
        if text:
            self.pass_on(text)
