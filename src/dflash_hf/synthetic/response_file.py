"""A JSON Lines file of numbered rows, written line by line, which survives a kill at any moment."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from dflash_hf._io.files import differences, locked, read_json, write_json
from dflash_hf.data.sources import SETTINGS_SUFFIX


class ResponseFile:
    """
    Rows by their numbers, with one writer. Opening the file removes an incomplete last line, which a kill leaves, and
    reads the finished rows.

    `NAME.settings.json`, next to it, holds the settings of the rows; other settings are rejected.

    Args:
        path (`Path`): The file; created if it does not exist.
        settings (`dict`): What must be equal for the rows to belong together.
        parse_row (`Callable`): Returns what is kept of a row; raises if it is not a row of such a file.
        say (`Callable`): Called with a line about what was cut off.

    Attributes:
        finished (`dict`): What is kept of the finished rows, by number.

    Raises:
        `ValueError`: made with other settings, damaged in the middle, or being written by another process.
    """

    def __init__(self, path: Path, settings: dict, parse_row: Callable[[dict], object], say: Callable[[str], None]):
        self.path = path
        self.settings_path = Path(f"{path}{SETTINGS_SUFFIX}")
        self.parse_row = parse_row
        self.finished: dict[int, object] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(locked(path))
            self.file = stack.enter_context(path.open("ab+"))
            size = path.stat().st_size
            has_settings = self.settings_path.exists()
            self.settings = read_json(self.settings_path) if size and has_settings else {}
            complete_bytes = self._read()
            if size and not self.finished and not has_settings:  # after a kill there would be settings
                raise ValueError(f"{path} is not a file of such rows; choose another output.")
            self.add_settings(settings)  # only next to a valid response file
            self.file.truncate(complete_bytes)
            if size > complete_bytes:
                say(f"removed an incomplete line of {size - complete_bytes} bytes at the end of {path}")
            self.stack = stack.pop_all()  # the file and its lock stay open

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stack.close()

    def add_settings(self, settings: dict) -> None:
        """
        Add settings that were not known when the file was opened.

        Raises:
            `ValueError`: the file was started with other settings; the message names them.
        """
        settings = json.loads(json.dumps(settings))
        other_settings = differences(self.settings, settings)
        if other_settings:
            raise ValueError(
                f"{self.path} was started with {'; '.join(other_settings)}; use the same settings, or choose another "
                "output."
            )
        self.settings |= settings
        write_json(self.settings_path, self.settings)

    def _read(self) -> int:
        """Fill `finished` from the file; returns the bytes of its complete lines."""
        self.file.seek(0)
        size = 0
        for number, line in enumerate(self.file, start=1):
            if not line.endswith(b"\n"):
                break
            size += len(line)
            try:
                row = json.loads(line)
                if row["row"] in self.finished:
                    raise ValueError(f"row {row['row']} is in an earlier line")
                self.finished[row["row"]] = self.parse_row(row)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"Line {number} of {self.path} is not a row of such a file ({error!r}); remove that line, or "
                    "choose another output."
                ) from error
        return size

    def write_row(self, row: dict) -> None:
        """Add a row; once this returns, it outlives the process."""
        # "?" for half a surrogate pair: UTF-8 has none, and readers of the file reject it even if it is escaped.
        self.file.write(json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n")
        self.file.flush()
        self.finished[row["row"]] = self.parse_row(row)
