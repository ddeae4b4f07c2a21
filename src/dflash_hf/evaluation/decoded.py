"""
Answers of an evaluation, and the file in which they outlive an interruption.

The life of an answer. `evaluate` decodes a prompt by all methods in turn, which gives a *record*: the [`Decoded`] of
each method. The record goes into the [`ProgressFile`] of the process; after all runs those of all processes are
gathered, and the report's figures are computed from them (`figures.py`). `save_report` removes the files.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from dflash_hf._io.files import locked


_FILE_NAME = "eval_progress.rank{}.jsonl"


@dataclass
class Decoded:
    """
    An answer of a method.

    Args:
        ids (`list[int]`): The new tokens.
        seconds (`float`): Time of the call.
        prefill_seconds (`float`, *optional*): Until the first new token; `None` for functions, whose tokens are not
            seen.
        forwards (`int`): Forward passes of the target.
        acceptance_lengths (`list[int]`): Tokens committed by each verification; none without a DFlash drafter.
        draft_sizes (`list[int]`, *optional*): Tokens verified by each round, if sizes were chosen round by round.
    """

    ids: list[int]
    seconds: float
    prefill_seconds: float | None
    forwards: int
    acceptance_lengths: list[int]
    draft_sizes: list[int] | None = None

    @property
    def decode_seconds_per_token(self) -> float | None:
        """
        The time after the first new token, divided by all new tokens, as the reference implementation does; `None` if
        the first token's time is unknown or no token follows it.
        """
        if self.prefill_seconds is None or len(self.ids) < 2:
            return None
        return (self.seconds - self.prefill_seconds) / len(self.ids)


Record: TypeAlias = dict[str, Decoded]  # the answers to a prompt in a run, by method
Records: TypeAlias = dict[tuple[int, int], Record]  # by run and prompt
DecodedRuns: TypeAlias = list[dict[str, list[Decoded]]]  # `[run][method]` has one answer for each prompt


def runs_of_records(records: Records, runs: int, num_prompts: int) -> DecodedRuns:
    """The answers of all runs, in the order of the prompts."""
    decoded: DecodedRuns = []
    for run in range(runs):
        methods = records[run, 0]
        decoded.append({method: [records[run, i][method] for i in range(num_prompts)] for method in methods})
    return decoded


class ProgressFile:
    """
    The records of a process, one a line, each with a digest of what it depends on: models, prompts and settings.

    Args:
        path (`Path`): The file.
        key (`str`): The digest.
    """

    def __init__(self, path: Path, key: str):
        self.path = path
        self.key = key

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, rank: int, key: str) -> Iterator["ProgressFile"]:
        """
        The file of a rank, which no other process can write meanwhile. A line that was cut by an interruption is
        removed.

        Raises:
            `ValueError`: another process evaluates into the same folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _FILE_NAME.format(rank)
        with locked(path):
            if path.exists():
                content = path.read_bytes()
                complete = content[: content.rfind(b"\n") + 1]
                if complete != content:
                    with path.open("r+b") as file:
                        file.truncate(len(complete))
            yield cls(path, key)

    def append(self, run: int, prompt: int, record: Record) -> None:
        """Add a record; it is on its way to the disk when this returns."""
        answers = {method: asdict(answer) for method, answer in record.items()}
        line = json.dumps({"key": self.key, "run": run, "prompt": prompt, "answers": answers})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_progress(folder: Path, key: str) -> Records:
    """The records in a folder that have this key, of all ranks: there may have been more of them or fewer."""
    records: Records = {}
    for path in sorted(folder.glob(_FILE_NAME.format("*"))):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                values = json.loads(line)
            except ValueError:  # cut by an interruption; its prompt is decoded again
                continue
            if values["key"] == key:
                answers = {method: Decoded(**answer) for method, answer in values["answers"].items()}
                records[values["run"], values["prompt"]] = answers
    return records


def remove_progress(folder: Path) -> None:
    """Remove the records in a folder: its report is written."""
    for path in folder.glob(_FILE_NAME.format("*")):
        path.unlink()
