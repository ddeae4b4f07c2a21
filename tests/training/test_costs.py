"""What `dflash train --dry-run` says a run costs, against counts of operations and by hand."""

import json
from pathlib import Path

import pytest
import torch
import training_gpu
from support.pairs import make_draft, make_target
from support.runs import make_trainer
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_hf.cli import main
from dflash_hf.training.arguments import ScriptArguments
from dflash_hf.training.costs import (
    CARDS,
    Assumptions,
    Row,
    estimate,
    make_assumptions,
    mean_row,
    shape_of_draft,
    shape_of_target,
    step_flops,
    target_config_of,
)
from dflash_hf.training.recipe import as_arguments, decide


pytest.importorskip("yaml")
RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
PAPER_RECIPES = ("qwen3-4b", "qwen3-4b-thinking", "qwen3-8b", "offline", "qwen3-coder-30b-a3b", "llama-3.1-8b")
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
SHAPES = {
    "qwen3": {**SMALL, "intermediate_size": 48, "num_hidden_layers": 2},
    "qwen3_moe": {**SMALL, **EXPERTS, "intermediate_size": 48, "num_hidden_layers": 3, "mlp_only_layers": [1]},
}


@pytest.mark.parametrize("model_type", SHAPES)
def test_forward_counts_the_operations(model_type):
    """Against torch's own count of what runs, in which attention computes the upper triangle, too."""
    config = AutoConfig.for_model(model_type, **SHAPES[model_type])
    shape = shape_of_target(config)
    options = {"experts_implementation": "eager"} if "moe" in model_type else {}
    target = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options)
    length = 12
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        target.get_decoder()(torch.arange(length)[None])
    per_pair = 4 * shape.heads * shape.head_dim * len(shape.layers)
    unseen = per_pair * length * (length - 1) / 2
    assert counter.get_total_flops() - unseen == shape.forward_flops(length)
    assert shape.parameters == sum(parameter.numel() for parameter in target.parameters())
    cache = target.get_decoder()(torch.arange(length)[None], use_cache=True).past_key_values
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert shape.cache_bytes == 2 * cached / length


def test_expert_is_read_once_for_all_its_rows():
    shape = shape_of_target(AutoConfig.for_model("qwen3_moe", **SHAPES["qwen3_moe"]))
    sparse, dense, _ = shape.layers
    assert dense.experts == 0 and dense.read(64) == dense.active == dense.matrices
    assert sparse.read(1) == pytest.approx(sparse.active)
    assert sparse.active < sparse.read(4) < sparse.read(64) <= sparse.matrices + sparse.experts
    assert sparse.read(64) == pytest.approx(sparse.matrices + sparse.experts, rel=1e-6)
    assert shape.step_bytes(1, 0) == pytest.approx(2 * (sum(layer.active for layer in shape.layers) + shape.head))


def test_step_equals_the_count_of_a_batch(tmp_path):
    """`training_gpu.py` counts the keys that slots see in a real mask, and the tokens that the loss counts."""
    target = make_target(num_hidden_layers=8, vocab_size=300)
    draft = make_draft(target, block_size=4, num_hidden_layers=2, target_layer_ids=[1, 3, 5])
    rows = [{"input_ids": [5] * 200, "loss_mask": [0] * 50 + [1] * 150}]
    trainer = make_trainer(tmp_path, target, rows, draft, num_anchors=200, per_device_train_batch_size=1)
    batch = trainer.data_collator(rows)
    trainer.objective.draw_anchors(batch, 0)
    counted = int(trainer.objective.build_blocks(batch).counted.sum())
    expected = training_gpu.flops_of_step(target, draft, batch, counted)

    fields = {"intermediate_size": draft.config.intermediate_size}
    layers = {"num_draft_layers": 2, "block_size": 4, "target_layer_ids": [1, 3, 5]}
    script = ScriptArguments(target="t", data="d", mask_token_id=63, draft_config=fields, **layers)
    shape = shape_of_draft(script, target.config, 1)
    row = mean_row(Assumptions(rows=1, prompt_tokens=50, answer_tokens=150), shape, 3072, 200, is_regular=False)
    flops = step_flops(shape_of_target(target.config), shape, row)
    assert flops["target"] == expected["target"]
    assert flops["drafter"] == pytest.approx(expected["drafter"], rel=0.002)  # slots of no anchor see their block
    assert flops["head"] == pytest.approx(expected["head"], rel=0.02)  # blocks at the end have fewer tokens


