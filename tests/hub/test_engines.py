"""
What vLLM and SGLang make of a folder that we write, with `--trust-remote-code` and without: the same drafter.

People launch servers with that flag as a habit. With it `auto_map` makes `AutoConfig` build our class, without it
`model_type` makes it build `Qwen3Config`; the engines read both in the same way. `read_by_*` are stand-ins of theirs.
"""

import json

import pytest
import torch
from support.engine_variants import CONVOLUTION, SELECTOR, THETA, VARIANTS, YARN
from support.pairs import make_draft
from transformers import PreTrainedConfig, Qwen3Config

from dflash_hf import DFlashDraftConfig


def as_engines_load(folder, trust: bool):
    """`AutoConfig.from_pretrained(folder, trust_remote_code=trust)` in a process without this package."""
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["auto_map"]["AutoConfig"].endswith(".DFlashDraftConfig")
    return (DFlashDraftConfig if trust else Qwen3Config).from_pretrained(folder)


def read_by_sglang(config) -> dict:
    """SGLang 0.5.23, `srt/speculative/dflash_utils.py` and `srt/models/dflash.py`: attributes of the object."""
    nested = getattr(config, "dflash_config", None) or {}
    rope = config.rope_parameters  # get_rope_config
    values = {key: nested.get(key, getattr(config, key, None)) for key in ("block_size", "mask_token_id")}
    values |= {key: nested.get(key, getattr(config, key, None)) for key in ("target_layer_ids", "num_target_layers")}
    # Nested or not at all (parse_dflash_draft_config).
    values |= {key: nested.get(key, 0) for key in (*CONVOLUTION, *SELECTOR)}
    values["output_multiplier"] = float(nested.get("output_multiplier", 1.0))
    values["final_logit_softcapping"] = float(nested.get("final_logit_softcapping") or 0.0)
    values["attention_sink_bias"] = nested.get("attention_sink_bias", False)
    values["attention_value_scale"] = nested.get("attention_value_scale") or 1.0
    values["layers"] = []
    for kind in config.layer_types:  # _get_dflash_layer_attention_params
        slides = kind == "sliding_attention"
        causal = getattr(config, "is_causal", None)
        values["layers"].append((config.sliding_window if slides else None, slides if causal is None else causal))
    values["rope"] = (rope["rope_theta"], {key: value for key, value in rope.items() if key != "rope_theta"})
    values["bias"] = bool(getattr(config, "attention_bias", False))
    return values | sizes(config)


def read_by_vllm(config) -> dict:
    """
    vLLM 0.33.0: `transformers_utils/configs/eagle.py` sets the keys of `to_dict()` one after the other on a
    configuration of its own; `model_executor/models/qwen3_dflash.py` and `qwen3_dflash2.py` read that.
    """
    eagle = PreTrainedConfig(architectures=config.architectures)
    for key, value in config.to_dict().items():
        if key not in ("architectures", "model_type"):
            setattr(eagle, key, value)
    if getattr(eagle, "rope_parameters", None) is None:  # set_default_rope_theta
        eagle.rope_parameters = {"rope_type": "default"}
    eagle.rope_parameters.setdefault("rope_theta", 1_000_000)
    nested, rope = getattr(eagle, "dflash_config", None) or {}, eagle.rope_parameters
    values = {key: nested.get(key, getattr(eagle, key, None)) for key in ("mask_token_id", "target_layer_ids")}
    values |= {key: nested.get(key, 0) for key in (*CONVOLUTION, *SELECTOR)}
    values["output_multiplier"] = float(nested.get("output_multiplier", 1.0))
    values["final_logit_softcapping"] = float(nested.get("final_logit_softcapping") or 0.0)
    values["attention_sink_bias"] = nested.get("attention_sink_bias", False)
    values["attention_value_scale"] = nested.get("attention_value_scale") or 1.0
    override = getattr(eagle, "is_causal", None)
    override = nested.get("causal") if override is None else override
    slides = [kind == "sliding_attention" for kind in eagle.layer_types]
    window = nested.get("swa_window_size", getattr(eagle, "sliding_window", None))
    values["layers"] = [(window if s else None, s if override is None else override) for s in slides]
    values["rope"] = (rope["rope_theta"], {key: value for key, value in rope.items() if key != "rope_theta"})
    values["bias"] = getattr(eagle, "attention_bias", False)
    return values | sizes(eagle)


def sizes(config) -> dict:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys = (*keys, "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size", "hidden_act")
    return {key: getattr(config, key) for key in keys}


