"""What each part of a run is told, and how it says that it cannot run."""

from collections.abc import Callable
from dataclasses import dataclass


class LeftOut(Exception):
    """Why a part cannot run here."""


@dataclass(frozen=True)
class Setting:
    """
    Args:
        device (`str`): Of the models: `"cuda"` or `"cpu"`.
        is_tiny (`bool`): Small shapes and short texts, as for a dry run.
        seconds (`float`): After which the part is ended.
        add (`Callable`): `add(what, **figures)` writes a line of the report.
        accelerator (`PretendAccelerator`, *optional*): That stands for `"cuda"`.
    """

    device: str
    is_tiny: bool
    seconds: float
    add: Callable[..., None]
    accelerator: object = None

    @property
    def is_gpu(self) -> bool:
        """Whether this is a real one."""
        return self.device == "cuda" and self.accelerator is None

    def need_gpu(self, purpose: str) -> None:
        """
        Raises:
            [`LeftOut`]: the device is no real GPU.
        """
        if not self.is_gpu:
            raise LeftOut(f"{purpose} needs a GPU")
