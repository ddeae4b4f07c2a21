"""Settings of `dflash train`: the preset, then the recipe, then the command line; each wrong one is named."""

from pathlib import Path

import pytest
import torch
from support.pairs import make_target
from support.rows import counting_rows
from support.runs import as_options, as_settings, make_trainer

from dflash_hf import DFlashTrainingArguments
from dflash_hf.cli import main
from dflash_hf.data.encode import RowEncoder
from dflash_hf.training.arguments import ScriptArguments
from dflash_hf.training.losses import default_gamma
from dflash_hf.training.presets import PAPER
from dflash_hf.training.recipe import as_arguments, decide, key_lines, read_recipe
from dflash_hf.training.rows import digest_of_rows, lengths_of, validate_and_count
from dflash_hf.training.start import make_draft, vocabulary_size


pytest.importorskip("yaml")
RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_holds_known_settings(path, tmp_path):
    recipe, training = read_recipe(path, {"output_dir": str(tmp_path), "use_cpu": "true", "bf16": "false"})
    args = DFlashTrainingArguments(**training)
    assert args.learning_rate >= 2e-4 and args.logging_steps == 10
    for command in [line for line in path.read_text(encoding="utf-8").splitlines() if "--config" in line]:
        assert f"--config examples/recipes/{path.name}" in command


# What the paper fixes (DFlash, arXiv 2602.06036, sections 4.2, 5 and A.1), and where its targets differ.
OF_THE_PAPER = {
    "num_draft_layers": 5,
    "block_size": 16,
    "init_layers": None,
    "draft_vocab_size": None,
    "draft": None,
    "head": None,
    "draft_config": {},
    "peft_config": None,
    "max_length": 3072,
    "num_anchors": 512,
    "anchor_sampling": "random",
    "loss_type": "ce",
    "loss_decay_gamma": 7,
    "optim": "adamw_torch_fused",
    "muon": False,
    "head_only": False,
    "learning_rate": 6e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.04,
    "max_grad_norm": 1.0,
    "num_train_epochs": 6,
    "max_steps": -1,
    "max_minutes": None,
    "bf16": True,
}
OF_QWEN3 = {"target_layer_ids": [1, 9, 17, 25, 33], "chat_template_kwargs": {"enable_thinking": False}}
OF_CODER = {"target_layer_ids": [1, 12, 23, 34, 45], "num_draft_layers": 8, "max_length": 4096}
OF_LLAMA = {"target_layer_ids": [1, 8, 15, 22, 29], "block_size": 10, "loss_decay_gamma": 5}
PAPER_RECIPES = {
    "qwen3-4b": OF_QWEN3,
    "qwen3-8b": OF_QWEN3,
    "offline": OF_QWEN3,
    "qwen3-4b-thinking": {**OF_QWEN3, "chat_template_kwargs": {"enable_thinking": True}},
    "qwen3-coder-30b-a3b": {**OF_CODER, "chat_template_kwargs": None},
    "llama-3.1-8b": {**OF_LLAMA, "chat_template_kwargs": None},
}
MACHINES = {
    "processor": ("cpu", True),
    "processor without bf16": ("cpu", False),
    "gpu": ("cuda", True),
    "gpu without bf16": ("cuda", False),
    "metal": ("mps", False),
}


def on_machine(monkeypatch, kind: str, has_bf16: bool):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind != "cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr("dflash_hf.decoding.cpu_dtypes.is_emulated", lambda dtype: not has_bf16)


def run_values(path, options=None) -> dict:
    """What a run would train with: each setting, or the default of its field."""
    script, training = read_recipe(path, options)
    defaults = {name: field.default for name, field in DFlashTrainingArguments.__dataclass_fields__.items()}
    return {**defaults, **vars(script), **training}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("stem", PAPER_RECIPES)
def test_paper_recipe_is_the_papers_everywhere(stem, machine, monkeypatch):
    """On a processor, the recipe that called itself the paper's trained D-PACE over a reduced vocabulary."""
    on_machine(monkeypatch, *MACHINES[machine])
    (path,) = [path for path in RECIPES if path.stem == stem]
    expected = {**OF_THE_PAPER, **PAPER_RECIPES[stem]}
    for preset in (None, "paper", "cpu"):
        values = run_values(path, {} if preset is None else {"preset": preset})
        assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize("stem", PAPER_RECIPES)
def test_paper_recipe_names_what_the_paper_fixes(stem):
    """Where a recipe leaves a setting out, a preset or a default decides, today or in another version."""
    yaml = pytest.importorskip("yaml")
    (path,) = [path for path in RECIPES if path.stem == stem]
    named = yaml.safe_load(path.read_text(encoding="utf-8"))
    fixed = {name for name in PAPER if name not in ("num_target_features", "logging_steps", "save_steps")}
    assert fixed | {"target_layer_ids", "loss_decay_gamma", "optim"} <= named.keys() | {"max_length"}
    assert ("max_length" in named) != ("features" in named)  # stored features have their own


