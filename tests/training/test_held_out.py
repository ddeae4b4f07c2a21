"""Rows that a run does not train on: which they are, that nothing learns them, and that a run ends with their tau."""

import json
import random
import re
from collections import Counter

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from support.runs import TINY_RECIPE, as_options, as_settings
from support.tiny_chat import THINKING, make_tokenizer

from dflash_hf._io.files import read_json, write_json
from dflash_hf.cli import main
from dflash_hf.data.hold_out import conversation_key, default_held_out, hold_out
from dflash_hf.training.features import StoredFeatures
from dflash_hf.training.held_out import is_overfitted
from dflash_hf.training.recipe import read_recipe
from dflash_hf.training.train import train as train_recipe
from dflash_hf.training.trainer import DFlashTrainer


pytest.importorskip("yaml")
pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("own_cache")
TINY = (*TINY_RECIPE, "save_steps=1", "draft_vocab_size=null")
ROWS = 40


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "data.jsonl", ROWS)


def write(path, rows):
    texts = []
    for number in range(rows):
        turns = []
        for turn in range(1 + number % 3):  # thoughts are dropped later on: each turn is an example of its own
            turns.append({"role": "user", "content": f"Say {number}, {turn}"})
            turns.append({"role": "assistant", "content": f"<think>\nOh.\n</think>\n\n{number}, as you wish."})
        texts.append(json.dumps({"messages": turns}) + "\n")
    path.write_text("".join(texts), encoding="utf-8")
    return path


def run(folder, data, output, *settings):
    """The trainer of a run on a file of rows, or on stored features, after it."""
    kind = "features" if data.is_dir() else "data"
    of_data = [] if data.is_dir() else ["max_length=128", "store_rows=0"]
    words = [f"target={folder}", f"{kind}={data}", f"output_dir={output}", *TINY, *of_data, *settings]
    return train_recipe(*read_recipe(None, as_settings(words)))


def texts_of(dataset):
    return Counter(tuple(np.asarray(row["input_ids"]).tolist()) for row in dataset)


def numbers_in(texts):
    """The numbers of the rows that texts are of."""
    tokenizer = make_tokenizer(THINKING)
    return {number for ids in texts for number in re.findall(r"Say (\d+),", tokenizer.decode(ids))}


def store(folder, data, output):
    """`dflash features` of two layers."""
    words = ["features", "--data", data, "--target", folder, "--output", output, "--target-layer-ids", 0, 2]
    options = ["--max-length", 128, "--store-dtype", "float32", "--device", "cpu"]
    assert main([str(word) for word in (*words, *options)]) == 0
    return output


def test_split_is_of_whole_conversations():
    generator = random.Random(0)
    keys = [generator.randrange(90) for _ in range(400)]
    trained, held_out, conversations = hold_out(keys, None, seed=3)
    assert sorted([*trained, *held_out]) == list(range(400))
    assert not {keys[i] for i in trained} & {keys[i] for i in held_out}
    assert conversations == default_held_out(len(set(keys))) == 8
    # In another order and with other rows beside them, the same ones.
    order = list(range(400))
    generator.shuffle(order)
    _, held_out_shuffled, _ = hold_out([keys[i] for i in order], None, seed=3)
    assert {keys[order[i]] for i in held_out_shuffled} == {keys[i] for i in held_out}
    assert hold_out(keys, None, seed=4)[1] != held_out


def test_split_never_holds_out_the_commonest_prompt():
    """Text that begins in one way, such as a base model's, would be one conversation."""
    keys = [7] * 60 + list(range(100, 140))
    trained, held_out, _ = hold_out(keys, 20, seed=0)
    assert len(held_out) == 20 and {keys[i] for i in held_out} <= set(range(100, 140))
    with pytest.raises(ValueError, match=r"held_out_rows=2, but only 1 of the 4 different prompts .* ask for fewer"):
        hold_out([7] * 30 + [8] * 30 + [9] * 30 + [10], 2, seed=0)
    assert hold_out([7] * 30, None, seed=0)[2] == 0


@pytest.mark.parametrize(
    ("conversations", "expected"),
    [(0, 0), (19, 0), (20, 2), (60, 6), (79, 7), (80, 8), (200, 10), (4000, 200), (10**6, 256)],
)
def test_default_holds_out_a_twentieth(conversations, expected):
    assert default_held_out(conversations) == expected


