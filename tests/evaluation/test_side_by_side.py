"""The benchmark script `side_by_side`: an oracle's drafts, other decoders beside ours, and what it writes."""

import json

import pytest
import side_by_side
import torch
from random_pairs import random_pair
from side_by_side import NATIVE, bench
from support.guides import save_stand_in

from dflash_hf.decoding import packing
from dflash_hf.evaluation.methods import DRAFT_TREES, TARGET_ALONE, WHOLE_BLOCKS


@pytest.fixture(scope="module")
def pair():
    return random_pair("tiny", torch.float32, "cpu", 3, prompt_length=10)


def test_methods_accept_alike_and_equal_the_target(pair):
    target, draft, prompts = pair
    report, rounds = bench(
        target, draft, prompts, 60, 1, (TARGET_ALONE, WHOLE_BLOCKS, DRAFT_TREES, NATIVE), forced_acceptance=4.0
    )
    assert all(method.equal == 3 for method in report.methods.values())
    assert report.methods[NATIVE].target_forwards == report.methods[WHOLE_BLOCKS].target_forwards  # the same oracle
    # A tree of 15 nodes has the oracle's path in it, but for the ends of the longest.
    assert report.methods[DRAFT_TREES].target_forwards <= 1.2 * report.methods[WHOLE_BLOCKS].target_forwards
    assert 2.5 < report.tau < 6 and len(set(report.verifications)) > 3
    assert rounds.rounds[WHOLE_BLOCKS] > 0 and rounds.plain.attainable(report.tau) > 0


FORCED = ["--shape", "tiny", "--forced-acceptance", "4"]


def test_script_writes_table_figures_and_picture(tmp_path, capsys, packs_of_any_size):
    options = ["--max-new-tokens", "24", "--prompts", "1", "--runs", "2", "--output", str(tmp_path)]
    methods = ["--methods", "target,target_packed,dflash,dflash_auto,native"]
    assert side_by_side.main([*FORCED, *options, *methods]) == 0
    text = capsys.readouterr().out
    for part in ("FORCED acceptance 4.0", "target alone, packed", "over packed", "; ours alone is packed"):
        assert part in text
    facts = json.loads((tmp_path / "bench.json").read_text())
    assert facts["round"]["packed"]["verify"] > 0 and facts["setting"]["forced_acceptance"] == 4.0
    runs = [facts["methods"][name]["runs"] for name in ("dflash", "target_packed")]
    expected = sum(own / base for own, base in zip(*runs, strict=True)) / 2
    assert facts["methods"]["dflash"]["speedup_over_packed"] == pytest.approx(expected)
    assert "FORCED" in (tmp_path / "bench.md").read_text() and not len(packing._owners)


def test_pair_of_folders_is_loaded(tmp_path):
    """It ended with a TypeError."""
    target_folder, draft_folder = save_stand_in(tmp_path)
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "Say 1"}\n', encoding="utf-8")
    pair = ["--target", str(target_folder), "--draft", str(draft_folder)]
    arguments = side_by_side.arguments_of([*pair, "--data", str(data), "--dtype", "float32"])
    target, draft, prompts = side_by_side.load(arguments)
    assert target.dtype == draft.dtype == torch.float32 and len(prompts) == 1
