"""What a watched training writes: a row for each line of the log."""

import re
import sys
from unittest.mock import MagicMock

import pytest
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from support.runs import BLOCK, history, make_trainer
from transformers import ProgressCallback
from transformers.integrations import integration_utils

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.training import log_table
from dflash_hf.training.log_table import LogTable, table_row


def test_a_row_holds_what_people_look_at():
    logs = {
        "loss": 3.21456,
        "learning_rate": 6e-4,
        "epoch": 0.123,
        "simulated_tau": 1.42,
        "tokens_per_second": 12345.6,
    }
    logs |= {"accuracy": 0.3, "accuracy_1": 0.614, "accuracy_2": 0.4, "accuracy_3": 1.0, "acceptance_1": 0.6}
    assert table_row(logs, 10).split() == ["10", "0.12", "3.2146", "1.42", "12,346", "6.0e-04", "61", "40", "100"]
    evaluated = {"eval_loss": 3.0, "eval_simulated_tau": 1.5, "eval_accuracy_1": 0.5, "epoch": 1.0}
    row = table_row(evaluated, 20)
    assert row.split() == ["eval", "1.00", "3.0000", "1.50", "50"]
    head = log_table._HEAD
    assert row.index("1.50") + 4 == head.index("tau") + 3 and head.index("accuracy") == table_row(logs, 10).index(
        " 61"
    )
    assert table_row({"train_runtime": 3.0}, 20) is None and table_row({"tau": 2.0}, 20) is None


@pytest.mark.parametrize("terminal", [True, False])
def test_terminals_get_a_table_and_others_every_figure(terminal, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    rows = counting_rows(4)
    trainer = make_trainer(tmp_path, make_target(), rows, eval_rows=rows[:2], max_steps=2, disable_tqdm=False)
    kinds = [type(one) for one in trainer.callback_handler.callbacks]
    assert (LogTable in kinds, ProgressCallback in kinds) == (terminal, not terminal)
    trainer.train()
    trainer.evaluate()
    out = capsys.readouterr().out
    assert out.count("accuracy by slot") == terminal
    assert (
        bool(re.search(r"^ +2 +1.00 +\d\.\d{4} +\d\.\d\d +[\d,]+ +\S+ +\d+ +\d+ +\d+$", out, re.MULTILINE)) == terminal
    )
    assert ("'simulated_tau'" in out) == (not terminal)


def test_tokens_are_counted_without_padding_and_evaluations_do_not_count(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dflash_hf.training.metrics.time.perf_counter", lambda: now[0])
    rows = counting_rows(4)
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(tmp_path, make_target(), rows, eval_rows=rows[:2], **options)

    def slow(step, seconds):
        def slowly(*arguments, **options):
            now[0] += seconds
            return step(*arguments, **options)

        return slowly

    monkeypatch.setattr(trainer, "training_step", slow(trainer.training_step, 10))
    monkeypatch.setattr(trainer, "prediction_step", slow(trainer.prediction_step, 1000))
    trainer.train()
    assert history(trainer, "tokens_per_second") == pytest.approx([4.8, 4.8])  # 2 rows of 24 tokens in 10 s


def test_a_pair_may_be_named(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    make_draft(target, block_size=BLOCK, own_mask_embedding=False).save_pretrained(tmp_path / "draft")
    fields = make_trainer(tmp_path, target, counting_rows(2)).args
    trainer = DFlashTrainer(str(tmp_path / "draft"), tmp_path / "target", fields, counting_rows(2))
    trainer.train()
    assert len(history(trainer, "loss")) == 1 and trainer.model.config.block_size == BLOCK


def test_a_tracker_that_is_not_installed_is_told_in_one_line(tmp_path, monkeypatch):
    """It was a traceback, after target and data had been loaded."""
    monkeypatch.setattr(
        "dflash_hf.training.training_args.get_available_reporting_integrations", lambda: ["tensorboard"]
    )
    for name in ("wandb", "trackio", "tenosrboard"):
        with pytest.raises(ImportError, match=f"report_to={name} is not installed, or unknown: `pip install {name}`"):
            DFlashTrainingArguments(str(tmp_path), report_to=["tensorboard", name], use_cpu=True)


def test_a_tracker_gets_every_figure(tmp_path, monkeypatch):
    trackio = MagicMock()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: True)
    trainer = make_trainer(tmp_path, make_target(), counting_rows(4), report_to="trackio")
    trainer.train()
    logged = {name for call in trackio.log.call_args_list for name in call.args[0]}
    assert {"train/loss", "train/simulated_tau", "train/accuracy_1", "train/tokens_per_second"} <= logged
