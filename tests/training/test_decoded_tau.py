"""The real tau of held-out prompts, decoded at each evaluation of a run."""

import math
from types import SimpleNamespace

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from support.runs import BLOCK, history, make_trainer
from torch.utils.data import IterableDataset

from dflash_hf.evaluation.measure import evaluate
from dflash_hf.training.callbacks import LogLinesCallback
from dflash_hf.training.decoded_tau import decoded_tau, prompts_of
from dflash_hf.training.held_out import closing_line


ROWS = counting_rows(8)
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
TOKENS = 8


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    """128 tokens take a while."""
    monkeypatch.setattr("dflash_hf.training.decoded_tau.MAX_NEW_TOKENS", TOKENS)


def trained(folder, **options):
    """A trainer after three steps, with dropout."""
    target = make_target()
    draft = make_draft(target, block_size=BLOCK, attention_dropout=0.3)
    trainer = make_trainer(folder, target, ROWS, draft, eval_rows=ROWS[:6], max_steps=3, **EVALUATED, **options)
    torch.manual_seed(0)
    trainer.train()
    return trainer


def test_decoding_leaves_training_as_it_was(tmp_path):
    """Losses, weights, the random generator and the attention of training are those of a run without it."""
    plain = trained(tmp_path)
    state = torch.get_rng_state()
    decoding = trained(tmp_path, eval_decode=2)
    assert torch.equal(torch.get_rng_state(), state)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert len(history(plain, key)) == 3 and history(decoding, key) == history(plain, key)
    for expected, parameter in zip(plain.draft.parameters(), decoding.draft.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    assert len(history(decoding, "eval_tau")) == 3 and not history(plain, "eval_tau")
    assert decoding.draft.config._attn_implementation == plain.draft.config._attn_implementation == "sdpa"


def test_decoded_tau_is_that_of_eval(tmp_path):
    """A random drafter shares the target's head, so that some drafts are accepted."""
    target = make_target()
    rows = counting_rows(64, modulus=10)
    draft = make_draft(target, block_size=BLOCK)
    trainer = make_trainer(tmp_path, target, rows, draft, eval_rows=rows[:6], eval_decode=3)
    tau = trainer.evaluate()["eval_tau"]
    prompts = [rows[number]["input_ids"][:4] for number in (0, 2, 4)]
    assert prompts_of(rows[:6], 3) == [torch.as_tensor(prompt).tolist() for prompt in prompts]
    report = evaluate(target, draft, prompts_of(rows[:6], 3), TOKENS, runs=1, methods=("target", "dflash"))
    assert tau == pytest.approx(report.tau) and 1 < tau < BLOCK
    assert trainer.predict(rows[:2]).metrics["test_tau"] >= 1
    lines = []
    trainer.add_callback(LogLinesCallback(lines.append))
    trainer.evaluate()
    assert f"decoded {tau:.2f}, of eval_data" in lines[0]
    assert f"{tau:.2f}, decoded; " in closing_line(trainer)


def test_best_drafter_is_chosen_by_decoded_tau(tmp_path, monkeypatch):
    taus = iter((1.5, 2.5, 2.0))
    monkeypatch.setattr("dflash_hf.training.trainer.decoded_tau", lambda trainer, rows: next(taus))
    options = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    trainer = trained(tmp_path, eval_decode=1, metric_for_best_model="eval_tau", **options)
    assert trainer.state.best_metric == 2.5 and trainer.trained_steps == 2


def test_prompts_are_spread_over_rows():
    rows = [{"input_ids": [number, 1, 2], "loss_mask": [0, number % 2, 1]} for number in range(10)]
    assert prompts_of(rows, 3) == [[0, 1], [3], [6, 1]]
    assert prompts_of(rows[:2], 9) == [[0, 1], [1]]
    rows[3]["images"] = ["a.png"]
    assert prompts_of(rows, 3) == [[0, 1], [6, 1]]
    assert prompts_of([{"input_ids": [5, 6], "loss_mask": [1, 1]}], 1) == [[5]]  # a text without a prompt


def test_processes_share_the_prompts(monkeypatch):
    """And none of them decodes beyond the target's context."""
    target = make_target(max_position_embeddings=30)
    decoded = []

    def decode(target, prompt, max_new_tokens, **options):
        decoded.append((len(prompt), max_new_tokens))
        return SimpleNamespace(acceptance_lengths=[[2, 4]])

    monkeypatch.setattr("dflash_hf.training.decoded_tau.generate_one", decode)
    rows = [{"input_ids": list(range(40)), "loss_mask": [0] * length + [1] * (40 - length)} for length in (4, 26, 29)]
    args = SimpleNamespace(device=torch.device("cpu"), eval_decode=3, world_size=2)
    accelerator = SimpleNamespace(reduce=lambda sums, how: sums)
    trainer = SimpleNamespace(args=args, target=target, draft=make_draft(target), accelerator=accelerator)
    for args.process_index, expected in enumerate(([(4, TOKENS)], [(26, 4)])):
        assert decoded_tau(trainer, rows) == 3 and decoded == expected
        decoded.clear()
    assert math.isnan(decoded_tau(trainer, rows[2:]))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize(
    ("eval_rows", "count", "message"),
    [
        (None, 2, "eval_decode=2 has no rows whose prompts could be decoded: give evaluation data"),
        (Stream(), 2, "eval_decode=2 has no rows"),
        (ROWS, -1, "eval_decode=-1 must be at least 0"),
    ],
)
def test_nothing_to_decode_is_refused(eval_rows, count, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, make_target(), ROWS, eval_rows=eval_rows, eval_decode=count)


def test_target_without_layers_is_refused(tmp_path):
    target = make_target()
    target.weights_digest = "of stored features"
    with pytest.raises(ValueError, match="eval_decode=2 decodes with the target, of whose layers"):
        make_trainer(tmp_path, target, ROWS, eval_rows=ROWS, eval_decode=2)
