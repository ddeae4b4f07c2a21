"""Rows as they are found in the world: what becomes of them, in every command and kind of file, and in the guide."""

import json
import os
import re

import pytest
from support.chat_stand_in import chat_server
from support.guides import ROOT
from support.tiny_chat import END, SPECIAL, make_tokenizer, save_target

from dflash_hf.cli import main
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.messages import UnusableRow
from dflash_hf.data.prepare import colored_example, prepare_dataset
from dflash_hf.data.row_layouts import conversation_of, tools_of
from dflash_hf.data.sources import load_rows
from dflash_hf.data.template import ChatTemplate
from dflash_hf.evaluation.sets import rows_of as eval_lines


datasets = pytest.importorskip("datasets")
GUIDE = ROOT / "examples" / "guides" / "data.md"
TABLE = re.compile(r"(?<=<!-- rows -->\n).*?(?=<!-- end of rows -->)", re.DOTALL)
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
HI = '{"role": "user", "content": "Hi"}'
HELLO = '{"role": "assistant", "content": "Hello."}'
CALL = '{"function": {"name": "f", "arguments": {"x": null}}}'
FILES = {  # rows of a file, as JSON
    "chats": [
        f'{{"messages": [{HI}, {HELLO}]}}',
        f'{{"messages": [{{"role": "user", "content": [{{"type": "text", "text": "Hi"}}]}}, {HELLO}]}}',
        f'{{"messages": [{{"role": "user", "content": [{{"type": "text", "text": "Hi"}}, "there"]}}, {HELLO}]}}',
        '{"messages": [{"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,AA=="}]}, '
        f"{HELLO}]}}",
        '{"system": "Be kind.", '
        '"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}',
        '{"messages": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Hello."}]}',
        json.dumps({"messages": f"[{HI}, {HELLO}]"}),
        f'{{"messages": [{HI}, {{"role": "assistant", "content": "{{\\"a\\": 1}}"}}]}}',
        f'{{"messages": [{HI}, {{"role": "assistant", "content": null, "tool_calls": [{CALL}]}}]}}',
        '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", '
        '"value": "{\\"name\\": \\"f\\", \\"arguments\\": {\\"x\\": 3.141592653589793}}"}, '
        '{"from": "observation", "value": "4"}, '
        '{"from": "gpt", "value": "Four."}]}',
        f'{{"messages": [{HI}, {HELLO}], "tools": [{{"name": "f", "default": null}}]}}',
        json.dumps({"messages": [json.loads(HI), json.loads(HELLO)], "tools": '[{"name": "f", "default": null}]'}),
        '{"messages": null}',
        '{"messages": []}',
        f'{{"messages": [{HI}, null, {HELLO}]}}',
        f'{{"messages": [{{"role": "user", "content": null}}, {HELLO}]}}',
        f'{{"messages": [{{"role": "robot", "content": "Hi"}}, {HELLO}]}}',
        f'{{"messages": [{{"speaker": "Ann", "text": "Hi"}}, {HELLO}]}}',
        f'{{"messages": [{HI}]}}',
        '{"prompt": "1 + 1 =", "completion": " 2"}',
        f'{{"prompt": [{HI}], "completion": "Hello."}}',
        '{"prompt": "1 + 1 =", "completion": null}',
    ],
    "requests": [
        '{"instruction": "Add.", "input": "1, 2", "output": "3."}',
        '{"instruction": "Say hello.", "input": "", "output": "Hello."}',
        '{"question": "1 + 1?", "answer": "2."}',
        '{"system_prompt": "Be kind.", "question": "1 + 1?", "context": "Sums.", "response": "2."}',
        '{"question": "1 + 1?", "answer": 2}',
        '{"question": "1 + 1?"}',
        '{"instruction": "", "output": "Hello."}',
    ],
    "images": [
        '{"image": "data:image/png;base64,AA==", "conversations": [{"from": "human", "value": "<image>\\nWhat?"}, '
        '{"from": "gpt", "value": "A cat."}]}',
        '{"image": "absent.png", "conversations": [{"from": "human", "value": "<image>\\nWhat?"}, '
        '{"from": "gpt", "value": "A cat."}]}',
        '{"images": ["data:image/png;base64,AA=="], "conversations": [{"from": "human", "value": "<image> <image>"}, '
        '{"from": "gpt", "value": "Cats."}]}',
        '{"conversations": [{"from": "human", "value": "What is <image>?"}, {"from": "gpt", "value": "A mark."}]}',
    ],
    "texts": ['{"text": "Hello."}'],
    "prompts": ['{"prompt": "Hi"}'],
    "said": ['{"messages": "Hello."}'],
}


def outcome(row: str) -> str:
    """What becomes of a row: the text, with its supervised part in brackets, or why there is none."""
    tokenizer = make_tokenizer(TEMPLATE)
    try:
        (example,) = RowEncoder(ChatTemplate(tokenizer))(json.loads(row))
    except UnusableRow as reason:
        return f"left out: {reason}"
    except ValueError as error:
        return f"error: {error}"
    return f"`{colored_example(example, tokenizer, color=False, longest_run=999)}`".replace(SPECIAL[END], "⏎").replace(
        "\n", "\\n"
    )


