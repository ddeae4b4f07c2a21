"""
Measure anew what documents quote, as far as an hour of two CPU cores goes.

    python examples/benchmarks/figures.py [--only bundled avx2] [--again]
    python examples/benchmarks/figures.py --quick --only packing    # tries it with a few tokens; writes nothing
    python examples/benchmarks/figures.py --read bundled            # takes figures from a report that is there
    python examples/benchmarks/figures.py --renew                   # only rewrites documents

Each measurement of the table below writes `results/figures/NAME.json`, with date, commit, versions and processor; then
the documents are rewritten to say what was measured, and `git diff` shows it. A measurement that was made at this
commit is left out, so that the command continues after an interruption. Other files of `results/figures` have the
commands of longer measurements, which nothing here repeats: write the file by hand after them. `quoted.py` says how
documents name figures.
"""

import argparse
import dataclasses
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from quoted import FENCE, OUTPUT, RESULTS, ROOT, Measurement, documents, faults, measurements, renewed


DRAFTER = ROOT / "examples" / "smollm2-135m-dflash"
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
Figures = dict[str, float]


@dataclass(frozen=True)
class Recipe:
    """
    How something is measured.

    Attributes:
        minutes (`int`): About how long it takes on two cores of a Xeon.
        command (`str`): What a shell runs at the root of the repository; `WORK` is an empty folder for what it writes.
        quick (`str`): The same with less of everything, to try it.
        read (`Callable[[str, Path], dict[str, float]]`): The figures, from the command's output and the folder.
        keep (`Callable[[str, Path], None] | None`): Stores the results that the figures are taken from.
        environment (`dict[str, str]`): Variables of the command.
        processor (`str`): What the variables make of the processor.
        file (`str | None`): The results that it writes; the file of the measurement names them.
    """

    minutes: int
    command: str
    quick: str
    read: Callable[[str, Path], Figures]
    keep: Callable[[str, Path], None] | None = None
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    processor: str = ""
    file: str | None = None


# -------------------------------------------------------------------------------------- readers of what commands write


def read_report(output: str, work: Path) -> Figures:
    """The bundled pair's figures, from `eval_report.json` of a folder."""
    report = json.loads((work / "eval_report.json").read_text(encoding="utf-8"))
    methods = report["methods"]
    rows = {"target": "target", "target_packed": "target_packed", "plain": "dflash_auto", "blocks": "dflash"}
    rows["trees"] = "dflash_tree"
    figures = {name: methods[method]["speedup"] for name, method in rows.items()}
    figures |= {f"{name}_over_packed": methods[method]["speedup_over_packed"] for name, method in rows.items()}
    figures["tau"] = report["summary"]["tau"]
    figures["tau_of_trees"] = methods["dflash_tree"]["tau"]
    figures["target_packed_tokens_per_second"] = methods["target_packed"]["tokens_per_second"]
    shares = report["summary"]["acceptance_by_position"]
    figures |= {f"slot_{slot}_percent": 100 * share for slot, share in enumerate(shares, start=1)}
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def keep_report(output: str, work: Path):
    for name in ("eval_report.json", "eval_report.png"):
        shutil.copy(work / name, DRAFTER / name)


# A row of the table that `dflash demo` and `dflash eval` print: its name, and the speedups over both targets.
TABLE_ROW = re.compile(r"^(\w[\w, ]+?) {2,}\S+ +\S+ +([\d.]+)x +([\d.]+)x", re.MULTILINE)
# What separates the outputs of several commands.
RUN = "--- run: "


def read_avx2(output: str, work: Path) -> Figures:
    """The demo's figures of three runs, of which the second and the third give the plain call alone."""
    runs = [{name: ratios for name, *ratios in TABLE_ROW.findall(run)} for run in output.split(RUN)[1:]]
    figures = {
        "target": 1.0,
        "target_packed": float(runs[0]["target alone, packed"][0]),
        "plain": float(runs[0]["plain call"][0]),
        "plain_over_packed": float(runs[0]["plain call"][1]),
        "tau": float(re.search(r"^tau +([\d.]+)", output, re.MULTILINE)[1]),
    }
    for name, run in zip(("second_run", "short_run"), runs[1:], strict=True):
        figures[name] = float(run["plain call"][0])
    return figures


def keep_avx2(output: str, work: Path):
    head = (
        "# The demo without units for bf16\n\n"
        "SmolLM2-135M-Instruct and its bundled drafter as on a processor without AVX-512 and bf16 units: float32,\n"
        "one thread of a processor limited to AVX2; date, versions and processor are in `figures/avx2.json`. The\n"
        "demo's requests, every method in turn, once:\n"
    )
    parts = [head]
    for run_output in output.split(RUN)[1:]:
        command = run_output.strip().splitlines()[0]
        parts.append(f"    {command}\n\n```\n{_table(run_output)}\n```\n")
    (RESULTS / "avx2_demo.md").write_text("\n".join(parts), encoding="utf-8")


