"""`dflash eval --table paper`: sets beside the paper's figures, interrupted and continued, compared with another's."""

import json
from pathlib import Path

import pytest
from support.tiny_chat import save_thinking_pair

from dflash_hf.cli import main
from dflash_hf.evaluation import paper_table
from dflash_hf.evaluation.methods import TARGET_ALONE, WHOLE_BLOCKS
from dflash_hf.evaluation.paper_table import PAPER_SETS, PaperTable, markdown_lines, report_folder, table_of
from dflash_hf.evaluation.report import EvalReport, MethodReport
from dflash_hf.evaluation.sets import NAMED


PAPER_SEVEN = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench")
SETTING = {
    "hardware": "one H200",
    "target_dtype": "bfloat16",
    "draft_dtype": "bfloat16",
    "attention": "flash_attention_2",
    "max_new_tokens": 2048,
    "thinking": False,
    "weights": "w",
}


def save_report(folder, name, temperature, speedup, lengths, rows=None, **setting):
    """A report of a set: `lengths` of each response."""
    means = [sum(row) / len(row) for row in lengths]
    tau = sum(means) / len(means)
    blocks = MethodReport(1.0, 1.0, [1.0], 9, 9, len(lengths), decode_speedup=speedup, tau_of_responses=tau)
    alone = MethodReport(1.0, 1.0, [1.0], 9, 9, len(lengths), decode_speedup=1.0)
    setting = {
        **SETTING,
        "dataset": NAMED[name].repository,
        "rows": NAMED[name].prompts if rows is None else rows,
        "temperature": temperature,
        "prompts_digest": name,
        **setting,
    }
    methods = {TARGET_ALONE: alone, WHOLE_BLOCKS: blocks}
    path = report_folder(folder, name, temperature)
    path.mkdir(parents=True, exist_ok=True)
    EvalReport(methods, lengths, [[0]] * len(lengths), 16, setting).save(path / "eval_report.json")


def test_paper_figures_are_its_table():
    """Means of the columns: a misread figure would show."""
    figures = paper_table._PAPER["targets"]
    for name in ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B"):
        columns = figures[name]["0"]
        assert tuple(columns) == (*PAPER_SEVEN, "mean")
        product = 1.0
        for column in PAPER_SEVEN:
            product *= columns[column][0]
        assert product ** (1 / 7) == pytest.approx(columns["mean"][0], abs=0.006)
        assert sum(columns[column][1] for column in PAPER_SEVEN) / 7 == pytest.approx(columns["mean"][1], abs=0.006)


def test_table_stands_beside_the_papers(tmp_path):
    for temperature in (0.0, 1.0):
        for name in PAPER_SETS:
            save_report(tmp_path, name, temperature, 4.0 if name == "gsm8k" else 1.0, [[2, 4], [6]])
    table = table_of(tmp_path, "Qwen/Qwen3-4B", "mine")
    assert [(result.temperature, result.name) for result in table.results] == [
        (temperature, name) for temperature in (0.0, 1.0) for name in PAPER_SETS
    ]
    first = table.results[0]
    assert (first.speedup, first.tau, first.paper_speedup, first.paper_tau) == (4.0, 4.5, 5.15, 6.53)
    greedy, sampled = table.means
    assert greedy.sets == list(PAPER_SEVEN) == sampled.sets
    assert greedy.speedup == pytest.approx(4 ** (1 / 7)) and greedy.tau == 4.5
    assert (greedy.paper_speedup, greedy.paper_tau) == (4.91, 6.54)
    assert (sampled.paper_speedup, sampled.paper_tau) == (4.24, 5.69)
    text = "\n".join(markdown_lines(table))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["gsm8k", "128 of 128", "4.00x", "4.50", "5.15x", "6.53", "equal"] in cells
    assert ["aime24", "30 of 30", "1.00x", "4.50", "-", "-", "equal"] in cells
    assert ["mean of 7", "", "1.22x", "4.50", "4.24x", "5.69", ""] in cells
    # Nothing differs but how samples are drawn.
    assert [line.partition(":")[0] for line in table.differences] == ["hardware", "sampling at T = 1"]
    assert PaperTable.load(table.save(tmp_path)[0]) == table


def test_differences_from_the_paper_are_said(tmp_path):
    setting = {"hardware": "a laptop", "target_dtype": "float32", "attention": "sdpa", "max_new_tokens": 64}
    local = {"thinking": None, "dataset": "MathArena/aime_2025, rows of a.jsonl"}
    save_report(tmp_path, "aime25", 0.0, 1.5, [[2]], rows=4, **setting, **local)
    table = table_of(tmp_path, "someone/other", "mine")
    text = "\n".join(markdown_lines(table))
    for part in (
        "The paper has no figures of this target: the columns are ours alone.",
        "target: someone/other, for which there are no figures of the paper here; there are for Qwen/Qwen3-4B, Qwen",
        "hardware: a laptop; the paper: one H200",
        "dtype: bfloat16, float32; the paper: bfloat16",
        "attention: sdpa; the paper: flash_attention_2",
        "max new tokens: 64; the paper: 2048",
        "thinking: not set; the paper: off",
        "fewer rows than the protocol's: aime25 4 of 30",
        "rows from local files: MathArena/aime_2025, rows of a.jsonl",
        "not measured: T = 0: gsm8k, math500, aime24, humaneval",
        "T = 1: gsm8k, math500, aime24, aime25",
    ):
        assert part in text, part
    assert "paper's tau" not in text and "mean of 1" in text
    by_name = table_of(tmp_path, "/models/Qwen3-8B", "mine")
    assert by_name.results[0].paper_tau == 7.08
    assert "target: /models/Qwen3-8B, taken for Qwen/Qwen3-8B by its name" in by_name.differences
    assert by_name.means[0].paper_tau is None  # over other sets than the paper's


