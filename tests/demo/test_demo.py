"""The demo: an honest task, its optimizer and clock, a cache without half pairs, the picture and the sample."""

import ast
import dataclasses
import os
import random
import re
import time

import pytest
import torch
from torch import nn

from dflash_hf.demo import run as demo
from dflash_hf.demo.cache import DamagedFolderError, check_whole, default_cache_dir, whole_folder
from dflash_hf.demo.run import DemoPair, DemoSettings, obtain_pair
from dflash_hf.demo.task import (
    END,
    Pair,
    answer_for,
    decode_answer,
    encode_pairs,
    is_correct,
    pairs_of_source,
    read_task,
    train_tokenizer,
)
from dflash_hf.demo.training import Muon, Pace, token_batches
from dflash_hf.evaluation.divergence import Divergence
from dflash_hf.evaluation.measure import DFLASH, PROMPT_LOOKUP, TARGET, EvalReport, MethodReport
from dflash_hf.evaluation.plots import plot_report
from dflash_hf.evaluation.text import colored_answer, origins, summary_lines


# --------------------------------------------------------------------------------------------------------------- task


def test_pairs_are_statements_with_their_trees():
    source = (
        '"""A docstring."""\nx = f(1)\n\n\ndef g(a):\n    "Another."\n    if a:\n        return a.b\n'
        '    é = "not ascii"\n    y += (\n        2)\n    return [' + "a, " * 40 + "]\n    i = 1\n"
    )
    pairs = pairs_of_source(source)
    assert {pair.code for pair in pairs} == {"x = f(1)", "return a.b"}  # no docstring, not too short, long or wide
    for pair in pairs:
        assert pair.answer == ast.dump(ast.parse(pair.code).body[0]) == answer_for(pair.code)
        assert is_correct(*pair)
        assert not is_correct(pair.code, pair.answer[:-1])
    # Columns are counted in bytes.
    assert pairs_of_source('z = "é"; value = other\n')[0].code == "value = other"


@pytest.fixture
def sources(tmp_path):
    """Forty files, with many lines in common."""
    generator = random.Random(0)
    folder = tmp_path / "sources"
    (folder / "tests").mkdir(parents=True)
    for i in range(40):
        lines = [f"value_{generator.randrange(40)} = self.name_{generator.randrange(30)}" for _ in range(20)]
        (folder / f"m{i}.py").write_text("\n".join([*lines, f"only_here = {i}"]), encoding="utf-8")
    (folder / "broken.py").write_text("def (", encoding="utf-8")
    (folder / "tests" / "test_m.py").write_text("from_a_test = True", encoding="utf-8")
    return folder


def test_nothing_held_out_was_seen(sources):
    data = read_task(10_000, 1000, seed=3, root=sources)
    train, held_out = {pair.code for pair in data.train}, {pair.code for pair in data.held_out}
    assert data.train_files + data.held_out_files == 40
    assert data.held_out_files >= 3
    assert held_out and not held_out & train
    # Whole files: what only one file has is on one side.
    assert len([code for code in held_out if code.startswith("only_here")]) == data.held_out_files
    assert len([code for code in train if code.startswith("only_here")]) == data.train_files
    assert "from_a_test = True" not in held_out | train
    assert len(data.train) == len(train) > 400
    # Lines that are read but not taken for training count as seen.
    few = read_task(50, 1000, seed=3, root=sources)
    assert len(few.train) == 50
    assert not {pair.code for pair in few.held_out} & train
    assert read_task(50, 1000, seed=3, root=sources) == few
    assert read_task(50, 1000, seed=4, root=sources) != few


def test_no_sources_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ValueError, match="0 lines to train on and 0 to hold out"):
        read_task(10, 10, root=tmp_path)