def trained(config) -> dict:
    """The same values as the drafter itself has them."""
    rope = config.rope_parameters
    values = {key: getattr(config, key) for key in ("block_size", "mask_token_id", "target_layer_ids")}
    values |= {key: getattr(config, key) or 0 for key in (*CONVOLUTION, *SELECTOR, "final_logit_softcapping")}
    keys = ("num_target_layers", "output_multiplier", "attention_sink_bias", "attention_value_scale")
    values |= {key: getattr(config, key) for key in keys}
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    values["layers"] = [
        (config.sliding_window if s else None, config.layer_is_causal(i)) for i, s in enumerate(slides)
    ]
    values["rope"] = (rope["rope_theta"], {key: value for key, value in rope.items() if key != "rope_theta"})
    values["bias"] = config.attention_bias
    return values | sizes(config)


@pytest.mark.parametrize("trust", [False, True], ids=["plain", "trust"])
@pytest.mark.parametrize("read", [read_by_sglang, read_by_vllm])
@pytest.mark.parametrize("variant", VARIANTS)
def test_engines_read_what_was_trained(variant, read, trust, target, tmp_path):
    """
    With trust, SGLang found an empty `dflash_config` (DFlash 2 raised, sinks were skipped), and vLLM lost the rotary
    theta, because `rope_scaling`, which comes later and is another name of `rope_parameters`, was null.
    """
    draft = make_draft(target, target_layer_ids=[0, 1, 2], **VARIANTS[variant])
    draft.save_pretrained(tmp_path)
    found, truth = read(as_engines_load(tmp_path, trust)), trained(draft.config)
    assert {key: truth[key] for key in found} == found


def test_nested_keys_and_fields_are_one(target):
    """Engines read `dflash_config`, we the fields; changing a field changes both, and keys of others stay."""
    config = make_draft(target, dflash_config={"num_anchors": 512}, **CONVOLUTION, **SELECTOR).config
    assert config.dflash_config["selector_rank"] == 6 and config.dflash_config["num_anchors"] == 512
    config.selector_rank = 7
    config.block_size = 8
    config.attention_sink_bias = True
    config.dflash_config["loss"] = "kl"  # kept, and a field's key is the field's
    config.dflash_config["block_size"] = 99
    expected = {"num_anchors": 512, "loss": "kl", "block_size": 8, "mask_token_id": 95, "attention_sink_bias": True}
    expected |= {"target_layer_ids": [0, 2, 3], **CONVOLUTION, "selector_rank": 7, "selector_top_k": 5}
    assert config.dflash_config == config.to_dict()["dflash_config"] == expected
    config.attention_sink_bias = False
    assert "attention_sink_bias" not in config.dflash_config
    written = config.to_dict()
    written["dflash_config"]["num_anchors"] = 1  # a copy
    assert config.dflash_config["num_anchors"] == 512
    config.dflash_config = None
    assert config.dflash_config["block_size"] == 8 and "loss" not in config.dflash_config


def test_the_keys_survive_one_assignment_each(target):
    """The keys of `to_dict()`, set in any order on another configuration, leave the rotary embedding as it was."""
    for rope in (THETA["rope_parameters"], YARN):
        config = make_draft(target, rope_parameters=rope).config
        for keys in (list(config.to_dict()), list(config.to_dict())[::-1]):
            other = PreTrainedConfig()
            for key in keys:
                setattr(other, key, config.to_dict()[key])
            assert other.rope_parameters == config.rope_parameters
    # Files keep the name that older readers know.
    assert json.loads(config.to_json_string())["rope_scaling"]["factor"] == 4.0


def test_the_mask_embedding_reaches_engines(target, tmp_path):
    """
    vLLM 0.33.0 (`DFlashQwen3ForCausalLM._read_mask_embedding`) and SGLang 0.5.23
    (`DFlashWorkerV2._maybe_merge_trained_mask_embedding`) read this file alone, and skip a tensor of that name.
    """
    draft = make_draft(target, own_mask_embedding=True)
    draft.save_pretrained(tmp_path)
    saved = torch.load(tmp_path / "mask_embedding.pt", weights_only=True)
    config = as_engines_load(tmp_path, trust=True)
    assert int(saved["mask_token_id"]) == config.dflash_config["mask_token_id"] and not saved.get("per_position")
    table = target.get_input_embeddings().weight.detach().clone()
    table[95].copy_(saved["embedding"])
    assert torch.equal(table[95], draft.mask_embedding)
