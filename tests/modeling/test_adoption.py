"""Assistants that are not ours: live objects of the published class are adopted, mistakes are explained."""

import gc
import subprocess
import sys

import pytest
import torch
from support.layouts import write
from support.pairs import make_draft, make_target
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel, Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

import dflash_hf.auto
from dflash_hf import DFlashDraftModel
from dflash_hf.modeling import adoption_dflash
from dflash_hf.modeling.hook_dflash import drafter_of


PROMPT = torch.tensor([[5, 9, 17, 33, 2]])


class RemoteAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        for name, heads in width.items():
            setattr(self, f"{name}_proj", nn.Linear(config.hidden_size, heads * config.head_dim, bias=False))
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = Qwen3RMSNorm(config.head_dim), Qwen3RMSNorm(config.head_dim)


class RemoteLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = RemoteAttention(config), Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size)


class RemoteDraftModel(PreTrainedModel):
    """The attributes and tensors of the published remote class; its own forward fails on current transformers."""

    config_class = Qwen3Config

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([RemoteLayer(config) for _ in range(config.num_hidden_layers)])
        self.target_layer_ids = config.dflash_config["target_layer_ids"]
        self.norm, self.hidden_norm = Qwen3RMSNorm(config.hidden_size), Qwen3RMSNorm(config.hidden_size)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.fc = nn.Linear(len(self.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.block_size = config.block_size
        self.post_init()

    def forward(self, *args, **kwargs):
        raise RuntimeError("crop with a positive length")


@pytest.fixture
def remote(tmp_path):
    write(tmp_path / "draft", "z-lab v1")
    return RemoteDraftModel.from_pretrained(tmp_path / "draft", config=Qwen3Config.from_pretrained(tmp_path / "draft"))


def test_a_live_object_is_adopted_without_a_copy(tmp_path, remote):
    target = make_target()
    ours = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    options["num_assistant_tokens"] = ours.config.block_size - 1  # for both the same, whole blocks
    expected = target.generate(PROMPT, assistant_model=ours, **options)
    actual = target.generate(PROMPT, assistant_model=remote, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    assert actual.acceptance_lengths == expected.acceptance_lengths
    adopted = adoption_dflash.adopted(remote)
    theirs = remote.state_dict()
    for name, tensor in adopted.state_dict().items():
        assert tensor.data_ptr() == theirs[name].data_ptr() and tensor.dtype == theirs[name].dtype, name
    assert all(parameter.requires_grad for parameter in remote.parameters())  # theirs are left as they were
    assert adoption_dflash.adopted(remote) is adopted  # once
    remote.to(torch.float64)
    assert adoption_dflash.adopted(remote).dtype == torch.float64
    del adopted, remote, theirs
    gc.collect()


def test_adoption_does_not_keep_an_object_alive(remote):
    adoption_dflash.adopted(remote)
    before = len(adoption_dflash._adopted)
    adoption_dflash._adopted.pop(remote)
    assert len(adoption_dflash._adopted) == before - 1


def test_what_the_object_says_beats_its_configuration(remote):
    remote.block_size, remote.target_layer_ids = 3, [0, 1, 2]
    adopted = adoption_dflash.adopt(remote)
    assert adopted.config.block_size == 3 and adopted.config.target_layer_ids == [0, 1, 2]


def test_tensors_that_do_not_fit_are_named(remote):
    remote.layers[1].self_attn.k_norm = nn.Identity()
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_norm\.weight"):
        make_target().generate(PROMPT, max_new_tokens=3, assistant_model=remote)


def test_rotary_pairs_side_by_side_are_refused(remote):
    """They were taken for halves, and few drafts were accepted: to reorder them would change the object's weights."""
    remote.config.rope_is_neox_style = False
    with pytest.raises(ValueError, match="rope_is_neox_style=False.*from_pretrained"):
        make_target().generate(PROMPT, max_new_tokens=3, assistant_model=remote)


def test_a_language_model_from_a_drafters_folder_is_refused(tmp_path):
    write(tmp_path / "draft", "z-lab v1")
    config = Qwen3Config.from_pretrained(tmp_path / "draft")
    wrong = Qwen3Model(config)
    with pytest.raises(ValueError, match=r"DFlashDraftModel\.from_pretrained") as error:
        make_target().generate(PROMPT, max_new_tokens=3, assistant_model=wrong)
    assert "Qwen3Model" in str(error.value)


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


def test_other_assistants_pass_through():
    target = make_target()
    expected = target.generate(PROMPT, max_new_tokens=10, do_sample=False)
    other = make_target(num_hidden_layers=2)
    assert torch.equal(target.generate(PROMPT, max_new_tokens=10, do_sample=False, assistant_model=other), expected)
    assert adoption_dflash.adopted(other) is None and adoption_dflash.adopted("name") is None


def test_a_target_is_still_a_target(tmp_path):
    make_target().save_pretrained(tmp_path / "target")
    assert type(AutoConfig.from_pretrained(tmp_path / "target")) is Qwen3Config
    assert type(AutoModel.from_pretrained(tmp_path / "target")) is Qwen3Model


def test_opting_out(tmp_path):
    write(tmp_path / "draft", "z-lab v1")
    dflash_hf.auto.unregister()
    try:
        assert type(AutoConfig.from_pretrained(tmp_path / "draft")) is Qwen3Config
        dflash_hf.auto.unregister()  # twice does no harm
    finally:
        dflash_hf.auto.register()
    assert type(AutoModel.from_pretrained(tmp_path / "draft")) is DFlashDraftModel
    # The variable is read when the package is imported: at first, and again in the same process.
    look = f"print(type(AutoConfig.from_pretrained({str(tmp_path / 'draft')!r})).__name__)"
    code = f"""
import os, sys
import dflash_hf
from transformers import AutoConfig
{look}
os.environ["DFLASH_HF_AUTO"] = "1"
for name in [name for name in sys.modules if name.partition(".")[0] == "dflash_hf"]:
    del sys.modules[name]
import dflash_hf
{look}
"""
    env = {"DFLASH_HF_AUTO": "0", "PYTHONPATH": ":".join(sys.path), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split()[-2:] == ["Qwen3Config", "DFlashDraftConfig"], done.stderr


def test_a_drafter_that_draws_its_drafts_is_adopted_too(remote):
    """Everything that lives on our class works on an adopted one."""
    target = make_target()
    adoption_dflash.adopted(remote).decoding_config.draft_temperature = 1.0
    output = target.generate(PROMPT, max_new_tokens=10, do_sample=True, assistant_model=remote)
    assert output.shape == (1, 15)
