"""The clock that rounds are timed with, and the time that a streamer takes, which is excluded from a round's."""

import time
from collections.abc import Callable

import torch


def clock(device: torch.device) -> float:
    """Seconds; with a single CPU thread its CPU time, which does not depend on other load."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


class TimedStreamer:
    """
    The streamer of a call, timed: a policy that times rounds subtracts `seconds`.

    A streamer has `put` and `end`, as transformers' `BaseStreamer`. It may also have `next_round(num_drafted)`, which
    is called before the tokens of each round, to tell drafted tokens from the target's own.

    Args:
        streamer (`BaseStreamer`): Receives every token; its other attributes are also attributes of this one.
        device (`torch.device`): The target's device, as for [`clock`].

    Attributes:
        seconds (`float`): Time spent in these three methods so far.
    """

    def __init__(self, streamer, device: torch.device):
        self.streamer = streamer
        self.device = device
        self.seconds = 0.0

    def __getattr__(self, name: str):
        if name == "streamer":  # not set yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.streamer, name)

    def put(self, value: torch.Tensor) -> None:
        """Pass on tokens `[n]` or `[R, n]`."""
        self._time(self.streamer.put, value)

    def next_round(self, num_drafted: int) -> None:
        """Announce a round, to a streamer that asks for it: the tokens that it verifies, without the anchor."""
        if hasattr(self.streamer, "next_round"):
            self._time(self.streamer.next_round, num_drafted)

    def end(self) -> None:
        """The last token was put."""
        self._time(self.streamer.end)

    def _time(self, method: Callable, *arguments) -> None:
        started = clock(self.device)
        method(*arguments)
        self.seconds += clock(self.device) - started
