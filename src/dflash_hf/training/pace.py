"""The learning rate of a run with a time limit: `max_minutes`."""

import math
import time

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from transformers import TrainerCallback


class Pace(TrainerCallback):
    """
    The learning-rate factor after a share of the time: linear warm-up, cosine to zero. Evaluations and saving count.
    As a callback it ends training when the time is over; the number of steps is not known in advance. The time spent
    is saved with a checkpoint's scheduler, so that a resumed run has the rest of its time.

    Args:
        seconds (`float`): Duration of training.
        warmup (`float`): Share of it for the warm-up.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, seconds: float, warmup: float):
        self.seconds, self.warmup = seconds, warmup
        self.spent = self.usual = 0.0
        self.last: float | None = None
        self.step: int | None = None

    def __call__(self, step: int) -> float:
        if step != self.step:  # called for each parameter group
            now = type(self).clock()
            took = 0.0 if self.last is None else now - self.last
            # An evaluation between two steps does not count as a step.
            self.spent, self.usual = self.spent + took, min(took, 2 * self.usual) if self.usual else took
            self.last, self.step = now, step
            self._agree()
        done = self.done
        if done < self.warmup:
            return max(done / self.warmup, 0.01)
        return 0.5 * (1 + math.cos(math.pi * (done - self.warmup) / (1 - self.warmup)))

    def _agree(self) -> None:
        """All processes use the first one's time, so that they share the learning rate and the last step."""
        state = PartialState()
        if state.num_processes > 1:
            times = torch.tensor([self.spent, self.usual, self.seconds], device=state.device)
            self.spent, self.usual, self.seconds = broadcast(times).tolist()

    @property
    def done(self) -> float:
        """Share of the time that has passed."""
        return min(self.spent / self.seconds, 1.0)

    @property
    def over(self) -> bool:
        """Whether another step would end too late."""
        return self.spent + self.usual > self.seconds

    def on_train_begin(self, args, state, control, **kwargs):
        """Exclude the time until now, such as the time since a checkpoint was saved."""
        self.last = type(self).clock()

    def on_step_end(self, args, state, control, **kwargs):
        if self.over:
            control.should_training_stop = control.should_log = True
