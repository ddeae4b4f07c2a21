"""`dflash serve --engine vllm|sglang`: the folder is checked, and the engine's own command is printed and run."""

import json
import os
import shlex
import stat
import sys

import pytest
from support.llama_cpp import write_target
from support.pairs import make_draft, make_target
from support.shell import Ended, dflash, make_world

from dflash_hf.cli import main
from dflash_hf.conversion.gguf_write import write_gguf


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("engines"))


def serve(world, *more: str) -> list[str]:
    return ["serve", "--target", str(world / "target"), "--draft", str(world / "draft"), *more]


def test_dry_run_prints_the_engines_command(world, capsys):
    target = str(world / "target")
    draft = str(world / "draft")
    more = ["--dtype", "bf16", "--port", "8001", "--template-args", '{"enable_thinking": false}', "--dry-run"]
    assert main(serve(world, "--engine", "vllm", *more)) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[:4] == ["vllm", "serve", target, "--speculative-config"]
    assert json.loads(command[4]) == {"method": "dflash", "model": draft, "num_speculative_tokens": 3}
    assert json.loads(command[command.index("--default-chat-template-kwargs") + 1]) == {"enable_thinking": False}
    assert " ".join(command).endswith("--dtype bfloat16 --host 127.0.0.1 --port 8001")

    assert main(serve(world, "--engine", "sglang", "--trust-remote-code", "--dry-run", "--json")) == 0
    line = json.loads(capsys.readouterr().out)["command"]
    assert line == (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {draft} --speculative-num-draft-tokens 4 --trust-remote-code "
        "--host 127.0.0.1 --port 8000"
    )


def test_folders_are_printed_as_absolute_paths(world, capsys, monkeypatch):
    """A relative drafter stood beside an absolute target."""
    monkeypatch.chdir(world)
    assert main(["serve", "--target", "target", "--draft", "draft", "--engine", "vllm", "--dry-run"]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[2] == str(world / "target") and json.loads(command[4])["model"] == str(world / "draft")


@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="needs /proc")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engine_replaces_the_process(engine, world, tmp_path, monkeypatch):
    """
    With its arguments and environment; signals and the exit status are the engine's. A key is no argument: every user
    of a machine can read those of all processes.
    """
    shown = "from pathlib import Path; print('/proc', Path('/proc/self/cmdline').read_text().count('secret'))"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(f"import sys\n{shown}\nprint(sys.argv[-2:])\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = tmp_path / "vllm"
    program.write_text(
        f"#!{sys.executable}\nimport os\n{shown}\nprint(os.environ['VLLM_API_KEY'])\nraise SystemExit(7)\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("DFLASH_API_KEY", "secret")
    done: Ended = dflash(*serve(world, "--engine", engine))
    assert done.code == (7 if engine == "vllm" else 0) and "/proc 0" in done.out, done.err
    assert "--api-key '***'" in done.out
    assert done.out.endswith("['--api-key', 'secret']\n" if engine == "sglang" else "secret\n")


def test_settings_that_an_engine_rejects_are_named(world, tmp_path, capsys):
    broken = tmp_path / "draft"
    broken.mkdir()
    for path in (world / "draft").iterdir():
        if path.is_file():
            (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    config.pop("vocab_size")
    (broken / "config.json").write_text(json.dumps(config))
    words = ["serve", "--target", str(world / "target"), "--draft", str(broken), "--engine", "vllm"]
    assert main([*words, "--dry-run"]) == 1
    printed = capsys.readouterr()
    assert "vocab_size" in printed.err and "vllm serve" not in printed.out


def test_gguf_pair_is_read_once(tmp_path, monkeypatch):
    """The drafter's was read twice: three seconds each with SmolLM2's vocabulary, without a word."""
    gguf = pytest.importorskip("gguf")
    pair = make_target(vocab_size=16)
    read = []
    target = write_target(pair, tmp_path / "target.gguf")
    file = tmp_path / "dflash-one.gguf"
    write_gguf(make_draft(pair, target_layer_ids=[0, 1, 2]), file, str(target))
    original = gguf.GGUFReader.__init__

    def counted(reader, path):
        read.append(path)
        original(reader, path)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    os.utime(target)  # reading it for its tokenizer does not count here
    words = ["serve", "--engine", "llama.cpp", "--dry-run", "--target", str(target), "--draft", str(file)]
    assert main(words) == 0
    assert sorted(read) == [file, target]


def test_llama_cpp_runs_files(tmp_path, capsys):
    pytest.importorskip("gguf")
    pair = make_target(vocab_size=16)
    target = str(write_target(pair, tmp_path / "target.gguf"))
    draft = make_draft(pair, target_layer_ids=[0, 1, 2])
    draft.save_pretrained(tmp_path / "draft")
    words = ["serve", "--engine", "llama.cpp", "--dry-run", "--target", target, "--draft"]
    assert main([*words, str(tmp_path / "draft")]) == 1
    assert "holds no dflash-*.gguf" in capsys.readouterr().err
    file = tmp_path / "draft" / "dflash-one.gguf"
    write_gguf(draft, file, target)
    line = f"llama-server -m {target} -md {file} --spec-type draft-dflash --spec-draft-n-max 3"
    for name in (str(tmp_path / "draft"), str(file)):
        assert main([*words, name, "--template-args", '{"thinking": false}']) == 0
        end = """ --chat-template-kwargs '{"thinking": false}' --host 127.0.0.1 --port 8000\n"""
        assert capsys.readouterr().out == line + end
    # Another target's, and what llama.cpp does not take.
    other = str(write_target(make_target(vocab_size=16, num_hidden_layers=3), tmp_path / "other.gguf"))
    assert main([*words[:-2], other, "--draft", str(file)]) == 1
    assert "belongs to another target" in capsys.readouterr().err
    assert main([*words, str(file), "--dtype", "bf16"]) == 2
    assert main([*words[:-2], str(tmp_path), "--draft", str(file)]) == 2
    assert "llama.cpp runs .gguf files; name the target's .gguf file" in capsys.readouterr().err
    assert main([*words[:-2], str(file), "--draft", str(file)]) == 1
    assert "is a drafter; name the GGUF file of the target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--dry-run"], 2, "--dry-run prints the command of another engine"),
        (["--engine", "vllm", "--compile"], 2, "--compile is for --engine transformers"),
        (["--engine", "vllm", "--no-packed"], 2, "--no-packed is for --engine transformers"),
        (["--engine", "sglang", "--tree-nodes", "7"], 2, "--tree-nodes is for --engine transformers"),
        (
            ["--engine", "vllm", "--port", "0"],
            2,
            "--port 0 is for --engine transformers, which chooses a free port; name",
        ),
        (["--engine", "tgi"], 2, "invalid choice: 'tgi'"),
        (["--port", "70000"], 2, "70000 is not a port"),
    ],
)
def test_wrong_engine_options_are_refused(more, code, message, world, capsys):
    try:
        exit_code = main(serve(world, *more))
    except SystemExit as stopped:
        exit_code = stopped.code
    assert exit_code == code and message in capsys.readouterr().err


