"""An evaluation that is interrupted and goes on, and one that several processes share."""

import json

import pytest
from support.pairs import make_draft, make_target

from dflash_hf.evaluation import measure
from dflash_hf.evaluation.decoded import Decoded, ProgressFile, read_progress
from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.methods import TARGET_ALONE, WHOLE_BLOCKS
from dflash_hf.evaluation.ranks import Ranks, device_of_rank
from dflash_hf.evaluation.report_files import save_report


PROMPTS = [[5, 9, 11, 60], [7, 3], [40, 41, 42], [8, 12]]
METHODS = (TARGET_ALONE, WHOLE_BLOCKS)


@pytest.fixture(scope="module")
def pair():
    target = make_target()
    return target, make_draft(target)


@pytest.fixture
def calls(monkeypatch):
    """The prompts of all calls of `generate`, with the warm-up's."""
    prompts = []
    generate_one = measure.generate_one
    monkeypatch.setattr(
        measure,
        "generate_one",
        lambda target, prompt, **o: prompts.append(prompt) or generate_one(target, prompt, **o),
    )
    return prompts


def run(pair, folder, stop_after=None, **options):
    def until_interrupted(items):
        for number, item in enumerate(items):
            if number == stop_after:
                raise KeyboardInterrupt
            yield item

    options = {"max_new_tokens": 6, "runs": 2, "methods": METHODS, "progress": until_interrupted, **options}
    return evaluate(*pair, PROMPTS, progress_folder=folder, **options)


def test_interrupted_evaluation_goes_on(pair, calls, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(pair, tmp_path, stop_after=5)
    (file,) = tmp_path.iterdir()
    with file.open("ab") as stream:
        stream.write(b'{"key": "cut by a kill')
    calls.clear()
    report = run(pair, tmp_path)
    assert len(calls) == len(METHODS) * (1 + 8 - 5)  # the warm-up, and what was left of two runs of four prompts
    whole = run(pair, tmp_path / "other")
    assert (report.responses, report.acceptance_lengths) == (whole.responses, whole.acceptance_lengths)
    assert report.setting == whole.setting and report.methods.keys() == whole.methods.keys()
    assert json.loads(report.to_json()).keys() == json.loads(whole.to_json()).keys()
    assert [len(method.runs) for method in report.methods.values()] == [2, 2] and report.lossless
    calls.clear()
    run(pair, tmp_path, runs=3)  # nothing was removed yet: a third run is added
    assert len(calls) == len(METHODS) * (1 + 4)
    save_report(report, tmp_path)
    assert not list(tmp_path.glob("eval_progress*"))


@pytest.mark.parametrize("change", [{"max_new_tokens": 5}, {"temperature": 1.0}, {"block_size": 2}, "weights"])
def test_other_settings_do_not_go_on(change, pair, calls, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(pair, tmp_path, stop_after=1)
    calls.clear()
    if change == "weights":
        target, _ = pair
        run((target, make_draft(target, seed=9)), tmp_path, runs=1)
    else:
        run(pair, tmp_path, runs=1, **change)
    assert len(calls) == len(METHODS) * (1 + 4)


def test_two_evaluations_do_not_share_a_folder(pair, tmp_path):
    with ProgressFile.opened(tmp_path, 0, "key"), pytest.raises(ValueError, match="being written by another process"):
        run(pair, tmp_path)


def test_other_methods_are_not_recorded(pair, tmp_path):
    """Those of an earlier call with the same name, and other arguments, were taken for theirs."""
    with pytest.raises(ValueError, match="progress_folder='.*' cannot go on with other_methods \\(static\\)"):
        run(pair, tmp_path, other_methods={"static": {"cache_implementation": "static"}})


def test_records_of_all_ranks_are_read(tmp_path):
    answer = Decoded([1, 2], 0.5, 0.25, 2, [1], None)
    for rank in range(2):
        with ProgressFile.opened(tmp_path, rank, "key") as file:
            file.append(0, rank, {TARGET_ALONE: answer})
    assert read_progress(tmp_path, "key") == {(0, 0): {TARGET_ALONE: answer}, (0, 1): {TARGET_ALONE: answer}}
    assert not read_progress(tmp_path, "another")


class Shares(Ranks):
    """One of two processes that are run one after another, the main process last."""

    gathered: list = []

    def gather(self, value):
        self.gathered.insert(0, value)
        if not self.is_main:
            raise StopIteration
        return self.gathered

    def from_main(self, value):
        return value


def test_shares_of_two_processes_make_one_report(pair, calls, tmp_path):
    with pytest.raises(StopIteration):
        run(pair, None, ranks=Shares(1, 2))
    assert calls[2:] == [PROMPTS[i] for i in (1, 1, 3, 3) * 2]
    report = run(pair, None, ranks=Shares(0, 2))
    alone = run(pair, None)
    assert (report.responses, report.acceptance_lengths) == (alone.responses, alone.acceptance_lengths)
    assert report.setting == {**alone.setting, "processes": 2} and report.lossless


def test_values_come_back_in_the_order_of_items(monkeypatch):
    items = list(range(5))
    shares = [Ranks(rank, 2).share(items) for rank in range(2)]
    monkeypatch.setattr(Ranks, "gather", lambda self, value: shares)
    assert Ranks(1, 2).collect(shares[1], 5) == items


def test_each_rank_has_its_accelerator(monkeypatch):
    assert device_of_rank(None) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of_rank("cpu") == "cpu"
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: measure.torch.device("cuda"))
    assert [device_of_rank(name) for name in (None, "cuda", "cuda:0", "auto", "cpu")] == [
        "cuda:1",
        "cuda:1",
        "cuda:0",
        "auto",
        "cpu",
    ]
