"""Drafters as llama.cpp's files, and what llama.cpp itself makes of them."""

import copy
import json
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file
from support import layouts
from support.llama_cpp import complete, our_lengths, serve, write_target
from support.pairs import make_draft, make_draft2, make_target
from support.tiny_chat import save_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import DFlashDraftModel
from dflash_hf.cli import main
from dflash_hf.conversion import gguf_read
from dflash_hf.conversion.convert import convert
from dflash_hf.conversion.gguf_names import gguf_files_in, gguf_in
from dflash_hf.conversion.gguf_read import unpack_gguf
from dflash_hf.conversion.gguf_write import write_gguf
from dflash_hf.conversion.llama_cpp_limits import llama_cpp_limits
from dflash_hf.data.template import digests_of_tokenizer
from dflash_hf.hub.check import check
from dflash_hf.pairs.draft_vocabulary import set_draft_vocabulary


gguf = pytest.importorskip("gguf")
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "is_causal": False}
HALF = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 4.0}
SELECTOR = {"selector_rank": 6, "selector_top_k": 5}
CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 4}
MARKOV = {"markov_rank": 6, "markov_head_type": "vanilla"}
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
DRAFTERS = {
    "v1": {},
    "reduced vocabulary": {"draft_vocab_size": 9},
    "sliding": SLIDING,
    "sliding and full": {**HALF, "is_causal": False},
    "causal": {"is_causal": True},
    "selector": SELECTOR,
    "convolution": CONVOLUTION,
    "DFlash 2": {**SELECTOR, **CONVOLUTION},
    "DFlash 2, reduced vocabulary": {**SELECTOR, **CONVOLUTION, "draft_vocab_size": 9},
    "Markov head": MARKOV,
    "Markov head, anchor first": {**MARKOV, "sample_from_anchor": True},
    "Markov head, reduced vocabulary": {**MARKOV, "sample_from_anchor": True, "draft_vocab_size": 9},
    "Markov head with a confidence": {**MARKOV, **CONFIDENCE, "sample_from_anchor": True},
    "logits": {**SELECTOR, "output_multiplier": 0.3, "final_logit_softcapping": 2.0},
    "yarn": {"rope_parameters": {"rope_type": "yarn", **ROPE}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}},
    "half rotated": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "scales and sinks": {
        **{"input_embedding_scale": 2.0, "attention_value_scale": 0.6, "attention_sink_bias": True},
    },
    "own mask": {"own_mask_embedding": True},
    "own embedding": {"has_embed_tokens": True},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
}
LIMITS = {
    "attention_bias": {"attention_bias": True},
    "is_causal": HALF,
    "v_head_dim": {"v_head_dim": 6},
    "target_hidden_size": {"target_hidden_size": 64},
    "backbone_rotary_base": {"backbone_rotary_base": 7.0},
    "hidden_act": {"hidden_act": "relu"},
    "rope_parameters": {"rope_parameters": {"rope_type": "dynamic", **ROPE}},
    "selector_top_k": {"selector_rank": 6, "selector_top_k": 6},
    "target_layer_ids": {"target_layer_ids": [0, 2, 3]},
    "markov_head_type": {**MARKOV, "markov_head_type": "gated"},
    "sample_from_anchor": {"sample_from_anchor": True},
    "confidence_head_with_markov": {**MARKOV, "enable_confidence_head": True},
}


@pytest.fixture(scope="module")
def tiny():
    return make_target(vocab_size=16)  # so few that random drafts are right now and then


@pytest.fixture(scope="module")
def tiny_file(tiny, tmp_path_factory):
    return write_target(tiny, tmp_path_factory.mktemp("target") / "target.gguf")


@pytest.fixture(autouse=True)
def embedding_of_a_tiny_file(tiny, monkeypatch):
    """transformers would not read it: its tokenizer is none."""
    weights = tiny.get_input_embeddings().weight, tiny.get_output_embeddings().weight
    monkeypatch.setattr("dflash_hf.conversion.gguf_write._embedding_and_head", lambda *_: weights)