@pytest.mark.parametrize("machine", MACHINES)
def test_paper_preset_says_what_the_recipe_says(machine, monkeypatch):
    on_machine(monkeypatch, *MACHINES[machine])
    values = run_values(None, {"preset": "paper", "target": "t", "data": "d"})
    of_machine = {"bf16"}  # a recipe that names it is obeyed; the preset leaves it out where it would be emulated
    of_default = {"loss_decay_gamma", "optim"}
    for name in OF_THE_PAPER.keys() - of_machine - of_default:
        assert values[name] == OF_THE_PAPER[name], name
    assert values["loss_decay_gamma"] is None and default_gamma(values["block_size"]) == 7
    assert values["num_target_features"] == 5


def test_paper_drafter_reads_five_features_at_any_depth(tmp_path):
    """The number of features followed the number of layers: two ablations of the paper at once."""
    target = make_target(num_hidden_layers=12)
    for layers in (3, 8):
        script, _ = read_recipe(
            None, as_settings(["target=t", "data=d", "preset=paper", f"num_draft_layers={layers}"])
        )
        draft = make_draft(script, target, RowEncoder(mask_token_id=63), print)
        assert draft.config.target_layer_ids == [1, 3, 5, 7, 9] and len(draft.layers) == layers
    script, _ = read_recipe(None, as_settings(["target=t", "data=d", "preset=paper", "num_target_features=3"]))
    assert make_draft(script, target, RowEncoder(mask_token_id=63), print).config.target_layer_ids == [1, 5, 9]


def test_value_has_the_type_of_its_setting(tmp_path):
    top_level = ("target=t", "data=[a.jsonl, b.jsonl]", "learning_rate=6e-4", "eval_steps=5", "data_revision=12e4")
    nested = (
        "chat_template_kwargs.enable_thinking=false",
        "chat_template_kwargs.depth.a=1",
        "lr_scheduler_kwargs.a=-1e-05",
    )
    words = [*top_level, *nested, "save_strategy=no", "report_to=none", "eval_data=~/x"]
    recipe, training = read_recipe(None, as_settings(words))
    assert recipe.data == ["a.jsonl", "b.jsonl"] and recipe.data_revision == "12e4"
    assert recipe.chat_template_kwargs == {"enable_thinking": False, "depth": {"a": 1}}
    assert training["learning_rate"] == 6e-4 and training["lr_scheduler_kwargs"] == {"a": -1e-5}
    assert training["save_strategy"] == "no"  # a truth value to YAML
    assert recipe.eval_data == str(Path.home() / "x")  # where no shell expands it
    (tmp_path / "r.yaml").write_text(
        "target: t\ndata: d\npeft_config: {r: 4, p: 1e-1, init: [+2.5E1, 1e]}\nmax_steps: 3"
    )
    options = as_settings(["draft_config={rms_norm_eps: 1e-6, attn_implementation: eager}"])
    recipe, training = read_recipe(tmp_path / "r.yaml", options)
    assert recipe.peft_config == {"r": 4, "init": [25.0, "1e"], "p": 0.1} and training["max_steps"] == 3
    assert recipe.draft_config == {"rms_norm_eps": 1e-6, "attn_implementation": "eager"}


