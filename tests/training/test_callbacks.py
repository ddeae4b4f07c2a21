"""Decoding during training: real figures, on one process, without a trace; the best drafter by real tau."""

import json
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

from dflash_hf import DecodingCallback
from dflash_hf.evaluation.measure import evaluate


PROMPTS = [[5, 9, 11, 60], [7, 3]]


@pytest.fixture(scope="module")
def target():
    return make_target()


def test_evaluations_decode_without_a_trace(target, tmp_path):
    """Dropout, random numbers, gradients: the losses are those of a run without the callback, to the last bit."""
    runs, rows = [], counting_rows(6)
    fields = {"max_steps": 4, "warmup_steps": 0, "eval_strategy": "steps", "eval_steps": 2}
    for decodes in (False, True):
        draft = make_draft(target, block_size=BLOCK, attention_dropout=0.3)
        trainer = make_trainer(tmp_path, target, rows, draft, eval_rows=rows[:2], **fields)
        if decodes:
            trainer.add_callback(DecodingCallback(trainer, PROMPTS, max_new_tokens=12))
        trainer.train()
        runs.append([history(trainer, name) for name in ("loss", "accuracy", "simulated_tau")])
    assert runs[0] == runs[1]
    assert len(history(trainer, "eval_tau")) == 2 and history(trainer, "eval_lossless") == [1.0, 1.0]
    assert all(speedup > 0 for speedup in history(trainer, "eval_speedup"))
    expected = evaluate(target, draft, PROMPTS, 12, runs=1, methods=("target", "dflash")).tau
    assert trainer.evaluate()["eval_tau"] == history(trainer, "eval_tau")[-1] == expected


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
    original, texts = callback._decode, []

    def decode():
        texts.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
        return {**original(), "eval_tau": taus[len(texts) - 1]}

    callback._decode = decode
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
    assert json.loads((tmp_path / "card_facts.json").read_text())["training"]["optimizer_steps"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trainer: [], r"prompts=\[\] must be non-empty lists"),
        (lambda trainer: [[3], []], "must be non-empty lists"),
        (lambda trainer: setattr(trainer, "is_fsdp_enabled", True), "run `dflash eval` on the saved checkpoints"),
        (lambda trainer: trainer.target.model.layers.to("meta") and None, "whose layers were dropped"),
    ],
)
def test_what_cannot_decode_is_refused(change, message, tmp_path):
    trainer = make_trainer(tmp_path, make_target(), counting_rows(2))
    with pytest.raises(ValueError, match=message):
        DecodingCallback(trainer, change(trainer))


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
    callback = DecodingCallback(trainer, PROMPTS, max_new_tokens=8)
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
    return metrics["eval_tau"], decoded


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
    expected_tau, _ = decode_on_ranks(tmp_path, ranks=1)
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    for rank in range(2):
        (tau, decoded), failure = torch.load(tmp_path / f"rank{rank}.pt")
        assert tau == expected_tau
        assert decoded == ([1] if rank == 0 else [])
        assert failure == "out of memory"
