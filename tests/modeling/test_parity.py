"""Our drafter and our loop against independent restatements."""

import json

import pytest
import torch
from safetensors.torch import save_file
from support.pairs import make_target
from support.reference import draft_hidden_states, published_loop
from transformers import AutoConfig, AutoModel

from dflash_hf import DFlashDraftModel


def publish(folder, hidden=32, heads=4, kv_heads=2, dim=8, layers=3, bias=False, nested=True, **changes):
    """A checkpoint in the published layout, not written by our own writer."""
    torch.manual_seed(0)
    features = [0, 2, 3]
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": bias,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dtype": "float32",
        "head_dim": dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 256,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 96,
    }
    special = {"mask_token_id": 95, "target_layer_ids": features}
    config |= {"block_size": 5, "dflash_config": special} if nested else {"block_size": 5, **special}
    config |= changes
    shapes = {
        "fc.weight": (hidden, len(features) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(layers):
        p = f"layers.{i}."
        for name, out, width in (
            ("q", heads * dim, hidden),
            ("k", kv_heads * dim, hidden),
            ("v", kv_heads * dim, hidden),
            ("o", hidden, heads * dim),
        ):
            shapes[f"{p}self_attn.{name}_proj.weight"] = (out, width)
            if bias:
                shapes[f"{p}self_attn.{name}_proj.bias"] = (out,)
        shapes |= {f"{p}self_attn.{n}_norm.weight": (dim,) for n in "qk"}
        shapes |= {f"{p}{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{p}mlp.{n}_proj.weight": (48, hidden) for n in ("gate", "up")}
        shapes[f"{p}mlp.down_proj.weight"] = (hidden, 48)
    tensors = {
        name: torch.randn(shape) * (0.2 if len(shape) > 1 else 0.1) + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return config, tensors


VARIANTS = {
    "full": {},
    "top_level_keys": {"nested": False},
    "bias": {"bias": True},
    "sliding_causal": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 4,
        "use_sliding_window": True,
    },
    "sliding_bidirectional": {
        "layer_types": ["sliding_attention"] * 3,
        "sliding_window": 6,
        "use_sliding_window": True,
        "is_causal": False,
    },
    "causal_everywhere": {"is_causal": True},
    "window_without_its_flag": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_hidden_states_equal_the_reference(tmp_path, variant, attn):
    config, tensors = publish(tmp_path / "draft", **VARIANTS[variant])
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft", attn_implementation=attn).eval()
    assert {name for name, _ in draft.named_parameters()} == set(tensors)
    features, block = torch.randn(9, 96), torch.randn(5, 32)
    expected = draft_hidden_states(tensors, config, features, block)
    with torch.no_grad():
        actual = draft(noise_embeds=block[None], context_hidden_states=features[None]).last_hidden_state[0]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["full", "sliding_causal", "bias"])
def test_loop_equals_the_published_one(tmp_path, variant):
    config, tensors = publish(tmp_path / "draft", **VARIANTS[variant])
    flat = {**config, **config.get("dflash_config", {})}
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    draft.decoding_config.block_size = draft.config.block_size  # whole blocks, as in the published loop
    target = make_target()
    prompts = torch.randint(2, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    for prompt, stop in zip(prompts, ([], [3, 8, 20, 14]), strict=True):
        text, trace = published_loop(
            lambda features, block: draft_hidden_states(tensors, config, features, block),
            target,
            flat,
            prompt[None],
            8,
            stop,
        )
        output = target.generate(
            prompt[None],
            max_new_tokens=8,
            do_sample=False,
            assistant_model=draft,
            eos_token_id=stop or None,
            return_dict_in_generate=True,
        )
        assert output.sequences[0].tolist() == text
        committed = output.acceptance_lengths[0]
        # The published trace is not cut where the text ends, and may run once more at the length limit.
        assert committed[:-1] == trace[: len(committed) - 1]
        assert committed[-1] <= trace[len(committed) - 1]
        assert sum(committed) == len(text) - 7 - 1


def test_auto_classes_return_our_model(tmp_path):
    """`model_type: qwen3` alone would give a Qwen3 model with random embeddings."""
    publish(tmp_path / "draft")
    for trust in (None, False, True):
        assert (
            type(AutoConfig.from_pretrained(tmp_path / "draft", trust_remote_code=trust)).__name__
            == "DFlashDraftConfig"
        )
        assert type(AutoModel.from_pretrained(tmp_path / "draft", trust_remote_code=trust)) is DFlashDraftModel


def test_wrong_tensors_are_named(tmp_path):
    for change, name in (("drop", "layers.1.mlp.up_proj.weight"), ("add", "layers.9.extra"), ("shape", "fc.weight")):
        _, tensors = publish(tmp_path / change)
        if change == "drop":
            del tensors[name]
        elif change == "add":
            tensors[name] = torch.zeros(3)
        else:
            tensors[name] = torch.zeros(32, 5)
        save_file(tensors, tmp_path / change / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            DFlashDraftModel.from_pretrained(tmp_path / change)


def test_rope_survives_a_round_trip(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    publish(tmp_path / "draft", rope_scaling=yarn, rope_theta=50000)
    first = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    first.save_pretrained(tmp_path / "again")
    again = DFlashDraftModel.from_pretrained(tmp_path / "again")
    assert again.config.rope_parameters == first.config.rope_parameters
    assert again.config.rope_parameters["rope_theta"] == 50000 and again.config.rope_parameters["factor"] == 4.0
    torch.testing.assert_close(again.rotary_emb.inv_freq, first.rotary_emb.inv_freq)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["rope_theta"] == 50000 and written["rope_scaling"]["factor"] == 4.0
    assert written["model_type"] == "qwen3" and written["use_sliding_window"] is False
    assert written["dflash_config"]["target_layer_ids"] == written["target_layer_ids"] == [0, 2, 3]
    for (name, a), (_, b) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
