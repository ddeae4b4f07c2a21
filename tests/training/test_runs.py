"""`dflash train` from data to a loadable drafter, with a tiny target: what it writes, refuses and resumes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.pairs import make_draft, make_target
from support.runs import TINY_RECIPE, as_options, as_settings
from support.tiny_chat import CHATML, THINKING, make_tokenizer
from transformers import AutoModelForCausalLM, TrainerCallback

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf._io.files import locked
from dflash_hf._io.names import ENGINES
from dflash_hf.cli import main
from dflash_hf.hub.check import check
from dflash_hf.hub.findings import can_read_by_engine
from dflash_hf.training import feature_store
from dflash_hf.training.feature_manifest import FeatureManifest
from dflash_hf.training.recipe import read_recipe
from dflash_hf.training.train import train as train_recipe


pytest.importorskip("yaml")
pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("own_cache")
FOLDER = Path(__file__).parents[2] / "examples" / "recipes"
DEMO, OFFLINE, LORA = (FOLDER / f"{name}.yaml" for name in ("demo", "offline", "lora"))
TINY = (*TINY_RECIPE, "dataloader_num_workers=0", "save_steps=1")
ONLINE = ("max_length=64", "store_rows=0")
RESUME = "resume_from_checkpoint=auto"


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "data.jsonl")


def write(path, answer="as you wish"):
    rows = []
    for i in range(12):
        user = {"role": "user", "content": f"Say {i}"}
        answers = {"role": "assistant", "content": f"{i}, {answer}."}
        rows.append({"messages": [user, answers]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def train(capsys, folder, output, *overrides, config=DEMO):
    settings = [*TINY, *overrides] if config == OFFLINE else [*TINY, *ONLINE, *overrides]
    code = main(
        ["train", "--config", str(config), *as_options([f"target={folder}", f"output_dir={output}", *settings])]
    )
    printed = capsys.readouterr()
    print(printed.err)
    return code, printed.out, (printed.err.strip().splitlines() or [""])[-1]


def store(folder, data, output, *layers):
    """`dflash features` of a target's layers."""
    command = ["features", "--data", str(data), "--target", str(folder), "--output", str(output), "--device", "cpu"]
    options = ["--target-layer-ids", *layers, "--max-length", "64", "--template-args", '{"enable_thinking": false}']
    assert main([*command, *options, "--store-dtype", "float32"]) == 0


def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_demo_recipe_makes_a_drafter_that_decodes(folder, data, tmp_path, capsys):
    output = tmp_path / "drafter"
    options = (f"data={data}", f"eval_data={data}", "eval_strategy=steps", "eval_steps=2", "save_steps=1")
    kwargs = "chat_template_kwargs.enable_thinking=false"
    code, out, error = train(capsys, folder, output, *options, kwargs)
    assert code == 0, error
    assert "rows              12" in out and f"The drafter is in {output}" in out
    assert f"dflash eval --target {folder} --draft {output} --data" in out
    assert re.search(r"^step       2   pass .* loss [\d.]+   tau [\d.]+ of eval_data   accuracy", out, re.MULTILINE)
    assert re.search(r"tau      [\d.]+, simulated, of eval_data; [\d.]+ of the training rows$", out.splitlines()[-1])
    config = DFlashDraftConfig.from_pretrained(output)
    assert config.dflash_config["chat_template_kwargs"] == {"enable_thinking": False}
    assert (config.mask_token_id, config.block_size, config.target_layer_ids) == (259, 4, [0, 2])
    draft = DFlashDraftModel.from_pretrained(output).eval()
    draft.save_pretrained(tmp_path / "again")
    resaved = DFlashDraftConfig.from_pretrained(tmp_path / "again")
    assert resaved.dflash_config == config.dflash_config  # training's keys survive
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[5, 6, 7]])
    target_only = target.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=draft), target_only)

    # Another mode than the drafter's, further training, and going on from a checkpoint.
    code, out, error = train(capsys, folder, output, *options, kwargs, "resume_from_checkpoint=auto", "max_steps=3")
    assert code == 0 and "resuming from" in out and "checkpoint-2" in out
    more = tmp_path / "two words"
    code, out, _ = train(capsys, folder, more, f"data={data}", f"draft={output}", "resume_from_checkpoint=auto")
    assert f"no complete checkpoint in {more}: starting a new run" in out
    assert code == 0 and f"dflash eval --target {folder} --draft '{more}' --data" in out  # it was not quoted
    more = DFlashDraftConfig.from_pretrained(more)
    assert more.dflash_config["chat_template_kwargs"] == {"enable_thinking": False}


