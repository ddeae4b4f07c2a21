"""The command line: each command once, every error as one line, help, and what a signal leaves behind."""

import argparse
import errno
import hashlib
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.hub_stand_in import stand_in
from support.shell import make_world, start
from tqdm import tqdm
from transformers import GenerationMixin
from transformers.utils import logging as transformers_logging

from dflash_hf import cli
from dflash_hf._io import argument_types, errors, progress, terminal
from dflash_hf._io.terminal import note, wants_color
from dflash_hf.cli import build_parser, main, parse
from dflash_hf.decoding.probe import Probe
from dflash_hf.serving.pieces import PieceStreamer


ROOT = Path(__file__).resolve().parents[1]
PAIR = "--target {w}/target --draft {w}/draft"
GENERATE = f"generate {PAIR} --max-new-tokens 4 --prompt"
TRAIN = "train --target {w}/target --data {w}/rows.jsonl --output-dir {out}/t --max-steps 2 --save-steps 1"
TRAIN += " --report-to none --use-cpu --num-draft-layers 1 --target-layer-ids 0 2 --block-size 4 --num-anchors 4"
TRAIN += " --max-length 64"
# Each command at work, with the status at its end; the drafter is random, which `doctor` reports.
WORKS = {
    "demo --draft {w}/draft --prompts 1 --max-new-tokens 4 --dtype float32 --output {out}/d": 0,
    f"{GENERATE} Say --device cpu --compare": 0,
    f"chat {PAIR} --device cpu --max-new-tokens 4": 0,
    "prompts --target {w}/target --chat-template {w}/chat.jinja --count 1 --batch-size 8 --device cpu "
    "--temperature 3 --output {out}/q.jsonl --max-new-tokens 32": 0,
    "regenerate --target {w}/target --data {w}/rows.jsonl --output {out}/r.jsonl --device cpu --max-new-tokens 8": 0,
    "prepare --target {w}/target --data {w}/rows.jsonl --output {out}/p.jsonl --examples 1 --max-length 64": 0,
    "features --target {w}/target --data {w}/rows.jsonl --output {out}/f --device cpu --target-layer-ids 0 2": 0,
    TRAIN: 0,
    f"eval {PAIR} --data {{w}}/prompts.txt --output {{out}}/e --runs 1 --max-new-tokens 8 --device cpu": 0,
    f"doctor {PAIR} --data {{w}}/rows.jsonl --device cpu --blocks 2 --max-new-tokens 24": 1,
    "check {w}/draft": 0,
    "convert {w}/draft {out}/c": 0,
    "publish {w}/draft me/x --dry-run --base-model someone/target": 0,
    f"serve --engine vllm --dry-run {PAIR}": 0,
    "packaged smollm2": 0,
    "env": 0,
}
# A command, its status, and what its one line of error names.
ERRORS = [
    ("nonsense", 2, "invalid choice: 'nonsense' (choose from "),
    ("chat --foo 1", 2, "dflash chat: error: unrecognized arguments: --foo 1 (see dflash chat --help)"),
    (
        "train --learning_rate 1",
        2,
        "unrecognized arguments: --learning_rate 1; did you mean --learning-rate? (see dfl",
    ),
    (
        "train --data {w}/absent.jsonl --blok-size 1",
        2,
        "did you mean --block-size? --data='{w}/absent.jsonl': there is no",
    ),
    ("chat --colour", 2, "unrecognized arguments: --colour; --colour: did you mean --color? (see "),
    ("generate --promt x", 2, "arguments are required: --prompt; --promt: did you mean --prompt? (see "),
    ("generate --target x", 2, "--prompt"),
    ("demo --prompts 0", 2, "0 must be at least 1"),
    ("demo --runs many", 2, "argument --runs: invalid value 'many'; give a whole number"),
    ("features --target t --data d --target-layer-ids 1,2", 2, "invalid value '1,2'; give a whole number"),
    ("prompts --target t --count 1 --output .", 2, ". must be a file that ends in .jsonl"),
    ("regenerate --target t --data d --output a.jsonl.gz", 2, "a.jsonl.gz must be a file that ends in .jsonl"),
    ("eval --compare . .", 2, ". cannot be read: Is a directory"),
    ("serve --port 65536", 2, "65536 is not a port: 0 to 65535"),
    (f"{GENERATE} x --dtype flot", 2, "--dtype: invalid choice: 'flot' (choose from "),
    (f"{GENERATE} x --device cuda:9", 1, "--device cuda:9: this machine has"),
    (f"{GENERATE} x --device gpu", 2, "'gpu' is not a device; use cpu, cuda"),
    (f"{GENERATE} x --top-p 2", 2, "2 must be above 0 and at most 1"),
    (f"{GENERATE} x --top-p 0.9", 2, "--top-p 0.9 has no effect in greedy decoding; add --temperature"),
    ("prompts --target t --count 1 --output {out}/q.jsonl --temperature 0", 2, "0 must be a positive number"),
    (f"{GENERATE} x --temperature inf", 2, "inf must be 0"),
    (f"{GENERATE} x --temperature nan", 2, "nan must be 0"),
    (f"{GENERATE} x --seed 4294967296", 2, "4294967296 is not a valid seed: 0 to 4294967295"),
    (f"{GENERATE} x --template-args {{{{", 2, "--template-args { is not a JSON object; write it in quotes"),
    (f"{GENERATE} x --template-args []", 2, "--template-args [] is not a JSON object"),
    (f"{GENERATE} \udcff", 2, "--prompt is not UTF-8"),
    (f"{GENERATE} ''", 2, "--prompt is empty"),
    (f"{GENERATE} {'x' * 300}", 1, "--prompt: its prompt fills all 256 positions of the target"),
    ("generate --target {w}/target --prompt x --compare", 2, "pass --draft"),
    ("generate --target {w}/absent --prompt x", 1, "there is no such folder"),
    ("generate --target {w}/rows.jsonl --prompt x", 1, "is a file; name the folder"),
    ("generate --target {w}/torn --prompt x", 1, "torn: its safetensors are damaged or only half written"),
    ("generate --target {w}/bare --draft {w}/draft --prompt x", 1, "bare holds no tokenizer that can be read"),
    ("generate --target {w}/target --draft {w}/absent --prompt x", 1, "there is no such folder"),
    ("generate --target {w}/draft --draft {w}/target --prompt x", 1, "target and drafter are swapped"),
    ("generate --target {w}/target --draft {w}/target --prompt x", 1, "is not a DFlash drafter but"),
    ("generate --target {w}/target --draft {w}/deep --prompt x", 1, "config.json is nested too deeply"),
    ("generate --target {w}/target --draft {w}/half --prompt x", 1, "model.safetensors"),
    (
        f"{GENERATE} x --revision v2",
        1,
        "/target is on this machine, which has no revisions; leave out the revision v2",
    ),
    (f"{GENERATE} x --draft-revision v2", 1, "/draft is on this machine"),
    ("check {w}/draft --revision v2", 1, "/draft is on this machine"),
    ("convert {w}/draft {out}/new --revision v2", 1, "DRAFT {w}/draft is on this machine"),
    ("prepare --target {w}/target --data {w}/rows.jsonl --revision v2", 1, "/target is on this machine"),
    ("prepare --target {w}/target --data {w}/latin.jsonl", 1, "Line 3 of {w}/latin.jsonl is not UTF-8; convert"),
    ("prepare --target {w}/target --data {w}/binary.jsonl", 1, "of {w}/binary.jsonl is not UTF-8"),
    ("prepare --target {w}/target --data {w}/empty.jsonl", 1, "is an empty file"),
    ("prepare --target {w}/target --data {w}/cut.jsonl", 1, "/cut.jsonl' cannot be read: line 6 is not a JSON object"),
    ("prepare --target {w}/target --data {w}/long.jsonl --max-length 64", 1, "beyond --max-length 64"),
    ("eval --target t --draft d --data absent.jsonl", 1, "error: --data absent.jsonl: there is no such file"),
    (f"eval {PAIR} --data {{w}}/latin.txt", 1, "Line 2 of {w}/latin.txt is not UTF-8"),
    ("doctor --target t --draft d --data absent.jsonl", 1, "error: --data absent.jsonl: there is no such file"),
    ("prepare --data {w}/rows.jsonl --target {w}/target --mask-token-id 99999", 1, "99999 is outside the target's"),
    ("features --data {w}/rows.jsonl --target t --output {w}/rows.jsonl/f", 2, "cannot be written: Not a directory"),
    ("regenerate --data {w}/rows.jsonl --target t --output {w}/rows.jsonl/r.jsonl", 2, "cannot be written: Not a dir"),
    ("convert {w}/draft {w}/rows.jsonl/c", 2, "cannot be written: Not a directory"),
    ("demo --output {w}/rows.jsonl", 2, "is a file; name a folder"),
    ("train --target {w}/target --data {w}/rows.jsonl --output-dir {w}/rows.jsonl/t", 1, "cannot be written"),
    ("train --target {w}/draft --data {w}/rows.jsonl --output-dir {out}/t", 1, "is a DFlash drafter"),
    (
        "train --target {w}/target --data absent.jsonl --output-dir {out}/t",
        1,
        "error: --data absent.jsonl: there is no such file",
    ),
    ("check {w}/draft --target {w}/absent", 1, "there is no such folder"),
    ("check {w}/absent", 1, "there is no such folder"),
    ("demo --prompts 9999", 1, "error: --prompts 9999, but only"),
    (
        "generate --prompt x --target SmolLM2-135M",
        2,
        "error: SmolLM2-135M: there is no such folder; did you mean smollm2",
    ),
    (
        "eval --target smollm2 --draft smolm2 --data gsm8k",
        2,
        "error: smolm2: there is no such folder; did you mean smollm2?",
    ),
    (
        "convert {w}/draft {out}/d.gguf",
        2,
        "d.gguf needs the target's tokenizer, which a GGUF file contains; add --target",
    ),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """In a folder whose name has a space and, where it may, a backslash."""
    folder = make_world(tmp_path_factory.mktemp("a b" if os.name == "nt" else "a b\\c"))
    shutil.copy(folder / "target" / "chat_template.jinja", folder / "chat.jinja")
    before = digest(folder)
    yield folder
    assert digest(folder) == before, "a command changed what it reads"


def digest(folder: Path) -> str:
    result = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        result.update(str(path.relative_to(folder)).encode())
        if path.is_file():
            result.update(path.read_bytes())
    return result.hexdigest()


def words_of(line: str, world: Path, out: Path) -> list[str]:
    return [word.format(w=world, out=out).replace("''", "") for word in line.split()]


@pytest.fixture
def run(world, tmp_path, capsys):
    """`run("generate --prompt {w}/x", ...)`: status, standard output and standard error."""

    def call(line: str, *more: str):
        try:
            code = main([*words_of(line, world, tmp_path), *map(str, more)])
        except SystemExit as stopped:
            code = stopped.code
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return code, printed.out, printed.err

    return call


@pytest.fixture
def refused(run):
    """`refused(line, ...)`: the status, and the one line that an error is."""

    def call(line: str, *more: str):
        code, out, err = run(line, *more)
        lines = [text for text in err.splitlines() if text.startswith("dflash")]
        assert code and len(lines) == 1 and len(lines[0]) <= 400 and not out, (code, out, err)
        return code, lines[0]

    return call


# ------------------------------------------------------------------------------------------------------- each command


def test_every_command_is_run_by_a_test_here():
    assert list(dict.fromkeys(line.split()[0] for line in WORKS)) == list(cli.COMMANDS)


@pytest.fixture
def bare_system(monkeypatch):
    """A system without what Windows lacks: `fcntl`, forks, timers, and the right to make symbolic links."""

    def refused(*args, **options):
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(os, "symlink", refused)
    for module, name in ((os, "fork"), (signal, "setitimer"), (signal, "SIGALRM"), (signal, "SIGKILL")):
        monkeypatch.delattr(module, name, raising=False)


@pytest.mark.parametrize("line", WORKS, ids=lambda line: line.split()[0])
def test_command_prints_json_alone(line, world, bare_system, run, monkeypatch):
    """With `--json`, standard output holds only the result; the inputs stay as they were (see `world`)."""
    monkeypatch.setattr("dflash_hf.pairs.packaged_targets.PackagedTarget.folder", lambda *_: world / "target")
    monkeypatch.setattr("dflash_hf.data.distinct._PROMPT_CHARACTERS", range(1, 1000))  # a random target writes few
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say 1\n"))
    code, out, err = run(line, "--json")
    assert code == WORKS[line], err
    facts = json.loads(out)
    assert facts["exit"] == code and len(facts) > 1


@pytest.mark.parametrize(("line", "code", "message"), ERRORS, ids=[line[:60] for line, *_ in ERRORS])
def test_error_is_one_line(line, code, message, world, tmp_path, refused):
    status, text = refused(line)
    assert (status, message.replace("{w}", str(world)) in text) == (code, True), text
    assert not list(tmp_path.iterdir())


def test_generate_prints_the_targets_text(run, monkeypatch):
    line = f"{GENERATE.replace('4', '24')} Say1 --device cpu"
    code, text, err = run(f"{line} --compare")
    assert code == 0 and text.strip()
    assert all(words in err for words in ("tau", "the same tokens", "cut off at --max-new-tokens 24"))
    assert run(line.replace("--draft {w}/draft ", ""))[1] == text
    _, packed, err = run(f"{line} --compare --packed")
    assert packed == text and "with the drafter, packed: " in err and "target alone, packed: " in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say1"))
    _, marked, _ = run(f"{line.replace('Say1', '-')} --show-drafts --color")
    assert marked.startswith(text) and text.strip() in re.sub(r"\x1b\[\d+m", "", marked[len(text) :])


def test_generate_explains_rounding(run, monkeypatch):
    generate = GenerationMixin.generate

    def other(*args, assistant_model=None, **options):
        output = generate(*args, assistant_model=assistant_model, **options)
        output.sequences[0, -1] += assistant_model is None
        return output

    monkeypatch.setattr(GenerationMixin, "generate", other)
    for dtype, explained in (("bf16", True), ("fp32", False)):
        _, _, err = run(f"{GENERATE} a --device cpu --compare --dtype {dtype}")
        assert "other tokens" in err and ("as rounding in bfloat16 allows" in err) == explained


def test_answer_cut_by_the_context_is_marked(run):
    code, out, err = run(f"{GENERATE.replace('4', '250')} {'x' * 180} --json")
    assert code == 0 and json.loads(out)["cut"] and "cut off at the target's context limit" in err


def test_samples_follow_the_seed(run):
    options = "--raw --temperature 1.5 --top-p 0.95 --seed"
    texts = [run(f"{GENERATE.replace('4', '20')} b {options} {number}")[1] for number in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert "the same tokens" in run(f"{GENERATE.replace('4', '20')} b {options} 1 --compare")[2]


@pytest.mark.parametrize("line", [f"{GENERATE} a", f"chat {PAIR} --max-new-tokens 4"], ids=["generate", "chat"])
def test_probing_the_target_is_not_timed(line, run, monkeypatch):
    """It was billed to the drafter: `generate --compare` showed 13 tokens/s, the target alone 22."""
    order = []
    support = Probe.capabilities
    generate = GenerationMixin.generate
    monkeypatch.setattr(Probe, "capabilities", lambda probe: order.append("tried") or support(probe))
    monkeypatch.setattr(GenerationMixin, "generate", lambda *a, **k: order.append("generate") or generate(*a, **k))
    monkeypatch.setattr(sys, "stdin", io.StringIO("a"))
    assert run(line)[0] == 0 and order == ["tried", "generate"]


@pytest.mark.parametrize(
    ("line", "name"), [(f"{GENERATE} a", "dflash_hf.any"), (f"chat {PAIR} --max-new-tokens 4", "transformers.any")]
)
def test_warnings_wait_for_the_end_of_the_text(line, name, run, monkeypatch):
    """One of the decoding was printed in the middle of it: "where playersDecoding mostly without drafts"."""
    put = PieceStreamer.put
    logger = transformers_logging.get_logger(name)
    logging.getLogger("transformers").setLevel(logging.WARNING)  # as it is in a process of its own
    handler = logging.StreamHandler(sys.stdout)  # the same stream as the text, to see the order

    def warn(self, value):
        put(self, value)
        logger.warning("a warning")

    monkeypatch.setattr(PieceStreamer, "put", warn)
    monkeypatch.setattr(logging.getLogger(name.partition(".")[0] if "transf" in name else None), "handlers", [handler])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say 1\n"))
    code, out, _ = run(line)
    text, *lines = re.split("(?=a warning)", out)
    assert code == 0 and len(text) > 1 and text.endswith("\n") and len(lines) == 5


def test_tilde_in_paths_is_expanded(world, run, refused, monkeypatch):
    """`--target=~/model` had no tokenizer, and the settings next to `--data=~/responses.jsonl` were not read."""
    monkeypatch.setenv("HOME", str(world))
    assert run("generate --target=~/target --draft=~/draft --prompt Say --max-new-tokens 4")[0] == 0
    settings = world / "rows.jsonl.settings.json"
    settings.write_text('{"chat_template_kwargs": {"enable_thinking": false}}', encoding="utf-8")
    try:
        line = "prepare --target=~/target --data=~/rows.jsonl --template-args"
        code, text = refused(line, '{"enable_thinking": true}')
    finally:
        settings.unlink()
    assert code == 1 and "was made with chat_template_kwargs={'enable_thinking': False}" in text


def test_byte_order_marks_are_read(run):
    code, out, _ = run("prepare --data {w}/bom.jsonl --target {w}/target --json --limit 6")
    assert code == 0 and json.loads(out)["examples"] == 6


@pytest.mark.parametrize(
    ("line", "errors"),  # the second as Python opens it under LC_ALL=C
    [(f"{GENERATE} -", "strict"), (f"chat {PAIR} --max-new-tokens 2", "surrogateescape")],
)
def test_standard_input_must_be_utf_8(line, errors, run, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO("a\nGrüße".encode("latin-1")), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stream)
    code, _, err = run(line)
    assert code == 1 and "Line 2 of standard input is not UTF-8" in err


def test_console_without_utf_8_prints_the_rest(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr("dflash_hf.commands.env.run", lambda arguments, echo: echo("Grüße") or terminal.Outcome())
    assert main(["env"]) == 0 and stream.buffer.getvalue() == f"Gr??e{os.linesep}".encode()


def test_env_prints_versions_and_no_secret(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghij")
    code, text, _ = run("env")
    assert code == 0 and torch.__version__.split("+")[0] in text and "HF_TOKEN           (set)" in text
    assert "hf_abc" not in text


def test_no_token_is_printed(run, refused):
    line = "train --target {w}/target --data {w}/rows.jsonl --output-dir {out}/t"
    for more in ("", "--json"):
        for token in ("--hub-token hf_abcdefghij", "hub_token=abc-secret"):
            code, out, err = run(f"{line} {token} --dry-run {more}")
            assert code == 0 and "hub_token" in out and "hf_abc" not in out + err and "abc-secret" not in out + err
    assert "hf_abc" not in refused(line, "--hub-token", "hf_abcdefghij", "--max-steps", "few")[1]
    assert errors.one_line("x hf_abcdefghij y") == "x hf_... y"


def test_custom_code_needs_trust(world, tmp_path, run, refused):
    """No command could say so; later `train` alone could not."""
    own = tmp_path / "own"
    shutil.copytree(world / "target", own)
    config = json.loads((own / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (own / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": auto_map}))
    code = "from transformers import Qwen3Config, Qwen3ForCausalLM\n\n\nclass OwnConfig(Qwen3Config):\n"
    code += "    model_type = 'own'\n\n\nclass Own(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    (own / "own.py").write_text(code)
    for line, trust in ((f"{GENERATE} a", "--trust-remote-code"), (TRAIN, "--trust-remote-code")):
        line = line.replace("{w}/target", "{out}/own")
        code, _, text = run(line)
        assert code == 1 and "has custom code: read it, and if you trust it" in text and trust in text, text
        assert run(f"{line} {trust}")[0] == 0


# ---------------------------------------------------------------------------------------------------------- the Hub


def test_a_repository_is_asked_for_once(refused, monkeypatch):
    """transformers retried for 63 s, and spoke of the Hub's grammar for names."""
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"  # the discard port: closed
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    lines = ("generate --prompt x --target {}", "prepare --data {{w}}/rows.jsonl --target {}")
    begun = time.monotonic()
    for line in lines:
        code, text = refused(line.format("no-such-folder"))
        assert code == 1 and "there is no such folder, and the Hub cannot be reached" in text
    assert time.monotonic() - begun < 20
    with stand_in(monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        for line in lines:
            code, text = refused(line.format("someone/nothing"))
            assert code == 1 and "the Hub has no model of that name" in text


def test_a_dataset_is_asked_for_once(refused, monkeypatch):
    """`datasets` tried six times, for half a minute, and named a file of its own."""
    line = "prepare --data someone/no-such-set --target {w}/target"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: pytest.fail("asked again"))
    code, text = refused(line)
    assert code == 1 and "'someone/no-such-set' could not be loaded from the Hub, and there is no file" in text
    with stand_in(monkeypatch):
        code, text = refused(line)
    assert code == 1 and "there is no file of that name" in text


# --------------------------------------------------------------------------------------------- errors of libraries


MEMORY = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/full/x"), "the disk is full (/full/x): free some space"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/a", None, "/full/b"),
            "the disk is full (/full/b): free some space",
        ),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "full: free some space, then run the same"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."), "out of memory (CUDA out of memory"),
        (RuntimeError(MEMORY), "out of memory (DefaultCPUAllocator: can't allocate memory: you)"),
        (MemoryError(), "out of memory"),
        (RecursionError("maximum recursion depth"), "RecursionError: maximum recursion depth (test_shell.py:"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied"),
        (ValueError("a\nb\n" + "x" * 10_000_000), "a b xxx"),
        (KeyError("k"), "KeyError: 'k' (test_shell.py:"),
    ],
)
def test_other_errors_are_one_line(error, message, refused, monkeypatch, capsys):
    def fail(arguments, echo):
        raise error

    monkeypatch.setattr("dflash_hf.commands.env.run", fail)
    code, line = refused("env")
    assert code == 1 and message in line and len(line) < 360
    assert main(["env", "--debug"]) == 1 and "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("DFLASH_DEBUG", "1")
    assert main(["env"]) == 1 and "Traceback" in capsys.readouterr().err


def test_progress_without_a_terminal_is_lines(monkeypatch, capsys):
    """A bar in a file was one endless line, and `0it` without a length."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    assert list(progress.bar("decoding")([1, 2])) == [1, 2] == list(progress.bar("reading")(iter([1, 2])))
    assert capsys.readouterr().err == "decoding: 1 of 2\ndecoding: 2 of 2\nreading: 1\nreading: 2\n"
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert list(progress.bar("decoding")([1])) == [1] and capsys.readouterr().err == ""


def test_bars_of_libraries_are_not_shown(run, world):
    """`Loading weights` came twice, `Generating train split` once, and each filled a line of a log."""
    code, _, err = run(f"eval {PAIR} --data {{w}}/rows.jsonl --runs 1 --max-new-tokens 4 --device cpu")
    assert code == 0 and "loading " in err
    assert not any(bar in err for bar in ("Loading weights", "Generating", "%|", "0it"))


def test_error_does_not_hang_on_a_progress_bar(refused, monkeypatch):
    """Its line began somewhere behind a bar of the trainer."""
    from tqdm import tqdm

    def fail(arguments, echo):
        bar = tqdm(range(9))
        bar.update()
        raise ValueError("in the middle")

    monkeypatch.setattr("dflash_hf.commands.env.run", fail)
    assert refused("env") == (1, "dflash env: error: in the middle")


# ---------------------------------------------------------------------------------------------------------- signals


def test_ctrl_c_exits_with_130(run, monkeypatch):
    def interrupted(arguments, echo):
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_hf.commands.regenerate.run", interrupted)
    code, out, err = run("regenerate --data {w}/rows.jsonl --target t --output {out}/out.jsonl")
    message = "dflash regenerate: interrupted; the same command continues with the rows that are missing."
    assert (code, out, err.strip()) == (130, "", message)


def test_a_closed_pipe_is_silent():
    """As of `dflash env | head -1`."""
    process = start("env")
    process.stdout.close()
    process.stdin.close()
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), error) == (141, b"")


# ------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_is_one_screen(command, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, text, _ = run(f"{command} --help")
    assert code == 0 and len(text.splitlines()) <= 50
    assert text.startswith(f"usage: dflash {command}") and f"examples:\n  dflash {command}" in text
    assert all(option in text for option in ("--json", "--quiet", "--verbose", "--debug"))
    assert "%%" not in text and "%(default)s" not in text


def test_help_lists_every_command(run):
    code, text, _ = run("--help")
    assert code == 0 and re.findall(r"^(\w+):$", text, re.MULTILINE) == [*cli.GROUPS, "options"]
    assert all(f"\n  {command} " in text for command in cli.COMMANDS) and len(cli.COMMANDS) <= 16
    assert run("")[0] == 2


@pytest.mark.parametrize(
    ("words", "message", "shown"),
    [
        ("convert a b", "add `share_head=True`", "add --share-head"),
        ("convert a b", "choose `to='gguf'`, or \"x.gguf\"", 'choose --to gguf, or "x.gguf"'),
        ("convert a b", "add `target=...`", "add --target ..."),
        ("convert a b --to native", "to='native' is `to='native'`", "--to native is --to native"),
        ("convert a b", "leave out `packed=True`", "leave out `packed=True`"),  # `convert` has no such option
        ("generate --prompt a", "try `packed=False`", "try --no-packed"),
        ("generate --prompt a", "pass `trust_remote_code=True`", "pass --trust-remote-code"),
        ("train --trust-remote-code", "trust_remote_code=True is set", "--trust-remote-code is set"),
        ("train", "pass `trust_remote_code=True`", "pass --trust-remote-code"),
        ("features --target a --data b --output c --max-length 64", "beyond max_length=64", "beyond --max-length 64"),
        ("features --target a --data b --output c --max-length 64", "max_length=640 is", "max_length=640 is"),
        ("generate --prompt a", "max_length=64 and `tokenizer`", "max_length=64 and `tokenizer`"),
    ],
)
def test_messages_of_the_library_name_options(words, message, shown, monkeypatch, tmp_path):
    """Messages of `convert` and others named options to callers in Python, who have none."""
    monkeypatch.chdir(tmp_path)
    assert cli._with_option_names(message, parse(words.split())) == shown


def test_an_option_means_the_same_everywhere():
    loads = {"generate", "eval", "doctor", "regenerate", "features", "prompts"}
    decodes = {"generate", "eval"}
    for name in cli.COMMANDS:
        words = {word: action for action in build_parser(name)._actions for word in action.option_strings}
        assert name not in ("prepare", "regenerate", "features") or {"--data", "--split", "--output"} <= words.keys()
        assert name not in loads or {"--dtype", "--device", "--revision", "--trust-remote-code"} <= words.keys()
        assert name not in decodes or {"--compile", "--tree-nodes"} <= words.keys()
        assert "--dtype" not in words or words["--dtype"].type is argument_types.dtype
        assert "--device" not in words or words["--device"].type is argument_types.device


def test_help_does_not_import_torch():
    """`check --help` took ten seconds."""
    code = "import sys; from dflash_hf import cli; list(map(cli.build_parser, cli.COMMANDS)); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "datasets", "numpy", "huggingface_hub", "yaml"} & set(done.stdout.split())


def test_color_is_for_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for environment, expected in (({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", environment)
            assert wants_color(None, Terminal()) == expected
            assert wants_color(True, io.StringIO()) and not wants_color(False, Terminal())
            assert not wants_color(None, io.StringIO())


@pytest.mark.parametrize(("words", "is_shown"), [("", False), ("-v", True), ("-vv", True), ("-q", False)])
def test_verbose_commands_log_the_package_too(words, is_shown, world):
    """With `-v` only libraries logged more; the layout that a file is read in could not be seen."""
    command = [sys.executable, "-m", "dflash_hf.cli", "check", str(world / "draft"), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert ("is read in the layout 'z-lab'" in done.stderr) == is_shown, done.stderr


def test_lines_stand_above_progress_bars(capsys):
    with tqdm(total=2, file=sys.stderr) as bar:
        bar.update()
        note("said")
    assert "\rsaid\n" in capsys.readouterr().err


def test_remedies_name_what_can_be_installed():
    """`pip install dflash-hf` fails: the package is not on PyPI yet."""
    folders = ("src", "modeling", "hub_cards", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    for path in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        assert not re.search(r"pip install [\"'`]?dflash-hf", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("data=x is empty.", "--data x is empty."),
        ("data='x': it is empty.", "--data x: it is empty."),
        ("/home/data=x is no file.", "/home/data=x is no file."),
        ("data=x/rows.txt is no file.", "data=x/rows.txt is no file."),
        ("eval_data=x and data=xy", "eval_data=x and data=xy"),
    ],
)
def test_error_names_options_but_leaves_paths(message, expected):
    """A part of a path was taken for an argument."""
    assert cli._with_option_names(message, argparse.Namespace(command="eval", data="x")) == expected
