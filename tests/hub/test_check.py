"""The preflight: what we write passes, and every way to go wrong is named."""

import copy
import json
import math
import struct
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import layouts
from support.engine_variants import CONVOLUTION, SELECTOR, SLIDING, VARIANTS, YARN
from support.hub_stand_in import stand_in
from support.pairs import make_draft

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf._io.names import ENGINES
from dflash_hf.cli import main
from dflash_hf.conversion.convert import convert
from dflash_hf.hub import engines
from dflash_hf.hub.card import CardFacts, render_card
from dflash_hf.hub.check import check, read_shapes
from dflash_hf.hub.findings import Finding, render
from dflash_hf.hub.launch import launch_command
from dflash_hf.training.draft_vocabulary import set_draft_vocabulary


PUBLISHED = Path(__file__).parents[1] / "fixtures" / "published"
REMOVE = object()


@pytest.fixture
def folder(target, tmp_path):
    """A drafter that is right for every engine."""
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def edited(config, nested=None, **changes):
    """A configuration with other keys; `REMOVE` takes one out."""
    config = copy.deepcopy(config)
    for table, edits in ((config, changes), (config["dflash_config"], nested or {})):
        for key, value in edits.items():
            table.pop(key, None) if value is REMOVE else table.update({key: value})
    return config


def edit(folder, nested=None, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(edited(json.loads(path.read_text()), nested, **changes)))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def errors(findings):
    return {finding.key: finding for finding in findings if finding.severity == "error"}


# Those that engines differ about are in other tests.
ALIKE = [name for name in VARIANTS if name not in ("JetSpec", "own mask embedding", "DFlash 2, capped")]


@pytest.mark.parametrize("variant", ALIKE)
def test_written_folder_passes_check(variant, target, tmp_path):
    draft = make_draft(target, target_layer_ids=[0, 1, 2], **VARIANTS[variant])
    draft.config.dflash_config["num_anchors"] = 512  # a training-only key survives
    draft.save_pretrained(tmp_path, max_shard_size="20KB" if variant == "mixed" else "50GB")
    findings = check(tmp_path, target=target.config)
    expected = {"mixed": ["layer_types"], "DFlash 2": ["architectures"]}  # both need vLLM's V2 runner
    assert [f.key for f in findings] == expected.get(variant, []), render(findings)
    assert not errors(findings)

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel" if variant == "DFlash 2" else "DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"]["num_anchors"] == 512
    rope = draft.config.rope_parameters
    assert config["rope_parameters"] == rope and config["rope_theta"] == rope["rope_theta"]
    scaled = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert config.get("rope_scaling", "not written") == (scaled if variant == "yarn" else "not written")
    assert config["use_sliding_window"] is (draft.config.sliding_window is not None)
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert ("is_causal" in config) is ("is_causal" in VARIANTS[variant])
    assert "causal" not in config["dflash_config"]
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel"}
    assert (tmp_path / "custom_generate" / "generate.py").is_file()
    # Tensors by their published names, nothing else.
    assert read_shapes(tmp_path) == {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}