ERRORS = {
    "blok_size=8": "Unknown setting 'blok_size'; did you mean 'block_size'",
    "draft_config.selector_rnak=8": "draft_config: Unknown setting 'selector_rnak'; did you mean 'selector_rank'",
    "draft_config.block_size=8": "draft_config.block_size=8 is a setting of its own; write `block_size=8`",
    "draft_config.num_hidden_layers=2": "write `num_draft_layers=2`",
    "draft_config.mask_token_id=7": "write `mask_token_id=7`",
    "draft_config.draft_vocab_size=9": "write `draft_vocab_size=9`",
    "data.x=1": "data='d.jsonl' has no entry 'x'; write data=value",
    "peft_config.r=2 peft_config.r.x=1": "r=2 has no entry 'x'; write r=value",
    "blok_size=8 learning_rat=1": "'block_size'. Unknown setting 'learning_rat'; did you mean 'learning_rate'",
    "blok_size=8 data=absent.jsonl": "did you mean 'block_size'. data='absent.jsonl': there is no such file",
    "draft_revision=main": "draft_revision='main' has no effect without a draft",
    "block_size=many": "block_size: invalid int value: 'many'",
    "block_size=2.5": "block_size: invalid int value: '2.5'",
    "block_size=true": "block_size: invalid int value: 'True'",
    "block_size=[4]": r"block_size=\[4\] must be of type int",
    "muon=maybe": "muon: .*maybe",
    "learning_rate=fast": "learning_rate: invalid float value: 'fast'",
    "max_length=null": "max_length=None must be of type int",
    "chat_template_kwargs=yes": "chat_template_kwargs: invalid dict value",
    "eval_data=[a": "the value of eval_data is not YAML",
    "draft=d block_size=0": "block_size=0 must be at least 2",
    "block_size=1": "block_size=1 must be at least 2",
    "features=f": "A run needs data or features, but both are given",
    "data=null": "A run needs data or features, but neither is given",
    "target=null": "target is not given",
    "head=eagle": "head='eagle' must be one of dflash2, .*; leave it out for a drafter without one",
    "preset=fast": "preset: invalid choice: 'fast' .choose from",
    "loss_type=mse": "loss_type: invalid choice: 'mse' .choose from",
    **{
        f"data=null features=f {key}={value}": f"{key}=.*{value}.* has no effect with features='f': stored features"
        for key, value in {
            **{"max_length": 64, "split": "a", "data_name": "a", "data_revision": "a", "num_proc": 2, "store_rows": 2},
            **{"attn_implementation": "eager", "eval_data": "e.jsonl", "eval_split": "test"},
        }.items()
    },
    "target_layer_ids=[0] num_target_features=2": "num_target_features=2 has no effect with target_layer_ids=.0.",
    "num_target_features=0": "num_target_features=0 must be at least 1",
    "anchor_sampling=standard": "anchor_sampling: invalid choice: 'standard' .choose from",
    "eval_features=f": "eval_features='f' has no effect with data='d.jsonl'",
    "draft=d init_layers=[1]": "init_layers=.1. has no effect with draft='d': a trained drafter has its weights",
    "draft=d draft_vocab_size=9": "draft_vocab_size=9 has no effect with draft='d'",
    "num_draft_layers=2 init_layers=[1]": r"init_layers=\[1\] must name one layer .* num_draft_layers=2",
}


@pytest.mark.parametrize(("overrides", "message"), ERRORS.items(), ids=list(ERRORS))
def test_wrong_setting_is_named(overrides, message):
    with pytest.raises(ValueError, match="^(?s:.*)" + message):
        read_recipe(None, as_settings(["target=t", "data=d.jsonl", *overrides.split()]))


def test_setting_has_one_owner_and_is_listed(capsys):
    script_fields = ScriptArguments.__dataclass_fields__
    training_fields = DFlashTrainingArguments.__dataclass_fields__
    assert not set(script_fields) & set(training_fields)
    listed = {line.strip().split("=")[0] for line in key_lines()}
    assert set(script_fields) | {name for name, field in training_fields.items() if field.init} <= listed
    assert main(["train", "--keys"]) == 0
    assert (
        "block_size=None  Block size of a new drafter, including the anchor. (paper: 16, cpu: 4)"
        in capsys.readouterr().out
    )


