"""`generate(custom_generate="<drafter>")`; without the package, see `test_core_alone.py`."""

import gc
import sys
import weakref

import pytest
import torch
from support.pairs import make_draft, make_target
from transformers import GenerationMixin

from dflash_hf import DFlashDraftModel
from dflash_hf.modeling import custom_generate_dflash


PROMPT = torch.tensor([[5, 9, 17, 33, 2]])
OPTIONS = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
OPTIONS |= {"num_assistant_tokens": 3}  # sizes that are chosen depend on earlier calls


@pytest.fixture
def target():
    return make_target()


@pytest.fixture
def folder(target, tmp_path):
    make_draft(target).save_pretrained(tmp_path / "my-draft.1")
    return tmp_path / "my-draft.1"


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    """Copies of remote code go to a folder of this test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = list(sys.path)
    yield
    sys.path[:] = path


def assisted(target, draft):
    return target.generate(PROMPT, **OPTIONS, assistant_model=draft)


def by_name(target, name):
    return target.generate(PROMPT, **OPTIONS, custom_generate=str(name), trust_remote_code=True)


def test_custom_generate_takes_a_folder_name(target, folder, modules_cache):
    expected = assisted(target, DFlashDraftModel.from_pretrained(folder))
    output = by_name(target, folder)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.acceptance_lengths == expected.acceptance_lengths
    assert len(set(output.sequences[0].tolist())) > 8


def test_changed_drafter_is_loaded_again(target, folder, modules_cache, monkeypatch):
    loads = []
    original = custom_generate_dflash.AutoModel.from_pretrained

    def counted(*args, **kwargs):
        loads.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr("transformers.AutoModel.from_pretrained", counted)
    for _ in range(2):
        by_name(target, folder)
    assert len(loads) == 1
    other = make_draft(target, seed=9)
    other.save_pretrained(folder)
    assert by_name(target, folder).acceptance_lengths == assisted(target, other).acceptance_lengths
    assert len(loads) == 2


def test_loaded_drafter_follows_its_target(target, folder, monkeypatch):
    """It stayed on the device of the first call. Here a drafter on another device is pretended."""
    custom_generate_dflash.generate(target, str(folder), input_ids=PROMPT, max_new_tokens=2)
    _, draft = custom_generate_dflash._loaded[target]
    monkeypatch.setattr(type(draft), "device", torch.device("meta"))
    devices = []
    monkeypatch.setattr(draft, "to", devices.append)
    custom_generate_dflash._load_drafter(target, str(folder), {})
    assert devices == [target.device]


def test_drafter_is_freed_with_its_target(folder):
    target = make_target()
    draft = DFlashDraftModel.from_pretrained(folder)
    arguments = {"max_new_tokens": 6, "do_sample": False}
    for assistant in (draft, str(folder)):
        output = custom_generate_dflash.generate(target, assistant, input_ids=PROMPT, **arguments)
        assert torch.equal(output, target.generate(PROMPT, **arguments))
    drafter = weakref.ref(custom_generate_dflash._loaded[target][1])
    del target
    gc.collect()
    assert drafter() is None


@pytest.mark.parametrize("other", [False, True])
def test_only_the_named_folders_code_is_trusted(other, target, folder, monkeypatch):
    seen = []
    loaded = DFlashDraftModel.from_pretrained(folder)

    def load(name, **kwargs):
        seen.append(kwargs["trust_remote_code"])
        return loaded

    monkeypatch.setattr(custom_generate_dflash.AutoModel, "from_pretrained", load)

    def generate(custom_generate):  # upstream's frame
        more = {"assistant_model": f"{folder}/other"} if other else {}
        return custom_generate_dflash.generate(target, input_ids=PROMPT, max_new_tokens=3, **more)

    generate(str(folder))
    assert seen == [None if other else True]


def test_unknown_or_foreign_names_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match="load it with `AutoModel`"):
        custom_generate_dflash.generate(target, input_ids=PROMPT)
    target.model.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="Qwen3Model, not a DFlash drafter"):
        custom_generate_dflash.generate(target, str(tmp_path / "target"), input_ids=PROMPT)


def test_upstream_holds_the_name_in_its_frame():
    """A canary: `generate` must call the loaded function itself, with the name in a local `custom_generate`."""
    code = GenerationMixin.generate
    while hasattr(code, "__wrapped__"):
        code = code.__wrapped__
    assert code.__name__ == "generate" and "custom_generate" in code.__code__.co_varnames