MARKOV = {"markov_rank": 6}
DOMINO = {"gru_hidden_dim": 9, "emb_dim": 7, "pure_draft_prefix_len": 1}
PARTS = {
    # what is trained: fields, keys of the errors by engine
    "vanilla": ({**MARKOV, "sample_from_anchor": True}, {}),
    "vanilla 1+N": ({**MARKOV, "enable_confidence_head": True}, {}),
    "gated": ({**MARKOV, "markov_head_type": "gated"}, {"vllm": "markov_head_type"}),
    "rnn": ({**MARKOV, "markov_head_type": "rnn", "sample_from_anchor": True}, {"vllm": "markov_head_type"}),
    "anchor first, no head": ({"sample_from_anchor": True}, {"vllm": "markov_rank"}),
    "Domino": (DOMINO, {"vllm": "gru_hidden_dim"}),
    "Domino, shifted": ({**DOMINO, "sample_from_anchor": True}, {"vllm": "gru_hidden_dim"}),
    "Domino, another prefix": (
        {**DOMINO, "pure_draft_prefix_len": 0},
        {"vllm": "gru_hidden_dim", "sglang": "pure_draft_prefix_len"},
    ),
    # On SGLang the selector may do without a convolution.
    "selector": (SELECTOR, {"vllm": "conv_group_size"}),
    "convolution": (CONVOLUTION, {"vllm": "selector_top_k", "sglang": "selector_top_k"}),
    "reduced vocabulary": ({"draft_vocab_size": 9}, {"sglang": "draft_vocab_size"}),
    "DFlash 2, reduced": (
        {**CONVOLUTION, **SELECTOR, "draft_vocab_size": 9},
        {"vllm": "draft_vocab_size", "sglang": "draft_vocab_size"},
    ),
    # vLLM's DFlash 2 model multiplies by the scale; its v1 model and SGLang do not.
    "scale": ({"input_embedding_scale": 2.0}, {"vllm": "input_embedding_scale", "sglang": "input_embedding_scale"}),
    "DFlash 2, scale": (
        {**CONVOLUTION, **SELECTOR, "input_embedding_scale": 2.0},
        {"sglang": "input_embedding_scale"},
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_check_names_engines_of_each_head(name, target, tmp_path):
    fields, refused = PARTS[name]
    draft = make_draft(target, target_layer_ids=[0, 1, 2], **fields)
    draft.save_pretrained(tmp_path)
    findings = check(tmp_path, target=target.config)
    errors_by_engine = {}
    for key, finding in errors(findings).items():
        errors_by_engine |= dict.fromkeys(finding.engines, key)
    assert errors_by_engine == refused, render(findings)
    warned = set()
    if "Domino" in name:
        warned.add("projector_type")
    elif draft.config.conv_kernel_size:
        warned.add("architectures")
    if draft.config.selector_rank:
        warned.add("architectures")
    assert {finding.key for finding in findings if finding.severity == "warning"} == warned
    config = draft.config
    dspark = ("sample_from_anchor" in fields or "markov_rank" in fields) and "Domino" not in name
    drafts = config.max_block_tokens - 1
    commands = {engine: launch_command(engine, "t", "d", config)[1] for engine in ("vllm", "sglang")}
    assert all(("dspark" in " ".join(command).lower()) == dspark for command in commands.values())
    assert f'"num_speculative_tokens": {drafts}' in commands["vllm"][-1]
    assert commands["sglang"][-1] == str(drafts if dspark else drafts + 1)
    card = str(render_card(tmp_path, CardFacts(base_model="t/t"), "u/d"))
    assert (config.token_head_class.name in card) == config.has_token_head
    assert all((engine in card) == (engine.lower() not in refused) for engine in ("vLLM", "SGLang"))


def write_header(folder, shapes):
    """Weights of any size that cost nothing: a header, and a hole."""
    header = {}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


@pytest.mark.parametrize(
    "name, count, fc, warnings",
    [
        ("qwen3-4b-dflash.specforge", 58, (2560, 12800), {"auto_map"}),
        ("qwen3-8b-dflash.specforge", 58, (4096, 20480), {"auto_map"}),
        ("qwen3.6-27b-dflash.specforge", 58, (5120, 25600), {"auto_map", "layer_types"}),
        (
            "qwen3.8-27b-dflash2",
            81,
            (5120, 25600),
            {"architectures", "auto_map", "block_size", "mask_token_id", "rope_theta"},
        ),
        ("muse-glimmer-30b-assistant", 58, (6656, 33280), {"rope_theta"}),
    ],
)
def test_published_configs_have_no_errors(name, count, fc, warnings, tmp_path):
    config = json.loads((PUBLISHED / f"{name}.config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        draft = DFlashDraftModel(DFlashDraftConfig.from_pretrained(tmp_path))
    shapes = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    assert len(shapes) == count and shapes["fc.weight"] == fc
    if "muse" in name:
        shapes["encoder.fc.weight"] = shapes.pop("fc.weight")
        shapes["encoder.output_norm_enc.weight"] = shapes.pop("hidden_norm.weight")
    write_header(tmp_path, shapes)
    findings = check(tmp_path)
    assert not errors(findings), render(findings)
    keys = {finding.key for finding in findings}
    # "auto_map" names the publisher's own code, which is not in this folder; ids are nested only in all but Muse's.
    assert warnings - {"auto_map"} <= keys and keys <= warnings | {
        "dflash.py",
        "auto_map",
        "mask_token_id",
        "target_layer_ids",
    }


def both(**keys):
    return keys, keys


V = ("vllm",)
VS = ("vllm", "sglang")
HF = ("transformers",)
TYPES = "layer_types"
# fmt: off
ERRORS = {
    # what is changed: (nested, top level), the key of the finding, whom it concerns
    "unknown_architecture": (({}, {"architectures": ["DFlashForCausalLM"]}), "architectures", ENGINES),
    "unknown_model_type": (({}, {"model_type": "dflash"}), "model_type", VS),
    "muse_in_name_only": (({}, {"model_type": "muse_glimmer_assistant"}), "model_type", ENGINES),
    "no_vocabulary": (({}, {"vocab_size": REMOVE}), "vocab_size", VS),
    "no_length": (({}, {"max_position_embeddings": REMOVE}), "max_position_embeddings", VS),
    "ids_out_of_range": (both(target_layer_ids=[0, 1, 9]), "config.json", ENGINES),
    "ids_twice": (both(target_layer_ids=[0, 1, 1]), "config.json", ENGINES),
    "ids_out_of_order": (both(target_layer_ids=[2, 1, 0]), "target_layer_ids", VS),
    "ids_for_eagle": (({}, {"eagle_aux_hidden_state_layer_ids": [0, 1]}), "eagle_aux_hidden_state_layer_ids", V),
    "two_block_sizes": (({}, {"block_size": 16}), "block_size", ENGINES),
    "no_block_size": (both(block_size=REMOVE), "block_size", ENGINES),
    "mask_outside": (both(mask_token_id=96), "config.json", ENGINES),
    "layer_types_short": (({}, {TYPES: ["full_attention"]}), "config.json", ENGINES),
    "window_dropped": (({}, {**SLIDING, "use_sliding_window": False}), "use_sliding_window", VS),
    "causality_nested_only": (({"causal": True}, {}), "is_causal", VS),
    "causality_twice": (({"causal": False}, {**SLIDING, "use_sliding_window": True}), "is_causal", VS),
    "window_forced": (({"use_swa": True, "swa_window_size": 8}, {}), "is_causal", VS),
    "jetspec_as_published": (({"causal_head": True}, {}), "causal_head", VS),
    "mask_embedding_nowhere": (({"own_mask_embedding": True}, {}), "mask_embedding.pt", VS),
    "two_thetas": (({}, {"rope_theta": 5000.0}), "rope_theta", ENGINES),
    "no_theta": (({}, {"rope_theta": REMOVE, "rope_parameters": REMOVE}), "rope_theta", VS),
    "rope_by_layer_type": (({}, {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
                           "rope_parameters", VS),
    "two_rope_types": (({}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}), "rope_scaling", ENGINES),
    "another_context_theta": (({"backbone_rotary_base": 7.0}, {}), "backbone_rotary_base", VS),
    "gelu": (({}, {"hidden_act": "gelu"}), "hidden_act", VS),
    "convolution_in_v1": ((CONVOLUTION, {}), "architectures", VS),
    "wide_feature": (({}, {"target_hidden_size": 64}), "target_hidden_size", VS),
    "narrow_values": (({}, {"v_head_dim": 4}), "v_head_dim", VS),
    "markov_in_v1": (({**MARKOV, "sample_from_anchor": False}, {}), "architectures", V),
    "bias_without_tensors": (({}, {"attention_bias": True}), "weights", ENGINES),
    "too_many_layers": (({}, {"num_hidden_layers": 3, TYPES: ["full_attention"] * 3}), "weights", ENGINES),
    "unknown_quantisation": (({}, {"quantization_config": {"quant_method": "magic"}}), "quantization_config", ENGINES),
    "foreign_code": (({}, {"auto_map": {"AutoModel": "evil/code--modeling.Model"}}), "auto_map", HF),
}
WARNINGS = {
    "last_layer": (both(target_layer_ids=[0, 1, 3]), "target_layer_ids", VS),
    "nested_block_size": (({}, {"block_size": REMOVE}), "block_size", HF),
    "causality_contradicts": (({"causal": True}, {"is_causal": False}), "causal", ENGINES),
    "mixed": (({}, {**VARIANTS["mixed"], "use_sliding_window": True}), TYPES, V),
    "new_rope_only": (({}, {"rope_theta": REMOVE}), "rope_theta", VS),
    "yarn_mscale": (({}, {"rope_parameters": {**YARN, "mscale": 1.0}, "rope_theta": 50000.0,
                          "rope_scaling": {**YARN, "mscale": 1.0}}), "rope_parameters", VS),
    "yarn_lost": (({}, {"rope_parameters": YARN, "rope_theta": 50000.0, "rope_scaling": None}), "rope_scaling", VS),
    "interleaved": (({}, {"rope_is_neox_style": False}), "rope_is_neox_style", VS),
    "no_code_named": (({}, {"auto_map": REMOVE}), "auto_map", HF),
}
# fmt: on


@pytest.mark.parametrize("name", [*ERRORS, *WARNINGS])
def test_check_names_changed_field(name, folder):
    (nested, top), key, engines = {**ERRORS, **WARNINGS}[name]
    edit(folder, nested, **top)
    findings = check(folder)
    severity = "error" if name in ERRORS else "warning"
    assert (severity, key, engines) in [(finding.severity, finding.key, finding.engines) for finding in findings], (
        render(findings)
    )
    assert name in ERRORS or len(findings) == 1, render(findings)


GEMMA = {"model_type": "gemma3_text"}
TARGETS = {
    # what is changed in the target: the findings, and whom they concern
    "same": ({}, set(), ()),
    "wide": ({"hidden_size": 64}, {"target_hidden_size"}, ENGINES),
    "shallow": ({"num_hidden_layers": 2}, {"num_target_layers", "target_layer_ids"}, ENGINES),
    "few words": ({"vocab_size": 90}, {"vocab_size", "mask_token_id"}, ENGINES),
    "long": ({"max_position_embeddings": 4096}, {"max_position_embeddings"}, V),
    "gemma": (GEMMA, {"vocab_size"}, V),
}


@pytest.mark.parametrize("name", TARGETS)
def test_check_compares_target(name, folder, target, tmp_path):
    changes, keys, engines = TARGETS[name]
    config = {**target.config.to_dict(), **changes}
    asked = ("vllm==0.32.0", "sglang", "transformers")  # vLLM 0.33 has a longer rotary table
    findings = check(folder, asked, target=config)
    assert {finding.key for finding in findings} == keys and all(finding.engines == engines for finding in findings)
    layouts.write(tmp_path / "theirs", "speculators")  # sizes are nested there, which hid other targets; no depth
    vllm_errors = errors(check(tmp_path / "theirs", ["vllm"], config))
    assert vllm_errors.keys() == (keys - {"num_target_layers"} if engines == ENGINES else set())
    # A file, a folder, and the text part of a multimodal configuration.
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    for place in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert check(folder, asked, target=place) == findings
    with pytest.raises(ValueError, match="nothing.json cannot be read"):
        check(folder, target=tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("version", "old"),
    [
        (None, True),
        ("0.1.1", True),
        ("0.2.0", True),
        ("0.3.0.dev0", True),
        ("0.3.0", False),
        ("1", False),
        ("x", True),
    ],
)
def test_check_names_older_code(version, old, folder):
    edit(folder, dflash_hf_version=version)
    assert check(folder) == []  # byte for byte this package's
    (folder / "modeling_dflash.py").write_text("class DFlashDraftModel: ...")
    findings = [(finding.severity, finding.engines, finding.key) for finding in check(folder)]
    assert findings == [("warning", ("transformers",), "dflash_hf_version")] * old
    edit(folder, auto_map={"AutoConfig": "configuration_dflash.C", "AutoModel": "modeling_dflash.Theirs"})
    assert check(folder) == []


def test_check_finds_own_mask_embedding(target, tmp_path):
    make_draft(target, target_layer_ids=[0, 1, 2], own_mask_embedding=True).save_pretrained(tmp_path)
    (finding,) = check(tmp_path)  # SGLang joins the path of the drafter with the file's name
    assert (finding.severity, finding.engines, finding.key) == ("warning", ("sglang",), "mask_embedding.pt")
    (tmp_path / "mask_embedding.pt").unlink()
    assert errors(check(tmp_path))["mask_embedding.pt"].engines == ("vllm", "sglang")


TENSORS = {
    # what is changed, and what is named; engines do not report it
    "missing": (lambda t: t.pop("layers.1.mlp.up_proj.weight"), {"weights": ENGINES}),
    "too many": (lambda t: t.update({"extra.weight": torch.zeros(3)}), {"weights": ENGINES}),
    "of another shape": (lambda t: t.update({"fc.weight": torch.zeros(32, 64)}), {"weights": ENGINES}),
    # vLLM loads and uses it.
    "head": (
        lambda t: t.update({"lm_head.weight": torch.zeros(96, 32)}),
        {"weights": HF, "lm_head.weight": ("sglang",)},
    ),
    # It is read here.
    "prefix": (lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}), {"model.norm.weight": VS}),
}


@pytest.mark.parametrize("name", TENSORS)
def test_check_names_wrong_tensor(name, folder):
    change, expected = TENSORS[name]
    edit_tensors(folder, change)
    assert {key: finding.engines for key, finding in errors(check(folder)).items()} == expected


@pytest.mark.parametrize("name", ["LiLiCorrDraftModel", "DFlash2BeamDraftModel"])
def test_unknown_head_is_left_to_engines(name, folder, capsys):
    """vLLM and SGLang serve some of them; and no conversion is offered that would be refused."""
    edit(folder, architectures=[name])
    findings = check(folder)
    assert [(finding.severity, finding.engines, finding.key) for finding in findings] == [
        ("error", ("transformers",), "architectures"),
        ("warning", ("vllm", "sglang"), "architectures"),
    ]
    assert "this package does not know" in findings[1].message and "dflash convert" not in render(findings)
    assert main(["check", str(folder)]) == 1
    last_lines = "It is not read by transformers.\nWhether it is read by vllm, sglang is not known.\n"
    assert capsys.readouterr().out.endswith(last_lines)
    assert main(["check", str(folder), "--engine", "vllm", "--json"]) == 0  # no error is known
    assert json.loads(capsys.readouterr().out)["read_by"] == {"vllm": None}
    with pytest.raises(ValueError):
        convert(folder, folder.parent / "converted")


def test_check_offers_possible_conversion(folder):
    edit(folder, architectures=["DFlashForCausalLM"])
    assert "`dflash convert` writes a folder" in errors(check(folder))["architectures"].message
    edit_tensors(folder, lambda t: t.pop("fc.weight"))
    message = errors(check(folder))["architectures"].message
    assert "this package cannot read it either: " in message and "dflash convert" not in message


def test_check_warns_of_windows_of_speculators(tmp_path):
    """Its own layout: vLLM reads it, with windows and causality that are not those of its training."""
    layouts.write(tmp_path / "plain", "speculators")
    (finding,) = check(tmp_path / "plain")
    assert (finding.key, finding.engines) == ("transformer_layer_config", ("sglang", "transformers"))
    assert "dflash convert" in finding.message and check(tmp_path / "plain", ["vllm"]) == []
    layouts.write(tmp_path / "mixed", "speculators, sliding")
    findings = {finding.key: (finding.severity, finding.engines) for finding in check(tmp_path / "mixed")}
    assert findings["sliding_window"] == ("warning", ENGINES) and "sliding_window_non_causal" not in findings
    path = tmp_path / "mixed" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window_non_causal": False}))
    findings = {finding.key: (finding.severity, finding.engines) for finding in check(tmp_path / "mixed")}
    assert findings["sliding_window_non_causal"] == ("warning", ("vllm",))
    edit_tensors(tmp_path / "plain", lambda tensors: tensors.pop("fc.weight"))
    assert errors(check(tmp_path / "plain"))["weights"].engines == ENGINES


def test_check_names_damaged_files(folder, tmp_path):
    (folder / "custom_generate" / "generate.py").unlink()
    assert [finding.key for finding in check(folder)] == ["custom_generate/generate.py"]
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:100], whole[:-4], b"", b"\xff" * 64):
        weights.write_bytes(damaged)
        assert "model.safetensors is damaged" in errors(check(folder))["weights"].message
    weights.write_bytes(whole)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "model.safetensors"}}')
    assert list(errors(check(folder))) == ["model.safetensors"]
    weights.unlink()
    assert "model.safetensors" in errors(check(folder))["weights"].message
    (folder / "model.safetensors.index.json").unlink()
    assert "Only safetensors are read" in errors(check(folder))["weights"].message
    (folder / "config.json").write_text("{")
    assert "is not JSON" in errors(check(folder))["config.json"].message
    assert "cannot be read: Not a directory" in errors(check(folder / "config.json"))["config.json"].message
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such folder"):
        check(tmp_path / "nowhere")
    (folder / "config.json").write_text("[]")
    assert set(errors(check(folder))) == {"config.json"}


