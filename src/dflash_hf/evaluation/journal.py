"""What has been decoded already, kept line by line, so that an evaluation that is killed goes on where it was."""

import json
from pathlib import Path

from dflash_hf.files import differences, lock


JOURNAL_FILE = "eval_records.jsonl"


class Journal:
    """
    A file whose first line says what is evaluated, and each further one what was decoded of a prompt in a run.

    A line is there whole or not at all: one that a kill has cut off is written again. As long as the journal lives, no
    other process writes there.

    Args:
        path (`str` or `Path`): The file; made by [`begin`].
        what (`dict`): What decides the outcome: names, digests of weights, limits.

    Raises:
        `ValueError`: the file is another evaluation's, which says what differs; damaged; or another process's.
    """

    def __init__(self, path: str | Path, what: dict):
        self.path, self.what = Path(path), json.loads(json.dumps(what))
        self.prompts: list[list[int]] | None = None
        self.records: dict[tuple[int, int], dict] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._held = self.path.open("ab")
        lock(self._held, self.path)
        lines = self.path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            return
        try:
            first, *records = map(json.loads, whole)
            before, self.prompts = first["what"], first["prompts"]
            self.records = {(one["run"], one["prompt"]): one["decoded"] for one in records}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is damaged ({error!r}): delete it to begin anew.") from error
        if changed := differences(before, self.what):
            raise ValueError(
                f"{self.path} was begun with {'; '.join(changed)}: go on with the same arguments, or delete it to "
                "begin anew."
            )
        if len(whole) < len(lines):
            with self.path.open("r+b") as file:
                file.truncate(sum(map(len, whole)))

    def begin(self, prompts: list[list[int]]) -> None:
        """Write the first line."""
        self.prompts = prompts
        self.path.write_text(json.dumps({"what": self.what, "prompts": prompts}) + "\n", encoding="utf-8")

    def add(self, run: int, prompt: int, decoded: dict) -> None:
        """Write what every method made of a prompt."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": run, "prompt": prompt, "decoded": decoded}) + "\n")
        self.records[run, prompt] = decoded
