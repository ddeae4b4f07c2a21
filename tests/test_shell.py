"""The shell under bad conditions: one line for every error, the documented status, nothing lost."""

import argparse
import errno
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
from support.shell import dflash, make_world, signalled
from transformers.utils import logging as transformers_logging

from dflash_hf import cli, terminal
from dflash_hf.cli import main
from dflash_hf.failures import explain
from dflash_hf.serving.pieces import PieceStreamer


ROOT = Path(__file__).resolve().parents[1]
COMMANDS = list(cli.COMMANDS)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def told(capsys):
    """`told(*words)`: the exit status and the one line that an error is."""

    def call(*words):
        try:
            code = main([str(word) for word in words])
        except SystemExit as stopped:
            code = stopped.code
        printed = capsys.readouterr()
        lines = [line for line in printed.err.splitlines() if line.startswith("dflash")]
        assert "Traceback" not in printed.err
        assert len(lines) == (code != 0), printed.err
        assert all(len(line) <= 400 and line.startswith(f"dflash {words[0]}: error: ") for line in lines)
        return code, "".join(lines) or printed.out

    return call


# -------------------------------------------------------------------------------------------------------- one line


def generate(world, *more, target="target", draft="draft"):
    return ["generate", "--target", world / target, "--draft", world / draft, "--prompt", "Say 1", *more]


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--dtype", "flot"], 2, "--dtype: invalid choice: 'flot' (choose from "),
        (["--device", "cuda:9"], 1, "--device cuda:9: this machine has"),
        (["--device", "gpu"], 2, "'gpu' is not a device; use cpu, cuda"),
        (["--top-p", "2"], 2, "2 must be above 0"),
        (["--top-p", "0.9"], 2, "has no effect in greedy decoding; add --temperature"),
        (["--temperature", "inf"], 2, "inf must be 0"),
        (["--temperature", "nan"], 2, "nan must be 0"),
        (["--seed", "-1"], 2, "-1 is not a valid seed"),
        (["--seed", "4294967296"], 2, "4294967296 is not a valid seed: 0 to 4294967295"),
        (["--prompt", "\udcff"], 2, "--prompt is not UTF-8"),
        (["--prompt", " "], 2, "--prompt is empty"),
        (["--prompt", "x" * 300], 1, "--prompt: its prompt fills all 256 positions of the target"),
    ],
)
def test_values_that_cannot_be_right_are_told_before_anything_is_loaded(more, code, message, world, told):
    found, line = told(*generate(world, *more))
    assert (found, message in line) == (code, True), line


def test_an_answer_that_fills_the_context_is_marked_as_cut(world, capsys):
    """Only one at --max-new-tokens was."""
    words = generate(world, "--prompt", "x" * 180, "--max-new-tokens", "250", "--json")
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert facts["cut"] and facts["tokens"] < 250 and "cut off at the target's context limit" in printed.err


@pytest.mark.parametrize("name", ["dflash_hf.any", "transformers.any"])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_warnings_wait_for_the_end_of_the_text(command, name, world, monkeypatch, capsys):
    """One of the decoding was printed in the middle of it: "where playersDecoding mostly without drafts"."""
    put, logger = PieceStreamer.put, transformers_logging.get_logger(name)
    handler = logging.StreamHandler(sys.stdout)  # the same stream as the text, to see the order

    def warn(self, value):
        put(self, value)
        logger.warning("a warning")

    monkeypatch.setattr(PieceStreamer, "put", warn)
    monkeypatch.setattr(logging.getLogger(name.partition(".")[0] if "transf" in name else None), "handlers", [handler])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say 1\n"))
    words = generate(world)[1:-2] if command == "chat" else generate(world)[1:]
    assert main([command, *map(str, words), "--max-new-tokens", "6"]) == 0
    text, *lines = re.split("(?=a warning)", capsys.readouterr().out)
    assert len(text) > 1 and text.endswith("\n") and len(lines) == 7
    assert set(lines) == {"a warning\n"} and not handler.filters


