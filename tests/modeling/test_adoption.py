"""Assistants that are not ours: what other code builds from a drafter's folder gets an error that names the remedy."""

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
from support.layouts import write
from support.pairs import make_draft, make_target
from transformers import AutoConfig, AutoModel, Qwen3Config, Qwen3Model

from dflash_hf import DFlashDraftModel
from dflash_hf.modeling.hook_dflash import drafter_of


PROMPT = torch.tensor([[5, 9, 17, 33, 2]])


class RemoteDraftModel(Qwen3Model):
    """Stands for the published remote class, which fails on current transformers; it has a drafter's configuration."""


@pytest.mark.parametrize("other", [Qwen3Model, RemoteDraftModel])
def test_other_code_is_refused(other, tmp_path):
    write(tmp_path / "draft", "z-lab v1")
    wrong = other(Qwen3Config.from_pretrained(tmp_path / "draft"))
    message = rf"{other.__name__} that other code built .* after `import dflash_hf`"
    with pytest.raises(ValueError, match=message):
        make_target().generate(PROMPT, max_new_tokens=3, assistant_model=wrong)


@pytest.mark.parametrize("wrap", ["peft", "compile", "parallel"])
def test_a_wrapped_drafter_drafts(wrap):
    """It was taken for a language model that had been loaded from a drafter's folder."""
    target = make_target()
    draft = make_draft(target)
    if wrap == "peft":
        peft = pytest.importorskip("peft")
        wrapped = peft.get_peft_model(draft, peft.LoraConfig(target_modules=["q_proj"]))
    else:
        wrapped = torch.compile(draft, backend="eager") if wrap == "compile" else torch.nn.DataParallel(draft)
    assert drafter_of(wrapped) is draft
    prompt = torch.tensor([[5, 9, 17]])
    expected = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=wrapped), expected)


def test_auto_classes_still_load_a_plain_target(tmp_path):
    make_target().save_pretrained(tmp_path / "target")
    assert type(AutoConfig.from_pretrained(tmp_path / "target")) is Qwen3Config
    assert type(AutoModel.from_pretrained(tmp_path / "target")) is Qwen3Model


def test_drafter_loaded_before_the_package_drafts(tmp_path, monkeypatch):
    """By its own code; what is loaded afterwards is the package's and runs no code of a folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    # Without the caches of other tests, which hold a package of the same name.
    paths = [path for path in sys.path if not Path(path, "transformers_modules").is_dir()]
    monkeypatch.setattr(sys, "path", paths)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    target = make_target()
    make_draft(target).save_pretrained(tmp_path / "draft")
    with monkeypatch.context() as patches:  # as before `import dflash_hf`
        patches.setattr(AutoConfig, "from_pretrained", AutoConfig.from_pretrained._dflash_original)
        core = AutoModel.from_pretrained(tmp_path / "draft", trust_remote_code=True)
    assert type(core).__module__.startswith("transformers_modules.") and not isinstance(core, DFlashDraftModel)
    modules = set(sys.modules)
    package = AutoModel.from_pretrained(tmp_path / "draft", trust_remote_code=True)
    assert type(package) is DFlashDraftModel and set(sys.modules) == modules
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(PROMPT, **options).sequences
    for draft in (core, copy.deepcopy(core), pickle.loads(pickle.dumps(core)), package):
        output = target.generate(PROMPT, **options, assistant_model=draft)
        assert torch.equal(output.sequences, expected)
        assert hasattr(output, "acceptance_lengths") == (draft is package)
