"""Commands in processes of their own, and the small world that they work in."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.pairs import make_draft
from support.tiny_chat import CHATML, make_tokenizer, saved_with


@dataclass
class Ended:
    """How a command ended: its status, and what it printed."""

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
        return len(self.errors) == 1 and len(self.errors[0]) <= 400 and "Traceback" not in self.err


def start(*words) -> subprocess.Popen:
    """A command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, "-u", "-m", "dflash_hf.cli", *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)


def dflash(*words, timeout: float = 900) -> Ended:
    """Run a command to its end."""
    process = start(*words)
    out, err = process.communicate(timeout=timeout)
    return Ended(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def make_world(folder: Path) -> Path:
    """A tiny target with its tokenizer, a drafter, prompts and responses, damaged forms of each, and one long line."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_tokens(["a" * 1000])  # a long line is few tokens then, and soon read
    target = saved_with(tokenizer, folder / "target")
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(folder / "draft")
    row = {"messages": [{"role": "user", "content": "Say 1"}, {"role": "assistant", "content": "1"}]}
    line = json.dumps(row) + "\n"
    (folder / "rows.jsonl").write_text(line * 6, encoding="utf-8")
    (folder / "cut.jsonl").write_text((line * 6)[:-20], encoding="utf-8")
    (folder / "bom.jsonl").write_text(line * 6, encoding="utf-8-sig")
    (folder / "empty.jsonl").touch()
    latin = json.dumps({"messages": [{"role": "user", "content": "Grüße"}]}, ensure_ascii=False)
    (folder / "latin.jsonl").write_bytes(line.encode() * 2 + latin.encode("latin-1") + b"\n")
    (folder / "binary.jsonl").write_bytes(bytes(range(256)) * 8)
    long = json.dumps({"messages": [{"role": "user", "content": "a" * 1_000_000}, row["messages"][1]]})
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