def test_given_drafter_keeps_its_shape(folder, data, tmp_path, capsys):
    """Another value was ignored."""
    target = AutoModelForCausalLM.from_pretrained(folder)
    draft_folder = tmp_path / "first"
    make_draft(target, block_size=4, num_hidden_layers=2, target_layer_ids=[0, 2]).save_pretrained(draft_folder)
    settings = (f"target={folder}", f"data={data}", *TINY, *ONLINE, "num_draft_layers=2", f"draft={draft_folder}")
    for key, trained, value in (
        ("num_draft_layers", 2, 3),
        ("block_size", 4, 3),
        ("target_layer_ids", [0, 2], [0, 1]),
    ):
        assert main(["train", *as_options([*settings, f"output_dir={tmp_path / 'other'}", f"{key}={value}"])]) == 1
        option = f"--{key.replace('_', '-')}"
        value = value if isinstance(value, int) else " ".join(map(str, value))
        assert (
            f"{option} {value}, but {draft_folder} was trained with {trained}; leave it out."
            in capsys.readouterr().err
        )


def test_training_leaves_stored_features_unchanged(folder, data, tmp_path, capsys):
    """Also in the run's own folder, which a run of stored features once emptied."""
    features = tmp_path / "drafter" / "features"
    store(folder, data, features, "0", "2")
    before = contents(features)
    code, _, error = train(capsys, folder, tmp_path / "drafter", f"features={features}", config=OFFLINE)
    assert code == 0, error
    config = DFlashDraftConfig.from_pretrained(tmp_path / "drafter")
    assert config.dflash_config["chat_template_kwargs"] == {"enable_thinking": False}
    assert contents(features) == before
    other_settings = (f"features={features}", "chat_template_kwargs.enable_thinking=true")
    code, _, error = train(capsys, folder, tmp_path / "other", *other_settings, config=OFFLINE)
    assert code == 1 and "was made with chat_template_kwargs={'enable_thinking': False}, not" in error


@pytest.mark.parametrize(("source", "layers"), [("data", "init_layers=[3]"), ("features", "init_layers=[-1]")])
def test_init_layers_copies_the_targets_weights(source, layers, folder, data, tmp_path, capsys):
    rows = f"data={data}"
    if source == "features":
        store(folder, data, tmp_path / "features", "0", "2")
        rows = f"features={tmp_path / 'features'}"
    options = (rows, "draft_vocab_size=20", "share_head=false", layers, "learning_rate=1e-12", "warmup_steps=0")
    config = DEMO if source == "data" else OFFLINE
    code, out, error = train(capsys, folder, tmp_path / "drafter", *options, config=config)
    assert code == 0, error
    assert "draft vocabulary  20 tokens, " in out
    draft = DFlashDraftModel.from_pretrained(tmp_path / "drafter")
    target = AutoModelForCausalLM.from_pretrained(folder)
    head = target.get_output_embeddings().weight[draft.target_ids(torch.arange(20))]
    assert torch.equal(draft.lm_head.weight, head.to(draft.dtype))
    last = target.model.layers[3].self_attn.o_proj.weight
    assert torch.allclose(draft.layers[0].self_attn.o_proj.weight, last.to(draft.dtype), atol=1e-4)
    text = target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False, assistant_model=draft)
    assert torch.equal(text, target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False))


