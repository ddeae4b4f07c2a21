"""
Runs the parts of `parts.py`, the most valuable first, each within its seconds, and writes down what they find.

    .gpu/run [--only PART ...] [--dry-run]

Every figure is printed at once and appended to `results.jsonl`; after each part `results.md` shows all of them as
tables. A part that fails is a line, not the end. The parts run in a process of their own, one after the other; where
one hangs, or ends the CUDA context, the next goes on in a new process.
"""

import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


# The functions of `parts.py` in their order, and the seconds after which each is ended.
SECONDS = {"machine": 30, "lossless": 60, "tests": 90, "smollm2": 90, "qwen3": 150, "stops": 60, "training": 120}
LEAST_SECONDS = 10  # a part that would get less is left out
STARTING = 60  # seconds that a process may take to import torch and transformers, before its first part


class Report:
    """
    Figures as they are found: lines of a file, and tables of all of them.

    Args:
        folder (`Path`): For `results.jsonl`, to which every process appends, and `results.md`.
        start (`float`): When the run began, by the monotonic clock, which all processes share.
    """

    def __init__(self, folder: Path, start: float):
        self.lines = folder / "results.jsonl"
        self.tables = folder / "results.md"
        self.start = start

    def add(self, part: str, what: str, **figures) -> None:
        """
        Print and append one line.

        Args:
            part (`str`): The part's name.
            what (`str`): What the figures are of.
            figures: Their names, with units, and values.
        """
        row = {"part": part, "what": what, **figures}
        shown = "  ".join(f"{name} {_shown(value)}" for name, value in figures.items())
        print(f"[{time.monotonic() - self.start:4.0f} s] {part}: {what}  {shown}", flush=True)
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict]:
        """All figures so far, of all processes. The last line may have been cut off with its process."""
        rows = []
        for line in self.lines.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def write_tables(self) -> None:
        """`results.md`: a table for each part, a column for each figure that a row of it has."""
        rows = self.rows()
        lines = ["# Results of `.gpu/run`"]
        for part in dict.fromkeys(row["part"] for row in rows):
            of_part = [row for row in rows if row["part"] == part]
            columns = list(dict.fromkeys(name for row in of_part for name in row if name != "part"))
            lines += ["", f"## {part}", "", _table_line(columns), _table_line(["---"] * len(columns))]
            lines += [_table_line([_shown(row.get(name, "")) for name in columns]) for row in of_part]
        self.tables.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shown(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("\n", " ").replace("|", "/")


def _table_line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Setting:
    """
    What every part is told.

    Args:
        device (`str`): Of the models, such as `"cuda"`.
        is_tiny (`bool`): Small shapes and short texts, as for a dry run.
        seconds (`float`): After which the part is ended.
        add (`Callable`): `add(what, **figures)` writes a line of the report.
    """

    device: str
    is_tiny: bool
    seconds: float
    add: Callable[..., None]


def work(report: Report, device: str, is_tiny: bool, parent) -> None:
    """
    A process that runs parts. Through the pipe it says that it has started, receives a part's name and seconds, and
    says after the part whether it can run others: not where the device no longer answers.
    """
    import parts

    parent.send(True)
    while True:
        name, seconds = parent.recv()
        add = functools.partial(report.add, name)
        is_healthy = True
        try:
            getattr(parts, name)(Setting(device, is_tiny, seconds, add))
        except parts.LeftOut as reason:
            add(f"left out: {reason}")
        except Exception as error:
            traceback.print_exc(limit=-4)
            add("FAILED", error=f"{type(error).__name__}: {str(error)[:300]}")
            is_healthy = parts.answers(device)
        sys.stdout.flush()
        parent.send(is_healthy)
        if not is_healthy:
            os._exit(0)  # without the destructors of a dead context


class Worker:
    """A process with [`work`], and the pipe to it."""

    def __init__(self, report: Report, device: str, is_tiny: bool):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(report, device, is_tiny, theirs), daemon=True)
        self.process.start()
        theirs.close()  # so that the pipe ends with the process
        self.has_started = False

    def run(self, name: str, deadline: float) -> bool:
        """
        Run a part, until `deadline` at the latest. Returns whether the process can run another.

        Raises:
            `TimeoutError`: it takes longer.
            `EOFError`: the process has ended.
        """
        if not self.has_started:
            self._answer(STARTING)
            self.has_started = True
        seconds = max(min(SECONDS[name], deadline - time.monotonic()), 0)
        self.pipe.send((name, seconds))
        return self._answer(seconds)

    def _answer(self, seconds: float) -> bool:
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"after {seconds:.0f} s")
        return self.pipe.recv()

    def end(self) -> int | None:
        """End the process, whatever it does. Returns its exit code."""
        self.process.join(1)
        self.process.kill()
        self.process.join()
        return self.process.exitcode


def run(names: list[str], report: Report, device: str, is_tiny: bool, deadline: float) -> None:
    """Run parts, in as many processes as that takes."""
    worker = None
    for name in names:
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            report.add(name, f"left out: {max(left, 0):.0f} s are left")
            report.write_tables()
            continue
        worker = worker or Worker(report, device, is_tiny)
        is_healthy = False
        try:
            is_healthy = worker.run(name, deadline)
        except TimeoutError as error:
            report.add(name, f"CUT {error}")
        except (EOFError, OSError):
            report.add(name, "FAILED", error=f"its process ended with exit code {worker.end()}")
        if not is_healthy:
            worker.end()
            worker = None
        report.write_tables()
    if worker is not None:
        worker.end()


def main() -> int:
    """The exit status: 1 if a text in fp32 is not the target's own, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECONDS), metavar="PART", help=", ".join(SECONDS))
    parser.add_argument("--seconds", type=float, default=480, help="for all parts together (default: %(default)s)")
    parser.add_argument("--device", help="default: cuda, in a dry run cpu")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on a CPU, to see that everything starts")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ".gpu/results"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    report = Report(arguments.output, start)
    report.lines.write_text("", encoding="utf-8")  # of an earlier run
    device = arguments.device or ("cpu" if arguments.dry_run else "cuda")
    run(arguments.only or list(SECONDS), report, device, arguments.dry_run, start + arguments.seconds)
    print(f"written to {report.lines} and {report.tables}")
    wrong = [row for row in report.rows() if row.get("same text") is False and row.get("dtype") == "float32"]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
