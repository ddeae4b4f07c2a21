"""
Every layout that is published loads and drafts what an element-wise reference drafts. The checkpoints are written here
from the documented keys and tensor names, never by the package's own writer.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.layouts import (
    DOMINO,
    FULL,
    LAYOUTS,
    MIXED,
    MUSE_FILE,
    SLIDING,
    automodel_dspark,
    renamed,
    speculators,
    write,
    zlab,
)
from support.pairs import make_target
from support.reference import draft_hidden_states, draft_tokens
from support.scripted_draft import scripted
from transformers import AutoConfig, AutoModel

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.hub.check import check
from dflash_hf.modeling.drafting_dflash import Drafter
from dflash_hf.modeling.target_dflash import CACHE_NAME, FeatureTap


PUBLISHED = Path(__file__).parents[1] / "fixtures" / "published"


def drafted(draft, target, features, anchor):
    """A block of a drafter by the way that `generate` takes."""
    drafter = Drafter(draft, target)
    drafter.absorb(features[None])
    drafter.open([0], len(features), torch.zeros(1, 1, dtype=torch.long))
    return drafter.block(torch.tensor([anchor]), []).tokens[0]


@pytest.fixture(scope="module")
def big_target():
    return make_target(num_hidden_layers=8)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_layout_drafts_as_the_reference(tmp_path, layout, big_target):
    """In double precision: how far two ways of computing part in single depends on the processor."""
    truth, tensors = write(tmp_path / "draft", layout, shards=1 + len(layout) % 2)
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float64)
    config = draft.config
    assert config.target_layer_ids == truth["target_layer_ids"]
    assert (config.block_size, config.mask_token_id) == (5, 95)
    assert {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    random = torch.Generator().manual_seed(1)
    features, anchor = torch.randn(9, 96, generator=random, dtype=torch.float64), 17
    noise = big_target.get_input_embeddings().weight[torch.tensor([anchor, 95, 95, 95, 95])].double()
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    expected = draft_hidden_states(tensors, truth, features, noise)
    for attn in ("sdpa", "eager"):
        draft.set_attn_implementation(attn)
        actual = draft(noise_embeds=noise[None], context_hidden_states=features[None]).last_hidden_state[0]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    block, head = drafted(draft, big_target, features, anchor), big_target.lm_head.weight.double()
    embedding = big_target.get_input_embeddings().weight.double()
    drafts = draft_tokens(tensors, truth, expected, head, anchor, embedding)
    assert block.tolist() == [anchor, *drafts] and len(drafts) == draft.config.block_tokens - 1
    plain = {key: value for key, value in truth.items() if key not in ("markov_rank", "gru_hidden_dim")}
    alone = draft_tokens(tensors, plain, expected, head, anchor)
    assert len(plain) == len(truth) or alone[: len(drafts)] != drafts, "the head changed nothing: nothing was tested"


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
    truth = LAYOUTS[layout][1]
    dflash2, dspark = "conv_kernel_size" in truth, truth.keys() & {"markov_rank", "confidence"}
    dspark = dspark or ("anchor_first" in truth and "gru_hidden_dim" not in truth)
    name = "Qwen3DSparkModel" if dspark else "DFlash2DraftModel" if dflash2 else "DFlashDraftModel"
    assert written["architectures"] == [name]
    if dspark:
        assert written["sample_from_anchor"] == ("anchor_first" in truth) and "num_anchors" in written
    assert written["model_type"] == "qwen3" and "source_layout" not in written


@pytest.mark.parametrize("ids", [[-1, 2, 3], [3, -1, 0]], ids=str)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "DSpark" in name])
@torch.no_grad()
def test_dspark_reads_the_embedding(tmp_path, layout, ids):
    """-1 was looked up among the layers: DeepSpec's own drafters, which read the embedding, never drafted."""
    write(tmp_path, layout)
    text = (tmp_path / "config.json").read_text()
    for said, new in (([0, 2, 3], ids), ([1, 3, 4], [i + 1 for i in ids])):
        text = text.replace(json.dumps(said), json.dumps(new))
    (tmp_path / "config.json").write_text(text)
    target, draft = make_target(), DFlashDraftModel.from_pretrained(tmp_path)
    assert draft.config.target_layer_ids == ids
    draft.decoding_config.block_size, prompt = draft.config.block_tokens, torch.tensor([[5, 9, 17, 33, 5, 9]])
    expected = target.generate(prompt, max_new_tokens=15, do_sample=False)
    for drafter in (draft, scripted(draft, expected)):
        output = target.generate(
            prompt, max_new_tokens=15, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, expected)
        lengths = output.acceptance_lengths[0]
        assert lengths and min(lengths[:-1]) < draft.config.block_tokens
    assert max(lengths) > 1


