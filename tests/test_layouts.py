"""
Every layout that is published loads and drafts what an element-wise reference drafts. The checkpoints are written here
from the documented keys and tensor names, never by the package's own writer.
"""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_target
from reference import draft_hidden_states, draft_tokens
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.modeling.generation_dflash import DFlashCandidateGenerator


PUBLISHED = Path(__file__).parent / "data" / "published"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
# What the tiny drafters mean, as the reference reads it.
TRUTH = {
    **SIZES,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "layer_types": ["full_attention"] * 3,
    "block_size": 5,
    "mask_token_id": 95,
    "target_layer_ids": [0, 2, 3],
}
# What a file says besides what makes its layout.
FILE = {
    **SIZES,
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "vocab_size": 96,
    "dtype": "float32",
}
NESTED = {"mask_token_id": 95, "target_layer_ids": [0, 2, 3]}
FULL, SLIDING = ["full_attention"] * 3, ["sliding_attention"] * 3
MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CONV2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}


def tensors_of(truth, bias=False):
    """Random tensors under their published names."""
    hidden, inner = truth["hidden_size"], truth["intermediate_size"]
    heads, kv_heads, dim = truth["num_attention_heads"], truth["num_key_value_heads"], truth["head_dim"]
    v_dim = truth.get("v_head_dim", dim)
    shapes = {"fc.weight": (hidden, 3 * 32), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(truth["num_hidden_layers"]):
        projections = {
            "q": (heads * dim, hidden),
            "k": (kv_heads * dim, hidden),
            "v": (kv_heads * v_dim, hidden),
            "o": (hidden, heads * v_dim),
        }
        for name, shape in projections.items():
            shapes[f"layers.{i}.self_attn.{name}_proj.weight"] = shape
            if bias:
                shapes[f"layers.{i}.self_attn.{name}_proj.bias"] = shape[:1]
        shapes |= {f"layers.{i}.self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        shapes |= {f"layers.{i}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"layers.{i}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"layers.{i}.mlp.down_proj.weight"] = (hidden, inner)
        if truth.get("attention_sink_bias"):
            shapes[f"layers.{i}.self_attn.attention_sink_bias"] = (heads,)
        if "conv_kernel_size" in truth:
            taps, groups = truth["conv_kernel_size"], hidden // truth["conv_group_size"]
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{name}.base_kernel"] = (2, taps, hidden)
                shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    if "selector_rank" in truth:
        shapes["candidate_selector.hidden_projection.weight"] = (truth["selector_rank"], hidden)
        for name in ("predecessor", "successor"):
            shapes[f"candidate_selector.{name}_codebook"] = (96, truth["selector_rank"])
    random = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=random) * (0.2 if len(shape) > 1 else 0.3)
        + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def renamed(tensors, names):
    """`names` maps the start of a published name to what the layout writes instead; `""` puts a prefix before all."""
    result = {}
    for name, tensor in tensors.items():
        start = next((start for start in names if start and name.startswith(start)), "")
        result[names.get(start, "") + name.removeprefix(start)] = tensor
    return result


def zlab(**changes):
    """A published config.json, by default of a plain v1 drafter."""
    nested = {**NESTED, **changes.pop("nested", {})}
    layout = {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    file = {**FILE, **layout, "layer_types": FULL, "num_target_layers": 4, "block_size": 5, "dflash_config": nested}
    return {key: value for key, value in {**file, **changes}.items() if value is not ...}


def speculators(kind="dflash", layers=None, **changes):
    """Only what differs from Qwen3's own defaults need stand in the nested configuration."""
    nested = {key: value for key, value in FILE.items() if key not in ("rms_norm_eps", "attention_bias", "dtype")}
    del nested["rope_theta"]  # Qwen3's default
    file = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "target"}},
        "transformer_layer_config": {**nested, "layer_types": FULL, **(layers or {})},
        "draft_vocab_size": 96,
        "block_size": 5,
        "aux_hidden_state_layer_ids": [1, 3, 4],
        "mask_token_id": 95,
        "sample_from_anchor": False,
        "dtype": "float32",
    }
    return {**file, **changes}