def test_drafts_are_shown_where_there_is_a_drafter(world, told):
    for option in ("--compare", "--show-drafts"):
        code, line = told("generate", "--target", world / "target", "--prompt", "Say 1", option)
        assert code == 2 and "pass --draft" in line


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"target": "absent"}, "there is no such folder"),
        ({"draft": "absent"}, "there is no such folder"),
        ({"target": "draft", "draft": "target"}, "target and drafter are swapped"),
        ({"draft": "target"}, "is not a DFlash drafter but"),
        ({"target": "bare"}, "bare holds no tokenizer that can be read; save the target's there with"),
        ({"draft": "deep"}, "config.json is nested too deeply"),
        ({"draft": "half"}, "model.safetensors"),
        ({"target": "torn"}, "torn: its safetensors are damaged or only half written"),
        ({"target": "rows.jsonl"}, "is a file; name the folder"),
    ],
)
def test_models_that_are_not_what_they_should_be(names, message, world, told):
    code, line = told(*generate(world, **names))
    assert code == 1 and message in line, line


def test_a_folder_has_no_revisions(world, tmp_path, told):
    """They were ignored: the folder was read as it is."""
    tokenizer = ["prepare", "--tokenizer", world / "target", "--data", world / "rows.jsonl", "--revision", "v2"]
    for words, what in (
        (generate(world, "--revision", "v2"), f"--target {world / 'target'}"),
        (generate(world, "--draft-revision", "v2"), f"--draft {world / 'draft'}"),
        (["check", world / "draft", "--revision", "v2"], world / "draft"),
        (["convert", world / "draft", tmp_path / "new", "--revision", "v2"], f"DRAFT {world / 'draft'}"),
        (tokenizer, world / "target"),
    ):
        code, line = told(*words)
        assert code == 1 and f"error: {what} is on this machine" in line and "leave out the revision v2." in line, line


def test_names_at_home(world, told, monkeypatch):
    """`--target=~/model` had no tokenizer, and the settings next to `--data=~/responses.jsonl` were not read."""
    monkeypatch.setenv("HOME", str(world))
    code, out = told("generate", "--target=~/target", "--draft=~/draft", "--prompt", "Say 1", "--max-new-tokens", "4")
    assert code == 0, out
    settings = world / "rows.jsonl.settings.json"
    settings.write_text('{"chat_template_kwargs": {"enable_thinking": false}}', encoding="utf-8")
    words = ["prepare", "--tokenizer=~/target", "--data=~/rows.jsonl", "--template-args", '{"enable_thinking": true}']
    code, line = told(*words)
    settings.unlink()
    assert code == 1 and "was made with chat_template_kwargs={'enable_thinking': False}" in line, line


def test_a_target_without_a_tokenizer_is_not_served(world, told):
    """Upstream makes one of its special tokens alone."""
    pytest.importorskip("fastapi")
    code, line = told("serve", "--target", world / "bare", "--draft", world / "draft", "--port", "0")
    assert code == 1 and "bare holds no tokenizer that can be read" in line, line