def made(target, name):
    """A drafter whose every part does something."""
    parts = {"target_layer_ids": [0, 1, 2], **DRAFTERS[name]}
    plain = {"conv_kernel_size": None, "conv_group_size": None, "selector_rank": None, "selector_top_k": None}
    draft = make_draft2(target, **{**plain, **parts})
    if draft.config.has_own_lm_head:
        set_draft_vocabulary(draft, target, torch.arange(target.config.vocab_size) % 3)
    with torch.no_grad():
        if draft.config.own_mask_embedding:
            draft.mask_embedding.normal_(0, 0.5)
        for key, parameter in draft.named_parameters():
            if key.startswith(("markov_head.", "confidence_head.")):
                parameter += 0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(key)))
        for parameter in (layer.self_attn.attention_sink_bias for layer in draft.layers if "sinks" in name):
            parameter.uniform_(-1, 2)
    return draft


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_survives_the_round_trip(name, tiny, tiny_file, tmp_path):
    made(tiny, name).save_pretrained(tmp_path / "draft")
    file = tmp_path / "dflash-tiny.gguf"
    convert(tmp_path / "draft", file, to="gguf", target=tiny_file)
    convert(file, tmp_path / "back")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("draft", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    before, after = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("draft", "back"))
    assert before == after


@pytest.mark.parametrize(
    ("parts", "times"),
    [({}, 0), ({"own_mask_embedding": True}, 1), ({"has_embed_tokens": True}, 1)]
    + [({"has_embed_tokens": True, "own_mask_embedding": True, "draft_vocab_size": 9}, 0)],
    ids=str,
)
def test_target_is_loaded_once_if_it_is_needed(parts, times, tiny, tiny_file, tmp_path, monkeypatch):
    """For a table that the drafter lacks; it was loaded twice for one, and for a drafter that has both."""
    loaded = []
    weights = (tiny.get_input_embeddings().weight, tiny.get_output_embeddings().weight)
    monkeypatch.setattr("dflash_hf.conversion.gguf_write._embedding_and_head", lambda *_: loaded.append(1) or weights)
    write_gguf(make_draft(tiny, target_layer_ids=[0, 1, 2], **parts), tmp_path / "dflash.gguf", tiny_file)
    assert len(loaded) == times


def limits_of_head(meaning):
    """llama.cpp has vanilla Markov heads, whose confidence reads the token before, and no GRU."""
    if "gru_hidden_dim" in meaning:
        return {"gru_hidden_dim"}
    kind = meaning.get("markov_head_type", "vanilla") if "markov_rank" in meaning else None
    confidence = meaning.get("confidence")  # its width
    keys = set()
    if kind not in (None, "vanilla") or (kind is None and confidence):
        keys.add("markov_head_type")
    if confidence == layouts.SIZES["hidden_size"]:
        keys.add("confidence_head_with_markov")
    if kind is None and not confidence and "anchor_first" in meaning:
        keys.add("sample_from_anchor")
    return keys


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Targets of four and of eight layers."""
    folder = tmp_path_factory.mktemp("targets")
    return {n: write_target(make_target(num_hidden_layers=n), folder / f"{n}.gguf") for n in (4, 8)}


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_every_layout_converts_or_is_refused(layout, files, tmp_path):
    """Converted, or refused for a limit that `check` names; what llama.cpp's own converter does not know included."""
    layouts.write(tmp_path / "draft", layout)
    file = files[8 if "default rule" in layout else 4]
    keys = {finding.key for finding in check(tmp_path / "draft", ["llama.cpp"])}
    expected = {
        "z-lab mixed layers": {"is_causal"},
        "z-lab mixed layers, without the flag that Qwen3 asks for": {"is_causal"},
        "speculators, sliding": {"is_causal"},
        "Gemma-4": {"is_causal"},
        "gpt-oss": {"attention_bias"},
        "MiMo": {"v_head_dim", "backbone_rotary_base"},
    }
    assert keys == expected.get(layout, set()) | limits_of_head(layouts.LAYOUTS[layout][1])
    if keys:
        with pytest.raises(ValueError, match=f"cannot be written for llama.cpp: {sorted(keys)[-1]}"):
            convert(tmp_path / "draft", tmp_path / "dflash.gguf", to="gguf", target=file)
        return
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    if "default rule" not in layout:  # these files read the last layer too
        assert {finding.key for finding in check(tmp_path / "draft", ["llama.cpp"], file)} == {"target_layer_ids"}
        draft.config.target_layer_ids = [0, 1, 2]
    write_gguf(draft, tmp_path / "dflash.gguf", file)
    back = DFlashDraftModel.from_pretrained(unpack_gguf(tmp_path / "dflash.gguf", tmp_path / "back"))
    tensors = draft.state_dict()
    tensors_back = back.state_dict()
    assert all(torch.equal(tensors[name], tensors_back[name]) for name in tensors)
    assert tensors.keys() == tensors_back.keys()
    keys = gguf.GGUFReader(tmp_path / "dflash.gguf").fields
    assert keys["dflash.target_layers"].contents() == [i + 1 for i in draft.config.target_layer_ids]
    assert keys["tokenizer.ggml.mask_token_id"].contents() == 95