COPIES = {"embed_tokens.weight": torch.ones(96, 32), "verifier_norm.weight": torch.ones(32)}
FULL_COPIES = {**COPIES, "lm_head.weight": torch.ones(96, 32), "verifier_lm_head.weight": torch.ones(96, 32)}
D2T = torch.arange(0, 96, 4) - torch.arange(24)  # draft id i is the target's id 4 * i
OWN_HEAD = {"lm_head.weight": torch.randn(24, 32, generator=torch.Generator().manual_seed(5)), "d2t": D2T}
T2D = torch.zeros(96, dtype=torch.bool).index_fill_(0, torch.arange(0, 96, 4), True)
MUSE_NAMES = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
TORCHSPEC_NAMES = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
MUSE_FILE = {**{k: v for k, v in FILE.items() if k not in ("vocab_size", "rope_theta", "attention_bias")}, **NESTED}
MIMO = {
    "attention_sink_bias": True,
    "attention_value_scale": 0.6,
    "backbone_rotary_base": 640.0,
}
ROTARY = {"rotary_emb.inv_freq": torch.ones(4), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}

# name: (config.json, what it means beyond TRUTH, tensor names, further tensors in the file)
LAYOUTS = {
    "z-lab v1": (zlab(), {}, {}, {}),
    "z-lab v1, keys at the top": (zlab(dflash_config=..., **NESTED), {}, {}, {}),
    "z-lab v1, ids by the default rule": (
        zlab(dflash_config={"mask_token_id": 95}, num_target_layers=8, num_hidden_layers=3),
        {"target_layer_ids": [1, 3, 5]},
        {},
        {},
    ),
    "z-lab mixed layers": (
        zlab(layer_types=MIXED, sliding_window=4, use_sliding_window=True),
        {"layer_types": MIXED, "sliding_window": 4},
        {},
        {},
    ),
    "z-lab causal nested": (zlab(nested={"causal": True}), {"is_causal": True}, {}, {}),
    "z-lab DFlash 2": (
        zlab(
            architectures=["DFlash2DraftModel"],
            block_size=...,
            nested={"block_size": 5, **CONV2},
            is_causal=False,
            layer_types=SLIDING,
            sliding_window=4,
            use_sliding_window=True,
            rope_theta=...,
            rope_parameters={"rope_theta": 10000, "rope_type": "default"},
        ),
        {**CONV2, "is_causal": False, "layer_types": SLIDING, "sliding_window": 4},
        {},
        {},
    ),
    "Muse DFlash 2": (
        zlab(
            architectures=["DFlash2DraftModel"],
            nested={**CONV2, "output_multiplier": 0.25, "final_logit_softcapping": 2.0},
        ),
        {**CONV2, "output_multiplier": 0.25, "final_logit_softcapping": 2.0},
        {},
        {},
    ),
    "muse assistant": (
        {
            **MUSE_FILE,
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant",
            "block_size": 5,
            "layer_types": SLIDING,
            "sliding_window": 4,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        },
        {"is_causal": False, "layer_types": SLIDING, "sliding_window": 4, "rope_theta": 500.0},
        MUSE_NAMES,
        {},
    ),
    "SpecForge, early": (zlab(), {}, {"": "draft_model."}, {"draft_model.rotary_emb.inv_freq": torch.ones(4)}),
    "SpecForge, logit head": (zlab(), {}, {"": "logit_head.model."}, {}),
    "ModelOpt": (
        zlab(
            nested={"use_swa": True, "swa_window_size": 4, "causal": False, "attention_sink_bias": True},
            attention_sink_bias=True,
            sliding_window=4,
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            dtype=...,
            torch_dtype="float32",
        ),
        {
            "layer_types": SLIDING,
            "sliding_window": 4,
            "is_causal": False,
            "attention_sink_bias": True,
            "yarn": YARN,
        },
        {"": "dflash_module."},
        {},
    ),
    "TorchSpec": (
        {
            **{key: value for key, value in FILE.items() if key not in ("head_dim", "hidden_act")},
            **NESTED,
            "architectures": ["DFlashDraftModel"],
            "model_type": "dflash",
            "num_target_layers": 3,
            "target_hidden_size": 32,
            "target_num_hidden_layers": 4,
            "markov_rank": 0,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "block_size": 5,
        },
        {},
        TORCHSPEC_NAMES,
        {"embed_tokens.weight": torch.ones(96, 32)},
    ),
    "TorchSpec, depth unsaid": (
        {**FILE, **NESTED, "model_type": "dflash", "architectures": ["DFlashDraftModel"], "num_target_layers": 3}
        | {"block_size": 5},
        {},
        TORCHSPEC_NAMES,
        {"embed_tokens.weight": torch.ones(96, 32)},
    ),
    "speculators": (speculators(), {}, {}, FULL_COPIES),
    "speculators, reduced vocabulary": (speculators(draft_vocab_size=24), {}, {}, {**COPIES, **OWN_HEAD, "t2d": T2D}),
    "speculators, sliding": (
        speculators(layers={"layer_types": MIXED, "sliding_window": 4, "use_sliding_window": True}),
        {"layer_types": MIXED, "sliding_window": 4},
        {},
        {},
    ),
    "speculators, DFlash 2": (
        speculators(
            "dflash2",
            {"layer_types": SLIDING, "sliding_window": 4, "use_sliding_window": True},
            architectures=["DFlash2DraftModel"],
            **CONV2,
        ),
        {**CONV2, "layer_types": SLIDING, "sliding_window": 4, "is_causal": False},
        {},
        {},
    ),
    "verl": (
        zlab(architectures=["DFlashForCausalLM"], model_type="dflash", block_size=5, loss_decay_gamma=7.0),
        {},
        {},
        {},
    ),
    "Automodel": (
        zlab(
            architectures=["Qwen3DFlashDraftModel"],
            rope_theta=...,
            rope_scaling=...,
            rope_parameters={**YARN, "rope_theta": 10000.0},
        ),
        {"yarn": YARN},
        {"": "model."},
        {},
    ),
    "Llama-3.1": (zlab(model_type="llama", rope_theta=500000.0), {"rope_theta": 500000.0}, {}, {}),
    "gpt-oss": (
        zlab(model_type="gpt_oss", attention_bias=True, rope_scaling={**YARN, "beta_fast": 32.0, "beta_slow": 1.0}),
        {"yarn": YARN, "bias": True},
        {},
        {},
    ),
    "Gemma-4": (
        zlab(
            layer_types=MIXED,
            sliding_window=4,
            use_sliding_window=True,
            input_embedding_scale=5.5,
            final_logit_softcapping=3.0,
        ),
        {"layer_types": MIXED, "sliding_window": 4, "input_embedding_scale": 5.5, "final_logit_softcapping": 3.0},
        {},
        {},
    ),
    "MiMo": (
        zlab(
            layer_types=...,
            nested={**MIMO, "use_swa": True, "swa_window_size": 4},
            partial_rotary_factor=0.5,
            v_head_dim=6,
        ),
        {**MIMO, "partial_rotary_factor": 0.5, "v_head_dim": 6, "layer_types": SLIDING, "sliding_window": 4}
        | {"is_causal": False},
        {},
        {},
    ),
    "target of another depth, ids + 1": (
        zlab(dflash_config={"mask_token_id": 95}, eagle_aux_hidden_state_layer_ids=[1, 3, 4]),
        {},
        {},
        ROTARY,
    ),
}


