"""What is said about how long it will take."""

import re

import pytest

from dflash_hf.data import time_left
from dflash_hf.data.time_left import TimeLeft, duration, telling


def test_durations():
    assert [duration(seconds) for seconds in (-1, 0.4, 89, 90, 3540, 3600, 7510)] == [
        "0 s",
        "0 s",
        "89 s",
        "2 min",
        "59 min",
        "1 h 0 min",
        "2 h 5 min",
    ]


@pytest.mark.parametrize(("length", "spread"), [(100, 0), (100, 90)])
def test_a_simulated_batch_ends_when_it_was_said(length, spread, monkeypatch):
    """Texts of `length` steps give or take `spread`, of which every third is kept."""
    rows, wanted, clock, said = 16, 200, [0.0], []
    monkeypatch.setattr(time_left.time, "monotonic", lambda: clock[0])
    left, ended, kept = [length + spread * (i % 5 - 2) / 2 for i in range(rows)], 0, 0
    with TimeLeft("row", wanted, 0, rows, lambda line: said.append((clock[0], line))) as bar:
        while kept < wanted:
            clock[0] += 0.5
            for i in range(rows):
                left[i] -= 1
                if left[i] <= 0 and kept < wanted:
                    ended += 1
                    kept += ended % 3 == 0
                    bar.count(ended % 3 == 0, 100)
                    left[i] = length + spread * ((ended * 7) % 5 - 2) / 2
    check(said, clock)


def test_a_simulated_batch_that_waits_for_its_longest(monkeypatch):
    clock, said = [0.0], []
    monkeypatch.setattr(time_left.time, "monotonic", lambda: clock[0])
    with TimeLeft("row", 200, 0, 16, lambda line: said.append((clock[0], line)), full=False) as bar:
        for _ in range(200 // 16):
            clock[0] += 50
            for _ in range(16):
                bar.count(1, 100)
    check(said, clock)


def check(said, clock):
    ((when, line),) = said
    assert line.startswith("about ") and line.endswith(" min to go")
    assert int(line.split()[-4]) * 60 == pytest.approx(clock[0] - when, rel=0.35)


@pytest.mark.parametrize("done", [0, 40])
def test_items_end_when_it_was_said(done, monkeypatch):
    clock, said = [0.0], []
    monkeypatch.setattr(time_left.time, "monotonic", lambda: clock[0])
    for item in telling(range(200), 200, lambda line: said.append((clock[0], line)), done):
        clock[0] += 0 if item < done else 5 + item % 3
    check(said, clock)
    whole = re.fullmatch(r"about (\d+) min in all, \d+ min to go", said[0][1])[1]
    assert int(whole) * 60 == pytest.approx(clock[0], rel=0.1)
    assert list(telling([1, 2, 3], 3, lambda line: said.append(line))) == [1, 2, 3] and len(said) == 1
