"""What every `Trainer` of transformers offers: each option works, or is refused with a reason."""

import math
import pickle

import pytest
import torch
from accelerate.state import GradientState
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from support.runs import BLOCK, CHECKPOINTING
from support.runs import make_trainer as run
from transformers import HfArgumentParser
from transformers.trainer_utils import IntervalStrategy

from dflash_hf.training.feature_manifest import FeatureManifest
from dflash_hf.training.feature_store import store_features
from dflash_hf.training.features import StoredFeatures, parts_of
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.training_args import DFlashTrainingArguments


def make_trainer(folder, target=None, rows=None, **options):
    rows = counting_rows(8) if rows is None else rows
    return run(folder, target or make_target(), rows, **options)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class StreamOfKnownLength(Stream):
    def __len__(self):
        return len(self.rows)


def changed(**columns):
    return [{**row, **columns} for row in counting_rows(8)]


def test_upstream_parser_takes_the_arguments(tmp_path):
    """As every script of transformers does."""
    parser = HfArgumentParser(DFlashTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--num_anchors", "7", "--use_cpu"])
    assert args.num_anchors == 7 and args.save_strategy == IntervalStrategy.STEPS


def scheduled(draft):
    optimizer = torch.optim.SGD(draft.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


TIMED = {"max_steps": -1, "max_minutes": 0.1}
ERRORS = {
    "compute_loss_func does not apply": lambda **_: {"kwargs": {"compute_loss_func": print}},
    "compute_metrics does not apply": lambda **_: {"kwargs": {"compute_metrics": print}},
    "preprocess_logits_for_metrics does not": lambda **_: {"kwargs": {"preprocess_logits_for_metrics": print}},
    "model_init does not apply to DFlashTrainer": lambda **_: {"kwargs": {"model_init": print}},
    "max_minutes=0.1 sets the learning rate": lambda draft, **_: {"kwargs": {"optimizers": scheduled(draft)}, **TIMED},
    "max_minutes=0.1 cannot be used with a stream.* set max_steps": lambda rows, **_: {"rows": Stream(rows), **TIMED},
    "model is a Qwen3ForCausalLM; pass the drafter": lambda target, **_: {"draft": target},
    "hub_strategy=all_checkpoints would add": lambda **_: {"push_to_hub": True, "hub_strategy": "all_checkpoints"},
    "has no rows": lambda **_: {"rows": []},
    "No parameter of the drafter is trained": lambda draft, **_: {"draft": draft.requires_grad_(False)},
}


@pytest.mark.parametrize("message", ERRORS)
def test_argument_without_effect_is_refused(message, tmp_path):
    target = make_target()
    draft = make_draft(target, block_size=BLOCK)
    rows = counting_rows(8)
    options = {
        "target": target,
        "draft": draft,
        "rows": rows,
        **ERRORS[message](target=target, draft=draft, rows=rows),
    }
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **options).train()


@pytest.mark.parametrize(
    ("rows", "size"), [(counting_rows(3), "3 examples are"), (Stream([]), "a stream without examples is")]
)
def test_run_without_a_step_is_refused(rows, size, tmp_path):
    """It ended as a success, with the weights that it started from."""
    options = {"per_device_train_batch_size": 4, "dataloader_drop_last": True, "save_strategy": "steps"}
    options |= {"accelerator_config": {"dispatch_batches": False}}  # as `dflash train` reads streams
    with pytest.raises(ValueError, match=f"{size} less than a batch of per_device_train_batch_size=4 on each of 1"):
        make_trainer(tmp_path, rows=rows, **options).train()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "rows, reason",
    [
        (changed(loss_mask=[0] * 24), "loss_mask of zeros only"),
        (changed(loss_mask=[1] * 5), "24 input_ids but 5 loss_mask"),
        (changed(loss_mask=[0.5] * 24), r"loss_mask of \[0.5\]"),
        ([{"input_ids": row["input_ids"]} for row in counting_rows(8)], r"no column \['loss_mask'\]"),
    ],
)
@pytest.mark.parametrize("kind", [list, Stream])
def test_stream_refuses_rows_that_teach_nothing(kind, rows, reason, tmp_path):
    assert len(rows[0]["input_ids"]) == 24
    with pytest.raises(ValueError, match=reason):
        make_trainer(tmp_path, rows=kind(rows)).train()
    with pytest.raises(ValueError, match=reason):
        make_trainer(tmp_path).evaluate(kind(rows))