def test_tokenizer_round_trip():
    pairs = [Pair(code, answer_for(code)) for code in ("x = self.y", "return f(12, 'a b')", "del name_x[1]")]
    tokenizer = train_tokenizer(pairs, vocab_size=320)
    for pair, (prompt, answer) in zip(pairs, encode_pairs(tokenizer, pairs), strict=True):
        assert decode_answer(tokenizer, answer) == pair.answer
        assert answer[-1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(END)
        chat = [{"role": "user", "content": pair.code}]
        assert tokenizer.apply_chat_template(chat, return_dict=False, add_generation_prompt=True) == prompt
        assert tokenizer.mask_token_id not in prompt + answer
    # Digits stand alone, a name is the same tokens after a space and after a quote, and every byte has a token.
    assert [tokenizer.decode([i]) for i in tokenizer("12")["input_ids"]] == ["1", "2"]
    assert tokenizer(" name")["input_ids"][1:] == tokenizer("'name")["input_ids"][1:]
    assert tokenizer.decode(tokenizer("é€")["input_ids"]) == "é€"


# ----------------------------------------------------------------------------------------------------------- training


def test_muon_orthogonalises_matrices_and_is_adam_elsewhere():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(12, 8), "wide": nn.Linear(24, 8, bias=False), "tall": nn.Linear(8, 24, bias=False)}
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = Muon(model, matrix_lr=1.0, lr=0.01)
    twin = nn.Parameter(before["embed.weight"].clone())
    adam = torch.optim.Adam([twin], lr=0.01, betas=Muon.betas)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        twin.grad = model["embed"].weight.grad.clone()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        adam.step()
    torch.testing.assert_close(model["embed"].weight, twin)
    for name in ("wide", "tall"):
        update = model[name].weight.detach() - before[f"{name}.weight"]
        singular = torch.linalg.svdvals(update) / (0.2 * 24**0.5)
        assert 0.5 < singular.min() and singular.max() < 1.4, singular


def test_pace_goes_by_steps_or_by_the_clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Pace(steps=100, seconds=50)
    assert pace.fraction(25) == 0.25
    assert pace.scale(0) < pace.scale(1) < pace.scale(2) > pace.scale(60) > pace.scale(99) > 0
    now[0] = 40.0
    assert pace.fraction(25) == 0.8
    now[0] = 60.0
    assert pace.fraction(25) == 1.0
    assert pace.scale(25) == pytest.approx(0.02)


def test_batches_hold_all_rows_and_little_padding():
    rows = [([1] * (1 + i % 7), [i] * (1 + i % 40)) for i in range(500)]
    batches = token_batches(rows, tokens=100, seed=0)
    seen, padding, total = [], 0, 0
    while len(seen) < len(rows):
        batch = next(batches)
        widths = [len(prompt) + len(answer) for prompt, answer in batch]
        assert max(widths) * len(batch) <= 100
        padding += max(widths) * len(batch) - sum(widths)
        total += sum(widths)
        seen += [id(row) for row in batch]
    assert sorted(seen) == sorted(id(row) for row in rows)
    assert padding < 0.05 * total


# -------------------------------------------------------------------------------------------------------------- cache


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(folder, text="one"):
    (folder / "draft").mkdir()
    (folder / "draft" / "weights").write_text(text, encoding="utf-8")
    (folder / "task.json").write_text("{}", encoding="utf-8")


def test_a_folder_appears_whole(tmp_path):
    with whole_folder(tmp_path / "pair") as building:
        write(building)
        assert not (tmp_path / "pair").exists()
    assert names(tmp_path) == ["pair"]
    check_whole(tmp_path / "pair")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("there_before", [False, True])
def test_an_interrupted_one_leaves_what_was_there(tmp_path, error, there_before):
    if there_before:
        with whole_folder(tmp_path / "pair") as building:
            write(building)
    with pytest.raises(error), whole_folder(tmp_path / "pair") as building:
        write(building, "two")
        raise error
    assert names(tmp_path) == ["pair"] * there_before
    if there_before:
        check_whole(tmp_path / "pair")
        assert (tmp_path / "pair" / "draft" / "weights").read_text() == "one"


def test_a_new_one_replaces_the_old_and_sweeps_up(tmp_path):
    for text in ("one", "two"):
        with whole_folder(tmp_path / "pair") as building:
            write(building, text)
    killed, running = tmp_path / ".pair-killed", tmp_path / ".pair-running"
    killed.mkdir()
    running.mkdir()
    os.utime(killed, (time.time() - 7200,) * 2)
    with whole_folder(tmp_path / "pair") as building:
        write(building, "three")
    assert names(tmp_path) == [".pair-running", "pair"]
    assert (tmp_path / "pair" / "draft" / "weights").read_text() == "three"


