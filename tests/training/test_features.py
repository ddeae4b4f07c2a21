"""Stored features: the same loss as online, resumed after an interruption, and never those of something else."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from support.pairs import make_draft, make_target
from support.rows import counting_rows, uneven_rows
from support.runs import BLOCK, history, make_trainer
from support.tiny_chat import make_tokenizer, save_target
from transformers import AutoModelForCausalLM

from dflash_hf.cli import main
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.template import ChatTemplate
from dflash_hf.targets.digests import digest_of_target
from dflash_hf.targets.frozen import target_features
from dflash_hf.training import feature_store, features
from dflash_hf.training import trainer as trainer_module
from dflash_hf.training.feature_manifest import FeatureManifest, manifest_of
from dflash_hf.training.feature_store import store_features
from dflash_hf.training.features import StoredFeatures, drop_layers, stored_tokens
from dflash_hf.training.features import open_features as stored_features
from dflash_hf.training.row_features import store_rows
from dflash_hf.training.rows import validate_and_count
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.training_args import DFlashTrainingArguments


LAYERS = [0, 2, 3]  # of `make_draft`


def store(
    target, rows, folder, layer_ids=LAYERS, dtype="float32", shard_bytes=20_000, states=False, **template_kwargs
):
    encoder = RowEncoder(ChatTemplate(make_tokenizer(), template_kwargs), max_length=64)
    manifest = manifest_of(target, "some/target", layer_ids, encoder, dtype, states)
    lines = []
    return store_features(
        target, rows, folder, manifest, batch_size=2, shard_bytes=shard_bytes, say=lines.append
    ), lines


@pytest.fixture
def stored(target, tmp_path):
    store(target, counting_rows(6), tmp_path / "features")
    return tmp_path / "features"


def make_offline_trainer(folder, target, dataset, draft=None, **overrides):
    arguments = make_trainer(folder, target, counting_rows(2), **overrides).args
    return DFlashTrainer(draft or make_draft(target, block_size=BLOCK), target, arguments, dataset)


def test_missing_target_layers_are_refused(target, tmp_path):
    """Of a run whose drafter belongs to a deeper target, this was `IndexError: index 8 is out of range`."""
    for layer_ids in ([0, 8], [1, 1], [-2, 0]):
        with pytest.raises(
            ValueError, match=r"target layers \[.*from 0 to 3, .* load the drafter that was trained for"
        ):
            store(target, counting_rows(2), tmp_path / "features", layer_ids)


def test_stored_row_equals_the_targets_features(target, stored):
    dataset = StoredFeatures(stored)
    assert dataset.lengths.tolist() == [len(row["input_ids"]) for row in dataset]
    assert len(dataset) == 6 and len(dataset.manifest.shards) == 3
    for row, example in zip(counting_rows(6), dataset, strict=True):
        assert example["input_ids"].tolist() == row["input_ids"]
        assert example["loss_mask"].tolist() == row["loss_mask"]
        expected = target_features(target, LAYERS, torch.tensor([row["input_ids"]]))[0]
        torch.testing.assert_close(example["stored"].read("features"), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(dataset[-1]["input_ids"], dataset[5]["input_ids"])
    with pytest.raises(IndexError):
        dataset[6]


@pytest.mark.parametrize("loss_type", ["ce", "dpace", "kl"])
def test_stored_loss_is_the_loss_without_the_layers(loss_type, tmp_path):
    rows = [*uneven_rows(), *counting_rows(2)]
    losses = []
    tau = []
    for offline in (False, True):
        target = make_target()
        loss = {"max_steps": 3, "loss_type": loss_type}
        if offline:
            states = loss_type == "kl"
            store(target, rows, tmp_path / "train", states=states)
            store(target, rows[:3], tmp_path / "eval", states=states)
            drop_layers(target, torch.device("cpu"))
            with pytest.raises((RuntimeError, NotImplementedError)):
                target(torch.tensor([[1, 2]]))
            arguments = DFlashTrainingArguments(str(tmp_path), **{**trainer_fields(tmp_path), **loss})
            draft = make_draft(make_target(), block_size=BLOCK)
            data = (StoredFeatures(tmp_path / name) for name in ("train", "eval"))
            trainer = DFlashTrainer(draft, target, arguments, *data)
        else:
            trainer = make_trainer(tmp_path, target, rows, eval_rows=rows[:3], **loss)
        trainer.train()
        losses.append(history(trainer, "loss"))
        tau.append(trainer.evaluate()["eval_loss"])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert tau[1] == pytest.approx(tau[0], rel=1e-6)


def test_head_in_fp32_reads_states_stored_in_bf16(target, tmp_path):
    """`dflash features` stores bf16 unless told otherwise; a target in fp32 then could not be a teacher."""
    store(target, counting_rows(4), tmp_path / "features", dtype="bfloat16", states=True)
    dataset = StoredFeatures(tmp_path / "features")
    trainer = make_offline_trainer(tmp_path / "run", target, dataset, loss_type="dpace_kl")
    trainer.train()
    assert history(trainer, "loss")


def trainer_fields(folder):
    fields = make_trainer(folder, make_target(), counting_rows(2)).args.to_dict()
    names = ("per_device_train_batch_size", "num_anchors", "logging_steps", "save_strategy", "disable_tqdm", "use_cpu")
    return {name: fields[name] for name in names} | {"report_to": []}


class Killed(BaseException):
    pass


def test_interrupted_storing_goes_on_after_last_shard(target, tmp_path, monkeypatch):
    rows = counting_rows(6)
    folder = tmp_path / "features"
    calls = []

    def killed(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return forward(*arguments, **options)

    forward = feature_store.target_forward
    monkeypatch.setattr(feature_store, "target_forward", killed)
    with pytest.raises(Killed):
        store(target, rows, folder)
    monkeypatch.setattr(feature_store, "target_forward", forward)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert len(before) == 2
    with pytest.raises(ValueError, match="holds 2 of 3 shards; run the same `dflash features` again"):
        StoredFeatures(folder)
    (folder / ".features-00002.safetensors.half").write_bytes(b"half")
    _, lines = store(target, rows, folder)
    assert "0.06 MB; 0.02 MB are to be written" in lines[0]
    assert {name: (folder / name).stat().st_mtime_ns for name in before} == before
    store(target, rows, tmp_path / "whole")
    for example, expected in zip(StoredFeatures(folder), StoredFeatures(tmp_path / "whole"), strict=True):
        assert torch.equal(example["stored"].read("features"), expected["stored"].read("features"))
        assert all(torch.equal(example[name], expected[name]) for name in ("input_ids", "loss_mask"))
    assert not list(folder.glob(".*"))


def test_storing_that_stops_early_is_complete(target, tmp_path):
    """As of a run that stores features for a third of its time; the same call leaves it as it is."""
    rows = counting_rows(6)
    folder = tmp_path / "features"
    calls = []
    manifest = manifest_of(
        target, "some/target", LAYERS, RowEncoder(ChatTemplate(make_tokenizer()), max_length=64), "float32"
    )
    options = {"shard_bytes": 20_000, "should_stop": lambda: calls.append(1) or len(calls) == 2}
    assert store_features(target, rows, folder, manifest, **options).examples == 4 == len(StoredFeatures(folder))
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    store_features(target, rows, folder, manifest, **options)
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")} == before and len(calls) == 2


def test_run_with_little_time_stores_few_rows(target, tmp_path):
    """It asked after 64 MB, of a small target 29,000 tokens: a slow machine read them for longer than it was given."""
    rows = counting_rows(600)
    draft = make_draft(target)
    run = SimpleNamespace(target=target, draft=draft, args=SimpleNamespace(has_teacher=False, process_index=0))
    recipe = SimpleNamespace(target="some/target")
    encoder = RowEncoder(ChatTemplate(make_tokenizer()), max_length=64)
    store_rows(rows, tmp_path / "features", run, recipe, encoder, lambda: True)
    stored = StoredFeatures(tmp_path / "features")
    assert 0 < stored.lengths.sum() <= 4096 < sum(len(row["input_ids"]) for row in rows)


def test_full_disk_is_known_before_rows_are_read(target, tmp_path, monkeypatch):
    """An hour at the paper's size; the lengths tell it."""
    monkeypatch.setattr(feature_store, "digest_of_rows", lambda rows: pytest.fail("read"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(feature_store.shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    monkeypatch.setattr(feature_store, "target_forward", lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(ValueError, match="has 0.05 MB left, but 0.06 MB are needed"):
        store(target, counting_rows(6), tmp_path / "features")
    assert not list((tmp_path / "features").iterdir())


def test_missing_and_damaged_shards_are_named(stored, tmp_path):
    StoredFeatures(stored)
    shard = stored / "features-00001.safetensors"
    contents = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ValueError, match="holds 2 of 3 shards; .* .features-00001.safetensors is missing"):
        StoredFeatures(stored)
    shard.write_bytes(contents[:-1])
    with pytest.raises(ValueError, match="features-00001.safetensors is damaged"):
        StoredFeatures(stored)
    shard.write_bytes(contents)
    StoredFeatures(stored)
    (stored / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"manifest.json is damaged"):
        StoredFeatures(stored)
    with pytest.raises(ValueError, match="has no manifest.json"):
        StoredFeatures(tmp_path)


@pytest.mark.parametrize("changed", ["dtype", "layer_ids", "data", "chat_template_kwargs", "weights"])
def test_other_features_are_not_mixed_with_them(changed, target, stored):
    rows = counting_rows(6) if changed != "data" else counting_rows(7)
    options = {
        "dtype": {"dtype": "bfloat16"},
        "layer_ids": {"layer_ids": [0, 1, 3]},
        "chat_template_kwargs": {"enable_thinking": False},
    }.get(changed, {})
    other_target = make_target(seed=5) if changed == "weights" else target
    with pytest.raises(ValueError, match=f"was stored with {changed}="):
        store(other_target, rows, stored, **options)


def test_trainer_refuses_features_of_something_else(target, stored, tmp_path):
    dataset = StoredFeatures(stored)
    for draft, used_target, differs in (
        (make_draft(target, target_layer_ids=[0, 1, 3]), target, r"layer_ids=\[0, 2, 3\], not \[0, 1, 3\]"),
        (make_draft(target), make_target(seed=5), r"weights\.ends='.*', not '.*'; weights\.layers='.*', not '.*'"),
    ):
        with pytest.raises(ValueError, match=f"was stored with {differs}: train with .* of the features, or"):
            make_offline_trainer(tmp_path, used_target, dataset, draft)
    with pytest.raises(ValueError, match="was stored without the final states, .* `dflash features --states`"):
        make_offline_trainer(tmp_path, target, dataset, loss_type="kl")


def test_several_folders_are_one_dataset(target, stored, tmp_path):
    assert torch.equal(validate_and_count(stored_tokens(stored)), validate_and_count(counting_rows(6)))
    store(target, counting_rows(9), tmp_path / "later")
    combined = stored_features([stored, tmp_path / "later"])
    assert len(combined) == 6 + 9 and len(stored_tokens([stored, tmp_path / "later"])) > 3
    trainer = make_offline_trainer(tmp_path / "run", target, combined)
    trainer.train()
    assert trainer.state.global_step > 0


def test_features_are_read_when_their_micro_batch_runs(target, stored, tmp_path, monkeypatch):
    """All micro-batches of a step were held with their features: 8 GB a rank."""
    events = []
    stored_output = trainer_module.stored_output
    monkeypatch.setattr(trainer_module, "stored_output", lambda *of: events.append("read") or stored_output(*of))
    options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1}
    trainer = make_offline_trainer(tmp_path, target, StoredFeatures(stored), **options)
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: events.append("micro-batch") or compute(*args, **kwargs)
    trainer.train()
    assert events == ["micro-batch", "read"] * 3


def test_set_stored_anew_is_read_anew(target, stored):
    """An open file of the same name must not be taken for the new one."""
    before = StoredFeatures(stored)[0]["stored"].read("features")
    shutil.rmtree(stored)
    store(make_target(seed=5), counting_rows(6), stored)
    assert not torch.equal(StoredFeatures(stored)[0]["stored"].read("features"), before)


def make_small_shards(folder, count):
    """A set of shards with one example each, as a run stores them, without a target."""
    manifest = FeatureManifest("tiny", {}, [0], 2, "float32", "", {}, "", None, shards=[1] * count)
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest)), encoding="utf-8")
    for number in range(count):
        shard = {
            "features": torch.full((2, 2), float(number)),
            "input_ids": torch.tensor([number, number]),
            "loss_mask": torch.ones(2, dtype=torch.uint8),
            "offsets": torch.tensor([0, 2]),
        }
        save_file(shard, folder / f"features-{number:05d}.safetensors")


