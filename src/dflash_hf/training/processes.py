"""Work of the first process, which the others wait for."""

from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list


def in_first_process(work: Callable[[], Any]) -> Any:
    """The result of a function that the first process calls, or the error that it raises, in every process."""
    outcome: list = [None, None]
    if PartialState().is_main_process:
        try:
            outcome[0] = work()
        except Exception as error:  # the others wait for the outcome
            outcome[1] = error
    result, failure = broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    return result
