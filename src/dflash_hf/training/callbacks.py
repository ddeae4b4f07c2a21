"""The time of a run: its learning rate if `max_minutes` limits it, and how many steps there will be."""

import copy
import math
import time
from collections.abc import Callable

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from transformers import ProgressCallback, TrainerCallback
from transformers.utils import logging

from dflash_hf.data.examples import has_rows


logger = logging.get_logger(__name__)
MIN_STEPS = 200  # with fewer, a drafter commits at most 1.1 tokens
# Twice the paper's six. In 56 passes over 60 answers the tau of these rose to 3.95, that of others to 1.26.
MANY_PASSES = 12
_TIMED = 10  # steps, or as many as half a minute allows


def duration(seconds: float) -> str:
    """A duration for people."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class TimeBudgetSchedule(TrainerCallback):
    """
    The learning-rate factor after a share of the time: linear warm-up, cosine to zero. Evaluations and saving count.
    As a callback it ends training when the time is over; the number of steps is not known in advance. The time spent
    is saved with a checkpoint's scheduler, so that a resumed run has the rest of its time, as long as it is now said
    to be. For that, a checkpoint holds the attributes under their names.

    Args:
        seconds (`float`): Duration of training.
        warmup (`float`): Share of it for the warm-up.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, seconds: float, warmup: float):
        self.seconds = seconds
        self.warmup = warmup
        self.spent = 0.0  # seconds until the last step
        self.usual = 0.0  # seconds of a step without an evaluation
        self.last: float | None = None  # time of the last step
        self.step: int | None = None

    def __call__(self, step: int) -> float:
        if step != self.step:  # called for each parameter group
            now = type(self).clock()
            elapsed = 0.0 if self.last is None else now - self.last
            self.spent += elapsed
            # An evaluation between two steps does not count as a step.
            self.usual = min(elapsed, 2 * self.usual) if self.usual else elapsed
            self.last = now
            self.step = step
            self._share_time()
        done = self.done
        if done < self.warmup:
            return max(done / self.warmup, 0.01)
        return 0.5 * (1 + math.cos(math.pi * (done - self.warmup) / (1 - self.warmup)))

    def _share_time(self) -> None:
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
        """End training, with a last line of the log, when the time is over."""
        if self.over:
            control.should_training_stop = True
            control.should_log = True


class StepCountCallback(TrainerCallback):
    """
    Tells how many steps a run will have, once ten have been timed after the first, and warns if they are too few, or
    if they read few rows many times: at once where the steps are known, else when they are timed.

    Args:
        say (`Callable`): Called with the number of steps.
        warn (`Callable`): Called with the warning.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, say: Callable[[str], None] = logger.info, warn: Callable[[str], None] = logger.warning):
        self.say = say
        self.warn = warn

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        """Forget an earlier run; warn of many passes where the number of steps is known."""
        self.start: float | None = None  # time of the end of the first step
        self.told = False
        if args.max_minutes is None and state.is_world_process_zero:
            self._warn_of_passes(args, state.max_steps, train_dataloader)

    def _warn_of_passes(self, args, steps: int, dataloader) -> None:
        """Warn of many passes over few rows."""
        passes = passes_of(args, steps, dataloader)
        if passes > MANY_PASSES:
            self.warn(
                f"About {passes:,.0f} passes over {len(dataloader.dataset):,} rows learn them by heart: their tau in "
                "the log says nothing of other texts. More answers (`dflash prompts`, `dflash regenerate`) help more "
                "than more steps."
            )

    def on_step_end(self, args, state, control, lr_scheduler=None, train_dataloader=None, **kwargs):
        """Time the steps, and tell their number once."""
        now = type(self).clock()
        if self.start is None:  # the first step takes memory and fills caches: as long as several others
            self.start = now
            self.first = state.global_step
        steps = state.global_step - self.first
        seconds = now - self.start
        if self.told or (steps < _TIMED and seconds < 30) or not state.is_world_process_zero:
            return
        self.told = True
        step_seconds = seconds / steps
        total = state.max_steps
        if args.max_minutes is not None:
            schedule = getattr(lr_scheduler, "scheduler", lr_scheduler).lr_lambdas[0]  # accelerate wraps it
            total = state.global_step + int((schedule.seconds - schedule.spent) / step_seconds)
        left = duration((total - state.global_step) * step_seconds)
        self.say(f"time              about {total:,} steps of {step_seconds:.2g} s, {left} left")
        if args.max_minutes is not None:
            self._warn_of_passes(args, total, train_dataloader)
        if total < MIN_STEPS:
            self.warn(
                f"In fewer than {MIN_STEPS} steps a fresh drafter learns almost nothing: give it more time or more "
                f"passes over the data, or smaller steps than those of num_anchors={args.num_anchors}, "
                f"per_device_train_batch_size={args.per_device_train_batch_size}, gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps} (preset cpu: 16, 4 and 1)."
            )


def passes_of(args, steps: int, dataloader) -> float:
    """How often some steps read each row of a training data loader; 0 for a stream, whose rows nobody knows."""
    rows = dataloader.dataset if dataloader is not None else None
    if rows is None or not has_rows(rows) or len(rows) == 0:
        return 0.0
    return steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size / len(rows)


class OpenEndedProgressCallback(ProgressCallback):
    """Upstream's progress bar; a run that ends by time has no number of steps."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar; with `max_minutes` without a total."""
        if args.max_minutes is not None:
            state = copy.copy(state)
            state.max_steps = None
        super().on_train_begin(args, state, control, **kwargs)


class BarOnlyCallback(OpenEndedProgressCallback):
    """A progress bar that prints no figures."""

    def on_log(self, args, state, control, **kwargs):
        """Nothing: [`LogLinesCallback`] prints the figures."""


class LogLinesCallback(TrainerCallback):
    """
    A training log of one short line for each entry: loss, tau, accuracy, learning rate. All figures are in
    `trainer_state.json` of a checkpoint, and where `report_to` sends them.

    Args:
        say (`Callable`): Called with each line.
    """

    def __init__(self, say: Callable[[str], None]):
        self.say = say

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Print an entry of the log, if it has a tau."""
        if not state.is_world_process_zero or not logs:
            return
        for prefix, which_rows in (("", "of the training rows"), ("eval_", "of eval_data")):
            if f"{prefix}simulated_tau" in logs:
                self.say(self._format_line(state, logs, prefix, which_rows))

    @staticmethod
    def _format_line(state, logs: dict, prefix: str, which_rows: str) -> str:
        passes = f"pass {state.epoch:.1f}"
        parts = [f"step {state.global_step:>7,}", f"{passes:<10}", f"loss {logs[f'{prefix}loss']:.3f}"]
        tau = f"tau {logs[f'{prefix}simulated_tau']:.2f}"
        if f"{prefix}simulated_tau_argmax" in logs:
            tau += f" ({logs[f'{prefix}simulated_tau_argmax']:.2f} without its head)"
        parts.append(f"{tau} {which_rows}")
        parts.append(f"accuracy {logs[f'{prefix}accuracy']:.1%}")
        if "learning_rate" in logs:
            parts.append(f"learning rate {logs['learning_rate']:.1e}")
        return "   ".join(parts)
