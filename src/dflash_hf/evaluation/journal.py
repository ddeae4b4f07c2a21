"""Finished answers, line by line, so that an interrupted evaluation can be resumed."""

import json
from pathlib import Path

from dflash_hf.data.response_file import LineFile
from dflash_hf.files import differences


JOURNAL_FILE = "eval_records.jsonl"


class Journal(LineFile):
    """
    A file whose first line says what is evaluated, and each further one what was decoded of a prompt in a run.

    As long as the journal lives, no other process writes there.

    Args:
        path (`str` or `Path`): The file; made by [`begin`].
        what (`dict`): What decides the outcome: names, digests of weights, limits.

    Raises:
        `ValueError`: the file is another evaluation's, which says what differs; damaged; or another process's.
    """

    def __init__(self, path: str | Path, what: dict):
        super().__init__(Path(path))
        self.what = json.loads(json.dumps(what))
        self.prompts: list[list[int]] | None = None
        self.records: dict[tuple[int, int], dict] = {}
        whole = list(self.lines())
        if not whole:
            return
        try:
            first, *records = map(json.loads, whole)
            before, self.prompts = first["what"], first["prompts"]
            self.records = {(one["run"], one["prompt"]): one["decoded"] for one in records}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is damaged ({error!r}): delete it to start over.") from error
        if changed := differences(before, self.what):
            raise ValueError(
                f"{self.path} was started with {'; '.join(changed)}: use the same arguments, or delete it to "
                "begin anew."
            )
        self.repair()

    def begin(self, prompts: list[list[int]]) -> None:
        """Write the first line."""
        self.prompts = prompts
        self.file.truncate(0)
        self.append([{"what": self.what, "prompts": prompts}])

    def add(self, run: int, prompt: int, decoded: dict) -> None:
        """Write what every method made of a prompt."""
        self.append([{"run": run, "prompt": prompt, "decoded": decoded}])
        self.records[run, prompt] = decoded
