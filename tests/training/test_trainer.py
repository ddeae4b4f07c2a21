"""`DFlashTrainer`: what is learned, what is left alone, and figures that do not depend on how a batch is split."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from support.pairs import make_draft, make_target
from support.rows import counting_rows, uneven_rows
from support.runs import BLOCK, PLAIN_SGD, history, make_trainer
from transformers import TrainingArguments

from dflash_hf.data.examples import DFlashCollator, make_example
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.drafter import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.modeling.modeling_dflash import raw_embedding
from dflash_hf.targets.features import FeatureTap
from dflash_hf.training.losses import slot_weights
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.training_args import DFlashTrainingArguments


# ------------------------------------------------------------------------------------------------------- one true loss


def reference_loss(trainer, rows):
    """The loss in plain loops: row by row, block by block, all logits, one division at the end."""
    draft = trainer.model
    target = trainer.target
    kind = trainer.args.loss_type
    batch = trainer.data_collator(rows)
    trainer.objective.draw_anchors(batch, step=0)
    decay = slot_weights(BLOCK).double()
    total = normalizer = 0.0
    for row, example in enumerate(rows):
        ids = torch.tensor([example["input_ids"]])
        with torch.no_grad(), FeatureTap(target, draft.config.target_layer_ids) as tap, tap.running():
            target_logits = target(ids).logits[0]
            features = tap.take()
        for anchor in batch["anchors"][row][batch["valid"][row]].tolist():
            block = torch.full((1, BLOCK), draft.config.mask_token_id)
            block[0, 0] = ids[0, anchor]
            hidden = draft(raw_embedding(target, block), features[:, :anchor]).last_hidden_state
            log_q = target.get_output_embeddings()(hidden)[0].log_softmax(-1)
            values = {}
            nll = {}
            for k in range(1, BLOCK):
                if anchor + k < ids.shape[1] and example["loss_mask"][anchor + k]:
                    log_p = target_logits[anchor + k - 1].log_softmax(-1)
                    divergence = (log_p.exp() * (log_p - log_q[k])).sum()
                    nll[k] = -log_q[k, ids[0, anchor + k]]
                    values[k] = divergence if "kl" in kind else nll[k]
            if "dpace" in kind:
                credit = {}
                product = 1.0
                for k, value in nll.items():
                    product *= 0.5 * math.exp(-value.item()) + 0.5
                    credit[k] = product
                total = total + sum(sum(c for m, c in credit.items() if m >= k) * v for k, v in values.items())
                normalizer += 1
            else:
                total = total + sum(decay[k] * value for k, value in values.items())
                normalizer += sum(decay[k] for k in values)
    return total / normalizer


SPLITS = {"1x4": (4, 1), "2x2": (2, 2), "4x1": (1, 4)}


@pytest.mark.parametrize(
    ("split", "loss_type"),
    [*((split, "ce") for split in SPLITS), ("2x2", "dpace"), ("4x1", "kl"), ("1x4", "dpace_kl"), ("2x2", "dpace_kl")],
)
def test_gradient_is_the_same_in_any_split(split, loss_type, tmp_path):
    size, accumulation = SPLITS[split]
    target = make_target(dtype=torch.float64)
    trainer = make_trainer(
        tmp_path,
        target,
        uneven_rows(),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        loss_type=loss_type,
        **PLAIN_SGD,
    )
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    loss = reference_loss(trainer, uneven_rows())
    gradients = torch.autograd.grad(loss, list(trainer.model.parameters()))
    trainer.train()
    assert history(trainer, "loss") == pytest.approx([loss.item()], rel=1e-6)
    for (name, parameter), gradient in zip(trainer.model.named_parameters(), gradients, strict=True):
        # Norms of the drafter are computed in fp32 at best.
        assert (before[name] - parameter - gradient).norm() < 1e-6 * gradient.norm(), name


@pytest.mark.parametrize("family", ["gemma4", "gpt2"])
def test_divergence_is_from_the_targets_distribution(family, tmp_path):
    """Gemma caps its logits behind the head."""
    overrides = {"final_logit_softcapping": 3.0} if family == "gemma4" else {}
    target = make_target(family, dtype=torch.float64, **overrides)
    trainer = make_trainer(tmp_path, target, counting_rows(2), loss_type="kl", **PLAIN_SGD)
    loss = reference_loss(trainer, counting_rows(2)).item()
    trainer.train()
    assert history(trainer, "loss") == pytest.approx([loss], rel=1e-6)


def test_unknown_distribution_is_refused(tmp_path, monkeypatch):
    target = make_target()
    forward = type(target).forward

    def scaled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(type(target), "forward", scaled)
    with pytest.raises(ValueError, match="its distribution cannot be computed .* loss_type=ce, dpace or auf"):
        make_trainer(tmp_path, target, counting_rows(2), loss_type="kl")
    make_trainer(tmp_path, target, counting_rows(2), loss_type="ce")


@pytest.mark.parametrize("causal", [None, False, True])
def test_every_layer_type_has_its_own_mask(causal, tmp_path):
    target = make_target(dtype=torch.float64)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "is_causal": causal}
    draft = make_draft(target, block_size=BLOCK, **layers)
    trainer = make_trainer(tmp_path, target, uneven_rows(), draft, per_device_train_batch_size=4, **PLAIN_SGD)
    loss = reference_loss(trainer, uneven_rows()).item()
    trainer.train()
    assert history(trainer, "loss") == pytest.approx([loss], rel=1e-6)


def test_batch_without_anchors_has_zero_gradients(tmp_path):
    target = make_target()
    trainer = make_trainer(tmp_path, target, [uneven_rows()[1]] * 2, **PLAIN_SGD)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert history(trainer, "loss") == [0.0]
    assert history(trainer, "grad_norm") in ([], [0.0])
    assert not history(trainer, "accuracy")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name])


# ---------------------------------------------------------------------------------------------- what moves, what stays


def test_all_of_the_drafter_moves_and_no_target_weight(tmp_path):
    target = make_target().train()
    before_target = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    trainer = make_trainer(tmp_path, target, counting_rows(4), warmup_steps=0)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.model.training
    assert not target.training
    for name, parameter in trainer.model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, before_target[name]), name
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in target.parameters())


def test_checkpoint_holds_the_drafter_alone(tmp_path):
    target = make_target()
    trainer = make_trainer(tmp_path, target, counting_rows(4), save_strategy="steps", save_steps=1)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    saved = load_file(checkpoint / "model.safetensors")
    assert set(saved) == set(trainer.model.state_dict())
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(saved[name], tensor)
    draft_size = sum(parameter.numel() for parameter in trainer.model.parameters())
    moments = torch.load(checkpoint / "optimizer.pt")["state"].values()
    assert sum(moment["exp_avg"].numel() for moment in moments) == draft_size
    reloaded = type(trainer.model).from_pretrained(checkpoint)
    assert reloaded.config.target_layer_ids == trainer.model.config.target_layer_ids


@pytest.mark.parametrize(("before", "after"), [(0, 24), (30, 30), (None, None)])
def test_longest_text_is_in_the_configuration(before, after, tmp_path):
    """A drafter of which nobody knows how far back it learned to look is not cut to what it is trained on now."""
    target = make_target()
    draft = make_draft(target, block_size=BLOCK)
    draft.config.trained_length = before
    trainer = make_trainer(tmp_path / "run", target, counting_rows(2, length=24), draft=draft)
    trainer.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text()).get("trained_length") == after


def test_untrained_drafter_has_no_context_window():
    """One that is trained in another loop, or on a stream: it once saw a single token, and accepted nothing."""
    target = make_target()
    config = DFlashDraftConfig.for_target(target.config, mask_token_id=5, num_hidden_layers=1, target_layer_ids=[0])
    draft = DFlashDraftModel(config)
    assert config.trained_length == 0
    assert DraftSession(draft, target).context.window is None
    draft.config.trained_length = 7
    assert DraftSession(draft, target).context.window == 7


def test_saved_untrained_drafter_records_its_length(tmp_path):
    """0 was not saved: loaded again, its length was unknown, and no training recorded one."""
    target = make_target()
    config = DFlashDraftConfig.for_target(target.config, mask_token_id=5, num_hidden_layers=1, target_layer_ids=[0])
    DFlashDraftModel(config).save_pretrained(tmp_path / "untrained")
    draft = DFlashDraftModel.from_pretrained(tmp_path / "untrained")
    assert draft.config.trained_length == 0
    make_trainer(tmp_path / "run", target, counting_rows(2, length=24), draft=draft)
    assert draft.config.trained_length == 24


def test_training_lowers_loss_and_raises_tau(tmp_path):
    target = make_target()
    rows = counting_rows(64, modulus=10)
    draft = make_draft(target, block_size=BLOCK)
    trainer = make_trainer(
        tmp_path,
        target,
        rows,
        draft,
        eval_rows=rows[:8],
        per_device_train_batch_size=8,
        max_steps=80,
        learning_rate=5e-3,
        logging_steps=20,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert before["eval_simulated_tau"] < 1.2
    assert after["eval_simulated_tau"] > 2.5
    assert after["eval_loss"] < before["eval_loss"] / 3
    losses = history(trainer, "loss")
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"mask_token_id": 91},
        {"block_size": 8},
        {"target_layer_ids": [0, 1, 3]},
        {"is_causal": True},
        {"selector_top_k": 8},
        {"selector_rank": 8},
        {"sliding_window": 6},
        {"layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_resuming_with_another_drafter_is_refused(changed, tmp_path):
    """All of these load: no tensor has another shape."""
    target = make_target()
    make_trainer(tmp_path, target, counting_rows(4), save_strategy="steps", save_steps=1).train()
    draft = make_draft(target, block_size=BLOCK)
    ((name, value),) = changed.items()
    setattr(draft.config, name, value)
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} of this drafter is not the ")):
        make_trainer(tmp_path, target, counting_rows(4), draft, max_steps=2).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )


def test_resuming_with_other_tokens_is_refused(tmp_path):
    """As many of them load, and every label would be another's."""
    target = make_target()
    draft, other_draft = (make_draft(target, block_size=BLOCK, draft_vocab_size=48) for _ in range(2))
    with torch.no_grad():
        draft.d2t.copy_(torch.arange(48))  # every second token; the other drafts the first 48
    make_trainer(tmp_path, target, counting_rows(4), draft, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match="The 48 tokens that this drafter drafts are not those of"):
        make_trainer(tmp_path, target, counting_rows(4), other_draft, max_steps=2).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )


