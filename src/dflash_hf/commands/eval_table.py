"""
The part of `dflash eval` that measures the paper's sets one after the other, and writes them as a table.

The folder of the table has the report of each set, which is not measured again, and `table_settings.json`: what all
of them were measured with. Another command for the same folder must agree with it.
"""

import argparse
import json
from argparse import Namespace
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from dflash_hf._io.errors import UsageError
from dflash_hf._io.names import REPORT_FILE
from dflash_hf._io.terminal import Outcome, note
from dflash_hf.commands import shared
from dflash_hf.commands.pair import NamedPair
from dflash_hf.evaluation.sets import set_name, without_set_name


SETTINGS_FILE = "table_settings.json"
TABLE_RUNS = 1  # of the published protocol
# Options that a table decides itself, or that only a single measurement has.
_NOT_OF_TABLES = (
    "data",
    "split",
    "temperature",
    "prompt_lookup",
    "mtp",
    "tree_nodes",
    "raw",
    "server",
    "compare",
    "pretend_tau",
    "context",
)
# What all sets of a table are measured with.
_SETTINGS = (
    "target",
    "draft",
    "revision",
    "draft_revision",
    "prompts",
    "max_new_tokens",
    "runs",
    "block_size",
    "thinking",
    "template_args",
    "dtype",
    "packed",
    "compile",
    "cuda_graphs",
    "seed",
)


def add_table_arguments(parser) -> None:
    """Add the options about a table."""
    table = "paper: its sets at T = 0 and 1 beside its figures; --sets NAME ..."
    parser.add_argument("--table", choices=("paper",), metavar="NAME", help=table)
    parser.add_argument("--sets", nargs="+", metavar="NAME", help=argparse.SUPPRESS)


class _LoadedPair(NamedPair):
    """A pair that is loaded once, for all sets."""

    @cached_property
    def _models(self) -> tuple:
        return super().draft(), super().target()

    def draft(self):
        return self._models[0]

    def target(self):
        return self._models[1]


def run_table(arguments, ranks, echo, measure: Callable) -> Outcome:
    """
    Measure the sets that have no report yet, and `echo` and write the table.

    Args:
        measure (`Callable`): Measures the data of arguments with a pair, and writes the report; called with arguments,
            pair and processes.
    """
    from dflash_hf.evaluation.paper_table import TEMPERATURES, markdown_lines, report_folder, table_of

    chosen = _sets(arguments)
    arguments.runs = arguments.runs or TABLE_RUNS
    folder = arguments.output
    _check_settings(arguments, chosen, ranks)
    pair = _LoadedPair(arguments)
    planned = [(temperature, data) for temperature in TEMPERATURES for data in chosen]
    wrong = False
    for number, (temperature, data) in enumerate(planned, start=1):
        output = report_folder(folder, data, temperature)
        is_finished = ranks.from_main((output / REPORT_FILE).exists())
        shown = f"{number} of {len(planned)}: {set_name(data)} at temperature {temperature:g}"
        if ranks.is_main:
            note(f"{shown}{', measured already' if is_finished else ''}")
        if is_finished:
            continue
        of_set = Namespace(**{**vars(arguments), "data": data, "temperature": temperature, "output": output})
        report = measure(of_set, pair, ranks)
        wrong = wrong or report.is_wrong
    if not ranks.is_main:
        return Outcome(1 if wrong else 0)
    table = table_of(folder, arguments.target_name or arguments.target, Path(arguments.draft).name)
    for line in markdown_lines(table):
        echo(line)
    for path in table.save(folder):
        echo(f"written           {path}")
    return Outcome(1 if table.is_wrong else 0, json.loads(table.to_json()))


def _sets(arguments) -> list[str]:
    """
    The sets to measure, as `NAME` or `NAME=FILE`.

    Raises:
        `UsageError`: options are missing or useless, or a set is not one of the paper's.
    """
    from dflash_hf.data.sources import check_files
    from dflash_hf.evaluation.paper_table import PAPER_SETS

    unread = shared.options_given(arguments, _NOT_OF_TABLES)
    if unread:
        raise UsageError(f"--table measures its own sets at temperature 0 and 1: leave out {', '.join(unread)}.")
    missing = [f"--{name}" for name in ("target", "draft", "output") if getattr(arguments, name) is None]
    if missing:
        raise UsageError(f"--table needs {', '.join(missing)}: a pair, and a folder for the report of each set.")
    chosen = arguments.sets or list(PAPER_SETS)
    names = [data.partition("=")[0] for data in chosen]
    for name in names:
        if name not in PAPER_SETS:
            raise UsageError(f"--sets {name} is not in the paper's table; choose from {', '.join(PAPER_SETS)}.")
        if names.count(name) > 1:
            raise UsageError(f"--sets names {name} {names.count(name)} times; name it once.")
    check_files("sets", [without_set_name(data) for data in chosen])
    return chosen


def _check_settings(arguments, chosen: list[str], ranks) -> None:
    """
    Write what the sets of this table are measured with, or compare it with what is written.

    Raises:
        `ValueError`: sets in the folder were measured with other settings.
    """
    from dflash_hf._io.files import differences, digest_of_file, locked, read_json, write_json

    settings = {name: getattr(arguments, name) for name in _SETTINGS}
    settings["processes"] = ranks.size
    for data in chosen:
        name, _, file = data.partition("=")
        settings[f"rows of {name}"] = digest_of_file(Path(file)) if file else "the Hub's"
    path = arguments.output / SETTINGS_FILE
    arguments.output.mkdir(parents=True, exist_ok=True)
    if not ranks.is_main:
        return
    with locked(path):
        written = read_json(path) if path.exists() else {}
        changed = differences(written, settings)
        if changed:
            raise ValueError(
                f"output={arguments.output} has sets that were measured otherwise ({'; '.join(changed)}); choose "
                "another folder, or the same settings."
            )
        write_json(path, {**written, **settings})