def test_conversation_key_hashes_prompt_and_images():
    ids = np.array([5, 6, 7, 8])
    mask = np.array([0, 0, 1, 1])
    key = conversation_key(ids, mask)
    assert key == conversation_key(np.array([5, 6, 9]), np.array([0, 0, 1]))
    assert key != conversation_key(ids, mask, ["a.png"]) != conversation_key(ids, mask, ["b.png"])
    text = np.array([0, 1, 1, 1])  # without a prompt
    assert conversation_key(ids, text) != conversation_key(np.array([5, 6, 7, 9]), text)


@pytest.mark.parametrize("source", ["data", "store_rows", "features"])
def test_run_never_trains_on_held_out_rows(source, folder, data, tmp_path):
    settings = []
    rows = data
    if source == "store_rows":
        settings = ["store_rows=12"]
    if source == "features":
        rows = store(folder, data, tmp_path / "features")
    trainer = run(folder, rows, tmp_path / "out", *settings)
    trained = texts_of(trainer.train_dataset)
    held_out = texts_of(trainer.eval_dataset)
    assert not trained.keys() & held_out.keys()
    assert len(numbers_in(held_out)) == 4 and not numbers_in(trained) & numbers_in(held_out)
    assert source == "store_rows" or len(numbers_in(trained)) == ROWS - 4
    facts = read_json(tmp_path / "out" / "card_facts.json")["training"]
    assert facts["held_out_rows"] == 4
    assert facts["held_out_simulated_tau"] >= 1 and facts["training_simulated_tau"] >= 1


@pytest.mark.parametrize("settings", [["seed=7"], ["held_out_rows=4"]])
def test_resumed_run_keeps_its_held_out_rows(settings, folder, data, tmp_path):
    expected = texts_of(run(folder, data, tmp_path / "out", "seed=1").eval_dataset)
    resumed = run(folder, data, tmp_path / "out", "resume_from_checkpoint=auto", "max_steps=3", *settings)
    assert texts_of(resumed.eval_dataset) == expected


def test_twice_resumed_run_keeps_its_held_out_rows(folder, data, tmp_path):
    """The second time, they were chosen by the seed of the first resumption: among rows that had been trained on."""
    expected = texts_of(run(folder, data, tmp_path / "out", "seed=0").eval_dataset)
    for steps in (3, 4):
        resumed = run(folder, data, tmp_path / "out", "resume_from_checkpoint=auto", f"max_steps={steps}", "seed=7")
        assert texts_of(resumed.eval_dataset) == expected


def test_resumed_run_of_all_rows_holds_out_none(folder, data, tmp_path):
    """A checkpoint of an earlier version has learned them all."""
    run(folder, data, tmp_path / "out")
    for path in (tmp_path / "out").glob("checkpoint-*/card_facts.json"):
        facts = read_json(path)
        del facts["training"]["held_out_rows"]
        write_json(path, facts)
    resumed = run(folder, data, tmp_path / "out", "resume_from_checkpoint=auto", "max_steps=3")
    assert resumed.eval_dataset is None and len(texts_of(resumed.train_dataset)) > ROWS
    with pytest.raises(ValueError, match=r"held_out_rows=3, but .*checkpoint-3 was trained with 0"):
        run(folder, data, tmp_path / "out", "resume_from_checkpoint=auto", "max_steps=4", "held_out_rows=3")


def test_vocabulary_is_that_of_the_training_rows(folder, data, tmp_path):
    """Also of stored features, whose counts are of whole shards."""
    store(folder, data, tmp_path / "f")
    of_rows = run(folder, data, tmp_path / "a", "draft_vocab_size=20")
    of_features = run(folder, tmp_path / "f", tmp_path / "b", "draft_vocab_size=20")
    assert of_rows.draft.d2t.tolist() == of_features.draft.d2t.tolist()


def test_features_without_keys_are_split_by_prompt(folder, data, tmp_path):
    """Those of an earlier version."""
    before = StoredFeatures(store(folder, data, tmp_path / "f"))
    assert len(set(before.conversations)) == ROWS < len(before)
    for path in (tmp_path / "f").glob("*.safetensors"):
        tensors = load_file(path)
        del tensors["conversations"]
        save_file(tensors, path)
    assert len(set(StoredFeatures(tmp_path / "f").conversations)) == len(before)