def test_many_small_shards_stay_open(tmp_path):
    """Of more than 256 shards, reading the rows at random opened a file for nearly every row."""
    make_small_shards(tmp_path / "features", 300)
    features._open_shard.cache_clear()
    dataset = StoredFeatures(tmp_path / "features")
    for _ in range(2):
        for index in range(300):
            assert dataset[index]["stored"].read("features")[0, 0] == index
    assert features._open_shard.cache_info().misses == 300


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux lists a process's mappings")
def test_closed_shards_keep_no_mapping(tmp_path):
    """Offsets kept the mapping of every shard: with 65,530 of them, a process could map no memory any more."""
    make_small_shards(tmp_path / "features", 8)
    features._open_shard.cache_clear()
    dataset = StoredFeatures(tmp_path / "features")
    rows = [dataset[index] for index in range(8)]
    assert len(rows) == len(dataset.conversations) == 8
    del rows
    features._open_shard.cache_clear()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_digest_tells_targets_apart_but_not_dtypes():
    target = make_target()
    copy = make_target()
    half = make_target().to(torch.bfloat16)
    tuned = make_target()
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.mul_(1.05)
    digest = digest_of_target(target)
    assert digest_of_target(copy) == digest == digest_of_target(half)
    changed = digest_of_target(tuned)
    assert changed["ends"] == digest["ends"] and changed["layers"] != digest["layers"]
    assert set(digest_of_target(drop_layers(tuned, torch.device("cpu")))) == {"ends"}