def test_check_survives_any_config(folder, target):
    """Any value under any key: findings, never an exception."""
    random = Random(0)
    whole = json.loads((folder / "config.json").read_text())
    values = [None, 0, -1, 2.5, math.nan, math.inf, "x", "", [], {}, [1], [[1]], {"a": 1}, True, False, 10**30, "../x"]
    more = [
        "eagle_aux_hidden_state_layer_ids",
        "rope_scaling",
        "backbone_rotary_base",
        "draft_vocab_size",
        "v_head_dim",
    ]
    more += ["input_embedding_scale", "conv_kernel_size", "is_causal", "quantization_config", "partial_rotary_factor"]
    for _ in range(60):
        config = copy.deepcopy(whole)
        for _ in range(random.choice([1, 1, 2])):
            table = random.choice([config, config, config["dflash_config"], config["rope_parameters"]])
            table = table if isinstance(table, dict) else config
            key = random.choice([*table, *more])
            keep = key in ("dflash_config", "rope_parameters")
            table[key] = random.choice(values) if not keep else table[key]
        (folder / "config.json").write_text(json.dumps(config))
        for finding in check(folder, target=target.config):
            assert finding.message and finding.severity in ("error", "warning")
    for key, value in zip(("dflash_config", "rope_parameters") * 8, values):
        (folder / "config.json").write_text(json.dumps({**whole, key: value}))
        check(folder, target=target.config)


