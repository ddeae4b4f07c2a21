"""Between the published layout and transformers' own, and out of `.pt` files."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file
from support.pairs import make_draft
from transformers import AutoModel

from dflash_hf import DFlashDraftModel
from dflash_hf.cli import main
from dflash_hf.convert import convert
from dflash_hf.hub.check import check
from dflash_hf.names import ENGINES
from dflash_hf.training.start import take_vocabulary


PROMPT = torch.tensor([[5, 9, 17, 33, 2]])


@pytest.fixture
def draft(target):
    return make_draft(target, target_layer_ids=[0, 1, 2])


@pytest.fixture
def folder(draft, tmp_path):
    draft.save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def save_pt(draft, folder, wrap=None, rename=lambda name: name):
    """A training run's `.pt` with its config.json beside it."""
    folder.mkdir()
    state = {rename(name): tensor for name, tensor in draft.state_dict().items()}
    torch.save({wrap: state, "step": 3} if wrap else state, folder / "draft.pt")
    (folder / "config.json").write_text(json.dumps(draft.config.to_dict(), default=str))
    return folder / "draft.pt"


def equal_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("parts", [{}, {"selector_rank": 4, "selector_top_k": 4}], ids=["DFlash", "path selector"])
def test_half_the_size_and_the_targets_head(parts, target, tmp_path, capsys):
    """Some engines know no reduced vocabulary: the drafter then drafts all tokens with the target's head."""
    reduced = make_draft(target, draft_vocab_size=24, **parts)
    take_vocabulary(reduced, target, torch.arange(target.config.vocab_size))
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
    blind = {
        engine for engine in ENGINES for one in check(tmp_path / "reduced", [engine]) if "share-head" in one.message
    }
    assert blind == ({"sglang", "vllm"} if parts else {"sglang"})
    assert not [one for one in check(tmp_path / "shared") if "share-head" in one.message]


def test_native_and_back(target, draft, folder, tmp_path):
    native = convert(folder, tmp_path / "native", to="native")
    assert {path.name for path in native.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((native / "config.json").read_text())
    assert config["model_type"] == "muse_glimmer_assistant" and config["vocab_size"] == 96
    assert not [finding for finding in check(native) if finding.severity == "error"]

    # The model of transformers itself, by the same names, gives the same hidden states.
    from transformers import MuseGlimmerAssistantModel

    model = MuseGlimmerAssistantModel.from_pretrained(native).eval()
    features, block = torch.randn(1, 9, 96), torch.randn(1, 4, 32)
    with torch.no_grad():
        theirs = model(noise_embeds=block, context_hidden_states=features).last_hidden_state
        ours = draft(noise_embeds=block, context_hidden_states=features).last_hidden_state
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

    back = convert(native, tmp_path / "back", to="z-lab")
    equal_tensors(load_file(back / "model.safetensors"), load_file(folder / "model.safetensors"))
    again = DFlashDraftModel.from_pretrained(back)
    # A native folder says neither how deep the target is nor, for us, that absent means bidirectional.
    assert [f.key for f in check(back)] == ["num_target_layers"]
    with torch.no_grad():
        assert torch.equal(
            again(noise_embeds=block, context_hidden_states=features).last_hidden_state,
            draft(noise_embeds=block, context_hidden_states=features).last_hidden_state,
        )


def test_native_decodes_in_transformers_own_loop(target, draft, folder, tmp_path):
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
def test_what_native_cannot_express_is_refused(reason, target, tmp_path):
    make_draft(target, **OBSTACLES[reason]).save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match=f"cannot be written for .*{reason}"):
        convert(tmp_path / "draft", tmp_path / "native", to="native")
    # Nothing is left behind, neither the folder nor a temporary one.
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    # The other layout takes it.
    convert(tmp_path / "draft", tmp_path / "copy")
    equal_tensors(load_file(tmp_path / "copy/model.safetensors"), load_file(tmp_path / "draft/model.safetensors"))


@pytest.mark.parametrize(
    "wrap, rename",
    [
        (None, lambda name: name),
        ("state_dict", lambda name: f"draft_model.{name}"),
        ("draft_state_dict", lambda name: name),
        ("model", lambda name: name.replace("hidden_norm.", "context_norm.").replace("fc.", "context_proj.")),
    ],
)
def test_a_pt_file(wrap, rename, draft, tmp_path):
    file = save_pt(draft, tmp_path / "run", wrap, rename)
    folder = convert(file, tmp_path / "draft")
    assert check(folder) == []
    equal_tensors(load_file(folder / "model.safetensors"), dict(draft.state_dict()))
    (tmp_path / "run" / "config.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(ValueError, match=r"draft\.pt has no .*config.json; name .* with config \(--config\)"):
        convert(file, tmp_path / "second")
    torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)  # the older format of such files
    convert(file, tmp_path / "second", config=tmp_path / "elsewhere.json")


