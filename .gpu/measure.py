"""
Runs the parts of `parts.py`, what decides most first, each within its seconds, and writes down what they find.

    .gpu/run [--only PART ...] [--resume gpu.jsonl] [--output FOLDER]
    .gpu/run --dry-run [--pretend]

Every figure is printed at once and appended to `gpu.jsonl`; after each part, `gpu.md` shows all of them as tables. A
part that fails is a line, not the end. The parts run in a process of their own, one after the other; where one hangs,
or ends the CUDA context, the next goes on in a new process.

All parts together take longer than one run. `--resume` continues an earlier one, also on another machine: its figures
are kept, and the parts that it has done are not run again; those that failed come last.
"""

import argparse
import contextlib
import datetime
import functools
import inspect
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from setting import LeftOut, Setting


FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "examples" / "benchmarks" / "results"
# The functions of `parts.py` in their order, and the seconds after which each is ended.
SECONDS = {
    "machine": 30,
    "lossless": 60,
    "rounds": 120,
    "graphs": 90,
    "launches": 45,
    "waits": 45,
    "batch": 90,
    "contexts": 120,
    "static": 150,
    "tests": 90,
    "training": 150,
    "compiled": 180,
    "smollm2": 120,
    "attention": 60,
    "flash": 40,
}
ALWAYS = "machine"  # also in a run that resumes another, which may have been on another machine
PRETEND_SLOWDOWN = 20  # of a tiny model on the pretend accelerator: every part gets so many times its seconds
LEAST_SHARE = 0.5  # of its seconds: a part that would get less is left to the next run
STARTING = 60  # seconds that a process may take to import torch and transformers, before its first part


