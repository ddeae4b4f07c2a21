"""
Benchmarks that are measured cell by cell: each finished cell is a line of a file of JSON lines, which says when, where
and with what it was measured, and is skipped by the next call. Reports are tables over such lines.
"""

import gzip
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

import torch
import transformers

from dflash_hf.decoding.packing import packed_weights
from dflash_hf.evaluation.measure import drafters_of_methods
from dflash_hf.evaluation.methods import DRAFT_TREES, PLAIN_CALL, WHOLE_BLOCKS
from dflash_hf.evaluation.report import EvalReport


def read_json_lines(path: Path) -> list[dict]:
    """The rows of a file of JSON lines, perhaps compressed by gzip."""
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Cells:
    """
    The finished cells of a benchmark.

    Args:
        path (`Path`): Of the file of JSON lines.
    """

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict]:
        """The finished cells; none without a file."""
        return read_json_lines(self.path) if self.path.exists() else []

    def has(self, cell: dict) -> bool:
        """Whether a cell with these values is finished."""
        return any(cell.items() <= row.items() for row in self.rows())

    def add(self, cell: dict, figures: dict) -> None:
        """Add a finished cell and print it."""
        row = {**cell, **figures, **circumstances()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    def grouped(self, *names: str) -> dict[tuple, list[dict]]:
        """The rows of each combination of values of these names, in the order of the file."""
        groups: dict[tuple, list[dict]] = {}
        for row in self.rows():
            groups.setdefault(tuple(row[name] for name in names), []).append(row)
        return groups

    def write_report(self, lines: list[str]) -> None:
        """Write Markdown beside the file."""
        self.path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def circumstances() -> dict:
    """When, where and with what a cell was measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def described(row: dict) -> str:
    """What a report says of a cell's circumstances."""
    versions = f"torch {row['torch']}, transformers {row['transformers']}"
    return f"{row['date']}, {row['commit']}, {versions}"


def capability() -> str:
    """The instructions that torch uses."""
    return torch.backends.cpu.get_cpu_capability()


def speeds_of(report: EvalReport) -> dict[str, float | None]:
    """Speeds of decoding, after the prefill."""
    plain_call = report.methods[PLAIN_CALL]
    return {
        "over_target": plain_call.decode_speedup,
        "over_packed_target": plain_call.decode_speedup_over_packed,
        "blocks_over_packed_target": report.methods[WHOLE_BLOCKS].decode_speedup_over_packed,
    }


def acceptance_lengths(
    target, draft, prompts: Sequence[Sequence[int]], max_new_tokens: int, rows: int = 8
) -> dict[str, list[int]]:
    """
    Tokens committed by each verification in whole blocks and in draft trees; tau is their mean. Several prompts are
    decoded at a time, greedily and with packed weights, so that no speed can be read from this.

    Args:
        prompts (`Sequence[Sequence[int]]`): Prompt ids.
        rows (`int`): Prompts in a batch, padded on the left.

    Returns:
        `dict[str, list[int]]`: `blocks` and `trees`.
    """
    drafters = drafters_of_methods(draft)
    lengths: dict[str, list[int]] = {"blocks": [], "trees": []}
    with packed_weights(target, draft):
        for name, method in (("blocks", WHOLE_BLOCKS), ("trees", DRAFT_TREES)):
            for start in range(0, len(prompts), rows):
                output = target.generate(
                    **padded(prompts[start : start + rows]),
                    assistant_model=drafters[method],
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    return_dict_in_generate=True,
                )
                for lengths_of_row in output.acceptance_lengths:
                    lengths[name] += lengths_of_row
    return lengths


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Prompt ids as a batch `[R, S]` with padding on the left, and its mask."""
    length = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), length, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(prompts):
        input_ids[row, length - len(ids) :] = torch.tensor(ids)
        mask[row, length - len(ids) :] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return lines
