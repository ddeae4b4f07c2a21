"""Presets: what they set, that the machine decides nothing in silence, and who reads the drafters that they make."""

import typing

import pytest
import torch
from support.pairs import make_target
from support.recurrent_head import use_heads
from support.runs import as_options, as_settings

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainingArguments
from dflash_hf._io.names import ENGINES
from dflash_hf.cli import main
from dflash_hf.hub.check import check
from dflash_hf.hub.findings import can_read_by_engine
from dflash_hf.modeling.head_dflash import TokenHead
from dflash_hf.training.arguments import ScriptArguments, allowed_values
from dflash_hf.training.head_presets import head_presets
from dflash_hf.training.presets import CPU, PAPER, PRESETS
from dflash_hf.training.recipe import decide, key_lines, machine_lines, read_recipe


pytest.importorskip("yaml")


def machine(monkeypatch, kind: str, halves: bool = True):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind != "cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: halves)
    monkeypatch.setattr("dflash_hf.decoding.cpu_dtypes.is_emulated", lambda dtype: not halves)


def settings_with(*words) -> dict:
    return decide(None, as_settings(["target=t", "data=d", *words]))


def values(*words) -> dict:
    return {name: setting.value for name, setting in settings_with(*words).items()}


# ---------------------------------------------------------------------------------------------- which preset, and how


@pytest.mark.parametrize("preset", PRESETS)
def test_named_preset_is_the_same_everywhere(preset, monkeypatch):
    """The same command trained another drafter on a laptop than on a GPU."""
    chosen = []
    for kind, halves in (("cpu", True), ("cpu", False), ("cuda", True), ("cuda", False), ("mps", False)):
        machine(monkeypatch, kind, halves)
        of_machine = {"use_cpu": None, "bf16": None, "target_dtype": None}  # how fast, not what
        chosen.append({**values(f"preset={preset}"), **of_machine})
        assert settings_with(f"preset={preset}")["preset"].origin == "command line"
    assert all(other == chosen[0] for other in chosen)


@pytest.mark.parametrize(("kind", "preset"), [("cpu", "cpu"), ("mps", "cpu"), ("cuda", "paper"), ("xpu", "paper")])
def test_default_preset_is_printed(kind, preset, monkeypatch):
    machine(monkeypatch, kind)
    settings = settings_with()
    assert settings["preset"].value == preset
    line = machine_lines(settings)[0]
    other = {"cpu": "--preset paper", "paper": "--preset cpu"}[preset]
    assert line.startswith(f"preset            {preset}: ") and other in line
    assert not machine_lines(settings_with("preset=cpu", "bf16=true", "target_dtype=auto"))


def test_use_cpu_takes_the_preset_of_cpus(monkeypatch):
    machine(monkeypatch, "cuda")
    assert values("use_cpu=true")["block_size"] == 4
    assert "use_cpu is set" in machine_lines(settings_with("use_cpu=true"))[0]