def test_what_is_wrong_with_a_pt_file_names_the_users_files(draft, tmp_path):
    """Transposed tensors and numbers as names were safetensors' errors, others named a temporary folder."""
    file = save_pt(draft, tmp_path / "run")
    state = torch.load(file)
    torch.save({**state, "fc.weight": state["fc.weight"].T.clone().T}, file)
    equal_tensors(load_file(convert(file, tmp_path / "draft") / "model.safetensors"), state)
    torch.save({**state, 3: torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"draft\.pt has a tensor under 3, which is no name; save"):
        convert(file, tmp_path / "second")
    torch.save(state, file)
    for content in ("{", "[]", "{}", '{"architectures": ["LlamaForCausalLM"]}'):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ValueError) as refused:
            convert(file, tmp_path / "second", config=tmp_path / "other.json")
        assert str(refused.value).startswith(str(tmp_path / "other.json")) and "unpacked" not in str(refused.value)


def test_folders_with_the_name_of_a_file_or_only_files(draft, tmp_path, capsys):
    """`v1.pt` was no such file; a folder of `.bin` files was told to run the command that had been run."""
    for name in ("v1.pt", "v1.gguf"):
        draft.save_pretrained(tmp_path / name)
        assert main(["convert", str(tmp_path / name), str(tmp_path / f"{name} again")]) == 0
        assert main(["check", str(tmp_path / name)]) == 0
    file = save_pt(draft, tmp_path / "run")
    (tmp_path / "run" / "training_args.bin").touch()  # was named as the weights
    capsys.readouterr()
    assert main(["convert", str(file.parent), str(tmp_path / "new")]) == 1
    assert f"run holds no safetensors; name the file with its weights: {file}." in capsys.readouterr().err
    assert main(["check", str(file)]) == 1  # was looked for on the Hub
    assert f"{file} is a file; name a drafter's folder" in capsys.readouterr().err


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


def test_a_pt_file_is_never_executed(draft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = save_pt(draft, tmp_path / "run")
    whole = file.read_bytes()
    torch.save({"fc.weight": Bomb()}, file)
    for content in (file.read_bytes(), pickle.dumps(Bomb(), protocol=2), whole[:200], b""):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"draft\.pt cannot be read as plain tensors"):
            convert(file, tmp_path / "draft")
    torch.save({"step": 3}, file)
    with pytest.raises(ValueError, match="no dictionary of tensors"):
        convert(file, tmp_path / "draft")
    torch.save({"weight": torch.ones(2)}, file)
    with pytest.raises(ValueError, match=rf"^{file}: missing keys"):  # not a file that is already removed
        convert(file, tmp_path / "draft")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_destination_is_whole_or_absent(folder, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="name a new folder"):
        convert(folder, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    convert(folder, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("dflash_hf.weights.save_file", fail)
    with pytest.raises(OSError, match="No space"):
        convert(folder, tmp_path / "native", to="native")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "empty", "full"]
    with pytest.raises(ValueError, match="gguf"):
        convert(folder, tmp_path / "other", to="gguf")


def test_an_empty_folder_may_be_the_one_we_are_in(folder, tmp_path, monkeypatch):
    """`dflash convert DRAFT .` ended in an error, and its result was gone."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert(folder, ".")
    assert {path.name for path in (tmp_path / "here").iterdir()} >= {"config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"draft", "here"}
    DFlashDraftModel.from_pretrained(tmp_path / "here")


def test_the_command(folder, tmp_path, capsys):
    words = ["convert", str(folder), str(tmp_path / "native"), "--to", "native"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'native'} (native).\n"
    assert main(words) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("dflash convert: error: ") and "name a new folder" in line
    for name in ("missing.pt", "missing.gguf"):  # was looked for on the Hub
        assert main(["convert", name, str(tmp_path / "new")]) == 1
        assert f"error: DRAFT {name}: there is no such file; name a drafter's folder" in capsys.readouterr().err
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}), encoding="utf-8")
    for given, code, message in (  # it asked for `target_layer_ids`, and named `dst` of the Python function
        ([str(model), "new"], 1, f"DRAFT {model} is not a DFlash drafter but LlamaForCausalLM"),
        ([str(folder), "new.gguf"], 2, "OUTPUT new.gguf is a GGUF file: add --to gguf and --target, or name a folder"),
        ([str(folder), "new", "--to", "gguf", "--target", "t"], 2, "OUTPUT new must end in .gguf with --to gguf"),
    ):
        assert main(["convert", *given]) == code
        assert message in capsys.readouterr().err
    for name in ("q9", "auto"):
        with pytest.raises(SystemExit):
            main([*words, "--dtype", name])
        error = capsys.readouterr().err
        assert f"invalid choice: '{name}'" in error and error.count("'auto'") == (name == "auto") and "q8_0" in error
