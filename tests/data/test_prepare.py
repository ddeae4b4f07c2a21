"""Datasets from files, what is counted and left out, and `dflash prepare` as a newcomer would use it."""

import gzip
import json
import os
import re

import pytest
from support.tiny_chat import CHATML, CROOKED, make_tokenizer, save_target

from dflash_hf.cli import main
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prepare import colored_example, prepare_dataset
from dflash_hf.data.sources import load_rows
from dflash_hf.data.template import ChatTemplate
from dflash_hf.pairs.tokenizers import load_tokenizer
from dflash_hf.training.rows import validate_and_count


datasets = pytest.importorskip("datasets")


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


ROWS = [
    *(chat(f"Say {i}", f"{i}, as you wish." * (1 + i % 3)) for i in range(20)),
    {"messages": chat("?", "")["messages"][:1]},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer_folder(tmp_path):
    make_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text("{}", encoding="utf-8")
    return str(tmp_path / "tokenizer")


def prepare(capsys, *arguments):
    code = main(["prepare", "--data", *map(str, arguments)])
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1:] or [""]
    return code, printed.out, last[0]


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    rows = [{"prompt": f"{i}+1=", "completion": ("NA", "", "5.", "01")[i]} for i in range(4)]
    dataset = datasets.Dataset.from_list(rows)
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.to_csv(tmp_path / "a.csv")
    dataset.save_to_disk(tmp_path / "folder")
    datasets.DatasetDict({"only": dataset}).save_to_disk(tmp_path / "splits")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for name in ("a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.csv", "folder", "splits"):
        assert list(load_rows(tmp_path / name)) == rows, name
    assert len(load_rows([tmp_path / "a.jsonl", write(tmp_path / "b.jsonl", rows)])) == 8


def test_name_with_brackets_is_one_file(tmp_path):
    """A name with brackets was a pattern, which found another file."""
    write(tmp_path / "r1.jsonl", [{"prompt": "other"}])
    assert list(load_rows(write(tmp_path / "r[1].jsonl", [{"prompt": "named"}]))) == [{"prompt": "named"}]


def test_changed_file_is_read_again(tmp_path):
    """Even if it has the size that it had before."""
    for second, prompt in enumerate(("one", "two")):
        path = write(tmp_path / "a.jsonl", [{"prompt": prompt}])
        os.utime(path, (second, second))
        assert list(load_rows(path)) == [{"prompt": prompt}]


def test_trailing_separator_shifts_no_column(tmp_path):
    for header in ("prompt,completion", "prompt,completion,"):
        (tmp_path / f"{len(header)}.csv").write_text(header + "\nHi,Yes.,\n", encoding="utf-8")
        (row,) = load_rows(tmp_path / f"{len(header)}.csv")
        assert (row["prompt"], row["completion"]) == ("Hi", "Yes.")


def test_each_table_has_its_own_header(tmp_path):
    for name, text in {"a": "prompt,completion\nHi,Yes.\n", "b": "\nid,prompt,completion\n3,Ho,No.\n"}.items():
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
    rows = load_rows([tmp_path / "a.csv", tmp_path / "b.csv"])
    assert [(row["prompt"], row["completion"]) for row in rows] == [("Hi", "Yes."), ("Ho", "No.")]


