"""Faults put into a good pair one by one: the doctor names each, and nothing on the good pair."""

import json

import pytest
import torch
from support.chat_pair import OFF, requests
from support.faults import FAULTS, causal, other_target
from support.pairs import make_draft, make_target
from support.tiny_chat import END, START

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.template import ChatTemplate
from dflash_hf.doctor import (
    Cause,
    Counts,
    Diagnosis,
    DraftedText,
    Experiment,
    PairCase,
    Result,
    TextCounts,
    TrainingHistory,
    diagnose,
    likeliest,
    measure,
)
from dflash_hf.doctor.causes import depths_of, falls_with_depth
from dflash_hf.evaluation.measure import with_whole_blocks
from dflash_hf.targets.generation import generate_one


@pytest.fixture
def case(chat_pair):
    """The good pair; faults change it."""
    target, draft, tokenizer = chat_pair
    rows = [{"prompt": prompt} for prompt in requests(64, seed=9)]
    encoder = RowEncoder(ChatTemplate(tokenizer, OFF))
    return PairCase(target, draft, rows, encoder, max_new_tokens=40, batch_size=40)


def test_good_pair_has_no_finding(case):
    diagnosis = diagnose(case)
    assert diagnosis.cause is None and diagnosis.unchanged.tau > 2.5
    assert "none of these" in "\n".join(diagnosis.lines())
    assert diagnosis.facts()["cause"] is None
    # A mask token that the target writes or reads would be taken for a token.
    names = [result.experiment.name for result in diagnosis.results]
    assert not [name for name in names if name.startswith((f"mask id {END} ", f"mask id {START} "))]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_named(fault, case, tmp_path):
    case.rows = case.rows[:40]  # all are named with 32 already
    fault(case, folder=tmp_path)
    diagnosis = diagnose(case)
    assert diagnosis.cause is not None and diagnosis.cause.key == FAULTS[fault], "\n".join(diagnosis.lines())
    assert f"remedy            {diagnosis.cause.remedy}" in diagnosis.lines()[:6]


def test_counted_tokens_equal_accepted_tokens(case):
    """Block by block: teacher-forced accuracy that serving does not have is no use."""
    acceptance_lengths = []
    texts = []
    for prompt in case.prompts[:8]:
        options = {"assistant_model": with_whole_blocks(case.draft), "do_sample": False, "max_new_tokens": 40}
        output = generate_one(case.target, prompt, **options)
        lengths = output.acceptance_lengths[0][:-1]  # the end of the text cuts the last block short
        acceptance_lengths.append(lengths)
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0) + len(prompt)
        texts.append(DraftedText(output.sequences, starts[None]))
    (counts,) = measure(case.target, case.draft, texts, [Experiment()])
    accepted = [sum(lengths) - len(lengths) for lengths in acceptance_lengths]  # without the bonus tokens
    assert [text.accepted for text in counts.texts] == accepted
    assert [text.blocks for text in counts.texts] == [len(lengths) for lengths in acceptance_lengths]
    assert counts.blocks > 30


def test_damaged_target_differs_from_other_ids(case):
    """It reads nothing any more, and its base does."""

    def spoil(target):
        for layer in target.model.layers:
            layer.mlp.down_proj.weight.mul_(-8.0)

    other_target(case, spoil)
    diagnosis = diagnose(case)
    assert diagnosis.prompt_loss > diagnosis.uniform_loss
    assert diagnosis.cause.key == "base" and "fits the base" in diagnosis.cause.text
    assert f"remedy            {diagnosis.cause.remedy}" in diagnosis.lines()[:6]


def test_likelihood_finds_a_small_fault(case):
    """Without later masks in sight this drafter loses a tenth of a token, which 64 texts hardly tell from chance."""
    causal(case)
    (tried,) = [change for change in diagnose(case).facts()["tried"] if change["key"] == "causal"]
    assert tried["name"] == "bidirectional blocks" and tried["nats"] > 0.1
    # 1.5 times as far on one processor and 1.37 on another, for which the pair was trained with other roundings.
    assert tried["nats_standard_errors"] > 1.25 * tried["standard_errors"] > 3


def test_memorised_rows_are_named(case):
    """56 passes over 60 rows gave tau 3.95 there and 1.26 elsewhere, and the doctor advised more training."""
    case.rows = case.rows[:8]
    case.training = TrainingHistory(rows=60, passes=56.5, tau=9.0)
    diagnosis = diagnose(case)
    assert diagnosis.cause.key == "by_heart"
    assert "60 rows were memorised, in 56 passes: tau 9.00" in diagnosis.cause.text
    for other in (
        TrainingHistory(60, 2.0, 9.0),
        TrainingHistory(60, 56.5, diagnosis.unchanged.tau),
        TrainingHistory(9000, 56.5, 9.0),
    ):
        case.training = other
        assert diagnose(case).cause is None, other


