"""
`dflash env`: versions, devices and environment variables, for a bug report.

    dflash env
    dflash env --json
"""

import os
import platform
import sys
from importlib import metadata

from dflash_hf._io.errors import is_secret
from dflash_hf._io.terminal import Outcome


_PACKAGES = (
    "dflash-hf",
    "torch",
    "transformers",
    "huggingface-hub",
    "tokenizers",
    "safetensors",
    "accelerate",
    "datasets",
    "peft",
    "jinja2",
)
_VARIABLES = ("HF_", "DFLASH", "TRANSFORMERS_", "CUDA_VISIBLE", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "ACCELERATE_")


def add_arguments(parser) -> None:
    """This command has no options of its own."""


def run(arguments, echo) -> Outcome:
    facts: dict[str, object] = {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {"processors": os.cpu_count(), "executable": sys.executable, "devices": _devices()}
    installed = {}
    for distribution in metadata.distributions():
        if distribution.name:
            installed[distribution.name.lower().replace("_", "-")] = distribution.version
    facts |= {name: installed.get(name, "not installed") for name in _PACKAGES}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    facts |= {name: "(set)" if is_secret(name) else value for name, value in variables.items()}
    for name, value in facts.items():
        echo(f"{name:18} {value}")
    return Outcome(facts=facts)


def _devices() -> str:
    """The names of the GPUs, or the CPU and whether it has bf16 units."""
    try:
        import torch

        from dflash_hf.decoding.cpu_dtypes import is_emulated
    except Exception as error:  # a broken installation is what the report is about
        return f"torch or transformers cannot be imported: {error!r}"
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if cards:
        return ", ".join(cards)
    if torch.backends.mps.is_available():
        return "mps"
    if is_emulated(torch.bfloat16):
        return "cpu, without hardware support for bf16: float32 is faster"
    return "cpu, with hardware support for bf16"
