"""The training log as a table for those who watch a terminal; files and other programs get every figure."""

import copy

from transformers import ProgressCallback


_EVERY = 20  # rows between headers
_HEAD = f"{'step':>8}{'epoch':>8}{'loss':>9}{'tau':>7}{'tokens/s':>10}{'rate':>10}  accuracy by slot, %"


def table_row(logs: dict[str, float], step: int) -> str | None:
    """
    One row of the table, of the training loss or of an evaluation; `None` for any other line of the log.

    `tau` is the simulated tau: teacher-forced, bonus token included.
    """
    prefix = "eval_" if "eval_loss" in logs else ""
    if f"{prefix}loss" not in logs:
        return None
    cells = (
        f"{'eval' if prefix else step:>8}",
        _cell(logs.get("epoch"), 8, "{:.2f}"),
        _cell(logs[f"{prefix}loss"], 9, "{:.4f}"),
        _cell(logs.get(f"{prefix}simulated_tau"), 7, "{:.2f}"),
        _cell(None if prefix else logs.get("tokens_per_second"), 10, "{:,.0f}"),
        _cell(None if prefix else logs.get("learning_rate"), 10, "{:.1e}"),
    )
    slots = []
    while (accuracy := logs.get(f"{prefix}accuracy_{len(slots) + 1}")) is not None:
        slots.append(f"{100 * accuracy:>3.0f}")
    return f"{''.join(cells)}  {' '.join(slots)}".rstrip()


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'' if value is None else form.format(value):>{width}}"


class LogTable(ProgressCallback):
    """
    Upstream's progress bar, open-ended for runs with a time limit, and rows of a table above it.

    Args:
        table (`bool`): Whether to print table rows; otherwise dictionaries, as upstream.
    """

    def __init__(self, table: bool = True):
        super().__init__()
        self.table, self.rows = table, 0

    def on_train_begin(self, args, state, control, **kwargs):
        if args.max_minutes is not None:
            state = copy.copy(state)
            state.max_steps = None  # unknown
        super().on_train_begin(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        row = table_row(logs or {}, state.global_step) if self.table else None
        if row is None:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif state.is_world_process_zero and self.training_bar is not None:
            if self.rows % _EVERY == 0:
                self.training_bar.write(_HEAD)
            self.rows += 1
            self.training_bar.write(row)
