"""Between the published layout and transformers' own; whole vocabularies; what is refused. GGUF: `test_gguf.py`."""

import errno
import json
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from support.pairs import make_draft
from transformers import AutoModel

from dflash_hf import DFlashDraftModel
from dflash_hf._io.names import ENGINES
from dflash_hf.cli import main
from dflash_hf.conversion.convert import convert
from dflash_hf.hub.check import check
from dflash_hf.pairs.draft_vocabulary import set_draft_vocabulary


PROMPT = torch.tensor([[5, 9, 17, 33, 2]])


@pytest.fixture
def draft(target):
    return make_draft(target, target_layer_ids=[0, 1, 2])


@pytest.fixture
def folder(draft, tmp_path):
    draft.save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


@pytest.fixture
def refused(capsys):
    """`refused(*words)`: the status and the last line of a command that fails."""

    def call(*words):
        code = main([str(word) for word in words])
        return code, capsys.readouterr().err.splitlines()[-1]

    return call


def assert_equal_tensors(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("parts", [{}, {"selector_rank": 4, "selector_top_k": 4}], ids=["DFlash", "path selector"])
def test_shared_head_drafts_all_tokens(parts, target, tmp_path, capsys):
    """Some engines know no reduced vocabulary: the drafter then drafts all tokens with the target's head."""
    reduced = make_draft(target, draft_vocab_size=24, **parts)
    set_draft_vocabulary(reduced, target, torch.arange(target.config.vocab_size))
    reduced.save_pretrained(tmp_path / "reduced")
    (tmp_path / "reduced" / "card_facts.json").write_text('{"base_model": "a/b"}')
    options = ["--share-head", "--dtype", "bfloat16"]
    assert main(["convert", str(tmp_path / "reduced"), str(tmp_path / "shared"), *options]) == 0
    tensors = load_file(tmp_path / "shared" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert not {"lm_head.weight", "d2t"} & set(tensors)
    assert (tmp_path / "shared" / "card_facts.json").is_file()
    shared = DFlashDraftModel.from_pretrained(tmp_path / "shared", dtype=torch.float32)
    assert shared.config.draft_vocab_size is None and torch.allclose(shared.fc.weight, reduced.fc.weight, atol=1e-2)
    alone = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(PROMPT, max_new_tokens=12, do_sample=False, assistant_model=shared), alone)
    if not parts:
        assert convert(tmp_path / "shared", tmp_path / "native", to="native").is_dir()
    unable = set()
    for engine in ENGINES:
        if any("share-head" in finding.message for finding in check(tmp_path / "reduced", [engine])):
            unable.add(engine)
    assert unable == ({"sglang", "vllm"} if parts else {"sglang"})
    assert not [finding for finding in check(tmp_path / "shared") if "share-head" in finding.message]


def test_native_computes_the_same_and_converts_back(target, draft, folder, tmp_path):
    native = convert(folder, tmp_path / "native", to="native")
    assert {path.name for path in native.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((native / "config.json").read_text())
    assert config["model_type"] == "muse_glimmer_assistant" and config["vocab_size"] == 96
    assert not [finding for finding in check(native) if finding.severity == "error"]

    # The model of transformers itself, by the same names, gives the same hidden states.
    from transformers import MuseGlimmerAssistantModel

    model = MuseGlimmerAssistantModel.from_pretrained(native).eval()
    features = torch.randn(1, 9, 96)
    block = torch.randn(1, 4, 32)
    with torch.no_grad():
        expected = model(noise_embeds=block, context_hidden_states=features).last_hidden_state
        states = draft(noise_embeds=block, context_hidden_states=features).last_hidden_state
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)

    back = convert(native, tmp_path / "back", to="z-lab")
    assert_equal_tensors(load_file(back / "model.safetensors"), load_file(folder / "model.safetensors"))
    again = DFlashDraftModel.from_pretrained(back)
    # A native folder holds neither the depth of the target nor a key for bidirectional attention.
    assert check(back) == []
    with torch.no_grad():
        assert torch.equal(
            again(noise_embeds=block, context_hidden_states=features).last_hidden_state,
            draft(noise_embeds=block, context_hidden_states=features).last_hidden_state,
        )


def test_native_decodes_in_transformers(target, draft, folder, tmp_path):
    from transformers import MuseGlimmerAssistantModel

    convert(folder, tmp_path / "native", to="native")
    arguments = {"max_new_tokens": 20, "do_sample": False}
    plain = target.generate(PROMPT, **arguments)
    for assistant in (
        MuseGlimmerAssistantModel.from_pretrained(tmp_path / "native"),
        AutoModel.from_pretrained(tmp_path / "native"),
    ):
        output = target.generate(PROMPT, assistant_model=assistant, speculation_type="dflash", **arguments)
        assert torch.equal(output, plain)


OBSTACLES = {
    "attention_bias": {"attention_bias": True},
    "sliding layers": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": False},
    "causal inside the block": {"is_causal": True},
    "target_hidden_size": {"target_hidden_size": 64},
    "conv_kernel_size=2": {"conv_kernel_size": 2, "conv_group_size": 4},
    "selector_rank=4": {"selector_rank": 4, "selector_top_k": 4},
    "input_embedding_scale=2.0": {"input_embedding_scale": 2.0},
    "attention_value_scale=0.5": {"attention_value_scale": 0.5},
    "backbone_rotary_base=7.0": {"backbone_rotary_base": 7.0},
    "partial_rotary_factor": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_native_refuses_what_it_lacks(reason, target, tmp_path):
    make_draft(target, **OBSTACLES[reason]).save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match=f"cannot be written for .*{reason}"):
        convert(tmp_path / "draft", tmp_path / "native", to="native")
    # Nothing is left behind, neither the folder nor a temporary one.
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    # The other layout takes it.
    convert(tmp_path / "draft", tmp_path / "copy")
    assert_equal_tensors(
        load_file(tmp_path / "copy/model.safetensors"), load_file(tmp_path / "draft/model.safetensors")
    )


def test_unusable_inputs_of_convert_are_named(folder, tmp_path, refused):
    """A file of another kind, a folder without weights, another model, and names that only look like files."""
    (tmp_path / "draft.pt").touch()
    bare = tmp_path / "bare"
    other = tmp_path / "other"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for name, message in (
        ("draft.pt", "DRAFT {}/draft.pt is a file; name the folder of the model."),
        ("absent.gguf", "{}/absent.gguf: there is no such file."),
        ("absent", "DRAFT {}/absent: there is no such folder."),
        ("bare", "{}/bare holds neither model.safetensors nor"),
        ("other", "DRAFT {}/other is not a DFlash drafter but LlamaForCausalLM"),
    ):
        code, line = refused("convert", tmp_path / name, tmp_path / "new")
        assert code == 1 and message.format(tmp_path) in line, line
    folder.rename(tmp_path / "v1.gguf")
    assert main(["convert", str(tmp_path / "v1.gguf"), str(tmp_path / "again")]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["new.gguf", "--to", "gguf"],
            "new.gguf needs the target's tokenizer, which a GGUF file contains; add --target",
        ),
        (["new.gguf"], "new.gguf needs the target's tokenizer, which a GGUF file contains; add --target"),
        (["new", "--target", "t"], "--target t is for GGUF files only; name a file that ends in .gguf"),
        (["new", "--to", "gguf", "--target", "t"], "new must end in .gguf, as --to gguf writes a file"),
        (["new.gguf", "--to", "native"], "new.gguf would be a folder with --to native; choose --to gguf for a file"),
        (["new", "--dtype", "q8_0"], "--dtype q8_0 is for GGUF files only, not for --to z-lab"),
    ],
)
def test_conflicting_convert_options_are_refused(words, message, folder, tmp_path, refused):
    code, line = refused("convert", folder, tmp_path / words[0], *words[1:])
    assert code == 2 and message in line and not (tmp_path / words[0]).exists()


