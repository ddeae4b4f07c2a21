"""What a run takes where nothing is said, over machines, targets, data and times, without training."""

import itertools

import pytest
from support.pairs import make_target
from transformers import AutoConfig

from dflash_hf.training import settings_for as module
from dflash_hf.training.choice import _fixed, time_lines
from dflash_hf.training.recipe import completed, given_keys, read_recipe
from dflash_hf.training.settings_for import ENOUGH_STEPS, FEWEST_STEPS, PAPER, Data, Machine, Work, settings_for


SHAPES = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
CPU = Machine("cpu", 1, 16e9, 100e9, 74e9, 375e9)
OLD = Machine("cpu", 1, 16e9, 100e9, 74e9, 40e9)  # without units for bf16
GPU = Machine("cuda", 8, 130e9, 1e12, 50e12, 600e12)


def config(name="135M", vocab=49_152):
    shape = {**SHAPES[name], "vocab_size": vocab, "head_dim": 64 if name == "135M" else 128}
    return AutoConfig.for_model("qwen3", num_key_value_heads=3 if name == "135M" else 8, **shape)


def data(rows, tokens=205, learned=145):
    return Data(rows, tokens, learned)


@pytest.mark.parametrize("minutes", [3, 10, 30, 90, 600])
@pytest.mark.parametrize("rows", [60, 500, 4_000, 40_000])
@pytest.mark.parametrize("machine", [CPU, OLD], ids=["bf16", "old"])
def test_a_small_target_on_a_cpu_makes_hundreds_of_steps_of_seconds(machine, rows, minutes):
    found = settings_for(machine, config(), data(rows), minutes, {})
    assert found.steps >= FEWEST_STEPS and found.step_seconds < 3
    assert found.seconds <= 60 * minutes
    assert found.values["bf16"] == machine.halves and found.values["target_dtype"] != "auto"
    assert found.values["num_draft_layers"] == 2 and found.values["init_layers"] == [28, 29]
    assert found.values["draft_vocab_size"] <= 8192
    assert found.reasons.keys() == found.values.keys() and all(found.reasons.values())


def test_more_of_anything_never_makes_fewer_steps():
    def steps(machine=CPU, rows=500, minutes=10):
        return settings_for(machine, config(), data(rows), minutes, {"num_anchors": 16, "block_size": 8}).steps

    assert [steps(minutes=one) for one in (1, 3, 10, 30)] == sorted(steps(minutes=one) for one in (1, 3, 10, 30))
    fast = Machine("cpu", 4, 16e9, 100e9, 4 * 74e9, 4 * 375e9)
    assert steps(fast) > 2 * steps()


def test_features_are_stored_where_a_second_pass_pays():
    def stored(rows, minutes, machine=CPU, **given):
        found = settings_for(machine, config(), data(rows), minutes, given)
        return found.values.get("store_rows"), found.passes

    assert stored(500, 10)[0] == 500 and stored(500, 10)[1] > 5
    rows, passes = stored(40_000, 30)  # as many as a third of the time reads
    assert 500 < rows < 5_000 and passes >= 2
    assert stored(500, 10, Machine("cpu", 1, 16e9, 1e6, 74e9, 375e9))[0] is None  # the disk is full
    assert stored(500, 10, features="there")[0] is None and stored(500, 10, packing=True)[0] is None
    assert stored(500, 10, store_rows=0)[0] is None  # as was said
    assert stored(5_000, 600, GPU)[0] is None


def test_an_accelerator_takes_the_papers_settings_where_the_time_is_there():
    found = settings_for(GPU, config("8B", 151_936), data(100_000, 1500, 1200), None, {})
    keys = {**PAPER, **found.values}
    assert {name: keys[name] for name in ("block_size", "num_anchors", "num_draft_layers")} == {
        name: PAPER[name] for name in ("block_size", "num_anchors", "num_draft_layers")
    }
    batch = keys["per_device_train_batch_size"] * keys.get("gradient_accumulation_steps", 1)
    assert batch == PAPER["per_device_train_batch_size"] and keys["bf16"]
    assert not {"loss_type", "learning_rate", "draft_vocab_size", "init_layers", "use_cpu"} & found.values.keys()
    hurried = settings_for(GPU, config("8B", 151_936), data(5_000, 1500, 1200), 20, {})
    assert hurried.values["num_anchors"] < 512 and hurried.steps > found.steps / 1000


def test_fp16_leaves_no_choice_of_bf16():
    """Both were set, which upstream refuses."""
    fp16, bf16 = (settings_for(GPU, config(), data(500), 20, one) for one in ({"fp16": True}, {}))
    assert "bf16" in bf16.values and "bf16" not in fp16.values
    assert fp16.step_seconds == bf16.step_seconds


def test_metal_is_small_and_keeps_fp32():
    found = settings_for(Machine("mps", 8, 16e9, 100e9, 2e12, 4e12), config(), data(500), 10, {})
    assert "use_cpu" not in found.values and not found.values["bf16"] and found.values["num_anchors"] == 16


def test_memory_decides_the_rows_of_a_step():
    small = Machine("cuda", 8, 8e9, 1e12, 50e12, 600e12)
    found = settings_for(small, config("8B", 151_936), data(5_000, 1500, 1200), None, {})
    rows, times = found.values["per_device_train_batch_size"], found.values["gradient_accumulation_steps"]
    assert rows < 8 and rows * times == 8


GIVEN = {
    "block_size": 12,
    "num_anchors": 40,
    "per_device_train_batch_size": 3,
    "num_draft_layers": 3,
    "draft_vocab_size": None,
    "learning_rate": 1e-4,
    "loss_type": "kl",
    "bf16": False,
    "init_layers": None,
    "target_dtype": "float32",
}


