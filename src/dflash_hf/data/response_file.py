"""A JSON Lines file of responses that grows by whole lines and survives a kill at any moment."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from dflash_hf.data.messages import tools_of
from dflash_hf.files import differences, digest_of, lock, read_json, write_json


SETTINGS = ".settings.json"  # added to the file's name


class ResponseFile:
    """
    Responses by row number, with one writer. A line is there whole or not at all: opening the file cuts off what a
    kill has left and reads the finished rows.

    `NAME.settings.json`, next to it, has the settings of the responses; other settings are rejected.

    Args:
        path (`Path`): The file; created if it does not exist.
        settings (`dict`): What must be equal for the responses to belong together.
        check (`Callable`, *optional*): Called with the path before anything is written; raises if it is another file.

    Attributes:
        finished (`dict[int, str]`): Rows that have a response, and a digest of their prompts.
        repaired (`int`): Bytes of a half-written line that were cut off.

    Raises:
        `ValueError`: made with other settings, damaged in the middle, or being written by another process.
    """

    def __init__(self, path: Path, settings: dict, check: Callable[[Path], object] | None = None):
        self.path, self.notes = path, Path(f"{path}{SETTINGS}")
        self.finished: dict[int, str] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab+")
        try:
            lock(self.file, path)
            size = path.stat().st_size
            self.settings = read_json(self.notes) if size and self.notes.exists() else {}
            whole = self._read()
            if size and not (self.finished or self.notes.exists()):  # a kill leaves the settings
                raise ValueError(f"{path} is no file of responses; choose another output.")
            if check is not None:
                check(path)
            self.settle(settings)  # only next to a valid response file
            self.repaired = size - whole
            self.file.truncate(whole)
        except BaseException:
            self.file.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.file.close()

    def settle(self, settings: dict) -> None:
        """
        Add settings that were not known before.

        Raises:
            `ValueError`: the file was started with other settings; the message names them.
        """
        settings = json.loads(json.dumps(settings))
        if others := differences(self.settings, settings):
            raise ValueError(
                f"{self.path} was started with {'; '.join(others)}; use the same settings, or choose another output."
            )
        self.settings |= settings
        write_json(self.notes, self.settings)

    def _read(self) -> int:
        """Note the finished rows; returns the bytes of whole lines."""
        self.file.seek(0)
        whole = 0
        for number, line in enumerate(self.file, start=1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                row = json.loads(line)
                if row["row"] in self.finished:
                    raise ValueError(f"row {row['row']} is in an earlier line")
                self.finished[row["row"]] = _question_in(row)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"Line {number} of {self.path} is not a response with its `row` ({error!r}); remove that line, or "
                    "choose another output."
                ) from error
        return whole

    def write_row(self, row: dict) -> None:
        """Add a response; once this returns, it outlives the process."""
        # "?" for half a surrogate pair: UTF-8 has none, and readers of the file reject it even if it is escaped.
        self.file.write(json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n")
        self.file.flush()
        self.finished[row["row"]] = _question_in(row)


def _question_in(row: Mapping) -> str:
    """The digest of what a response answers; rows before 0.2 have none."""
    prompt = row["prompt"] if "prompt" in row else row["messages"][:-1]
    return row.get("question") or digest_of([prompt, tools_of(row)])