def test_training_facts_are_read_from_the_folder(tmp_path):
    assert TrainingHistory.from_folder(tmp_path) is None and TrainingHistory.from_folder("someone/draft") is None
    facts = {"training": {"train_examples": 60, "optimizer_steps": 847, "per_device_train_batch_size": 4}}
    (tmp_path / "card_facts.json").write_text(json.dumps(facts))
    assert TrainingHistory.from_folder(tmp_path) == TrainingHistory(60, 847 * 4 / 60)
    for step, tau in ((400, 2.0), (847, 3.95)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        history = [{"step": step, "simulated_tau": tau}, {"step": step, "eval_simulated_tau": 1.0}]
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert TrainingHistory.from_folder(tmp_path).tau == 3.95


def test_changes_without_effect_are_one_line():
    """A dozen rows of +0.00 stood before the remedy."""

    def counts(more):
        return Counts([TextCounts(10 + i % 3 + more, [], 10) for i in range(12)])

    cause = Cause("mask", "another mask token", "write the other")
    results = [
        Result(Experiment("change 0"), counts(0), counts(0)),
        Result(Experiment("change 0"), counts(0), counts(0)),
        Result(Experiment("change 3", cause), counts(0), counts(3)),
    ]
    results.append(Result(Experiment("raw"), counts(0), Counts([TextCounts(0, [], 0)])))
    lines = Diagnosis(counts(0), results, cause, 1.0, 2.0, []).lines()
    assert [line.split()[:2] for line in lines if line.endswith("<- likeliest cause")] == [["change", "3"]]
    assert lines[-1] == "no difference     change 0, change 0, raw (no text)"
    assert [line.startswith("change") for line in lines].count(True) == 1
    assert lines.index("") < [line.startswith("remedy") for line in lines].index(True) < lines.index("", 4)


def test_depth_is_named_where_acceptance_falls_with_it():
    """By more than chance: the same means in texts that vary more, or in fewer of them, are no finding."""
    generator = torch.Generator().manual_seed(0)

    def texts_and_counts(number, spread):
        texts = []
        counts = []
        for depth, accepted in ((100, 16), (5000, 8)):
            for _ in range(number):
                texts.append(DraftedText(torch.zeros(1, depth + 10, dtype=torch.long), torch.full((1, 10), depth)))
                extra = round(spread * torch.randn(1, generator=generator).item())
                counts.append(TextCounts(accepted + extra, [], 10))
        return [*texts, None], Counts([*counts, TextCounts(0, [], 0)])

    texts, counts = texts_and_counts(8, 2)
    assert falls_with_depth(texts, counts)
    depths = depths_of(texts, counts)
    assert [(depth.begin, depth.end, depth.verifications) for depth in depths] == [(0, 256, 80), (4096, 16384, 80)]
    lines = Diagnosis(counts, [], None, 1.0, 2.0, [], depths).lines()
    assert any(line.startswith("tau by depth") and "from 4096 tokens" in line for line in lines)
    assert not falls_with_depth(*texts_and_counts(3, 2))
    assert not falls_with_depth(*texts_and_counts(8, 30))


def test_smallest_of_equal_changes_is_the_cause():
    """In the order of the table, which begins with the smallest."""

    def counts(more):
        return Counts([TextCounts(10 + i % 3 + more, [], 10) for i in range(12)])

    results = [Result(Experiment(str(more)), counts(0), counts(more)) for more in (3, 19, 20)]
    assert likeliest(results).experiment.name == "19"


def test_prompt_of_unknown_ids_has_no_text():
    """Each of the others keeps its place."""
    prompts = [[5, 9, 11], [10**6], [7, 3]]
    texts = PairCase(make_target(), None, [], None, max_new_tokens=8).answer_prompts(prompts)
    assert texts[1] is None
    assert [texts[i].input_ids[0, : len(prompts[i])].tolist() for i in (0, 2)] == [prompts[0], prompts[2]]


def test_base_gives_every_embedding(monkeypatch):
    """A token head read the embeddings of the tuned target beside a drafter that read those of its base."""
    target = make_target()
    base = make_target()
    draft = make_draft(target, block_size=4, gru_hidden_dim=9, emb_dim=7, pure_draft_prefix_len=1)
    read_from = []
    embed = type(draft).embed

    def noted(draft, model, ids):
        read_from.append(model)
        return embed(draft, model, ids)

    monkeypatch.setattr(type(draft), "embed", noted)
    texts = [DraftedText(torch.arange(20)[None], torch.tensor([[3, 9]]))]
    measure(target, draft, texts, [Experiment(target=base)])
    assert len(read_from) > 1 and all(model is base for model in read_from)
