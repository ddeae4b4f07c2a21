"""Tiny drafters in every published layout, written from the documented keys and tensor names."""

import json

import torch
from safetensors.torch import save_file


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
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
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
    rows = truth.get("draft_vocab_size", 96)
    if "markov_rank" in truth:
        rank = truth["markov_rank"]
        shapes |= {"markov_head.markov_w1.weight": (96, rank), "markov_head.markov_w2.weight": (rows, rank)}
        mixing = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
        if truth["markov_head_type"] in mixing:
            name, *shape = mixing[truth["markov_head_type"]]
            shapes |= {f"markov_head.{name}.weight": tuple(shape), f"markov_head.{name}.bias": tuple(shape[:1])}
    if "confidence" in truth:
        shapes |= {"confidence_head.proj.weight": (1, truth["confidence"]), "confidence_head.proj.bias": (1,)}
    if "gru_hidden_dim" in truth:
        width, inner = truth["gru_hidden_dim"], truth["emb_dim"]
        shapes |= {"prefix_gru.weight_ih_l0": (3 * width, hidden), "prefix_gru.weight_hh_l0": (3 * width, width)}
        shapes |= {"embed_proj.0.weight": (inner, hidden + width), "embed_proj.2.weight": (96, inner)}
    random = torch.Generator().manual_seed(0)
    loud = ("markov_", "prefix_gru", "embed_proj")  # so that what is drafted depends on them
    return {
        name: torch.randn(shape, generator=random)
        * ((1.5 if name.startswith(loud) else 0.2) if len(shape) > 1 else 0.3)
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
    "z-lab mixed layers, without the flag that Qwen3 asks for": (
        zlab(layer_types=MIXED, sliding_window=4),
        {"layer_types": MIXED, "sliding_window": 4},
        {},
        {},
    ),
    "what is nested beats the top": (
        zlab(
            nested={"input_embedding_scale": 5.5, "final_logit_softcapping": 3.0, "block_size": 5},
            input_embedding_scale=2.0,
            final_logit_softcapping=0.0,
            block_size=7,
        ),
        {"input_embedding_scale": 5.5, "final_logit_softcapping": 3.0},
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
    "z-lab DFlash 2, never loaded": (
        zlab(architectures=["DFlash2DraftModel"], nested=CONV2),
        CONV2,
        {
            f"candidate_selector.{n}_codebook": f"candidate_selector.{n}_codebook.weight"
            for n in ("predecessor", "successor")
        },
        {},
    ),
    "a softcap of 0": (zlab(final_logit_softcapping=0, nested={"final_logit_softcapping": 0}), {}, {}, {}),
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
    "speculators, a factor of the target's": (
        speculators(
            layers={"partial_rotary_factor": 0.25, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}
        ),
        {},
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
    "Automodel, DFlash 2 with a factor of the target's": (
        zlab(
            architectures=["Qwen3DFlash2DraftModel"],
            nested=CONV2,
            partial_rotary_factor=0.25,
            rope_parameters={**ROPE, "partial_rotary_factor": 0.25},
        ),
        CONV2,
        {"": "model."},
        {},
    ),
    "JetSpec of Automodel": (zlab(nested={"causal": True}, is_causal=...), {"is_causal": True}, {}, {}),
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


# DSpark: anchor-first blocks unless a file says otherwise.
VANILLA = {"markov_rank": 6, "markov_head_type": "vanilla"}
GATED, RNN = {**VANILLA, "markov_head_type": "gated"}, {**VANILLA, "markov_head_type": "rnn"}
FIRST, WIDE, NARROW = {"anchor_first": True}, {"confidence": 38}, {"confidence": 32}
SURE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
OWN_COPIES = {"embed_tokens.weight": torch.ones(96, 32), "lm_head.weight": torch.ones(96, 32)}


def automodel_dspark(**changes):
    """Flat, with copies of the target's embedding and head in the file."""
    file = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "enable_confidence_head": False}
    return zlab(dflash_config=..., **NESTED, **{**file, **VANILLA, **changes})


def specforge_dspark(**nested):
    nested = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 0.0, **nested}
    return zlab(architectures=["DSparkDraftModel"], nested=nested)


def modelopt(**nested):
    """`architectures` names a plain drafter."""
    return zlab(nested={"shift_label": True, "causal": False, **nested})


UNPREFIXED = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}
DOMINO = {"emb_dim": 7, "gru_hidden_dim": 9, "pure_draft_prefix_len": 1}
# DOMINO's first slot has draft logits alone; its last one is trained, but not used, where labels are shifted.
LAYOUTS |= {
    "DSpark, Automodel": (automodel_dspark(**SURE), {**VANILLA, **FIRST, **WIDE}, {}, OWN_COPIES),
    "DSpark, Automodel, gated": (
        automodel_dspark(**GATED, enable_confidence_head=True, confidence_head_with_markov=False),
        {**GATED, **FIRST, **NARROW},
        {"": "model."},
        OWN_COPIES,
    ),
    "DSpark, Automodel, rnn": (automodel_dspark(**RNN), {**RNN, **FIRST}, {}, OWN_COPIES),
    "DSpark, DeepSpec's plain drafter": (automodel_dspark(markov_rank=0), FIRST, {}, OWN_COPIES),
    "DSpark, a confidence head alone": (
        automodel_dspark(markov_rank=0, enable_confidence_head=True, confidence_head_with_markov=False),
        {**FIRST, **NARROW},
        {},
        OWN_COPIES,
    ),
    "DSpark, flat 1+N": (automodel_dspark(**RNN, sample_from_anchor=False), RNN, {}, {}),
    "DSpark, SpecForge": (specforge_dspark(**VANILLA), {**VANILLA, **FIRST}, {}, {}),
    "DSpark, SpecForge, rnn": (
        specforge_dspark(**RNN, confidence_head_alpha=1.0, confidence_head_with_markov=True),
        {**RNN, **FIRST, **WIDE},
        {"": "draft_model."},
        {},
    ),
    "DSpark, SpecForge, no Markov head": (specforge_dspark(markov_rank=0), FIRST, {}, {}),
    "DSpark, speculators": (
        speculators("dspark", **VANILLA, **SURE, sample_from_anchor=True),
        {**VANILLA, **FIRST, **WIDE},
        {},
        FULL_COPIES,
    ),
    "DSpark, speculators 1+N, reduced vocabulary": (
        speculators("dspark", **GATED, **SURE, draft_vocab_size=24),
        {**GATED, **WIDE, "draft_vocab_size": 24},
        {},
        {**COPIES, **OWN_HEAD, "t2d": T2D},
    ),
    "DSpark, speculators, which is said nowhere": (
        {k: v for k, v in speculators("dspark", **VANILLA, **SURE).items() if k != "sample_from_anchor"},
        {**VANILLA, **WIDE},
        {},
        FULL_COPIES,
    ),
    "DSpark, speculators, a plain drafter": (
        speculators("dspark", markov_rank=0, enable_confidence_head=False),
        {},
        {},
        FULL_COPIES,
    ),
    "speculators, anchor first": (speculators(sample_from_anchor=True), FIRST, {}, FULL_COPIES),
    "DSpark, ModelOpt": (
        modelopt(projector_type="dspark", **VANILLA, use_confidence_head=True),
        {**VANILLA, **FIRST, **WIDE, "is_causal": False},
        UNPREFIXED,
        {},
    ),
    "DSpark, ModelOpt, gated": (
        modelopt(projector_type="dspark", **GATED, use_confidence_head=False),
        {**GATED, **FIRST, "is_causal": False},
        UNPREFIXED,
        {},
    ),
    "DSpark, ModelOpt, rnn": (
        modelopt(projector_type="dspark", **RNN, use_confidence_head=True),
        {**RNN, **FIRST, **WIDE, "is_causal": False},
        {**UNPREFIXED, "": "dflash_module."},
        {},
    ),
    **{
        f"DSpark, {name}": (automodel_dspark(architectures=[name]), {**VANILLA, **FIRST}, {}, {})
        for name in ("Lfm2DSparkDraftModel", "LingDSparkModel", "K3DSparkModel", "MuseSparkDSparkModel")
    },
    "DSpark, DSparkSpeculator": (
        speculators("dspark", **VANILLA, enable_confidence_head=False, architectures=["DSparkSpeculator"]),
        VANILLA,
        {},
        FULL_COPIES,
    ),
    "Domino, SpecForge": (
        zlab(
            architectures=["DominoDraftModel"],
            emb_dim=7,
            nested={"projector_type": "domino", "shift_label": True} | DOMINO,
        ),
        {**DOMINO, **FIRST},
        {},
        {},
    ),
    "Domino, SpecForge, labels not shifted": (
        zlab(architectures=["DominoDraftModel"], nested={"projector_type": "domino", "shift_label": False} | DOMINO),
        DOMINO,
        {"": "draft_model."},
        {},
    ),
    "Domino, Automodel": (
        zlab(
            architectures=["Qwen3DFlashDraftModel"],
            nested={"projector_type": "domino", "shift_label": False, **DOMINO, "pure_draft_prefix_len": 0},
        ),
        {**DOMINO, "pure_draft_prefix_len": 0},
        {"": "model."},
        {},
    ),
    "Domino, ModelOpt": (
        modelopt(projector_type="domino", **DOMINO),
        {**DOMINO, **FIRST, "is_causal": False},
        {"": "dflash_module."},
        {},
    ),
    "Domino, causal_v5": (
        zlab(nested={"projector_type": "causal_v5", "shift_label": False} | DOMINO),
        DOMINO,
        {},
        {},
    ),
    "JetSpec": (zlab(nested={"causal_head": True}), {"is_causal": True}, {}, {}),
    "JetSpec, Automodel": (
        zlab(architectures=["Qwen3DFlashDraftModel"], nested={"causal": True}),
        {"is_causal": True},
        {"": "model."},
        {},
    ),
    "JetSpec, ModelOpt": (zlab(nested={"causal": True}), {"is_causal": True}, {"": "dflash_module."}, {}),
}


def truth_has_head(file):
    return file.get("draft_vocab_size", 96) != 96


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
