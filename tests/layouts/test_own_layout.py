"""A layout that is added by one `SourceLayout` and one line, outside of the package."""

import re

import pytest
import torch
from support.layouts import SIZES, TRUTH, save, tensors_of
from transformers import AutoModel

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.hub.check import check
from dflash_hf.hub.findings import can_read_by_engine
from dflash_hf.layouts.all_layouts import SOURCE_LAYOUTS
from dflash_hf.layouts.source_layout import SourceLayout


# How this project spells a key, by the published spelling.
KEYS = {**{key: f"acme_{key}" for key in SIZES}, "block_size": "block_len", "mask_token_id": "mask_id"}
CONFIG = {KEYS[key]: TRUTH[key] for key in KEYS}
CONFIG |= {"architectures": ["AcmeBlockDrafter"], "model_type": "acme", "tap_layers": [1, 3, 4], "vocab_size": 96}


def read(config: dict) -> dict:
    result = {key: config[spelling] for key, spelling in KEYS.items()}
    result |= {"vocab_size": config["vocab_size"], "dflash_config": {}}
    result["target_layer_ids"] = [i - 1 for i in config["tap_layers"]]  # counted from 1
    return result


ACME = SourceLayout(
    "acme",
    architectures=("AcmeBlockDrafter",),
    read=read,
    tensor_names={r"^blocks\.(\d+)\.(.+)$": r"layers.\1.\2", r"^adapter\.": "fc.", r"^adapter_norm\.": "hidden_norm."},
    ignored_target_tensors=r"^embed_tokens\.",
)


def acme_name(name: str) -> str:
    name = re.sub(r"^layers\.(\d+)\.", r"blocks.\1.", name)
    return name.replace("hidden_norm.", "adapter_norm.").replace("fc.", "adapter.")


@pytest.fixture
def tensors(tmp_path) -> dict[str, torch.Tensor]:
    """The drafter's tensors by published names; its folder has a copy of the target's embedding, too."""
    tensors = tensors_of(TRUTH)
    stored = {acme_name(name): tensor for name, tensor in tensors.items()}
    save(tmp_path, CONFIG, {**stored, "embed_tokens.weight": torch.zeros(96, 32)})
    return tensors


@pytest.fixture
def registered():
    SOURCE_LAYOUTS.append(ACME)
    yield
    SOURCE_LAYOUTS.remove(ACME)


@pytest.mark.usefixtures("registered")
def test_registered_layout_loads(tmp_path, tensors):
    """It took four places: the recognised names, the accepted names, the keys, and a table of all tensor names."""
    for loader in (DFlashDraftModel, AutoModel):
        draft = loader.from_pretrained(tmp_path)
        assert type(draft) is DFlashDraftModel and draft.config.target_layer_ids == [0, 2, 3]
        state = draft.state_dict()
        assert state.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(state[name], tensor), name


@pytest.mark.usefixtures("registered")
def test_registered_layout_is_saved_as_published(tmp_path, tensors):
    DFlashDraftModel.from_pretrained(tmp_path).save_pretrained(tmp_path / "published")
    findings = check(tmp_path / "published")
    assert not findings and all(can_read_by_engine(findings, ["vllm", "sglang", "transformers"]).values())
    named = {finding.key: finding.message for finding in check(tmp_path)}
    assert "dflash convert" in named["architectures"]


@pytest.mark.usefixtures("registered")
def test_tensor_names_change_no_other_layout(tmp_path):
    """`adapter.` is a tensor of this layout alone."""
    published = {**tensors_of(TRUTH)}
    published["adapter.weight"] = published.pop("fc.weight")
    DFlashDraftConfig(**TRUTH).save_pretrained(tmp_path)
    config = DFlashDraftConfig(**TRUTH).to_dict()
    save(tmp_path, config, published)
    with pytest.raises(ValueError, match=r"missing keys: fc\.weight"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_unregistered_layout_is_named(tmp_path, tensors):
    """Servers were said to read it, and its head was said to be unknown."""
    with pytest.raises(ValueError, match="AcmeBlockDrafter"):
        DFlashDraftModel.from_pretrained(tmp_path)
    findings = check(tmp_path)
    assert can_read_by_engine(findings, ["vllm", "sglang", "transformers"]) == {
        "vllm": None,
        "sglang": None,
        "transformers": False,
    }
    assert [finding.severity for finding in findings] == ["error", "warning"]
    assert "AcmeBlockDrafter" in findings[0].message
