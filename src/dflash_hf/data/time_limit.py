"""A time limit for chat templates: Jinja has loops, and templates come from anywhere."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def time_limit(seconds: float, message: str) -> Iterator[None]:
    """
    End the block after this many seconds of CPU time. There is no limit outside the main thread, or if the system has
    no timer.

    Raises:
        `TimeoutError`: with the message.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        raise TimeoutError(message)

    before = signal.signal(signal.SIGVTALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, left)
        signal.signal(signal.SIGVTALRM, before)