def test_row_is_what_is_trained_on():
    shape = shape_of_draft(ScriptArguments(target="t", data="d"), target_config_of("Qwen/Qwen3-4B"), 1)
    long = Assumptions(rows=1, prompt_tokens=100, answer_tokens=5000)
    assert mean_row(long, shape, 3072, 512, is_regular=False) == Row(100, 2972, 512, 512 * 16)
    assert mean_row(long, shape, 3072, 512, is_regular=True) == Row(100, 2972, 2972 / 16, 512 * 16)
    short = Assumptions(rows=1, prompt_tokens=100, answer_tokens=50)
    assert mean_row(short, shape, 3072, 512, is_regular=False) == Row(100, 50, 49, 150 * 16)


# What the pages of these models on the Hub say, in billions.
PARAMETERS = {
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30.5,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
}


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"])
def test_known_target_has_its_size(name):
    assert shape_of_target(target_config_of(name)).parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_known_target_has_its_size(name):
    shape = shape_of_target(target_config_of(name))
    assert shape.parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.002)
    active = sum(layer.active for layer in shape.layers) + 2 * shape.head
    if "A3B" in name:
        assert active / 1e9 == pytest.approx(3.3, rel=0.03)


def test_hours_follow_card_and_assumptions():
    settings = decide(RECIPES / "qwen3-8b.yaml", {"use_cpu": True})
    script, training = as_arguments(settings)
    assumed = Assumptions(rows=1000)
    costs = estimate(script, training, CARDS["H200"], assumed)
    # By hand: Qwen3-8B has 192.9 M matrix parameters in each of 36 layers, of which 34 run, and a head of 622 M.
    tokens = 950
    layer = 2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128 + 3 * 4096 * 12288
    target = 34 * (2 * layer * tokens + 4 * 32 * 128 * tokens * (tokens + 1) / 2)
    assert costs.step_tflop["target"] == pytest.approx(target / 1e12)
    assert costs.feature_hours == pytest.approx(1000 * target / (989e12 * 0.4) / 3600)
    assert costs.feature_bytes == 1000 * tokens * 5 * 4096 * 2 and costs.tokens == 1000 * tokens
    assert costs.step_tflop["head"] == pytest.approx(4 * 4096 * 151936 * 512 * 15 / 1e12)
    step_bytes = 2 * (36 * layer + 4096 * 151936) + 256 * 600 * 36 * 2 * 8 * 128 * 2
    assert costs.decode_hours == pytest.approx(1000 * 700 / 256 * step_bytes / (4.8e12 * 0.5) / 3600)
    assert costs.online_hours == pytest.approx(costs.answer_hours + 6 * costs.feature_hours + costs.draft_hours)
    # Twice the rows take twice the time, twice the share of the peak half of it.
    double = estimate(script, training, CARDS["H200"], Assumptions(rows=2000, flops_share=0.8))
    assert double.draft_hours == pytest.approx(costs.draft_hours)
    small = estimate(script, training, CARDS["RTX4090"], assumed)
    assert small.answer_rows < costs.answer_rows and small.draft_hours > 5 * costs.draft_hours
    steps = estimate(script, {**training, "max_steps": 250}, CARDS["H200"], assumed)
    assert steps.passes == 2 and steps.draft_hours == pytest.approx(costs.draft_hours / 3)


def test_several_cards_hold_what_one_does_not():
    script = ScriptArguments(target="meta-llama/Llama-3.1-8B-Instruct", data="d", mask_token_id=1)
    card = CARDS["RTX4090"]._replace(memory=10e9)
    training = {"num_train_epochs": 1, "loss_type": "ce", "num_anchors": 8}
    costs = estimate(script, training, card, Assumptions(rows=10))
    assert costs.answer_cards == 3 and costs.answer_rows >= 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["row=3"], "assume='row=3' must be name=value with one of rows, prompt_tokens"),
        (["rows"], "assume='rows' must be name=value"),
        (["rows=many"], "assume='rows=many': 'many' is not a number"),
        (["rows=0"], "rows=0 must be a positive number"),
        (["rows=3", "flops_share=40"], "flops_share=40 must be at most 1"),
        (["rows=3", "answer_tokens=inf"], "answer_tokens=inf must be a positive number"),
        (["flops_share=0.3"], "The number of rows is not known; add rows=800000"),
    ],
)
def test_wrong_assumption_is_named(words, message):
    with pytest.raises(ValueError, match=message):
        make_assumptions(None, False, words)