def test_command_prints_findings(folder, target, tmp_path, capsys, monkeypatch):
    target.config.save_pretrained(tmp_path / "target")

    def call(*words):
        return main(["check", *map(str, words)]), capsys.readouterr().out

    monkeypatch.setattr(engines, "_installed_version", {"transformers": "5.23.0"}.get)
    versions = (
        "vllm 0.33.0 (not installed: the newest known), sglang 0.5.23 (not installed: the newest known), "
        "transformers 5.23.0 (installed)"
    )
    read_by = "This folder is read by vllm, sglang, transformers."
    assert call(folder) == (0, f"No findings.\nChecked for {versions}.\n{read_by}\n")
    edit(folder, {"causal": True}, rope_theta=REMOVE)
    code, text = call(folder, "--engine", "vllm", "--engine", "sglang", "--target", tmp_path / "target")
    rows = text.splitlines()
    assert code == 1 and rows[0].split() == ["severity", "engines", "key", "finding"]
    assert rows[1].startswith("error     vllm, sglang  is_causal") and rows[2].startswith("warning ")
    assert call(folder, "--engine", "transformers")[0] == 0
    assert call(folder, "--target", tmp_path / "nowhere")[0] == 1
    with pytest.raises(ValueError, match=rf"^{folder} is on this machine, .* leave out the revision v2\.$"):
        check(folder, revision="v2")
    with pytest.raises(ValueError, match="tensorrt"):
        check(folder, ["tensorrt"])
    assert render([Finding("error", ("vllm",), "a", "b")]).splitlines()[1].split() == ["error", "vllm", "a", "b"]


