"""Importing the package costs nothing, and yet what it changes is changed when it is needed."""

import importlib.util
import subprocess
import sys
import types

import pytest

from dflash_hf._registration.when_imported import _actions, when_imported


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_brings_no_slow_module():
    code = """
import sys, transformers
before = set(sys.modules)
import dflash_hf
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("importlib")))
"""
    assert set(_python(code).split()) <= {
        "dflash_hf",
        "dflash_hf._registration",
        "dflash_hf._registration.when_imported",
    }


@pytest.mark.parametrize(
    "first",
    [
        "import transformers.generation.utils, dflash_hf",
        "from dflash_hf import DFlashDraftModel, DFlashDraftConfig",
        "from dflash_hf.layouts.read import is_drafter_config",
    ],
)
def test_registration_works_in_any_import_order(first):
    """The first import of transformers may be that of a module of ours, which all else has waited for."""
    code = f"""
{first}
from transformers import AutoConfig, AutoModel, GenerationMixin
from dflash_hf import DFlashDraftConfig
assert hasattr(GenerationMixin._assisted_decoding, "_dflash_original")
assert hasattr(AutoConfig.from_pretrained, "_dflash_original")
config = DFlashDraftConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=1, num_key_value_heads=1, head_dim=32, block_size=4, mask_token_id=31,
    target_layer_ids=[0], num_target_layers=2)
print(type(AutoModel.from_config(config)).__name__)
"""
    assert _python(code) == "DFlashDraftModel"


def test_action_runs_once_after_the_module(tmp_path, monkeypatch):
    (tmp_path / "waited_for.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    when_imported("waited_for", lambda: seen.append(sys.modules["waited_for"].value))
    assert seen == []
    import waited_for

    assert seen == [1] and isinstance(waited_for, types.ModuleType)
    when_imported("waited_for", lambda: seen.append(2))  # is there already
    assert seen == [1, 2]


def test_all_actions_run_in_order(tmp_path, monkeypatch):
    """The second action replaced the first, which never ran."""
    (tmp_path / "waited_for_twice.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    when_imported("waited_for_twice", lambda: seen.append(1))
    when_imported("waited_for_twice", lambda: seen.append(2))
    __import__("waited_for_twice")
    assert seen == [1, 2]


def test_action_waits_until_the_module_is_executed(tmp_path, monkeypatch):
    """A look whether it is there, or an import that failed, was taken for the import, and the action never ran."""
    name = "found_before_it_is_imported"
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    when_imported(name, lambda: seen.append(1))
    with pytest.raises(ModuleNotFoundError, match=name):
        __import__(name)
    file = tmp_path / f"{name}.py"
    file.write_text("raise RuntimeError")
    importlib.invalidate_caches()
    with pytest.raises(RuntimeError):
        __import__(name)
    file.write_text("value = 1")
    assert importlib.util.find_spec(name) is not None and seen == []
    __import__(name)
    assert seen == [1] and name not in _actions