@pytest.mark.parametrize("damage", ["cut", "lost", "added", "no manifest", "half a manifest"])
def test_damage_is_found(tmp_path, damage):
    folder = tmp_path / "pair"
    with whole_folder(folder) as building:
        write(building)
    if damage == "cut":
        (folder / "draft" / "weights").write_text("on", encoding="utf-8")
    elif damage == "lost":
        (folder / "task.json").unlink()
    elif damage == "added":
        (folder / "other").touch()
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text('{"task', encoding="utf-8")
    with pytest.raises(DamagedFolderError, match=re.escape(str(folder))):
        check_whole(folder)
    with pytest.raises(FileNotFoundError):
        check_whole(tmp_path / "none")


@pytest.fixture
def fake_training(monkeypatch):
    """Training writes its number; loading checks the folder and reads it back."""
    trained = []

    def train(settings, folder, num_prompts, say):
        trained.append(settings)
        write(folder, str(len(trained)))

    def load(folder):
        check_whole(folder)
        number = (folder / "draft" / "weights").read_text()
        return DemoPair(number, None, None, [Pair("a = b", "")] * 5, {})

    monkeypatch.setattr(demo, "train_pair", train)
    monkeypatch.setattr(demo, "load_pair", load)
    return trained


def test_a_pair_is_trained_once_and_again_when_damaged_or_asked(tmp_path, fake_training, monkeypatch):
    lines = []
    settings = DemoSettings()

    def obtain(**arguments):
        return obtain_pair(settings, tmp_path, say=lines.append, **arguments).target

    assert [obtain(), obtain()] == ["1", "1"]
    assert obtain(fresh=True) == "2"
    (tmp_path / settings.key / "task.json").unlink()
    lines.clear()
    assert obtain() == "3"
    assert "damaged, training it again" in lines[0] and "task.json" in lines[0]
    with pytest.raises(ValueError, match="prompts=6, but only 5"):
        obtain(num_prompts=6)

    def interrupted(settings, folder, num_prompts, say):
        write(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train_pair", interrupted)
    with pytest.raises(KeyboardInterrupt):
        obtain(fresh=True)
    assert obtain() == "3"
    assert names(tmp_path) == [settings.key]


def test_other_settings_are_another_pair():
    base = DemoSettings()
    others = [dataclasses.replace(base, seed=1), dataclasses.replace(base, self_generate=True)]
    others += [dataclasses.replace(base, draft_steps=7), dataclasses.replace(base, source="/elsewhere")]
    assert len({settings.key for settings in [base, *others]}) == 5


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("DFLASH_HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "dflash_hf" / "demo"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "dflash_hf" / "demo"
    monkeypatch.setenv("DFLASH_HF_HOME", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own" / "demo"


# ------------------------------------------------------------------------------------------------------- presentation


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


@pytest.fixture
def report():
    methods = {
        TARGET: MethodReport(100.0, 1.0, [90.0, 100.0, 110.0], 60, 60, 3),
        DFLASH: MethodReport(300.0, 3.0, [280.0, 300.0, 310.0], 60, 13, 3),
        PROMPT_LOOKUP: MethodReport(105.0, 1.05, [100.0, 105.0, 106.0], 60, 45, 3),
    }
    return EvalReport(methods, [[5, 8, 6], [4], [8, 8, 7]], [[1] * 20, [1] * 5, [1] * 24], 8, [True, False, True])


def test_the_table_names_every_figure(report):
    text = "\n".join(summary_lines(report))
    for figure in (
        "3.00x",
        "280-310",
        "3/3",
        "tau               6.57",
        "7 verifications",
        "2 of 3 exactly right (67%)",
    ):
        assert figure in text, figure
    assert "WRONG" not in text
    report.divergences = [Divergence(DFLASH, 0, 3, own=5, other=6, gap=12.5)]
    assert "WRONG" in "\n".join(summary_lines(report))


def test_a_picture_is_drawn(report, tmp_path):
    pytest.importorskip("matplotlib")
    for sample in (None, ("x = $y", ["Assign", "(", "$x", ")", "é"] * 30, [5, 8, 6])):
        path = plot_report(report, tmp_path / "report.png", "Title", sample)
        header = path.read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(header[16:20], "big") > 1000