# ---------------------------------------------------------------------------------------------------------- evaluation


def test_evaluation_repeats_with_any_batch_size(tmp_path):
    target = make_target()
    rows = [row for row in uneven_rows() for _ in range(2)][:7]
    draft = make_draft(target, block_size=BLOCK)
    results = []
    for size in (1, 3, 3, 7):
        trainer = make_trainer(
            tmp_path, target, counting_rows(4), draft, eval_rows=rows, per_device_eval_batch_size=size
        )
        metrics = trainer.evaluate()
        speed = ("runtime", "per_second", "preparation_time")
        results.append({key: value for key, value in metrics.items() if not key.endswith(speed)})
        assert {"eval_loss", "eval_accuracy", "eval_simulated_tau", "eval_accuracy_3"} < set(metrics)
    assert not draft.training
    for result in results:
        assert result == pytest.approx(results[0], rel=1e-5)
    expected = reference_evaluation(trainer, rows)
    assert results[0]["eval_loss"] == pytest.approx(expected, rel=1e-5)


def reference_evaluation(trainer, rows):
    """The weighted loss over all evaluation blocks, one row at a time through `compute_loss`."""
    total = weight = 0.0
    for row in rows:
        batch = trainer.data_collator([row])
        trainer.objective.draw_anchors(batch, step=-1)
        with torch.no_grad():
            share = trainer.objective.normalizer(batch).item()
            total += trainer.compute_loss(trainer.model, batch).item() * share
        weight += share
    return total / weight