@pytest.mark.parametrize("text", ["prompt,completion\n" + "z" * 140_000 + ",b\nq,r,lost\n", 'prompt,"completion\n'])
def test_damaged_csv_with_a_long_cell_is_refused(text, tmp_path):
    (tmp_path / "a.csv").write_text(text + "x" * 140_000, encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.csv"):
        load_rows(tmp_path / "a.csv")


@pytest.mark.parametrize("line", ["null", "[]", '[{"prompt": "b"}]', '{"prompt": oops}', '{"prompt": "\t"}'])
def test_line_without_an_object_is_named(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n{{"prompt": "c"}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2 is not a JSON object"):
        list(load_rows(path))


def test_folder_without_rows_is_named(tmp_path):
    """It was an `IndexError` of `datasets`."""
    datasets.Dataset.from_dict({"messages": []}).save_to_disk(tmp_path / "empty")
    with pytest.raises(ValueError, match="data='.*empty' has no rows"):
        load_rows(tmp_path / "empty")


def test_report_counts_the_usable_rows(tmp_path):
    encoder = RowEncoder(ChatTemplate(make_tokenizer()), max_length=60)
    dataset, report = prepare_dataset(load_rows(write(tmp_path / "a.jsonl", ROWS)), encoder)
    examples = [example for row in ROWS[:20] for example in encoder(row)]
    assert list(dataset) == examples
    validate_and_count(dataset)
    assert (report.rows, report.examples) == (21, 20)
    assert report.tokens == sum(len(example["input_ids"]) for example in examples)
    assert report.supervised == sum(sum(example["loss_mask"]) for example in examples)
    assert report.longest == max(len(example["input_ids"]) for example in examples) <= 60
    assert report.dropped == {"it has no assistant message": 1}


def test_ids_are_read_alike_from_every_table(tmp_path):
    """Lists of integers without a null are read as arrays; the counts are those of the lists."""
    usable_rows = [{"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}, {"input_ids": [6, 7, 2], "labels": [-100, 7, 2]}]
    for null_rows in ([], [{"input_ids": None, "labels": None}]):
        rows = datasets.Dataset.from_list([*usable_rows, *null_rows])
        dataset, report = prepare_dataset(rows, RowEncoder(mask_token_id=2))
        assert list(dataset) == [{"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1]}]
        assert (report.rows, report.examples, report.tokens, report.supervised, report.longest) == (
            2 + len(null_rows),
            1,
            3,
            2,
            3,
        )
        assert report.dropped["it holds the mask token 2"] == 1 and sum(report.dropped.values()) == 1 + len(null_rows)


def test_dataset_without_usable_rows_is_refused(tmp_path):
    rows = load_rows(write(tmp_path / "a.jsonl", ROWS))
    with pytest.raises(ValueError, match="None of 21 rows can be trained on: 20 because the ids up to the generation"):
        prepare_dataset(rows, RowEncoder(ChatTemplate(make_tokenizer(CROOKED))))


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ([1, 1, 1], "its loss mask is all ones"),
        ([0, 0, 0], "its loss_mask supervise no token"),
        ([0, 0, 1], "two tokens"),
    ],
)
def test_row_with_a_useless_mask_is_left_out(mask, reason, tmp_path):
    """A single one ended the encoding of the whole dataset."""
    good = {"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1]}
    useless = {"input_ids": [3, 4, 5], "loss_mask": mask}
    rows = load_rows(write(tmp_path / "rows.jsonl", [good, useless, good]))
    dataset, report = prepare_dataset(rows, RowEncoder())
    assert len(dataset) == report.examples == 2
    assert [count for text, count in report.dropped.items() if reason in text] == [1]
    only_useless = load_rows(write(tmp_path / "useless.jsonl", [useless] * 2))
    with pytest.raises(ValueError, match=f"None of 2 rows can be trained on: 2 because .*{reason}"):
        prepare_dataset(only_useless, RowEncoder())


def test_supervised_text_is_marked():
    tokenizer = make_tokenizer()
    (example,) = RowEncoder(ChatTemplate(tokenizer))(ROWS[0])
    assert colored_example(example, tokenizer, color=False).endswith("assistant\n[0, as you wish.<|im_end|>]\n")
    assert "\x1b[32m0, as you wish.<|im_end|>\x1b[0m" in colored_example(example, tokenizer, color=True)
    short = colored_example(example, tokenizer, color=False, longest_run=10)
    assert "[0, as ... 6 tokens ... ish.<|im_end|>]" in short


def test_terminal_gets_no_control_characters():
    tokenizer = make_tokenizer()
    (example,) = RowEncoder(ChatTemplate(tokenizer))(chat("?", "a\x1b]0;title\x07b\r\tc\x9b2J"))
    shown = colored_example(example, tokenizer, color=True)
    assert r"a\x1b]0;title\x07b\r" + "\t" + r"c\x9b2J" in shown
    assert not set(shown.replace("\x1b[32m", "").replace("\x1b[0m", "")) & set("\x1b\x07\r\x9b")


def test_prepare_shows_counts_and_writes(tmp_path, tokenizer_folder, capsys):
    data = write(tmp_path / "a.jsonl", ROWS)
    for suffix in (".jsonl", ".parquet"):
        output = tmp_path / f"out{suffix}"
        code, out, _ = prepare(capsys, data, "--target", tokenizer_folder, "--output", output, "--examples", 2)
        assert code == 0
        assert out.count("--- example") == 2 and "[1, as you wish.1, as you wish.<|im_end|>]" in out
        assert "rows              21" in out and "  1: it has no assistant message" in out
        reread, report = prepare_dataset(load_rows(output), RowEncoder())
        assert report.examples == 20 and not report.dropped
        assert reread[3] == RowEncoder(ChatTemplate(make_tokenizer()))(ROWS[3])[0]
    assert not list(tmp_path.glob(".*half"))
    code, out, _ = prepare(capsys, data, "--target", tokenizer_folder, "--color", "--limit", 1, "--examples", 1)
    assert code == 0 and "\x1b[32m" in out and "rows              1\n" in out
    code, out, _ = prepare(capsys, data, "--target", tokenizer_folder, "--limit", 99, "--examples", 0)
    assert code == 0 and "rows              21\n" in out


def test_prepare_overwrites_nothing(tmp_path, tokenizer_folder, capsys):
    """`--output data.jsonl` replaced the data by its ids."""
    data = write(tmp_path / "a.jsonl", ROWS)
    output = tmp_path / "out.jsonl"
    output.write_text("precious", encoding="utf-8")
    before = data.read_bytes()
    command = (data, "--target", tokenizer_folder, "--output")
    code, out, error = prepare(capsys, *command, output)
    assert code == 1 and not out and "out.jsonl exists; choose another file, or remove it" in error
    assert output.read_text(encoding="utf-8") == "precious"
    code, _, error = prepare(capsys, *command, tmp_path / "." / "a.jsonl")
    assert code == 2 and "a.jsonl is the data itself" in error
    assert data.read_bytes() == before


def test_prepare_reports_errors_in_one_line(tmp_path, tokenizer_folder, capsys):
    good_row = json.dumps(ROWS[0])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "half.jsonl").write_text(good_row + "\n" + good_row[:-9], encoding="utf-8")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(good_row.encode())[:-12])
    (tmp_path / "plain.jsonl.gz").write_text(good_row, encoding="utf-8")
    (tmp_path / "mark.csv").write_text("\ufeff", encoding="utf-8")
    (tmp_path / "bad.parquet").write_text("nothing", encoding="utf-8")
    (tmp_path / "notes.md").write_text("Hi", encoding="utf-8")
    (tmp_path / "commas.csv").write_text("id,prompt,completion\n1,Hi,Yes, indeed.\n", encoding="utf-8")
    (tmp_path / "latin.csv").write_text("prompt,completion\nHi,Größe\n", encoding="latin-1")
    (tmp_path / "wide.jsonl").write_text(good_row + "\n", encoding="utf-16")
    (tmp_path / "none.json").write_text("[]", encoding="utf-8")
    (tmp_path / "null.json").write_text('[{"prompt": "a"}, null]', encoding="utf-8")
    (tmp_path / "open.json").write_text('[{"prompt": "a"}', encoding="utf-8")
    write(tmp_path / "text.jsonl", [{"text": "Hi"}])
    write(tmp_path / "said.jsonl", [{"messages": "Hi"}])
    write(tmp_path / "good.jsonl", [ROWS[0]])
    (tmp_path / "folder").mkdir()
    for name, options, message in (
        ("empty.jsonl", (), "is an empty file"),
        ("half.jsonl", (), "half.jsonl cannot be read: line 2 is not a JSON object"),
        ("cut.jsonl.gz", (), "cut.jsonl.gz cannot be read: Compressed file ended before"),
        ("plain.jsonl.gz", (), "plain.jsonl.gz cannot be read: "),
        ("mark.csv", (), "mark.csv cannot be read: it has no rows"),
        ("bad.parquet", (), "bad.parquet cannot be read: "),
        ("notes.md", (), "must be of one kind: .jsonl"),
        ("commas.csv", (), "commas.csv cannot be read: line 2 has more fields than the header; put texts that"),
        ("latin.csv", (), f"Line 2 of {tmp_path}/latin.csv is not UTF-8; convert the file: iconv -f LATIN1"),
        ("wide.jsonl", (), f"Line 1 of {tmp_path}/wide.jsonl is not UTF-8; convert the file: iconv -f UTF-16"),
        ("none.json", (), "none.json cannot be read: it has no rows"),
        ("null.json", (), "row 1 is None, not a JSON object; remove it"),
        ("open.json", (), "open.json cannot be read: Expecting"),
        ("absent.jsonl", (), "there is no such file"),
        ("folder", (), "without dataset_info.json"),
        (
            "text.jsonl",
            (),
            "None of 1 rows can be trained on: 1 because it has no column to read, only ['text']; give `messages`",
        ),
        (
            "said.jsonl",
            (),
            f"Row 0 of {tmp_path}/said.jsonl: `messages` is 'Hi'; give a list of messages with `role` and `content`",
        ),
        ("good.jsonl", ("--output", "a.txt"), "--output a.txt must end in .jsonl or .parquet"),
        ("good.jsonl", ("--template-args", "{a:"), """; write it in quotes, such as '{"enable_thinking": false}'"""),
        ("good.jsonl", ("--template-args", '{"tools": 3}'), "chat_template_kwargs may not set tools"),
        ("good.jsonl", ("--mask-token-id", "2"), "None of 1 rows can be trained on: 1 because it holds the"),
    ):
        code, out, error = prepare(capsys, tmp_path / name, "--target", tokenizer_folder, *options)
        wrong_option = options[:1] in (("--output",), ("--template-args",)) and "may not set" not in message
        assert code == 1 + wrong_option and error.startswith("dflash prepare: error: ") and message in error, (
            name,
            error,
        )
        assert not out
    code, _, error = prepare(capsys, tmp_path / "good.jsonl", "--target", str(tmp_path / "absent"))
    assert code == 1 and error == f"dflash prepare: error: --target {tmp_path / 'absent'}: there is no such folder."


def test_prepare_refuses_ids_outside_the_vocabulary(tmp_path, capsys):
    """It accepted ids that training would refuse."""
    target = save_target(tmp_path / "target", CHATML)
    data = write(tmp_path / "ids.jsonl", [{"input_ids": [5, 6, 300000], "loss_mask": [0, 1, 1]}])
    code, _, error = prepare(capsys, data, "--target", str(target))
    assert code == 1 and "Token 300000 is outside the target's embedding" in error


@pytest.mark.parametrize(
    ("name", "message"),
    [("someone/data", "The dataset 'someone/data' could not"), ("./absent", "'absent': there is no")],
)
def test_list_of_one_name_is_loaded_by_name(name, message):
    """The Hub was asked for a dataset called `['someone/data']`."""
    with pytest.raises(OSError, match=message):
        load_rows([name])


def test_tokenizer_without_added_tokens_loads(tokenizer_folder, monkeypatch):
    """`added_tokens_decoder` of transformers' `MistralCommonBackend` is a method: it ended with a `TypeError`."""
    mistral = pytest.importorskip("transformers.tokenization_mistral_common")

    class Tokenizer:
        get_vocab = dict
        added_tokens_decoder = mistral.MistralCommonBackend.added_tokens_decoder

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: Tokenizer())
    assert isinstance(load_tokenizer(tokenizer_folder), Tokenizer)


def test_missing_path_is_named_as_written():
    """On Windows it had each backslash twice."""
    with pytest.raises(FileNotFoundError, match=re.escape(r"data='.\rows\a.jsonl': there is no such file")):
        load_rows(r".\rows\a.jsonl")