def _table(run: str) -> str:
    """A demo's output from its table on, without the names of files that it wrote."""
    lines = [line for line in run.splitlines() if not line.startswith("written ")]
    first = next((number for number, line in enumerate(lines) if "tokens/s" in line), 1)
    return "\n".join(line.rstrip() for line in lines[first:]).strip()


def read_core_and_package(output: str, work: Path) -> Figures:
    core, package = re.search(r"^\| all \| ([\d.]+)x \| ([\d.]+)x", output, re.MULTILINE).groups()
    return {"core": float(core), "package": float(package)}


def read_counts_of_rounds(output: str, work: Path) -> Figures:
    """Kernels of a drafted round over those of the target alone, eager and without other loops."""
    rows = re.findall(r"^\| ((?:plain call|block|tree)[^|]*) \|(?:[^|]*\|){5} ([\d.]+) \|", output, re.MULTILINE)
    ratios = [float(ratio) for name, ratio in rows if "CUDA graphs" not in name]
    return {"kernels_min": min(ratios), "kernels_max": max(ratios)}


def read_bytes_moved(output: str, work: Path) -> Figures:
    cells = re.search(r"^\| block of 16, no mask \|(.*)\|$", output, re.MULTILINE)[1].split("|")
    return {"block_131072": float(cells[4])}


def read_prompt_memory(output: str, work: Path) -> Figures:
    """The ratio of allocated memory of the longest prompt that was read in one piece."""
    rows = re.findall(r"^\| (\d+) \| one piece \|(?:[^|]*\|){2} ([\d.]+) \|", output, re.MULTILINE)
    return {"peak_ratio": float(max(rows, key=lambda row: int(row[0]))[1])}


def read_last_line(output: str, work: Path) -> Figures:
    """Figures that the last line of JSON states."""
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


def keeper(name: str) -> Callable[[str, Path], None]:
    """Stores an output as the file of that name in `results`."""

    def keep(output: str, work: Path):
        (RESULTS / name).write_text(output, encoding="utf-8")

    return keep


EVAL = (
    "dflash eval --target smollm2 --draft smollm2 --data examples/smollm2-135m-dflash/data/held_out.jsonl.gz --runs 1 "
    "--threads 1 --tree-nodes 15 --prompt-lookup --output WORK"
)
DEMO = f"echo '{RUN}dflash demo --dtype float32{{0}}'; dflash demo --dtype float32{{0}}"
SHORT = " --prompts 4 --max-new-tokens 32"
SCRIPT = "python examples/benchmarks/{}.py"

RECIPES = {
    "packing": Recipe(1, SCRIPT.format("packing"), SCRIPT.format("packing") + " --runs 1", read_last_line),
    "llama_cpp": Recipe(
        5,
        SCRIPT.format("llama_cpp_speed") + " --prompts 16 --max-new-tokens 48",
        SCRIPT.format("llama_cpp_speed") + " --prompts 1 --max-new-tokens 8",
        read_last_line,
    ),
    "bundled": Recipe(
        15,
        f"{EVAL} --prompts 24 --max-new-tokens 96",
        f"{EVAL} --prompts 1 --max-new-tokens 8",
        read_report,
        keep=keep_report,
    ),
    "avx2": Recipe(
        12,
        "; ".join(DEMO.format(options) for options in ("", "", SHORT)),
        "; ".join([DEMO.format(" --prompts 1 --max-new-tokens 8")] * 3),
        read_avx2,
        keep=keep_avx2,
        environment=AVX2,
        processor="limited to AVX2",
        file="avx2_demo.md",
    ),
    "core_and_package": Recipe(
        10,
        SCRIPT.format("core_and_package") + " --prompts 2 --new-tokens 48",
        SCRIPT.format("core_and_package") + " --prompts 1 --new-tokens 4",
        read_core_and_package,
        keep=keeper("core_and_package.md"),
        file="core_and_package.md",
    ),
    "device_rounds": Recipe(
        5,
        SCRIPT.format("device_rounds"),
        SCRIPT.format("device_rounds") + " --tokens 64 --modes 'target alone' block",
        read_counts_of_rounds,
        keep=keeper("device_rounds.md"),
        file="device_rounds.md",
    ),
    "bytes_moved": Recipe(
        5,
        SCRIPT.format("bytes_moved"),
        SCRIPT.format("bytes_moved"),
        read_bytes_moved,
        keep=keeper("bytes_moved.md"),
        file="bytes_moved.md",
    ),
    "prompt_memory": Recipe(
        5,
        SCRIPT.format("prompt_memory") + " --tokens 2048 8192 --runs 1",
        SCRIPT.format("prompt_memory") + " --tokens 256 --chunks 0 --runs 1",
        read_prompt_memory,
        keep=keeper("prompt_memory.md"),
        file="prompt_memory.md",
    ),
}


