"""`dflash doctor` from the command line: what it prints, and a remedy that can be pasted and helps."""

import json

import pytest
from support.chat_pair import chat_tokenizer, requests
from support.tiny_chat import END

from dflash_hf import DFlashDraftConfig
from dflash_hf.cli import main
from dflash_hf.data.template import digests_of_tokenizer


@pytest.fixture(scope="module")
def pair(chat_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target, draft, tokenizer = chat_pair
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    config = DFlashDraftConfig.from_pretrained(folder / "draft")
    config.dflash_config = {**config.dflash_config, "trained_with": digests_of_tokenizer(tokenizer)}
    config.save_pretrained(folder / "draft")
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in requests(16, seed=9)]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def doctor(pair, capsys, *arguments):
    names = ["--target", pair / "target", "--draft", pair / "draft", "--data", pair / "prompts.jsonl"]
    code = main(["doctor", *map(str, [*names, "--max-new-tokens", "24", "--device", "cpu", *arguments])])
    return code, capsys.readouterr()


def test_printed_remedy_raises_tau(pair, capsys):
    path = pair / "draft" / "config.json"
    good = path.read_text(encoding="utf-8")
    config = DFlashDraftConfig.from_pretrained(pair / "draft")
    config.mask_token_id = END
    config.save_pretrained(pair / "draft")
    code, printed = doctor(pair, capsys, "--json")
    facts = json.loads(printed.out)
    assert code == 1 and facts["cause"]["key"] == "mask" and facts["unlike"] == []
    assert "likeliest cause" in printed.err and facts["cause"]["remedy"] in printed.err
    assert len(facts["tried"]) > 10

    fields = facts["cause"]["remedy"].removeprefix("write ").removesuffix(" into the drafter's config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    for table in (config, config["dflash_config"]):
        table |= json.loads(f"{{{fields}}}")
    path.write_text(json.dumps(config), encoding="utf-8")
    assert config["mask_token_id"] == json.loads(good)["mask_token_id"]
    code, printed = doctor(pair, capsys)
    assert code == 0 and "none of these" in printed.out


def test_other_chat_template_is_named(pair, capsys, tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template += "{# edited #}"
    tokenizer.save_pretrained(pair / "target")
    code, printed = doctor(pair, capsys)
    assert code == 0 and "the template differs from the drafter's training" in printed.out


def test_benchmark_is_read_by_name(pair, capsys, monkeypatch):
    """`eval` knew it, and `doctor` took it for a dataset."""
    rows = [{"prompt": [prompt, prompt]} for prompt in requests(2, seed=9)]
    monkeypatch.setattr("dflash_hf.evaluation.sets.load_rows", lambda *_, **__: rows)
    code, printed = doctor(pair, capsys, "--data", "mt-bench", "--prompts", "2", "--json")
    assert code in (0, 1) and len(json.loads(printed.out)["tried"]) > 10


def test_errors_are_one_line(pair, capsys, tmp_path):
    (tmp_path / "one.txt").write_text("ab\n", encoding="utf-8")
    code, printed = doctor(pair, capsys, "--data", tmp_path / "one.txt")
    assert code == 1 and "1 prompt(s) gave" in printed.err.strip().splitlines()[-1]
    code, printed = doctor(pair, capsys, "--base", tmp_path / "nowhere")
    assert code == 1 and "--base" in printed.err and "nowhere" in printed.err


def test_row_without_a_prompt_is_named(pair, capsys, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": null}\n', encoding="utf-8")
    code, printed = doctor(pair, capsys, "--data", tmp_path / "prompts.jsonl")
    assert code == 1 and "Row 1 of the prompts: all of its columns are null" in printed.err