class Report:
    """
    Figures as they are found: lines of a file, and tables of all of them.

    A line is of one of three kinds: a figure has `what` and its values, `about` says what a part is, and `ended` how
    it ended: `done`, `failed`, `cut` (it took too long), `left out` (it cannot run here) or `no time`.

    Args:
        folder (`Path`): For `gpu.jsonl`, to which every process appends, and `gpu.md`.
        start (`float`): When the run began, by the monotonic clock, which all processes share.
    """

    def __init__(self, folder: Path, start: float):
        self.lines = folder / "gpu.jsonl"
        self.tables = folder / "gpu.md"
        self.start = start

    def begin(self, earlier: list[dict]) -> None:
        """Begin the file with the lines of an earlier run, or none."""
        self.lines.write_text("".join(json.dumps(row) + "\n" for row in earlier), encoding="utf-8")

    def add(self, part: str, what: str, **figures) -> None:
        """
        Print and append figures.

        Args:
            part (`str`): The part's name.
            what (`str`): What the figures are of.
            figures: Their names, with units, and values.
        """
        self._append({"part": part, "what": what, **figures})
        self._print(f"{part}: {what}", figures)

    def describe(self, part: str, about: str) -> None:
        """Append what a part measures."""
        self._append({"part": part, "about": " ".join(about.split())})

    def end(self, part: str, how: str, **details) -> None:
        """Print and append how a part ended, and write the tables."""
        self._append({"part": part, "ended": how, **details})
        self._print(f"{part} ended: {how}", details)
        self.write_tables()

    def _append(self, row: dict) -> None:
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _print(self, text: str, figures: dict) -> None:
        shown = "  ".join(f"{name} {_shown(value)}" for name, value in figures.items())
        print(f"[{time.monotonic() - self.start:4.0f} s] {text}  {shown}".rstrip(), flush=True)

    def rows(self) -> list[dict]:
        """All lines so far, of all processes."""
        return read_rows(self.lines)

    def write_tables(self) -> None:
        """`gpu.md`: a table for each part, with a column for each figure that a row of it has."""
        rows = self.rows()
        figures = [row for row in rows if "what" in row]
        cards = list(dict.fromkeys(row["card"] for row in figures if "card" in row))
        versions = [row for row in figures if row["what"] == "versions"]
        lines = [f"# Figures of {' and '.join(cards) or 'no device'}", ""]
        lines.append(f"`.gpu/run`, {datetime.date.today()}. Speed-ups are over the target alone, decoded eagerly.")
        for row in versions[-1:]:
            names = [f"{name} {row[name]}" for name in ("dflash_hf", "transformers", "torch", "cuda", "python")]
            lines.append(f"Versions: {', '.join(names)}.")
        lines += ["", *_table(list(_last_ends(rows).values()))]
        abouts = {row["part"]: row["about"] for row in rows if "about" in row}
        for part in dict.fromkeys(row["part"] for row in figures):
            lines += ["", f"## {part}", ""]
            if part in abouts:
                lines += [abouts[part], ""]
            lines += _table(
                [{name: row[name] for name in row if name != "part"} for row in figures if row["part"] == part]
            )
        self.tables.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_rows(file: Path) -> list[dict]:
    """The lines of a `gpu.jsonl`, without one that was cut off with its process."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _last_ends(rows: list[dict]) -> dict[str, dict]:
    """Part -> the line that says how it ended last."""
    return {row["part"]: row for row in rows if "ended" in row}


def parts_left(rows: list[dict]) -> list[str]:
    """The parts that an earlier run with these lines has left, those that failed last."""
    ends = {part: row["ended"] for part, row in _last_ends(rows).items()}
    failed = [name for name in SECONDS if ends.get(name) == "failed" and name != ALWAYS]
    done = [name for name in SECONDS if ends.get(name) == "done" and name != ALWAYS]
    return [name for name in SECONDS if name not in failed + done] + failed


def _table(rows: list[dict]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [_table_line(columns), _table_line(["---"] * len(columns))]
    return lines + [_table_line([_shown(row.get(name, "")) for name in columns]) for row in rows]


def _table_line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("\n", " ").replace("|", "/")


# ----------------------------------------------------------------------------------------------------------- processes


def work(report: Report, device: str, is_tiny: bool, is_pretend: bool, parent) -> None:
    """
    A process that runs parts. Through the pipe it says that it has started, receives a part's name and seconds, and
    says after the part whether it can run others: not where the device no longer answers.
    """
    import parts

    accelerator = None
    if is_pretend:
        from support.pretend import PretendAccelerator

        accelerator = PretendAccelerator(uncounted=("scripted_draft.py", "random_pairs.py"))
    with accelerator or contextlib.nullcontext():
        parent.send(True)
        while True:
            name, seconds = parent.recv()
            part = getattr(parts, name)
            report.describe(name, inspect.getdoc(part) or "")
            is_healthy = True
            start = time.monotonic()
            try:
                part(Setting(device, is_tiny, seconds, functools.partial(report.add, name), accelerator))
            except LeftOut as reason:
                report.end(name, "left out", reason=str(reason))
            except Exception as error:
                traceback.print_exc(limit=-4)
                report.end(name, "failed", error=f"{type(error).__name__}: {str(error)[:300]}")
                is_healthy = parts.answers(device)
            else:
                report.end(name, "done", seconds=round(time.monotonic() - start))
            sys.stdout.flush()
            parent.send(is_healthy)
            if not is_healthy:
                os._exit(0)  # without the destructors of a dead context


class Worker:
    """A process with [`work`], and the pipe to it."""

    def __init__(self, report: Report, device: str, is_tiny: bool, is_pretend: bool):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (report, device, is_tiny, is_pretend, theirs)
        self.process = context.Process(target=work, args=arguments, daemon=True)
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


def run(names: list[str], report: Report, device: str, is_tiny: bool, is_pretend: bool, deadline: float) -> None:
    """Run parts, in as many processes as that takes."""
    worker = None
    for name in names:
        left = deadline - time.monotonic()
        if left < LEAST_SHARE * SECONDS[name]:
            report.end(name, "no time", reason=f"{max(left, 0):.0f} s are left; it may take {SECONDS[name]}")
            continue
        worker = worker or Worker(report, device, is_tiny, is_pretend)
        is_healthy = False
        try:
            is_healthy = worker.run(name, deadline)
        except TimeoutError as error:
            report.end(name, "cut", reason=str(error))
        except (EOFError, OSError):
            report.end(name, "failed", error=f"its process ended with exit code {worker.end()}")
        if not is_healthy:
            worker.end()
            worker = None
    if worker is not None:
        worker.end()


def main() -> int:
    """The exit status: 1 if a text in fp32 is not the target's own, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECONDS), metavar="PART", help=", ".join(SECONDS))
    parser.add_argument("--resume", type=Path, metavar="FILE", help="the gpu.jsonl of an earlier run")
    parser.add_argument("--seconds", type=float, default=480, help="for all parts together (default: %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda, in a dry run cpu")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on a CPU, to see that everything starts")
    parser.add_argument("--pretend", action="store_true", help="a dry run on the tests' pretend accelerator")
    help_of_output = "default: examples/benchmarks/results, in a dry run .gpu/results"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=help_of_output)
    arguments = parser.parse_args()
    is_tiny = arguments.dry_run or arguments.pretend
    device = arguments.device or ("cpu" if is_tiny and not arguments.pretend else "cuda")
    output = arguments.output or (FOLDER / "results" if is_tiny else RESULTS)
    if arguments.pretend:
        for name in SECONDS:
            SECONDS[name] *= PRETEND_SLOWDOWN
        arguments.seconds *= PRETEND_SLOWDOWN
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the process with the parts, too
    start = time.monotonic()
    earlier = read_rows(arguments.resume) if arguments.resume else []
    names = arguments.only or parts_left(earlier)
    output.mkdir(parents=True, exist_ok=True)
    report = Report(output, start)
    report.begin(earlier)
    run(names, report, device, is_tiny, arguments.pretend, start + arguments.seconds)
    print(f"written to {report.lines} and {report.tables}")
    is_wrong = any(row.get("same text") is False and row.get("dtype") == "float32" for row in report.rows())
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
