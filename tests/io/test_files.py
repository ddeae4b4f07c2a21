"""Files that are whole or not there, digests of contents, and locks."""

import errno
import json
import math
import os
import subprocess
import sys

import pytest

from dflash_hf._io import files
from dflash_hf._io.files import atomic, digest_of, digest_of_file, locked, write_json


fcntl = pytest.importorskip("fcntl")


def test_file_is_whole_or_unchanged(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(KeyboardInterrupt):
        with atomic(path) as half:
            half.write_text("half", encoding="utf-8")
            raise KeyboardInterrupt
    assert path.read_text(encoding="utf-8") == '{\n "a": 1\n}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_link_is_written_through(tmp_path):
    """A plain file replaced the link, and what it pointed to stayed as it was."""
    (tmp_path / "disk").mkdir()
    target = tmp_path / "disk" / "a.json"
    target.write_text("{}", encoding="utf-8")
    link = tmp_path / "a.json"
    link.symlink_to(target)
    write_json(link, {"a": 1})
    assert link.is_symlink() and json.loads(target.read_text(encoding="utf-8")) == {"a": 1}


def test_infinite_numbers_are_null(tmp_path):
    """`Infinity` and `NaN` are not JSON: other readers refuse the file."""
    write_json(tmp_path / "a.json", {"a": [math.inf, -math.inf, math.nan, 1.5], "Infinity": "NaN"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [None, None, None, 1.5], "Infinity": "NaN"}


def test_digests_are_of_contents(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"same")
    assert digest_of_file(tmp_path / "a") == digest_of_file(tmp_path / "b")
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1}) != digest_of({"a": 1, "b": 3})


@pytest.mark.parametrize("name", ["folder", "file.jsonl"])
def test_path_has_one_writer(name, tmp_path):
    """A process that is killed holds nothing: its file may stay, its lock does not."""
    path = tmp_path / name
    path.mkdir() if name == "folder" else path.touch()
    hold = "import sys, time; from pathlib import Path; from dflash_hf._io.files import locked\n"
    hold += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", hold, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"{name} is being written by another process"):
            with locked(path):
                pass
        process.kill()
    assert all(file.name.startswith(".") for file in tmp_path.rglob("*") if file != path)
    with locked(path):
        pass
    assert [*tmp_path.rglob("*")] == [path]


def test_lock_without_a_name_is_no_lock(tmp_path, monkeypatch):
    """A process may have opened the file just before its holder removed it."""
    lock = fcntl.flock

    def too_late(*of):
        (tmp_path / files.LOCK_FILE).unlink()
        lock(*of)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with pytest.raises(ValueError, match="is being written by another process"):
        with locked(tmp_path):
            pass


@pytest.mark.parametrize(("where", "error"), [("fcntl.flock", errno.ENOLCK), ("pathlib.Path.unlink", errno.EACCES)])
def test_missing_locks_are_no_obstacle(where, error, tmp_path, monkeypatch):
    """Some network file systems have none; Windows keeps files that are open."""

    def refused(*_, **__):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(where, refused)
    with locked(tmp_path):
        pass