def test_table_of_the_guide_equals_outcomes_of_rows():
    """With `DFLASH_WRITE_TABLES=1` its table is written."""
    lines = [(f"`{row}`", outcome(row)) for rows in FILES.values() for row in rows]
    table = "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
    table = f"| Row | What becomes of it |\n|---|---|\n{table}"
    page = GUIDE.read_text(encoding="utf-8")
    if os.environ.get("DFLASH_WRITE_TABLES") == "1":
        GUIDE.write_text(TABLE.sub(lambda _: table, page), encoding="utf-8")
        page = GUIDE.read_text(encoding="utf-8")
    assert TABLE.search(page)[0] == table


def write(path, kind):
    lines = [json.loads(line) for line in FILES["chats"]]
    text = json.dumps(lines, indent=1) if kind == "json" else "\n\n".join(FILES["chats"]) + "\r\n"
    path = path / f"rows.{kind}"
    path.write_text("\ufeff" + text, encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_file_of_mixed_rows_is_read_as_written(kind, tmp_path):
    """Arrow's types filled in keys, rounded numbers, and made mappings of answers that are JSON."""
    path = write(tmp_path, kind)
    encoder = RowEncoder(ChatTemplate(make_tokenizer(TEMPLATE)))
    rows = load_rows(path)
    loaded = [{key: value for key, value in row.items() if value is not None} for row in rows]
    expected_rows = [json.loads(line) for line in FILES["chats"]]
    assert loaded == [{key: value for key, value in row.items() if value is not None} for row in expected_rows]
    examples = []
    reasons = {}
    for line in FILES["chats"]:
        try:
            examples += encoder(json.loads(line))
        except UnusableRow as reason:
            reasons[str(reason)] = reasons.get(str(reason), 0) + 1
    dataset, report = prepare_dataset(rows, encoder)
    assert list(dataset) == examples and report.dropped == reasons
    assert sum(reasons.values()) == 9


def test_only_added_nulls_of_tables_are_dropped(tmp_path):
    """A table has every key of the other rows; `default: null` was dropped with them."""
    rows = [
        {"messages": json.loads(f"[{HI}, {HELLO}]"), "tools": [{"name": "f", "default": None}]},
        {"messages": json.loads(f"[{HI}, {HELLO}]"), "tools": [{"name": "g", "other": "x"}]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "merged.parquet")
    texts = [{**row, "tools": json.dumps(row["tools"])} for row in rows]
    datasets.Dataset.from_list(texts).to_parquet(tmp_path / "texts.parquet")
    merged = [[{"name": "f"}], [{"name": "g", "other": "x"}]]
    encoder = RowEncoder(ChatTemplate(make_tokenizer(TEMPLATE)))
    for name, tools in {"rows.jsonl": 0, "texts.parquet": 0, "merged.parquet": merged}.items():
        tools = tools or [row["tools"] for row in rows]
        expected = [example for row, tool in zip(rows, tools) for example in encoder({**row, "tools": tool})]
        loaded = load_rows(tmp_path / name)
        assert [tools_of(row) for row in loaded] == tools, name
        assert list(prepare_dataset(loaded, encoder)[0]) == expected
    assert list(prepare_dataset(datasets.Dataset.from_list(rows), encoder)[0]) == expected


@pytest.mark.parametrize("form", ["rows.json", "rows.jsonl", "rows.parquet", "one", "several"])
def test_every_form_of_rows_has_splits(form, tmp_path):
    """A folder of one dataset had all rows in each, one of several had no slices, and a sum was too many values."""
    rows = datasets.Dataset.from_list([{"prompt": str(i)} for i in range(10)])
    path = tmp_path / form
    {
        "rows.json": lambda: path.write_text(json.dumps(list(rows)), encoding="utf-8"),
        "rows.jsonl": lambda: rows.to_json(path),
        "rows.parquet": lambda: rows.to_parquet(path),
        "one": lambda: rows.save_to_disk(path),
        "several": lambda: datasets.DatasetDict({"train": rows, "more": rows}).save_to_disk(path),
    }[form]()
    expected = {None: "0123456789", "train": "0123456789", "train[20%:40%]": "23", "train[:1]+train[-2:]": "089"}
    for split, prompts in expected.items():
        assert "".join(row["prompt"] for row in load_rows(path, split)) == prompts
    with pytest.raises(ValueError, match=f"split='test' is not in .*{form}.*Unknown split .test.*'train'"):
        load_rows(path, "test")
    assert [row["prompt"] for row in load_rows(path, "train[:1]+train[99:]")] == ["0"]
    with pytest.raises(ValueError, match=r"split='train\[99:\]' has no rows"):
        load_rows(path, "train[99:]")


def test_lone_surrogate_is_read_as_question_mark(tmp_path):
    """The file could not be read."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a\\ud800b \\ud83d\\ude00"}\n', encoding="utf-8")
    assert list(load_rows(tmp_path / "rows.jsonl")) == [{"prompt": "a?b 😀"}]


@pytest.mark.parametrize(
    "row",
    [
        '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}',
        '{"messages": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello."}]}',
        f'{{"messages": null, "conversations": [{HI}, {HELLO}]}}',
        f'{{"messages": null, "prompt": [{HI}]}}',
        '{"prompt": "Hi"}',
        '{"instruction": "Hi", "input": "", "output": "Hello."}',
        '{"instruction": "Hi", "input": null}',
        '{"question": "Hi", "answer": "Hello.", "messages": null}',
    ],
)
def test_every_layout_has_the_same_prompt(row):
    assert conversation_of(json.loads(row), answers=False).prompt(as_chat=True) == [json.loads(HI)]


@pytest.mark.parametrize("row", ['{"instruction": "Hi", "input": "you"}', '{"question": "Hi\\n\\nyou"}'])
def test_request_without_a_template_is_text(row):
    assert conversation_of(json.loads(row), answers=False).prompt(as_chat=False) == "Hi\n\nyou"


def test_text_file_has_a_prompt_in_each_line(target, tmp_path, capsys):
    """`eval` read it, and `regenerate` knew no such kind of file."""
    path = tmp_path / "prompts.txt"
    output = tmp_path / "out.jsonl"
    path.write_bytes(b"\xef\xbb\xbfHi\r\n\r\n  1 + 1?\nlast")
    prompts = ["Hi", "  1 + 1?", "last"]
    assert [row["prompt"] for row in load_rows(path)] == [row["prompt"] for row in eval_lines(str(path))] == prompts
    words = ["regenerate", "--target", target, "--data", path, "--output", output, "--max-new-tokens", 4]
    assert main([str(word) for word in (*words, "--device", "cpu")]) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert {row["row"]: row["messages"][0]["content"] for row in rows} == dict(enumerate(prompts))
    capsys.readouterr()
    assert main(["prepare", "--target", str(target), "--data", str(path)]) == 1
    assert "have the target answer the prompts with `dflash regenerate`" in capsys.readouterr().err


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"), TEMPLATE)


TRAINING = "max_steps=1 num_anchors=2 block_size=4 use_cpu=true bf16=false target_dtype=float32 report_to=none"


@pytest.mark.parametrize("command", ["prepare", "features", "train"])
def test_commands_count_what_they_leave_out(command, target, tmp_path, capsys):
    """One null stopped the whole run."""
    data = write(tmp_path, "jsonl")
    output = tmp_path / "out"
    options = ["--output", output, "--target-layer-ids", 0] if command == "features" else []
    words = [command, "--target", target, "--data", data, *options]
    if command == "train":
        words = ["train", f"target={target}", f"data={data}", f"output_dir={output}", *TRAINING.split()]
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr().out
    assert "rows              22\n" in printed and "rows left out     9\n" in printed
    for reason in ("all of its columns are null", "a message has an image, which this target does not read"):
        assert f"  1: {reason}\n" in printed


@pytest.mark.parametrize("served", [False, True])
def test_regenerate_leaves_out_rows_without_a_prompt(served, target, tmp_path, capsys):
    """It stopped at a null and at `[]`, and asked the target the Python source of parts."""
    rows = FILES["chats"][:4] + FILES["chats"][4:6] + FILES["chats"][12:16] + ['{"prompt": ""}', '{"prompt": null}']
    (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    words = ["regenerate", "--data", tmp_path / "rows.jsonl", "--output", tmp_path / "out.jsonl", "--target", target]
    words += ["--max-new-tokens", 4, "--json"]
    with chat_server(lambda body: "Hello.") as (url, received):
        options = ["--server", url] if served else ["--device", "cpu", "--batch-size", 2]
        for _ in range(2):  # the prompts are known again
            assert main([str(word) for word in (*words, *options)]) == 0
            facts = json.loads(capsys.readouterr().out)
            assert (facts["rows"], facts["finished"]) == (5 + served, 5 + served)
            assert sum(facts["left_out"].values()) == 7 - served  # a server may read images
            assert facts["left_out"]["all of its columns are null"] == 2
    answered = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(row["row"] for row in answered) == ([0, 1, 2, 3, 4, 5] if served else [0, 1, 2, 4, 5])
    if served:
        contents = [body["messages"][-1]["content"] for body in received]
        assert sorted(content for content in contents if isinstance(content, str)) == [*["Hi"] * 4, "Hi there"]
    else:
        tokenizer = make_tokenizer(TEMPLATE)
        prompts = {row["row"]: tokenizer.decode(row["input_ids"][: row["loss_mask"].index(1)]) for row in answered}
        assert prompts[0] == prompts[1] == prompts[5] == "user: Hi<|im_end|>assistant: "
        assert prompts[2] == "user: Hi there<|im_end|>assistant: "
        assert prompts[4] == "system: Be kind.<|im_end|>user: Hi<|im_end|>assistant: "
