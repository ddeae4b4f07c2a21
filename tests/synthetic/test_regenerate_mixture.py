"""`dflash regenerate` of a mixture: interrupted at any moment, it ends with the rows and answers of a single run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from support.chat_stand_in import chat_server
from support.mixtures import save_sources, write_mixture
from support.tiny_chat import save_target

from dflash_hf.cli import main
from dflash_hf.data.mixture import mixed_rows, read_mixture
from dflash_hf.data.row_layouts import conversation_of
from dflash_hf.synthetic.regenerate import seed_of_turn
from dflash_hf.synthetic.response_file import ResponseFile


pytest.importorskip("datasets")
COUNTS = {"chat": 8, "math": 6, "alpaca": 7, "ultrachat": 5}
TOTAL = sum(COUNTS.values())
SAMPLED = ("--device", "cpu", "--temperature", "1.2", "--seed", "3", "--max-new-tokens", "8", "--turns", "all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    path = tmp_path_factory.mktemp("sources")
    return write_mixture(path / "mixture.yaml", save_sources(path), COUNTS)


def words_of(mixture, target, output, *options) -> list[str]:
    return ["regenerate", "--data", *map(str, (mixture, "--target", target, "--output", output, *options))]


def rows_of(path) -> dict[int, dict]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_number = {row["row"]: row for row in rows}
    assert len(by_number) == len(rows)
    return by_number


def check_rows(rows: dict[int, dict], mixture) -> None:
    """Row `n` answers the mixture's row `n`, and each source has its number of rows."""
    assert sorted(rows) == list(range(TOTAL))
    for number, row in enumerate(mixed_rows(read_mixture(mixture))):
        first = conversation_of(row, answers=False, ids=False).prompt(as_chat=True)[0]
        assert rows[number]["messages"][0] == first
    assert Counter(row["messages"][0]["content"].split()[0] for row in rows.values()) == COUNTS


def test_interrupted_mixture_equals_a_single_run(mixture, tmp_path, capsys, monkeypatch):
    """Each answer says what was asked and with which seed; three interruptions at any byte."""
    generator = random.Random(0)
    whole = tmp_path / "whole.jsonl"
    torn = tmp_path / "torn.jsonl"
    append = ResponseFile.write_row
    interruptions = []

    def tear(self, row):
        before = self.path.stat().st_size
        append(self, row)
        if self.path == torn and len(interruptions) < 3 and generator.random() < 0.3:
            interruptions.append(generator.randrange(before, self.path.stat().st_size + 1))
            self.file.truncate(interruptions[-1])
            raise KeyboardInterrupt

    monkeypatch.setattr(ResponseFile, "write_row", tear)
    with chat_server(lambda body: f"{body['seed']}: {body['messages']}") as (url, _):
        options = ("--server", url, "--seed", 3, "--turns", "all", "--concurrency")
        assert main(words_of(mixture, "served", whole, *options, 1)) == 0
        assert f"{TOTAL} of {TOTAL} rows are in" in capsys.readouterr().out
        code = 130
        while code == 130:
            code = main(words_of(mixture, "served", torn, *options, generator.randrange(1, 5)))
    assert code == 0 and len(interruptions) == 3
    assert rows_of(torn) == rows_of(whole)
    check_rows(rows_of(torn), mixture)


def test_server_gets_each_row_with_its_seed(mixture, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    with chat_server(lambda body: "Yes.") as (url, received):
        for limit in (9, TOTAL):  # the first rows of the order, then the others
            words = words_of(mixture, "served", output, "--server", url, "--seed", 5, "--limit", limit)
            assert main(words) == 0
            assert sorted(rows_of(output)) == list(range(limit))
    printed = capsys.readouterr()
    assert "8 rows of " in printed.err and ":chat: terms unknown" in printed.err
    assert len(received) == TOTAL
    for number, row in enumerate(mixed_rows(read_mixture(mixture))):
        messages = conversation_of(row, answers=False, ids=False).prompt(as_chat=True)
        (body,) = [body for body in received if body["messages"] == messages]
        assert body["seed"] == seed_of_turn(5, number, 0)


def test_changed_mixture_is_refused(mixture, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    with chat_server(lambda body: "Yes.") as (url, _):
        assert main(words_of(mixture, "served", output, "--server", url, "--limit", 6)) == 0
        before = output.read_bytes()
        other = tmp_path / "other.yaml"
        other.write_text(mixture.read_text().replace("seed: 0", "seed: 1"))
        assert main(words_of(other, "served", output, "--server", url)) == 1
    assert "the data has changed; choose another output" in capsys.readouterr().err
    assert output.read_bytes() == before
    assert main(words_of(mixture, "served", tmp_path / "o.jsonl", "--server", url, "--split", "train")) == 2
    assert "is a mixture, whose sources have their own: leave out --split" in capsys.readouterr().err


@pytest.mark.slow
def test_mixture_is_killed_ten_times(folder, mixture, tmp_path, capsys):
    """Real kills of a process that decodes, each after some more rows; the last run ends by itself."""
    whole = tmp_path / "whole.jsonl"
    killed = tmp_path / "killed.jsonl"
    assert main(words_of(mixture, folder, whole, *SAMPLED, "--batch-size", 7)) == 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    rows_at_kill = []
    for kill in range(10):
        command = [sys.executable, "-m", "dflash_hf.cli", *words_of(mixture, folder, killed, *SAMPLED)]
        process = subprocess.Popen([*command, "--batch-size", "2"], env=environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not killed.exists() or killed.read_bytes().count(b"\n") < 2 * (kill + 1):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        rows_at_kill.append(killed.read_bytes().count(b"\n"))
    print("rows after each kill:", rows_at_kill)
    assert rows_at_kill[-1] < TOTAL
    assert main(words_of(mixture, folder, killed, *SAMPLED, "--batch-size", 7)) == 0
    assert rows_of(killed) == rows_of(whole)
    check_rows(rows_of(killed), mixture)
