"""A report as a table and as a picture, and an answer with its drafts marked."""

import re

import pytest
from support.tiny_chat import make_tokenizer

from dflash_hf.evaluation.divergence import NEAR_TIE, Divergence
from dflash_hf.evaluation.measure import EvalReport, MethodReport
from dflash_hf.evaluation.methods import DFLASH, PROMPT_LOOKUP, TARGET
from dflash_hf.evaluation.plots import plot_report
from dflash_hf.evaluation.report import save_report
from dflash_hf.evaluation.text import colored_answer, origins, summary_lines, token_texts


def test_where_tokens_come_from():
    assert origins([3, 1, 2], 7) == [0, 1, 1, 0, 0, 3, 0]
    assert origins([3, 1, 2], 5) == [0, 1, 1, 0, 0]


def test_a_sample_in_colour_and_in_brackets():
    pieces = ["a", "b", "c", "d", "e", "f", "g"]
    assert colored_answer(pieces, [3, 1, 2], color=False) == "a[bc]de[f]g"
    assert colored_answer(pieces[:6], [3, 1, 2], color=False) == "a[bc]de[f]"
    colored = colored_answer(pieces, [3, 1, 2], color=True)
    assert re.sub(r"\x1b\[\d+m", "", colored) == "abcdefg"
    assert colored.count("\x1b[32m") == 2 and colored.endswith("\x1b[0m")


def test_a_character_of_several_tokens_comes_with_the_last():
    tokenizer = make_tokenizer()  # a token for each byte
    ids = tokenizer("a é\u20ac b")["input_ids"]
    assert token_texts(tokenizer, ids) == ["a", " ", "", "é", "", "", "\u20ac", " ", "b"]
    assert "".join(token_texts(tokenizer, ids[:-3])) == tokenizer.decode(ids[:-3])


@pytest.fixture
def report():
    methods = {
        TARGET: MethodReport(100.0, 1.0, [90.0, 100.0, 110.0], 60, 60, 3),
        DFLASH: MethodReport(300.0, 3.0, [280.0, 300.0, 310.0], 60, 13, 3),
        PROMPT_LOOKUP: MethodReport(105.0, 1.05, [100.0, 105.0, 106.0], 60, 45, 3),
    }
    return EvalReport(methods, [[5, 8, 6], [4], [8, 8, 7]], [[1] * 20, [1] * 5, [1] * 24], 8)


def test_the_table_names_every_figure(report):
    text = "\n".join(summary_lines(report))
    for figure in ("3.00x", "280-310", "3/3", "tau               6.57", "7 verifications"):
        assert figure in text, figure
    assert "WRONG" not in text and "no output is wrong: 3 of 3 outputs equal" in text and "verdict" not in text
    report.divergences = [Divergence(DFLASH, 0, 3, own=5, other=6, gap=12.5)]
    assert "WRONG" in "\n".join(summary_lines(report))


def test_the_verdict_is_said(report):
    """It led with "1 of 10 outputs equal" where none was wrong, and ended without a word at 0.56x."""
    report.methods[DFLASH] = MethodReport(56.0, 0.56, [56.0], 60, 13, 1)
    report.divergences = [
        Divergence(DFLASH, prompt, 3, own=5, other=6, gap=0.01, verdict=NEAR_TIE) for prompt in (0, 2)
    ]
    text = "\n".join(summary_lines(report))
    assert "no output is wrong: 1 of 3 outputs equal the target's own, 2 differ at a near-tie" in text
    assert "slower than the target alone: 0.56x at best (whole blocks)" in text


def test_a_picture_is_drawn(report, tmp_path):
    pytest.importorskip("matplotlib")
    for title in ("", "Title"):
        path = plot_report(report, tmp_path / "report.png", title)
        header = path.read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(header[16:20], "big") > 1000


def test_report_without_a_picture_keeps_no_old_one(report, tmp_path, monkeypatch):
    def missing(*_):
        raise ImportError("no matplotlib")

    monkeypatch.setattr("dflash_hf.evaluation.report.plot_report", missing)
    (tmp_path / "eval_report.png").touch()
    assert save_report(report, tmp_path) == [tmp_path / "eval_report.json"] == list(tmp_path.iterdir())