def write(folder, name, shards=1):
    """Write one layout; returns what the reference needs."""
    file, meaning, names, further = LAYOUTS[name]
    truth = {**TRUTH, **meaning}
    tensors = tensors_of(truth, bias=truth.get("bias", False))
    stored = {**renamed(tensors, names), **further}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(file))
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for i in range(shards):
            part = dict(sorted(stored.items())[i::shards])
            shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            save_file(part, folder / shard, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, shard)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return truth, {**tensors, **{key: further[key] for key in OWN_HEAD if truth_has_head(file) and key in further}}


def truth_has_head(file):
    return file.get("draft_vocab_size", 96) != 96


def drafted(draft, target, features, anchor):
    """A block of a drafter by the way that `generate` takes."""
    generator = DFlashCandidateGenerator(draft, target)
    generator.open([0], 0, 64, torch.zeros(1, 1, dtype=torch.long))
    generator.absorb(features[None])
    generator.write_context()
    past = len(features)
    return generator.draft(torch.tensor([anchor]), torch.tensor([past]), used=past + draft.config.block_size)[0]


@pytest.fixture(scope="module")
def big_target():
    return make_target(num_hidden_layers=8)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_layout_drafts_as_the_reference(tmp_path, layout, big_target):
    truth, tensors = write(tmp_path / "draft", layout, shards=1 + len(layout) % 2)
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    config = draft.config
    assert config.target_layer_ids == truth["target_layer_ids"]
    assert (config.block_size, config.mask_token_id) == (5, 95)
    assert {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    random = torch.Generator().manual_seed(1)
    features, anchor = torch.randn(9, 96, generator=random), 17
    noise = big_target.get_input_embeddings().weight[torch.tensor([anchor, 95, 95, 95, 95])]
    expected = draft_hidden_states(tensors, truth, features, noise)
    for attn in ("sdpa", "eager"):
        draft.set_attn_implementation(attn)
        actual = draft(noise_embeds=noise[None], context_hidden_states=features[None]).last_hidden_state[0]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    block = drafted(draft, big_target, features, anchor)
    assert block.tolist() == [anchor, *draft_tokens(tensors, truth, expected, big_target.lm_head.weight, anchor)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_survives_saving(tmp_path, layout):
    """What is written is the published layout, and it is read back as the same model."""
    write(tmp_path / "draft", layout)
    first = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    first.save_pretrained(tmp_path / "again")
    again, info = DFlashDraftModel.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    configs = [{**draft.config.to_dict(), "_name_or_path": None} for draft in (first, again)]
    assert configs[0] == configs[1]
    for (name, ours), (_, theirs) in zip(first.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    dflash2 = "conv_kernel_size" in str(LAYOUTS[layout][0])
    assert written["architectures"] == ["DFlash2DraftModel" if dflash2 else "DFlashDraftModel"]
    assert written["model_type"] == "qwen3" and "source_layout" not in written


@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_classes_return_our_model(tmp_path, layout):
    write(tmp_path / "draft", layout)
    # Code that must not run: it would end the test.
    (tmp_path / "draft" / "dflash.py").write_text("raise SystemExit('remote code was run')")
    for trust in (None, True, False):
        config = AutoConfig.from_pretrained(tmp_path / "draft", trust_remote_code=trust)
        assert type(config) is DFlashDraftConfig
        draft = AutoModel.from_pretrained(tmp_path / "draft", trust_remote_code=trust, dtype=torch.bfloat16)
        assert type(draft) is DFlashDraftModel and draft.dtype == torch.bfloat16


def test_subfolder_and_device_map(tmp_path):
    truth, tensors = write(tmp_path / "target" / "dflash", "MiMo", shards=3)
    draft = DFlashDraftModel.from_pretrained(tmp_path / "target", subfolder="dflash", device_map="cpu")
    assert torch.equal(draft.fc.weight, tensors["fc.weight"])
    draft = AutoModel.from_pretrained(tmp_path / "target", subfolder="dflash", dtype=torch.float64, block_size=4)
    assert type(draft) is DFlashDraftModel and draft.dtype == torch.float64 and draft.config.block_size == 4


def test_names_of_ones_own(tmp_path):
    _, tensors = write(tmp_path / "draft", "z-lab v1")
    save_file(
        renamed(tensors, {"": "draft_net."}), tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"}
    )
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft", key_mapping={r"^draft_net\.": ""})
    assert torch.equal(draft.fc.weight, tensors["fc.weight"])


@pytest.mark.parametrize("shards", [1, 2])
def test_variant(tmp_path, shards):
    draft = DFlashDraftModel(DFlashDraftConfig.from_dict(zlab()))
    draft.save_pretrained(tmp_path, variant="fp16", max_shard_size="5GB" if shards == 1 else "40KB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards > 1)
    again = DFlashDraftModel.from_pretrained(tmp_path, variant="fp16")
    assert torch.equal(again.fc.weight, draft.fc.weight)
    with pytest.raises(OSError, match="Only safetensors"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("file", "count"), [("qwen3.8-27b-dflash2", 81), ("muse", 58), ("qwen3", 58), ("qwen3.6", 58)]
)
def test_published_configurations(file, count):
    for path in PUBLISHED.glob(f"{file}*.json"):
        raw = json.loads(path.read_text())
        config = DFlashDraftConfig.from_pretrained(path)
        with torch.device("meta"):
            draft = DFlashDraftModel(config)
        shapes = {name: tuple(parameter.shape) for name, parameter in draft.state_dict().items()}
        nested = {**raw, **raw.get("dflash_config", {})}
        hidden, inner, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
        heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
        expected = {"fc.weight": (hidden, 5 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
        for i in range(5):
            layer = {
                "input_layernorm.weight": (hidden,),
                "post_attention_layernorm.weight": (hidden,),
                "self_attn.q_proj.weight": (heads * dim, hidden),
                "self_attn.k_proj.weight": (kv_heads * dim, hidden),
                "self_attn.v_proj.weight": (kv_heads * dim, hidden),
                "self_attn.o_proj.weight": (hidden, heads * dim),
                "self_attn.q_norm.weight": (dim,),
                "self_attn.k_norm.weight": (dim,),
                "mlp.gate_proj.weight": (inner, hidden),
                "mlp.up_proj.weight": (inner, hidden),
                "mlp.down_proj.weight": (hidden, inner),
            }
            if "conv_kernel_size" in nested:
                for name in ("attention_conv", "mlp_conv"):
                    layer[f"{name}.base_kernel"] = (2, 2, hidden)
                    layer[f"{name}.kernel_projection.weight"] = (2 * 2 * hidden // 16, hidden)
            expected |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        if "selector_rank" in nested:
            expected["candidate_selector.hidden_projection.weight"] = (256, hidden)
            for name in ("predecessor", "successor"):
                expected[f"candidate_selector.{name}_codebook"] = (raw["vocab_size"], 256)
        assert shapes == expected and len(shapes) == (81 if "selector_rank" in nested else 58)
        assert config.target_layer_ids == nested["target_layer_ids"]
        assert config.block_size == nested["block_size"] and config.mask_token_id == nested["mask_token_id"]
        theta = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": theta}
        assert config.layer_types == raw["layer_types"]
        bidirectional = "dflash2" in path.name or "muse" in path.name
        for i, kind in enumerate(config.layer_types):
            assert config.layer_is_causal(i) == (kind == "sliding_attention" and not bidirectional)


@torch.no_grad()
def test_a_mask_embedding_beside_the_weights(tmp_path, big_target):
    """MiMo ships one; left out, every block would start from another embedding."""
    truth, tensors = write(tmp_path / "draft", "MiMo")
    mask = torch.randn(32, generator=torch.Generator().manual_seed(2))
    side = tmp_path / "draft" / "mask_embedding.pt"
    torch.save({"embedding": mask, "mask_token_id": 95}, side)
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    random = torch.Generator().manual_seed(1)
    features, anchor = torch.randn(9, 96, generator=random), 17
    noise = torch.stack([big_target.get_input_embeddings().weight[anchor], mask, mask, mask, mask])
    expected = draft_hidden_states(tensors, truth, features, noise)
    tokens = [anchor, *draft_tokens(tensors, truth, expected, big_target.lm_head.weight, anchor)]
    draft.save_pretrained(tmp_path / "again")  # there it is one of the safetensors too
    for model in (draft, DFlashDraftModel.from_pretrained(tmp_path / "again")):
        assert torch.equal(model.mask_embedding, mask)
        torch.testing.assert_close(model(noise[None] * 0 + noise[:1], features[None]).last_hidden_state[0], expected)
        assert drafted(model, big_target, features, anchor).tolist() == tokens
    for wrong in ({"embedding": mask[:5], "mask_token_id": 95}, {"embedding": mask, "mask_token_id": 3}, [mask]):
        torch.save(wrong, side)
        with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
            DFlashDraftModel.from_pretrained(tmp_path / "draft")
    side.write_bytes(b"not a file of torch")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
        DFlashDraftModel.from_pretrained(tmp_path / "draft")


@torch.no_grad()
def test_a_mask_embedding_is_written_as_engines_read_it(tmp_path):
    """
    It was saved as a tensor, which vLLM and SGLang skip in silence: every slot but the anchor started from the
    target's embedding of the mask token.
    """
    config = DFlashDraftConfig.from_dict(zlab(nested={"own_mask_embedding": True}))
    draft = DFlashDraftModel(config).to(torch.bfloat16)
    draft.save_pretrained(tmp_path)
    side = tmp_path / "mask_embedding.pt"
    stored = torch.load(side, weights_only=True)
    assert set(stored) == {"embedding", "mask_token_id"} and stored["mask_token_id"] == 95
    assert torch.equal(stored["embedding"], draft.mask_embedding) and not stored["embedding"].requires_grad
    assert torch.equal(DFlashDraftModel.from_pretrained(tmp_path).mask_embedding, stored["embedding"])
    # The weights of a sharded training are given apart; only one process writes.
    state = {**draft.state_dict(), "mask_embedding": torch.full((32,), 3.0, dtype=torch.bfloat16)}
    draft.save_pretrained(tmp_path, is_main_process=False, state_dict=dict(state))
    assert torch.equal(torch.load(side, weights_only=True)["embedding"], stored["embedding"])
    draft.save_pretrained(tmp_path, state_dict=dict(state))
    assert torch.equal(torch.load(side, weights_only=True)["embedding"], state["mask_embedding"])
    # The file decides here too, or engines would draft otherwise than we do; without it there is the tensor.
    torch.save({"embedding": torch.ones(32), "mask_token_id": 95}, side)
    assert torch.equal(DFlashDraftModel.from_pretrained(tmp_path).mask_embedding, torch.ones(32, dtype=torch.bfloat16))
    side.unlink()
    assert torch.equal(DFlashDraftModel.from_pretrained(tmp_path).mask_embedding, state["mask_embedding"])
    # A drafter without one leaves none behind for engines to find.
    draft.save_pretrained(tmp_path)
    DFlashDraftModel(DFlashDraftConfig.from_dict(zlab())).save_pretrained(tmp_path)
    assert not side.exists()


def test_muse_assistant_equals_the_native_model(tmp_path):
    """Upstream's own class on its own checkpoint. Its window counts distances up to and including the window."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.cache_utils import DFlashCache

    file = {**MUSE_FILE, "layer_types": MIXED, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    for key in ("model_type", "dtype"):
        del file[key]
    torch.manual_seed(0)
    native = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**file, block_size=5, sliding_window=4)).eval()
    native.save_pretrained(tmp_path / "muse")
    draft = AutoModel.from_pretrained(tmp_path / "muse")
    assert type(draft) is DFlashDraftModel and draft.config.sliding_window == 4
    wider = DFlashDraftModel.from_pretrained(tmp_path / "muse", sliding_window=5)
    inputs = {"noise_embeds": torch.randn(2, 5, 32), "context_hidden_states": torch.randn(2, 9, 96)}
    cache = DFlashCache(config=native.config)  # the native mask needs it to know the context's length
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(9)
    with torch.no_grad():
        expected = native(**inputs, past_key_values=cache, position_ids=torch.arange(14)[None]).last_hidden_state
        torch.testing.assert_close(wider(**inputs).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


REFUSED = {
    "DominoDraftModel": (zlab(architectures=["DominoDraftModel"]), "Domino"),
    "projector": (zlab(nested={"projector_type": "domino"}), "Domino"),
    "DSpark": (zlab(architectures=["Qwen3DSparkModel"]), "Markov head.*anchor-first"),
    "DSpark, DeepSpec's plain drafter": (
        zlab(architectures=["Qwen3DSparkModel"], markov_rank=0),
        "Qwen3DSparkModel with markov_rank=0 is a plain drafter in DSpark's layout: its blocks are anchor-first",
    ),
    "DSpark, nested": (
        zlab(nested={"projector_type": "dspark"}),
        "dspark is a DSpark drafter.*Markov head.*anchor-first",
    ),
    "LiLiCorr": (zlab(nested={"projector_type": "lilicorr"}), "lilicorr is a LiLiCorr drafter.*lattice"),
    "LiLiCorrDraftModel": (zlab(architectures=["LiLiCorrDraftModel"]), "is a LiLiCorr drafter"),
    "shifted labels": (zlab(nested={"shift_label": True}), "shift_label=True: its blocks are anchor-first"),
    "causality that contradicts itself": (zlab(nested={"causal_head": True}, is_causal=False), "causal_head=True"),
    "causality that is no flag": (zlab(nested={"causal_head": "all"}), "is_causal='all'"),
    "anchor first": (zlab(nested={"sample_from_anchor": True}), "sample_from_anchor"),
    "speculators, anchor first": (speculators(sample_from_anchor=True), "sample_from_anchor"),
    "speculators, DSpark": (speculators("dspark"), "dspark is a DSpark drafter.*Markov head"),
    "speculators, DSpark with anchor": (speculators("dspark", sample_from_anchor=True), "Markov head.*anchor-first"),
    "Markov head": (zlab(markov_rank=256), "markov_rank"),
    "Laguna": (zlab(architectures=["DFlashLagunaForCausalLM"]), "Laguna"),
    "interleaved rotary": (zlab(is_neox_style=False), "is_neox_style"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_heads_are_refused_with_the_reason(tmp_path, name):
    file, reason = REFUSED[name]
    write(tmp_path / "draft", "z-lab v1")
    (tmp_path / "draft" / "config.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=reason) as error:
        DFlashDraftModel.from_pretrained(tmp_path / "draft")
    assert str(tmp_path / "draft") in str(error.value)
    # A reason that is another head's helps nobody.
    assert "Markov" not in str(error.value) or "Markov" in reason or "markov" in reason
    assert "anchor-first" not in str(error.value) or "anchor" in reason


@pytest.mark.parametrize(
    "name",
    [
        "prefix_gru.weight_ih_l0",
        "markov_head.markov_w1.weight",
        "confidence_head.proj.bias",
        "lilicorr.slot_embedding",
    ],
)
def test_tensors_of_other_heads_are_refused_with_the_reason(tmp_path, name):
    _, tensors = write(tmp_path / "draft", "z-lab v1")
    save_file({**tensors, name: torch.zeros(3)}, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="which is refused") as error:
        DFlashDraftModel.from_pretrained(tmp_path / "draft")
    assert name in str(error.value) and "model.safetensors" in str(error.value)


def test_copies_are_dropped_only_where_they_are_copies(tmp_path):
    """An embedding in a published checkpoint would be trained: leaving it out would be another model."""
    _, tensors = write(tmp_path / "draft", "z-lab v1")
    own = {**tensors, "embed_tokens.weight": torch.ones(96, 32)}
    save_file(own, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected keys: embed_tokens\.weight"):
        DFlashDraftModel.from_pretrained(tmp_path / "draft")


def test_damage_is_named(tmp_path):
    folder = tmp_path / "draft"
    _, tensors = write(folder, "speculators, reduced vocabulary")
    with pytest.raises(ValueError, match="d2t maps draft tokens"):
        broken = {**tensors, "d2t": tensors["d2t"] + 90}
        save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
        DFlashDraftModel.from_pretrained(folder)
    twice = {**tensors, "model.norm.weight": torch.ones(32)}
    save_file(twice, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"both norm\.weight"):
        DFlashDraftModel.from_pretrained(folder)
    save_file({**tensors, "norm.weight": torch.ones(32, dtype=torch.int32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight has dtype I32"):
        DFlashDraftModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="Only safetensors are read"):
        DFlashDraftModel.from_pretrained(folder)


def test_causality_at_the_top_wins():
    """SGLang reads nothing else, vLLM reads it first."""
    config = DFlashDraftConfig.from_dict(zlab(nested={"causal": True}, is_causal=False))
    assert not config.layer_is_causal(0)
    assert json.loads(config.to_json_string())["is_causal"] is False
    assert "causal" not in config.to_dict()["dflash_config"]


@pytest.mark.parametrize("layer_types", [FULL, MIXED, SLIDING])
def test_jetspec_is_causal_on_every_layer(layer_types):
    """`dflash_config.causal_head` was not read: such drafters were bidirectional, at a low acceptance length."""
    file = zlab(nested={"causal_head": True}, layer_types=layer_types, sliding_window=4, use_sliding_window=True)
    config = DFlashDraftConfig.from_dict(file)
    assert all(config.layer_is_causal(i) for i in range(3))
    written = json.loads(config.to_json_string())
    # Engines read the top level, JetSpec its own key.
    assert written["is_causal"] is True and written["dflash_config"]["causal_head"] is True
    assert DFlashDraftConfig.from_dict(written).to_dict() == config.to_dict()
    config.is_causal = False
    assert config.dflash_config["causal_head"] is False
    plain = DFlashDraftConfig.from_dict(zlab(nested={"causal_head": False}))
    assert plain.is_causal is None and not plain.layer_is_causal(0)


def test_a_forced_window_makes_every_layer_slide():
    """Also layers that are listed as full, as vLLM reads it; they stay bidirectional in the block."""
    config = DFlashDraftConfig.from_dict(zlab(nested={"use_swa": True, "swa_window_size": 7}, sliding_window=9))
    assert config.layer_types == SLIDING and config.sliding_window == 7 and not config.layer_is_causal(0)
    mixed = DFlashDraftConfig.from_dict(zlab(nested={"use_swa": True, "swa_window_size": 7}, layer_types=MIXED))
    assert mixed.layer_types == MIXED and mixed.layer_is_causal(0) and not mixed.layer_is_causal(2)


def test_training_keys_survive():
    config = DFlashDraftConfig.from_dict(
        zlab(nested={"enable_thinking": False}, loss_decay_gamma=7.0, num_anchors=512)
    )
    written = json.loads(config.to_json_string())
    assert written["loss_decay_gamma"] == 7.0 and written["num_anchors"] == 512
    assert written["dflash_config"]["enable_thinking"] is False


def test_rotary_frequencies_of_many_channels_stay_in_fp32():
    """The context's table too, and through a change of dtype."""
    config = DFlashDraftConfig.from_dict(LAYOUTS["MiMo"][0])
    draft = DFlashDraftModel(config)
    for table, theta in ((draft.rotary_emb, 10000.0), (draft.context_rotary_emb, 640.0)):
        expected = torch.tensor([theta ** (-2.0 * i / 4) for i in range(2)])
        draft.to(torch.bfloat16)
        assert table.inv_freq.dtype == torch.float32
        torch.testing.assert_close(table.inv_freq, expected)