class Failed(Exception):
    """A command that ended with an error; names it and the end of its output."""


def run(recipe: Recipe, work: Path, is_quick: bool) -> str:
    """Run a command, and return what it prints; `Failed` if it fails."""
    preamble = 'set -e; python() { "$PYTHON" "$@"; }; dflash() { python -m dflash_hf.cli "$@"; }; '
    command = (recipe.quick if is_quick else recipe.command).replace("WORK", str(work))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **recipe.environment}
    result = subprocess.run(
        ["bash", "-c", preamble + command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode:
        raise Failed(f"`{command}` ended with status {result.returncode}:\n{result.stdout[-2000:]}")
    return result.stdout


def measurement(recipe: Recipe, figures: Figures) -> Measurement:
    """The file of what was measured just now, here."""
    import torch
    import transformers

    import dflash_hf
    from dflash_hf.evaluation.measure import hardware

    variables = "".join(f"{name}={value} " for name, value in {**recipe.environment, "OMP_NUM_THREADS": "1"}.items())
    units = "" if recipe.processor or not torch.cpu._is_amx_tile_supported() else "AMX"
    processor = [hardware(torch.device("cpu")), units, recipe.processor, "one thread"]
    return Measurement(
        date=datetime.now(timezone.utc).date().isoformat(),
        commit=git("rev-parse", "--short=8", "HEAD"),
        dflash_hf=dflash_hf.__version__,
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
        processor=", ".join(part for part in processor if part),
        command=variables + recipe.command,
        figures=figures,
        file=recipe.file,
    )


def write(name: str, measured: Measurement):
    entries = {key: value for key, value in dataclasses.asdict(measured).items() if value not in (None, {})}
    path = RESULTS / "figures" / f"{name}.json"
    path.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def renew_documents() -> bool:
    """Rewrite documents, and print the figures that changed and what remains to be done; whether nothing remains."""
    import dflash_hf

    remaining = []
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = with_printed_report(renewed(before, measurements()))
        name = path.relative_to(ROOT).as_posix()
        for line in difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, lineterm="", n=0):
            print(line)
        path.write_text(after, encoding="utf-8")
        remaining += faults(name, after, measurements(), dflash_hf.__version__)
    for fault in remaining:
        print(fault)
    return not remaining


def with_printed_report(text: str) -> str:
    """A document in which the output of `bundled` is what its report prints now."""
    from dflash_hf.evaluation.report import EvalReport
    from dflash_hf.evaluation.text import summary_lines

    for fence in FENCE.finditer(text):
        comment = OUTPUT.match(text, fence.end())
        if comment and comment[1] == "bundled":
            report = EvalReport.from_json((DRAFTER / "eval_report.json").read_text(encoding="utf-8"))
            printed = "".join(f"{line.rstrip()}\n" for line in summary_lines(report))
            return text[: fence.start(3)] + printed + text[fence.end(3) :]
    return text


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--again", action="store_true", help="also what was measured at this commit")
    parser.add_argument("--quick", action="store_true", help="a few tokens of each, to try it; writes nothing")
    parser.add_argument(
        "--read", choices=["bundled"], help="take the figures from the report that is in the repository"
    )
    parser.add_argument("--renew", action="store_true", help="only rewrite documents")
    arguments = parser.parse_args()
    if arguments.read:
        write("bundled", measurement(RECIPES["bundled"], read_report("", DRAFTER)))
    if arguments.read or arguments.renew:
        return 0 if renew_documents() else 1
    if not arguments.quick and git("status", "--porcelain", "--", "src", "modeling"):
        parser.error("src or modeling has uncommitted changes; commit them first, since figures name their commit")
    commit = git("rev-parse", "--short=8", "HEAD")
    failed = []
    for name in arguments.only or RECIPES:
        recipe = RECIPES[name]
        earlier = measurements().get(name)
        is_measured = earlier is not None and earlier.commit == commit
        if is_measured and not (arguments.again or arguments.quick):
            print(f"{name}: measured at this commit")
            continue
        print(f"{name}: {'a try' if arguments.quick else f'about {recipe.minutes} minutes'}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            try:
                output = run(recipe, work, arguments.quick)
            except Failed as error:
                print(f"{name}: {error}", flush=True)
                failed.append(name)
                continue
            figures = recipe.read(output, work)
            if not arguments.quick:
                if recipe.keep:
                    recipe.keep(output, work)
                write(name, measurement(recipe, figures))
        print(f"{name}: {figures}, {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    is_renewed = arguments.quick or renew_documents()
    return 0 if is_renewed and not failed else 1


if __name__ == "__main__":
    raise SystemExit(main())
