"""The bundled pair: the real target by its digest and its answers, the drafter as it would be published."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import modeling, smollm2
from dflash_hf.cli import main
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.demo.run import demo_prompts
from dflash_hf.hub.check import check
from dflash_hf.hub.publish import publish
from dflash_hf.modeling.modeling_dflash import code_files
from dflash_hf.smollm2 import smollm2_folder


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