def test_run_prints_its_preset(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dflash_hf.training.train.load_tokenizer", lambda *_, **__: 1 / 0)  # the checks are done
    machine(monkeypatch, "cpu")
    make_target().save_pretrained(tmp_path / "t")
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n')
    words = as_options([f"target={tmp_path / 't'}", f"data={tmp_path / 'd.jsonl'}", f"output_dir={tmp_path / 'o'}"])
    capsys.readouterr()
    for preset, count in ((), 1), (["--preset", "paper"], 0):
        assert main(["train", *words, *preset]) == 1
        expected = "preset            cpu: no GPU was found; --preset paper trains the paper's drafter"
        assert capsys.readouterr().out.splitlines().count(expected) == count


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_machine_without_bf16_says_so(kind, monkeypatch):
    machine(monkeypatch, kind, halves=False)
    settings = settings_with("preset=cpu")
    target_dtype = {"cpu": "float32", "cuda": "auto"}[kind]
    assert (settings["bf16"].value, settings["target_dtype"].value) == (False, target_dtype)
    assert any("bf16" in line and "no hardware support for bf16" in line for line in machine_lines(settings))
    assert values("preset=cpu", "bf16=true")["bf16"]


def test_recipe_names_its_preset(tmp_path, monkeypatch):
    machine(monkeypatch, "cpu")
    (tmp_path / "r.yaml").write_text("preset: paper\ntarget: t\ndata: d\n")
    settings = decide(tmp_path / "r.yaml")
    assert settings["block_size"].value == 16 and not machine_lines(settings)
    assert decide(tmp_path / "r.yaml", {"preset": "cpu"})["block_size"].value == 4


# --------------------------------------------------------------------------------------------------- what they are


def test_presets_are_the_allowed_values_the_option():
    hints = typing.get_type_hints(ScriptArguments)
    assert set(allowed_values(hints["preset"])) == set(PRESETS)


def test_heads_of_the_option_come_from_the_table(monkeypatch):
    """A new head needs its file and its line in `TOKEN_HEADS`: the option, its list and its errors follow."""
    assert set(head_presets()) >= {"dflash2", "dspark", "domino", "jetspec"}

    class TrigramHead(TokenHead):
        architecture = "TrigramDraftModel"
        sizes = ("trigram_rank",)
        fields = dict.fromkeys(sizes)
        preset = {"trigram_rank": 8}

    use_heads(monkeypatch, TrigramHead)
    machine(monkeypatch, "cpu")
    assert values("head=trigram")["draft_config"] == {"trigram_rank": 8}
    script, _ = read_recipe(None, as_settings(["target=t", "data=d", "head=trigram"]))
    assert script.draft_config == {"trigram_rank": 8}
    names = list(head_presets())
    assert "trigram" in names
    (line,) = [line for line in key_lines("head") if line.startswith("head=")]
    assert f"One of {', '.join(names)}." in line
    with pytest.raises(ValueError, match=f"head='eagle' must be one of {', '.join(names)}"):
        values("head=eagle")


def test_python_defaults_are_the_papers(tmp_path):
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    of_commands = {"num_draft_layers", "block_size", "max_length", "bf16", "logging_steps", "save_steps"}
    of_commands |= {"per_device_train_batch_size", "gradient_accumulation_steps"}
    of_commands |= {"num_target_features", "init_layers", "draft_vocab_size"}
    for name in PAPER.keys() - of_commands:
        assert getattr(args, name) == PAPER[name].value, name
    script = ScriptArguments(target="t", data="d")
    assert (script.num_draft_layers, script.block_size, script.max_length) == (5, 16, 3072)


@pytest.mark.parametrize("name", sorted({*PAPER, *CPU}))
def test_help_says_the_values_of_presets(name):
    (line,) = [line for line in key_lines(name) if line.startswith(f"{name}=")]
    shown = {str(preset[name].value) for preset in PRESETS.values() if name in preset}
    assert all(value in line.rpartition("(")[2] for value in shown)


@pytest.mark.parametrize("preset", PRESETS)
def test_drafters_of_presets_are_read_everywhere(preset, tmp_path, monkeypatch):
    """Preset cpu left a reduced vocabulary, which SGLang does not serve."""
    machine(monkeypatch, "cpu")
    script, _ = read_recipe(None, {"preset": preset, "target": "t", "data": "d"})
    target = make_target(num_hidden_layers=8)
    fields = dict(script.draft_config)
    if script.draft_vocab_size and not script.share_head:  # -1 follows the data
        fields["draft_vocab_size"] = 16
    layers = script.num_draft_layers
    config = DFlashDraftConfig.for_target(target.config, 63, layers, script.block_size, **fields)
    DFlashDraftModel(config).save_pretrained(tmp_path)
    findings = check(tmp_path, ENGINES, target.config)
    assert can_read_by_engine(findings, ENGINES) == dict.fromkeys(ENGINES, True), findings


# ------------------------------------------------------------------------------------------------------------- values


def test_cpu_takes_many_small_steps(monkeypatch):
    """These values reached tau 1.52 after ten minutes with 500 answers of SmolLM2-135M, and 1.65 after thirty."""
    machine(monkeypatch, "cpu")
    chosen = values("mask_token_id=16", "max_minutes=10")
    assert (chosen["block_size"], chosen["num_anchors"], chosen["per_device_train_batch_size"]) == (4, 16, 4)
    assert chosen["gradient_accumulation_steps"] == 1 and chosen["init_layers"] == [-2, -1]
    assert (chosen["loss_type"], chosen["learning_rate"]) == ("dpace", 1e-3)
    assert chosen["use_cpu"] and chosen["bf16"] and chosen["target_dtype"] == "bfloat16"
    assert (
        chosen["draft_vocab_size"] == chosen["store_rows"] == -1 and chosen["share_head"] and "max_steps" not in chosen
    )
    assert values("num_draft_layers=3")["init_layers"] == [-3, -2, -1]


def test_cpu_trains_for_a_number_of_steps(monkeypatch):
    """By passes over the data, 60 answers had 90 steps and 50,000 ones a day."""
    machine(monkeypatch, "cpu")
    assert values()["max_steps"] == 3000
    for word in ("max_minutes=10", "num_train_epochs=3", "max_steps=7"):
        assert values(word).get("max_steps") in (None, 7)
    machine(monkeypatch, "cuda")
    assert "max_steps" not in values() and values()["num_train_epochs"] == 6  # as the paper
    assert not {"num_train_epochs", "lr_scheduler_type"} & values("max_minutes=10").keys()


def test_gpu_takes_the_papers_settings(monkeypatch):
    machine(monkeypatch, "cuda")
    chosen = values()
    assert (chosen["block_size"], chosen["num_anchors"], chosen["num_draft_layers"]) == (16, 512, 5)
    assert chosen["per_device_train_batch_size"] * chosen["gradient_accumulation_steps"] == 8
    assert (chosen["loss_type"], chosen["learning_rate"], chosen["bf16"]) == ("ce", 6e-4, True)
    assert not {"use_cpu", "target_dtype", "store_rows"} & chosen.keys()
    assert chosen["init_layers"] is chosen["draft_vocab_size"] is None
    machine(monkeypatch, "mps")
    chosen = values()
    assert "use_cpu" not in chosen and not chosen["bf16"] and chosen["num_anchors"] == 16


@pytest.mark.parametrize(
    ("word", "absent"),
    [
        ("draft=d", {"num_draft_layers", "block_size", "init_layers", "draft_vocab_size", "share_head"}),
        ("head=dspark", {"share_head"}),
        ("draft_config.selector_rank=8", {"share_head"}),
        ("head_only=true", {"loss_type", "learning_rate"}),
        ("peft_config={r: 2}", {"store_rows"}),
        ("fp16=true", {"bf16"}),
    ],
)
def test_preset_leaves_out_what_does_not_apply(word, absent, monkeypatch):
    machine(monkeypatch, "cpu")
    assert not absent & values(word).keys() and absent <= values().keys()
    if word == "draft=d":
        assert values(word)["learning_rate"] == 5e-4


def test_best_model_is_saved_at_each_evaluation(monkeypatch):
    """Upstream refuses others."""
    machine(monkeypatch, "cpu")
    assert values("load_best_model_at_end=true", "eval_steps=3")["save_steps"] == 3
    assert values("load_best_model_at_end=true", "eval_steps=0.2")["save_steps"] == 0.2
    assert values("eval_steps=3")["save_steps"] == 250


def test_several_processes_store_no_features(monkeypatch):
    machine(monkeypatch, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = settings_with()
    assert settings["store_rows"].value == 0
    assert any(line.startswith("store_rows        0: one process would") for line in machine_lines(settings))


@pytest.mark.parametrize(("head", "loss"), [("jetspec", "kl"), ("dspark", "dspark"), ("domino", "dpace")])
def test_head_brings_its_loss(head, loss, monkeypatch):
    """The preset's replaced it; the confidence head of dspark then learnt nothing."""
    machine(monkeypatch, "cpu")
    assert values(f"head={head}")["loss_type"] == loss and values(f"head={head}")["learning_rate"] == 1e-3
    assert values(f"head={head}", "loss_type=ce")["loss_type"] == "ce"
    fields = values(f"head={head}", "draft_config.markov_rank=64")["draft_config"]
    assert fields == {**head_presets()[head].draft_config, "markov_rank": 64}


def test_half_precision_needs_no_use_cpu(tmp_path):
    """`bf16=true` was refused for want of `use_cpu`, which the preset sets."""
    _, training = read_recipe(None, {"target": "t", "data": "d", "output_dir": str(tmp_path / "o"), "bf16": "true"})
    assert DFlashTrainingArguments(**training).bf16


@pytest.mark.parametrize(("kind", "rows"), [("cpu", 4), ("cuda", 8)])
def test_micro_batch_size_keeps_rows_per_step(kind, rows, monkeypatch):
    """The remedy for little memory, one row at a time, made the steps of a run eight times smaller in silence."""
    machine(monkeypatch, kind)
    for at_once in (1, 2, rows):
        settings = settings_with(f"per_device_train_batch_size={at_once}")
        assert at_once * settings["gradient_accumulation_steps"].value == rows
    assert f"a step has {rows} rows" in settings["gradient_accumulation_steps"].origin
    assert values("per_device_train_batch_size=16")["gradient_accumulation_steps"] == 1
    words = ("per_device_train_batch_size=1", "gradient_accumulation_steps=3")
    assert values(*words)["gradient_accumulation_steps"] == 3
