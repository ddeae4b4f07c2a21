"""
`dflash env`: what a bug report should say about the machine.

    dflash env
    dflash env --json
    dflash env --forget
"""

import contextlib
import os
import platform
import statistics
import sys
from importlib import metadata

from dflash_hf.modeling.remembered_dflash import read, remembered
from dflash_hf.terminal import Outcome, is_secret


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
    what = "delete what is stored about this machine: costs of rounds, targets"
    parser.add_argument("--forget", action="store_true", help=what)


def run(arguments, echo) -> Outcome:
    facts: dict[str, object] = {"python": platform.python_version(), "platform": platform.platform()}
    facts["processors"] = os.cpu_count()
    for name in _PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = None
    facts["devices"] = _devices()
    facts["executable"] = sys.executable
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES):
            facts[name] = "(set)" if is_secret(name) else os.environ[name]
    for name, value in facts.items():
        echo(f"{name:18} {'not installed' if value is None else value}")
    facts["costs"] = _costs(echo)
    if arguments.forget:
        files = [path for kind in ("costs", "targets") for path in remembered(kind)]
        for path in files:
            path.unlink(missing_ok=True)
        echo(f"{len(files)} files deleted")
    return Outcome(facts=facts)


def _costs(echo) -> list[dict]:
    """The cost of rounds here, from which sizes are chosen: medians by the number of tokens verified."""
    tables = []
    for path in remembered("costs"):
        table, lines = read(path), []
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # a damaged file is ignored
            key = table["key"]
            parts = [key[name] for name in ("target", "drafter", "dtype", "device")]
            parts += [f"{key['threads']} threads"] * bool(key["threads"]) + ["compiled"] * bool(key["compiled"])
            lines.append(f"{'costs of rounds':18} {', '.join(parts)}: {path}")
            for place, known in table["found"].items():
                rows, bucket = map(int, place.split())
                works = [(*work.split(), 1000 * statistics.median(seconds)) for work, seconds in known.items()]
                sizes = sorted((made, int(size), ms) for size, made, ms in works)
                shown = ", ".join(f"{size} {made} {ms:.1f}" for made, size, ms in sizes)
                lines.append(f"{'':18} {rows} row(s), up to {2**bucket} tokens, ms by tokens: {shown}")
            tables.append({"file": str(path), **table})
        for line in lines:
            echo(line)
    return tables


def _devices() -> str:
    try:
        import torch
    except Exception as error:  # a broken installation is what the report is about
        return f"torch cannot be imported: {error!r}"
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(cards) or ("mps" if torch.backends.mps.is_available() else "cpu")