def test_missing_engine_is_named(world, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert main(serve(world, "--engine", "vllm")) == 1
    assert "--engine vllm is not installed (" in capsys.readouterr().err
    assert main(["serve", "--target", str(world / "target"), "--engine", "vllm"]) == 2
    assert "needs --draft" in capsys.readouterr().err


def test_trust_covers_the_drafter_of_an_engine(world, capsys):
    """Neither engine has an option for the target alone; `--help` said that the drafter's code never runs."""
    for engine in ("vllm", "sglang"):
        assert main(serve(world, "--engine", engine, "--trust-remote-code", "--dry-run")) == 0
        printed = capsys.readouterr()
        assert "--trust-remote-code" in printed.out and "it also runs the drafter's code" in printed.err
        assert main(serve(world, "--engine", engine, "--dry-run")) == 0
        printed = capsys.readouterr()
        assert "trust" not in printed.out and "the drafter's code" not in printed.err


@pytest.mark.parametrize(
    ("host", "open"),
    [("0.0.0.0", True), ("::", True), ("10.1.2.3", True), ("a.host", True)]
    + [("127.0.0.1", False), ("127.9.9.9", False), ("::1", False), ("localhost", False)],
)
def test_open_server_without_a_key_warns(host, open, world, capsys, monkeypatch):
    """It was opened without a word."""
    command = serve(world, "--engine", "vllm", "--dry-run", "--host", host)
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)
    assert main(command) == 0
    printed = capsys.readouterr().err
    assert (f"warning: --host {host} lets other machines use the server without a key" in printed) == open
    assert main([*command, "--api-key", "x"]) == 0
    assert "without a key" not in capsys.readouterr().err