def test_evaluation_keeps_the_training_figures(tmp_path):
    """Evaluation in the middle of training must not leak into the training log."""
    target = make_target()
    rows = counting_rows(8)
    logs = []
    for strategy in ("no", "steps"):
        trainer = make_trainer(
            tmp_path, target, rows, eval_rows=rows[:3], max_steps=4, eval_strategy=strategy, eval_steps=1
        )
        trainer.train()
        logs.append([history(trainer, key) for key in ("loss", "accuracy", "accuracy_1", "simulated_tau")])
    assert logs[0] == logs[1]
    assert len(history(trainer, "eval_simulated_tau")) == 4


def test_several_evaluation_sets_have_their_prefixes(tmp_path):
    target = make_target()
    rows = counting_rows(6)
    trainer = make_trainer(tmp_path, target, rows, eval_rows={"a": rows[:2], "b": rows[2:4]})
    metrics = trainer.evaluate()
    assert {"eval_a_loss", "eval_a_simulated_tau", "eval_b_loss", "eval_b_accuracy_1"} < set(metrics)
    assert "test_simulated_tau" in trainer.predict(rows[:2]).metrics


# ---------------------------------------------------------------------------------------------------------------- data


def test_collator_pads_examples():
    rows = [make_example([1, 2], [3, 4, 5]), make_example([6], [7])]
    assert rows[0] == {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 1, 1]}
    assert make_example([1, 2], [3, 4, 5], max_length=3) == {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}
    batch = DFlashCollator(pad_token_id=9)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]