def test_command_passes_with_one_server(target, tmp_path, capsys):
    """README's own walk ended with status 1, of an engine that nobody had asked for."""
    reduced = make_draft(target, target_layer_ids=[0, 1, 2], draft_vocab_size=24)
    set_draft_vocabulary(reduced, target, torch.arange(target.config.vocab_size))
    reduced.save_pretrained(tmp_path / "reduced")
    for words, code, last_lines in (
        ((), 0, "This folder is read by vllm, transformers.\nIt is not read by sglang.\n"),
        (("--engine", "sglang"), 1, "No engine reads it: not sglang.\n"),
        (("--engine", "vllm", "--engine", "sglang"), 1, "This folder is read by vllm.\nIt is not read by sglang.\n"),
    ):
        assert main(["check", str(tmp_path / "reduced"), *words]) == code, words
        assert capsys.readouterr().out.endswith(last_lines)
    edit(tmp_path / "reduced", {}, target_layer_ids=[2, 1, 0])  # no server reads features in this order
    assert main(["check", str(tmp_path / "reduced")]) == 1


# ------------------------------------------------------------------------------------------------------------- the Hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "cache"), raising=False)
    with stand_in(monkeypatch) as hub:
        yield hub


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_repository_is_checked_like_folder(hub, target, folder, monkeypatch):
    files = contents(folder)
    hub.files["someone/draft"] = {**files, "checkpoint-1/model.safetensors": b"not read"}
    hub.files["someone/target"] = {"config.json": json.dumps(target.config.to_dict()).encode()}
    hub.files["someone/target"]["model-00001-of-00009.safetensors"] = b"16 GB"
    assert check("someone/draft", target="someone/target") == []
    assert "checkpoint-1/model.safetensors" not in hub.sent
    assert "config.json" in errors(check("someone/target"))
    assert not any("of-00009" in name for name in hub.sent)
    config = {**json.loads(files["config.json"]), "intermediate_size": 2999}
    hub.files["someone/other"] = {**files, "config.json": json.dumps(config).encode()}
    del hub.files["someone/other"]["modeling_dflash.py"]
    assert {"weights", "modeling_dflash.py"} <= {finding.key for finding in check("someone/other")}
    for name in ("someone/nothing", "someone/never"):
        with pytest.raises(OSError, match=f"{name}: there is no such folder, and the Hub has no model of that name"):
            check(name)
    with pytest.raises(ValueError, match="someone/nothing cannot be read"):
        check(folder, target="someone/nothing")
