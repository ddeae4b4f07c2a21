"""A target's own multi-token prediction beside its drafter."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pairs import MOE, SLIDING, make_draft, make_target
from support.tiny_chat import make_tokenizer
from transformers import GenerationConfig

from dflash_hf.cli import main


pytestmark = pytest.mark.skipif(not hasattr(GenerationConfig(), "use_mtp"), reason="this transformers has no MTP")
FIRST = "model.layers.0."


def save_with_heads(folder, heads: int = 1) -> None:
    """
    A target of whose next token its layers change little, and a head that goes by the token alone: it is often right.
    """
    tokenizer = make_tokenizer(None)
    target = make_target("mellum", **MOE, **SLIDING, num_mtp_layers=heads or None, vocab_size=len(tokenizer) + 1)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.03)
        layer.mlp.experts.down_proj.mul_(0.03)
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    size = target.config.hidden_size
    if heads:
        for name in [name for name in state if name.startswith(FIRST)]:
            is_silent = "o_proj" in name or "down_proj" in name
            weight = torch.zeros_like(state[name]) if is_silent else state[name].clone()
            state[f"mtp.layers.0.{name.removeprefix(FIRST)}"] = weight
        state["mtp.fc.weight"] = torch.eye(size, 2 * size)  # of token and feature
        state |= {f"mtp.{name}.weight": torch.ones(size) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        state["mtp.norm.weight"] = torch.ones(size)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(folder / "draft")
    (folder / "prompts.txt").write_text("Say 1\nSay 2\n", encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_with_heads(folder)
    return folder


def evaluate(folder, *more) -> int:
    names = ["--target", folder, "--draft", folder / "draft", "--data", folder / "prompts.txt", "--device", "cpu"]
    names += ["--mtp", "--runs", 1, "--max-new-tokens", 24]
    return main(["eval", *map(str, [*names, *more])])


@pytest.mark.parametrize("packed", ["--packed", "--no-packed"])
def test_mtp_heads_are_measured_beside_the_drafter(packed, folder, tmp_path, capsys, packs_of_any_size):
    assert evaluate(folder, packed, "--output", tmp_path) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "eval_report.json").read_text(encoding="utf-8"))
    heads = report["methods"]["mtp"]
    whole = report["methods"]["dflash"]
    assert heads["equal"] == whole["equal"] == 2 and len(set(report["responses"][0])) > 5
    assert heads["tokens"] / 2 < heads["target_forwards"] < heads["tokens"]  # drafts were accepted, and rejected
    assert f"multi-token prediction{heads['tokens_per_second']:17.0f}" in printed
    assert "loads the heads in each call" in printed and report["setting"]["mtp_loading_seconds"] > 0


def test_missing_mtp_heads_are_named(folder, tmp_path, capsys):
    save_with_heads(tmp_path / "none", heads=0)
    save_with_heads(tmp_path / "lost", heads=1)
    state = load_file(tmp_path / "lost" / "model.safetensors")
    del state["mtp.fc.weight"]
    save_file(state, tmp_path / "lost" / "model.safetensors", metadata={"format": "pt"})
    for name, more, message in (
        ("none", [], "no `num_mtp_layers` in its configuration): leave out --mtp"),
        ("lost", [], "cannot run the heads of this MellumForCausalLM (RuntimeError: The following MtpModel weights"),
        ("lost", ["--revision", "main"], "give a folder as --target"),
    ):
        assert evaluate(tmp_path / name, *more) in (1, 2)
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error and error.startswith("dflash eval: error: --mtp")
