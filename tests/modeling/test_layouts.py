"""
Every layout that is published loads and drafts what an element-wise reference drafts. The checkpoints are written here
from the documented keys and tensor names, never by the package's own writer.
"""

import itertools
import json
import re
from functools import partial

import pytest
import torch
from support.heads import opened
from support.layouts import (
    FIXTURES,
    FULL,
    LAYOUTS,
    MIXED,
    SLIDING,
    config_of,
    renamed,
    save,
    shapes_of,
    write,
)
from support.pairs import make_target
from support.reference import draft_hidden_states, draft_tokens, published_loop
from support.scripted_draft import scripted
from transformers import AutoConfig, AutoModel

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.hub.check import check
from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.targets.features import FeatureTap


ANCHOR = 17
zlab = partial(config_of, "z-lab v1")
load = DFlashDraftModel.from_pretrained
read = DFlashDraftConfig.from_dict


def drafted(draft, target, features) -> list[int]:
    """The tokens of a block, drafted as in `generate`."""
    return opened(draft, target, features[None]).draft_block(torch.tensor([ANCHOR])).tokens[0].tolist()


def of_double(tensors: dict) -> dict:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def expected_of(tensors, truth, target, features, block=None):
    """Hidden states and tokens of the reference, from embeddings `[B, H]` of a block; default: the target's."""
    embedding, head = (module.weight.to(features.dtype) for module in (target.model.embed_tokens, target.lm_head))
    block = embedding[[ANCHOR, 95, 95, 95, 95]] if block is None else block
    hidden = draft_hidden_states(tensors, truth, features, block)
    return hidden, [ANCHOR, *draft_tokens(tensors, truth, hidden, head, ANCHOR, embedding)]


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=8)


