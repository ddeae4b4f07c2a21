"""Finished answers, line by line, so that an interrupted evaluation can be resumed."""

import json
from pathlib import Path

from dflash_hf.data.response_file import LineFile
from dflash_hf.files import differences


JOURNAL_FILE = "eval_records.jsonl"


class Journal(LineFile):
    """
    A file of one evaluation: the first line has its settings, every other line the answers to one prompt in one run.

    The file stays locked for other processes while the journal exists.

    Args:
        path (`str` or `Path`): The file; created by [`begin`].
        what (`dict`): Settings that determine the outcome: names, digests of weights, limits.

    Raises:
        `ValueError`: the file belongs to an evaluation with other settings (the message names them), is damaged, or is
            in use by another process.
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
                "start over."
            )
        self.repair()

    def begin(self, prompts: list[list[int]]) -> None:
        """Write the first line."""
        self.prompts = prompts
        self.file.truncate(0)
        self.write_rows([{"what": self.what, "prompts": prompts}])

    def add(self, run: int, prompt: int, decoded: dict) -> None:
        """Write the answers of all methods to a prompt."""
        self.write_rows([{"run": run, "prompt": prompt, "decoded": decoded}])
        self.records[run, prompt] = decoded
