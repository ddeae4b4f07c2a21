"""
Each figure in README, guides and cards is that of a dated file in `examples/benchmarks/results/figures`.

A fault names document, line and remedy; `python examples/benchmarks/figures.py --renew` rewrites figures that changed.
"""

import dataclasses
import json
import re
from datetime import date

import figures
import pytest
import quoted
from quoted import RESULTS, ROOT, Measurement

import dflash_hf


MEASURED = quoted.measurements()
NEW = Measurement(
    "2026-11-29", "0" * 8, "0.3.0", "2.13.0", "5.23.0", "a CPU", "a command", {"plain": 2.491, "tau": 2.3846}
)
PAIR = {"pair": NEW, "old": dataclasses.replace(NEW, dflash_hf="0.1.1")}


@pytest.mark.parametrize("path", quoted.documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document_quotes_its_measurements(path):
    name = path.relative_to(ROOT).as_posix()
    assert quoted.faults(name, path.read_text(encoding="utf-8"), MEASURED, dflash_hf.__version__) == []


@pytest.mark.parametrize("name", MEASURED)
def test_measurement_is_dated_and_stands_in_its_file(name):
    measured = MEASURED[name]
    assert date.fromisoformat(measured.date) and re.fullmatch(r"[0-9a-f]{8}", measured.commit) and measured.minor
    assert measured.torch and measured.transformers and measured.processor and measured.command
    assert set(measured.computed) <= set(measured.figures)
    if measured.file:
        text = (RESULTS / measured.file).read_text(encoding="utf-8")
        numbers = {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}
        copied = {figure: value for figure, value in measured.figures.items() if figure not in measured.computed}
        assert {figure: value for figure, value in copied.items() if value not in numbers} == {}


def test_bundled_figures_are_the_report_s():
    report = figures.read_report("", figures.DRAFTER)
    assert MEASURED["bundled"].figures == report, "run `python examples/benchmarks/figures.py --read bundled`"


def test_readme_s_first_figures_are_ours():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tables = [block for block in quoted.blocks_of(text) if block.quotes and block.text.startswith("|")]
    assert tables[0].quotes and all(quote.name not in quoted.NOT_MEASURED for quote in tables[0].quotes)


# A document that is right, then what a fault of it must name.
RIGHT = "# A page\n\nA call is 2.49x as fast, on 29 November 2026.\n<!-- figures: pair.plain pair.date -->\n"
FAULTS = {
    "a speedup": ("A call is 1.23x as fast.", ["page.md:3", "1.23", "results/figures"]),
    "a tau": ("It has tau 2.4.", ["page.md:3", "2.4"]),
    "a share": ("It is 12 % faster.", ["page.md:3", "12"]),
    "a rate": ("It reads 90 MB/s.", ["page.md:3", "90"]),
    "a time": ("It takes\n5 CPU minutes.", ["page.md:4", "5"]),
    "GPU hours": ("It takes 26 GPU hours.", ["page.md:3", "26"]),
    "a time without a space": ("It takes 30ms.", ["page.md:3", "30"]),
    "days": ("It takes 3 days.", ["page.md:3", "3"]),
    "a size": ("It takes 14 GB.", ["page.md:3", "14"]),
    "a date": ("Since 27 November.", ["page.md:3", "27 November"]),
    "the lower end of a range": (
        "It is 9 to 12 % faster, 10-20x with more.\n<!-- figures: pair.plain pair.plain -->",
        ["2 figures, above it stand 4", "9, 12"],
    ),
    "a date in two lines": ("Since 27\nNovember 2026.", ["page.md:3", "27\nNovember 2026"]),
    "another date in two lines": (RIGHT[10:].replace("29 N", "28\nN"), ["pair.date is 29 November 2026"]),
    "a share in words": ("It is 12 percent faster.", ["page.md:3", "12"]),
    "another sign": ("It is **2.5×** as fast, tau=2.4.", ["page.md:3", "2.5", "2.4"]),
    "a figure in backticks": ("It is `2.5x` as fast.", ["page.md:3", "2.5"]),
    "an output": ("```text\nplain call  2.49x\n```", ["page.md:3", "output: NAME"]),
    "an output of an unknown file": ("```text\ncall  2.49x\n```\n\n<!-- output: pear -->", ["page.md:3", "pear.json"]),
    "an output of an old version": (
        "```text\ncall  2.49x\n```\n\n<!-- output: old -->",
        ["page.md:3", "dflash-hf 0.1"],
    ),
    "a cell": ("| tau |\n|---|\n| 2.4 |", ["page.md:5", "2.4"]),
    "a second figure": (RIGHT[10:].replace("fast", "fast, 1.23x"), ["page.md:3", "2 figures", "3", "1.23"]),
    "another value": (RIGHT[10:].replace("2.49", "2.48"), ["page.md:3", "2.48", "pair.plain is 2.49", "--renew"]),
    "another date": (RIGHT[10:].replace("29 N", "28 N"), ["28 November 2026", "pair.date is 29 November 2026"]),
    "a comment of nothing": ("No figure.\n<!-- figures: setting -->", ["page.md:3", "names 1 figures", "stand 0"]),
    "names in another order": (
        RIGHT[10:].replace("pair.plain pair.date", "pair.date pair.plain"),
        ["2.49", "a number", "order", "29 November 2026", "a date"],
    ),
    "an unknown name": (RIGHT[10:].replace("pair.plain", "pair.speed"), ["there is no pair.speed"]),
    "an unknown file": (RIGHT[10:].replace("pair.plain", "pear.plain"), ["there is no pear.plain"]),
    "an old version": (RIGHT[10:].replace("pair.plain", "old.plain"), ["2.49", "dflash-hf 0.1", "make figures"]),
    "another torch": (RIGHT[10:].replace("fast", "fast with torch 2.12.0"), ["torch 2.12.0", "2.13.0"]),
    "another version of the package": (
        RIGHT[10:].replace("fast", "fast with dflash-hf 0.1"),
        ["dflash-hf 0.1", "0.3"],
    ),
    "the paper's as ours": ("A call is 4.9x as fast.\n<!-- figures: paper -->", ["page.md:3", "the paper's"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_names_line_and_remedy(fault):
    text, parts = FAULTS[fault]
    messages = quoted.faults("page.md", f"# A page\n\n{text}\n", PAIR, "0.3.0.dev0")
    assert len(messages) >= 1
    assert [part for part in parts if part not in "\n".join(messages)] == []


NO_FAULTS = {
    "named": RIGHT,
    "an old version that is said": RIGHT.replace("pair", "old").replace("A call", "With dflash-hf 0.1, a call"),
    "the paper's": "The paper has 4.9x and 12 %.\n\n<!-- figures: paper -->\n",
    "settings": "- At most 5 %.\n- After 30 minutes.\n  <!-- figures: setting -->\n",
    "versions and code": "Python 3.10, torch >= 2.8, Qwen3.5, Llama-3.1-8B, 0.1.2, `--x 2.5`, [a](b-2.5.md), 4 x 8.\n",
    "an output": "```text\nplain call  2.49x\n```\n\n<!-- output: pair -->\n",
    "a command": "```bash\ndflash eval --pretend-tau 2.4\n```\n",
}


@pytest.mark.parametrize("text", NO_FAULTS.values(), ids=NO_FAULTS)
def test_document_without_fault(text):
    assert quoted.faults("page.md", text, PAIR, "0.3.0.dev0") == []


def test_figures_age_with_the_version():
    """What is new today has to be measured anew, or to say its version, when there are two newer minor versions."""
    assert quoted.faults("page.md", RIGHT, PAIR, "0.4.1") == []
    assert "dflash-hf 0.3" in quoted.faults("page.md", RIGHT, PAIR, "0.5.0.dev0")[0]


def test_renewed_document_quotes_the_measurement():
    newer = {"pair": dataclasses.replace(NEW, date="2026-12-03", figures={"plain": 12.345, "tau": 1234.5})}
    text = RIGHT.replace("fast,", "fast at `--tau 2.49`, tau 2.4,").replace("pair.plain", "pair.plain pair.tau")
    assert quoted.faults("page.md", text, PAIR, "0.3.0") == []
    after = quoted.renewed(text, newer)
    assert "12.35x as fast at `--tau 2.49`, tau 1,234.5, on 3 December 2026." in after
    assert quoted.faults("page.md", after, newer, "0.3.0") == []


def test_printed_report_is_renewed():
    page = "```bash\ndflash eval\n```\n\n```text\nold 1.1x\n```\n\n<!-- output: bundled -->\n\nThe end.\n"
    after = figures.with_printed_report(page)
    assert after.startswith("```bash\ndflash eval\n```\n\n```text\nplain call  ") and "old" not in after
    assert "target alone, packed" in after and after.endswith("\n```\n\n<!-- output: bundled -->\n\nThe end.\n")
    assert figures.with_printed_report(after) == after


@pytest.mark.parametrize("path", quoted.documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_shown_report_is_the_bundled_one(path):
    """A comment below an output named its measurement, but no test read the output."""
    text = path.read_text(encoding="utf-8")
    assert figures.with_printed_report(text) == text, "run `python examples/benchmarks/figures.py --renew`"


# ------------------------------------------------------------------------------------------------- `make figures`


def test_measurement_is_written_and_documents_renewed(tmp_path, monkeypatch, capsys):
    """A measurement of this commit is not repeated; without `--quick` the file and the document say the new figure."""
    (tmp_path / "results" / "figures").mkdir(parents=True)
    page = tmp_path / "page.md"
    page.write_text("Copied in 9.99 s.\n<!-- figures: packing.seconds -->\n", encoding="utf-8")
    for module in (quoted, figures):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(figures, "documents", lambda: [page])
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "git", lambda *words: "" if words[0] == "status" else "01234567")
    commands = []

    def run(recipe, work, is_quick):
        commands.append(is_quick)
        return json.dumps({"seconds": 0.2 + len(commands)})

    monkeypatch.setattr(figures, "run", run)
    for options in (["--quick"], [], [], ["--again"]):
        monkeypatch.setattr("sys.argv", ["figures.py", "--only", "packing", *options])
        assert figures.main() == 0
    assert commands == [True, False, False]
    assert "measured at this commit" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8").startswith("Copied in 3.20 s.")
    measured = quoted.measurements()["packing"]
    assert measured.figures == {"seconds": 3.2} and measured.commit == "01234567"
    assert measured.dflash_hf == dflash_hf.__version__ and "packing.py" in measured.command


def test_failed_measurement_is_named_and_others_go_on(tmp_path, monkeypatch, capsys):
    failing = dataclasses.replace(figures.RECIPES["packing"], quick="echo started; exit 3")
    working = dataclasses.replace(failing, quick="echo '{\"seconds\": 1}'")
    monkeypatch.setattr(figures, "RECIPES", {"first": failing, "second": working})
    monkeypatch.setattr("sys.argv", ["figures.py", "--quick"])
    assert figures.main() == 1
    output = capsys.readouterr().out
    assert "exit 3` ended with status 3:\nstarted" in output
    assert "second: {'seconds': 1}" in output and "failed: first" in output


TABLE = """
                               tokens/s  slowest-fastest  speed-up over packed  tokens/forward    equal
target alone                        5.5          5.5-5.5     1.00x       0.79x            1.00   12/12
target alone, packed                6.9          6.9-6.9     1.26x       1.00x            1.00   12/12
plain call                          8.5          8.5-8.5     {}x       1.24x            2.67   12/12

tau               2.32 tokens per verification
"""
EXCERPTS = {
    "core_and_package": ("| all | 1.79x | 2.52x | 2.49x | 2.84x | |", {"core": 1.79, "package": 2.52}),
    "device_rounds": (
        "| target alone | 1.0 | 1.0 | 0.0 | 1.0 | 1766 | 1.00 | yes |\n"
        "| block | 8.5 | 1.0 | 0.0 | 1.0 | 2195 | 1.24 | yes |\n"
        "| tree of 63 | 9.1 | 1.0 | 0.0 | 1.0 | 2560 | 1.45 | yes |\n"
        "| block, CUDA graphs | 8.5 | 1.0 | 0.0 | 1.0 | 56 | 0.03 | yes |",
        {"kernels_min": 1.24, "kernels_max": 1.45},
    ),
    "bytes_moved": (
        "| block of 16, no mask | 1.043 | 1.042 | 1.037 | 1.026 | 1.019 | 1.000 |",
        {"block_131072": 1.019},
    ),
    "prompt_memory": (
        "| 2048 | one piece | 16 | 17 | 1.090 | 18 | 19 | 1.068 | 3 / 4 |\n"
        "| 8192 | one piece | 63 | 69 | 1.097 | 65 | 70 | 1.088 | 23 / 23 |\n"
        "| 8192 | chunks of 64 | 43 | 46 | 1.079 | 46 | 51 | 1.120 | 52 / 54 |",
        {"peak_ratio": 1.097},
    ),
    "avx2": (
        "".join(f"{figures.RUN}dflash demo\n{TABLE.format(speed)}" for speed in ("1.56", "1.31", "1.00")),
        {"target": 1.0, "target_packed": 1.26, "plain": 1.56, "plain_over_packed": 1.24, "tau": 2.32}
        | {"second_run": 1.31, "short_run": 1.0},
    ),
}


@pytest.mark.parametrize("name", EXCERPTS)
def test_reader_takes_figures_from_the_output(name, tmp_path):
    output, expected = EXCERPTS[name]
    assert figures.RECIPES[name].read(output, tmp_path) == expected
