"""
Every command and every Python block of README and guides.

Each page is a story: its blocks run from top to bottom, in one folder and one namespace, with a tiny pair in the place
of `smollm2`. A block whose first line says that it needs something (`# needs a GPU`) is not run; its arguments are
parsed all the same. Amounts are cut to what a CPU does in seconds.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import side_by_side
import torch
import yaml
from support.guides import PAGES, ROOT, blocks_of, definitions_of, save_stand_in

from dflash_hf import cli
from dflash_hf.cli import COMMANDS, build_parser, main
from dflash_hf.commands.train import settings_of
from dflash_hf.training.recipe import read_recipe


# Commands are also shown in recipes, results, messages and docstrings.
SHOWN = [
    path
    for pattern in ("examples/recipes/*.yaml", "examples/**/*.md", "src/**/*.py", "modeling/*.py", "examples/**/*.py")
    for path in sorted(ROOT.glob(pattern))
    if path not in PAGES and "dflash " in path.read_text(encoding="utf-8")
]
PARSED_ONLY = {"serve", "chat"}  # they wait for a person; `serve --dry-run` ends by itself
LESS = {
    "--count": "4",
    "--prompts": "2",
    "--max-new-tokens": "8",
    "--runs": "1",
    "--batch-size": "4",
    "--blocks": "2",
    "--kinds": "chat",
}
LESS_TRAINING = ["--max-minutes", "null", "--max-steps", "2", "--num-anchors", "4", "--eval-steps", "2"]
LESS_TRAINING += ["--save-steps", "2", "--bf16", "false", "--target-dtype", "float32", "--use-cpu"]
LESS_TRAINING += ["--per-device-train-batch-size", "2"]


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    return save_stand_in(tmp_path_factory.mktemp("stand_in"))


@pytest.fixture
def story(page, pair, tmp_path, monkeypatch):
    """A folder with prompts, where the page does not make them, and a drafter; `smollm2` is the tiny pair."""
    target, draft = pair
    monkeypatch.setattr("dflash_hf.pairs.packaged_targets.PackagedTarget.folder", lambda *_: target)
    monkeypatch.setattr("dflash_hf.smollm2.drafter_folder", lambda: draft)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    if "my-drafter" not in page.read_text(encoding="utf-8").partition("dflash train")[2]:
        shutil.copytree(draft, tmp_path / "my-drafter")
    if "--output prompts.jsonl" in page.read_text(encoding="utf-8"):
        return
    write_prompts("prompts.jsonl")


def write_prompts(path: str) -> None:
    rows = [{"prompt": text} for text in ("What is a cache?", "Count to five.", "Name a colour.", "Say 1")]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def parse(words: list[str]) -> None:
    """Parse a command's words with the parser, or the file, that they are for."""
    program, *rest = words
    if program == "dflash":
        if "--compare" in rest and rest[0] == "eval":  # files that are to be there
            return
        arguments = cli.parse(rest)
        if rest[0] == "train" and arguments.keys is None:
            read_recipe(bundled(arguments.config), settings_of(arguments))
    elif program == "accelerate":
        at = rest.index("-m")
        options = dict(zip(rest[1:at:2], rest[2:at:2]))
        assert rest[0] == "launch"
        assert "--config_file" not in options or Path(bundled(options["--config_file"])).is_file()
        assert rest[at + 1] == "dflash_hf.cli"
        parse(["dflash", *rest[at + 2 :]])
    elif program == "pip":
        extras = re.findall(r"\.\[([\w,]+)\]", " ".join(rest))
        declared = (ROOT / "setup.cfg").read_text(encoding="utf-8").split("[options.extras_require]")[1]
        for extra in ",".join(extras).split(",") if extras else ():
            assert re.search(rf"^{extra} =$", declared, re.MULTILINE), extra
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif program == "cp":
        assert all(list(ROOT.glob(file)) for file in rest[:-1]), rest
    elif program == "vllm":
        speculative = json.loads(rest[rest.index("--speculative-config") + 1])
        assert set(speculative) == {"method", "model", "num_speculative_tokens"}
    elif program.endswith("/pytest"):
        assert (ROOT / rest[0]).is_file(), rest[0]
    elif program == "python" and rest[0] != "-m":
        assert (ROOT / rest[0]).is_file(), rest[0]
        if rest[0].endswith("side_by_side.py"):
            side_by_side.arguments_of(rest[1:])
    else:
        assert words[:3] in (["python", "-m", "sglang.launch_server"], ["hf", "auth", "login"]), words


def bundled(file: str | None) -> str | None:
    """A recipe, or a configuration of the launcher: the one in `examples` that a page has copied."""
    copies = sorted(ROOT.glob(f"examples/*/{Path(file).name}")) if file else []
    return str(copies[0]) if copies else file


