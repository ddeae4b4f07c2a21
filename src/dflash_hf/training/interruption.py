"""Ctrl-C during training saves a checkpoint before the run ends."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from transformers import Trainer, TrainerCallback


class CheckpointOnInterruptCallback(TrainerCallback):
    """
    Once `requested`, saves a checkpoint at the end of the step and raises `KeyboardInterrupt`.

    Attributes:
        requested (`bool`): Whether the run is to end.
    """

    def __init__(self):
        self.requested = False

    def on_step_end(self, args, state, control, **kwargs):
        """Save, and do not evaluate before."""
        if self.requested:
            control.should_save = True
            control.should_evaluate = False

    def on_save(self, args, state, control, **kwargs):
        """
        Raises:
            `KeyboardInterrupt`: the run is to end, and the checkpoint is complete.
        """
        if self.requested:
            raise KeyboardInterrupt


@contextlib.contextmanager
def checkpoint_on_interrupt(trainer: Trainer, say: Callable[[str], None]) -> Iterator[None]:
    """
    While this context is active, Ctrl-C lets the trainer finish its step and save a checkpoint before
    `KeyboardInterrupt` is raised; a second Ctrl-C raises it at once.

    Runs of several processes, runs that save no checkpoints and threads other than the main one, which receives no
    signals, are ended at once, as usual. Where Ctrl-C is ignored, as in the background of a shell, it remains so.

    Args:
        trainer (`Trainer`): It trains in this context.
        say (`Callable`): Called with a line at the first Ctrl-C.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    is_interruptible = callable(previous_handler) and threading.current_thread() is threading.main_thread()
    if not is_interruptible or trainer.args.world_size > 1 or trainer.args.save_strategy == "no":
        yield
        return
    callback = CheckpointOnInterruptCallback()

    def request(signum, frame) -> None:
        signal.signal(signal.SIGINT, previous_handler)
        callback.requested = True
        say("interrupted: a checkpoint is saved after this step; Ctrl-C again ends the run without it")

    signal.signal(signal.SIGINT, request)
    trainer.add_callback(callback)
    try:
        yield
        if callback.requested:  # after the last step
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        trainer.remove_callback(callback)
