"""A report as a table and as a picture, and an answer with its drafts marked."""

import io
import itertools
import json
import re

import pytest
from support.tiny_chat import make_tokenizer

from dflash_hf._io.terminal import marks_around
from dflash_hf.evaluation.divergence import EQUAL, NEAR_TIE, WRONG, Divergence
from dflash_hf.evaluation.methods import PLAIN_CALL, PROMPT_LOOKUP, TARGET_ALONE, TARGET_PACKED, WHOLE_BLOCKS
from dflash_hf.evaluation.plots import draw_report, plot_report
from dflash_hf.evaluation.report import EvalReport, MethodReport
from dflash_hf.evaluation.report_files import save_report
from dflash_hf.evaluation.text import colored_answer, headline, origins, summary_lines, token_texts


def test_sources_of_tokens_follow_acceptance():
    assert origins([3, 1, 2], 7) == [0, 1, 1, 0, 0, 3, 0]
    assert origins([3, 1, 2], 5) == [0, 1, 1, 0, 0]


def test_sample_is_shown_in_colour_or_marks():
    pieces = ["a", "b", "c", "d", "e", "f", "g"]
    assert colored_answer(pieces, [3, 1, 2], color=False) == "a⟦bc⟧de⟦f⟧g"
    assert colored_answer(pieces[:6], [3, 1, 2], color=False, marks=("<", ">")) == "a<bc>de<f>"
    colored = colored_answer(pieces, [3, 1, 2], color=True)
    assert re.sub(r"\x1b\[\d+m", "", colored) == "abcdefg"
    assert colored.count("\x1b[32m") == 2 and colored.endswith("\x1b[0m")


def test_marks_differ_from_characters_of_the_text():
    """Brackets in `return input_str[::-1]` could not be told from marks."""
    unicode = io.TextIOWrapper(io.BytesIO(), "utf-8")
    ascii_ = io.TextIOWrapper(io.BytesIO(), "ascii")
    assert marks_around("return input_str[::-1]", unicode) == ("⟦", "⟧")
    assert marks_around("⟦ is a mark", unicode) == ("«", "»")
    assert marks_around("return input_str[::-1]", ascii_) == ("<<", ">>")
    assert marks_around("1 << 2, ⟦, «, a >>> b", unicode) == ("<<<<", ">>>>")


def test_multi_token_character_has_its_last_source():
    tokenizer = make_tokenizer()  # a token for each byte
    ids = tokenizer("a é\u20ac b")["input_ids"]
    assert token_texts(tokenizer, ids) == ["a", " ", "", "é", "", "", "\u20ac", " ", "b"]
    assert "".join(token_texts(tokenizer, ids[:-3])) == tokenizer.decode(ids[:-3])


@pytest.fixture
def report():
    methods = {
        TARGET_ALONE: MethodReport(100.0, 1.0, [90.0, 100.0, 110.0], 60, 60, 3),
        WHOLE_BLOCKS: MethodReport(300.0, 3.0, [280.0, 300.0, 310.0], 60, 13, 3),
        PROMPT_LOOKUP: MethodReport(105.0, 1.05, [100.0, 105.0, 106.0], 60, 45, 3),
    }
    return EvalReport(methods, [[5, 8, 6], [4], [8, 8, 7]], [[1] * 20, [1] * 5, [1] * 24], 8)


def test_table_names_every_figure(report):
    text = "\n".join(summary_lines(report))
    for figure in ("3.00x", "280-310", "3/3", "tau               6.57", "7 verifications"):
        assert figure in text, figure
    assert (
        "WRONG" not in text
        and "no output is wrong: 3 of 3 outputs with the drafter equal" in text
        and "verdict" not in text
    )
    report.divergences = [Divergence(WHOLE_BLOCKS, 0, 3, own=5, other=6, gap=12.5)]
    assert "WRONG" in "\n".join(summary_lines(report))


def test_papers_measures_stand_beside_ours(report):
    """Two definitions of tau and two of speed: each figure says which it is."""
    assert report.draft_share_of_prefill is None
    for name, prefill_seconds, decode_speedup in ((TARGET_ALONE, 0.3, 1.0), (WHOLE_BLOCKS, 0.4, 3.5)):
        report.methods[name].prefill_seconds = prefill_seconds
        report.methods[name].decode_speedup = decode_speedup
    report.prompt_lengths = [250, 10, 10]
    text = "\n".join(summary_lines(report))
    tau = (19 / 3 + 4 + 23 / 3) / 3
    for line in (
        "tau 6.57 over 7 verifications",
        f"tau {tau:.2f}, the mean of the answers' means; 3.50x over the target alone in time per token after the",
        "0.4 s until the first token in whole blocks, 25 % of it the drafter's",
        "tau by depth      6.40 below 256, 7.00 from 256 tokens of text, prompt included",
    ):
        assert line in text, line
    assert json.loads(report.to_json())["summary"]["decode_speedup"] == 3.5


