"""Types for `type=` of `add_argument`: functions that parse and check the value of an option."""

import argparse
import json
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_hf._io.errors import UsageError
from dflash_hf._io.names import SHORT_DTYPES


@dataclass(frozen=True)
class Number:
    """
    Parses and checks a number.

    Args:
        kind (`type`): `int` or `float`.
        is_valid (`Callable`): Whether a number is valid.
        rule (`str`): What the error says after a number that is not.
    """

    kind: type
    is_valid: Callable[[float], bool]
    rule: str

    @property
    def metavar(self) -> str:
        """What help calls the number."""
        return "N" if self.kind is int else "X"

    def __call__(self, text: str) -> Any:
        try:
            value = self.kind(text)
        except ValueError as error:
            whole = "whole " if self.kind is int else ""
            raise argparse.ArgumentTypeError(f"invalid value {text!r}; give a {whole}number") from error
        if not self.is_valid(value):
            raise argparse.ArgumentTypeError(f"{text} {self.rule}")
        return value


_TEMPERATURE_RULE = "must be 0, for greedy decoding, or a positive number such as 0.7"
positive = Number(int, lambda value: value >= 1, "must be at least 1")
count = Number(int, lambda value: value >= 0, "must not be negative")
layer_id = Number(int, lambda value: value >= -1, "is not a layer: they count from 0, and -1 is the embedding")
seed = Number(int, lambda value: 0 <= value < 2**32, f"is not a valid seed: 0 to {2**32 - 1}")
token_id = Number(int, lambda value: value >= 0, "is not a token id: ids start at 0")
port = Number(int, lambda value: 0 <= value < 65536, "is not a port: 0 to 65535")
temperature = Number(float, lambda value: 0 <= value < math.inf, _TEMPERATURE_RULE)
probability = Number(float, lambda value: 0 < value <= 1, "must be above 0 and at most 1")
amount = Number(float, lambda value: 0 < value < math.inf, "must be a positive number")


def dtype(text: str) -> str:
    """The full name of a dtype, which argparse then compares with the option's choices."""
    return SHORT_DTYPES.get(text, text)


def device(text: str) -> str:
    """The name of a device; [`~dflash_hf.pairs.devices.available_device`], which needs torch, checks it."""
    if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu|npu|hpu)(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; use cpu, cuda, cuda:1, mps, ... or auto")
    return text


def readable_file(text: str) -> Path:
    """An existing, readable file."""
    path = Path(text).expanduser()
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error.strerror}") from error


def output_path(text: str) -> Path:
    """A writable file or folder. It is checked when arguments are parsed, and not after hours of work."""
    path = Path(text).expanduser()
    try:
        check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror or error}") from error
    return path


def output_lines(text: str) -> Path:
    """A writable JSON Lines file, which need not exist yet; `--data` recognises files by their endings."""
    path = output_path(text)
    if path.is_dir() or path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        raise argparse.ArgumentTypeError(f"{text} must be a file that ends in .jsonl, by which --data recognises it")
    return path


def output_folder(text: str) -> Path:
    """A writable folder, which need not exist yet."""
    path = output_path(text)
    if path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is a file; name a folder")
    return path


# What help calls a value, by its type.
METAVARS: dict[object, str] = {
    readable_file: "FILE",
    output_path: "FILE",
    output_lines: "FILE",
    output_folder: "FOLDER",
}


def check_writable(path: Path) -> None:
    """
    Check that `path` can be written, or created; nothing is left behind.

    Raises:
        `OSError`: it cannot be written.
    """
    if path.is_file():
        with path.open("ab"):
            return
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass


def template_arguments(text: str | None) -> dict | None:
    """
    The value of `--template-args`.

    Raises:
        `UsageError`: it is not a JSON object.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        value = error
    if not isinstance(value, dict):
        remedy = "write it in quotes, such as '{\"enable_thinking\": false}'"
        raise UsageError(f"--template-args {text} is not a JSON object; {remedy}.")
    return value
