"""Stop strings, which end an answer and are not part of it."""

from collections.abc import Callable, Sequence


def without_stop(text: str, stops: Sequence[str]) -> str:
    """A text up to the stop string that is the first to be complete."""
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


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
