"""Commands in processes of their own, and what they do when something goes wrong, as rows of a table."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from support.pairs import make_draft, make_target
from support.tiny_chat import CHATML, make_tokenizer


@dataclass
class Ended:
    """How a command ended: status, what it printed, and whether nothing that was there before was lost."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The lines of standard error that are the command's own."""
        return [line for line in self.err.splitlines() if line.startswith("dflash")]

    @property
    def one_line(self) -> bool:
        """One line of the form of all errors, without a traceback, short enough to be read."""
        told = len(self.errors) == 1 and len(self.errors[0]) <= 400
        return told and "Traceback" not in self.err


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", **more}


def dflash(*words, stdin: bytes = b"", stdout: str | None = None, timeout: float = 900) -> Ended:
    """Run a command to its end; its output may be led into a file."""
    command = [sys.executable, "-m", "dflash_hf.cli", *map(str, words)]
    with open(stdout, "wb") if stdout else nullcontext(subprocess.PIPE) as place:
        done = subprocess.run(
            command, input=stdin, stdout=place, stderr=subprocess.PIPE, env=environment(), timeout=timeout
        )
    return Ended(done.returncode, (done.stdout or b"").decode(errors="replace"), done.stderr.decode(errors="replace"))


def signalled(number: int, after: float | Path | str, *words, stdin: bytes = b"") -> Ended:
    """
    Run a command; send it a signal after so many seconds of the processor (those of the wall depend on what
    else runs), once a folder holds something, or once it says something.
    """
    command = [sys.executable, "-u", "-m", "dflash_hf.cli", *map(str, words)]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # behind `&` in a script; children would not hear it either
        signal.signal(signal.SIGINT, signal.default_int_handler)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment(), bufsize=0)
    process.stdin.write(stdin)
    process.stdin.close()
    process.stdin, said = None, b""
    if isinstance(after, str):
        while after.encode() not in said and (line := process.stderr.readline()):
            said += line
    elif isinstance(after, Path):
        while process.poll() is None and not any(after.iterdir()):
            time.sleep(0.01)
    else:
        while process.poll() is None and _processor_seconds(process.pid) < after:
            time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=900)
    return Ended(process.returncode, out.decode(errors="replace"), (said + err).decode(errors="replace"))


def _processor_seconds(pid: int) -> float:
    """What a process, still running or not waited for, has used up to now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_world(folder: Path, megabytes: int = 1) -> Path:
    """A tiny target with its tokenizer, a drafter, prompts and responses, damaged forms of each, and one long line."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_tokens(["a" * 1000])  # ten megabytes are few tokens then, and soon read
    target = make_target(vocab_size=len(tokenizer) + 1)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(folder / "draft")
    row = {"messages": [{"role": "user", "content": "Say 1"}, {"role": "assistant", "content": "1"}]}
    line = json.dumps(row) + "\n"
    (folder / "rows.jsonl").write_text(line * 6, encoding="utf-8")
    (folder / "bom.jsonl").write_text(line * 6, encoding="utf-8-sig")
    (folder / "empty.jsonl").touch()
    latin = json.dumps({"messages": [{"role": "user", "content": "Grüße"}]}, ensure_ascii=False)
    (folder / "latin.jsonl").write_bytes(line.encode() * 2 + latin.encode("latin-1") + b"\n")
    (folder / "binary.jsonl").write_bytes(bytes(range(256)) * 8)
    long = json.dumps({"messages": [{"role": "user", "content": "a" * 1_000_000 * megabytes}, row["messages"][1]]})
    (folder / "long.jsonl").write_text(long + "\n", encoding="utf-8")
    (folder / "prompts.txt").write_text("Say 1\n", encoding="utf-8")
    (folder / "latin.txt").write_bytes("Say 1\nGrüße\n".encode("latin-1"))
    shutil.copytree(folder / "target", folder / "bare")
    for path in (folder / "bare").glob("tok*"):
        path.unlink()
    (folder / "bare" / "chat_template.jinja").unlink(missing_ok=True)
    for whole, half in (("draft", "half"), ("target", "torn")):
        shutil.copytree(folder / whole, folder / half)
        weights = folder / half / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    shutil.copytree(folder / "draft", folder / "deep")
    (folder / "deep" / "config.json").write_text("[" * 100_000, encoding="utf-8")
    return folder
