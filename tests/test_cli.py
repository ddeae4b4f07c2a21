"""The command line, end to end on a tiny pair."""

import io
import json
import random
import re
import sys
from functools import partial

import pytest
import torch
from support.pairs import make_draft
from support.tiny_chat import THINKING, save_target
from transformers import AutoModelForCausalLM

from dflash_hf import cli
from dflash_hf.cli import main
from dflash_hf.demo import run as demo
from dflash_hf.terminal import wants_color


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Python files whose lines are alike, so that a few steps teach something."""
    folder = tmp_path_factory.mktemp("sources")
    generator = random.Random(0)
    for i in range(36):
        lines = [
            f"{generator.choice('abcd')}.{generator.choice('xyz')}{generator.randrange(50)} = n" for _ in range(40)
        ]
        (folder / f"m{i}.py").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(sources, tmp_path_factory):
    """`run(*arguments)`: the demo with a tiny pair, of few layers to compile; it is trained by the first call."""
    cache = tmp_path_factory.mktemp("cache")
    shallow = partial(demo.DemoSettings, target_layers=3, target_layer_ids=(0, 1), draft_layers=1)

    def call(*arguments):
        sizes = ("--target-steps", "25", "--draft-steps", "12", "--prompts", "3", "--runs", "1")
        return main(["demo", "--cache-dir", str(cache), "--source", str(sources), *sizes, *arguments])

    call.cache = cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "DemoSettings", shallow)
        yield call


def test_demo_from_nothing_to_the_picture(run, capsys, monkeypatch):
    threads = torch.get_num_threads()
    assert run() == 0
    output = capsys.readouterr().out
    for part in (
        "data ",
        "target ",
        "drafter ",
        "kept in",
        "tokens/s",
        "tau ",
        "slot accepted",
        "3 of 3 outputs equal",
    ):
        assert part in output, part
    assert "\x1b" not in output  # no terminal, no colours
    assert torch.get_num_threads() == threads
    report = json.loads((run.cache / "demo.json").read_text(encoding="utf-8"))
    assert report["summary"]["lossless"] is True
    assert len(report["correct"]) == 3
    pytest.importorskip("matplotlib")
    assert (run.cache / "demo.png").stat().st_size > 10_000

    # The second time nothing is trained.
    monkeypatch.setattr(demo, "train_pair", lambda *_: pytest.fail("trained again"))
    assert run("--color") == 0
    output = capsys.readouterr().out
    assert "read from" in output and "\x1b[" in output


def test_interrupted_training_leaves_no_pair(run, capsys, monkeypatch):
    run()
    before = sorted(path.name for path in run.cache.iterdir())
    capsys.readouterr()

    def interrupted(settings, folder, num_prompts, say):
        (folder / "target").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train_pair", interrupted)
    assert run("--seed", "5") == 130
    assert "interrupted" in capsys.readouterr().err
    assert sorted(path.name for path in run.cache.iterdir()) == before


@pytest.fixture(scope="module")
def pair_arguments(run):
    run()
    (folder,) = [path for path in run.cache.iterdir() if path.is_dir()]
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--device", "cpu"]


def test_generate_prints_the_target_s_own_text(pair_arguments, capsys, monkeypatch):
    generate = ["generate", *pair_arguments, "--max-new-tokens", "24"]
    assert main([*generate, "--prompt", "a.x1 = n", "--compare"]) == 0
    printed = capsys.readouterr()
    assert "tau" in printed.err and "the same tokens" in printed.err
    without_draft = [*generate[:3], *generate[5:]]
    assert main([*without_draft, "--prompt", "a.x1 = n"]) == 0
    alone = capsys.readouterr()
    assert alone.out == printed.out and alone.out.strip()
    assert "target alone: " in alone.err
    assert main([*generate, "--prompt", "a.x1 = n", "--compare", "--packed"]) == 0
    packed = capsys.readouterr()
    assert packed.out == printed.out
    assert "with the drafter, packed: " in packed.err and "target alone, packed: " in packed.err

    monkeypatch.setattr(sys, "stdin", io.StringIO("a.x1 = n"))
    assert main([*generate, "--prompt", "-", "--show-drafts", "--color"]) == 0
    again = capsys.readouterr().out
    assert again.startswith(printed.out)
    marked = re.sub(r"\x1b\[\d+m", "", again[len(printed.out) :])
    assert printed.out.strip() in marked


def test_generate_speaks_as_the_drafter_was_trained(tmp_path, capsys):
    """It left out the arguments that `eval` honours: README trains without thinking, and then generated with it."""
    folder = save_target(tmp_path / "target", THINKING)
    draft = make_draft(AutoModelForCausalLM.from_pretrained(folder), own_mask_embedding=False)
    draft.config.dflash_config["chat_template_kwargs"] = {"enable_thinking": False}
    draft.save_pretrained(tmp_path / "draft")
    command = ["generate", "--target", str(folder), "--prompt", "Say 1", "--device", "cpu", "--max-new-tokens", "12"]
    drafted = [*command, "--draft", str(tmp_path / "draft")]
    texts = []
    for arguments, said in (
        (drafted, '{"enable_thinking": false}, as the drafter was trained'),
        ([*command, "--template-args", '{"enable_thinking": false}'], '{"enable_thinking": false}, as given'),
        ([*drafted, "--template-args", "{}"], "expect it to draft worse"),
        (command, None),
    ):
        assert main(arguments) == 0
        printed = capsys.readouterr()
        assert ("arguments of the chat template" in printed.err) == (said is not None)
        assert said is None or said in printed.err
        texts.append(printed.out)
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_sampling_takes_a_seed(pair_arguments, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        options = ["--temperature", "1.5", "--top-p", "0.95", "--seed", seed, "--max-new-tokens", "20"]
        assert main(["generate", *pair_arguments, "--prompt", "b.y2 = n", "--raw", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--prompts", "0"], "must be at least 1"),
        (["demo", "--runs", "many"], "invalid"),
        (["generate", "--prompt", "x"], "--target"),
        (["nonsense"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_errors_are_one_line(pair_arguments, sources, tmp_path, capsys):
    target, draft = pair_arguments[1], pair_arguments[3]
    for arguments, message in (
        (["demo", "--cache-dir", str(tmp_path), "--source", str(tmp_path)], "0 lines to train on"),
        (
            ["demo", "--cache-dir", str(tmp_path), "--source", str(sources), "--prompts", "9999"],
            "prompts=9999, but only",
        ),
        (["generate", "--target", str(tmp_path), "--prompt", "x"], str(tmp_path)),
        (["generate", "--target", target, "--draft", target, "--prompt", "x"], "is not a DFlash drafter"),
        (["generate", "--target", draft, "--draft", target, "--prompt", "x"], "are swapped"),
        (
            ["generate", "--target", target, "--draft", draft, "--prompt", "x", "--device", "cuda:99"],
            "this machine has",
        ),
        (["generate", "--target", target, "--draft", draft, "--prompt", "", "--raw"], "--prompt is empty"),
    ):
        assert main(arguments) == 1, arguments
        last = capsys.readouterr().err.strip()
        assert f"dflash {arguments[0]}: error: " in last and message in last
        assert "Traceback" not in last
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".pair", "pair"))]


def test_colour_is_for_terminals_and_no_color_for_those_who_mind(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_color(None, Terminal()) and not wants_color(None, io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(None, Terminal())
    assert wants_color(True, io.StringIO())  # asked for by name
    monkeypatch.setenv("NO_COLOR", "")
    assert wants_color(None, Terminal()) and not wants_color(False, Terminal())


@pytest.mark.parametrize("command", [name for name, _, _ in cli.COMMANDS])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as error:
        main([command, "--help"])
    assert error.value.code == 0
    assert f"usage: dflash {command}" in capsys.readouterr().out


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--help"])
    assert error.value.code == 0
    output = capsys.readouterr().out
    assert all(f"    {command}" in output for command in ("demo", "generate", "check", "convert", "publish"))
