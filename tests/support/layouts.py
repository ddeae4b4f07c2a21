"""Tiny drafters in every published layout: `fixtures/layouts` has the documented keys and tensor names of each."""

import copy
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file


FIXTURES = Path(__file__).parents[1] / "fixtures"
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
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "layer_types": ["full_attention"] * 3,
    "block_size": 5,
    "mask_token_id": 95,
    "target_layer_ids": [0, 2, 3],
}
FULL = ["full_attention"] * 3
SLIDING = ["sliding_attention"] * 3
MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
# Of a drafter over every fourth token: draft id i is the target's id 4 * i.
OWN_HEAD = {
    "lm_head.weight": torch.randn(24, 32, generator=torch.Generator().manual_seed(5)),
    "d2t": torch.arange(0, 96, 4) - torch.arange(24),
    "t2d": torch.arange(96) % 4 == 0,
}


class Layout(NamedTuple):
    """One published layout."""

    config: dict  # the config.json
    meaning: dict  # what it says beyond `TRUTH`
    names: dict[str, str] = {}  # what tensor names begin with here, by the published ones; "" stands before all
    further: dict[str, list[int]] = {}  # shapes of other tensors in the file, which are not the drafter's


def _read(path: Path) -> tuple[str, Layout]:
    fields = json.loads(path.read_text(encoding="utf-8"))
    return fields.pop("name"), Layout(**fields)


LAYOUTS: dict[str, Layout] = dict(map(_read, sorted((FIXTURES / "layouts").glob("*.json"))))


def config_of(layout: str = "z-lab v1", nested: dict | None = None, **changes) -> dict:
    """The config.json of a layout with changes; `...` takes a key out. `nested` are those of its `dflash_config`."""
    config = {**copy.deepcopy(LAYOUTS[layout].config), **changes}
    if nested is not None:
        config["dflash_config"] = {**config["dflash_config"], **nested}
    return {key: value for key, value in config.items() if value is not ...}


def shapes_of(truth: dict) -> dict[str, tuple[int, ...]]:
    """The shapes of a drafter's tensors, by their published names."""
    hidden = truth["hidden_size"]
    inner = truth["intermediate_size"]
    vocab = truth["vocab_size"]
    heads = truth["num_attention_heads"]
    kv_heads = truth["num_key_value_heads"]
    dim = truth["head_dim"]
    v_dim = truth.get("v_head_dim", dim)
    shapes = {"fc.weight": (hidden, len(truth["target_layer_ids"]) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(truth["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj.weight": (heads * dim, hidden),
            "self_attn.k_proj.weight": (kv_heads * dim, hidden),
            "self_attn.v_proj.weight": (kv_heads * v_dim, hidden),
            "self_attn.o_proj.weight": (hidden, heads * v_dim),
        }
        if truth.get("bias"):
            layer |= {name.replace("weight", "bias"): shape[:1] for name, shape in layer.items()}
        layer |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        layer |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        layer |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        layer["mlp.down_proj.weight"] = (hidden, inner)
        if truth.get("attention_sink_bias"):
            layer["self_attn.attention_sink_bias"] = (heads,)
        if "conv_kernel_size" in truth:
            taps = truth["conv_kernel_size"]
            groups = hidden // truth["conv_group_size"]
            for name in ("attention_conv", "mlp_conv"):
                layer[f"{name}.base_kernel"] = (2, taps, hidden)
                layer[f"{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if "selector_rank" in truth:
        shapes["candidate_selector.hidden_projection.weight"] = (truth["selector_rank"], hidden)
        for name in ("predecessor", "successor"):
            shapes[f"candidate_selector.{name}_codebook"] = (vocab, truth["selector_rank"])
    if "markov_rank" in truth:
        rank = truth["markov_rank"]
        rows = truth.get("draft_vocab_size", vocab)
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (rows, rank)}
        mixing = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
        if truth["markov_head_type"] in mixing:
            name, *shape = mixing[truth["markov_head_type"]]
            shapes |= {f"markov_head.{name}.weight": tuple(shape), f"markov_head.{name}.bias": tuple(shape[:1])}
    if "confidence" in truth:
        shapes |= {"confidence_head.proj.weight": (1, truth["confidence"]), "confidence_head.proj.bias": (1,)}
    if "gru_hidden_dim" in truth:
        width = truth["gru_hidden_dim"]
        inner = truth["emb_dim"]
        shapes |= {"prefix_gru.weight_ih_l0": (3 * width, hidden), "prefix_gru.weight_hh_l0": (3 * width, width)}
        shapes |= {"embed_proj.0.weight": (inner, hidden + width), "embed_proj.2.weight": (vocab, inner)}
    return shapes


def tensors_of(truth: dict) -> dict[str, torch.Tensor]:
    """Random tensors under their published names."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes_of(truth).items():
        # Those of heads are loud, so that what is drafted depends on them.
        scale = 1.5 if name.startswith(("markov_", "prefix_gru", "embed_proj")) else 0.2
        noise = torch.randn(shape, generator=random) * (scale if len(shape) > 1 else 0.3)
        tensors[name] = noise + ("norm" in name)
    return tensors


def renamed(tensors: dict, names: dict[str, str]) -> dict:
    """The tensors under the names of a layout."""
    result = {}
    for name, tensor in tensors.items():
        start = next((start for start in names if start and name.startswith(start)), "")
        result[names.get(start, "") + name.removeprefix(start)] = tensor
    return result


def save(folder: Path, config: dict, tensors: dict, shards: int = 1) -> None:
    """A folder as published: a config.json and safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(shards):
        part = dict(sorted(tensors.items())[i::shards])
        shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write(folder: Path, name: str, shards: int = 1) -> tuple[dict, dict]:
    """Write one layout; returns what it means, and the drafter's tensors by their published names."""
    config, meaning, names, further = LAYOUTS[name]
    truth = {**TRUTH, **meaning}
    tensors = tensors_of(truth)
    more = {key: torch.ones(shape) for key, shape in further.items()}
    own = OWN_HEAD if "draft_vocab_size" in truth else {}
    save(folder, config, {**renamed(tensors, names), **more, **own}, shards)
    return truth, {**tensors, **{key: tensor for key, tensor in own.items() if key != "t2d"}}
