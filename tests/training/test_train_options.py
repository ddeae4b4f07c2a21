"""The command line of `dflash train`: an option for each setting, in one spelling, and what 0.2 spelt otherwise."""

import dataclasses

import pytest
from transformers import HfArgumentParser

from dflash_hf import DFlashTrainingArguments, cli
from dflash_hf.commands.train import LISTED, OLD_SPELLINGS, settings_of
from dflash_hf.training.arguments import DFlashOptions, ScriptArguments
from dflash_hf.training.recipe import decide


pytest.importorskip("yaml")
MODELS = ["--target", "t", "--data", "d"]


def settings_from(*words) -> dict:
    """The settings of a command line that somebody has chosen."""
    arguments = cli.parse(["train", *MODELS, *words])
    settings = decide(arguments.config, settings_of(arguments))
    chosen = {name: setting.value for name, setting in settings.items() if setting.source == "command line"}
    return {name: value for name, value in chosen.items() if name not in ("target", "data")}


def test_every_setting_is_an_option_of_its_name():
    fields = [*dataclasses.fields(ScriptArguments), *dataclasses.fields(DFlashTrainingArguments)]
    names = {field.name for field in fields if field.init} - {"debug"}
    options = {f"--{name.replace('_', '-')}": name for name in names}
    parser = cli.build_parser("train", all_options=True)
    parser_options = {option: action.dest for action in parser._actions for option in action.option_strings}
    assert options.items() <= parser_options.items()
    of_commands = {"--config", "--dry-run", "--keys", "--entry", "--json", "--quiet", "--verbose", "--debug", "--help"}
    assert parser_options.keys() - options.keys() == of_commands | {"--card", "--assume", "-q", "-v", "-h"}


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--num-anchors", "4"], {"num_anchors": 4}),
        (["--learning-rate=3e-4"], {"learning_rate": 3e-4}),
        (["--target-layer-ids", "8", "15"], {"target_layer_ids": [8, 15]}),
        (["--target-layer-ids", "[8, 15]"], {"target_layer_ids": [8, 15]}),
        (["--init-layers", "-2", "-1"], {"init_layers": [-2, -1]}),
        (["--init-layers", "null"], {"init_layers": None}),
        (["--eval-data", "a b.jsonl", "12e4"], {"eval_data": ["a b.jsonl", "12e4"]}),
        (["--eval-data", "12e4"], {"eval_data": "12e4"}),
        (["--eval-data", "a.jsonl", "lang=en/part.jsonl"], {"eval_data": ["a.jsonl", "lang=en/part.jsonl"]}),
        (["--data-revision", "12e4"], {"data_revision": "12e4"}),
        (["--muon", "--bf16", "false"], {"muon": True, "bf16": False}),
        (["--peft-config", "{r: 4}"], {"peft_config": {"r": 4}}),
        (["--peft-config.r", "4", "--peft-config.a.b=x=1"], {"peft_config": {"r": 4, "a": {"b": "x=1"}}}),
        (["--report-to", "none", "--save-strategy", "no"], {"report_to": "none", "save_strategy": "no"}),
        (["--run-name", "lr=1"], {"run_name": "lr=1"}),
        (["--preset", "paper"], {"preset": "paper"}),
    ],
)
def test_option_has_the_type_of_its_setting(words, settings, capsys):
    assert settings_from(*words) == settings
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (["num_anchors=4"], ["--num-anchors", "4"]),
        (["target_layer_ids=[0, 2]"], ["--target-layer-ids", "0", "2"]),
        (["muon=true", "bf16=false"], ["--muon", "--bf16", "false"]),
        (["draft_config.markov_rank=8"], ["--draft-config.markov_rank", "8"]),
        (["draft_config={markov_rank: 8}"], ["--draft-config", "{markov_rank: 8}"]),
        (["init_layers=null"], ["--init-layers", "null"]),
        (["--output", "o"], ["--output-dir", "o"]),
        (["--output=o", "num_anchors=4"], ["--output-dir", "o", "--num-anchors", "4"]),
        (["eval_data=[a, b]"], ["--eval-data", "a", "b"]),
        (["--eval-data", "a", "b", "num_anchors=4"], ["--eval-data", "a", "b", "--num-anchors", "4"]),
    ],
)
def test_old_spelling_works_and_names_the_new(words, new, capsys):
    assert settings_from(*words) == settings_from(*new)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dflash train: settings are options since 0.3; write --")
    assert all(word in line for word in new if word.startswith("--") and word not in (*words, "--bf16"))
    assert set(OLD_SPELLINGS) == {"--output", "key=value"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--blok-size", "1"], "unrecognized arguments: --blok-size 1; did you mean --block-size?"),
        (["--block_size", "1"], "unrecognized arguments: --block_size 1; did you mean --block-size?"),
        (["--block", "1"], "did you mean --block-size?"),  # no beginning of a name is a name
        (["blok_size=1", "--data", "absent.jsonl"], "--block-size? --data='absent.jsonl': there is no such file"),
        (["4"], "unrecognized arguments: 4; settings are written as --name value"),
        (["--num-anchors"], "argument --num-anchors: expected one argument"),
    ],
)
def test_unknown_option_names_the_nearest(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        cli.parse(["train", *words])
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_upstreams_parser_can_format_all_help():
    """A percent sign in it failed as a format, where newer versions of argparse check help when it is added."""
    text = HfArgumentParser((ScriptArguments, DFlashTrainingArguments)).format_help()
    assert "data: 5 %, of 80" in " ".join(text.split())


def test_help_lists_what_is_set_first(capsys):
    """With all it was three screens; those of transformers are 120 more, for which torch is imported."""
    fields = [*dataclasses.fields(ScriptArguments), *dataclasses.fields(DFlashOptions)]
    assert set(LISTED) <= {field.name for field in fields}
    with pytest.raises(SystemExit):
        cli.parse(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--num-anchors N Blocks sampled from each sequence at each step (paper: 512, cpu: 16)" in text
    assert "--adam-beta1" not in text and "--entry" not in text
