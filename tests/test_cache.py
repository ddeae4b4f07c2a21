"""A folder that is there whole or not at all."""

import os
import re
import time

import pytest

from dflash_hf.cache import DamagedFolderError, check_whole, whole_folder
from dflash_hf.modeling.remembered_dflash import default_cache_dir


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


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("DFLASH_HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "dflash_hf"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "dflash_hf"
    monkeypatch.setenv("DFLASH_HF_HOME", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
