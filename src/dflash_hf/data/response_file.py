"""JSON Lines files that grow by whole lines and survive a kill at any moment; the responses in one."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dflash_hf.data.messages import tools_of
from dflash_hf.files import differences, digest_of, lock, read_json, write_json


SETTINGS = ".settings.json"  # added to the file's name


class LineFile:
    """
    A JSON Lines file with one writer. A line is there whole or not at all: [`repair`] cuts off what a kill has left.

    Args:
        path (`Path`): The file; created if it does not exist.

    Raises:
        `ValueError`: another process writes it.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab+")
        try:
            lock(self.file, path)
        except BaseException:
            self.file.close()
            raise

    def lines(self) -> Iterator[bytes]:
        """The lines that are whole."""
        self.file.seek(0)
        return (line for line in self.file if line.endswith(b"\n"))

    def repair(self) -> int:
        """Cut off a line that was never finished; returns its bytes."""
        whole = sum(map(len, self.lines()))
        half = self.file.seek(0, 2) - whole
        self.file.truncate(whole)
        return half

    def write_rows(self, rows: list[dict]) -> None:
        """Add rows; once this returns, they outlive the process."""
        # "?" for half a surrogate pair: UTF-8 has none, and readers of the file reject it even if it is escaped.
        lines = [json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n" for row in rows]
        self.file.write(b"".join(lines))
        self.file.flush()

    def close(self) -> None:
        """Let others write."""
        self.file.close()


class ResponseFile(LineFile):
    """
    Responses by row number. Opening the file repairs a half-written last line and reads the finished rows.

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
        super().__init__(path)
        self.finished: dict[int, str] = {}
        self.notes = Path(f"{path}{SETTINGS}")
        try:
            self.settings = read_json(self.notes) if path.stat().st_size and self.notes.exists() else {}
            self._read()
            if path.stat().st_size and not (self.finished or self.notes.exists()):  # a kill leaves the settings
                raise ValueError(f"{path} is no file of responses; choose another output.")
            if check is not None:
                check(path)
            self.settle(settings)  # only next to a valid response file
            self.repaired = self.repair()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

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

    def _read(self) -> None:
        for number, line in enumerate(self.lines(), start=1):
            try:
                row = json.loads(line)
                if row["row"] in self.finished:
                    raise ValueError(f"row {row['row']} is in an earlier line")
                self.finished[row["row"]] = digest_of(question_in(row))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"Line {number} of {self.path} is not a response with its `row` ({error!r}); remove that line, or "
                    "choose another output."
                ) from error

    def write_rows(self, rows: list[dict]) -> None:
        """Add responses."""
        super().write_rows(rows)
        for row in rows:
            self.finished[row["row"]] = digest_of(question_in(row))


def question_in(row: Mapping) -> list:
    """The prompt and tools that a response belongs to."""
    return [row["prompt"] if "prompt" in row else row["messages"][:-1], tools_of(row)]
