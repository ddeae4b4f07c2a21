"""Several LoRA on one drafter, switched as PEFT's users know it: each drafts as the drafter that it is merged into."""

import copy
import json

import pytest
import torch
from support.hub_stand_in import stand_in
from support.pairs import make_draft, make_target
from transformers.integrations.peft import MIN_PEFT_VERSION, check_peft_version

from dflash_hf import DFlashDraftModel
from dflash_hf.decoding.adapters import adapters_of
from dflash_hf.decoding.adaptive import _statistics
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.hub.card import CardFacts
from dflash_hf.hub.publish import publish
from dflash_hf.training.adapters import TARGET_MODULES


peft = pytest.importorskip("peft")
OPTIONS = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
PROMPT = torch.tensor([[5, 9, 11, 3]])


@pytest.fixture(scope="module")
def target():
    return make_target(vocab_size=16, num_hidden_layers=2)  # so few that random drafts are right now and then


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """A drafter with two adapters beside it, as published."""
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:  # transformers 5.24 needs peft 0.22, which no index has yet
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("published") / "draft"
    make_draft(target, num_hidden_layers=1, intermediate_size=512, seed=2).save_pretrained(folder)
    for seed, name in enumerate(("chat", "code")):
        torch.manual_seed(seed)
        draft = DFlashDraftModel.from_pretrained(folder)
        config = peft.LoraConfig(r=4, target_modules=TARGET_MODULES, init_lora_weights=False)
        draft.add_adapter(config, name)
        draft.save_pretrained(folder / "adapters" / name)
    return folder


def merged(folder, name):
    draft = DFlashDraftModel.from_pretrained(folder)
    if name is None:
        return draft
    return peft.PeftModel.from_pretrained(draft, folder / "adapters" / name).merge_and_unload()


def lengths(target, draft, block_size=4):
    draft.decoding_config.block_size = block_size
    output = target.generate(PROMPT, assistant_model=draft.eval(), **OPTIONS)
    assert torch.equal(output.sequences, target.generate(PROMPT, **OPTIONS).sequences)
    return output.acceptance_lengths


@pytest.fixture(scope="module")
def expected(target, folder):
    of_adapters = {name: lengths(target, merged(folder, name)) for name in ("chat", "code", None)}
    assert len(set(map(str, of_adapters.values()))) == 3  # else nothing is told apart
    return of_adapters


def test_adapter_folder_loads_its_drafter(target, folder, expected):
    """There is no config.json in it, and the error was about a missing `target_layer_ids`."""
    draft, info = DFlashDraftModel.from_pretrained(folder / "adapters" / "code", output_loading_info=True)
    assert draft.active_adapters() == ["default"] and not info["missing_keys"]
    assert lengths(target, draft) == expected["code"]


@pytest.mark.parametrize("packing", ["eager", "packed before", "packed after"])
def test_adapters_switch_between_calls(packing, target, folder, expected, packs_of_any_size):
    draft = DFlashDraftModel.from_pretrained(folder)
    packed = [packed_weights(draft)] if packing == "packed before" else []
    assert draft.layers[0].mlp.up_proj.__class__.__name__ == ("PackedLinear" if packed else "Linear")
    for name in ("chat", "code"):
        draft.load_adapter(folder / "adapters" / name, name)
    if packing == "packed after":
        packed.append(packed_weights(draft))
    for name in ("code", "chat", None, "chat", None, "code"):
        if name is None:
            draft.disable_adapters()
        else:
            draft.enable_adapters()
            draft.set_adapter(name)
        assert adapters_of(draft) == (() if name is None else (name,))
        assert lengths(target, draft) == expected[name], name
    draft.delete_adapter("code")
    draft.set_adapter("chat")
    assert lengths(target, draft) == expected["chat"]
    for weights in packed:
        weights.restore()


def test_each_adapter_has_its_own_statistics(target, folder):
    draft = DFlashDraftModel.from_pretrained(folder)
    for name in ("chat", "code"):
        draft.load_adapter(folder / "adapters" / name, name)
        draft.set_adapter(name)
        lengths(target, draft, block_size=None)
    draft.disable_adapters()
    lengths(target, draft, block_size=None)
    assert {key[-1] for key in _statistics[draft][target]} == {("chat",), ("code",), ()}


def test_adapter_of_a_peft_model_acts(target, folder, expected):
    """What PEFT's own class puts on a drafter acts where that drafter is used."""
    model = peft.PeftModel.from_pretrained(DFlashDraftModel.from_pretrained(folder), folder / "adapters/chat", "chat")
    model.load_adapter(folder / "adapters" / "code", "code")
    draft = model.get_base_model()
    for name in ("chat", "code"):
        model.set_adapter(name)
        assert adapters_of(draft) == (name,) and lengths(target, draft) == expected[name]
    with model.disable_adapter():
        assert adapters_of(draft) == () and lengths(target, draft) == expected[None]


def test_adapters_are_saved_and_published(folder, tmp_path, monkeypatch):
    saved = sorted(path.relative_to(folder).as_posix() for path in folder.glob("adapters/*/*"))
    files = [
        f"adapters/{name}/adapter_{file}" for name in ("chat", "code") for file in ("config.json", "model.safetensors")
    ]
    assert saved == files
    weights = (folder / "model.safetensors").stat().st_size
    assert all((folder / file).stat().st_size < weights / 4 for file in files)
    facts = CardFacts(base_model="someone/target")
    published = publish(folder, "someone/draft", dry_run=True, facts=facts)
    assert set(files) < set(published.files)
    for name, content in published.contents.items():
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    config = json.loads((tmp_path / "hub" / files[0]).read_text())
    assert config["base_model_name_or_path"] == "someone/draft"
    draft = DFlashDraftModel.from_pretrained(folder)
    again = DFlashDraftModel.from_pretrained(tmp_path / "hub")
    draft.load_adapter(folder / "adapters" / "code", "code")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with stand_in(monkeypatch) as hub:
        hub.files["someone/draft"] = {file: (tmp_path / "hub" / file).read_bytes() for file in published.files}
        where = {"subfolder": "adapters/code", "cache_dir": tmp_path / "cache"}
        again.load_adapter("someone/draft", "code", adapter_kwargs=where)
    tensors = draft.state_dict()
    published_tensors = again.state_dict()
    assert tensors.keys() == published_tensors.keys() and all(
        torch.equal(tensors[name], published_tensors[name]) for name in tensors
    )
    assert any("lora_" in name for name in tensors)
    copied = copy.deepcopy(draft)
    assert adapters_of(copied) == ("code",)
