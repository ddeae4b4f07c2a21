"""The command line, end to end on a tiny pair."""

import io
import re
import sys

import pytest
from support.pairs import make_draft
from support.tiny_chat import THINKING, save_target
from transformers import AutoModelForCausalLM, GenerationMixin

from dflash_hf import cli
from dflash_hf.cli import main
from dflash_hf.modeling.target_dflash import Trial
from dflash_hf.terminal import wants_color


NAMED = ["--target", "t", "--data", "d"]


@pytest.fixture(scope="module")
def pair_arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = AutoModelForCausalLM.from_pretrained(save_target(folder / "target"))
    make_draft(target, own_mask_embedding=False).save_pretrained(folder / "draft")
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--device", "cpu"]


def test_the_pair_that_needs_no_hub_goes_by_its_name(pair_arguments, capsys, monkeypatch):
    folders = {False: pair_arguments[1], True: pair_arguments[3]}
    monkeypatch.setattr("dflash_hf.smollm2.smollm2_folder", lambda: folders[False])
    monkeypatch.setattr("dflash_hf.smollm2.drafter_folder", lambda: folders[True])
    command = ["generate", "--target", "smollm2", "--draft", "smollm2", "--prompt", "a", "--device", "cpu"]
    assert main([*command, "--max-new-tokens", "4"]) == 0
    assert "with the drafter" in capsys.readouterr().err


def test_generate_prints_the_target_s_own_text(pair_arguments, capsys, monkeypatch):
    generate = ["generate", *pair_arguments, "--max-new-tokens", "24"]
    assert main([*generate, "--prompt", "a.x1 = n", "--compare"]) == 0
    printed = capsys.readouterr()
    assert all(said in printed.err for said in ("tau", "the same tokens", "cut off at --max-new-tokens 24"))
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


def test_tokens_that_rounding_changed_are_explained(pair_arguments, capsys, monkeypatch):
    """`--compare` said "other tokens", and no more."""
    generate = GenerationMixin.generate

    def other(*args, assistant_model=None, **options):
        output = generate(*args, assistant_model=assistant_model, **options)
        output.sequences[0, -1] += assistant_model is None
        return output

    monkeypatch.setattr(GenerationMixin, "generate", other)
    command = ["generate", *pair_arguments, "--prompt", "a", "--max-new-tokens", "4", "--compare", "--dtype"]
    for dtype, explained in (("bfloat16", True), ("float32", False)):
        assert main([*command, dtype]) == 0
        printed = capsys.readouterr().err
        assert "other tokens" in printed and ("as rounding in bfloat16 allows" in printed) == explained


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
        ([*drafted, "--template-args", "{}"], "expect lower acceptance"),
        (command, None),
    ):
        assert main(arguments) == 0
        printed = capsys.readouterr()
        assert ("arguments of the chat template" in printed.err) == (said is not None)
        assert said is None or said in printed.err
        texts.append(printed.out)
    assert texts[0] == texts[1] != texts[2] == texts[3]


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["chat"]], ids=" ".join)
def test_trying_out_the_target_is_not_part_of_an_answer_s_time(pair_arguments, command, monkeypatch):
    """It was billed to the drafter: `generate --compare` showed 13 tokens/s, the target alone 22."""
    order, support, generate = [], Trial.support, GenerationMixin.generate
    monkeypatch.setattr(Trial, "support", lambda trial, kinds: order.append("tried") or support(trial, kinds))
    monkeypatch.setattr(GenerationMixin, "generate", lambda *a, **k: order.append("generate") or generate(*a, **k))
    monkeypatch.setattr(sys, "stdin", io.StringIO("a"))
    assert main([*command, *pair_arguments, "--max-new-tokens", "4"]) == 0
    assert order == ["tried", "generate"]


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
        (["demo", "--runs", "many"], "argument --runs: invalid value 'many'; give a whole number"),
        (["features", *NAMED, "--target-layer-ids", "1,2"], "invalid value '1,2'; give a whole number"),
        (["prompts", *NAMED[:2], "--count", "1", "--output", "."], ". must be a file that ends in .jsonl"),
        (["prompts", *NAMED[:2], "--count", "1", "--output", "a.txt"], "a.txt must be a file that ends in .jsonl"),
        (["regenerate", *NAMED, "--output", "a.jsonl.gz"], "a.jsonl.gz must be a file that ends in .jsonl"),
        (["eval", "--compare", ".", "."], ". is a folder; name a file"),
        (["generate", "--target", "x"], "--prompt"),
        (["nonsense"], "invalid choice"),
        ([], "run:\n  demo"),
        (["train", "--learning-rate", "1"], "write settings of the recipe as learning_rate=VALUE"),
        (["chat", "--colour=never"], "--colour=never; did you mean --color? (see dflash chat --help)"),
        (["chat", "--foo", "1"], "dflash chat: error: unrecognized arguments: --foo 1 (see dflash chat --help)"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_errors_are_one_line(pair_arguments, tmp_path, capsys):
    target, draft = pair_arguments[1], pair_arguments[3]
    for arguments, message in (
        (["generate", "--target", str(tmp_path), "--prompt", "x"], str(tmp_path)),
        (["generate", "--target", target, "--draft", target, "--prompt", "x"], "is not a DFlash drafter"),
        (["generate", "--target", draft, "--draft", target, "--prompt", "x"], "are swapped"),
        (
            ["generate", "--target", target, "--draft", draft, "--prompt", "x", "--device", "cuda:99"],
            "this machine has",
        ),
        (["generate", "--target", target, "--draft", draft, "--prompt", "", "--raw"], "--prompt is empty"),
    ):
        assert main(arguments) == 1 + message.startswith("--"), arguments
        last = capsys.readouterr().err.strip()
        assert f"dflash {arguments[0]}: error: " in last and message in last
        assert "Traceback" not in last


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_closed_standard_stream_is_an_empty_one(name, pair_arguments, capsys, monkeypatch):
    """`<&-` ended in a TypeError, `>&-` in an AttributeError; with `2>&-` messages went to standard output."""
    monkeypatch.setattr(sys, name, None)
    prompt = "-" if name == "stdin" else "a"
    assert main(["generate", *pair_arguments, "--prompt", prompt, "--max-new-tokens", "4"]) == 2 * (name == "stdin")
    printed = capsys.readouterr()
    assert ("--prompt is empty" if name == "stdin" else "tau") in printed.err or name == "stderr"
    assert "tau" not in printed.out and "object" not in printed.err


def test_colour_is_for_terminals_and_no_color_for_those_who_mind(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "dumb")  # which shows escapes as they are
    assert not wants_color(None, Terminal()) and wants_color(True, Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(None, Terminal()) and not wants_color(None, io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(None, Terminal())
    assert wants_color(True, io.StringIO())  # asked for by name
    monkeypatch.setenv("NO_COLOR", "")
    assert wants_color(None, Terminal()) and not wants_color(False, Terminal())


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_of_one_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as error:
        main([command, "--help"])
    assert error.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: dflash {command}" in text and len(text.splitlines()) <= 45


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--help"])
    assert error.value.code == 0
    output = capsys.readouterr().out
    assert all(f"\n  {command} " in output for command in cli.COMMANDS)
    assert re.findall(r"^(\w+):$", output, re.MULTILINE) == [*cli.GROUPS, "options"]