def test_dry_run_shows_the_source_of_each_setting(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(
        "preset: cpu\ntarget: nowhere\nblock_size: 12\nnum_anchors: 9\nhead: dspark\nhub_token: secret"
    )
    (tmp_path / "d.jsonl").write_text("")
    config = [
        "train",
        "--config",
        str(tmp_path / "r.yaml"),
        f"--data={tmp_path / 'd.jsonl'}",
        "--output-dir=o",
        "--dry-run",
    ]
    assert main([*config, "--num-anchors", "4"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    printed = {name: [part.strip() for part in line.split("#")] for name, line in lines.items()}
    assert printed["num_anchors"] == ["4", "command line"]
    assert printed["block_size"] == ["12", f"recipe {tmp_path / 'r.yaml'}"]
    assert printed["loss_type"] == ['"dspark"', "head dspark"]
    assert printed["draft_config"][1] == "head dspark"
    assert printed["learning_rate"] == ["0.001", "preset cpu: the paper's 6e-4 is for days"]
    assert printed["hub_token"][0] == '"(set)"'
    printed_recipe = tmp_path / "again.yaml"
    printed_recipe.write_text("".join(f"{name}: {line}\n" for name, line in lines.items() if name != "hub_token"))
    before, after = (
        as_arguments(decide(*arguments))
        for arguments in (
            (tmp_path / "r.yaml", {"data": str(tmp_path / "d.jsonl"), "output_dir": "o", "num_anchors": "4"}),
            (printed_recipe, {}),
        )
    )
    before[1].pop("hub_token")
    assert before == after
    long = as_options(["max_length=32768", "num_anchors=512", "block_size=16", "per_device_train_batch_size=1"])
    assert main([*config, *long]) == 0
    assert "max_length=32768: beside the weights, a step takes about 28 GB" in capsys.readouterr().err
    assert main([*config, "--data", "nothing.jsonl"]) == 1
    assert "--data nothing.jsonl: there is no such file" in capsys.readouterr().err


def test_fields_of_the_head_are_not_said_to_be_the_users():
    """Those that only `--head` sets were shown as set by the command line, or by the recipe."""
    words = ["target=t", "data=d", "head=dspark"]
    alone = decide(None, as_settings(words))["draft_config"]
    assert alone.origin == "head dspark"
    changed = decide(None, as_settings([*words, "draft_config.markov_rank=4"]))["draft_config"]
    assert changed.value["markov_rank"] == 4 and changed.value["enable_confidence_head"]
    assert changed.origin == "command line and head dspark"


# ---------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(("supervised", "size"), [(70_122, 5120), (600_000, 8192), (10, 1024)])
def test_vocabulary_follows_the_data(supervised, size):
    recipe = ScriptArguments(target="t", data="d", draft_vocab_size=-1)
    counts = validate_and_count([{"input_ids": [1] * supervised, "loss_mask": [1] * supervised}])
    assert vocabulary_size(recipe, counts, 49_152) == size
    assert vocabulary_size(recipe, counts, 2 * size) is None  # the head would not be much smaller


def test_counts_of_a_table_equal_those_of_a_list():
    datasets = pytest.importorskip("datasets")
    rows = [
        {**row, "input_ids": row["input_ids"][: 24 - i], "loss_mask": row["loss_mask"][: 24 - i]}
        for i, row in enumerate(counting_rows(6))
    ]
    table = datasets.Dataset.from_list(rows).select([5, 0, 3])
    selected = [rows[5], rows[0], rows[3]]
    assert lengths_of(table).tolist() == lengths_of(selected).tolist() == [19, 24, 21]
    assert torch.equal(validate_and_count(table), validate_and_count(selected)) and digest_of_rows(
        table
    ) == digest_of_rows(selected)
    assert digest_of_rows(selected) != digest_of_rows(rows)
    joined = [{name: [*selected[0][name], *selected[1][name]] for name in selected[0]}, selected[2]]
    assert digest_of_rows(joined) != digest_of_rows(selected)  # the same tokens in other rows
    assert validate_and_count(table).sum() == sum(sum(rows[i]["loss_mask"]) for i in (0, 3, 5))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"loss_mask": [0, 0, 0]}, "Row 2 has a loss_mask of zeros only"),
        ({"loss_mask": [0, 1]}, "Row 2 has 3 input_ids but 2 loss_mask"),
        ({"loss_mask": [0, 2, 1]}, "Row 2 has a loss_mask of"),
        ({"input_ids": [], "loss_mask": []}, "Row 2 has a loss_mask of zeros only"),
        ({"loss_mask": [0, None, 1]}, "Row 2 has null at token 1 in its loss_mask; give a flat list"),
        ({"input_ids": [None, 2, 3]}, "Row 2 has null at token 0 in its input_ids; give a flat list"),
        ({"loss_mask": None}, "Row 2 has None in its loss_mask; give a flat list"),
        ({"input_ids": None}, "Row 2 has None in its input_ids; give a flat list"),
    ],
)
def test_row_that_teaches_nothing_is_named(columns, message):
    datasets = pytest.importorskip("datasets")
    good_row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    rows = [good_row, good_row, {**good_row, **columns}]
    for kind in (list, datasets.Dataset.from_list):
        with pytest.raises(ValueError, match=message):
            validate_and_count(kind(rows))


@pytest.mark.parametrize("kind", ["bool", "int8", "int64", "large_list", "fixed"])
def test_counts_read_any_mask(kind, tmp_path):
    """Booleans were an `ArrowTypeError` of DLPack, in tables alone."""
    datasets = pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    rows = counting_rows(3)
    mask = pa.array([row["loss_mask"] for row in rows])
    types = {"bool": pa.bool_(), "int8": pa.int8()}
    lists = {"large_list": pa.large_list(pa.int64()), "fixed": pa.list_(pa.int64(), 24)}
    mask = mask.cast(lists.get(kind) or pa.list_(types.get(kind, pa.int64())))
    ids = pa.array([row["input_ids"] for row in rows])
    table = datasets.Dataset(pa.table({"input_ids": ids, "loss_mask": mask}))
    assert torch.equal(validate_and_count(table), validate_and_count(rows)) and digest_of_rows(
        table
    ) == digest_of_rows(rows)
    args = {"num_anchors": 4, "max_steps": 1}
    trainer = make_trainer(tmp_path, make_target(), table, **args)
    assert trainer.train().training_loss > 0