@pytest.mark.parametrize("kind", [Stream, StreamOfKnownLength])
def test_streams_are_trained_on(kind, tmp_path):
    trainer = make_trainer(tmp_path, rows=kind(counting_rows(8)), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


def test_collator_without_a_mask_is_named(tmp_path):
    def collate(rows):
        return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "loss_mask")}

    with pytest.raises(ValueError, match=r"without \['attention_mask'\]"):
        make_trainer(tmp_path, kwargs={"data_collator": collate}).train()


def test_log_counts_tokens_without_padding(tmp_path):
    trainer = make_trainer(tmp_path, include_num_input_tokens_seen="non_padding")
    trainer.train()
    assert trainer.state.log_history[0]["num_input_tokens_seen"] == 2 * 24


def test_trainer_can_be_pickled(tmp_path):
    """As upstream's, before training; its objective held a local function."""
    GradientState._reset_state()  # an earlier training in this process left its data loaders there
    trainer = make_trainer(tmp_path, eval_rows=counting_rows(4))
    unpickled = pickle.loads(pickle.dumps(trainer))
    assert unpickled.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]


def test_target_trained_in_between_is_frozen_again(tmp_path):
    target = make_target(attention_dropout=0.5)
    trainer = make_trainer(tmp_path, target=target, draft=make_draft(target), eval_rows=counting_rows(4))
    before = trainer.evaluate()["eval_loss"]
    target.train().requires_grad_(True)
    assert trainer.evaluate()["eval_loss"] == before
    target.train()
    trainer.train()
    assert not target.training and all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize(
    "changed",
    [{"loss_type": "kl"}, {"loss_type": "dpace"}, {"loss_decay_gamma": math.inf}],
    ids=str,
)
def test_changed_arguments_count_in_the_next_run(changed, tmp_path):
    """The loss was that of the first run's weights, or failed for want of the target's states."""
    target = make_target()
    draft = make_draft(target, block_size=BLOCK)
    rows = {"rows": counting_rows(4), "eval_rows": counting_rows(4), "learning_rate": 0.0}
    trainer = make_trainer(tmp_path, target, draft=draft, **rows)
    trainer.train()
    for name, value in changed.items():
        setattr(trainer.args, name, value)
    trainer.train()
    anew = make_trainer(tmp_path, target, draft=draft, **rows, **changed)
    anew.train()
    assert trainer.state.log_history[0]["loss"] == anew.state.log_history[0]["loss"]
    assert trainer.evaluate()["eval_loss"] == anew.evaluate()["eval_loss"]


def test_recomputed_layers_learn_whatever_is_frozen(tmp_path):
    target = make_target()
    draft = make_draft(target)
    for frozen in (draft.fc, draft.hidden_norm):
        frozen.requires_grad_(False)
    reentrant = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}
    before = {name: parameter.clone() for name, parameter in draft.named_parameters() if parameter.requires_grad}
    make_trainer(tmp_path, target=target, draft=draft, max_steps=2, **reentrant).train()
    after = dict(draft.named_parameters())
    assert [name for name, parameter in before.items() if torch.equal(parameter, after[name])] == []


def test_stored_rows_are_checked(tmp_path):
    target = make_target()
    manifest = FeatureManifest("tiny", {}, [0, 2, 3], 96, "float32", "", {}, "", None)
    with pytest.raises(ValueError, match="loss_mask of zeros only"):
        store_features(target, changed(loss_mask=[0] * 24), tmp_path / "a", manifest)


def test_part_of_stored_features_can_be_held_out():
    dataset = object.__new__(StoredFeatures)
    assert parts_of(torch.utils.data.Subset(torch.utils.data.Subset(dataset, [0, 1]), [0])) == [dataset]


def test_trainer_loads_models_from_paths(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    make_draft(target, block_size=BLOCK, own_mask_embedding=False).save_pretrained(tmp_path / "draft")
    fields = make_trainer(tmp_path).args
    trainer = DFlashTrainer(str(tmp_path / "draft"), tmp_path / "target", fields, counting_rows(2))
    trainer.train()
    assert trainer.state.global_step == 1 and trainer.model.config.block_size == BLOCK
