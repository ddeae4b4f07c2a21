"""
The models of mlx-vlm, optimum-intel and z-lab over what we save, against ours, and against what `check` says of
them.

Needs `pip install --no-deps mlx mlx-cpu mlx-vlm==0.7.10`, `pip install --no-deps optimum optimum-intel openvino`, or
`pip install --no-deps --target FOLDER dflash==0.1.0` with that folder on the path: its command has our command's name.
"""

import json

import numpy as np
import pytest
import torch
from support.pairs import make_draft, make_target
from transformers import Qwen3Config

from dflash_hf.hub.check import check


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DRAFTERS = {
    "v1": {},
    "biases": {"attention_bias": True},
    "yarn": {"rope_parameters": {"rope_type": "yarn", **ROPE}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}},
    "sliding, causal": SLIDING,
    "sliding, bidirectional": {**SLIDING, "is_causal": False},
    "causal": {"is_causal": True},
    "sinks": {"attention_sink_bias": True},
    "scaled values": {"attention_value_scale": 0.5},
    "scaled embedding": {"input_embedding_scale": 2.0},
    "own mask": {"own_mask_embedding": True},
    "half rotated": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "narrow values": {"v_head_dim": 6},
    "selector": {"selector_rank": 6, "selector_top_k": 5},
    "convolution": {"conv_kernel_size": 2, "conv_group_size": 4},
    "DFlash 2": {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 4},
    "own embedding": {"has_embed_tokens": True},
    "reduced vocabulary": {"draft_vocab_size": 9},
    "DSpark": {"markov_rank": 4, "sample_from_anchor": True},
    "gated DSpark": {"markov_rank": 4, "markov_head_type": "gated", "sample_from_anchor": True},
}
REFUSED = {
    "mlx": {"biases", "sliding, causal", "sliding, bidirectional", *list(DRAFTERS)[8:]}
    - {"DFlash 2", "own embedding", "DSpark"},
    "openvino": {"sliding, causal", "causal", *list(DRAFTERS)[7:]},
    "z-lab": set(list(DRAFTERS)[7:]) - {"scaled embedding", "DFlash 2"},
}


def of_mlx(folder, features, block):
    mlx = pytest.importorskip("mlx.core")
    model = pytest.importorskip("mlx_vlm.utils").load_model(folder)
    model.embed_tokens = lambda ids: mlx.array(block.numpy())
    ids = mlx.zeros(block.shape[:2], dtype=mlx.int32)
    states = model._hidden(ids, mlx.array(features.numpy()), model.make_cache())
    return torch.tensor(np.array(states))


def of_openvino(folder, features, block):
    patcher = pytest.importorskip("optimum.exporters.openvino.model_patcher")
    known = pytest.importorskip("optimum.exporters.openvino.__main__")._CUSTOM_DRAFT_MODEL_MAP
    config = Qwen3Config.from_pretrained(folder)
    if config.architectures[0] not in known:
        raise ValueError(f"{config.architectures} is no drafter there")
    model, info = patcher.Qwen3DFlashForCausalLM.from_pretrained(folder, config=config, output_loading_info=True)
    if any(info[problem] for problem in ("missing_keys", "unexpected_keys")):
        raise ValueError("it drops tensors in silence")
    positions = torch.arange(features.shape[1] + block.shape[1])[None]
    options = {"position_ids": positions, "use_cache": False, "logits_to_keep": block.shape[1]}
    return model.eval()(inputs_embeds=block, hidden_states=features, **options).last_hidden_state


def of_zlab(folder, features, block):
    """As its own program picks the class; the scale is applied before it."""
    theirs = pytest.importorskip("dflash.model")
    config = Qwen3Config.from_pretrained(folder)
    try:
        drafts = getattr(theirs, config.architectures[0])
        model, info = drafts.from_pretrained(folder, config=config, output_loading_info=True)
    except (AttributeError, TypeError) as error:  # of a class or a key that is not there
        raise ValueError(str(error)) from error
    if any(info[problem] for problem in ("missing_keys", "unexpected_keys")):
        raise ValueError("it drops tensors in silence")
    block = block * theirs._draft_value(config, "input_embedding_scale", 1.0)
    positions = torch.arange(features.shape[1] + block.shape[1])[None]
    return model.eval()(position_ids=positions, noise_embedding=block, target_hidden=features)


@pytest.mark.parametrize("engine, read", [("mlx", of_mlx), ("openvino", of_openvino), ("z-lab", of_zlab)])
@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_what_is_read_as_it_is_meant(name, engine, read, tmp_path):
    draft = make_draft(make_target(vocab_size=16), target_layer_ids=[0, 1, 2], **DRAFTERS[name])
    for key, parameter in draft.named_parameters():
        if parameter.dim() == 1 and "norm" not in key:
            parameter.uniform_(-1, 1)
    draft.save_pretrained(tmp_path)
    found = check(tmp_path, [engine])
    assert bool(found) == (name in REFUSED[engine])
    features, block = torch.randn(1, 9, 96), torch.randn(1, 4, 32)
    ours = draft(noise_embeds=block, context_hidden_states=features).last_hidden_state
    try:
        theirs = read(tmp_path, features, block)
    except (ValueError, RuntimeError):
        assert found
        return
    assert torch.allclose(ours, theirs, atol=1e-5) != bool(found)


@pytest.mark.parametrize(
    "changes, target, key",
    [
        ({}, None, None),
        ({}, "qwen3_5_text", None),
        ({}, "llama", "model_type"),  # its layers' outputs are not exposed
        ({"model_type": "gpt_oss"}, None, "model_type"),
        ({"dflash_config": None}, None, "dflash_config"),
        ({"target_layer_ids": [2, 0, 1]}, None, "target_layer_ids"),
        ({"target_layer_ids": [-1, 0, 1]}, None, "target_layer_ids"),
    ],
)
def test_mlx_names_what_it_cannot_recognise(changes, target, key, tmp_path):
    """A target's folder, to mlx-vlm; or features in another order, which it does not report."""
    make_draft(make_target(vocab_size=16), target_layer_ids=[0, 1, 2]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if "target_layer_ids" in changes:
        config["dflash_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    found = check(tmp_path, ["mlx"], None if target is None else {"model_type": target})
    assert [finding.key for finding in found] == ([] if key is None else [key])
