"""
Every command under every bad condition, as a table: `python tests/shell_table.py [COMMAND ...] --output FILE.md`.

A cell holds the exit status; `!` marks what should not be: more or less than one line of error, another error than the
condition's, a traceback, inputs that changed, or a rerun after SIGKILL that does not finish.
"""

import argparse
import contextlib
import hashlib
import io
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.shell import Ended, dflash, make_world, signalled


TRAIN = ("max_steps=2", "save_steps=1", "logging_steps=1", "report_to=none", "use_cpu=true", "num_draft_layers=1")
TRAIN = (*TRAIN, "target_layer_ids=[0,2]", "block_size=4", "num_anchors=4", "max_length=64", "warmup_steps=0")
CONDITIONS = (
    "wrong argument",
    "missing file",
    "half-written",
    "unwritable output",
    "disk full",
    "SIGINT 0.1 s",
    "SIGINT 1.5 s",
    "SIGINT at work",
    "SIGKILL, rerun",
    "non-UTF-8",
    "empty",
    "10 MB line",
)
EXPECTED = {
    "wrong argument": {2},
    "missing file": {1, 2},
    "half-written": {1},
    "unwritable output": {1, 2},
    "disk full": {1},
    "SIGINT 0.1 s": {0, 1, 130, -2},  # before our code runs Python itself speaks, or does not hear it
    "SIGINT 1.5 s": {0, 130},
    "SIGINT at work": {0, 130},
    "SIGKILL, rerun": {0},
    "non-UTF-8": {1},
    "empty": {1},
    "10 MB line": {0, 1},
}


NAMED = {
    "missing file": ("there is no such",),
    "half-written": ("safetensors",),
    "unwritable output": ("cannot be written",),
    "disk full": ("disk is full", "are needed; choose another output"),  # `features` asks before it begins
    "non-UTF-8": ("is not UTF-8",),
}


def words_of(command: str, world: Path, out: Path, **other: Path) -> list[str] | None:
    """A command that works, with some of its inputs replaced."""
    target, draft = other.get("target", world / "target"), other.get("draft", world / "draft")
    rows, prompts = other.get("rows", world / "rows.jsonl"), other.get("prompts", world / "prompts.txt")
    pair = ["--target", target, "--draft", draft, "--device", "cpu"]
    decode = ["--max-new-tokens", "8"]
    commands = {
        "generate": ["--prompt", "Say 1", *pair, *decode],
        "regenerate": [rows, "--target", target, "--output", out / "r.jsonl", "--device", "cpu", *decode],
        "prepare": [rows, "--target", target, "--output", out / "p.jsonl", "--examples", "1", "--max-length", "64"],
        "features": [
            rows,
            "--target",
            target,
            "--output",
            out / "f",
            "--device",
            "cpu",
            "--target-layer-ids",
            "0",
            "2",
        ],
        "train": [f"target={target}", f"data={rows}", f"output_dir={out / 't'}", *TRAIN],
        "eval": ["--data", prompts, "--output", out / "e", "--runs", "1", *pair, *decode],
        "bench": [
            "--data",
            prompts,
            "--output",
            out / "b",
            "--runs",
            "1",
            "--methods",
            "target,dflash",
            *pair,
            *decode,
        ],
        "check": [draft],
        "convert": [draft, out / "c"],
        "publish": [draft, "me/x", "--dry-run", "--base-model", "someone/target"],
        "recipes": ["copy", "demo.yaml", out / "demo.yaml"],
        "demo": [
            "--cache-dir",
            out / "d",
            "--target-steps",
            "4",
            "--draft-steps",
            "2",
            "--prompts",
            "2",
            "--runs",
            "1",
        ],
        "env": [],
        "find": ["someone/target"],
        "completion": ["bash"],
    }
    return [command, *map(str, commands[command])]


READS_ROWS = ("regenerate", "prepare", "features", "train")
READS_PROMPTS = ("eval", "bench")
READS_DRAFT = ("generate", "eval", "bench", "check", "convert", "publish")
WRITES = ("regenerate", "prepare", "features", "train", "eval", "bench", "convert", "recipes", "demo")
LONG = ("regenerate", "features", "train", "convert", "prepare", "generate", "check")
COMMANDS = (*LONG, "eval", "bench", "publish", "recipes", "demo", "env", "find", "completion")


def here(words: list[str]) -> Ended:
    """Run a command in this process: errors need no new one."""
    from dflash_hf.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as stopped:
            code = stopped.code
    return Ended(code, out.getvalue(), err.getvalue())


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()