def test_block_of_one_token_has_no_slots_to_draw(report):
    pytest.importorskip("matplotlib")
    report.block_size = 1
    assert len(draw_report(report).axes) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_headline_comes_first(packed, report):
    """Two taus, two speedups and two counts, none of which was the result."""
    report.methods[PLAIN_CALL] = MethodReport(
        250.0, 2.5, [250.0], 60, 20, 3, speedup_over_packed=2.0, draft_sizes=[0, 4, 7]
    )
    if packed:
        report.methods[TARGET_PACKED] = MethodReport(125.0, 1.25, [125.0], 60, 60, 3, speedup_over_packed=1.0)
        for name in (TARGET_ALONE, WHOLE_BLOCKS, PROMPT_LOOKUP):
            report.methods[name].speedup_over_packed = 1.0
    else:
        report.methods[PLAIN_CALL].speedup_over_packed = None
    first, second, *remaining_lines = summary_lines(report)
    if packed:
        speed = "2.00x the speed of the target alone, packed: 250 against 125 tokens/s"
    else:
        speed = "2.50x the speed of the target alone: 250 against 100 tokens/s"
    assert first == f"plain call        {speed}"
    assert second == "tau               6.57 tokens per verification in whole blocks"
    speedup = "2.00x over the packed target" if packed else "2.50x over the target"
    assert headline(report).startswith(f"plain call {speedup}")
    text = "\n".join(remaining_lines)
    assert "of 3 verifications" in text and "tau 6.57 over 7 verifications" in text and "rounds" not in text


def test_summary_names_the_verdict(report):
    """It led with "1 of 10 outputs equal" where none was wrong, and ended without a word at 0.56x."""
    report.methods[WHOLE_BLOCKS] = MethodReport(56.0, 0.56, [56.0], 60, 13, 1)
    report.divergences = [
        Divergence(WHOLE_BLOCKS, prompt, 3, own=5, other=6, gap=0.01, verdict=NEAR_TIE) for prompt in (0, 2)
    ]
    text = "\n".join(summary_lines(report))
    assert "no output is wrong: 1 of 3 outputs with the drafter equal the target's own, 2 differ at a near-tie" in text
    assert "slower than the target alone: 0.56x at best (whole blocks)" in text


def test_verdict_is_over_the_packed_target(report):
    """It said "slower than the target alone" of a drafter that the table above showed to be faster than that."""
    report.methods = {
        TARGET_ALONE: MethodReport(100.0, 1.0, [100.0], 60, 60, 3, speedup_over_packed=0.82),
        TARGET_PACKED: MethodReport(122.0, 1.22, [122.0], 60, 60, 3, speedup_over_packed=1.0),
        WHOLE_BLOCKS: MethodReport(110.0, 1.1, [110.0], 60, 13, 3, speedup_over_packed=0.9),
    }
    verdict = summary_lines(report)[-1]
    assert verdict == "verdict           slower than the target alone, packed: 0.90x at best (whole blocks)"


def test_wrong_plain_call_is_not_lossless(report):
    """`lossless`, `verdict` and the line of the summary looked at whole blocks alone."""
    assert report.lossless and report.verdict() == EQUAL
    report.methods[PLAIN_CALL] = MethodReport(250.0, 2.5, [250.0], 60, 20, 2)
    report.divergences = [Divergence(PLAIN_CALL, 1, 3, own=5, other=6, gap=12.5)]
    summary = json.loads(report.to_json())["summary"]
    assert (summary["lossless"], summary["verdict"]) == (False, WRONG) and report.is_wrong
    assert "1 WRONG: 5 of 6 outputs with the drafter equal the target's own" in "\n".join(summary_lines(report))
    report.divergences[0].method = PROMPT_LOOKUP  # no drafter: its rounding says nothing about one
    assert report.verdict() == EQUAL and not report.is_wrong


def test_report_is_drawn_as_a_picture(report, tmp_path):
    pytest.importorskip("matplotlib")
    for title in ("", "Title"):
        path = plot_report(report, tmp_path / "report.png", title)
        header = path.read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(header[16:20], "big") > 1000


LONG = "-".join(["Qwen3-Coder-480B-A35B-Instruct-FP8"] * 5)


@pytest.mark.parametrize("title", ["short", f"{LONG} + {LONG}\n{LONG}", "x" * 300], ids=["short", "names", "word"])
@pytest.mark.parametrize("other_methods", [(), ("prompt_lookup", "a method of somebody else, with a very long name")])
def test_every_label_is_inside_the_picture(title, other_methods, report):
    """The names of README's first picture were cut at both edges."""
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    report.methods |= {name: MethodReport(310.0, 3.1, [310.0, 310.0, 310.0], 60, 45, 3) for name in other_methods}
    figure = draw_report(report, title)
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    boxes = [text.get_window_extent() for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert inside, (text.get_text(), box, figure.bbox)
    titles = [
        box for text, box in zip(texts, boxes, strict=True) if text.get_fontsize() >= 10 and " " in text.get_text()
    ]
    for title_box, other_box in itertools.combinations(titles, 2):
        assert not title_box.overlaps(other_box)
    assert "".join(figure.get_suptitle().split()) == "".join(title.split())


def test_report_without_picture_removes_the_old_one(report, tmp_path, monkeypatch):
    def missing(*_):
        raise ImportError("no matplotlib")

    monkeypatch.setattr("dflash_hf.evaluation.report_files.plot_report", missing)
    (tmp_path / "eval_report.png").touch()
    assert save_report(report, tmp_path) == [tmp_path / "eval_report.json"] == list(tmp_path.iterdir())
