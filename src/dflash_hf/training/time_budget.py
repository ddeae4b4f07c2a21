"""
A run that ends by the clock (`max_minutes`).

The life of the time of a run, from the command to the last step:

1. `dflash train` covers everything by the limit. [`~dflash_hf.training.train.train`] reads the clock when it begins;
   before the first step it reserves the seconds that have passed, such as for loading and for storing features, and
   those that the last evaluation and saving will take.
2. `DFlashTrainer.train(reserved_seconds=...)` makes the [`TimeBudget`] of what is left, and adds a
   [`TimeBudgetCallback`]. Each call makes its own.
3. Upstream calls `DFlashTrainer.create_scheduler`, which makes a [`TimeBudgetScheduler`]. In a resumed run, upstream
   then loads its state from the checkpoint: the time that was spent.
4. The clock of the budget starts with the first step ([`TimeBudgetCallback.on_train_begin`]). After each step upstream
   calls the scheduler, which counts the time and sets the learning rate, and then the callback, which ends training
   if another step would end too late.
"""

import math
import time

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy


_MIN_WARMUP_FACTOR = 0.01  # of the learning rate: the first step is not wasted


class TimeBudget:
    """
    The time of a run, counted at each of its steps; evaluations and saving count.

    Args:
        seconds (`float`): Duration of training.
        warmup (`float`): Share of it for the warm-up of the learning rate.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, seconds: float, warmup: float):
        self.seconds = seconds
        self.warmup = warmup
        self.elapsed = 0.0  # seconds until the last step
        self.typical_step = 0.0  # seconds of a step without an evaluation
        self.last_step: int | None = None
        self._last_step_time: float | None = None

    def resume(self) -> None:
        """Exclude the time since the last step, such as that since a checkpoint was saved."""
        self._last_step_time = type(self).clock()

    def record_step(self, step: int) -> None:
        """Count the time until a step; called more than once for the same step, it counts once."""
        if step == self.last_step:
            return
        now = type(self).clock()
        seconds = 0.0 if self._last_step_time is None else now - self._last_step_time
        self.elapsed += seconds
        # An evaluation between two steps does not count as a step.
        self.typical_step = min(seconds, 2 * self.typical_step) if self.typical_step else seconds
        self.last_step = step
        self._last_step_time = now
        self._use_time_of_first_process()

    def _use_time_of_first_process(self) -> None:
        """Take the time of the first process, so that all have the same learning rate and the same last step."""
        state = PartialState()
        if state.num_processes > 1:
            times = torch.tensor([self.elapsed, self.typical_step, self.seconds], device=state.device)
            self.elapsed, self.typical_step, self.seconds = broadcast(times).tolist()

    @property
    def done(self) -> float:
        """Share of the time that has passed, from 0 to 1."""
        return min(self.elapsed / self.seconds, 1.0)

    @property
    def is_over(self) -> bool:
        """Whether another step would end too late."""
        return self.elapsed + self.typical_step > self.seconds

    @property
    def learning_rate_factor(self) -> float:
        """Linear warm-up, then a cosine to zero, over the time."""
        if self.done < self.warmup:
            return max(self.done / self.warmup, _MIN_WARMUP_FACTOR)
        return 0.5 * (1 + math.cos(math.pi * (self.done - self.warmup) / (1 - self.warmup)))

    def state_dict(self) -> dict[str, float | int | None]:
        """What a checkpoint holds. Duration and warm-up are not part of it: a resumed run has its own."""
        return {"elapsed": self.elapsed, "typical_step": self.typical_step, "last_step": self.last_step}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a [`state_dict`]."""
        self.elapsed = state["elapsed"]
        self.typical_step = state["typical_step"]
        self.last_step = state["last_step"]


class TimeBudgetScheduler(LambdaLR):
    """
    The learning rate after a share of the time. Each of its steps counts the time, and its state has the time that was
    spent.

    Args:
        optimizer (`torch.optim.Optimizer`): The optimizer whose learning rates it sets.
        budget (`TimeBudget`): The time of the run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, budget: TimeBudget):
        self.budget = budget
        super().__init__(optimizer, self._factor_after)

    def _factor_after(self, step: int) -> float:
        """The factor of the learning rate; called for each parameter group."""
        self.budget.record_step(step)
        return self.budget.learning_rate_factor

    def state_dict(self) -> dict:
        """As upstream, with the [`TimeBudget.state_dict`]."""
        state = super().state_dict()
        del state["budget"]
        return {**state, "time_budget": self.budget.state_dict()}

    def load_state_dict(self, state_dict: dict) -> None:
        """As upstream. Checkpoints of 0.1 and 0.2 held the attributes of a callable in place of `time_budget`."""
        state = dict(state_dict)
        budget_state = state.pop("time_budget", None)
        if budget_state is None:
            attributes = state["lr_lambdas"][0]
            budget_state = {
                "elapsed": attributes["spent"],
                "typical_step": attributes.get("usual", 0.0),  # absent in 0.1.0
                "last_step": attributes["step"],
            }
        state["lr_lambdas"] = [None] * len(self.lr_lambdas)
        super().load_state_dict(state)
        self.budget.load_state_dict(budget_state)


class TimeBudgetCallback(TrainerCallback):
    """
    Ends training when the budget is spent; the number of steps is not known in advance.

    Args:
        budget (`TimeBudget`): The time of the run, which a [`TimeBudgetScheduler`] counts.
    """

    def __init__(self, budget: TimeBudget):
        self.budget = budget

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the clock of the budget."""
        self.budget.resume()

    def on_step_end(self, args, state, control, **kwargs):
        """End training, with a last line of the log and a last evaluation, when the budget is spent."""
        if self.budget.is_over:
            control.should_training_stop = True
            control.should_log = True
            # As upstream after the last of `max_steps`. The best checkpoint was evaluated before it was saved.
            if args.eval_strategy == IntervalStrategy.STEPS and not args.load_best_model_at_end:
                control.should_evaluate = True