def test_two_tables_are_compared(tmp_path, capsys):
    for name, better in (("a", 0), ("b", 1)):
        lengths = [[2, 3, 4 + better], [3, 5 + better], [2 + better, 2], [6], [1, 2 + better]]
        save_report(tmp_path / name, "gsm8k", 0.0, 2.0 + better, lengths)
        save_report(tmp_path / name, "mbpp", 0.0, 2.0, [[3]], prompts_digest=name)
        table_of(tmp_path / name, "t", name).save(tmp_path / name)
    save_report(tmp_path / "b", "alpaca", 0.0, 2.0, [[3]])
    paths = [str(tmp_path / name / "paper_table.json") for name in "ab"]
    assert main(["eval", "--compare", *paths, "--json"]) == 0
    printed = capsys.readouterr()
    gsm8k, mbpp = json.loads(printed.out)["sets"]
    assert gsm8k["set"] == "gsm8k" and gsm8k["gain"] == pytest.approx(0.4) and gsm8k["standard_errors"] > 2
    assert gsm8k["tau"][1] - gsm8k["tau"][0] == pytest.approx((1 / 3 + 1 / 2 + 1 / 2 + 1 / 2) / 5)
    assert mbpp["gain"] is None and "other prompts" in printed.err and "more than chance" in printed.err
    report = str(report_folder(tmp_path / "a", "gsm8k", 0.0) / "eval_report.json")
    assert main(["eval", "--compare", paths[0], report]) == 1
    assert "is not a table of `dflash eval --table`" in capsys.readouterr().err


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_thinking_pair(tmp_path_factory.mktemp("pair"))


def command(pair, output, *arguments):
    names = ["--target", pair / "target", "--draft", pair / "draft", "--device", "cpu", "--max-new-tokens", "5"]
    return ["eval", "--table", "paper", *map(str, [*names, "--prompts", "1", "--output", output, *arguments])]


def write_rows(folder) -> list[str]:
    """Rows of two sets, and the words that name them."""
    rows = {"aime25": {"problem": "Say 1"}, "mt-bench": {"prompt": ["Hi", "And?"]}}
    words = []
    for name, row in rows.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({**row, "id": number}) + "\n" for number in range(3)), encoding="utf-8")
        words.append(f"{name}={path}")
    return words


def test_interrupted_table_goes_on(pair, tmp_path, monkeypatch, capsys):
    from dflash_hf.evaluation import measure

    sets = write_rows(tmp_path)
    evaluated = []
    evaluate = measure.evaluate

    def interrupted(*arguments, **options):
        evaluated.append(options["temperature"])
        if len(evaluated) == 3:
            raise KeyboardInterrupt
        return evaluate(*arguments, **options)

    monkeypatch.setattr(measure, "evaluate", interrupted)
    assert main(command(pair, tmp_path / "out", "--sets", *sets)) == 130
    assert not (tmp_path / "out" / "paper_table.json").exists()
    first = (tmp_path / "out" / "greedy" / "aime25" / "eval_report.json").stat().st_mtime_ns
    assert main(command(pair, tmp_path / "out", "--sets", *sets)) == 0
    assert evaluated == [0.0, 0.0, 1.0, 1.0, 1.0]  # the two greedy sets, then the sampled ones
    assert (tmp_path / "out" / "greedy" / "aime25" / "eval_report.json").stat().st_mtime_ns == first
    printed = capsys.readouterr()
    assert "1 of 4: aime25 at temperature 0, measured already" in printed.err
    table = PaperTable.load(tmp_path / "out" / "paper_table.json")
    assert [(result.name, result.rows, result.responses) for result in table.results] == [
        ("aime25", 1, 1),
        ("mt-bench", 1, 2),
    ] * 2
    assert (tmp_path / "out" / "paper_table.md").read_text(encoding="utf-8").strip() in printed.out
    assert table.setting["thinking"] is False and table.setting["runs"] == 1
    # The same folder with other settings, and with other rows under the same name.
    assert main(command(pair, tmp_path / "out", "--sets", *sets, "--thinking")) == 1
    assert "thinking=False, not True" in capsys.readouterr().err
    Path(sets[0].partition("=")[2]).write_text('{"problem": "Other"}\n', encoding="utf-8")
    assert main(command(pair, tmp_path / "out", "--sets", sets[0])) == 1
    assert "measured otherwise (rows of aime25=" in capsys.readouterr().err


def test_useless_options_of_a_table_are_named(pair, tmp_path, capsys):
    for arguments, message in (
        (("--data", "gsm8k"), "leave out --data"),
        (("--temperature", "1"), "leave out --temperature"),
        (("--sets", "gpqa"), "--sets gpqa is not in the paper's table; choose from gsm8k"),
        (("--sets", "mbpp", "mbpp=x.jsonl"), "--sets names mbpp 2 times"),
    ):
        assert main(command(pair, tmp_path / "out", *arguments)) == 2
        assert message in capsys.readouterr().err
    assert main(command(pair, tmp_path / "out", "--sets", "mbpp=absent.jsonl")) == 1
    assert "absent.jsonl: there is no such file" in capsys.readouterr().err.replace("'", "")
    assert main(["eval", "--table", "paper", "--target", "t"]) == 2
    assert "--table needs --draft, --output" in capsys.readouterr().err
    assert main(["eval", "--sets", "mbpp"]) == 2 and "--sets is for --table" in capsys.readouterr().err
