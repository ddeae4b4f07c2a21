"""`dflash eval` on prompt files, from the command line to the report that a card shows."""

import json

import pytest
from support.pairs import make_draft
from support.tiny_chat import CHATML, make_tokenizer, saved_with

from dflash_hf import DFlashDraftModel
from dflash_hf.cli import main
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.evaluation.divergence import Divergence, Rounding
from dflash_hf.evaluation.methods import WHOLE_BLOCKS
from dflash_hf.evaluation.prompts import prompts_of
from dflash_hf.evaluation.sets import eval_rows
from dflash_hf.hub.card import CardFacts


USER = {"role": "user", "content": "Say 1"}
ANSWER = {"role": "assistant", "content": "1"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(CHATML)


@pytest.fixture(scope="module")
def pair(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = saved_with(tokenizer, folder / "target")
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(folder / "draft")
    return folder


def test_prompt_of_a_row_is_the_targets_input(tokenizer):
    encode = RowEncoder(ChatTemplate(tokenizer))
    served = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    for row in (
        {"messages": [USER]},
        {"messages": [USER, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": "Say 1", "answer": "1"},
        {"messages": [{**USER, "tool_calls": None}, ANSWER], "prompt": None},
    ):
        assert prompt_ids(encode, row) == served, row
    earlier = [USER, ANSWER, {"role": "user", "content": "And 2"}]
    assert prompt_ids(encode, {"messages": [*earlier, ANSWER]}) == prompt_ids(encode, {"messages": earlier})
    text = tokenizer("Say 1")["input_ids"]
    assert prompt_ids(encode, {"prompt": "Say 1"}, raw=True) == text
    assert prompt_ids(encode, {"prompt": "Say 1", "completion": "1"}) == text
    assert prompt_ids(RowEncoder(ChatTemplate(make_tokenizer(None))), {"prompt": "Say 1"}) == text
    ids = [5, 6, 7, 8]
    assert prompt_ids(encode, {"input_ids": ids}) == ids
    assert prompt_ids(encode, {"input_ids": ids, "loss_mask": [0, 0, 1, 1]}) == [5, 6]
    assert prompt_ids(encode, {"input_ids": ids, "labels": [-100, 6, 7, 8]}) == [5]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": "x"}, r"Row 1 of .*no column to read, only \['text'\]"),
        ({"prompt": "", "completion": "1"}, "Row 1 of .*The prompt is empty"),
        ({"messages": [ANSWER]}, "Row 1 of .*The prompt is empty"),
        ({"prompt": ["Hi", "And?"]}, r"Row 1 of .*`prompt` is \['Hi', 'And\?'\]; give a list of messages"),
        ({"input_ids": [4, 5], "loss_mask": [1, 1]}, "Row 1 of .*The prompt is empty"),
    ],
)
def test_row_without_a_prompt_is_named(row, message, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_hf.evaluation.sets.load_rows", lambda data, split: [{"prompt": "fine"}, row])
    with pytest.raises(ValueError, match=message):
        prompts_of(eval_rows("rows.jsonl", 9), RowEncoder(ChatTemplate(tokenizer)), "rows.jsonl")


def evaluate(pair, data, *arguments):
    names = ["--target", pair / "target", "--draft", pair / "draft", "--data", data, "--device", "cpu"]
    return main(["eval", *map(str, [*names, "--max-new-tokens", "8", "--runs", "1", *arguments])])


def test_eval_writes_its_report_beside_the_weights(pair, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("Say 1\n\nSay 2\nSay 3\n", encoding="utf-8")
    assert evaluate(pair, tmp_path / "prompts.txt", "--prompts", "2", "--output", pair / "draft") == 0
    printed = capsys.readouterr().out
    for part in ("tokens/s", "tau ", "4 of 4 outputs with the drafter equal", "eval_report.json"):
        assert part in printed, part
    assert "prompt lookup" not in printed
    report = json.loads((pair / "draft" / "eval_report.json").read_text(encoding="utf-8"))
    assert report["summary"]["prompts"] == 2 and report["summary"]["lossless"] is True
    facts = CardFacts.from_folder(pair / "draft", base_model="someone/target")
    assert facts.report == report

    pytest.importorskip("datasets")
    rows = [{"prompt": [USER]}, {"prompt": [{**USER, "content": "Say 2"}]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert evaluate(pair, tmp_path / "p.jsonl", "--prompt-lookup", "--output", tmp_path / "out") == 0
    again = json.loads((tmp_path / "out" / "eval_report.json").read_text(encoding="utf-8"))
    assert again["responses"] == report["responses"] and "prompt_lookup" in again["methods"]


@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors"])
@pytest.mark.parametrize("is_local", [True, False], ids=["folder", "hub"])
def test_report_is_not_written_beside_other_weights(is_local, weights, pair, tmp_path, capsys):
    """It replaced that drafter's own report, and its card showed the figures of another."""
    (tmp_path / weights).touch()
    (tmp_path / "eval_report.json").write_text("{}", encoding="utf-8")
    draft = str(pair / "draft") if is_local else "user/name"
    named = ["--target", str(pair / "target"), "--draft", draft, "--output", str(tmp_path)]
    assert main(["eval", *named, "--data", "arithmetic", "--prompts", "1", "--max-new-tokens", "4"]) == 2
    assert f"--output {tmp_path} holds another model than --draft {draft}" in capsys.readouterr().err
    assert (tmp_path / "eval_report.json").read_text(encoding="utf-8") == "{}"


def test_trees_are_measured_beside_blocks(pair, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("Say 1\n", encoding="utf-8")
    assert evaluate(pair, tmp_path / "prompts.txt", "--packed", "--tree-nodes", "9", "--output", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    for part in ("target alone, packed", "plain call", "whole blocks", "over packed", "draft trees       tau "):
        assert part in printed, part
    report = json.loads((tmp_path / "out" / "eval_report.json").read_text(encoding="utf-8"))
    block = report["methods"]["dflash"]
    tree = report["methods"]["dflash_tree"]
    assert report["setting"]["tree_nodes"] == 9 and "target_packed" in report["methods"]
    assert block["tau"] == pytest.approx(report["summary"]["tau"]) and tree["equal"] == 1
    assert tree["target_forwards"] == 1 + round((tree["tokens"] - 1) / tree["tau"])


def test_template_arguments_default_to_training(pair, tmp_path, monkeypatch):
    """A drafter trained without thinking and used with it loses much of its acceptance."""
    seen = []
    (tmp_path / "prompts.txt").write_text("Say 1\n", encoding="utf-8")
    monkeypatch.setattr(
        "dflash_hf.evaluation.prompts.prompts_of", lambda rows, encoder, *_: seen.append(encoder) or [[5]]
    )
    draft = DFlashDraftModel.from_pretrained(pair / "draft")
    draft.config.dflash_config = {**draft.config.dflash_config, "chat_template_kwargs": {"enable_thinking": False}}
    draft.save_pretrained(tmp_path / "draft")
    for arguments in ((), ("--draft", tmp_path / "draft"), ("--draft", tmp_path / "draft", "--template-args", "{}")):
        assert evaluate(pair, tmp_path / "prompts.txt", *arguments) == 0
    assert [encoder.template.chat_template_kwargs for encoder in seen] == [{}, {"enable_thinking": False}, {}]


def test_wrong_output_is_an_error(pair, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompts.txt").write_text("Say 1\n", encoding="utf-8")
    wrong = Divergence(WHOLE_BLOCKS, 0, 3, own=5, other=6, gap=12.5)
    monkeypatch.setattr("dflash_hf.evaluation.measure.find_divergences", lambda *_: ([wrong], Rounding(0.1, 9, [])))
    assert evaluate(pair, tmp_path / "prompts.txt") == 1
    assert "WRONG: whole blocks, token 3 of the answer to prompt 0: 6 in place of 5" in capsys.readouterr().out
