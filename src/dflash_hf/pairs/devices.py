"""The device that models are loaded on, and the dtype that they are loaded in."""

import torch
from transformers.utils import logging

from dflash_hf.decoding.cpu_dtypes import is_emulated


_logger = logging.get_logger(__name__)


def available_device(name: str | None = None) -> str:
    """
    A device that this machine has.

    Args:
        name (`str`, *optional*): `"cpu"`, `"cuda"`, `"cuda:1"`, `"mps"`, ..., or `"auto"`, by which transformers
            distributes a model over all devices. Default: the accelerator that torch finds, else the CPU. A training
            runs on the same.

    Raises:
        `ValueError`: this machine does not have the device.
    """
    kind = None
    number = 0  # of accelerators
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        number = torch.accelerator.device_count()
    if name is None:
        return kind or "cpu"
    if name == "auto":
        return name
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is not a device of this torch; use `cpu`, or leave it out.") from error
    if device.type == "cpu" or (device.type == kind and (device.index or 0) < number):
        return name
    has = f"no {device.type} device"
    if device.type == kind:
        has = f"only {kind}:0" if number == 1 else f"{kind}:0 to {kind}:{number - 1}"
    raise ValueError(f"device={name}: this machine has {has}; use `cpu`, or leave it out.")


def dtype_to_load(dtype: str, device: str | torch.device) -> str:
    """
    The dtype for `from_pretrained`, which is logged once if it is not `dtype`.

    Args:
        dtype (`str`): `"auto"` for the checkpoint's dtype, but float32 on a processor without hardware support for
            products in bf16; every other dtype is returned as it is.
        device (`str` or `torch.device`): The device that the model is loaded on.
    """
    if str(device) == "auto":
        on_cpu = not torch.accelerator.is_available()
    else:
        on_cpu = torch.device(device).type == "cpu"
    if dtype != "auto" or not on_cpu or not is_emulated(torch.bfloat16):
        return dtype
    _logger.warning_once(
        "float32: this processor has no hardware support for bf16 (dtype bfloat16 takes half the memory)"
    )
    return "float32"