@pytest.fixture(scope="module")
def features():
    return torch.randn(9, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_layout_drafts_as_the_reference(tmp_path, layout, target, features):
    """In double precision: in single precision the rounding of two orders of computation depends on the processor."""
    truth, tensors = write(tmp_path / "draft", layout, shards=1 + len(layout) % 2)
    draft = load(tmp_path / "draft", dtype=torch.float64)
    assert draft.config.target_layer_ids == truth["target_layer_ids"]
    assert (draft.config.block_size, draft.config.mask_token_id) == (5, 95)
    shapes = {name: tensor.shape for name, tensor in draft.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in tensors.items()}
    tensors = of_double(tensors)
    hidden, tokens = expected_of(tensors, truth, target, features)
    block = target.model.embed_tokens.weight[[ANCHOR, 95, 95, 95, 95]].double()
    for attn in ("sdpa", "eager"):
        draft.set_attn_implementation(attn)
        output = draft(noise_embeds=block[None], context_hidden_states=features[None])
        torch.testing.assert_close(output.last_hidden_state[0], hidden, atol=1e-5, rtol=1e-5)
    assert drafted(draft, target, features) == tokens and len(tokens) == draft.config.max_block_tokens
    headless = {key: value for key, value in truth.items() if key not in ("markov_rank", "gru_hidden_dim")}
    without = expected_of(tensors, headless, target, features)[1]
    assert headless == truth or without[: len(tokens)] != tokens, "the head changed nothing: nothing was tested"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_survives_saving(tmp_path, layout):
    """What is written is the published layout, and it is read back as the same model."""
    truth, _ = write(tmp_path / "draft", layout)
    first = load(tmp_path / "draft")
    first.save_pretrained(tmp_path / "again")
    again, info = load(tmp_path / "again", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    configs = [{**draft.config.to_dict(), "_name_or_path": None} for draft in (first, again)]
    assert configs[0] == configs[1]
    for (name, tensor), (_, saved) in zip(first.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(tensor, saved), name
    assert torch.equal(first.rotary_emb.inv_freq, again.rotary_emb.inv_freq)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    dspark = truth.keys() & {"markov_rank", "confidence"} or ("anchor_first" in truth and "emb_dim" not in truth)
    architecture = "DFlash2DraftModel" if "conv_kernel_size" in truth else "DFlashDraftModel"
    if dspark:
        architecture = "Qwen3DSparkModel"
    assert written["architectures"] == [architecture]
    if dspark:
        assert written["sample_from_anchor"] == ("anchor_first" in truth) and "num_anchors" in written
    assert written["model_type"] == "qwen3" and "source_layout" not in written
    # Engines read rotary settings in the old spelling, too.
    assert written["rope_theta"] == truth["rope_theta"]
    assert (written.get("rope_scaling") or {}).get("factor") == truth.get("yarn", {}).get("factor")


@pytest.mark.parametrize("layout", ["z-lab v1", "z-lab mixed layers", "gpt-oss"])
def test_loop_equals_the_published_one(tmp_path, layout):
    truth, tensors = write(tmp_path / "draft", layout)
    draft = load(tmp_path / "draft")
    target = make_target()
    draft.decoding_config.block_size = draft.config.block_size  # whole blocks, as in the published loop
    prompts = torch.randint(2, 90, (2, 1, 7), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    for prompt, stop in zip(prompts, ([], [3, 8, 20, 14]), strict=True):
        text, trace = published_loop(partial(draft_hidden_states, tensors, truth), target, truth, prompt, 8, stop)
        output = target.generate(prompt, **options, assistant_model=draft, eos_token_id=stop or None)
        assert output.sequences[0].tolist() == text
        # The published trace is not cut where the text ends, and may run once more at the length limit.
        *whole, last = output.acceptance_lengths[0]
        assert whole == trace[: len(whole)] and last <= trace[len(whole)] and sum(whole) + last == len(text) - 8


DSPARK = [layout for layout in LAYOUTS if "DSpark" in layout]


@pytest.mark.parametrize(("layout", "ids"), zip(DSPARK, itertools.cycle(([-1, 2, 3], [3, -1, 0])), strict=False))
@torch.no_grad()
def test_dspark_reads_the_embedding(tmp_path, layout, ids):
    """-1 was looked up among the layers: DeepSpec's own drafters, which read the embedding, never drafted."""
    write(tmp_path, layout)
    text = (tmp_path / "config.json").read_text()
    for written, changed in (([0, 2, 3], ids), ([1, 3, 4], [i + 1 for i in ids])):
        text = text.replace(json.dumps(written), json.dumps(changed))
    (tmp_path / "config.json").write_text(text)
    target = make_target()
    draft = load(tmp_path)
    assert draft.config.target_layer_ids == ids
    draft.decoding_config.block_size = draft.config.max_block_tokens
    options = {"inputs": torch.tensor([[5, 9, 17, 33, 5, 9]]), "max_new_tokens": 15, "do_sample": False}
    expected = target.generate(**options)
    for drafter in (draft, scripted(draft, expected)):
        output = target.generate(**options, assistant_model=drafter, return_dict_in_generate=True)
        lengths = output.acceptance_lengths[0]
        assert torch.equal(output.sequences, expected) and min(lengths[:-1]) < draft.config.max_block_tokens
    assert max(lengths) > 1


def identity_of(layout):
    """The keys by which automatic classes choose."""
    return str(
        [layout.config.get(key) for key in ("architectures", "model_type", "auto_map", "speculators_model_type")]
    )


@pytest.mark.parametrize("layout", {identity_of(layout): name for name, layout in LAYOUTS.items()}.values())
def test_auto_classes_return_our_model(tmp_path, layout):
    write(tmp_path / "draft", layout)
    # Code that must not run: it would end the test.
    (tmp_path / "draft" / "dflash.py").write_text("raise SystemExit('remote code was run')")
    for trust in (None, True, False):
        config = AutoConfig.from_pretrained(tmp_path / "draft", trust_remote_code=trust)
        assert type(config) is DFlashDraftConfig
        draft = AutoModel.from_pretrained(tmp_path / "draft", trust_remote_code=trust, dtype=torch.bfloat16)
        assert type(draft) is DFlashDraftModel and draft.dtype == torch.bfloat16


def test_drafter_may_name_a_targets_class(tmp_path):
    """Nor does its type: what has a `dflash_config` is a drafter."""
    config = zlab(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(AutoConfig.from_pretrained(tmp_path)) is DFlashDraftConfig


@pytest.mark.parametrize("path", sorted((FIXTURES / "published").glob("*.json")), ids=lambda path: path.stem)
def test_published_configurations_are_read(path):
    raw = json.loads(path.read_text())
    config = DFlashDraftConfig.from_pretrained(path)
    truth = {"vocab_size": None, **raw, **raw.get("dflash_config", {})}
    with torch.device("meta"):
        draft = DFlashDraftModel(config)
    assert {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()} == shapes_of(truth)
    assert len(shapes_of(truth)) == (81 if "selector_rank" in truth else 58)
    for key in ("target_layer_ids", "block_size", "mask_token_id", "layer_types"):
        assert getattr(config, key) == truth[key]
    theta = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": theta}
    bidirectional = "dflash2" in path.name or "muse" in path.name
    for i, kind in enumerate(config.layer_types):
        assert config.layer_is_causal(i) == (kind == "sliding_attention" and not bidirectional)


def test_muse_assistant_equals_the_native_model(tmp_path):
    """Upstream's own class on its own checkpoint. Its window counts distances up to and including the window."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.cache_utils import DFlashCache

    changes = {"layer_types": MIXED, "architectures": ..., "model_type": ..., "dtype": ...}
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(**config_of("muse assistant", **changes))
    native = MuseGlimmerAssistantModel(config).eval()
    native.save_pretrained(tmp_path / "muse")
    draft = AutoModel.from_pretrained(tmp_path / "muse")
    assert type(draft) is DFlashDraftModel and draft.config.sliding_window == 4
    wider = load(tmp_path / "muse", sliding_window=5)
    inputs = {"noise_embeds": torch.randn(2, 5, 32), "context_hidden_states": torch.randn(2, 9, 96)}
    cache = DFlashCache(config=native.config)  # the native mask needs it to know the context's length
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(9)
    with torch.no_grad():
        expected = native(**inputs, **{CACHE_NAME: cache}, position_ids=torch.arange(14)[None]).last_hidden_state
        torch.testing.assert_close(wider(**inputs).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


# -------------------------------------------------------------------------------------------------- loading


def test_subfolder_and_device_map_are_honoured(tmp_path):
    _, tensors = write(tmp_path / "target" / "dflash", "MiMo", shards=3)
    draft = load(tmp_path / "target", subfolder="dflash", device_map="cpu")
    assert torch.equal(draft.fc.weight, tensors["fc.weight"])
    draft = AutoModel.from_pretrained(tmp_path / "target", subfolder="dflash", dtype=torch.float64, block_size=4)
    assert type(draft) is DFlashDraftModel and draft.dtype == torch.float64 and draft.config.block_size == 4


def test_key_mapping_renames_tensors(tmp_path):
    _, tensors = write(tmp_path, "z-lab v1")
    save(tmp_path, zlab(), renamed(tensors, {"": "draft_net."}))
    draft = load(tmp_path, key_mapping={r"^draft_net\.": ""})
    assert torch.equal(draft.fc.weight, tensors["fc.weight"])


KEY_MAPPINGS = {  # what tensor names begin with in the file, by the published start; and the mapping that undoes it
    "two groups": ({"layers.": "blocks."}, {r"^blocks\.(\d+)\.(.*)": r"layers.\1.\2"}),
    "groups in another order": ({"layers.": "w.layers."}, {r"^(\w)\.(\w+)\.": r"\2."}),
    "a name that ends inside a word": ({"fc.": "fcat."}, {r"^fca": "fc", r"^fct": "fc"}),
    "a star before a dot": ({"norm.": "normal.."}, {r"^normal*.\.": "norm."}),
    "a name that another tensor has": ({"norm.": "hidden_norm.", "hidden_norm.": "old_norm."}, None),
}


@pytest.mark.parametrize("name", KEY_MAPPINGS)
def test_key_mapping_is_that_of_re_sub(tmp_path, name):
    """transformers replaces the first group alone: tensors were checked by one name, and layers were left random."""
    names, mapping = KEY_MAPPINGS[name]
    mapping = mapping or {r"^hidden_norm\.": "norm.", r"^old_norm\.": "hidden_norm."}
    _, tensors = write(tmp_path, "z-lab v1")
    save(tmp_path, zlab(), renamed(tensors, names))
    state = load(tmp_path, key_mapping=mapping).state_dict()
    assert state.keys() == tensors.keys()
    for tensor_name, tensor in tensors.items():
        assert torch.equal(state[tensor_name], tensor), tensor_name


@pytest.mark.parametrize("problem", ["missing_keys", "unexpected_keys", "mismatched_keys"])
def test_reported_tensor_is_an_error(tmp_path, monkeypatch, problem):
    """Whatever transformers reports after loading: such layers are random. Only quantised checkpoints were refused."""
    write(tmp_path, "z-lab v1")
    parent = DFlashDraftModel.__mro__[2]
    loader = parent.from_pretrained.__func__

    def with_report(cls, *args, **kwargs):
        model, info = loader(cls, *args, **kwargs)
        return model, {**info, problem: ["norm.weight"]}

    monkeypatch.setattr(parent, "from_pretrained", classmethod(with_report))
    with pytest.raises(ValueError, match=rf"{problem.replace('_', ' ')}: norm\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("shards", [1, 2])
def test_variant_is_loaded(tmp_path, shards):
    draft = DFlashDraftModel(read(zlab()))
    draft.save_pretrained(tmp_path, variant="fp16", max_shard_size="5GB" if shards == 1 else "40KB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards > 1)
    assert torch.equal(load(tmp_path, variant="fp16").fc.weight, draft.fc.weight)
    with pytest.raises(OSError, match="Only safetensors"):
        load(tmp_path)


# ---------------------------------------------------------------------------------------------- embeddings of its own


@torch.no_grad()
def test_mask_embedding_beside_the_weights(tmp_path, target, features):
    """MiMo ships one; left out, every block would start from another embedding."""
    truth, tensors = write(tmp_path / "draft", "MiMo")
    mask = torch.randn(32, generator=torch.Generator().manual_seed(2))
    features = features.float()
    side = tmp_path / "draft" / "mask_embedding.pt"
    torch.save({"embedding": mask, "mask_token_id": 95}, side)
    draft = load(tmp_path / "draft")
    block = torch.stack([target.model.embed_tokens.weight[ANCHOR], mask, mask, mask, mask])
    expected, tokens = expected_of(tensors, truth, target, features, block)
    draft.save_pretrained(tmp_path / "again")  # there it is one of the safetensors too
    for model in (draft, load(tmp_path / "again")):
        assert torch.equal(model.mask_embedding, mask)
        hidden = model(block[None] * 0 + block[:1], features[None]).last_hidden_state[0]
        torch.testing.assert_close(hidden, expected)
        assert drafted(model, target, features) == tokens
    for wrong in ({"embedding": mask[:5], "mask_token_id": 95}, {"embedding": mask, "mask_token_id": 3}, [mask], b"x"):
        side.write_bytes(wrong) if isinstance(wrong, bytes) else torch.save(wrong, side)
        with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
            load(tmp_path / "draft")


@torch.no_grad()
def test_mask_embedding_is_written_as_engines_read_it(tmp_path):
    """
    It was saved as a tensor, which vLLM and SGLang skip in silence: every slot but the anchor started from the
    target's embedding of the mask token.
    """
    draft = DFlashDraftModel(read(zlab(nested={"own_mask_embedding": True}))).to(torch.bfloat16)
    draft.save_pretrained(tmp_path)
    side = tmp_path / "mask_embedding.pt"
    stored = torch.load(side, weights_only=True)
    assert set(stored) == {"embedding", "mask_token_id"} and stored["mask_token_id"] == 95
    assert torch.equal(stored["embedding"], draft.mask_embedding) and not stored["embedding"].requires_grad
    assert torch.equal(load(tmp_path).mask_embedding, stored["embedding"])
    # The weights of a sharded training are given apart; only one process writes.
    state = {**draft.state_dict(), "mask_embedding": torch.full((32,), 3.0, dtype=torch.bfloat16)}
    for writes, expected in ((False, stored["embedding"]), (True, state["mask_embedding"])):
        draft.save_pretrained(tmp_path, is_main_process=writes, state_dict=dict(state))
        assert torch.equal(torch.load(side, weights_only=True)["embedding"], expected)
    # The file decides here too, or engines would draft otherwise than we do; without it there is the tensor.
    torch.save({"embedding": torch.ones(32), "mask_token_id": 95}, side)
    assert torch.equal(load(tmp_path).mask_embedding, torch.ones(32, dtype=torch.bfloat16))
    side.unlink()
    assert torch.equal(load(tmp_path).mask_embedding, state["mask_embedding"])
    # A drafter without one leaves none behind for engines to find.
    draft.save_pretrained(tmp_path)
    DFlashDraftModel(read(zlab())).save_pretrained(tmp_path)
    assert not side.exists()


@pytest.mark.parametrize("in_config", [True, False])
@torch.no_grad()
def test_own_embedding_of_a_drafter_is_used(tmp_path, in_config, target, features):
    """Nemotron's drafters have one: leaving it out, as the copies of other layouts, would be another model."""
    truth, tensors = write(tmp_path / "draft", "z-lab v1")
    table = torch.randn(96, 32, generator=torch.Generator().manual_seed(2))
    file = zlab()
    if in_config:
        file["dflash_config"] = {"mask_token_id": 95, "sample_from_anchor": False}
        file |= {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "has_embed_tokens": True, "has_lm_head": False}
    save(tmp_path / "draft", file, {**tensors, "embed_tokens.weight": table})
    draft = load(tmp_path / "draft", dtype=torch.float64)
    draft.save_pretrained(tmp_path / "again")
    block = table[[ANCHOR, 95, 95, 95, 95]].double()
    _, tokens = expected_of(of_double(tensors), truth, target, features, block)
    for model in (draft, load(tmp_path / "again")):
        assert model.config.has_embed_tokens and torch.equal(model.embed_tokens.weight, table.double())
        assert drafted(model, target, features) == tokens
    assert json.loads((tmp_path / "again" / "config.json").read_text())["has_embed_tokens"] is True
    of_vllm = check(tmp_path / "again", ["vllm"])
    assert not [finding for finding in of_vllm if finding.severity == "error"]  # it uses the table
    findings = [(finding.key, *finding.engines) for finding in check(tmp_path / "again", ["vllm", "sglang"])]
    assert ("embed_tokens.weight", "sglang") in findings
    save(tmp_path / "draft", file, {**tensors, "embed_tokens.weight": table[:90].clone()})
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has shape \[90, 32\] instead of \[96, 32\]"):
        load(tmp_path / "draft")


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("row", json.loads((FIXTURES / "refused.json").read_text()), ids=lambda row: row["name"])
def test_other_drafters_are_refused(tmp_path, row):
    """By config.json or a tensor. Some were loaded as plain drafters where their tensors allowed it."""
    config = config_of(row.get("layout", "z-lab v1"), row.get("nested"), **row.get("changes", {}))
    _, tensors = write(tmp_path / "draft", "z-lab v1")
    save(tmp_path / "draft", config, tensors | ({row["tensor"]: torch.zeros(3)} if "tensor" in row else {}))
    with pytest.raises(ValueError, match=row["reason"]) as error:
        load(tmp_path / "draft")
    named = [row["tensor"], "model.safetensors"] if "tensor" in row else [str(tmp_path / "draft")]
    assert all(name in str(error.value) for name in named)


DAMAGE = {  # changes of the tensors of a drafter over a reduced vocabulary, and the error
    "d2t maps 24 draft tokens to 24 ids": lambda tensors: {"d2t": tensors["d2t"] + 90},
    "d2t maps 24 draft tokens to 23 ids": lambda tensors: {"d2t": tensors["d2t"].index_fill(0, torch.tensor(3), 5)},
    "both norm.weight": lambda tensors: {"model.norm.weight": torch.ones(32)},
    "norm.weight has dtype I32": lambda tensors: {"norm.weight": torch.ones(32, dtype=torch.int32)},
    "fc.weight": lambda tensors: {"fc.weight": torch.zeros(32, 5)},
    "layers.9.extra": lambda tensors: {"layers.9.extra": torch.zeros(3)},
    "layers.1.mlp.up_proj.weight": lambda tensors: {"layers.1.mlp.up_proj.weight": None},
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_tensor_is_named(tmp_path, message):
    config = LAYOUTS["speculators, reduced vocabulary"].config
    _, tensors = write(tmp_path, "speculators, reduced vocabulary")
    tensors |= DAMAGE[message](tensors)
    save(tmp_path, config, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------------ what keys mean


def rotated(x, theta, pairs):
    """Element by element: each pair of channels turned by its angle, at positions 0, 1, ..., of `x` `[T, d]`."""
    out = x.clone()
    for position in range(len(x)):
        for i, (a, b) in enumerate(pairs):
            angle = torch.tensor(position * theta ** (-2 * i / x.shape[1]), dtype=x.dtype)
            out[position, a] = x[position, a] * angle.cos() - x[position, b] * angle.sin()
            out[position, b] = x[position, b] * angle.cos() + x[position, a] * angle.sin()
    return out


@pytest.mark.parametrize("nested", [False, True])
@torch.no_grad()
def test_interleaved_rotary_pairs_are_permuted(tmp_path, nested):
    """Liquid's: after the rows are permuted, every score is what the file's own rule gives."""
    _, tensors = write(tmp_path / "draft", "z-lab v1")
    setting = {"rope_is_neox_style": False}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(zlab(setting) if nested else zlab(**setting)))
    draft = load(tmp_path / "draft", dtype=torch.float64)
    draft.save_pretrained(tmp_path / "again")
    assert "rope_is_neox_style" not in (tmp_path / "again" / "config.json").read_text()
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def scores(weights, pairs):
        def heads(name):
            rows = (x @ weights[f"layers.1.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 8))
            normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
            return normed * weights[f"layers.1.self_attn.{name}_norm.weight"]

        return rotated(heads("q")[:, 0], 1e4, pairs) @ rotated(heads("k")[:, 0], 1e4, pairs).T

    expected = scores(of_double(tensors), [(0, 1), (2, 3), (4, 5), (6, 7)])
    for model in (draft, load(tmp_path / "again")):
        torch.testing.assert_close(scores(model.state_dict(), [(0, 4), (1, 5), (2, 6), (3, 7)]), expected)
    findings = {(finding.key, finding.severity) for finding in check(tmp_path / "draft")}
    assert ("rope_is_neox_style", "warning") in findings


@pytest.mark.parametrize("compiled", [None, "eager"])
def test_embedding_is_read_as_a_feature(compiled, target):
    """Layer 0 of those who count the embedding: what the first layer reads."""
    ids = {"aux_hidden_state_layer_ids": [0, 3, 5], "num_target_layers": 8}
    config = read(zlab(dflash_config={"mask_token_id": 95}, **ids))
    deepspec = {"target_layer_ids": [-1, 2, 4], "num_target_layers": 8}
    for layout in (config, read(config_of("DSpark, Automodel", **deepspec))):
        assert layout.target_layer_ids == [-1, 2, 4]
    prompt = torch.randint(0, 95, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), FeatureTap(target, [-1, 2, 4]) as tap, tap.running():
        states = target(prompt, output_hidden_states=True).hidden_states
        assert torch.equal(tap.take(), torch.cat([states[0], states[3], states[5]], dim=-1))
    draft = DFlashDraftModel(config).eval()
    draft.decoding_config.block_size = 5
    draft.decoding_config.compile = compiled
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=draft), plain)


TABLES = {
    kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip((FULL[0], SLIDING[0]), (1e4, 500.0))
}
WINDOW = {"use_swa": True, "swa_window_size": 7}
DOMINO = LAYOUTS["Domino, causal_v5"].config["dflash_config"]
MEANINGS = {  # config.json, and what it means: fields, and which layers are causal
    "causality at the top wins": (zlab({"causal": True}, is_causal=False), {"is_causal": False}, [False] * 3),
    "causality that is said to be off": (zlab({"causal_head": False}), {"is_causal": None}, [False] * 3),
    **{
        f"JetSpec over {kinds[0]} and {kinds[2]}": (
            zlab({"causal_head": True}, layer_types=kinds, sliding_window=4, use_sliding_window=True),
            {"is_causal": True, "layer_types": kinds},
            [True] * 3,
        )
        for kinds in (FULL, MIXED, SLIDING)
    },
    "a forced window makes full layers slide, bidirectionally": (
        zlab(WINDOW, sliding_window=9),
        {"layer_types": SLIDING, "sliding_window": 7},
        [False] * 3,
    ),
    "a forced window of mixed layers": (
        zlab(WINDOW, layer_types=MIXED),
        {"layer_types": MIXED, "sliding_window": 7},
        [True, True, False],
    ),
    "a null hides no width at the top": (zlab({**DOMINO, "emb_dim": None}, emb_dim=7), {"emb_dim": 7}, [False] * 3),
    "a null hides no ids counted from 1": (
        zlab({"target_layer_ids": None}, aux_hidden_state_layer_ids=[1, 3, 4]),
        {"target_layer_ids": [0, 2, 3]},
        [False] * 3,
    ),
    "the first of two spellings": (
        zlab({"sample_from_anchor": False, "shift_label": True}),
        {"sample_from_anchor": False},
        [False] * 3,
    ),
    "layers that slide from one on": (
        zlab(layer_types=..., use_sliding_window=True, sliding_window=4, max_window_layers=1),
        {"layer_types": [FULL[0], SLIDING[0], SLIDING[0]]},
        [False, True, True],
    ),
    "keys of training": (zlab(loss_decay_gamma=7.0, num_anchors=512), {"loss_decay_gamma": 7.0}, [False] * 3),
    **{
        f"a rotary table of layers that are not there, {kinds[0]}": (
            zlab(layer_types=kinds, sliding_window=4, use_sliding_window=True, rope_parameters=TABLES),
            {"rope_parameters": TABLES[kinds[0]]},
            [kinds is SLIDING] * 3,
        )
        for kinds in (FULL, SLIDING)
    },
}


@pytest.mark.parametrize("name", MEANINGS)
def test_config_keys_keep_their_writers_meaning(name):
    file, meaning, causal = MEANINGS[name]
    config = read(file)
    written = json.loads(config.to_json_string())
    for saved in (config, read(written)):
        assert {key: getattr(saved, key) for key in meaning} == meaning
        assert [saved.layer_is_causal(i) for i in range(3)] == causal
    assert read(written).to_dict() == config.to_dict()


def test_causality_is_written_for_every_reader():
    """Engines read the top level, JetSpec its own key, which was not read: such drafters were bidirectional."""
    config = read(zlab({"causal_head": True}))
    written = json.loads(config.to_json_string())
    assert written["is_causal"] is True and written["dflash_config"]["causal_head"] is True
    config.is_causal = False
    assert config.dflash_config["causal_head"] is False
    settled = read(zlab({"causal": True}, is_causal=False)).to_dict()
    assert settled["is_causal"] is False and "causal" not in settled["dflash_config"]


def test_contradicting_causality_is_warned_of(caplog):
    """One builder of JetSpec's recipes stamps `is_causal: false` beside its own key: it was settled in silence."""
    contradicting = zlab({"causal": True}, is_causal=False)
    read(contradicting)
    assert "is_causal=False and dflash_config.causal=True contradict each other" in caplog.text
    caplog.clear()
    assert read(contradicting, is_causal=True).is_causal is True and not caplog.text
    read(zlab({"causal": True}, is_causal=True))
    assert not caplog.text


def test_training_keys_survive_saving():
    written = json.loads(read(zlab({"enable_thinking": False}, num_anchors=512)).to_json_string())
    assert written["num_anchors"] == 512 and written["dflash_config"]["enable_thinking"] is False


def test_rotary_frequencies_stay_in_fp32():
    """The context's table too, and through a change of dtype."""
    draft = DFlashDraftModel(read(LAYOUTS["MiMo"].config))
    for table, theta in ((draft.rotary_emb, 10000.0), (draft.context_rotary_emb, 640.0)):
        expected = torch.tensor([theta ** (-2.0 * i / 4) for i in range(2)])
        draft.to(torch.bfloat16)
        assert table.inv_freq.dtype == torch.float32
        torch.testing.assert_close(table.inv_freq, expected)