def test_command_stores_features(tmp_path, capsys, own_cache):
    pytest.importorskip("datasets")
    folder = save_target(tmp_path / "target")
    rows = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}, of course"} for i in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def run(*options):
        code = main(
            ["features", "--data", str(tmp_path / "a.jsonl"), "--target", str(folder), "--device", "cpu", *options]
        )
        printed = capsys.readouterr()
        return code, printed.out, printed.err.strip().splitlines()[-1]

    output = str(tmp_path / "features")
    code, out, error = run("--output", output, "--target-layer-ids", "0", "2")
    assert code == 0, error
    assert "8 examples, " in out and " are free in " in out and "8 examples in 1 shard are in" in out
    dataset = StoredFeatures(output)
    assert dataset.manifest.dtype == "bfloat16" and dataset[3]["stored"].read("features").dtype == torch.bfloat16
    assert run("--output", str(tmp_path / "embedding"), "--target-layer-ids", "-1")[0] == 0
    of_embedding = StoredFeatures(tmp_path / "embedding")[0]
    embedded = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings()(of_embedding["input_ids"])
    assert torch.equal(of_embedding["stored"].read("features"), embedded.bfloat16())
    for options, message in (
        (
            ("--target-layer-ids", "0", "4"),
            "target layers [0, 4] must be distinct and from 0 to 3, or -1, the embedding",
        ),
        (("--target-layer-ids", "0", "1"), "was stored with layer_ids=[0, 2], not [0, 1]"),
    ):
        code, _, error = run("--output", output, *options)
        assert code == 1 and message in error and error.startswith("dflash features: ")