def test_example_without_a_response_is_refused():
    with pytest.raises(ValueError, match="3 prompt ids and 2 response ids with max_length=3"):
        make_example([1, 2, 3], [4, 5], max_length=3)


# ----------------------------------------------------------------------------------------------------------- arguments


def test_defaults_are_the_papers(tmp_path):
    args = DFlashTrainingArguments(str(tmp_path), use_cpu=True)
    assert (args.learning_rate, args.lr_scheduler_type, args.max_grad_norm) == (6e-4, "cosine", 1.0)
    assert (args.get_warmup_steps(1000), args.num_train_epochs) == (40, 6)
    assert "adamw" in args.optim
    assert (args.num_anchors, args.loss_type) == (512, "ce")
    assert not args.remove_unused_columns


WRONG: list[dict] = [
    {"num_anchors": 0},
    {"loss_chunk_size": 0},
    {"gradient_accumulation_steps": 0},
    {"max_steps": 0},
    {"num_train_epochs": -1},
    {"loss_decay_gamma": -1.0},
    {"loss_decay_gamma": math.nan},
    {"loss_type": "l2"},
    {"block_attention": "flash"},
    {"remove_unused_columns": True},
    {"bf16_full_eval": True},
    {"fp16_full_eval": True},
    {"label_smoothing_factor": 0.1},
    {"logging_nan_inf_filter": True},
    {"max_minutes": 0},
    {"max_minutes": 1, "max_steps": 5},
    {"max_minutes": 1, "warmup_steps": 20},
    {"neftune_noise_alpha": 5.0},
]


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_wrong_arguments_are_named(arguments, tmp_path):
    name, value = list(arguments.items())[-1]
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        DFlashTrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **arguments)


def test_plain_training_arguments_are_refused(tmp_path):
    target = make_target()
    with pytest.raises(ValueError, match="args is a TrainingArguments; pass `DFlashTrainingArguments`"):
        DFlashTrainer(make_draft(target), target, TrainingArguments(str(tmp_path), use_cpu=True), counting_rows(2))


def test_drafter_of_another_target_is_refused(tmp_path):
    target = make_target()
    other_target = make_target(hidden_size=64)
    with pytest.raises(ValueError, match="hidden_size=64"):
        make_trainer(tmp_path, target, counting_rows(2), make_draft(other_target))