# --------------------------------------------------------------------------------------------------- what a run says


def train(capsys, folder, data, output, *settings):
    words = [f"target={folder}", f"data={data}", f"output_dir={output}", *TINY, "max_length=128", *settings]
    code = main(["train", *as_options(words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_run_ends_with_the_tau_of_held_out_rows(folder, data, tmp_path, capsys):
    code, out, error = train(capsys, folder, data, tmp_path / "out", "store_rows=0", "max_steps=3")
    assert code == 0, error
    last = (
        r"held-out tau      \d\.\d\d, simulated, of \d+ rows that were not trained on; \d\.\d\d of the training rows"
    )
    assert re.fullmatch(last + "(, which were memorised)?", out.splitlines()[-1])
    assert re.search(r"^held out          \d+ rows, which are not trained on: the run ends with their tau$", out, re.M)
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(steps) == 3 and "of the training rows" in steps[0]
    assert max(map(len, steps)) < 120 and "{" not in out


def test_run_without_held_out_rows_says_so(folder, tmp_path, capsys):
    data = write(tmp_path / "few.jsonl", 12)
    code, out, error = train(capsys, folder, data, tmp_path / "out")
    assert code == 0, error
    assert out.splitlines()[-1].startswith("held-out tau      unknown: no row was held out (--held-out-rows N holds")
    code, out, error = train(capsys, folder, data, tmp_path / "other", "held_out_rows=3")
    assert code == 0 and "not trained on" in out.splitlines()[-1], error


@pytest.mark.parametrize(("eval_steps", "evaluated"), [(2, [2, 3]), (3, [3]), (500, [3])])
def test_run_ends_with_the_tau_of_its_evaluation_data(eval_steps, evaluated, folder, data, tmp_path):
    """It ended without any, if it ended before its first evaluation."""
    held_out = write(tmp_path / "held_out.jsonl", 3)
    settings = [f"eval_data={held_out}", "eval_strategy=steps", f"eval_steps={eval_steps}", "max_steps=3"]
    trainer = run(folder, data, tmp_path / "out", *settings)
    assert [line["step"] for line in trainer.state.log_history if "eval_simulated_tau" in line] == evaluated


def test_run_that_ends_by_the_clock_evaluates_its_last_step(folder, data, tmp_path):
    held_out = write(tmp_path / "held_out.jsonl", 3)
    settings = [f"eval_data={held_out}", "eval_strategy=steps", "eval_steps=100000", "max_steps=-1"]
    state = run(folder, data, tmp_path / "out", *settings, "max_minutes=0.05").state
    evaluated = [line["step"] for line in state.log_history if "eval_simulated_tau" in line]
    assert evaluated == [state.global_step] and state.global_step > 0


def test_more_held_out_than_half_is_refused(folder, data, tmp_path, capsys):
    code, _, error = train(capsys, folder, data, tmp_path / "out", "held_out_rows=21")
    assert code == 1 and "--held-out-rows 21 must be from 0, for none, to half of the 40 rows" in error
    code, _, error = train(capsys, folder, data, tmp_path / "out", "held_out_rows=2", f"eval_data={data}")
    assert code == 1 and "--held-out-rows 2 has no effect with --eval-data" in error


@pytest.mark.parametrize(("steps", "warns"), [("max_steps=500", True), ("max_steps=20", False)])
def test_many_passes_warn_before_the_first_step(steps, warns, folder, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(DFlashTrainer, "compute_loss", lambda *_, **__: 1 / 0)  # before the first step is made
    code, _, error = train(capsys, folder, data, tmp_path / "out", "store_rows=0", steps)
    assert code == 1 and "ZeroDivisionError" in error
    assert ("passes over 72 rows memorise them" in error) == warns


@pytest.mark.parametrize(
    ("training", "held_out", "expected"),
    [(3.95, 1.26, True), (1.75, 1.49, False), (1.0, 1.0, False), (1.2, 1.05, True)],
)
def test_overfitting_is_recognised(training, held_out, expected):
    assert is_overfitted(training, held_out) == expected