def said(file):
    """What automatic classes go by."""
    return str([file.get(key) for key in ("architectures", "model_type", "auto_map", "speculators_model_type")])


@pytest.mark.parametrize("layout", {said(file): layout for layout, (file, *_) in LAYOUTS.items()}.values())
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
        expected = native(**inputs, **{CACHE_NAME: cache}, position_ids=torch.arange(14)[None]).last_hidden_state
        torch.testing.assert_close(wider(**inputs).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


TABLES = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
REFUSED = {
    **{
        f"Domino without {key}": (
            zlab(nested={"projector_type": "domino", "shift_label": True, **DOMINO, key: None}),
            f"{key} is missing from a Domino drafter's dflash_config: trainers have different defaults",
        )
        for key in (*DOMINO, "shift_label")
    },
    "a Markov head of an unknown kind": (
        automodel_dspark(markov_head_type="cubic"),
        "markov_head_type='cubic' must be one of vanilla, gated, rnn",
    ),
    "a confidence head without its codebook": (
        automodel_dspark(markov_rank=0, enable_confidence_head=True, confidence_head_with_markov=True),
        "confidence_head_with_markov=True reads a codebook, but markov_rank=None",
    ),
    "DSpark inside its target": (
        {**automodel_dspark(), "dspark_markov_rank": 256},
        "dspark_markov_rank=256 belongs to a DSpark drafter inside its target's checkpoint",
    ),
    "LiLiCorr": (zlab(nested={"projector_type": "lilicorr"}), "lilicorr is a LiLiCorr drafter.*lattice"),
    "LiLiCorrDraftModel": (zlab(architectures=["LiLiCorrDraftModel"]), "is a LiLiCorr drafter"),
    "causality that contradicts itself": (zlab(nested={"causal_head": True}, is_causal=False), "causal_head=True"),
    "causality that is no flag": (zlab(nested={"causal_head": "all"}), "is_causal='all'"),
    "anchor first, if that is a flag": (zlab(nested={"sample_from_anchor": "yes"}), "sample_from_anchor='yes'"),
    "Markov head of who knows what": (zlab(markov_rank=256), "markov_rank=256 without sample_from_anchor"),
    "Laguna": (zlab(architectures=["DFlashLagunaForCausalLM"]), "Laguna"),
    "XPress": (
        zlab(xpress_rank=8, xpress_mlp_ratio=2),
        "xpress_rank=8 is a XPress drafter.*its drafts are rewritten by a refiner",
    ),
    "Qwen3XPressModel": (zlab(architectures=["Qwen3XPressModel"]), "is a XPress drafter"),
    "DFly": (zlab(architectures=["Qwen3DFlyModel"]), "Qwen3DFlyModel is a DFly drafter"),
    "DFlyDraftModel": (zlab(architectures=["DFlyDraftModel"]), "DFlyDraftModel is a DFly drafter"),
    "DFlare": (zlab(model_arch="dflare"), "dflare is a DFlare drafter"),
    "speculators, DFly": (speculators("dfly"), "dfly is a DFly drafter"),
    "speculators, Domino": (speculators("domino"), "speculators_model_type='domino' is not a DFlash drafter"),
    "speculators, DFlare": (speculators("dflare"), "dflare is a DFlare drafter"),
    "Beam": (zlab(architectures=["DFlash2BeamDraftModel"], nested={"selector_rank": 6}), "is a Beam drafter"),
    "Gemma4DSparkModel": (
        automodel_dspark(architectures=["Gemma4DSparkModel"], model_type="gemma4_text"),
        "is a Gemma4 drafter.*its layers are those of Gemma 4; serve it with vLLM or mlx-vlm",
    ),
    "TreeFlash": (zlab(architectures=["TreeFlashDraftModel"]), "is a TreeFlash drafter.*its own `spec_generate`"),
    "TreeFlash by its key": (zlab(treeflash_config={"ar_approximation": "swiglu"}), "is a TreeFlash drafter"),
    **{
        f"AdaFlash by {key}": (zlab(nested={key: True}), f"{key}=True is a AdaFlash drafter.*is a plain drafter")
        for key in ("thresh_head_direct_len", "use_thresh_head_two_model", "use_prob_head")
    },
    "DeLS-Spec": (zlab(architectures=["DeLSSpecDraftModel"]), "is a DeLS-Spec drafter.*with its own code"),
    "DeLS-Spec by its type": (zlab(nested={"projector_type": "dels_spec"}), "is a DeLS-Spec drafter"),
    "a norm of Gemma": (zlab(use_gemma_norm=True), "use_gemma_norm"),
    "tables that differ": (
        zlab(layer_types=MIXED, sliding_window=4, use_sliding_window=True, rope_parameters=TABLES),
        "rope_parameters=.* differ between layer types",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_heads_are_refused_with_the_reason(tmp_path, name):
    """TreeFlash, AdaFlash and DeLS-Spec were loaded as plain drafters if no tensor was in the way."""
    file, reason = REFUSED[name]
    write(tmp_path / "draft", "z-lab v1")
    (tmp_path / "draft" / "config.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=reason) as error:
        DFlashDraftModel.from_pretrained(tmp_path / "draft")
    assert str(tmp_path / "draft") in str(error.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("prefix_gru.weight_ih_l0", "unexpected keys"),
        ("markov_w1.weight", "unexpected keys"),
        ("confidence_head.proj.bias", "unexpected keys"),
        ("lilicorr.slot_embedding", "which is refused"),
        ("refiner_head.proj.weight", "which is refused"),
        ("layer_fusion.weight", "which is refused"),
        ("hidden_correction.proj.weight", "which is refused"),
        ("ar_approximation.ug.weight", "which is refused: an MLP corrects"),
        ("thresh_head_two_model.fc.weight", "which is refused: a head chooses the length of its blocks"),
        ("hidden_dim_adapter.proj.weight", "which is refused: its adapter to the target's width is random"),
    ],
)
def test_tensors_of_other_heads_are_refused_with_the_reason(tmp_path, name, reason):
    _, tensors = write(tmp_path / "draft", "z-lab v1")
    save_file({**tensors, name: torch.zeros(3)}, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=reason) as error:
        DFlashDraftModel.from_pretrained(tmp_path / "draft")
    assert name in str(error.value) and "model.safetensors" in str(error.value)


def test_jetspec_plus_plus_is_refused_by_its_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(zlab(nested={"causal_head": True})))
    save_file({"weight": torch.zeros(1)}, tmp_path / "converter.safetensors")
    with pytest.raises(ValueError, match=r"is a JetSpec\+\+ drafter, which is not supported"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("said", [True, False])
@torch.no_grad()
def test_an_embedding_of_its_own(tmp_path, said, big_target):
    """Nemotron's drafters have one: leaving it out, as the copies of other layouts, would be another model."""
    truth, tensors = write(tmp_path / "draft", "z-lab v1")
    table = torch.randn(96, 32, generator=torch.Generator().manual_seed(2))
    own = {**tensors, "embed_tokens.weight": table}
    save_file(own, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    if said:
        file = zlab(
            dflash_config={"mask_token_id": 95, "sample_from_anchor": False},
            eagle_aux_hidden_state_layer_ids=[1, 3, 4],
            has_embed_tokens=True,
            has_lm_head=False,
        )
        (tmp_path / "draft" / "config.json").write_text(json.dumps(file))
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float64)
    draft.save_pretrained(tmp_path / "again")
    features, anchor = torch.randn(9, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64), 17
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    expected = draft_hidden_states(tensors, truth, features, table[[anchor, 95, 95, 95, 95]].double())
    tokens = [anchor, *draft_tokens(tensors, truth, expected, big_target.lm_head.weight.double(), anchor)]
    for model in (draft, DFlashDraftModel.from_pretrained(tmp_path / "again")):
        assert model.config.has_embed_tokens and torch.equal(model.embed_tokens.weight, table.double())
        assert drafted(model, big_target, features, anchor).tolist() == tokens
    assert json.loads((tmp_path / "again" / "config.json").read_text())["has_embed_tokens"] is True
    found = [(one.key, *one.engines) for one in check(tmp_path / "again", ["vllm", "sglang"])]
    assert not [one for one in check(tmp_path / "again", ["vllm"]) if one.severity == "error"]  # it uses the table
    assert ("embed_tokens.weight", "sglang") in found
    own = {**own, "embed_tokens.weight": table[:90].clone()}
    save_file(own, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has shape \[90, 32\] instead of \[96, 32\]"):
        DFlashDraftModel.from_pretrained(tmp_path / "draft")


def rotated(x, theta, pairs):
    """Element by element: each pair of channels turned by its angle, at positions 0, 1, ..., of `x` `[T, d]`."""
    out = x.clone()
    for position in range(len(x)):
        for i, (a, b) in enumerate(pairs):
            angle = torch.tensor(position * theta ** (-2 * i / x.shape[1]), dtype=x.dtype)
            out[position, a] = x[position, a] * angle.cos() - x[position, b] * angle.sin()
            out[position, b] = x[position, b] * angle.cos() + x[position, a] * angle.sin()
    return out


@pytest.mark.parametrize("place", ["top", "nested"])
@torch.no_grad()
def test_rotary_pairs_side_by_side(tmp_path, place):
    """Liquid's: after the rows are permuted, every score is what the file's own rule gives."""
    _, tensors = write(tmp_path / "draft", "z-lab v1")
    said = {"rope_is_neox_style": False}
    (tmp_path / "draft" / "config.json").write_text(
        json.dumps(zlab(**said) if place == "top" else zlab(nested=said)),
    )
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float64)
    draft.save_pretrained(tmp_path / "again")
    assert "rope_is_neox_style" not in (tmp_path / "again" / "config.json").read_text()
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def scores(weights, pairs):
        def heads(name):
            rows = (x @ weights[f"layers.1.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 8))
            normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
            return normed * weights[f"layers.1.self_attn.{name}_norm.weight"]

        query, key = heads("q")[:, 0], heads("k")[:, 0]
        return rotated(query, 1e4, pairs) @ rotated(key, 1e4, pairs).T

    expected = scores(tensors, [(0, 1), (2, 3), (4, 5), (6, 7)])
    for model in (draft, DFlashDraftModel.from_pretrained(tmp_path / "again")):
        torch.testing.assert_close(scores(model.state_dict(), [(0, 4), (1, 5), (2, 6), (3, 7)]), expected)
    assert ("rope_is_neox_style", "warning") in {(one.key, one.severity) for one in check(tmp_path / "draft")}


@pytest.mark.parametrize("compiled", [None, "eager"])
def test_the_embedding_as_a_feature(compiled, big_target):
    """Layer 0 of those who count the embedding: what the first layer reads."""
    file = zlab(dflash_config={"mask_token_id": 95}, aux_hidden_state_layer_ids=[0, 3, 5], num_target_layers=8)
    config = DFlashDraftConfig.from_dict(file)
    assert config.target_layer_ids == [-1, 2, 4]
    deepspec = {**automodel_dspark(), "target_layer_ids": [-1, 2, 4], "num_target_layers": 8}
    assert DFlashDraftConfig.from_dict(deepspec).target_layer_ids == [-1, 2, 4]
    ids = torch.randint(0, 95, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), FeatureTap(big_target, [-1, 2, 4]) as tap, tap.running():
        states = big_target(ids, output_hidden_states=True).hidden_states
        assert torch.equal(tap.take(), torch.cat([states[0], states[3], states[5]], dim=-1))
    draft = DFlashDraftModel(config).eval()
    draft.decoding_config.block_size, draft.decoding_config.compile = 5, compiled
    plain = big_target.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(big_target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=draft), plain)


def test_a_rotary_table_of_layers_that_are_not_there():
    """A target's configuration has one for each of its layer types; a drafter of one type reads one."""
    for kinds, kind in ((FULL, "full_attention"), (SLIDING, "sliding_attention")):
        file = zlab(layer_types=kinds, sliding_window=4, use_sliding_window=True, rope_parameters=TABLES)
        assert DFlashDraftConfig.from_dict(file).rope_parameters == TABLES[kind]


def test_copies_of_the_target_are_not_loaded(tmp_path):
    write(tmp_path / "draft", "speculators, reduced vocabulary")
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    assert not draft.config.has_embed_tokens and "embed_tokens.weight" not in draft.state_dict()


def test_damage_is_named(tmp_path):
    folder = tmp_path / "draft"
    _, tensors = write(folder, "speculators, reduced vocabulary")
    with pytest.raises(ValueError, match="d2t maps draft tokens"):
        broken = {**tensors, "d2t": tensors["d2t"] + 90}
        save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
        DFlashDraftModel.from_pretrained(folder)
    with pytest.raises(
        ValueError, match=r"d2t maps draft tokens \[2, 3\] to the same id \d+ of the target \(1 of 24 too"
    ):
        broken = {**tensors, "d2t": tensors["d2t"].clone()}
        broken["d2t"][3] = broken["d2t"][2] - 1
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


def test_a_contradiction_is_told(caplog):
    """One builder of JetSpec's recipes stamps `is_causal: false` beside its own key: it was settled in silence."""
    both = zlab(nested={"causal": True}, is_causal=False)
    DFlashDraftConfig.from_dict(both)
    assert "is_causal=False and dflash_config.causal=True contradict each other" in caplog.text
    caplog.clear()
    assert DFlashDraftConfig.from_dict(both, is_causal=True).is_causal is True and not caplog.text
    DFlashDraftConfig.from_dict(zlab(nested={"causal": True}, is_causal=True))
    assert not caplog.text


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


def test_a_null_in_dflash_config_hides_nothing():
    """A Domino drafter whose top level has the width was refused, and ids counted from 1 were not read."""
    nested = {"projector_type": "domino", "shift_label": True, **DOMINO}
    config = DFlashDraftConfig.from_dict(zlab(nested={**nested, "emb_dim": None}, emb_dim=DOMINO["emb_dim"]))
    assert config.to_dict() == DFlashDraftConfig.from_dict(zlab(nested=nested)).to_dict()
    config = DFlashDraftConfig.from_dict(zlab(nested={"target_layer_ids": None}, aux_hidden_state_layer_ids=[1, 3, 4]))
    assert config.target_layer_ids == [0, 2, 3]


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
