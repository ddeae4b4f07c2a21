"""The clock that rounds are timed with, and the time that a streamer takes, which is excluded from a round's."""

import time

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
        streamer (`BaseStreamer`): Receives every token; its other attributes are also attributes of this one.
        device (`torch.device`): The target's device, as for [`clock`].

    Attributes:
        seconds (`float`): Time spent in `put` so far.
    """

    def __init__(self, streamer, device: torch.device):
        self.streamer = streamer
        self.device = device
        self.seconds = 0.0

    def __getattr__(self, name: str):
        return getattr(self.streamer, name)

    def put(self, value: torch.Tensor) -> None:
        """Pass on tokens `[n]` or `[R, n]`."""
        started = clock(self.device)
        self.streamer.put(value)
        self.seconds += clock(self.device) - started
