"""From training to the Hub: the card says what training and decoding measured, about the weights that it is about."""

import json

import pytest
from huggingface_hub import ModelCard
from support.hub_stand_in import stand_in
from support.pairs import make_target
from support.rows import counting_rows
from support.runs import make_trainer

from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.report_files import save_report
from dflash_hf.hub.card import CardFacts
from dflash_hf.hub.publish import publish


REPO = "someone/my-DFlash"
PROMPTS = [[5, 9, 11, 60], [7, 3]]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_target():
    """As `from_pretrained("someone/target")` leaves it."""
    target = make_target()
    target.name_or_path = target.config.name_or_path = "someone/target"
    target.config._commit_hash = COMMIT
    return target


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    with stand_in(monkeypatch) as hub:
        yield hub


def test_trained_drafter_is_published_with_its_card(hub_target, hub, tmp_path):
    trainer = make_trainer(tmp_path, hub_target, counting_rows(4), max_steps=2)
    trainer.train()
    trainer.save_model()
    text = str(publish(tmp_path, REPO, dry_run=True).card)
    assert "tau" not in text and "Evaluation" not in text  # it claims nothing that was not measured
    report = evaluate(trainer.target, trainer.model, PROMPTS, max_new_tokens=8, runs=1, methods=("target", "dflash"))
    save_report(report, tmp_path)
    result = publish(tmp_path, REPO, facts=CardFacts.from_folder(tmp_path, license="mit", evaluated_on="someone/data"))
    published = hub.files[REPO]
    assert {"eval_report.json", "README.md", "config.json", "modeling_dflash.py"} <= set(published)
    assert not {"card_facts.json", "training_args.bin"} & set(published)
    card = ModelCard(published["README.md"].decode())
    assert card.data.to_dict() == result.card.data.to_dict()
    assert card.data.base_model == "someone/target" and card.data.license == "mit"
    assert {metric.metric_type: metric.metric_value for metric in card.data.eval_results}["tau"] == round(
        report.tau, 3
    )
    for row in (
        f"(revision `{COMMIT}`)",
        f"| tau, over all verifications | {report.tau:.2f} |",
        "| optimizer_steps | 2 |",
        "| train_examples | 4 |",
        "| num_anchors | 6 |",
    ):
        assert row in card.text, row
    assert "None" not in card.text


def test_facts_written_by_hand_stay(hub_target, tmp_path):
    written_facts = {
        "base_model": "other/target",
        "base_model_revision": "old",
        "license": "mit",
        "data": "Nine walks.",
    }
    (tmp_path / "card_facts.json").write_text(json.dumps(written_facts))
    make_trainer(tmp_path, hub_target, counting_rows(4)).save_model()
    facts = CardFacts.from_folder(tmp_path)
    assert (facts.license, facts.data, facts.base_model, facts.base_model_revision) == (
        "mit",
        "Nine walks.",
        "someone/target",  # what was really trained for
        COMMIT,
    )


def test_target_from_a_folder_names_no_repository(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    target = type(target).from_pretrained(tmp_path / "target")
    trainer = make_trainer(tmp_path / "draft", target, counting_rows(4))
    trainer.save_model()
    assert "base_model" not in json.loads((tmp_path / "draft" / "card_facts.json").read_text())
