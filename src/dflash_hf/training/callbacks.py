"""What a run says while it trains: how many steps there will be, the progress bar, and the lines of its log."""

import copy
import time
from collections.abc import Callable

from transformers import ProgressCallback, TrainerCallback
from transformers.utils import logging

from dflash_hf.data.examples import has_rows


logger = logging.get_logger(__name__)
MIN_STEPS = 200  # with fewer, a drafter commits at most 1.1 tokens
# Twice the paper's six. In 56 passes over 60 answers the tau of these rose to 3.95, that of others to 1.26.
MANY_PASSES = 12
# Steps are timed until there are enough of them, or until enough time has passed.
_STEPS_TO_TIME = 10
_SECONDS_TO_TIME = 30


def duration(seconds: float) -> str:
    """A duration as text, such as `1 h 5 min`."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class StepCountCallback(TrainerCallback):
    """
    Reports how many steps a run will have, once ten have been timed after the first, and warns if they are too few. It
    also warns if they read few rows many times: immediately if the number of steps is known, or once steps have been
    timed.

    Args:
        say (`Callable`): Called with the number of steps.
        warn (`Callable`): Called with the warning.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, say: Callable[[str], None] = logger.info, warn: Callable[[str], None] = logger.warning):
        self.say = say
        self.warn = warn
        self._forget()

    def _forget(self) -> None:
        """Forget what was timed."""
        self.first_step: int | None = None
        self.first_step_end = 0.0  # time
        self.has_reported = False

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        """Forget an earlier run; warn of many passes where the number of steps is known."""
        self._forget()
        if args.max_minutes is None and state.is_world_process_zero:
            self._warn_of_passes(args, state.max_steps, train_dataloader)

    def _warn_of_passes(self, args, steps: int, dataloader) -> None:
        """Warn of many passes over few rows."""
        passes = passes_of(args, steps, dataloader)
        if passes > MANY_PASSES:
            self.warn(
                f"About {passes:,.0f} passes over {len(dataloader.dataset):,} rows memorise them: their tau in the "
                "log says nothing about other texts. More answers (`dflash prompts`, `dflash regenerate`) help more "
                "than more steps."
            )

    def on_step_end(self, args, state, control, lr_scheduler=None, train_dataloader=None, **kwargs):
        """Time the steps, and report their number once."""
        now = type(self).clock()
        if self.first_step is None:  # it takes memory and fills caches: as long as several others
            self.first_step = state.global_step
            self.first_step_end = now
        steps = state.global_step - self.first_step
        seconds = now - self.first_step_end
        is_timed = steps >= _STEPS_TO_TIME or seconds >= _SECONDS_TO_TIME
        if self.has_reported or not is_timed or not state.is_world_process_zero:
            return
        self.has_reported = True
        step_seconds = seconds / steps
        total = state.max_steps
        if args.max_minutes is not None:
            budget = getattr(lr_scheduler, "scheduler", lr_scheduler).budget  # accelerate wraps it
            total = state.global_step + int((budget.seconds - budget.elapsed) / step_seconds)
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
    """How often some steps read each row of a training data loader; 0 for a stream, whose length is unknown."""
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
        if f"{prefix}tau" in logs:
            tau += f", decoded {logs[f'{prefix}tau']:.2f},"
        parts.append(f"{tau} {which_rows}")
        parts.append(f"accuracy {logs[f'{prefix}accuracy']:.1%}")
        if "learning_rate" in logs:
            parts.append(f"learning rate {logs['learning_rate']:.1e}")
        return "   ".join(parts)
