"""The card says what is known and nothing else; two rendered examples are held to the template."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from support import layouts
from support.pairs import make_draft

from dflash_hf import DFlashTrainingArguments
from dflash_hf.conversion.convert import convert
from dflash_hf.data.template import digests_of_tokenizer
from dflash_hf.hub.card import CardFacts, render_card
from dflash_hf.training.trainer_card import training_facts


CARDS = Path(__file__).resolve().parents[2] / "hub_cards"
REPORT = Path(__file__).parents[1] / "fixtures" / "card" / "eval_report.json"  # of the trained pair of these tests
# The report is real, the names are made up.
EXAMPLES = {
    "example_with_report.md": {
        "repo": "example/tiny-walk-DFlash",
        "facts": {
            "base_model": "example/tiny-walk",
            "base_model_revision": "0123456789abcdef0123456789abcdef01234567",
            "license": "mit",
            "datasets": ["example/walks"],
            "data": "1,000 walks of 40 tokens.",
            "hardware": "one thread of a shared CPU",
            "evaluated_on": "example/walks",
            "plot": "eval_report.png",
            "training": {"max_steps": 150, "per_device_train_batch_size": 16, "learning_rate": 4e-3, "num_anchors": 8},
        },
    },
    "example_without_report.md": {
        "repo": "example/tiny-sliding-DFlash",
        "facts": {"base_model": "example/tiny-sliding"},
        "config": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "block_size": 16},
    },
}


@pytest.fixture
def folder(target, tmp_path):
    make_draft(target, block_size=6, target_layer_ids=[0, 1, 2]).save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def render_example(name, target, folder):
    example = EXAMPLES[name]
    fields = {"block_size": 6, "target_layer_ids": [0, 1, 2], **example.get("config", {})}
    make_draft(target, **fields).save_pretrained(folder)
    if name == "example_with_report.md":
        shutil.copy(REPORT, folder / "eval_report.json")
    return render_card(folder, CardFacts.from_folder(folder, **example["facts"]), example["repo"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_template_renders_examples(name, target, tmp_path):
    card = render_example(name, target, tmp_path)
    assert str(card) == (CARDS / name).read_text(encoding="utf-8")
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()


def test_card_leaves_out_unknown_facts(target, tmp_path):
    text = str(render_example("example_without_report.md", target, tmp_path))
    for word in ("Evaluation", "tau", "Training", "Licence", "license", "model-index", "datasets", "revision", "None"):
        assert word not in text, word
    report = {"summary": {"tau": 2.5, "speedup": None}}
    facts = CardFacts("example/tiny-sliding", report=report)
    card = render_card(tmp_path, facts, "example/draft")
    assert "| tau, over all verifications | 2.50 |" in card.text
    assert "Speedup" not in card.text and "equal" not in card.text
    assert card.data.eval_results is None  # nobody said on what
    facts = CardFacts("example/tiny-sliding", report=report, evaluated_on="example/walks")
    card = render_card(tmp_path, facts, "example/draft")
    assert [result.metric_type for result in card.data.eval_results] == ["tau"]


def test_card_asks_base_model_without_template(target, tmp_path):
    """The plain text of the card was answered with an end of turn by every chat model."""
    make_draft(target, dflash_config={"trained_with": digests_of_tokenizer(None)}).save_pretrained(tmp_path)
    assert 'tokenizer("Why is the sky blue?"' in render_card(tmp_path, CardFacts("example/base"), "example/draft").text


def test_facts_drop_data_of_former_report(tmp_path):
    """Figures of a later report stood under the name of the data of the first."""
    setting = {"setting": {"dataset": "openai/gsm8k"}, "summary": {"tau": 2.5}}
    facts = CardFacts("some/target", report=setting, evaluated_on="openai/gsm8k")
    facts.save(tmp_path)
    assert CardFacts.from_folder(tmp_path).evaluated_on is None
    CardFacts("some/target", report=setting, evaluated_on="me/mine").save(tmp_path)
    assert CardFacts.from_folder(tmp_path).evaluated_on == "me/mine"


@pytest.mark.parametrize(
    "config, served",
    [
        ({}, {"vLLM 0.21", "SGLang 0.5.12"}),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, {"vLLM 0.26", "SGLang 0.5.14"}),
        (
            {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 4},
            {"vLLM 0.30", "SGLang 0.5.20"},
        ),
        ({"hidden_act": "gelu"}, set()),
        ({"input_embedding_scale": 2.0}, set()),
    ],
)
def test_card_names_engines_that_serve(config, served, target, tmp_path):
    make_draft(target, target_layer_ids=[0, 1, 2], block_size=6, **config).save_pretrained(tmp_path)
    text = str(render_card(tmp_path, CardFacts("example/target"), "example/draft"))
    assert set(re.findall(r"With (\S+ \S+) or newer", text)) == served
    assert ('"num_speculative_tokens": 5}' in text) is ("--speculative-num-draft-tokens 6" in text) is bool(served)


@pytest.mark.parametrize("version", ["0.24.0", "0.26.0", "99.0"])
def test_card_does_not_depend_on_this_machine(version, target, tmp_path, monkeypatch):
    """With an older vLLM installed, the card of a DFlash 2 drafter said nothing of vLLM, and nobody was told."""
    convolution = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 4}
    make_draft(target, target_layer_ids=[0, 1, 2], block_size=6, **convolution).save_pretrained(tmp_path)
    facts = CardFacts("example/target")
    expected = str(render_card(tmp_path, facts, "example/draft"))
    monkeypatch.setattr("dflash_hf.hub.engines._installed_version", lambda engine: version)
    assert str(render_card(tmp_path, facts, "example/draft")) == expected


def test_oldest_version_reads_the_weights(folder):
    """A mask embedding of its own that only the weights show was not asked about in older versions."""
    weights = load_file(folder / "model.safetensors")
    weights["mask_embedding"] = torch.ones(weights["norm.weight"].shape)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    mask_token_id = json.loads((folder / "config.json").read_text())["dflash_config"]["mask_token_id"]
    table = {"embedding": weights["mask_embedding"], "mask_token_id": mask_token_id}
    torch.save(table, folder / "mask_embedding.pt")
    text = str(render_card(folder, CardFacts("a/b"), "a/c"))
    assert set(re.findall(r"With (\S+ \S+) or newer", text)) == {"vLLM 0.25.1", "SGLang 0.5.20"}


def test_card_shows_working_load_call(folder, tmp_path):
    def text(folder):
        return str(render_card(folder, CardFacts("example/target"), "example/draft"))

    assert 'from_pretrained("example/draft", trust_remote_code=True,' in text(folder) and "custom_generate" in text(
        folder
    )
    convert(folder, tmp_path / "native", to="native")
    native = text(tmp_path / "native")
    assert 'assistant_model=draft, speculation_type="dflash"' in native
    assert "trust_remote_code" not in native and "dflash-hf" not in native
    (folder / "configuration_dflash.py").unlink()
    assert "trust_remote_code=True" in text(folder)  # publishing adds it
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "mine.MyDraft"}}))
    assert "\nimport dflash_hf" in text(folder) and "trust_remote_code" not in text(folder)


def test_facts_come_from_folder(folder):
    with pytest.raises(ValueError, match="write base_model into"):
        CardFacts.from_folder(folder)
    (folder / "card_facts.json").write_text(json.dumps({"base_model": "example/target", "license": "mit"}))
    (folder / "eval_report.png").write_bytes(b"")
    facts = CardFacts.from_folder(folder, hardware="a CPU", license=None)
    assert facts == CardFacts("example/target", license="mit", hardware="a CPU", plot="eval_report.png")
    assert CardFacts.from_folder(folder, base_model="other/target").base_model == "other/target"
    (folder / "card_facts.json").write_text('{"base_model": "example/target", "datasets": null}')
    assert CardFacts.from_folder(folder).datasets == []
    for content, message in (
        ('{"taus": 9}', "unknown fields .'taus'"),
        ("{", "not JSON"),
        ("[]", "one JSON object"),
        ('{"training": [1]}', r"card_facts.json: training=\[1\] must be of type dict"),
        ('{"datasets": "a/b"}', "datasets='a/b' must be of type list"),
        ('{"base_model": 3}', "base_model=3 must be of type str"),
    ):
        (folder / "card_facts.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            CardFacts.from_folder(folder)


def test_facts_reject_wrong_repository():
    for wrong in ({"base_model": "a/b/c"}, {"base_model": "a b"}, {"base_model": "a/b", "datasets": ["x y"]}):
        with pytest.raises(ValueError, match="is not a repository id"):
            CardFacts(**wrong)


def test_card_lists_arguments_of_training(tmp_path):
    arguments = DFlashTrainingArguments(output_dir=str(tmp_path), max_steps=150, use_cpu=True, report_to=[])
    facts = training_facts(arguments)
    assert facts["max_steps"] == 150 and facts["learning_rate"] == 6e-4 and facts["num_anchors"] == 512
    assert facts["world_size"] == 1
    assert not {"output_dir", "bf16", "loss_decay_gamma", "hub_token"} & set(facts)
    arguments.learning_rate = 1e-3
    arguments.max_steps = -1
    facts = training_facts(arguments)
    assert facts["learning_rate"] == 1e-3 and facts["num_train_epochs"] == 6.0 and "max_steps" not in facts
    options = {"use_cpu": True, "report_to": [], "head_only": True}
    facts = training_facts(DFlashTrainingArguments(output_dir=str(tmp_path), max_minutes=5.0, **options))
    assert facts["max_minutes"] == 5.0 and facts["head_only"] is True
    assert not {"num_train_epochs", "lr_scheduler_type", "loss_chunk_size"} & set(facts)


def test_card_needs_a_published_layout(tmp_path):
    """`RECOMMENDED_SINCE` has no versions for other layouts: it was a `KeyError`."""
    layouts.write(tmp_path, "speculators, sliding")
    with pytest.raises(ValueError, match="dflash convert"):
        render_card(tmp_path, CardFacts(base_model="example/target"), "example/drafter")