def test_assumptions_follow_the_recipe():
    assert make_assumptions(7, False, []) == Assumptions(rows=7)
    assert make_assumptions(7, True, []).answer_tokens == 2800
    assert make_assumptions(7, True, ["rows=9", "answer_tokens=3"]) == Assumptions(rows=9, answer_tokens=3)


# --------------------------------------------------------------------------------------------------------- the command


def dry_run(capsys, *words) -> tuple[int, str, str]:
    code = main(["train", "--dry-run", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_dry_run_of_a_recipe_needs_neither_data_nor_hub(capsys, monkeypatch):
    monkeypatch.chdir(RECIPES.parents[1])
    monkeypatch.setattr("dflash_hf._io.repositories._download", lambda *_: pytest.fail("the Hub was asked"))
    code, out, err = dry_run(capsys, "--config", RECIPES / "llama-3.1-8b.yaml", "--card", "rtx 4090")
    assert code == 0, err
    costs = [line for line in out.splitlines() if line.startswith("# ")]
    starts = "costs on RTX 4090,tokens,answers,features,training,in all,memory,assumed".split(",")
    assert [line[2:].startswith(start) for line, start in zip(costs, starts, strict=True)] == [True] * len(starts)
    assert "207,865 rows of 950" in costs[1] and "rows=207865 prompt_tokens=250" in costs[-1]
    code, out, err = dry_run(capsys, "--config", RECIPES / "llama-3.1-8b.yaml", "--json", "--assume", "rows=1000")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["costs"]["card"] == "H200" and facts["costs"]["assumed"]["rows"] == 1000
    assert facts["costs"]["online_hours"] > facts["costs"]["answer_hours"] > 0


def test_costs_that_cannot_be_counted_are_a_note(tmp_path, capsys, monkeypatch):
    mixture = tmp_path / "m.yaml"
    mixture.write_text("sources: [{data: d, rows: 3}]")
    data = tmp_path / "d.jsonl"
    data.write_text("")
    run = ["--target", tmp_path / "absent", "--data", data, "--output-dir", tmp_path / "o", "--preset", "paper"]
    code, out, err = dry_run(capsys, *run)
    assert code == 0 and "# costs" not in out and err == ""
    code, out, err = dry_run(capsys, *run, "--mixture", mixture)
    assert code == 0 and "costs are not estimated: target=" in err and "there is no such folder" in err
    for words, status, message in (
        (("--mixture", mixture, "--card", "H200"), 1, "there is no such folder"),
        (("--card", "V100"), 2, "--card V100 must be one of A100, B200, H100, H200, RTX4090"),
        (("--card", "H100"), 1, "The number of rows is not known; add rows=800000 to"),
        (("--assume", "rows=3", "--max-minutes", 5), 1, "--max-minutes 5 decides the time: there is nothing"),
        (("--assume", "rows=3", "--draft", "d"), 1, "costs are counted for new drafters, not for --draft d"),
    ):
        code, out, err = dry_run(capsys, *run, *words)
        assert code == status and message in err, err
    assert main(["train", *map(str, run), "--card", "H200"]) == 2
    assert "--card and --assume are for --dry-run" in capsys.readouterr().err
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"target: t\ndata: {tmp_path / 'later.jsonl'}\nmixture: {tmp_path / 'none.yaml'}\noutput_dir: o\n"
    )
    code, out, err = dry_run(capsys, "--config", recipe)
    assert code == 0 and "costs are not estimated: The mixture " in err and "none.yaml does not exist" in err
    assert main(["train", "--config", str(recipe)]) == 1  # without --dry-run, its data must be there
    assert "later.jsonl': there is no such file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("stem", PAPER_RECIPES)
def test_every_paper_recipe_has_its_costs(stem, capsys, monkeypatch):
    monkeypatch.chdir(RECIPES.parents[1])
    for card in CARDS:
        code, out, err = dry_run(capsys, "--config", RECIPES / f"{stem}.yaml", "--card", card, "--json")
        assert code == 0, err
        costs = json.loads(out)["costs"]
        assert all(costs[name] > 0 for name in ("answer_hours", "feature_hours", "draft_hours", "memory"))
