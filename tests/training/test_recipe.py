"""`dflash train`: recipes, overrides, what is refused, and runs of a tiny target from data to a loadable drafter."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.pairs import make_draft
from support.tiny_chat import CHATML, THINKING, save_target
from transformers import AutoModelForCausalLM

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainingArguments, cli
from dflash_hf.cli import main
from dflash_hf.commands.train import _check_before, _publish
from dflash_hf.training.choice import saved_every
from dflash_hf.training.pace import Pace
from dflash_hf.training.recipe import RecipeArguments, given_keys, key_lines, read_recipe
from dflash_hf.training.settings_for import Machine
from dflash_hf.training.train import train as train_recipe


pytest.importorskip("yaml")
datasets = pytest.importorskip("datasets")
RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.yaml"))
DEMO = next(path for path in RECIPES if path.stem == "demo")
OFFLINE = next(path for path in RECIPES if path.stem == "offline")
LORA = next(path for path in RECIPES if path.stem == "lora")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# ------------------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_those_of_the_arguments(path, tmp_path):
    recipe, training = read_recipe(path, [f"output_dir={tmp_path}", "use_cpu=true", "bf16=false"])
    args = DFlashTrainingArguments(**training)
    assert args.learning_rate >= 2e-4 and args.logging_steps == 10
    for command in [line for line in path.read_text(encoding="utf-8").splitlines() if "--config" in line]:
        assert f"--config examples/recipes/{path.name}" in command


@pytest.mark.parametrize("size", ["4b", "8b"])
def test_the_papers_settings(size, tmp_path):
    (path,) = [path for path in RECIPES if path.stem == f"qwen3-{size}"]
    recipe, training = read_recipe(path, ["use_cpu=true", f"output_dir={tmp_path}"])
    assert (recipe.num_draft_layers, recipe.block_size, recipe.max_length) == (5, 16, 3072)
    assert recipe.target_layer_ids == [1, 9, 17, 25, 33] and recipe.chat_template_kwargs == {"enable_thinking": False}
    assert training["bf16"] is True
    args = DFlashTrainingArguments(**{**training, "bf16": False})
    assert (args.learning_rate, args.lr_scheduler_type, args.max_grad_norm) == (6e-4, "cosine", 1.0)
    assert (args.num_train_epochs, args.num_anchors, args.loss_decay_gamma) == (6, 512, 7)
    assert "adamw" in args.optim and args.get_warmup_steps(1000) == 40


def test_values_are_typed_like_the_arguments():
    given = ("target=t", "data=[a.jsonl, b.jsonl]", "learning_rate=6e-4", "max_steps=1e3", "eval_steps=5")
    more = (
        "chat_template_kwargs.enable_thinking=false",
        "chat_template_kwargs.depth.a=1",
        "save_strategy=no",
        "seed=3",
    )
    recipe, training = read_recipe(None, [*given, *more, "lr_scheduler_kwargs={num_cycles: 2}", "report_to=none"])
    assert recipe.data == ["a.jsonl", "b.jsonl"]
    assert recipe.chat_template_kwargs == {"enable_thinking": False, "depth": {"a": 1}}
    assert training["learning_rate"] == 6e-4 and isinstance(training["learning_rate"], float)
    assert training["max_steps"] == 1000 and isinstance(training["max_steps"], int)
    assert training["lr_scheduler_kwargs"] == {"num_cycles": 2}
    assert training["save_strategy"] == "no"  # a truth value to YAML
    inner = ["target=t", "data=d", "draft_config.rms_norm_eps=1e-6", "peft_config={r: 4, init: [+2.5E1, 1e], p: 1e-1}"]
    recipe, training = read_recipe(None, [*inner, "lr_scheduler_kwargs.min_lr=-1e-05", "data_revision=12e4"])
    assert recipe.draft_config == {"rms_norm_eps": 1e-6} and training["lr_scheduler_kwargs"] == {"min_lr": -1e-5}
    assert recipe.peft_config == {"r": 4, "init": [25.0, "1e"], "p": 0.1} and recipe.data_revision == "12e4"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["blok_size=8"], "Unknown key 'blok_size'; did you mean 'block_size'"),
        (["learning_rat=1"], "did you mean 'learning_rate'"),
        (["draft_config.selector_rnak=8"], "draft_config: Unknown key 'selector_rnak'; did you mean 'selector_rank'"),
        (["target.x=1"], "target='t' has no entry 'x'; write target=value"),
        (["peft_config.r=2", "peft_config.r.x=1"], "r=2 has no entry 'x'; write r=value"),
        (["block_size=many"], "block_size='many' must be of type int"),
        (["block_size=2.5"], "block_size=2.5 must be of type int"),
        (["block_size=true"], "block_size=True must be of type int"),
        (["packing=1"], "packing=1 must be of type bool"),
        (["learning_rate=fast"], "learning_rate='fast' must be of type float"),
        (["max_length=null"], "max_length=None must be of type int"),
        (["draft=d", "block_size=0"], "block_size=0 must be at least 1"),
        (["chat_template_kwargs=yes"], "chat_template_kwargs=True must be of type dict"),
        (["block_size"], "'block_size' is not an override; write key=value"),
        (["data=[a"], "the value of data is not YAML"),
        (["block_size=0"], "block_size=0 must be at least 1"),
        (["features=f"], "A run needs data or features, but both are given"),
        (["data=null"], "A run needs data or features, but neither is given"),
        (["target=null"], "target is not given"),
        (["data=null", "features=f", "packing=true"], "leave out packing"),
        (["data=null", "features=f", "decode_prompts=2"], "decode_prompts needs the target's layers"),
        (["streaming=true", "num_proc=2"], "leave out num_proc"),
        (["streaming=true", "draft_vocab_size=9"], "draft_vocab_size counts the tokens of all rows"),
        (["draft=d", "init_layers=[1]"], "init_layers is for a fresh drafter, but draft='d' is given"),
        (["num_draft_layers=2", "init_layers=[1]"], r"init_layers=\[1\] must name one layer .* num_draft_layers=2"),
    ],
)
def test_wrong_keys_and_values_are_named(overrides, message):
    with pytest.raises(ValueError, match="^(?s:.*)" + message):
        read_recipe(None, ["target=t", "data=d.jsonl", *overrides])


def test_a_new_drafter_may_have_what_upstream_reads_besides_fields():
    recipe, _ = read_recipe(None, ["target=t", "data=d", "draft_config={attn_implementation: eager, rope_theta: 1e4}"])
    assert recipe.draft_config["attn_implementation"] == "eager"


def test_no_key_has_two_owners_and_all_are_listed(capsys):
    ours, theirs = RecipeArguments.__dataclass_fields__, DFlashTrainingArguments.__dataclass_fields__
    assert not set(ours) & set(theirs)
    listed = {line.strip().split("=")[0] for line in key_lines()}
    assert set(ours) | {name for name, one in theirs.items() if one.init} <= listed
    assert main(["train", "--keys"]) == 0
    assert "  block_size=None  Block size of a new drafter, including the anchor; default" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"), THINKING)


@pytest.fixture
def data(tmp_path):
    rows = []
    for i in range(12):
        user, answer = {"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i}, as you wish."}
        rows.append({"messages": [user, answer]})
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


TINY = (
    *("mask_token_id=null", "target_layer_ids=[0, 2]", "num_draft_layers=1", "block_size=4", "max_length=64"),
    *("draft_config.intermediate_size=32", "max_steps=2", "logging_steps=1", "disable_tqdm=true", "report_to=none"),
    *("num_anchors=4", "per_device_train_batch_size=2", "gradient_accumulation_steps=1", "bf16=false", "use_cpu=true"),
    *("dataloader_num_workers=0", "target_dtype=float32"),
)


def train(capsys, folder, output, *overrides, config=DEMO):
    code = main(["train", "--config", str(config), f"target={folder}", f"output_dir={output}", *TINY, *overrides])
    printed = capsys.readouterr()
    print(printed.err)
    return code, printed.out, (printed.err.strip().splitlines() or [""])[-1]


def test_the_demo_recipe_from_data_to_a_drafter_that_decodes(folder, data, tmp_path, capsys):
    output = tmp_path / "drafter"
    options = (f"data={data}", f"eval_data={data}", "eval_strategy=steps", "eval_steps=2", "save_steps=1")
    options = (*options, "decode_prompts=2", "decode_max_new_tokens=4")
    kwargs = "chat_template_kwargs.enable_thinking=false"
    code, out, error = train(capsys, folder, output, *options, kwargs)
    assert code == 0, error
    assert "rows              12" in out and f"The drafter is in {output}" in out
    assert f"dflash eval --target {folder} --draft {output} --data" in out
    assert "eval_loss" in out and "eval_tau" in out
    config = DFlashDraftConfig.from_pretrained(output)
    assert config.dflash_config["chat_template_kwargs"] == {"enable_thinking": False}
    assert (config.mask_token_id, config.block_size, config.target_layer_ids) == (259, 4, [0, 2])
    draft = DFlashDraftModel.from_pretrained(output).eval()
    draft.save_pretrained(tmp_path / "again")
    again = DFlashDraftConfig.from_pretrained(tmp_path / "again")
    assert again.dflash_config == config.dflash_config  # training's keys survive
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[5, 6, 7]])
    alone = target.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=draft), alone)

    # Another mode than the drafter's, further training, and going on from a checkpoint.
    code, out, error = train(capsys, folder, output, *options, kwargs, "resume_from_checkpoint=auto", "max_steps=3")
    assert code == 0 and "resuming from" in out and "checkpoint-2" in out
    more = tmp_path / "two words"
    code, out, _ = train(capsys, folder, more, f"data={data}", f"draft={output}")
    assert code == 0 and f"dflash eval --target {folder} --draft '{more}' --data" in out  # it was not quoted
    more = DFlashDraftConfig.from_pretrained(more)
    assert more.dflash_config["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("key, has", [("num_draft_layers", 2), ("block_size", 4), ("target_layer_ids", [0, 2])])
def test_a_given_drafter_keeps_its_shape(key, has, folder, data, tmp_path, capsys):
    """Another value was ignored."""
    given = f"target={folder}", f"data={data}", *TINY, "num_draft_layers=2"
    assert main(["train", *given, f"output_dir={tmp_path / 'first'}"]) == 0
    given = *given, f"draft={tmp_path / 'first'}"
    assert main(["train", *given, f"output_dir={tmp_path / 'same'}", f"{key}=null"]) == 0
    capsys.readouterr()
    other = [0, 1] if has == [0, 2] else 3
    assert main(["train", *given, f"output_dir={tmp_path / 'other'}", f"{key}={other}"]) == 1
    assert f"{key}={other}, but {tmp_path / 'first'} was trained with {has}; leave it out." in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["packing", "streaming"])
def test_packed_and_streamed_data_train(mode, folder, data, tmp_path, capsys):
    code, out, error = train(capsys, folder, tmp_path / "drafter", f"data={data}", f"{mode}=true")
    assert code == 0, error
    assert (tmp_path / "drafter" / "model.safetensors").is_file()


def test_stored_features_train_with_what_they_were_stored_with(folder, data, tmp_path, capsys):
    features = tmp_path / "features"
    command = ["features", "--data", str(data), "--target", str(folder), "--output", str(features), "--device", "cpu"]
    options = ["--target-layer-ids", "0", "2", "--max-length", "64", "--template-args", '{"enable_thinking": false}']
    assert main([*command, *options, "--store-dtype", "float32"]) == 0
    code, _, error = train(capsys, folder, tmp_path / "drafter", f"features={features}", config=OFFLINE)
    assert code == 0, error
    config = DFlashDraftConfig.from_pretrained(tmp_path / "drafter")
    assert config.dflash_config["chat_template_kwargs"] == {"enable_thinking": False}
    other = (f"features={features}", "chat_template_kwargs.enable_thinking=true")
    code, _, error = train(capsys, folder, tmp_path / "other", *other, config=OFFLINE)
    assert code == 1 and "was made with chat_template_kwargs={'enable_thinking': False}, not" in error


def test_features_in_the_folder_of_the_run_are_kept(folder, data, tmp_path, capsys):
    """A run of stored features removed them if they were in `features` of its own output folder."""
    features = tmp_path / "drafter" / "features"
    command = ["features", "--data", str(data), "--target", str(folder), "--output", str(features), "--device", "cpu"]
    options = ["--target-layer-ids", "0", "2", "--max-length", "64", "--template-args", '{"enable_thinking": false}']
    assert main([*command, *options, "--store-dtype", "float32"]) == 0
    before = sorted(path.name for path in features.iterdir())
    code, _, error = train(capsys, folder, tmp_path / "drafter", f"features={features}", config=OFFLINE)
    assert code == 0, error
    assert sorted(path.name for path in features.iterdir()) == before


@pytest.mark.parametrize("source", ["data", "features"])
def test_a_drafter_begins_as_its_target_with_the_tokens_of_the_data(source, folder, data, tmp_path, capsys):
    given = f"data={data}"
    if source == "features":
        command = ["features", "--data", str(data), "--target", str(folder), "--output", str(tmp_path / "features")]
        options = ["--target-layer-ids", "0", "2", "3", "--max-length", "64", "--device", "cpu"]
        assert main([*command, *options, "--template-args", '{"enable_thinking": false}']) == 0
        given = f"features={tmp_path / 'features'}"
    options = (given, "draft_vocab_size=20", "init_layers=[3]", "learning_rate=1e-12", "warmup_steps=0")
    config = DEMO if source == "data" else OFFLINE
    code, out, error = train(capsys, folder, tmp_path / "drafter", *options, config=config)
    assert code == 0, error
    assert "draft vocabulary  20 tokens, " in out
    draft, target = (
        DFlashDraftModel.from_pretrained(tmp_path / "drafter"),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    head = target.get_output_embeddings().weight[draft.target_ids(torch.arange(20))]
    assert torch.equal(draft.lm_head.weight, head.to(draft.dtype))
    last = target.model.layers[3].self_attn.o_proj.weight
    assert torch.allclose(draft.layers[0].self_attn.o_proj.weight, last.to(draft.dtype), atol=1e-4)
    text = target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False, assistant_model=draft)
    assert torch.equal(text, target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False))


def test_an_adapter_is_merged_into_the_drafter_it_was_trained_on(folder, data, tmp_path, capsys):
    pytest.importorskip("peft")
    target = AutoModelForCausalLM.from_pretrained(folder)
    draft = make_draft(target, target_layer_ids=[0, 2])
    draft.save_pretrained(tmp_path / "published")
    output = tmp_path / "adapted"
    output.mkdir()
    (output / "eval_report.json").write_text("{}")  # of other weights
    options = (f"draft={tmp_path / 'published'}", f"data={data}", "peft_config.r=2", "warmup_steps=0")
    options = (*options, "num_draft_layers=2")
    code, _, error = train(capsys, folder, output, *options, config=LORA)
    assert code == 0, error
    adapted = DFlashDraftModel.from_pretrained(output)
    assert adapted.config.mask_token_id == 279
    changed = [not torch.equal(one, other) for one, other in zip(adapted.parameters(), draft.parameters())]
    assert any(changed) and not all(changed)  # norms are not adapted
    assert (output / "adapter" / "adapter_model.safetensors").is_file() and not (output / "eval_report.json").exists()
    assert json.loads((output / "card_facts.json").read_text(encoding="utf-8"))["training"]["optimizer_steps"] == 2


def test_responses_of_another_mode_are_refused(folder, data, tmp_path, capsys):
    """A drafter trained without thinking and used with it accepts less than half (z-lab/dflash#133)."""
    notes = data.with_name(f"{data.name}.settings.json")
    notes.write_text(json.dumps({"chat_template_kwargs": {"enable_thinking": False}}), encoding="utf-8")
    wrong = (f"data={data}", "chat_template_kwargs={enable_thinking: true}")
    code, _, error = train(capsys, folder, tmp_path / "drafter", *wrong)
    assert code == 1 and "was made with chat_template_kwargs={'enable_thinking': False}, not" in error


def test_what_is_wrong_is_told_in_one_line(folder, data, tmp_path, capsys):
    (tmp_path / "list.yaml").write_text("- a", encoding="utf-8")
    (tmp_path / "broken.yaml").write_text("a: [", encoding="utf-8")
    output, good = tmp_path / "drafter", f"data={data}"
    for overrides, options, message in (
        ([good], {"config": tmp_path / "absent.yaml"}, "absent.yaml: there is no such file"),
        ([good], {"config": tmp_path / "lora.yaml"}, "no such file; the bundled recipe is"),
        ([good], {"config": tmp_path}, "is a folder; name a file"),
        ([good, f"output_dir={data}"], {}, "is a file; name a folder"),
        ([good], {"config": tmp_path / "list.yaml"}, "list.yaml must hold keys and values"),
        ([good], {"config": tmp_path / "broken.yaml"}, "broken.yaml is not YAML"),
        (["data=absent.jsonl"], {}, "there is no such file"),
        ([good, "blok_size=1"], {}, "did you mean 'block_size'"),
        ([good, "output_dir=null"], {}, "No output folder is given"),
        ([good, "push_to_hub=true"], {}, "push_to_hub=True needs hub_model_id"),
        ([good, "push_to_hub=true", "hub_model_id=me/a/b"], {}, "hub_model_id='me/a/b' is not a repository id"),
        ([good, "streaming=true", "max_steps=-1"], {}, "streaming=True has no length; set max_steps"),
        ([good, "mask_token_id=2"], {}, "12 because it holds the mask token 2"),
        ([good, "num_anchors=0"], {}, "num_anchors=0"),
        ([good, f"draft={tmp_path}"], {}, "config.json"),
    ):
        code, _, error = train(capsys, folder, output, *overrides, **options)
        assert code == 1 and message in error and error.startswith("dflash train: "), (message, error)
    assert main(["train", f"target={folder}", good]) == 1
    assert "No output folder is given" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("max_minutes=0", "max_minutes=0.0 must be positive"),
        ("block_size=1", "block_size=1 must be at least 2, the anchor and one drafted token"),
    ],
)
def test_settings_that_cannot_be_are_told_before_anything_is_measured(folder, data, tmp_path, capsys, given, message):
    output = tmp_path / "drafter"
    command = ["train", "--target", str(folder), "--data", str(data), "--output", str(output), given]
    assert main(command) == 1
    said = capsys.readouterr()
    assert message in said.err and "machine" not in said.out and not output.exists()


