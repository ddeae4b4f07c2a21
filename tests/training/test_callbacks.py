"""Decoding during training: real figures, on one process, without a trace; the best drafter by real tau."""

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from support.runs import BLOCK, history, make_trainer
from transformers import EarlyStoppingCallback

from dflash_hf import DecodingCallback
from dflash_hf.evaluation.measure import evaluate
from dflash_hf.modeling.drafting_dflash import Drafter
from dflash_hf.training.callbacks import parted


PROMPTS = [[5, 9, 11, 60], [7, 3]]


@pytest.fixture(scope="module")
def target():
    return make_target()


def test_real_figures_at_steps_and_evaluations(target, tmp_path, monkeypatch):
    rows = counting_rows(6)
    measured, original = [], DecodingCallback.measure

    def measure(self):
        assert self.trainer.model.training == (self.trainer.state.global_step not in evaluated)
        before = self.trainer.model.training
        report = original(self)
        assert self.trainer.model.training == before
        measured.append((self.trainer.state.global_step, report.tau))
        return report

    monkeypatch.setattr(DecodingCallback, "measure", measure)
    evaluated = {3}  # the one at the end finds the report of step 4
    trainer = make_trainer(
        tmp_path, target, rows, eval_rows=rows[:2], max_steps=4, eval_strategy="steps", eval_steps=3
    )
    trainer.add_callback(DecodingCallback(trainer, PROMPTS, max_new_tokens=12, decode_steps=2))
    trainer.train()
    assert [step for step, _ in measured] == [2, 3, 4]
    assert history(trainer, "tau") == [measured[0][1], measured[2][1]]
    assert history(trainer, "eval_tau") == [measured[1][1], measured[2][1]]
    assert history(trainer, "lossless") == history(trainer, "eval_lossless") == [1.0, 1.0]
    assert all(speedup > 0 for speedup in history(trainer, "speedup"))
    assert trainer.eval_report.tau == measured[2][1]
    # Asked again without a step in between, the same report answers.
    metrics = trainer.evaluate()
    assert len(measured) == 3 and metrics["eval_tau"] == measured[2][1]


def test_decoding_leaves_training_as_it_was(target, tmp_path):
    """Dropout, random numbers, gradients: the losses are those of a run without the callback, to the last bit."""
    runs = []
    for decodes in (False, True):
        draft = make_draft(target, block_size=BLOCK, attention_dropout=0.3)
        trainer = make_trainer(tmp_path, target, counting_rows(6), draft, max_steps=4, warmup_steps=0)
        if decodes:
            trainer.add_callback(DecodingCallback(trainer, PROMPTS, max_new_tokens=8, decode_steps=1))
        trainer.train()
        runs.append((history(trainer, "loss"), history(trainer, "accuracy"), history(trainer, "simulated_tau")))
    assert runs[0] == runs[1]


def test_default_prompts_are_those_of_the_data(target, tmp_path):
    rows = counting_rows(6)
    trainer = make_trainer(tmp_path, target, rows, eval_rows={"a": rows[3:5], "b": rows[5:]})
    assert DecodingCallback(trainer, num_prompts=9).prompts == [row["input_ids"][:4] for row in rows[3:5]]
    trainer = make_trainer(tmp_path, target, rows)
    assert DecodingCallback(trainer, num_prompts=2).prompts == [row["input_ids"][:4] for row in rows[:2]]


def best_trainer(folder, target, taus, **arguments):
    """A trainer that evaluates and saves at each of its steps, with these taus in place of measured ones."""
    rows = counting_rows(6)
    fields = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1, "warmup_steps": 0}
    trainer = make_trainer(folder, target, rows, eval_rows=rows[:2], max_steps=len(taus), **fields, **arguments)
    callback = DecodingCallback(trainer, PROMPTS, max_new_tokens=8)
    original, texts = callback.measure, []

    def measure():
        report = original()
        tau = taus[len(texts)]
        report.acceptance_lengths = [[tau], [tau]]
        texts.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
        return report

    callback.measure = measure
    trainer.add_callback(callback)
    return trainer, texts


def test_the_best_model_is_the_one_that_decodes_best(target, tmp_path):
    trainer, weights = best_trainer(
        tmp_path, target, [2, 4, 1, 3], load_best_model_at_end=True, metric_for_best_model="tau"
    )
    trainer.train()
    assert history(trainer, "eval_tau") == [2, 4, 1, 3]
    assert trainer.state.best_metric == 4 and trainer.state.best_global_step == 2
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, weights[1][name]), name
        assert not torch.equal(tensor, weights[3][name])
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        assert json.loads((folder / "eval_report.json").read_text())["summary"]["tau"] == 4
    assert json.loads((tmp_path / "checkpoint-3" / "eval_report.json").read_text())["summary"]["tau"] == 1


def test_early_stopping_watches_tau(target, tmp_path):
    trainer, _ = best_trainer(
        tmp_path, target, [2, 4, 1, 1, 1, 1], load_best_model_at_end=True, metric_for_best_model="eval_tau"
    )
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    assert history(trainer, "eval_tau") == [2, 4, 1, 1] and trainer.state.best_global_step == 2


