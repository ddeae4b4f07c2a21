"""What is known of a target before it is loaded."""

import json
import logging
import os
import platform
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pairs import VOCAB, make_draft, make_target
from support.tiny_models import tiny_model
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM

from dflash_hf import DFlashDraftConfig
from dflash_hf.cli import main
from dflash_hf.decoding import cpu_dtypes
from dflash_hf.modeling.target_dflash import check_pair
from dflash_hf.pairs import devices
from dflash_hf.pairs.configs import incompatibilities, resized_vocabulary
from dflash_hf.pairs.devices import available_device, dtype_to_load
from dflash_hf.pairs.loading import Loading, load_for_training, load_target
from dflash_hf.pairs.tokenizers import load_tokenizer
from dflash_hf.targets.config_fields import stated_context_length
from dflash_hf.targets.generation import max_answer_tokens
from dflash_hf.training.presets import device_type


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 40960, "rope_parameters": YARN}, 131072),  # Qwen3, as its card stretches it
        ({"max_position_embeddings": 131072, "rope_parameters": LLAMA3}, 131072),  # Llama 3.1: stretched already
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"vision_config": {}, "text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": -1}, None),
        ({}, None),
    ],
)
def test_context_length_is_read_from_a_config(config, positions):
    assert stated_context_length(config) == positions


def test_stretched_rope_extends_the_context_length():
    target = make_target(max_position_embeddings=64)
    assert max_answer_tokens(target, 60, 100) == 4 and max_answer_tokens(target, 60, None) == 4
    with pytest.raises(ValueError, match="The prompt has 64 tokens; prompt and answer together may have at most 64"):
        max_answer_tokens(target, 64, 1)
    stretched = {**YARN, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    target = make_target(max_position_embeddings=64, rope_parameters=stretched)
    assert max_answer_tokens(target, 64, 100) == 100 and max_answer_tokens(target, 250, 100) == 6


@pytest.mark.parametrize("rows", [VOCAB + 8, VOCAB - 8, VOCAB + 16, VOCAB - 16])
def test_check_accepts_what_decodes(rows):
    """A drafter of a target with a few more tokens was said to belong to another target, and decoded with it."""
    target = make_target()
    config = make_draft(target).config
    config.mask_token_id = 3
    target.resize_token_embeddings(rows, mean_resizing=False)
    mismatches = dict(incompatibilities(config, target.config.to_dict()))
    resized = resized_vocabulary(config, target.config.to_dict())
    if abs(rows - VOCAB) <= 0.1 * VOCAB:
        check_pair(target, config)
        assert mismatches == {}
        assert resized == f"{VOCAB}, not {rows} in the target, whose embedding was resized"
    else:
        with pytest.raises(ValueError, match=f"vocab_size={VOCAB}, not {rows}. Load"):
            check_pair(target, config)
        expected = f"{VOCAB}, not {rows} in the target: the drafter belongs to another target."
        assert mismatches == {"vocab_size": expected}
        assert resized is None


def test_check_counts_layers_as_decoding_does():
    """LongCat's configuration counts each layer twice."""
    target = tiny_model("longcat_flash")
    config = DFlashDraftConfig.for_target(target.config, 5, num_hidden_layers=2, target_layer_ids=[0, 3])
    check_pair(target, config)
    assert not list(incompatibilities(config, target.config.to_dict()))
    config.target_layer_ids = [0, 4]  # there are four
    with pytest.raises(ValueError, match=r"target_layer_ids=\[0, 4\] of 4 layers"):
        check_pair(target, config)
    assert dict(incompatibilities(config, target.config.to_dict())).keys() == {"target_layer_ids"}


def test_audio_target_is_loaded_whole(tmp_path):
    """Only the server loaded it."""
    text = {"model_type": "qwen2", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    audio |= {"num_mel_bins": 8, "max_source_positions": 8}
    config = CONFIG_MAPPING["qwen2_audio"](audio_config=audio, text_config=text, audio_token_index=7)
    AutoModelForMultimodalLM.from_config(config).save_pretrained(tmp_path)
    target = load_target(str(tmp_path), Loading())
    assert type(target).__name__ == "Qwen2AudioForConditionalGeneration"
    options = {"max_new_tokens": 8, "do_sample": False}
    ids = torch.tensor([[5, 9, 11]], device=target.device)
    drafted = target.generate(ids, **options, assistant_model=make_draft(target).to(target.device))
    assert drafted.tolist() == target.generate(ids, **options).tolist()


@pytest.mark.parametrize(
    ("keys", "left_out", "message"),
    [
        ({"vocab_size": 48}, (), r"model.embed_tokens.weight has shape \[\d+, 32\] instead of \[48, 32\]"),
        ({"hidden_size": "32"}, (), "its config.json is damaged .*'hidden_size' expected int, got str"),
        ({}, ("lm_head.weight", "model.norm.weight"), "lm_head.weight is missing, model.norm.weight is missing; down"),
        (
            {"num_hidden_layers": 9, "layer_types": ["full_attention"] * 9},
            (),
            r"config.json: model.layers.\S+ is missing, .* and \d+ more; download",
        ),
    ],
    ids=["shapes", "types", "missing", "layers"],
)
def test_a_damaged_target_is_named(keys, left_out, message, tmp_path):
    """Without a part of its weights it decoded with random ones; other damage was an error of somebody else."""
    make_target(tie_word_embeddings=False).save_pretrained(tmp_path)
    load_target(str(tmp_path), Loading())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if name not in left_out}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"^target={tmp_path}: .*{message}"):
        load_target(str(tmp_path), Loading())
    with pytest.raises(ValueError, match=message):
        load_for_training(None, tmp_path)
    if "hidden_size" in keys:
        with pytest.raises(ValueError, match=f"^{tmp_path}: {message}"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("asked", "device", "units", "dtype"),
    [
        ("auto", "cpu", False, "float32"),
        ("auto", "cpu:0", False, "float32"),
        ("auto", "auto", False, "float32"),
        ("auto", "cpu", True, "auto"),
        ("auto", "cuda:0", False, "auto"),
        ("auto", "mps", False, "auto"),
        ("bfloat16", "cpu", False, "bfloat16"),
    ],
)
def test_a_processor_without_bf16_takes_fp32(asked, device, units, dtype, monkeypatch, caplog):
    monkeypatch.setattr(devices, "is_emulated", lambda dtype: not units)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING, "dflash_hf"):
        assert [dtype_to_load(asked, device) for _ in range(2)] == [dtype, dtype]
    assert caplog.text.count("this processor has no hardware support for bf16 (dtype bfloat16") == (dtype != asked)


