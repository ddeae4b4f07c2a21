"""The demo: prompts, the comparison on a tiny pair; the real pair where it is here."""

import gzip
import json
import os
import platform
import re
import subprocess
import sys

import pytest
from support.pairs import make_draft
from support.tiny_chat import save_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf.cli import main
from dflash_hf.demo import run as demo
from dflash_hf.evaluation.divergence import NEAR_TIE, Divergence
from dflash_hf.evaluation.methods import WHOLE_BLOCKS
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.smollm2 import LoadedPair, data_folder, drafter_folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = save_target(tmp_path_factory.mktemp("target"))
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    return LoadedPair(target, make_draft(target), AutoTokenizer.from_pretrained(folder))


def test_prompts_were_not_trained_on():
    rows = demo.demo_prompts(14)
    assert {row["kind"] for row in rows[:7]} == {"chat", "code", "task", "math", "rewrite", "json", "sum"}
    with gzip.open(data_folder() / "answers.jsonl.gz", "rt", encoding="utf-8") as file:
        trained = {json.loads(line)["messages"][0]["content"] for line in file}
    assert len(trained) > 4000 and not trained & {row["messages"][0]["content"] for row in demo.demo_prompts(100)}
    with pytest.raises(ValueError, match="prompts=9999, but only .* prompts are held out; ask for fewer"):
        demo.demo_prompts(9999)


def test_demo_runs_every_method_in_turn(pair, tmp_path):
    lines = []
    report = demo.run_demo(pair, demo.demo_prompts(3), max_new_tokens=12, output=tmp_path / "new", say=lines.append)
    assert report.lossless
    assert set(report.methods) == {"target", "target_packed", "dflash", "dflash_auto"}
    text = "\n".join(lines)
    for part in ("compare   3 prompts", "plain call", "whole blocks", "6 of 6 outputs with the drafter equal", "tau "):
        assert part in text, part
    assert json.loads((tmp_path / "new" / "eval_report.json").read_text(encoding="utf-8"))["summary"]["prompts"] == 3
    pytest.importorskip("matplotlib")
    assert (tmp_path / "new" / "eval_report.png").stat().st_size > 10_000


def test_sample_is_of_average_acceptance(pair):
    """With its own request, and without the token that ends it."""
    rows = [{"messages": [{"role": "user", "content": f"Say {i}"}]} for i in range(3)]
    answers = [[*pair.tokenizer(text)["input_ids"], pair.tokenizer.eos_token_id] for text in ("ab", "cd", "ef")]
    report = EvalReport({}, [[4, 4], [1], [2, 2]], answers, 8)
    empty, request, counts, answer = demo.sample_lines(pair, rows, report, color=False)
    assert (empty, request) == ("", "Say 2") and counts.startswith("(2 tokens in 2 verifications")
    assert re.sub("[⟦⟧]", "", answer) == "ef"


def test_answers_of_one_token_have_no_tau(pair):
    """The prompt's forward gives the only token, and nothing is verified; the average was over none."""
    lines = []
    report = demo.run_demo(pair, demo.demo_prompts(2), max_new_tokens=1, say=lines.append)
    assert [len(answer) for answer in report.responses] == [1, 1]
    assert report.verifications == [] and report.tau == 0 and report.tau_per_response == 0
    assert all(method.tau is None for method in report.methods.values())
    text = "\n".join(lines)
    assert "tau 0.00 over 0 verifications" in text and "(1 tokens in 0 verifications" in text
    assert "nan" not in text.lower()


@pytest.mark.parametrize("diverging", [(0, 1), (0, 1, 2)])
def test_sample_shows_the_drafted_text(diverging, pair, tmp_path, monkeypatch):
    """After a near-tie the marks were another text's; after one that ended the answer, nothing was saved."""
    rows = demo.demo_prompts(3)
    lines = []
    evaluate = demo.evaluate

    def parting(*args, **options):
        report = evaluate(*args, **options)
        for i in diverging:
            report.acceptance_lengths[i] = [1]
            report.divergences.append(Divergence(WHOLE_BLOCKS, i, 2, own=5, other=-1, verdict=NEAR_TIE))
        return report

    monkeypatch.setattr(demo, "evaluate", parting)
    demo.run_demo(pair, rows, max_new_tokens=12, output=tmp_path, say=lines.append)
    shown = [i for i, row in enumerate(rows) if row["messages"][-1]["content"].splitlines()[0] in lines]
    assert shown == [i for i in range(3) if i not in diverging]
    assert json.loads((tmp_path / "eval_report.json").read_text(encoding="utf-8"))["acceptance_lengths"][0] == [1]


@pytest.mark.real
def test_demo_of_the_real_pair_is_lossless(real_target, tmp_path, capsys):
    drafter_folder()
    options = ["--prompts", "1", "--max-new-tokens", "6", "--output", str(tmp_path), "--dtype", "float32"]
    assert main(["demo", *options]) == 0
    printed = capsys.readouterr().out
    assert (
        re.search(r"(\d+) of \1 outputs with the drafter equal the target's own", printed) and "plain call" in printed
    )


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="oneDNN's variable is for x86")
def test_demo_uses_fp32_without_bf16_units(real_target, tmp_path):
    here = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-m", "dflash_hf.cli", "demo", "--prompts", "1", "--max-new-tokens", "8", "--json"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **here}, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert {report["setting"][name] for name in ("target_dtype", "draft_dtype")} == {"float32"}
    assert report["summary"]["verdict"] == "equal" and done.stderr.count("no hardware support for bf16") == 1
