"""Ways of decoding side by side: forced acceptance, the protocol with the published implementation."""

import json

import pytest
import side_by_side
import torch
from random_pairs import random_pair, slot_accuracy
from side_by_side import NATIVE, REFERENCE, bench
from support.pairs import make_draft
from support.tiny_chat import save_target
from transformers import AutoModelForCausalLM

from dflash_hf.decoding import packing as packing_dflash
from dflash_hf.evaluation.methods import DFLASH, TARGET, TREE


@pytest.fixture(scope="module")
def pair():
    return random_pair("tiny", torch.float32, "cpu", 3, prompt_length=10)


@pytest.mark.parametrize("tau", [1.0, 2.5, 6.5, 16.0])
def test_slot_accuracy_gives_the_wanted_length(tau):
    chance = slot_accuracy(tau, 16)
    assert sum(chance**k for k in range(16)) == pytest.approx(tau, abs=1e-6)
    with pytest.raises(ValueError, match="forced_acceptance=17"):
        slot_accuracy(17.0, 16)


def test_methods_accept_alike_and_equal_the_target(pair):
    target, draft, prompts = pair
    report, rounds = bench(target, draft, prompts, 60, 1, (TARGET, DFLASH, TREE, NATIVE), forced_acceptance=4.0)
    assert list(report.methods) == [TARGET, DFLASH, TREE, NATIVE]
    assert all(method.equal == 3 for method in report.methods.values())
    assert report.methods[NATIVE].target_forwards == report.methods[DFLASH].target_forwards  # the same oracle
    # A tree of 15 nodes has the oracle's path in it, but for the ends of the longest.
    assert report.methods[TREE].target_forwards <= 1.2 * report.methods[DFLASH].target_forwards
    assert 2.5 < report.tau < 6 and len(set(report.verifications)) > 3
    assert rounds.rounds[DFLASH] > 0 and rounds.plain.attainable(report.tau) > 0


def test_rounds_are_timed_where_the_answers_end(pair, monkeypatch):
    """Not where they might have ended: there is nothing to time."""
    target, draft, prompts = pair
    text = target.generate(torch.tensor(prompts[:1]), max_new_tokens=40, do_sample=False)[0].tolist()
    monkeypatch.setattr(target.generation_config, "eos_token_id", text[len(prompts[0]) + 24])
    report, rounds = bench(target, draft, prompts[:1], 200, 1, (TARGET, DFLASH))
    assert len(report.responses[0]) == 25
    assert rounds.overhead[DFLASH] > 0.5


STAND_IN = """
import sys
class DFlashDraftModel:
    @classmethod
    def from_pretrained(cls, folder, **options):
        return cls()
    def to(self, device):
        return self
    def eval(self):
        return self
    block_size = 8
    def forward(self, *args, position_ids, **kwargs):
        pass
def sample(logits, temperature=0.0):
    return logits.argmax(-1)
def dflash_generate(model, target, input_ids, max_new_tokens, stop_token_ids, temperature):
    if DIE:
        sys.exit(3)
    return target.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False)
"""


@pytest.mark.parametrize("dies", [False, True])
def test_a_reference_answers_from_its_own_process(pair, tmp_path, dies):
    target, draft, prompts = pair
    (tmp_path / "dflash").mkdir()
    (tmp_path / "dflash" / "model.py").write_text(STAND_IN.replace("DIE", str(dies)))

    def run():
        return bench(target, draft, prompts, 20, 1, (TARGET, DFLASH), forced_acceptance=3.0, reference=tmp_path)

    if dies:
        with pytest.raises(ValueError, match="exit code 3"):
            run()
    else:
        assert run()[0].methods[REFERENCE].equal == 3


FORCED = ["--shape", "tiny", "--forced-acceptance", "4"]


def test_the_script_writes_table_figures_and_picture(tmp_path, capsys):
    options = ["--max-new-tokens", "24", "--prompts", "2", "--runs", "2", "--methods", "target,dflash"]
    assert side_by_side.main([*FORCED, *options, "--output", str(tmp_path / "out")]) == 0
    assert "FORCED acceptance 4.0" in capsys.readouterr().out
    facts = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert facts["round"]["overhead"]["dflash"] > 0 and facts["setting"]["forced_acceptance"] == 4.0
    assert "FORCED" in (tmp_path / "out" / "bench.md").read_text()
    pytest.importorskip("matplotlib")
    assert (tmp_path / "out" / "bench.png").stat().st_size > 10_000


def test_ours_is_compared_with_the_packed_target(tmp_path, capsys, packs_of_any_size):
    options = ["--max-new-tokens", "24", "--prompts", "1", "--runs", "2"]
    methods = ["--methods", "target,target_packed,dflash,dflash_auto,native"]
    assert side_by_side.main([*FORCED, *options, *methods, "--output", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for told in ("target alone, packed", "over packed", "one-token forwards alone, packed", "; ours alone is packed"):
        assert told in text
    facts = json.loads((tmp_path / "bench.json").read_text())
    assert facts["round"]["packed"]["verify"] > 0
    assert facts["methods"]["target_packed"]["speedup_over_packed"] == 1.0
    runs = [facts["methods"][name]["runs"] for name in ("dflash", "target_packed")]
    expected = sum(own / base for own, base in zip(*runs, strict=True)) / 2
    assert facts["methods"]["dflash"]["speedup_over_packed"] == pytest.approx(expected)
    assert not len(packing_dflash._held)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--shape", "tiny"], "give --forced-acceptance"),
        (["--target", "x"], "give either --shape, or --target, --draft and --data"),
        ([*FORCED, "--dtype", "auto"], "choose float32, bfloat16, float16"),
        ([*FORCED, "--methods", "target,dflash,magic"], "--methods names magic; choose"),
    ],
)
def test_bad_arguments_are_told(arguments, told, capsys):
    with pytest.raises(SystemExit):
        side_by_side.main(arguments)
    assert told in capsys.readouterr().err


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """The arguments that name a pair and what it is asked."""
    folder = tmp_path_factory.mktemp("named")
    target = AutoModelForCausalLM.from_pretrained(save_target(folder / "target"))
    make_draft(target, own_mask_embedding=False).save_pretrained(folder / "draft")
    (folder / "prompts.txt").write_text("Say 1\nSay two\n", encoding="utf-8")
    names = {"target": folder / "target", "draft": folder / "draft", "data": folder / "prompts.txt"}
    return [word for name, path in names.items() for word in (f"--{name}", str(path))] + ["--device", "cpu"]


def test_a_pair_is_timed_by_its_names(named, tmp_path, capsys, packs_of_any_size):
    options = ["--max-new-tokens", "16", "--prompts", "2", "--runs", "1", "--tree-nodes", "9"]
    methods = "target,target_packed,dflash,dflash_tree,target_static"
    assistant = ["--assistant", named[1], "--methods", methods]
    assert side_by_side.main([*named, *options, *assistant, "--output", str(tmp_path)]) == 0
    text, facts = capsys.readouterr().out, json.loads((tmp_path / "bench.json").read_text())
    assert "attainable" in text and "with trees of 9 tokens" in text
    assert set(facts["methods"]) == {*methods.split(","), "assistant"}
    assert all(method["equal"] == 2 for method in facts["methods"].values())
    assert facts["round"]["packed"]["verify"] > 0 and facts["round"]["plain"]["draft"] > 0
    assert (tmp_path / "bench.md").is_file()