def test_a_name_that_is_no_folder_is_asked_for_once(world, told, monkeypatch):
    """transformers retried for 63 s, and spoke of the Hub's grammar for names."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"  # the discard port: closed
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    code, line = told("generate", "--target", "no-such-folder", "--prompt", "x")
    assert code == 1 and "there is no such folder, and the Hub cannot be reached" in line
    code, line = told("prepare", "--data", world / "rows.jsonl", "--tokenizer", "no-such-folder")
    assert code == 1 and "there is no such folder, and the Hub cannot be reached" in line
    assert time.monotonic() - start < 20
    with stand_in(monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        code, line = told("generate", "--target", "someone/nothing", "--prompt", "x")
        again = told("prepare", "--data", world / "rows.jsonl", "--tokenizer", "someone/nothing")
    assert code == 1 and "the Hub has no model of that name" in line
    assert again[0] == 1 and "the Hub has no model of that name" in again[1]


def test_a_dataset_that_is_not_there_is_asked_for_once(world, told, monkeypatch):
    """`datasets` tried six times, for half a minute, and named a file of its own."""
    prepare = ["prepare", "--data", "someone/no-such-set", "--target", world / "target"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the discard port: closed
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: pytest.fail("asked again"))
    code, line = told(*prepare)
    assert code == 1 and "'someone/no-such-set' could not be loaded from the Hub, and there is no file" in line
    with stand_in(monkeypatch):
        code, line = told(*prepare)
    assert code == 1 and "there is no file of that name" in line


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("latin.jsonl", "Line 3 of {} is not UTF-8; convert the file: iconv"),
        ("binary.jsonl", "of {} is not UTF-8"),
        ("empty.jsonl", "is an empty file"),
        ("absent.jsonl", "there is no such file"),
    ],
)
def test_data_that_cannot_be_read_are_named_with_their_line(name, message, world, told):
    code, line = told("prepare", "--data", world / name, "--target", world / "target")
    assert code == 1 and message.format(world / name) in line, line


@pytest.mark.parametrize(
    "command", ["eval --target t --draft d", "regenerate --target t --output o.jsonl", "doctor --target t --draft d"]
)
def test_a_file_that_is_not_there_is_told_before_anything_is_loaded(command, told, monkeypatch):
    monkeypatch.setattr(f"dflash_hf.commands.{command.split()[0]}.run", lambda *_: pytest.fail("ran"))
    code, line = told(*command.split(), "--data", "absent.jsonl")
    assert code == 1 and "data='absent.jsonl': there is no such file" in line


def test_a_byte_order_mark_and_a_line_of_a_megabyte_are_read(world, told):
    code, text = told("prepare", "--data", world / "bom.jsonl", "--target", world / "target", "--json", "--limit", "6")
    assert code == 0 and json.loads(text)["examples"] == 6
    tiny = ["--max-length", "64", "--examples", "0"]
    code, text = told("prepare", "--data", world / "long.jsonl", "--target", world / "target", *tiny)
    assert code == 1 and "beyond max_length=64" in text


def test_prompts_in_another_encoding(world, told, monkeypatch):
    from dflash_hf.evaluation.sets import eval_rows

    with pytest.raises(ValueError, match=r"Line 2 of .*latin\.txt is not UTF-8"):
        eval_rows(str(world / "latin.txt"), 5)
    stream = io.TextIOWrapper(io.BytesIO("a\nGrüße".encode("latin-1")), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stream)
    code, line = told(*generate(world)[:-1], "-")
    assert code == 1 and "Line 2 of standard input is not UTF-8" in line
    stream = io.TextIOWrapper(io.BytesIO("a\nGrüße".encode("latin-1")), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", stream)  # as Python opens it under LC_ALL=C
    code, line = told("chat", *generate(world)[1:-2], "--max-new-tokens", "2")
    assert code == 1 and "Line 2 of standard input is not UTF-8" in line


@pytest.mark.parametrize("number", [99999, -7])
def test_a_mask_token_outside_the_embedding(number, world, tmp_path, told):
    for command in (
        ["prepare", "--data", world / "rows.jsonl"],
        ["features", "--data", world / "rows.jsonl", "--output", tmp_path / "features"],
        ["regenerate", "--data", world / "rows.jsonl", "--output", tmp_path / "rows.jsonl"],
    ):
        code, line = told(*command, "--target", world / "target", "--mask-token-id", number)
        assert code == (1 if number > 0 else 2) and f"{number} is" in line, line
        assert not list(tmp_path.iterdir())


def test_an_output_that_cannot_be_written_is_found_before_the_work(world, told):
    wrong = world / "rows.jsonl" / "below-a-file"
    for words in (
        ["prepare", "--data", world / "rows.jsonl", "--target", world / "target", "--output", wrong / "x.jsonl"],
        ["regenerate", "--data", world / "rows.jsonl", "--target", world / "target", "--output", wrong / "x.jsonl"],
        ["features", "--data", world / "rows.jsonl", "--target", world / "target", "--output", wrong],
        ["convert", world / "draft", wrong],
        ["demo", "--output", wrong],
        ["eval", "--target", "t", "--draft", "d", "--data", "x.txt", "--output", wrong],
        ["recipes", "copy", "demo.yaml", wrong],
    ):
        code, line = told(*words)
        assert code == 2 and "cannot be written: Not a directory" in line, line
    file = world / "rows.jsonl"
    for words in (
        ["features", "--data", file, "--target", world / "target", "--output", file],
        ["demo", "--output", file],
        ["eval", "--target", "t", "--draft", "d", "--data", "x.txt", "--output", file],
        ["publish", "d", "me/d", "--output", file],
        ["smollm2", "--cache-dir", file],
    ):
        code, line = told(*words)
        assert code == 2 and "is a file; name a folder" in line, line
    code, line = told("train", f"target={world / 'target'}", f"data={world / 'rows.jsonl'}", f"output_dir={wrong}")
    assert code == 1 and "output_dir=" in line and "cannot be written" in line


def test_settings_of_training_are_looked_at_before_the_target_is_loaded(world, tmp_path, told):
    run = ["train", f"target={world / 'target'}", f"data={world / 'rows.jsonl'}", f"output_dir={tmp_path / 'out'}"]
    code, line = told(*run, "report_to=wandb_that_is_not_there")
    assert code == 1 and "report_to=wandb_that_is_not_there is not installed, or unknown" in line
    code, line = told(*run[:2], "data=absent.jsonl", run[3])
    assert code == 1 and "data='absent.jsonl': there is no such file" in line
    code, line = told("train", f"target={world / 'draft'}", *run[2:])
    assert code == 1 and "is a DFlash drafter" in line
    code, line = told(*run, "mask_token_id=99999")
    assert code == 1 and "mask_token_id=99999 is outside" in line
    assert not (tmp_path / "out").exists()


def test_no_token_is_ever_printed(world, tmp_path, told):
    run = ["train", f"target={world / 'target'}", f"data={world / 'rows.jsonl'}", f"output_dir={tmp_path}"]
    for more in ([], ["--json"]):
        code, text = told(*run, "hub_token=hf_abcdefghij", "--dry-run", *more)
        assert code == 0 and "hf_abc" not in text and "hub_token" in text
    code, line = told(*run, "hub_token={a: hf_abcdefghij}")
    assert code == 1 and "hf_abc" not in line
    assert terminal.one_line("x hf_abcdefghij y") == "x hf_... y"


def test_a_target_with_code_of_its_own_needs_trust(world, tmp_path, told):
    """No command could say so; later `train` alone could not."""
    own, rows, work = tmp_path / "own", world / "rows.jsonl", tmp_path / "work"
    shutil.copytree(world / "target", own)
    config = json.loads((own / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (own / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": auto_map}))
    code = "from transformers import Qwen3Config, Qwen3ForCausalLM\n\n\nclass OwnConfig(Qwen3Config):\n"
    code += "    model_type = 'own'\n\n\nclass Own(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    (own / "own.py").write_text(code)
    short = ["max_steps=1", "use_cpu=true", "report_to=none", "target_layer_ids=[0]", "num_draft_layers=1"]
    for words, trust in (
        (generate(world, "--max-new-tokens", "2", target=own), "--trust-remote-code"),
        (["train", f"target={own}", f"data={rows}", f"output_dir={work}", *short], "trust_remote_code=true"),
    ):
        code, line = told(*words)
        assert code == 1 and "custom code" in line and trust in line, line
        code, line = told(*words, trust)
        assert code == 0, line


def test_the_keys_of_training_stand_under_their_headings(told):
    code, text = told("train", "--keys")
    blocks = dict(block.split(":\n", 1) for block in _blocks(text))
    assert "  num_anchors=512" in blocks["training, of DFlash"]
    assert "  learning_rate=0.0006" in blocks["training, of DFlash"]
    assert "  per_device_train_batch_size=" in blocks["training, as in transformers.TrainingArguments"]
    assert "  target=None" in blocks["pair and data"]
    assert "%%" not in text
    code, text = told("train", "--keys", "anchor")
    assert code == 0 and "num_anchors" in text and "per_device" not in text


def _blocks(text):
    starts = [i for i, line in enumerate(text.splitlines()) if not line.startswith(" ")]
    lines = text.splitlines()
    return ["\n".join(lines[a:b]) for a, b in zip(starts, [*starts[1:], len(lines)])]


# --------------------------------------------------------------------------------------------------- errors of others


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/full/x"), "the disk is full (/full/x): free some space"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "the disk is full: free"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."), "out of memory (CUDA out of memory"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
            ),
            "out of memory (DefaultCPUAllocator: can't allocate memory: you)",
        ),
        (MemoryError(), "out of memory"),
        (RecursionError("maximum recursion depth"), "nested too deeply"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied"),
        (ValueError("a\nb\n" + "x" * 10_000_000), "a b xxx"),
        (KeyError("k"), "KeyError: 'k'"),
    ],
)
def test_every_error_is_one_short_line(error, message, told, monkeypatch):
    def fail(arguments, echo):
        raise error

    monkeypatch.setattr("dflash_hf.commands.env.run", fail)
    code, line = told("env")
    assert code == 1 and message in line and len(line) < 360


def test_the_traceback_is_shown_to_those_who_ask(capsys, monkeypatch):
    def fail(arguments, echo):
        raise KeyError("k")

    monkeypatch.setattr("dflash_hf.commands.env.run", fail)
    assert main(["env", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("DFLASH_DEBUG", "1")
    assert main(["env"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_while_saving_says_how_to_go_on(world, tmp_path, told, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dflash_hf.weights.save_file", full)
    code, line = told("convert", world / "draft", tmp_path / "native", "--to", "native")
    assert code == 1 and "the disk is full" in line and not list(tmp_path.iterdir())
    assert "goes on from the last checkpoint" in explain(
        OSError(errno.ENOSPC, "No space"), "the same command goes on from the last checkpoint"
    )


def pressed_in_an_import(arguments, echo):
    """numpy and others turn an interrupted import into an ImportError."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("numpy failed to import") from None