def test_destination_is_whole_or_absent(folder, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="name a new folder"):
        convert(folder, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    convert(folder, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("dflash_hf.conversion.safetensors_folder.save_file", fail)
    with pytest.raises(OSError, match="No space"):
        convert(folder, tmp_path / "native", to="native")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "empty", "full"]


@pytest.mark.parametrize("full", ["copy", "weights"])
def test_full_disk_names_the_destination(full, folder, tmp_path, monkeypatch, refused):
    """It named a file of this package, which was copied."""

    def copy(source, destination):
        raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(destination))

    def save(*args, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    if full == "copy":
        monkeypatch.setattr("dflash_hf.modeling.modeling_dflash.shutil.copyfile", copy)
    else:
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", save)
    code, line = refused("convert", folder, tmp_path / "new")
    assert code == 1 and line.startswith(f"dflash convert: error: the disk is full ({tmp_path / 'new'}): free some"), (
        line
    )


def test_convert_errors_name_command_line_options(target, tmp_path, refused):
    """Of a class and of arguments of Python: `to="z-lab"`, `share_head=True`."""
    reduced = make_draft(target, draft_vocab_size=24)
    set_draft_vocabulary(reduced, target, torch.arange(target.config.vocab_size))
    reduced.save_pretrained(tmp_path / "reduced")
    _, line = refused("convert", tmp_path / "reduced", tmp_path / "native", "--to", "native")
    assert "(--to native): draft_vocab_size=24, which" in line and "; add --share-head, which" in line
    assert "MuseGlimmer" not in line and 'to="' not in line
    make_draft(target, is_causal=True).save_pretrained(tmp_path / "causal")
    _, line = refused("convert", tmp_path / "causal", tmp_path / "native", "--to", "native")
    assert "; keep it in the default layout (--to z-lab)" in line and "--share-head" not in line


def test_a_conversion_shows_no_bars_of_libraries(folder, tmp_path, capsys):
    assert main(["convert", str(folder), str(tmp_path / "new")]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"Wrote {tmp_path / 'new'} (z-lab).\n" and printed.err == ""


def test_empty_current_folder_is_filled(folder, tmp_path, monkeypatch):
    """`dflash convert DRAFT .` ended in an error, and its result was gone."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert(folder, ".")
    assert {path.name for path in (tmp_path / "here").iterdir()} >= {"config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"draft", "here"}
    DFlashDraftModel.from_pretrained(tmp_path / "here")