def commands_in(line: str) -> list[list[str]]:
    """The commands of a line for the shell: of a pipe, of a list, and what is substituted."""
    inner = re.findall(r"\$\((.*?)\)", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if word in ("|", "&&"):
            commands.append([])
        else:
            commands[-1].append(word)
    cut = [words[: next((i for i, word in enumerate(words) if word in "<>"), None)] for words in commands]
    return [words for words in [*cut, *map(shlex.split, inner)] if words[0] not in ("cat", "eval")]


def smaller(words: list[str]) -> list[str]:
    """The same command, with less to do."""
    words = [LESS.get(before, word) for before, word in zip(["", *words], words)]
    if words[0] in ("generate", "regenerate", "eval") and "--max-new-tokens" not in words:
        words += ["--max-new-tokens", LESS["--max-new-tokens"]]
    if words[0] == "train" and "--keys" not in words:
        fresh = "--config" in words and "--draft" not in words
        words += LESS_TRAINING + (["--draft-vocab-size", "64"] if fresh else [])
    return words


def run(words: list[str]) -> None:
    if words[0] != "dflash" or words[1] in PARSED_ONLY and "--dry-run" not in words:
        return
    if words[1] == "prompts":  # the tiny pair writes no requests; tests/synthetic/test_magpie.py has one that does
        return write_prompts(words[words.index("--output") + 1])
    code = main(smaller(words[1:]))
    # The stand-in's drafter is random: findings of `doctor` are no failure.
    assert code == 0 or words[1] == "doctor", shlex.join(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs_from_top_to_bottom(page, story):
    namespace = {"__name__": "__main__"}
    for block in blocks_of(page):
        print(f"--- {block.where}")
        if block.language == "bash":
            for words in block.commands():
                parse(words)
                if block.runs:
                    run(words)
        elif block.language == "python":
            code = compile(block.text, block.where, "exec")
            if block.runs:
                exec(code, namespace)
        elif block.language == "yaml":
            Path("recipe.yaml").write_text(block.text, encoding="utf-8")
            assert isinstance(yaml.safe_load(block.text), dict)
        else:
            assert block.language in ("", "text"), block.where


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tree_of_the_guide_is_on_the_device(device):
    """It was made on the CPU, and the target on a GPU verified it beside anchors that were not."""
    tree_of = definitions_of(ROOT / "examples" / "guides" / "own_policy.md", "Tree", "tree_of")["tree_of"]
    state = SimpleNamespace(anchors=torch.zeros(1, dtype=torch.long, device=device))
    tree = tree_of(state, tokens=[5, 7, 9], parents=[0, 0, 1])
    tensors = {name: value for name, value in tree._asdict().items() if isinstance(value, torch.Tensor)}
    assert {tensor.device.type for tensor in tensors.values()} == {device}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "tokens": (1, 3),
        "depths": (1, 3),
        "ancestors": (1, 3, 3),
        "parents": (1, 3),
        "log_probs": (1, 3),
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_help_can_be_parsed(command, tmp_path, monkeypatch):
    """Each can be parsed; what they do, they do in pages, in other tests, or on the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dflash_hf.pairs.packaged_targets.PackagedTarget.folder", lambda *_: tmp_path)
    write_prompts("prompts.jsonl")
    for name in ("responses.jsonl", "prompts.txt", "question.txt", "config.json"):
        Path(name).write_text("{}", encoding="utf-8")
    Path("recipe.yaml").write_text("{target: T, data: responses.jsonl, output_dir: my-drafter}", encoding="utf-8")
    lines = build_parser(command).epilog.partition("examples:\n")[2].split("\n\n")[0].splitlines()
    assert lines
    for line in lines:
        for words in commands_in(line):
            parse(words)


def test_commands_of_a_script_can_be_parsed(tmp_path):
    """`dflash` only writes down what it is asked, for each setting of the script."""
    log = tmp_path / "log.jsonl"
    stub = tmp_path / "bin" / "dflash"
    stub.parent.mkdir()
    stub.write_text(
        f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]), file=open({str(log)!r}, 'a'))\n"
    )
    stub.chmod(0o755)
    script = ROOT / "examples" / "smollm2-135m-dflash" / "make.sh"
    for settings in ({}, {"FRESH_DATA": "9"}):
        environment = {"PATH": f"{stub.parent}{os.pathsep}{os.environ['PATH']}", **settings}
        subprocess.run(["bash", script, tmp_path / "work"], env=environment, check=True)
    commands = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert {"prompts", "regenerate", "features", "train", "eval", "publish"} <= {words[0] for words in commands}
    for words in commands:
        parse(["dflash", *words])


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_commands_of_other_files_can_be_parsed(path):
    """A command on lines of its own can be parsed, and options named in passing exist."""
    text = re.sub(r" *\\\n[# ]*", " ", path.read_text(encoding="utf-8"))
    for line in re.findall(r"^[# ]*(dflash [a-z0-9]+ .*)", text, re.MULTILINE) if path.suffix != ".py" else ():
        for words in commands_in(line.replace("--max-minutes M", "--max-minutes 3")):
            parse(words)
    for command, rest in re.findall(r"(?<![\w-])dflash ([a-z0-9]+)([^`\"'|&\n]*)", text):
        if command in COMMANDS:
            options = build_parser(command, all_options=True).options
            assert set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)) <= set(options), command
