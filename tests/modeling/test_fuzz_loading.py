"""
Damaged and hostile checkpoints: an error that names the file, or a model that is what the file describes. Never a
hang, a crash, an allocation, or a silently different model.
"""

import json
import math
import random
import resource
import struct
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.layouts import LAYOUTS, write
from transformers import AutoModel

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.layouts.tensor_names import published_name, tensor_names


SOURCES = ["z-lab v1", "z-lab DFlash 2", "muse assistant", "speculators, reduced vocabulary", "MiMo", "gpt-oss"]
HOSTILE = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    7,
    2**31,
    2**63,
    10**30,
    -(10**30),
    1e308,
    -0.5,
    0.5,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "4",
    "../../etc/passwd",
    "/dev/zero",
    "a" * 10_000,
    "\0",
    [],
    {},
    [None],
    [[]],
    [0, 0, 0],
    [10**12],
    [-1, 0, 1],
    list(range(2000)),
    {"a": {"b": {}}},
    ["full_attention"],
]
ADDED = {
    "transformers_weights": ["../other.safetensors", "/dev/zero"],
    "quantization_config": [{}, {"quant_method": "no such"}, 7, "fp8"],
    "num_labels": [10**12],
    "id2label": [[1], 7],
    "attn_implementation": ["no such", "kernels/some-repository"],
    "_attn_implementation": ["no such"],
    "to_dict": [7],
    "get_text_config": ["x"],
    "layer_is_causal": [True],
    "has_own_lm_head": [True],
    "torch_dtype": ["load", "float8_e5m2", 16],
    "dtype": ["load", "no such", 16],
    "rope_scaling": [{"rope_type": "yarn"}, {"rope_type": "no such"}, {"type": "linear", "factor": -1}, 7, []],
    "rope_parameters": [{}, {"rope_theta": math.nan}, {"full_attention": 3}, {"rope_theta": "x"}, []],
    "partial_rotary_factor": [0, 2.0, 0.01, "x"],
    "draft_vocab_size": [5, 10**9, 97],
    "hidden_act": ["no such", 7, []],
    "architectures": [["Qwen3ForCausalLM"], 7, [7], [["x"]]],
    "auto_map": [{"AutoModel": "os.system"}, 7],
    "_commit_hash": ["x", 7],
    "gguf_file": ["x"],
    "max_window_layers": [-3, "x", 10**9],
    "source_layout": ["speculators", "x", 7, []],
    "distributed_config": [{"tp_plan": "auto"}],
    "fusion_config": [{"x": 1}],
}


def mutate(config, source):
    """One to three changes anywhere in a config.json."""
    config = json.loads(json.dumps(config))
    for _ in range(source.choice([1, 1, 2, 3])):
        places = [config, *[value for value in config.values() if isinstance(value, dict)]]
        place = source.choice(places)
        kind = source.random()
        if kind < 0.15 and place:
            del place[source.choice(sorted(place))]
        elif kind < 0.35:
            key = source.choice(sorted(ADDED))
            place[key] = source.choice(ADDED[key])
        elif place:
            place[source.choice(sorted(place))] = source.choice(HOSTILE)
    text = json.dumps(config)
    kind = source.random()
    if kind < 0.03:
        return text[: source.randrange(len(text))]
    if kind < 0.05:
        return source.choice(["", "7", "[]", "null", '"x"', "[" * 5000, "\ufeff{}", '{"a": 1} {}'])
    return text


def load_is_honest(folder, expected, loader=DFlashDraftModel):
    """Load; `None` on an error of the agreed kinds that names the folder. What loads has the file's own weights."""
    start = time.monotonic()
    try:
        draft = loader.from_pretrained(folder)
    except (ValueError, OSError) as error:
        assert str(folder) in str(error), f"{type(error).__name__} does not name the file: {error}"
        return None
    finally:
        assert time.monotonic() - start < 30
    assert type(draft) is DFlashDraftModel
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor.double(), expected[name].double()), name
    return draft


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz_configs(tmp_path, count, seed=0):
    source = random.Random(seed)
    cases = {}
    for name in SOURCES:
        _, tensors = write(tmp_path / name.replace(",", "").replace(" ", "_"), name)
        cases[name] = (tmp_path / name.replace(",", "").replace(" ", "_"), tensors)
    loaded = 0
    before = peak_memory()
    for i in range(count):
        name = source.choice(SOURCES)
        folder, tensors = cases[name]
        text = mutate(LAYOUTS[name][0], source)
        (folder / "config.json").write_text(text)
        try:
            draft = load_is_honest(folder, tensors)
            if draft is not None:
                loaded += 1
                check_meaning(draft, json.loads(text))
        except BaseException:
            print(f"case {i} of seed {seed}, {name}: {text[:2000]}")
            raise
    assert peak_memory() - before < 1e9
    assert 0.05 * count < loaded < 0.9 * count, f"{loaded} of {count} loaded: the mutations test little"


def check_meaning(draft, file):
    """The fields of a drafter are those of its changed file."""
    config = draft.config
    nested = file.get("dflash_config") or {}
    layers = file.get("transformer_layer_config") or {}
    for key in ("block_size", "mask_token_id", "selector_top_k", "attention_value_scale", "sliding_window"):
        value = next((place[key] for place in (nested, file, layers) if place.get(key) is not None), None)
        if value is not None and not (key == "sliding_window" and "swa_window_size" in nested):
            assert getattr(config, key) == value or (key == "selector_top_k" and value == 0), key
    ids = nested.get("target_layer_ids", file.get("target_layer_ids"))
    if ids is not None:
        assert config.target_layer_ids == ids
    theta = file.get("rope_theta")
    if "rope_theta" in file and not file.get("rope_parameters") and not file.get("rope_scaling"):
        assert config.rope_parameters["rope_theta"] == theta
    if file.get("layer_types") is not None and not nested.get("use_swa"):
        assert config.layer_types == file["layer_types"]
    with torch.no_grad():
        noise = torch.zeros(1, min(config.block_size, 64), config.hidden_size, dtype=draft.dtype)
        features = torch.zeros(1, 3, draft.fc.in_features, dtype=draft.dtype)
        assert draft(noise, features).last_hidden_state.shape == noise.shape


