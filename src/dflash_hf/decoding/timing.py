"""The clock that rounds are timed with, and the time that a streamer takes, which is excluded from a round's."""

import functools
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

    Args:
        streamer (`BaseStreamer`): Its attributes are also attributes of this one, and its methods are timed: `put`,
            `end`, and those that it may have besides, such as `next_round`, see [`GenerationState.accept`].
        device (`torch.device`): The target's device, as for [`clock`].

    Attributes:
        seconds (`float`): Time spent in these methods so far.
    """

    def __init__(self, streamer, device: torch.device):
        self.streamer = streamer
        self.device = device
        self.seconds = 0.0

    def __getattr__(self, name: str):
        if name == "streamer":  # not set yet, in a copy that is being made
            raise AttributeError(name)
        attribute = getattr(self.streamer, name)
        return functools.partial(self._time, attribute) if callable(attribute) else attribute

    def _time(self, method: Callable, *arguments):
        started = clock(self.device)
        try:
            return method(*arguments)
        finally:
            self.seconds += clock(self.device) - started