def pressed_in_a_destructor(arguments, echo):
    """Python drops what a destructor raises."""

    class Closing:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    closing = Closing()
    del closing
    for _ in range(300):
        time.sleep(0.1)  # at work


@pytest.mark.parametrize("interrupted", [pressed_in_an_import, pressed_in_a_destructor])
def test_ctrl_c_that_python_or_a_library_swallows_is_still_ctrl_c(capsys, monkeypatch, interrupted):
    monkeypatch.setattr("dflash_hf.commands.regenerate.run", interrupted)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert main(["regenerate", "--data", "x", "--target", "t", "--output", "out.jsonl"]) == 130
        error = capsys.readouterr().err
        assert "interrupted; the same command continues with the rows that are missing" in error
        assert "numpy" not in error and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_ctrl_c_again_while_python_exits_prints_no_traceback():
    code = """
import atexit, signal, sys
from dflash_hf import cli
def press(*_):
    signal.raise_signal(signal.SIGINT)
atexit.register(press)
cli._resolve_names = press
sys.argv = ["dflash", "env"]
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(cli.main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.strip() == "dflash env: interrupted; run the same command again."


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 1.5, 4.0])
def test_ctrl_c_at_any_moment_is_one_line(seconds, world, tmp_path):
    words = [
        "features",
        "--data",
        world / "rows.jsonl",
        "--target",
        world / "target",
        "--output",
        tmp_path / "features",
    ]
    ended = signalled(signal.SIGINT, seconds, *words, "--device", "cpu")
    assert ended.code in (0, 130) and "Traceback" not in ended.err, ended.err
    if ended.code:
        assert "dflash features: interrupted; the same command continues" in ended.err


def test_who_reads_the_beginning_only_breaks_nothing(world, tmp_path):
    """`dflash prepare ... | head -1`: the pipe closes, the file is written all the same."""
    read, write = os.pipe()
    os.close(read)
    child = os.fork()
    if child == 0:  # a copy of this process whose standard output leads into the closed pipe
        os.dup2(write, 1)
        sys.stdout = open(1, "w", closefd=False)
        words = [
            "prepare",
            "--data",
            world / "rows.jsonl",
            "--target",
            world / "target",
            "--output",
            tmp_path / "x.jsonl",
        ]
        os._exit(main([str(word) for word in words]))
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 6


# ----------------------------------------------------------------------------------------------------- help and tables


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_the_words_that_all_share(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "examples:\n" in text
    assert all(option in text for option in ("--json", "--quiet", "--verbose", "--debug"))
    assert "%%" not in text and "%(default)s" not in text


def test_the_same_options_mean_the_same(capsys):
    parsers = {name: cli.build_parser(name)[1] for name in COMMANDS}
    loads = {"generate", "eval", "doctor", "regenerate", "features", "prompts"}
    decodes = {"generate", "eval", "regenerate"}
    reads = {"prepare", "regenerate", "features"}
    for name, parser in parsers.items():
        words = {word: action for action in parser._actions for word in action.option_strings}
        assert name not in reads or {"--data", "--split", "--limit", "--target", "--output"} <= words.keys()
        assert name not in loads or {"--dtype", "--device", "--revision", "--trust-remote-code"} <= words.keys()
        assert name not in decodes or {"--compile", "--tree-nodes"} <= words.keys()
        assert words.get("--dtype", argparse.Namespace(type=terminal.dtype)).type is terminal.dtype
        assert words.get("--device", argparse.Namespace(type=terminal.device)).type is terminal.device


def test_no_help_waits_for_torch():
    """`check --help` took ten seconds."""
    code = "import sys; from dflash_hf import cli; list(map(cli.build_parser, cli.COMMANDS))"
    code += "; print(*sorted(sys.modules))"
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "datasets", "numpy", "huggingface_hub", "yaml"}
    assert not heavy & set(done.stdout.split())


def test_json_is_all_that_stands_on_standard_output(world, capsys):
    assert main(["check", str(world / "draft"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"exit": 0, "findings": []} and "No findings" in printed.err
    assert main([str(word) for word in generate(world, "--json", "--max-new-tokens", "4", "--compare")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens"] == 4 and facts["equal"] is True


# -------------------------------------------------------------------------------------------------------- new commands


def test_env_says_what_a_report_needs_and_no_secret(told, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghij")
    code, text = told("env")
    assert code == 0 and torch.__version__.split("+")[0] in text and "HF_TOKEN           (set)" in text
    assert "hf_abc" not in text


def test_recipes_are_listed_shown_and_copied(told, tmp_path):
    code, text = told("recipes")
    assert code == 0 and "qwen3-4b.yaml" in text and "train_on_jobs.py" in text
    code, text = told("recipes", "show", "demo.yaml")
    assert code == 0 and "target:" in text
    code, _ = told("recipes", "copy", "demo.yaml", tmp_path)
    assert code == 0 and (tmp_path / "demo.yaml").is_file()
    code, line = told("recipes", "copy", "demo.yaml", tmp_path)
    assert code == 1 and "exists; choose another file" in line
    code, line = told("recipes", "show", "nothing")
    assert code == 2 and "Unknown recipe 'nothing'; choose from" in line


def test_drafters_are_found_by_what_they_name_as_base_model(told, monkeypatch):
    with stand_in(monkeypatch) as hub:
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        tag = "base_model:someone/target"
        hub.listed = {
            "a/few": (["dflash", tag], 3),
            "b/target-DFlash": ([tag], 70),
            "c/finetune": ([tag], 900),
            "d/other-DFlash": (["dflash", "base_model:someone/else"], 5),
        }
        code, text = told("find", "someone/target")
        assert code == 0 and [line.split()[1] for line in text.splitlines()] == ["b/target-DFlash", "a/few"]
        code, text = told("find", "someone/nobody")
        assert code == 0 and "train one with `dflash train`" in text
        monkeypatch.setattr("dflash_hf.smollm2.folder_of", lambda name, drafter: f"/cache/{name}")
        code, text = told("find", "smollm2")  # its folder was "not a repository name"
        assert code == 0 and "names HuggingFaceTB/SmolLM2-135M-Instruct as its base_model" in text
        code, line = told("find", "a/b/c")
        assert code == 1 and "is not a repository name" in line


def test_find_asks_once(told, monkeypatch):
    """Offline it showed raw retries for 23 s."""
    code, line = told("find", "someone/target")
    assert code == 1 and "disabled by HF_HUB_OFFLINE" in line
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the discard port: closed
    monkeypatch.setattr("huggingface_hub.HfApi.list_models", lambda *args, **options: pytest.fail("asked again"))
    code, line = told("find", "someone/target")
    assert code == 1 and "The Hub cannot be reached" in line


def test_the_target_of_check_is_called_missing(world, told):
    code, line = told("check", world / "draft", "--target", world / "absent")
    assert code == 1 and "there is no such folder" in line
    assert told("check", world / "draft", "--target", world / "target")[0] == 0


def test_a_command_in_a_process_of_its_own(world):
    ended = dflash("check", world / "absent")
    assert ended.code == 1 and ended.one_line and "there is no such folder" in ended.err and not ended.out


def test_an_error_does_not_hang_on_a_progress_bar(told, monkeypatch):
    """Its line began somewhere behind a bar of the trainer."""
    from tqdm import tqdm

    def fail(arguments, echo):
        bar = tqdm(range(9))
        bar.update()
        raise ValueError("in the middle")

    monkeypatch.setattr("dflash_hf.commands.env.run", fail)
    assert told("env") == (1, "dflash env: error: in the middle")


@pytest.mark.slow
def test_every_command_under_every_bad_condition():
    """What `examples/benchmarks/results/shell.md` shows."""
    from shell_table import WORDS, table

    assert {row.split()[0] for row in WORDS} == set(COMMANDS)
    *_, faults = table(WORDS)
    assert not faults, "\n".join(faults)


def test_the_script_for_jobs_brings_its_environment():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    text = (ROOT / "examples" / "train_on_jobs.py").read_text(encoding="utf-8")
    block = re.search(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", text)["content"]  # of PEP 723
    header = tomllib.loads("".join(line.removeprefix("#") + "\n" for line in block.splitlines()))
    assert header["requires-python"] == ">=3.10"
    named = {re.match(r"[\w-]+", one).group() for one in header["dependencies"]}
    assert {"torch", "transformers", "datasets", "accelerate", "pyyaml", "jinja2", "dflash-hf"} <= named


def test_remedies_name_what_can_be_installed():
    """`pip install dflash-hf` fails: the package is not on PyPI yet."""
    folders = ("src", "modeling", "hub_cards", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    for path in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        assert not re.search(r"pip install [\"'`]?dflash-hf", path.read_text(encoding="utf-8")), path
