"""`dflash doctor` from the command line: what it prints, and a remedy that can be pasted and helps."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.chat_pair import chat_tokenizer, requests
from support.tiny_chat import END

from dflash_hf import DFlashDraftConfig
from dflash_hf.cli import main
from dflash_hf.data.encode import digests_of_tokenizer
from dflash_hf.doctor.experiments import Case, _with_tokenizer_of, dtypes


@pytest.fixture(scope="module")
def pair(chat_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target, draft, tokenizer, _ = chat_pair
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    config = DFlashDraftConfig.from_pretrained(folder / "draft")
    config.dflash_config["trained_with"] = digests_of_tokenizer(tokenizer)
    config.save_pretrained(folder / "draft")
    lines = [json.dumps({"prompt": said}) + "\n" for said in requests(16, seed=9)]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def doctor(pair, capsys, *arguments):
    names = ["--target", pair / "target", "--draft", pair / "draft", "--data", pair / "prompts.jsonl"]
    code = main(["doctor", *map(str, [*names, "--max-new-tokens", "24", "--device", "cpu", *arguments])])
    return code, capsys.readouterr()


def test_the_remedy_can_be_pasted_and_helps(pair, capsys):
    config = DFlashDraftConfig.from_pretrained(pair / "draft")
    right = config.mask_token_id
    config.mask_token_id = END
    config.save_pretrained(pair / "draft")
    code, printed = doctor(pair, capsys, "--json")
    facts = json.loads(printed.out)
    assert code == 1 and facts["cause"]["key"] == "mask" and facts["unlike"] == []
    assert "likeliest cause" in printed.err and facts["cause"]["remedy"] in printed.err
    assert len(facts["tried"]) > 10 and facts["decoding"]["tau"] == facts["decoding"]["teacher_forced"]

    remedy = facts["cause"]["remedy"].replace("python -c", f"{sys.executable} -c")
    subprocess.run(remedy, shell=True, check=True)
    assert DFlashDraftConfig.from_pretrained(pair / "draft").mask_token_id == right
    assert json.loads((pair / "draft" / "config.json").read_text(encoding="utf-8"))["auto_map"]
    code, printed = doctor(pair, capsys)
    assert code == 0 and "none of these" in printed.out


def test_names_in_a_remedy_are_no_commands(tmp_path):
    """They come from files of others, and a remedy is there to be pasted."""
    made = tmp_path / "made"
    names = {"target": f"a'$(touch {made})", "draft": f'b/$(touch {made})"`touch {made}`'}
    case = Case(None, None, None, [], None, names=names)
    for command in (
        case.remedy_in_config("c.block_size = 8"),
        case.train_again(),
        _with_tokenizer_of(*names.values()),
    ):
        words = command.replace("python -c", "true").replace("hf download", "true").replace("dflash ", "true ")
        subprocess.run(words, shell=True, check=True)
    assert not made.exists()


def test_another_template_is_noticed(pair, capsys, tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template += "{# edited #}"
    tokenizer.save_pretrained(pair / "target")
    code, printed = doctor(pair, capsys)
    assert code == 0 and "the template differs from the drafter's training" in printed.out


def test_errors_are_one_line(pair, capsys, tmp_path):
    (tmp_path / "one.txt").write_text("ab\n", encoding="utf-8")
    code, printed = doctor(pair, capsys, "--data", tmp_path / "one.txt")
    assert code == 1 and "1 prompt(s) gave" in printed.err.strip().splitlines()[-1]
    code, printed = doctor(pair, capsys, "--base", tmp_path / "nowhere")
    assert code == 1 and "--base" in printed.err and "nowhere" in printed.err
    (pair / "draft" / "card_facts.json").write_text("{", encoding="utf-8")
    code, printed = doctor(pair, capsys)
    (pair / "draft" / "card_facts.json").unlink()
    assert code == 1 and "card_facts.json is not JSON" in printed.err


def test_a_row_without_a_prompt_is_named(pair, capsys, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": null}\n', encoding="utf-8")
    code, said = doctor(pair, capsys, "--data", tmp_path / "prompts.jsonl")
    assert code == 1 and "Row 1 of the prompts: all of its columns are null" in said.err


def test_names_in_commands_are_quoted():
    """A folder with a space made a remedy that could not be pasted."""
    draft, names = SimpleNamespace(dtype=torch.bfloat16), {"target": "my target", "draft": "my draft"}
    (experiment,) = dtypes(Case(None, draft, None, [], None, names=names))
    assert experiment.remedy == "dflash generate --target 'my target' --draft 'my draft' --dtype float32"