def test_a_defect_that_only_decoding_has_is_told(target, tmp_path, caplog, monkeypatch):
    """Decoding drafts for the slot before: simulated tau stays, real tau falls, and a warning says so."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("dflash_hf"), "propagate", True)
    text = target.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=60, do_sample=False)[0].tolist()
    rows = [{"input_ids": text, "loss_mask": [0] * 4 + [1] * (len(text) - 4)}] * 8
    draft = make_draft(target, block_size=BLOCK)
    fields = {"max_steps": 60, "learning_rate": 5e-3, "num_anchors": 50, "warmup_steps": 0, "logging_steps": 60}
    trainer = make_trainer(tmp_path, target, rows, draft, eval_rows=rows[:1], **fields)
    trainer.train()
    callback = DecodingCallback(trainer, [PROMPTS[0]], max_new_tokens=60)
    trainer.add_callback(callback)
    with caplog.at_level(logging.WARNING):
        metrics = trainer.evaluate()
    assert metrics["eval_simulated_tau"] > 2.5 and metrics["eval_tau"] > 2
    assert "training simulates" not in caplog.text

    original = Drafter.block

    def shifted(self, *args):
        draft = original(self, *args)
        tokens = torch.cat([draft.tokens[:, :1], draft.tokens.roll(1, dims=1)[:, 1:]], dim=1)
        return draft._replace(tokens=tokens)

    monkeypatch.setattr(Drafter, "block", shifted)
    trainer.eval_report = None
    with caplog.at_level(logging.WARNING):
        metrics = trainer.evaluate()
    assert metrics["eval_lossless"] == 1.0
    assert f"decoding commits {metrics['eval_tau']:.2f} tokens per verification, but training simulates" in caplog.text


def test_when_two_taus_part():
    assert not parted(3.0, 3.0, 2.0) and not parted(2.1, 3.0, 2.0) and not parted(1.05, 1.2, 2.0)
    assert parted(1.1, 3.0, 2.0) and parted(3.0, 1.1, 2.0) and parted(1.9, 3.0, 2.0)
    assert not parted(1.9, 3.0, 3.0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"prompts": []}, r"prompts=\[\]"),
        ({"prompts": [[3], []]}, "must be non-empty lists"),
        ({"decode_steps": 0}, "decode_steps=0"),
        ({"max_ratio": 1.0}, "max_ratio=1.0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, target, tmp_path):
    trainer = make_trainer(tmp_path, target, counting_rows(2))
    with pytest.raises(ValueError, match=message):
        DecodingCallback(trainer, **{"prompts": PROMPTS, **arguments})


def test_a_drafter_that_is_spread_over_processes_is_refused(target, tmp_path):
    trainer = make_trainer(tmp_path, target, counting_rows(2))
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="run `dflash eval` on the saved checkpoints"):
        DecodingCallback(trainer, PROMPTS)


def decode_on_ranks(folder, ranks, fails=False):
    """The figures of every rank, and which ranks decoded."""
    rows = counting_rows(4)
    trainer = make_trainer(
        folder,
        make_target(),
        rows,
        eval_rows=rows[:3],
        per_device_train_batch_size=2 // ranks,
        per_device_eval_batch_size=1,
    )
    assert trainer.args.world_size == ranks
    callback = DecodingCallback(trainer, PROMPTS, max_new_tokens=8, decode_steps=1)
    decoded = []

    def counting(*args, **kwargs):
        decoded.append(trainer.state.global_step)
        if fails:
            raise RuntimeError("out of memory")
        return evaluate(*args, **kwargs)

    import dflash_hf.training.callbacks

    dflash_hf.training.callbacks.evaluate = counting
    try:
        trainer.add_callback(callback)
        trainer.train()
        metrics = trainer.evaluate()
    except RuntimeError as error:
        return str(error)
    finally:
        dflash_hf.training.callbacks.evaluate = evaluate
    return metrics["eval_tau"], history(trainer, "tau"), decoded


ONE_OF_TWO_RANKS = """
import sys
from pathlib import Path

import torch
from test_callbacks import decode_on_ranks

from dflash_hf.training.train import leave_group

torch.save([decode_on_ranks(sys.argv[1], 2), decode_on_ranks(sys.argv[1], 2, fails=True)], sys.argv[2])
leave_group()
threads = [name.read_text() for name in Path("/proc/self/task").glob("*/comm")]  # empty but on Linux
assert not any("gloo" in name for name in threads), threads
"""


def test_the_first_rank_decodes_and_none_hangs(tmp_path):
    """Nor when decoding fails: the error reaches every rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(2):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        command = [sys.executable, "-c", ONE_OF_TWO_RANKS, str(tmp_path), str(tmp_path / f"rank{rank}.pt")]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    expected_tau, expected_taus, _ = decode_on_ranks(tmp_path, ranks=1)
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    for rank in range(2):
        (tau, taus, decoded), failure = torch.load(tmp_path / f"rank{rank}.pt")
        assert (tau, taus) == (expected_tau, expected_taus)
        assert decoded == ([1] if rank == 0 else [])
        assert failure == "out of memory"