def damage(path, source):
    """Damage a safetensors file in place."""
    data = bytearray(path.read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    kind = source.choice(["cut", "flip", "flip", "length", "dtype", "bytes", "grow", "shape", "rename"])
    if kind == "cut":
        data = data[: source.randrange(len(data))]
    elif kind == "flip":
        for _ in range(source.choice([1, 1, 2, 8])):
            data[8 + source.randrange(length)] ^= 1 << source.randrange(8)
    elif kind == "length":
        new = source.choice([0, 1, 2**63, 2**64 - 1, 10**12, length - 1, length + 1, length * 2])
        data[:8] = struct.pack("<Q", new)
    elif kind == "bytes":
        start = 8 + source.randrange(length)
        data[start : start + 20] = source.randbytes(20)
    elif kind == "grow":
        data += source.randbytes(source.randrange(1, 100))
    else:
        header = json.loads(data[8 : 8 + length])
        name = source.choice([name for name in header if name != "__metadata__"])
        if kind == "dtype":
            header[name]["dtype"] = source.choice(["F64", "F16", "I32", "I16", "F8_E4M3", "X", 7, None, "BOOL"])
        elif kind == "shape":
            header[name]["shape"] = source.choice([[], [10**18], [2**32, 2**32], [-1], "x", None, [1.5], [[1]]])
        else:
            header[source.choice([name + "x", "layers.99.mlp.up_proj.weight", "", "__init__"])] = header.pop(name)
        text = json.dumps(header).encode()
        data = struct.pack("<Q", len(text)) + text + data[8 + length :]
    path.write_bytes(bytes(data))
    return kind


def fuzz_files(tmp_path, count, seed=0):
    source = random.Random(seed)
    refused = 0
    before = peak_memory()
    for i in range(count):
        name = source.choice(SOURCES)
        folder = tmp_path / str(i)
        _, tensors = write(folder, name, shards=source.choice([1, 3]))
        path = source.choice(sorted(folder.glob("*.safetensors")))
        kind = damage(path, source)
        try:
            draft = load_is_honest(folder, tensors)
        except BaseException:
            print(f"file {i} of seed {seed}: {kind}, {name}, {path}")
            raise
        # Only a flip in a name of the metadata may go unnoticed: it changes nothing.
        refused += draft is None
        assert draft is None or kind in ("flip", "bytes", "rename"), kind
    assert peak_memory() - before < 1e9
    assert refused > 0.9 * count


def test_mutated_configs_load_or_are_refused(tmp_path):
    fuzz_configs(tmp_path, 120)


def test_damaged_safetensors_load_or_are_refused(tmp_path):
    fuzz_files(tmp_path, 100)


@pytest.mark.slow
def test_many_mutated_configs_load_or_are_refused(tmp_path):
    fuzz_configs(tmp_path, 2000, seed=1)


def test_huge_sizes_are_refused_before_allocation(tmp_path):
    """Each alone would be terabytes or an endless loop."""
    folder = tmp_path / "draft"
    write(folder, "z-lab DFlash 2")
    file = LAYOUTS["z-lab DFlash 2"][0]
    before = peak_memory()
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size", "v_head_dim"):
        for value in (10**4, 10**6, 10**9, 10**18):
            changed = {**file, key: value}
            if key == "num_hidden_layers" and value < 10**5:
                changed["layer_types"] = ["full_attention"] * value
            (folder / "config.json").write_text(json.dumps(changed))
            start = time.monotonic()
            with pytest.raises(ValueError, match="draft"):
                DFlashDraftModel.from_pretrained(folder)
            assert time.monotonic() - start < 5, (key, value)
    assert peak_memory() - before < 2e8


def test_weight_index_outside_its_folder_is_refused(tmp_path):
    folder = tmp_path / "draft"
    outside = tmp_path / "outside"
    write(folder, "z-lab v1", shards=2)
    write(outside, "z-lab v1")
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    for name in ("../outside/model.safetensors", str(outside / "model.safetensors"), 7, "", "config.json", None):
        weight_map = dict.fromkeys(index["weight_map"], name)
        index_path.write_text(json.dumps({**index, "weight_map": weight_map}))
        with pytest.raises((ValueError, OSError), match="index"):
            DFlashDraftModel.from_pretrained(folder)
    for text in ("", "{}", "[]", '{"weight_map": 7}', '{"weight_map": {}}', "[" * 3000):
        index_path.write_text(text)
        with pytest.raises((ValueError, OSError), match="draft"):
            DFlashDraftModel.from_pretrained(folder)


def test_config_cannot_name_other_weights(tmp_path):
    """Upstream would load the file that `transformers_weights` names."""
    _, tensors = write(tmp_path / "draft", "z-lab v1")
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(other, tmp_path / "draft" / "other.safetensors", metadata={"format": "pt"})
    changed = {**LAYOUTS["z-lab v1"][0], "transformers_weights": "other.safetensors"}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(changed))
    for loader in (DFlashDraftModel, AutoModel):
        assert torch.equal(loader.from_pretrained(tmp_path / "draft").fc.weight, tensors["fc.weight"])
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    renamings = tensor_names(DFlashDraftConfig.from_pretrained(tmp_path / "draft"))
    assert {published_name(name, renamings) for name in stored} == set(tensors)