def test_reduced_drafter_gets_the_targets_head(folder, data, tmp_path, capsys):
    """By default SGLang did not serve what a CPU had trained."""
    options = (f"data={data}", "draft_vocab_size=20", "share_head=true")
    code, out, error = train(capsys, folder, tmp_path / "drafter", *options)
    assert code == 0, error
    assert "shared head       all tokens are drafted" in out
    reduced = DFlashDraftModel.from_pretrained(tmp_path / "drafter" / "checkpoint-2")
    shared = DFlashDraftModel.from_pretrained(tmp_path / "drafter")
    assert reduced.config.draft_vocab_size == 20 and shared.config.draft_vocab_size is None
    assert all(torch.equal(value, reduced.state_dict()[name]) for name, value in shared.state_dict().items())
    assert "sglang" in ENGINES and can_read_by_engine(check(tmp_path / "drafter", ENGINES), ENGINES) == dict.fromkeys(
        ENGINES, True
    )
    code, out, error = train(capsys, folder, tmp_path / "drafter", *options, RESUME, "max_steps=3")
    assert code == 0 and "resuming from" in out, error

    heads = ("head=dspark", "draft_config.markov_rank=4")
    code, _, error = train(capsys, folder, tmp_path / "other", *options, *heads)
    assert code == 1 and "--share-head: markov_head.markov_w2.weight only covers the 20 tokens" in error


def test_draft_vocabulary_of_all_tokens_is_not_reduced(folder, data, tmp_path, capsys):
    """A run with the target's own size counted the tokens, and then ended: its drafter has no `d2t`."""
    size = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    code, _, error = train(capsys, folder, tmp_path / "drafter", f"data={data}", f"draft_vocab_size={size}")
    assert code == 0, error
    assert not DFlashDraftModel.from_pretrained(tmp_path / "drafter").config.has_own_lm_head


@pytest.mark.parametrize("word", ["false", "no", "False"])
def test_run_that_is_not_to_resume_starts_anew(word, folder, data, tmp_path, capsys):
    """`false` was taken for a folder: YAML reads it as a truth value, which became the word "no"."""
    config = tmp_path / "recipe.yaml"
    config.write_text(f"preset: cpu\nresume_from_checkpoint: {word}\n")
    code, _, error = train(capsys, folder, tmp_path / "recipe", f"data={data}", config=config)
    assert code == 0, error
    option = f"resume_from_checkpoint={word}"
    code, _, error = train(capsys, folder, tmp_path / "option", f"data={data}", option, "overwrite_output_dir=true")
    assert code == 0, error


def test_adapter_is_merged_into_its_drafter(folder, data, tmp_path, capsys):
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
    changed = [
        not torch.equal(adapted_parameter, parameter)
        for adapted_parameter, parameter in zip(adapted.parameters(), draft.parameters())
    ]
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


# What a run is given, and what its error names.
WRONG = {
    "config=absent.yaml": "absent.yaml: there is no such file",
    "config=lora.yaml": "there is no such file; bundled recipes are in .*examples/recipes",
    "config=.": "is a folder; name a file",
    "config=list.yaml": "list.yaml must hold keys and values",
    "config=broken.yaml": "broken.yaml is not YAML",
    "output_dir=data.jsonl": "is a file; name a folder",
    "output_dir=data.jsonl/drafter": "cannot be written",
    "output_dir=null": "No output folder is given",
    "data=absent.jsonl": "there is no such file",
    "eval_data=absent.jsonl eval_strategy=steps": "there is no such file",
    "eval_data=empty.jsonl eval_strategy=steps": "is an empty file",
    "eval_data=data.jsonl": "--eval-data .* is never read with eval_strategy=no",
    "eval_strategy=epoch": "--eval-strategy epoch has nothing to evaluate on: name eval_data",
    "eval_split=train eval_strategy=steps metric_for_best_model=f1": "--metric-for-best-model f1 is not measured",
    "eval_split=train eval_strategy=steps metric_for_best_model=tau": "is measured with eval_decode, the number",
    "num_anchors=0": "--num-anchors 0 must be at least 1",
    "max_minutes=0 max_steps=-1": "--max-minutes 0 must be positive",
    "report_to=nobody": "--report-to nobody is not installed, or unknown",
    "peft_config={rank: 4}": "--peft-config {'rank': 4} is not a PEFT configuration",
    "push_to_hub=true": "--push-to-hub .* is a folder: set hub_card.base_model",
    "push_to_hub=true hub_strategy=checkpoint": "--hub-strategy checkpoint would add training states",
    "hub_card={licence: mit}": "hub_card has an unknown fact 'licence'; a card has base_model,",
    "draft=.": "config.json",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=list(WRONG))