@pytest.mark.parametrize("given", [[], ["overwrite_output_dir=true"]])
def test_another_model_is_never_overwritten(folder, data, tmp_path, capsys, given):
    """The target itself could be named as the output, and was replaced."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    assert main(["train", f"target={model}", f"data={data}", "--output", str(model), *given, *PLAIN]) == 1
    assert "holds another model, which the drafter would overwrite" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_half_precision_may_be_asked_for_on_a_cpu(folder, data, tmp_path):
    """`bf16=true` was refused for want of `use_cpu`, which a plain run chooses itself."""
    overrides = [f"target={folder}", f"data={data}", f"output_dir={tmp_path / 'drafter'}", "bf16=true"]
    recipe, training = read_recipe(None, overrides)
    _check_before(recipe, training, given_keys(overrides, training))


def test_a_dry_run_loads_nothing(data, capsys):
    code, out, _ = train(capsys, "nowhere", "there", f"data={data}", "--dry-run")
    assert code == 0 and "block_size: 4\n" in out and "max_steps: 2\n" in out
    code, out, error = train(capsys, "nowhere", "there", "data=nothing.jsonl", "--dry-run")
    assert code == 1 and "data='nothing.jsonl': there is no such file" in error and not out.strip()


PLAIN = ("draft_config.intermediate_size=32", "report_to=none", "disable_tqdm=true", "max_length=64")


@pytest.fixture
def steady(monkeypatch):
    """A machine that is always as fast, and a clock that goes on by a fiftieth of a second each time it is read."""
    seconds, machine = itertools.count(0, 0.02), Machine("cpu", 1, 16e9, 100e9, 74e9, 375e9)
    monkeypatch.setattr(Pace, "clock", staticmethod(lambda: next(seconds)))
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, device, folder: machine))


def test_a_dry_run_without_a_recipe_shows_what_a_run_would_choose(steady, folder, data, tmp_path, capsys):
    """It showed what was given alone."""
    given = ["--target", str(folder), "--data", str(data), "--output", str(tmp_path / "drafter")]
    assert main(["train", *given, "--dry-run", "max_minutes=3", "max_length=64"]) == 0
    out = capsys.readouterr().out
    assert "machine           cpu" in out and "  block_size=8 " in out and "\nblock_size: 8\n" in out
    assert "\nmax_minutes: 3" in out and re.search(r"\nsave_steps: \d+\n", out) and not (tmp_path / "drafter").exists()


def test_a_plain_run_chooses_and_keeps_to_its_time(steady, folder, data, tmp_path, capsys):
    output = tmp_path / "drafter"
    command = ["train", f"target={folder}", f"data={data}", f"output_dir={output}", *PLAIN]
    assert main([*command, "max_minutes=0.05", "save_strategy=steps", "save_steps=10"]) == 0
    out = capsys.readouterr().out
    assert "machine           cpu" in out and "  store_rows=12 " in out and "  block_size=8 " in out
    assert "time              0.05 min: " in out and " steps of " in out
    said = re.search(r"trained           (\d+) steps, (\d+) s in all", out)
    assert int(said[1]) > 20 and int(said[2]) <= 3
    assert "simulated_tau" in out  # a line at least
    draft = DFlashDraftModel.from_pretrained(output)
    chosen = json.loads((output / "run.json").read_text(encoding="utf-8"))["chosen"]
    assert chosen["bf16"] and draft.dtype == torch.bfloat16
    assert draft.config.block_size == 8 and not (output / ".features").exists()

    # It goes on with what was chosen, on whatever machine.
    (last,) = sorted(output.glob("checkpoint-*"), key=lambda one: int(one.name.split("-")[1]))[-1:]
    assert main([*command, "max_minutes=0.05", f"resume_from_checkpoint={last}"]) == 0
    assert f"resuming from {last}" in capsys.readouterr().out


def test_the_best_checkpoint_is_loaded_of_those_that_were_evaluated(steady, folder, data, tmp_path, capsys):
    """The chosen save_steps was no multiple of eval_steps, which upstream refuses."""
    output = tmp_path / "drafter"
    command = ["train", f"target={folder}", f"data={data}", f"output_dir={output}", *PLAIN, f"eval_data={data}"]
    options = ("max_steps=4", "eval_strategy=steps", "save_strategy=steps", "load_best_model_at_end=true")
    assert main([*command, *options, "eval_steps=3", "store_rows=0"]) == 0, capsys.readouterr().err
    assert (output / "checkpoint-3" / "config.json").is_file()
    assert saved_every({"eval_steps": 100.0, "load_best_model_at_end": True}, 233) == 200
    assert saved_every({"eval_steps": 0.2, "load_best_model_at_end": True}, 233) == 0.2
    assert saved_every({"logging_steps": 11, "load_best_model_at_end": True}, 5) == 11
    assert saved_every({"eval_steps": 100.0}, 233) == 233


def test_a_command_that_trains_nothing_fails(folder, data, tmp_path, capsys):
    """It wrote a drafter after 0 steps, with status 0."""
    output, batch = tmp_path / "drafter", ("per_device_train_batch_size=16", "dataloader_drop_last=true")
    code, _, error = train(capsys, folder, output, f"data={data}", *batch)
    assert code == 1 and "12 examples are less than a batch of per_device_train_batch_size=16" in error
    assert not list(output.glob("*.safetensors"))


def test_a_file_s_paths_may_be_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "recipe.yaml").write_text("target: t\ndata: [~/one.jsonl, two.jsonl]\noutput_dir: ~/out\n")
    recipe, training = read_recipe(tmp_path / "recipe.yaml")
    assert recipe.data == [str(tmp_path / "one.jsonl"), "two.jsonl"]
    assert training["output_dir"] == str(tmp_path / "out") and recipe.target == "t"


@pytest.mark.parametrize("head", ["dspark", "domino", "dflash2"])
def test_a_finished_drafter_in_half_precision_is_evaluated(head, folder, data, tmp_path):
    """Saved in bf16, which mixed precision does not compute in: the head met states in fp32."""
    sizes = {"dspark": "markov_rank: 8, markov_head_type: rnn", "domino": "gru_hidden_dim: 8, emb_dim: 8"}
    config = f"draft_config={{{sizes.get(head, 'selector_rank: 8, conv_group_size: 8')}, intermediate_size: 32}}"
    given = [f"target={folder}", f"data={data}", f"eval_data={data}", f"output_dir={tmp_path / 'out'}"]
    given += [*(one for one in TINY if "draft_config" not in one), f"head={head}", config, "bf16=true", "use_cpu=true"]
    trainer = train_recipe(*read_recipe(None, given))
    assert trainer.draft.dtype == torch.bfloat16 and trainer.evaluate()["eval_loss"] > 0


def test_what_is_said_and_what_a_file_says_is_not_chosen(steady, folder, data, tmp_path, capsys):
    command = ["train", f"target={folder}", f"data={data}", f"output_dir={tmp_path / 'one'}", *PLAIN]
    given = ("max_steps=2", "block_size=4", "num_anchors=3", "learning_rate=1e-4", "store_rows=0", "init_layers=null")
    assert main([*command, *given]) == 0
    out = capsys.readouterr().out
    assert not {one.split("=")[0] for one in given} & {line.strip().split("=")[0] for line in out.splitlines()}
    assert "about 2 steps of " in out and DFlashDraftConfig.from_pretrained(tmp_path / "one").block_size == 4
    code, out, _ = train(capsys, folder, tmp_path / "two", f"data={data}")
    assert code == 0 and "time              about " in out and "loss_type=" not in out


def test_the_finished_drafter_is_published_once(folder, data, tmp_path, capsys, monkeypatch):
    from dflash_hf.hub import publish

    calls = []

    def stand_in(folder, repo, private, facts, token):
        calls.append((Path(folder, "model.safetensors").is_file(), repo, facts.base_model, token))
        if len(calls) > 1:
            raise publish.PublishError("the Hub is away")
        return publish.Publication(repo, {}, [], None, [], "https://hub/commit")

    monkeypatch.setattr(publish, "publish", stand_in)
    options = (f"data={data}", "push_to_hub=true", "hub_model_id=me/drafter", "base_model=some/target", "hub_token=x")
    code, out, error = train(capsys, folder, tmp_path / "drafter", *options)
    assert code == 0 and "published         https://hub/commit" in out, error
    assert calls == [(True, "me/drafter", "some/target", "x")]
    output = tmp_path / "a drafter"
    recipe, training = read_recipe(
        None, [f"target={folder}", f"output_dir={output}", *options, "hub_private_repo=true"]
    )
    recipe.data = ["me/answers", str(data)]
    with pytest.raises(
        ValueError, match="is saved, but not published: the Hub is away\nTry again with `(.*)`"
    ) as error:
        _publish(recipe, DFlashTrainingArguments(**{**training, "push_to_hub": False}), print)
    # It left out the options: the card lacked its target, and a private drafter would have become public.
    again = cli.parse(shlex.split(re.search("`dflash (.*)`", str(error.value))[1]))
    assert (again.folder, again.repo, again.private) == (str(output), "me/drafter", True)
    assert (again.base_model, again.datasets) == ("some/target", ["me/answers"])


def test_targets_without_a_spare_row_need_a_mask_token(data, tmp_path, capsys):
    from support.pairs import make_target
    from support.tiny_chat import make_tokenizer

    make_target(vocab_size=259).save_pretrained(tmp_path / "full")
    make_tokenizer(CHATML).save_pretrained(tmp_path / "full")
    code, _, error = train(capsys, tmp_path / "full", tmp_path / "drafter", f"data={data}")
    assert code == 1 and "has no spare embedding row for the mask token; set mask_token_id" in error
    # Said before the answers are made, not after it.
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a.x1 = n"}\n')
    files = ["--data", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "responses.jsonl")]
    limits = ["--max-new-tokens", "4", "--device", "cpu"]
    assert main(["regenerate", "--target", str(tmp_path / "full"), *files, *limits]) == 0
    said = capsys.readouterr().err
    assert "which training needs: set --mask-token-id to an id" in said and "Its last added tokens: " in said


@pytest.mark.slow
def test_accelerate_launches_two_processes(folder, data, tmp_path):
    """About half a minute: two ranks encode the data once, train, and one of them saves and speaks."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    run = ["-m", "dflash_hf.cli", "train", "--config", str(DEMO), f"target={folder}", f"data={data}", *TINY]
    for name, extra in (("whole", ()), ("stream", ("streaming=true",))):
        command = [*launch, *run, f"output_dir={tmp_path / name}", *extra]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("rows              12") == 1
        assert done.stdout.count("The drafter is in") == 1
        DFlashDraftModel.from_pretrained(tmp_path / name)


def test_the_command_line_is_a_module():
    """`accelerate launch -m dflash_hf.cli` runs it by this name."""
    text = Path(cli.__file__).read_text(encoding="utf-8")
    assert text.rstrip().endswith("sys.exit(main())")