@pytest.mark.parametrize("key", LIMITS)
def test_limit_of_llama_cpp_is_refused(key, tiny, tiny_file, tmp_path, capsys):
    draft = make_draft(tiny, **{"target_layer_ids": [0, 1, 2], **LIMITS[key]})
    draft.save_pretrained(tmp_path / "draft")
    for finding in check(tmp_path / "draft", ["llama.cpp"], tiny_file):
        assert (finding.severity, finding.engines, finding.key) == ("error", ("llama.cpp",), key)
    assert main(["check", str(tmp_path / "draft"), "--engine", "llama.cpp", "--target", str(tiny_file)]) == 1
    out = tmp_path / "dflash.gguf"
    assert main(["convert", str(tmp_path / "draft"), str(out), "--to", "gguf", "--target", str(tiny_file)]) == 1
    assert f"cannot be written for llama.cpp: {key}: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_quantised_drafter_is_refused(tiny):
    config = make_draft(tiny, target_layer_ids=[0, 1, 2]).config
    config.quantization_config = {"quant_method": "fp8"}
    assert [key for key, _ in llama_cpp_limits(config)] == ["quantization_config"]


def test_other_targets_are_refused(tiny, tiny_file, tmp_path, monkeypatch):
    draft = make_draft(tiny, target_layer_ids=[0, 1, 2])
    draft.save_pretrained(tmp_path / "draft")
    of_file = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 16}
    assert (
        check(tmp_path / "draft", ["llama.cpp"], tiny_file) == check(tmp_path / "draft", ["llama.cpp"], of_file) == []
    )
    for change, key in (
        ({"model_type": "qwen2"}, "model_type"),
        ({"hidden_size": 64}, "target_hidden_size"),
        ({"num_hidden_layers": 5}, "num_target_layers"),
        ({"vocab_size": 17}, "vocab_size"),
    ):
        findings = check(tmp_path / "draft", ["llama.cpp"], {**of_file, **change})
        assert [finding.key for finding in findings] == [key]
        with monkeypatch.context() as other, pytest.raises(ValueError, match=f"for llama.cpp: {key}: "):
            other.setattr(
                "dflash_hf.conversion.gguf_write.target_config", lambda *_, change=change: {**of_file, **change}
            )
            convert(tmp_path / "draft", tmp_path / "dflash.gguf", to="gguf", target=tiny_file)
        assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    for kind in ("llama", "qwen3_5_text", "qwen35moe", "gpt_oss", "gpt-oss", "lfm2", "gemma4_text", "nemotron_h"):
        assert not check(tmp_path / "draft", ["llama.cpp"], {**of_file, "model_type": kind})