def test_wrong_run_ends_before_its_target_is_loaded(text, message, data, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dflash_hf.training.train.load_target", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.chdir(tmp_path)
    for name, content in (("list.yaml", "- a"), ("broken.yaml", "a: ["), ("empty.jsonl", "")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    config = DEMO
    words = [text] if "{" in text else text.split()
    if text.startswith("config="):
        config = Path(text.removeprefix("config="))
        words = []
    code, _, error = train(capsys, folder, tmp_path / "drafter", f"data={data}", *words, config=config)
    assert code == 1 and re.search(message, error) and error.startswith("dflash train: ")
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["mask_token_id=2"], "12 because it holds the mask token 2"),
        (["per_device_train_batch_size=16", "dataloader_drop_last=true"], "12 examples are less than a batch"),
        (["head_only=true"], "--head-only trains the head of a drafter"),
        (["init_layers=[9]"], "--init-layers 9 must name a layer of the target"),
    ],
)
def test_wrong_run_stores_no_features(settings, message, folder, data, tmp_path, capsys, monkeypatch):
    """They took a third of the time, and then the trainer refused its arguments."""
    if "batch" not in message:
        monkeypatch.setattr("dflash_hf.training.row_features.store_rows", lambda *_: pytest.fail("stored"))
    code, _, error = train(capsys, folder, tmp_path / "drafter", f"data={data}", "store_rows=-1", *settings)
    assert code == 1 and message in error
    assert not list(tmp_path.glob("drafter/*.safetensors"))


@pytest.mark.parametrize("changed", ["layers", "template", "tokenizer"])
def test_features_of_something_else_are_refused(changed, folder, data, tmp_path, capsys, monkeypatch):
    """Those of a fine-tuned target passed: only embedding and head were compared."""
    target = tmp_path / "target"
    features = tmp_path / "features"
    shutil.copytree(folder, target)
    store(target, data, features, "0", "2")
    if changed == "layers":
        tuned = AutoModelForCausalLM.from_pretrained(target)
        with torch.no_grad():
            tuned.model.layers[1].mlp.up_proj.weight.mul_(1.05)
        tuned.save_pretrained(target)
    else:
        monkeypatch.setattr("dflash_hf.training.train.load_target", lambda *_, **__: pytest.fail("loaded"))
    if changed == "template":
        make_tokenizer(CHATML).save_pretrained(target)
    if changed == "tokenizer":
        tokenizer = make_tokenizer(THINKING)
        tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(target)
    code, _, error = train(capsys, target, tmp_path / "drafter", f"features={features}", config=OFFLINE)
    key = "weights.layers" if changed == "layers" else changed
    remedy = r"train with the target, tokenizer, chat template \(chat_template=FILE\) and target_layer_ids of the"
    assert code == 1 and re.search(f"was stored with {key}='.*, not .*: {remedy}", error), error


