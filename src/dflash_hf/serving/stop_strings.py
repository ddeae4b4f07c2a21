"""Stop strings, which end an answer and are not part of it."""

from collections import deque
from collections.abc import Callable, Sequence


def without_stop(text: str, stops: Sequence[str]) -> str:
    """A text up to the stop string that is the first to be complete."""
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


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
        self.decode, self.stops = decode, stops
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
        self.pass_on, self.stops = pass_on, stops
        self.waiting, self.stopped = "", False

    def __call__(self, item) -> None:
        if type(item) is not str:  # the text is complete
            self._pass(self.waiting)
            self.waiting = ""
            self.pass_on(item)
        elif not self.stopped:
            text = self.waiting + item
            kept = without_stop(text, self.stops)
            self.stopped = kept != text
            begun = (i for i in range(len(kept)) if any(stop.startswith(kept[i:]) for stop in self.stops))
            end = len(kept) if self.stopped else next(begun, len(kept))
            self._pass(kept[:end])
            self.waiting = kept[end:]

    def _pass(self, text: str) -> None:
        if text:
            self.pass_on(text)
