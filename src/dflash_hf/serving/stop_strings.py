"""Stop strings, which end an answer and are not part of it."""

from collections import deque
from collections.abc import Callable, Sequence


def without_stop(text: str, stops: Sequence[str]) -> str:
    """A text up to the stop string that is the first to be complete."""
    places = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    if not places:
        return text
    _, begin = min(places)
    return text[:begin]


class CompletesStop:
    """
    Whether a token completes a stop string; called with each token of an answer.

    transformers' `StopStringCriteria` searches the whole vocabulary for each request, 0.5 s for 49k tokens and 1.5 s
    for 152k: its cache is keyed by the order of `tokenizer.get_vocab()`, which differs from call to call. It also
    stops at a string that begins in the prompt, and continuous batching ignores it.

    Args:
        decode (`Callable`): Turns token ids into text.
        stops (`Sequence[str]`): The stop strings, none of them empty.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]):
        self.decode = decode
        self.stops = stops
        # A token has at least a byte; one more, because decoders may drop the space of the first.
        self.last: deque[int] = deque(maxlen=max(len(stop.encode()) for stop in stops) + 1)

    def __call__(self, token: int) -> bool:
        self.last.append(token)
        text = self.decode(list(self.last))
        return any(stop in text for stop in self.stops)


class UpToStop:
    """
    Passes on the pieces of a text up to a stop string. What may be the beginning of a stop string waits for the next
    piece.

    Args:
        pass_on (`Callable`): Called with the pieces; and with all other items, such as tool calls and the end.
        stops (`Sequence[str]`): The stop strings, none of them empty.
    """

    def __init__(self, pass_on: Callable, stops: Sequence[str]):
        self.pass_on = pass_on
        self.stops = stops
        self.waiting = ""
        self.stopped = False

    def __call__(self, item) -> None:
        if type(item) is not str:  # the text is complete
            self._pass(self.waiting)
            self.waiting = ""
            self.pass_on(item)
        elif not self.stopped:
            text = self.waiting + item
            before_stop = without_stop(text, self.stops)
            self.stopped = before_stop != text
            end = len(before_stop) if self.stopped else self._begin_of_stop(before_stop)
            self._pass(before_stop[:end])
            self.waiting = before_stop[end:]

    def _begin_of_stop(self, text: str) -> int:
        """Where the end of a text may be the beginning of a stop string; the length of the text if nowhere."""
        for i in range(len(text)):
            if any(stop.startswith(text[i:]) for stop in self.stops):
                return i
        return len(text)

    def _pass(self, text: str) -> None:
        if text:
            self.pass_on(text)