@pytest.mark.parametrize("settings", [[], ["overwrite_output_dir=true"]])
def test_another_model_is_never_overwritten(folder, data, tmp_path, capsys, settings):
    """The target itself could be named as the output, and was replaced."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    code, _, error = train(capsys, model, model, f"data={data}", *settings)
    assert code == 1 and "holds another model, which the drafter would overwrite" in error
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


PLAIN = ("draft_config.intermediate_size=32", "report_to=none", "disable_tqdm=true", "max_length=64")


def test_run_ends_within_max_minutes(folder, data, tmp_path, capsys):
    output = tmp_path / "drafter"
    words = [f"target={folder}", f"data={data}", f"output_dir={output}", *PLAIN, "max_minutes=0.15"]
    command = ["train", *as_options(words)]
    assert main([*command, "--save-steps", "10", "--logging-steps", "5"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"time              about [\d,]+ steps of \S+ s, \d+ s left", printed.out)
    trained_line = re.search(r"trained           (\d+) steps, (\d+) s in all", printed.out)
    assert int(trained_line[1]) > 5 and int(trained_line[2]) <= 11
    draft = DFlashDraftModel.from_pretrained(output)
    assert draft.config.block_size == 4 and not (output / ".features").exists()
    last = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert main([*command, "--resume-from-checkpoint", str(last)]) == 0
    assert f"resuming from {last}" in capsys.readouterr().out


@pytest.mark.parametrize("head", ["dspark", "dflash2"])
def test_drafter_in_half_precision_is_evaluated(head, folder, data, tmp_path):
    """Saved in bf16, which mixed precision does not compute in: the head met states in fp32."""
    sizes = {"dspark": "markov_rank: 8, markov_head_type: rnn", "dflash2": "selector_rank: 8, conv_group_size: 8"}
    config = f"draft_config={{{sizes[head]}, intermediate_size: 32}}"
    settings = [f"target={folder}", f"data={data}", f"eval_data={data}", f"output_dir={tmp_path / 'out'}"]
    settings += [
        *ONLINE,
        *(setting for setting in TINY if "draft_config" not in setting),
        f"head={head}",
        config,
        "bf16=true",
    ]
    trainer = train_recipe(*read_recipe(None, as_settings(settings)))
    assert trainer.draft.dtype == torch.bfloat16 and trainer.evaluate()["eval_loss"] > 0


def test_targets_without_a_spare_row_need_a_mask_token(data, tmp_path, capsys):
    make_target(vocab_size=259).save_pretrained(tmp_path / "full")
    make_tokenizer(CHATML).save_pretrained(tmp_path / "full")
    code, _, error = train(capsys, tmp_path / "full", tmp_path / "drafter", f"data={data}")
    assert code == 1 and "has no spare embedding row for the mask token; set mask_token_id" in error
    # Said before the answers are made, not after it.
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a.x1 = n"}\n')
    files = ["--data", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "responses.jsonl")]
    limits = ["--max-new-tokens", "4", "--device", "cpu"]
    assert main(["regenerate", "--target", str(tmp_path / "full"), *files, *limits]) == 0
    warning = capsys.readouterr().err
    assert "which training needs: set --mask-token-id to an id" in warning and "Its last added tokens: " in warning


@pytest.mark.slow
def test_accelerate_launches_two_processes(folder, data, tmp_path):
    """About half a minute: two ranks encode the data once, train, and one of them saves and speaks."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launch = [sys.executable, *"-m accelerate.commands.launch --cpu --num_processes 2 --num_machines 1".split()]
    words = [f"target={folder}", f"data={data}", *TINY, *ONLINE, f"output_dir={tmp_path / 'drafter'}"]
    command = [*launch, "-m", "dflash_hf.cli", "train", "--config", str(DEMO), *as_options(words)]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("rows              12") == 1
    assert process.stdout.count("The drafter is in") == 1
    DFlashDraftModel.from_pretrained(tmp_path / "drafter")


# ----------------------------------------------------------------------------------------------- folders that are used


@pytest.fixture
def used_folder(folder, data, tmp_path, capsys):
    """A folder with a finished drafter and two checkpoints."""
    code, _, error = train(capsys, folder, tmp_path / "drafter", f"data={data}")
    assert code == 0, error
    return tmp_path / "drafter"


def test_used_folder_is_not_overwritten(used_folder, folder, data, capsys):
    before = contents(used_folder)
    code, _, error = train(capsys, folder, used_folder, f"data={data}")
    assert code == 1 and "holds a finished drafter. Resume with --resume-from-checkpoint auto" in error
    assert "--overwrite-output-dir" in error and "another --output-dir" in error
    code, _, error = train(capsys, folder, used_folder, f"data={data}", RESUME, "overwrite_output_dir=true")
    assert code == 1 and "contradict each other" in error
    code, _, error = train(capsys, folder, used_folder, f"data={data}", "resume_from_checkpoint=nowhere")
    assert code == 1 and "--resume-from-checkpoint nowhere: there is no such folder" in error
    assert contents(used_folder) == before
    for checkpoint in used_folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    code, _, error = train(capsys, folder, used_folder, f"data={data}", RESUME)
    assert code == 1 and "holds no checkpoint to resume from, but a finished drafter. Replace it with" in error


