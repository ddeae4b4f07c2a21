"""Stored features read ahead of their micro-batch: in order, once, in pinned memory, and with errors that arrive."""

import os
import threading
from pathlib import Path

import pytest
import torch
from support.pairs import make_draft, make_target
from support.pretend import PretendAccelerator
from support.pretend.memory import set_mark
from support.rows import counting_rows
from support.runs import BLOCK, history, make_trainer
from torch.nn.utils.rnn import pad_sequence
from training.test_features import make_small_shards, store

from dflash_hf.training import features
from dflash_hf.training.features import FeaturesAhead, StoredFeatures, stored_output
from dflash_hf.training.trainer import DFlashTrainer


def batches_of(dataset, size=2):
    """Micro-batches of rows, in order."""
    for first in range(0, len(dataset), size):
        rows = [dataset[index] for index in range(first, min(first + size, len(dataset)))]
        yield {"input_ids": torch.stack([row["input_ids"] for row in rows]), "stored": [row["stored"] for row in rows]}


@pytest.fixture
def dataset(tmp_path):
    make_small_shards(tmp_path / "features", 12)
    return StoredFeatures(tmp_path / "features")


def test_features_arrive_in_the_order_of_their_rows(dataset):
    """Several micro-batches of a step are drawn before the first of them takes its features."""
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    ahead = FeaturesAhead(batches_of(dataset), states=False, pin_memory=False)
    taken = []
    for _ in range(2):
        step = [next(ahead) for _ in range(3)]
        taken += [stored_output(batch, states=False).features for batch in step]
    assert next(ahead, None) is None
    ahead.close()
    assert torch.equal(torch.cat(taken)[:, 0, 0], torch.arange(12.0))
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_two_micro_batches_are_read_ahead(dataset, monkeypatch):
    """However many a step has: all of their features would be gigabytes."""
    read = []
    monkeypatch.setattr(features, "pad_sequence", lambda rows, **_: read.append(rows) or torch.stack(rows))
    ahead = FeaturesAhead(batches_of(dataset), states=False, pin_memory=False)
    step = [next(ahead) for _ in range(6)]
    stored_output(step[0], states=False)
    ahead._executor.submit(int).result()  # after all others
    assert len(read) == 3
    ahead.close()


def test_dropped_micro_batch_is_passed_over(dataset):
    ahead = FeaturesAhead(batches_of(dataset), states=False, pin_memory=False)
    next(ahead)
    second = next(ahead)
    assert stored_output(second, states=False).features[0, 0, 0] == 2
    with pytest.raises(RuntimeError, match="read once, in the order of the micro-batches"):
        stored_output(second, states=False)
    ahead.close()


def test_removed_shards_stay_readable_and_changed_ones_do_not(dataset):
    """A run removes the features that it has stored for itself while its trainer is alive."""
    shards = sorted(dataset.folder.glob("*.safetensors"))
    rows = [dataset[index]["stored"] for index in range(2)]
    shards[0].unlink()
    assert rows[0].read("features")[0, 0] == 0
    os.truncate(shards[1], 1)
    with pytest.raises(ValueError, match="features-00001.safetensors has changed since .* store the features again"):
        rows[1].read("features")


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("event", ["end", "cut off", "unreadable", "interrupt"])
def test_run_leaves_no_thread(event, tmp_path, monkeypatch):
    """However it ends; and its error is the caller's."""
    target = make_target()
    store(target, counting_rows(12), tmp_path / "features")
    trainer = stored_trainer(tmp_path, target, max_steps=4)
    threads = set(threading.enumerate())
    compute = trainer.compute_loss

    def compute_loss(*arguments, **options):
        assert len(set(threading.enumerate()) - threads) == 1
        if trainer.state.global_step == 1 and event == "cut off":
            for shard in (tmp_path / "features").glob("*.safetensors"):
                os.truncate(shard, 1)
        if trainer.state.global_step == 1 and event == "interrupt":
            raise Interrupted("by the user")
        return compute(*arguments, **options)

    def pad(*arguments, **options):
        if trainer.state.global_step == 1 and event == "unreadable":
            raise OSError("the disk is gone")
        return pad_sequence(*arguments, **options)

    trainer.compute_loss = compute_loss
    monkeypatch.setattr(features, "pad_sequence", pad)
    errors = {
        "cut off": (ValueError, "has changed since it was opened"),
        "unreadable": (OSError, "the disk is gone"),
        "interrupt": (Interrupted, "by the user"),
    }
    if event == "end":
        trainer.train()
    else:
        error_class, message = errors[event]
        with pytest.raises(error_class, match=message) as caught:
            trainer.train()
        assert caught.tb is not None  # it refers to the frames of the reader
    assert set(threading.enumerate()) == threads


def stored_trainer(folder, target, **overrides):
    """A trainer on the features in a folder."""
    arguments = make_trainer(folder / "run", target, counting_rows(2), **overrides).args
    return DFlashTrainer(make_draft(target, block_size=BLOCK), target, arguments, StoredFeatures(folder / "features"))


def test_resumed_run_reads_the_same_rows(tmp_path, monkeypatch):
    """Also if the checkpoint is in the middle of a pass, while later rows have been read already."""
    target = make_target()
    store(target, counting_rows(10), tmp_path / "features")
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 7, "gradient_accumulation_steps": 2}
    whole = stored_trainer(tmp_path, target, **options)
    whole.train()
    resumed = stored_trainer(tmp_path, target, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    monkeypatch.setattr(DFlashTrainer, "_read_ahead", lambda self, epoch_iterator: epoch_iterator)
    in_the_step = stored_trainer(tmp_path, target, **options)
    in_the_step.train()
    losses = history(whole, "loss")
    assert len(losses) == 7 and losses == history(resumed, "loss") == history(in_the_step, "loss")


def pinned(tensor):
    return set_mark(tensor.clone(), torch.device("cpu"), is_pinned=True)


def test_step_copies_from_pinned_memory_only(tmp_path, monkeypatch):
    """On an accelerator, the features of a micro-batch are copied without a wait; from pageable memory each waited."""
    target = make_target()
    store(target, counting_rows(4), tmp_path / "features", states=True)
    trainer = stored_trainer(tmp_path, target, loss_type="kl", num_anchors=4)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)  # in all threads; the modes of an accelerator are in one
    dataset = trainer.train_dataset
    lines = {}
    for pin in (False, True):
        batches = iter([trainer.data_collator([dataset[0], dataset[1]])])
        with PretendAccelerator() as accelerator:
            trainer.target.to("cuda")
            trainer.draft.to("cuda")
            monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda:0"))
            objective = trainer.make_objective()
            ahead = FeaturesAhead(batches, states=True, pin_memory=pin)
            batch = next(ahead)
            objective.draw_anchors(batch, 0)
            for name in ("input_ids", "attention_mask", "loss_mask", "anchors", "valid"):
                batch[name] = batch[name].to("cuda")
            before = accelerator.counts.copy()
            loss, _ = objective(trainer.draft.train(), batch)
            loss.sum().backward()
            counts = accelerator.counts.since(before)
        ahead.close()
        lines[pin] = {line for line in counts.from_host if line in counts.waits}
        copied = [line for line in counts.from_host if Path(line.split(":")[0]).name == "features.py"]
        assert len(copied) == 1 and counts.from_host[copied[0]] == 2  # features and states
        assert (copied[0] in lines[pin]) != pin
    assert lines[True] == set()