@pytest.fixture
def folder(tiny, tmp_path):
    make_draft(tiny, target_layer_ids=[0, 1, 2]).save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_file_is_whole_or_absent(error, folder, tiny_file, tmp_path, monkeypatch):
    out = tmp_path / "dflash.gguf"

    def fail(self):
        raise error("No space left on device")

    with monkeypatch.context() as broken, pytest.raises(error):
        broken.setattr(gguf.GGUFWriter, "write_tensors_to_file", fail)
        convert(folder, out, to="gguf", target=tiny_file)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    convert(folder, out, to="gguf", target=tiny_file)
    before = out.read_bytes()
    with pytest.raises(FileExistsError, match="name a new file"):
        convert(folder, out, to="gguf", target=tiny_file)
    assert out.read_bytes() == before


def write_bare(path, arch):
    """A file of an architecture, without tensors."""
    writer = gguf.GGUFWriter(path, arch)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_wrong_files_are_named(folder, tiny_file, tmp_path):
    """Cut off anywhere; another model's; a fork's, which was taken for a target; without sizes (a `KeyError`)."""
    whole = tmp_path / "dflash.gguf"
    cut = tmp_path / "cut.gguf"
    back = tmp_path / "back"
    convert(folder, whole, to="gguf", target=tiny_file)
    new = {"src": folder, "dst": tmp_path / "new.gguf", "to": "gguf"}
    size = whole.stat().st_size
    for length in (0, 3, 60, 400, size // 2, size - 1):
        cut.write_bytes(whole.read_bytes()[:length])
        for options in ({"src": cut, "dst": back}, {**new, "target": cut}):
            with pytest.raises(ValueError, match="cut.gguf is not a complete GGUF file"):
                convert(**options)
        assert {finding.key for finding in check(cut, ["llama.cpp"])} == {"weights"}
    bare = tmp_path / "bare.gguf"
    fork = tmp_path / "fork.gguf"
    write_bare(bare, "dflash")
    write_bare(fork, "deepseek4-dflash-draft")
    (finding,) = check(fork, ["llama.cpp"])
    assert "a model of llama.cpp's architecture 'deepseek4-dflash-draft'" in finding.message
    for options, error, message in (
        ({"src": tiny_file, "dst": back}, ValueError, "target.gguf is not a DFlash drafter but a model of .*'qwen3'"),
        ({"src": tmp_path / "none.gguf", "dst": back}, FileNotFoundError, "there is no such file"),
        ({"src": bare, "dst": back}, ValueError, "bare.gguf is incomplete: it has no .*block_count"),
        ({"src": fork, "dst": back}, ValueError, "not a DFlash drafter but a model of .*'deepseek4-dflash-draft'"),
        ({**new, "target": whole}, ValueError, "dflash.gguf is a drafter; name the GGUF file of the target"),
        ({**new, "target": fork}, ValueError, "fork.gguf is a drafter; name the GGUF file of the target"),
    ):
        with pytest.raises(error, match=message):
            convert(**options)
    assert not back.exists() and not new["dst"].exists()


def test_file_without_its_mask_embedding_is_named(tiny, tiny_file, tmp_path, monkeypatch):
    """It was a `KeyError`."""
    made(tiny, "own mask").save_pretrained(tmp_path / "draft")
    file = tmp_path / "dflash.gguf"
    convert(tmp_path / "draft", file, to="gguf", target=tiny_file)
    reader = gguf_read.open_gguf(file)
    reader.tensors = [tensor for tensor in reader.tensors if tensor.name != "token_embd.weight"]
    monkeypatch.setattr(gguf_read, "open_gguf", lambda file: reader)
    with pytest.raises(ValueError, match="dflash.gguf is damaged: it has no token_embd.weight"):
        unpack_gguf(file, tmp_path / "back")


def test_replaced_file_is_read_again(folder, tiny_file, tmp_path):
    """As archives unpack them; the weights of the first were converted again."""
    for number in (0.0, 1.0):
        draft = DFlashDraftModel.from_pretrained(folder)
        with torch.no_grad():
            draft.norm.weight.fill_(number)
        draft.save_pretrained(tmp_path / "filled")
        convert(tmp_path / "filled", tmp_path / "new.gguf", to="gguf", target=tiny_file)
        os.utime(tmp_path / "new.gguf", (1, 1))
        os.replace(tmp_path / "new.gguf", tmp_path / "dflash.gguf")
        unpacked = unpack_gguf(tmp_path / "dflash.gguf", tmp_path / f"back {number}")
        assert (load_file(unpacked / "model.safetensors")["norm.weight"] == number).all()


def test_gguf_suffix_chooses_the_file_format(folder, tiny_file, tmp_path, capsys):
    """`--to gguf` was required besides; and the file was reported as a folder."""
    out = tmp_path / "dflash.gguf"
    assert main(["convert", str(folder), str(out), "--target", str(tiny_file)]) == 0
    assert main(["check", str(out)]) == 0
    assert capsys.readouterr().out == f"Wrote {out} (gguf).\nNo findings.\nThis file is read by llama.cpp.\n"


def test_missing_gguf_package_is_named(folder, tiny_file, tmp_path, monkeypatch):
    """The file was reported as incomplete: "download it again"."""
    convert(folder, tmp_path / "dflash.gguf", to="gguf", target=tiny_file)
    monkeypatch.setitem(sys.modules, "gguf", None)
    (finding,) = check(tmp_path / "dflash.gguf", ["llama.cpp"])
    assert finding.message.startswith("GGUF files need `gguf`: run `pip install")
    with pytest.raises(ImportError, match="GGUF files need `gguf`"):
        check(folder, ["llama.cpp"], target=tiny_file)


@pytest.mark.parametrize("dtype, sign", {"float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}.items())
def test_smaller_dtypes_round(dtype, sign, tiny, folder, tiny_file, tmp_path):
    words = [str(tmp_path / "dflash.gguf"), "--to", "gguf", "--target", str(tiny_file), "--dtype", dtype]
    assert main(["convert", str(folder), *words]) == 0
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "dflash.gguf").tensors}
    assert there["fc.weight"].tensor_type.name == sign and there["enc.output_norm.weight"].tensor_type.name == "F32"
    # 48 numbers are no whole number of Q8_0's blocks of 32.
    assert there["blk.0.ffn_down.weight"].tensor_type.name == ("F16" if dtype == "q8_0" else sign)
    back = DFlashDraftModel.from_pretrained(convert(tmp_path / "dflash.gguf", tmp_path / "back"), dtype=torch.float32)
    original = DFlashDraftModel.from_pretrained(folder).state_dict()
    for name, tensor in back.state_dict().items():
        torch.testing.assert_close(tensor, original[name], atol=0.01 * float(original[name].abs().max()), rtol=0)


def test_unwritable_numbers_are_refused(tiny, folder, tiny_file, tmp_path):
    draft = DFlashDraftModel.from_pretrained(folder)
    draft.fc.weight.data[0, 0] = 1e5
    with pytest.raises(ValueError, match="fc.weight has values that overflow float16; use .dtype='bfloat16'."):
        write_gguf(draft, tmp_path / "dflash.gguf", tiny_file, "float16")
    with pytest.raises(ValueError, match="dflash.gguf cannot be written in float64; use `dtype=.float32.` or"):
        write_gguf(draft.double(), tmp_path / "dflash.gguf", tiny_file)


@pytest.fixture
def saved(tmp_path):
    """A target's folder with a tokenizer, and a drafter for it."""
    folder = save_target(tmp_path / "target", family="qwen3")
    return folder, make_draft(AutoModelForCausalLM.from_pretrained(folder), target_layer_ids=[0, 1, 2])


def test_tokenizer_of_a_folder_is_written(saved, tmp_path):
    """A byte-level one by `gguf`; of one that is too long, or of none: one line, and no file."""
    folder, draft = saved
    file = tmp_path / "dflash.gguf"
    write_gguf(draft, file, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    length = len(tokenizer)
    written = gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"].contents()
    assert written[:length] == texts and len(written) == draft.config.vocab_size
    file.unlink()
    config = (folder / "config.json").read_text()
    short = copy.deepcopy(draft)
    short.config.vocab_size = length - 1
    short.config.mask_token_id = 5
    (folder / "config.json").write_text(json.dumps({**json.loads(config), "vocab_size": length - 1}))
    with pytest.raises(ValueError, match=f"a tokenizer of {length} tokens, but .* belongs to another target"):
        write_gguf(short, file, folder)
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text('{"half')
    for _ in range(2):
        with pytest.raises(ValueError, match="no tokenizer.json that `gguf` can"):
            write_gguf(draft, file, folder)
        [path.unlink() for path in folder.glob("*token*")]
    assert not file.exists()


def test_tokenizer_of_another_target_is_refused(saved, tmp_path):
    """A drafter that was trained here knows its target's; an equal size proves nothing."""
    folder, draft = saved
    file = tmp_path / "dflash.gguf"
    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    draft.config.dflash_config = {**draft.config.dflash_config, "trained_with": digests_of_tokenizer(tokenizer)}
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    first, second = list(ids)[-2:]
    ids[first], ids[second] = ids[second], ids[first]
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(vocabulary))
    for other in (write_target(target, tmp_path / "other.gguf"), tmp_path / "other"):
        with pytest.raises(ValueError, match=f"{other} has a tokenizer with digest .* belongs to another target"):
            write_gguf(draft, file, other)
        assert not list(tmp_path.glob("*dflash*"))
    for own in (folder, write_target(target, tmp_path / "own.gguf", tokenizer)):
        write_gguf(draft, file, own)


def test_file_of_another_converter_is_read(tiny, tiny_file, tmp_path):
    """Without our key the configuration is read from llama.cpp's own keys."""
    draft = made(tiny, "DFlash 2, reduced vocabulary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_hf.conversion.gguf_write.CONFIG_KEY", "theirs.config")
        write_gguf(draft, tmp_path / "dflash.gguf", tiny_file)
    back = DFlashDraftModel.from_pretrained(convert(tmp_path / "dflash.gguf", tmp_path / "back"))
    same = ("target_layer_ids", "mask_token_id", "block_size", "layer_types", "rope_parameters", "draft_vocab_size")
    assert all(getattr(back.config, name) == getattr(draft.config, name) for name in (*same, *SELECTOR, *CONVOLUTION))
    assert [back.config.layer_is_causal(i) for i in range(2)] == [False, False]
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in draft.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_llama_cpp_drafts_what_we_draft(name, tiny, tiny_file, tmp_path):
    """Where random drafts are right is theirs alone."""
    file = tmp_path / "dflash-tiny.gguf"
    draft = made(tiny, name)
    write_gguf(draft, file, tiny_file, dtype="float32")
    kind = "DSPARK" if draft.config.markov_rank else "DFLASH"
    drafts = draft.config.max_block_tokens - 1
    alone = serve(tiny_file, context=256)
    drafted = serve(tiny_file, file, drafts, context=256, kind=kind)
    accepted = 0
    for seed in range(12):
        prompt = torch.randint(2, 15, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
        text, _ = complete(alone, prompt, 120)
        answer, lengths = complete(drafted, prompt, 120)
        assert answer == text and len(answer) == 120
        expected = our_lengths(tiny, draft, prompt, answer)
        assert lengths[:-2] == expected[: len(lengths) - 2]  # the two programs cut the last blocks differently
        accepted += sum(lengths) - len(lengths)
        if accepted > 5:
            return
    raise AssertionError("no draft was right: this compares nothing")


def test_files_of_llama_cpp_are_found_by_name(tmp_path):
    """One pattern for both names also took `dslap-x.gguf` for a drafter's file."""
    for name in ("dspark-b.gguf", "dflash-a.gguf", "dslap-x.gguf", "dfpa-x.gguf", "target.gguf"):
        (tmp_path / name).touch()
    assert [file.name for file in gguf_files_in(tmp_path)] == ["dflash-a.gguf", "dspark-b.gguf"]
    assert gguf_in(tmp_path) == tmp_path / "dflash-a.gguf"
    assert gguf_in(tmp_path / "absent") is None