def test_overwriting_leaves_nothing_of_another_run(used_folder, folder, data, capsys):
    """`auto` later took the last checkpoint of the other run. A folder of the user's was taken for one."""
    (used_folder / "checkpoint-best").mkdir()
    (used_folder / "eval_report.json").write_text("{}")
    options = (f"data={data}", "overwrite_output_dir=true", "max_steps=1", "block_size=8")
    code, _, error = train(capsys, folder, used_folder, *options)
    assert code == 0, error
    assert {path.name for path in used_folder.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-best"}
    assert not list(used_folder.glob("eval_report.*")) and not (used_folder / ".lock").exists()
    assert DFlashDraftConfig.from_pretrained(used_folder).block_size == 8


def test_finished_run_resumes_with_more_steps(used_folder, folder, data, tmp_path, capsys):
    moved = data.rename(tmp_path / "moved.jsonl")
    code, out, error = train(capsys, folder, used_folder, f"data={moved}", RESUME, "max_steps=5", "logging_steps=3")
    assert code == 0 and "resuming from" in out and "checkpoint-2" in out, error


def test_unfinished_checkpoint_is_skipped(used_folder, folder, data, capsys):
    (used_folder / "checkpoint-2" / "trainer_state.json").write_text("{")
    (used_folder / "checkpoint-9").mkdir()
    code, out, _ = train(capsys, folder, used_folder, f"data={data}", RESUME)
    assert code == 0 and "checkpoint-1" in out


def test_two_runs_do_not_share_a_folder(folder, data, tmp_path, capsys):
    (tmp_path / "o" / ".features").mkdir(parents=True)  # of the first run, which has no checkpoint yet
    with locked(tmp_path / "o"):
        code, _, error = train(capsys, folder, tmp_path / "o", f"data={data}")
    assert code == 1 and "is being written by another process" in error
    assert (tmp_path / "o" / ".features").is_dir()


def test_killed_run_resumes_with_its_features(folder, data, tmp_path, capsys):
    """Killed by SIGKILL between two checkpoints: the features are not stored again, and other data are refused."""
    output = tmp_path / "o"
    script = [sys.executable, "-m", "dflash_hf.cli", "train", "--config", str(DEMO)]
    options = [f"target={folder}", f"data={data}", f"output_dir={output}", *TINY, *ONLINE, "store_rows=8"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [*script, *as_options([*options, "max_steps=100000"])], env=env, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 600
    while not (output / "checkpoint-3" / "trainer_state.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = contents(output / ".features")
    assert FeatureManifest.load(output / ".features" / "train").examples == 8
    other_data = write(tmp_path / "other.jsonl", "no")
    code, _, error = train(capsys, folder, output, f"data={other_data}", RESUME, "store_rows=8")
    assert code == 1 and "was stored with data='" in error
    assert contents(output / ".features") == before
    code, out, error = train(capsys, folder, output, f"data={data}", RESUME, "store_rows=8", "max_steps=3")
    assert code == 0 and "resuming from" in out, error
    assert re.search(r"^features          stored for 8 of \d+ rows$", out, re.MULTILINE)  # not "as time allows"
    assert not (output / ".features").exists()


class Cut(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("saves", ["steps", "no"])
def test_cut_run_keeps_its_features_for_more_steps(folder, data, tmp_path, capsys, monkeypatch, saves):
    """As many rows are stored as the steps read; a resumed run of more refused its own, or stored them anew."""
    settings = [f"target={folder}", f"data={data}", f"output_dir={tmp_path / 'o'}", *TINY, *ONLINE, "store_rows=-1"]
    settings.append(f"save_strategy={saves}")
    with pytest.raises(KeyboardInterrupt):
        train_recipe(*read_recipe(None, as_settings([*settings, "max_steps=4"])), callbacks=[Cut()])
    assert FeatureManifest.load(tmp_path / "o" / ".features" / "train").examples == 8
    monkeypatch.setattr(feature_store, "target_forward", lambda *_, **__: pytest.fail("stored again"))
    other_data = f"data={write(tmp_path / 'other.jsonl', 'no')}"
    code, _, error = train(capsys, folder, tmp_path / "o", *settings[1:], other_data, RESUME, "max_steps=5")
    assert code == 1 and "was stored with data='" in error
    code, _, error = train(capsys, folder, tmp_path / "o", *settings[1:], RESUME, "max_steps=5")
    assert code == 0, error
    assert not (tmp_path / "o" / ".features").exists()