def run(command: str, condition: str, world: Path, out: Path, small: Path | None) -> Ended | None:
    """One cell; `None` where the condition cannot happen to the command."""
    if condition == "wrong argument":
        return here([command, "--no-such-option"])
    if condition == "missing file":
        changed = {
            "rows": world / "no.jsonl",
            "prompts": world / "no.txt",
            "draft": world / "no",
            "target": world / "no",
        }
        reads = command in (*READS_ROWS, *READS_DRAFT)
        return here(words_of(command, world, out, **changed)) if reads else None
    if condition == "half-written":
        return here(words_of(command, world, out, draft=world / "half")) if command in READS_DRAFT else None
    if condition == "unwritable output":
        return here(words_of(command, world, world / "rows.jsonl" / "below")) if command in WRITES else None
    if condition in ("non-UTF-8", "empty", "10 MB line"):
        name = {"non-UTF-8": "latin", "empty": "empty", "10 MB line": "long"}[condition]
        if command in READS_ROWS and not (name == "long" and command in ("regenerate", "train", "features")):
            return here(words_of(command, world, out, rows=world / f"{name}.jsonl"))
        if command in READS_PROMPTS and name != "long":
            return here(words_of(command, world, out, prompts=world / f"{name}.txt"))
        return None
    if condition == "disk full":
        if small is None or command not in WRITES or command == "demo":
            return None
        for path in small.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        room = os.statvfs(small)
        (small / "ballast").write_bytes(b"x" * (room.f_bsize * room.f_bavail))
        return dflash(*words_of(command, world, small))
    if command not in LONG:
        return None
    if condition == "SIGKILL, rerun":
        signalled(signal.SIGKILL, 4.0, *words_of(command, world, out))
        return dflash(*words_of(command, world, out), *(["resume_from_checkpoint=auto"] if command == "train" else []))
    seconds = {"SIGINT 0.1 s": 0.1, "SIGINT 1.5 s": 1.5, "SIGINT at work": 5.0}[condition]
    return signalled(signal.SIGINT, seconds, *words_of(command, world, out))


def judge(ended: Ended, condition: str, command: str) -> str:
    """A cell, and in `!` what is wrong with it."""
    wrong = []
    if "Traceback" in ended.err and condition != "SIGINT 0.1 s":
        wrong.append("traceback")
    if ended.code not in (0, -2) and not ended.one_line and not (condition == "SIGINT 0.1 s" and not ended.errors):
        if not (command == "check" and ended.code == 1 and "error" in ended.out):  # the table is its result
            wrong.append(f"{len(ended.errors)} lines")
    named = NAMED.get(condition, ("",))
    if ended.code == 1 and not any(text in ended.err + ended.out for text in named):
        wrong.append("another error")
    if ended.code not in EXPECTED[condition]:
        wrong.append("status")
    return f"{ended.code}" + "".join(f" !{one}" for one in wrong)


@contextlib.contextmanager
def small_disk(folder: Path):
    """A file system of 4 MB, where this user may mount one."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    try:
        yield folder if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=False)


def table(commands, conditions=CONDITIONS, say=lambda line: None) -> tuple[list[list[str]], list[str]]:
    """Rows of cells, and what went wrong, as lines."""
    rows, faults = [], []
    with tempfile.TemporaryDirectory() as scratch:
        world = make_world(Path(scratch) / "world", megabytes=10)
        shutil.copy(world / "empty.jsonl", world / "empty.txt")
        before = digest(world)
        with small_disk(Path(scratch) / "small") as small:
            for command in commands:
                cells = []
                for condition in conditions:
                    out = Path(tempfile.mkdtemp(dir=scratch))
                    ended = run(command, condition, world, out, small)
                    cell = "" if ended is None else judge(ended, condition, command)
                    if digest(world) != before:
                        cell += " !inputs changed"
                    cells.append(cell)
                    if "!" in cell:
                        faults.append(f"{command}, {condition}: {cell}: {ended.err.strip()[-400:]}")
                    say(f"{command:12} {condition:18} {cell}")
                rows.append([command, *cells])
    return rows, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", default=COMMANDS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    rows, faults = table(arguments.commands, say=lambda line: print(line, flush=True))
    head = ["", *CONDITIONS]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    text = (
        "# The shell under bad conditions\n\n"
        "Exit status of each command (0 done, 1 failed, 2 wrong arguments, 130 interrupted); empty where the\n"
        "condition cannot happen. Each error was one line without a traceback and named the condition, no input\n"
        "changed, and a rerun after SIGKILL finished; `!` marks exceptions. A Ctrl-C that comes when all is done\n"
        "finds 0. SIGINT 0.1 s falls before our code runs at times, where Python itself speaks.\n\n"
        + "\n".join(lines)
        + f"\n\nPython {platform.python_version()} on {platform.system()}, two cores shared with other work, "
        f"{time.monotonic() - start:.0f} s: `python tests/shell_table.py --output "
        "examples/benchmarks/results/shell.md`.\n"
    )
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    print(text)
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