@pytest.mark.parametrize("accelerator", [None, "cuda", "mps", "xpu"])
def test_default_device_is_that_of_training(accelerator, monkeypatch):
    """On Metal and Intel GPUs a drafter was trained on the GPU, and measured on the CPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(accelerator))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert available_device() == device_type({}) == (accelerator or "cpu")
    for present in ("cpu", "auto", *(() if accelerator is None else (accelerator, f"{accelerator}:1"))):
        assert available_device(present) == present


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("cuda", 0, "device=cuda: this machine has no cuda device; use `cpu`, or leave it out."),
        ("cuda:1", 1, "device=cuda:1: this machine has only cuda:0; use `cpu`, or leave it out."),
        ("cuda:2", 2, "device=cuda:2: this machine has cuda:0 to cuda:1; use `cpu`, or leave it out."),
        ("mps", 2, "device=mps: this machine has no mps device; use `cpu`, or leave it out."),
        ("cuda:x", 2, "device='cuda:x' is not a device of this torch; use `cpu`, or leave it out."),
        ("gpu", 0, "device='gpu' is not a device of this torch; use `cpu`, or leave it out."),
    ],
)
def test_missing_device_is_an_error(name, number, message, monkeypatch):
    """From Python, `cuda:x` was an error of `int`."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
    with pytest.raises(ValueError) as error:
        available_device(name)
    assert str(error.value) == message


def test_emulated_dtype_of_a_drafter_is_told(monkeypatch, caplog):
    """A drafter in float16 took as long as 47 rounds without drafts, and no warning explained it."""
    monkeypatch.setattr(cpu_dtypes, "is_emulated", lambda dtype: dtype == torch.float16)
    target = make_target()
    draft = make_draft(target).half()
    target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, assistant_model=draft)
    assert "no hardware support for float16" in caplog.text


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="oneDNN's variable is for x86")
def test_avx2_has_no_units_for_bf16():
    code = "import torch; from dflash_hf.decoding.cpu_dtypes import is_emulated; "
    code += "print([is_emulated(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)])"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, True, True]"


def test_meta_device_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--target", "target", "--prompt", "hi", "--device", "meta"])
    assert "'meta' is not a device; use cpu" in capsys.readouterr().err
