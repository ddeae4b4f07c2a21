"""
What vLLM and SGLang make of a folder that we write, with `--trust-remote-code` and without: the same drafter.

People launch servers with that flag as a habit. With it `auto_map` makes `AutoConfig` build our class, without it
`model_type` makes it build `Qwen3Config`; the engines read both in the same way.
"""

import json

import pytest
from support.engine_variants import CONVOLUTION, SELECTOR, VARIANTS
from support.pairs import make_draft
from transformers import PreTrainedConfig, Qwen3Config

from dflash_hf import DFlashDraftConfig
from dflash_hf.hub.drafter_folder import DrafterFolder


def as_engines_load(folder, trust: bool):
    """`AutoConfig.from_pretrained(folder, trust_remote_code=trust)` in a process without this package."""
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["auto_map"]["AutoConfig"].endswith(".DFlashDraftConfig")
    return (DFlashDraftConfig if trust else Qwen3Config).from_pretrained(folder)


@pytest.mark.parametrize("trust", [False, True], ids=["plain", "trust"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_engines_read_trained_settings(variant, trust, target, tmp_path):
    """
    SGLang reads attributes of the configuration, nested ones first; vLLM sets the keys of its `to_dict()` one after
    the other on another configuration. With trust, SGLang found an empty `dflash_config`, and vLLM lost the theta.
    `test_engine_code` runs their own code.
    """
    draft = make_draft(target, target_layer_ids=[0, 1, 2], **VARIANTS[variant])
    config = draft.config
    draft.save_pretrained(tmp_path)
    read = as_engines_load(tmp_path, trust)
    copied = PreTrainedConfig()
    for key, value in read.to_dict().items():
        if key not in ("architectures", "model_type"):
            setattr(copied, key, value)
    assert json.loads(config.to_json_string()).get("rope_scaling", {}).get("factor") == config.rope_parameters.get(
        "factor"
    )
    for loaded in (read, copied):
        assert loaded.rope_parameters == config.rope_parameters
        for key in ("block_size", "mask_token_id", "target_layer_ids"):
            assert loaded.dflash_config[key] == getattr(config, key)
        for key in (*CONVOLUTION, *SELECTOR, "final_logit_softcapping"):
            assert loaded.dflash_config.get(key) == getattr(config, key)
        for key, default in (("output_multiplier", 1.0), ("attention_sink_bias", False)):
            assert loaded.dflash_config.get(key, default) == getattr(config, key)
        for key in ("layer_types", "sliding_window", "head_dim", "num_key_value_heads", "vocab_size", "hidden_act"):
            assert getattr(loaded, key) == getattr(config, key)
        drafter = DrafterFolder(json.loads((tmp_path / "config.json").read_text()))
        windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
        layers_as_trained = [(window, config.layer_is_causal(i)) for i, window in enumerate(windows)]
        assert drafter.layers_in_vllm() == layers_as_trained
        assert drafter.layers_in_sglang() == layers_as_trained


def test_nested_keys_set_fields(target):
    """Engines read `dflash_config`, we the fields; changing a field changes both, and keys of others stay."""
    config = make_draft(target, dflash_config={"num_anchors": 512}, **CONVOLUTION, **SELECTOR).config
    assert config.dflash_config["selector_rank"] == 6 and config.dflash_config["num_anchors"] == 512
    config.selector_rank = 7
    config.block_size = 8
    config.attention_sink_bias = True
    config.dflash_config = {**config.dflash_config, "loss": "kl", "block_size": 9}  # a key of a field sets it
    expected = {"num_anchors": 512, "loss": "kl", "block_size": 9, "mask_token_id": 95, "attention_sink_bias": True}
    expected |= {"target_layer_ids": [0, 2, 3], **CONVOLUTION, "selector_rank": 7, "selector_top_k": 5}
    assert config.dflash_config == config.to_dict()["dflash_config"] == expected
    config.attention_sink_bias = False
    assert "attention_sink_bias" not in config.dflash_config
    written = config.to_dict()
    written["dflash_config"]["num_anchors"] = 1  # a copy
    assert config.dflash_config["num_anchors"] == 512
    config.dflash_config = None
    assert config.dflash_config["block_size"] == config.block_size == 9 and "loss" not in config.dflash_config