@pytest.mark.parametrize("names", [*itertools.combinations(GIVEN, 1), *itertools.combinations(GIVEN, 2)])
def test_what_is_given_stays_and_counts(names):
    given = {name: GIVEN[name] for name in names}
    found = settings_for(CPU, config(), data(500), 10, given)
    assert not given.keys() & found.values.keys()
    assert found.seconds <= 600 and found.steps > 0
    if "num_draft_layers" in given and "init_layers" not in given:
        assert found.values["init_layers"] == [27, 28, 29]


def test_a_drafter_to_go_on_from_keeps_its_shape():
    given = {"draft": "there", "block_size": 8, "num_draft_layers": 2, "draft_vocab_size": 8192, "init_layers": None}
    found = settings_for(CPU, config(), data(500), 10, given)
    assert not {"block_size", "num_draft_layers", "draft_vocab_size", "init_layers"} & found.values.keys()
    assert found.values["learning_rate"] < 1e-3
    head = settings_for(CPU, config(), data(500), 10, {**given, "head_only": True})
    assert not {"learning_rate", "loss_type"} & head.values.keys()


@pytest.mark.parametrize(("head", "loss"), [("jetspec", "kl"), ("dspark", "dspark"), ("domino", "dpace")])
def test_the_loss_of_a_head_is_not_replaced(head, loss):
    """A CPU's choice, dpace, replaced it; the confidence head of dspark then learnt nothing."""
    overrides = ["target=t", "data=d", "output_dir=o", f"head={head}"]
    recipe, training = read_recipe(None, overrides)
    fixed = _fixed(recipe, training, given_keys(overrides, training))
    _, training = completed(recipe, training, settings_for(CPU, config(), data(500), 20, fixed).values)
    assert training["loss_type"] == loss and training["learning_rate"] == 1e-3


def test_a_run_that_cannot_work_says_so():
    paper = {**PAPER, "num_draft_layers": 2, "bf16": False, "draft_vocab_size": None, "init_layers": None}
    found = settings_for(CPU, config(), data(60), 3, {**paper, "store_rows": 0, "learning_rate": 6e-4})
    assert found.steps < 5 and found.step_seconds > 30  # 98 s were measured
    (first, second) = time_lines(found, 3, 60)
    assert first.startswith("time              3 min: about ") and "fewer than 200 steps" in second
    large = settings_for(CPU, config("8B", 151_936), data(500), 10, {})
    assert large.steps < FEWEST_STEPS and "fewer than 200 steps" in time_lines(large, 10, 500)[1]
    (first, second) = time_lines(settings_for(CPU, config(), data(500), 10, {}), 10, 500)
    assert "for features, about " in first and "passes over 500 rows" in first and "reached tau" in second


def test_epochs_are_for_some_thousand_steps_where_no_time_is_given():
    for rows, passes in ((60, 30), (500, 16), (4_000, 6)):
        found = settings_for(CPU, config(), data(rows), None, {})
        assert found.values["num_train_epochs"] == passes and found.steps == -(-passes * rows // 4)
    assert settings_for(CPU, config(), data(60), None, {"num_train_epochs": 2}).steps == 30
    assert settings_for(CPU, config(), data(60), None, {"max_steps": 7}).steps == 7


def test_the_shortest_step_is_taken_only_where_it_must_be():
    slow = Machine("cpu", 1, 16e9, 100e9, 74e8, 375e8)
    values = settings_for(slow, config(), data(500), 10, {}).values
    assert (values["block_size"], values["num_anchors"]) != (8, 16)
    values = settings_for(CPU, config(), data(500), 10, {}).values
    assert (values["block_size"], values["num_anchors"]) == (8, 16) and ENOUGH_STEPS > FEWEST_STEPS


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "mistral_sliding", "deepseek_v3"])
def test_targets_of_any_family_have_settings(family):
    target = make_target(family)
    found = settings_for(CPU, target.config, data(60), 1, {})
    assert found.steps > ENOUGH_STEPS
    layers = found.values["init_layers"]
    assert layers == [2, 3]


def test_operations_are_those_of_the_layers():
    target = make_target("qwen3")
    work = Work(target.config, data(10, 20, 10), {**PAPER, "num_draft_layers": 1})
    layer = sum(one.numel() for name, one in target.model.layers[0].named_parameters() if "norm" not in name)
    assert work.layer == layer and work.slots == 10 * PAPER["block_size"]
    assert work.target_row == 2 * target.config.num_hidden_layers * layer * 20


def test_the_papers_steps_are_warned_of_on_a_cpu(tmp_path, monkeypatch):
    from dflash_hf import DFlashDraftConfig, DFlashTrainingArguments

    monkeypatch.setattr(module, "_operations", lambda device, dtype: 74e9)
    row = {"input_ids": [1] * 205, "loss_mask": [0] * 60 + [1] * 145}
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    assert (args.num_anchors, args.per_device_train_batch_size) == (512, 8)  # the paper's, in Python
    said = module.warning_of(args, DFlashDraftConfig.for_target(config(), 0, 5, 16), config(), row)
    assert "A step takes about " in said and "num_anchors=16" in said
    short = DFlashTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], num_anchors=16, per_device_train_batch_size=4
    )
    assert module.warning_of(short, DFlashDraftConfig.for_target(config(), 0, 2, 8), config(), row) is None
    assert not args.dataloader_pin_memory or module.torch.accelerator.is_available()
