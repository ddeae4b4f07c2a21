"""Decoding side by side: the figures of a report, losslessness noticed when broken, JSON and back."""

import json
from types import SimpleNamespace

import pytest
import torch
from support.pairs import make_draft, make_target
from support.scripted_draft import scripted
from transformers.utils import logging

from dflash_hf.decoding import packing as packing_dflash
from dflash_hf.evaluation import measure
from dflash_hf.evaluation.measure import evaluate, with_decoding_config
from dflash_hf.evaluation.methods import (
    DEFAULT_METHODS,
    PLAIN_CALL,
    PROMPT_LOOKUP,
    TARGET_ALONE,
    TARGET_PACKED,
    WHOLE_BLOCKS,
)
from dflash_hf.evaluation.report import DepthReport, EvalReport, MethodReport
from dflash_hf.evaluation.text import summary_lines
from dflash_hf.hub.card import CardFacts, metadata
from dflash_hf.targets.digests import digest_of_parameters


PROMPTS = [[5, 9, 11, 60], [7, 3], [40, 41, 42, 43, 44, 45]]
NEW = 20


@pytest.fixture(scope="module")
def pair():
    target = make_target()
    return target, make_draft(target)


@pytest.fixture
def knowing(pair):
    """The pair, with right drafts for the first prompt's text, and errors: acceptance is spread over 0..B-1."""
    target, draft = pair
    text = target.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW)
    assert len(set(text[0].tolist())) > 10  # else anything is lossless
    return target, scripted(draft, text, error_rate=0.3, seed=1)


def decode(pair, runs):
    return evaluate(*pair, PROMPTS, max_new_tokens=NEW, runs=runs)


def test_counts_agree_with_each_other(knowing):
    report = decode(knowing, runs=3)
    assert list(report.methods) == list(DEFAULT_METHODS)
    for method in report.methods.values():
        assert len(method.runs) == 3 and method.tokens_per_second == sorted(method.runs)[1]
    dflash_runs = report.methods[WHOLE_BLOCKS].runs
    target_runs = report.methods[TARGET_ALONE].runs
    ratios = [speed / base for speed, base in zip(dflash_runs, target_runs, strict=True)]
    assert report.methods[WHOLE_BLOCKS].speedup == sorted(ratios)[1]
    again = EvalReport.from_json(report.to_json())
    assert again == report and again.to_json() == report.to_json()
    for method in report.methods.values():
        assert method.tokens == NEW * len(PROMPTS)
        assert method.equal == len(PROMPTS) == report.num_prompts
    assert report.lossless
    # One forward for each token; one for the prompt and one for each verification.
    assert report.methods[TARGET_ALONE].target_forwards == NEW * len(PROMPTS)
    assert report.methods[TARGET_ALONE].speedup == 1.0
    assert report.methods[WHOLE_BLOCKS].target_forwards == len(PROMPTS) + len(report.verifications)
    assert len(set(report.verifications)) > 2
    for lengths, response in zip(report.acceptance_lengths, report.responses, strict=True):
        assert 1 + sum(lengths) == len(response)
    assert report.setting["threads"] == torch.get_num_threads()
    assert report.setting["weights"] == digest_of_parameters(knowing[1].named_parameters())
    assert (report.setting["temperature"], report.setting["block_size"]) == (0.0, report.block_size)
    assert report.methods[WHOLE_BLOCKS].tau_of_responses == report.tau_per_response
    # Tau is one plus the accepted slots.
    assert len(report.acceptance_by_position) == report.block_size - 1
    assert report.tau == pytest.approx(1 + sum(report.acceptance_by_position))
    assert report.acceptance_by_position == sorted(report.acceptance_by_position, reverse=True)


def slow_call(seconds_of_prompt, seconds_per_token):
    """Stands for `generate`: a clock of its own goes on by these times."""
    clock = [0.0]

    def generate(target, prompt, streamer, max_new_tokens, assistant_model=None, **options):
        per_token = seconds_per_token * (1 if assistant_model is None else 0.25)
        streamer.put(torch.tensor([prompt]))
        clock[0] += seconds_of_prompt * len(prompt)
        for token in range(max_new_tokens):
            if token > 0:
                clock[0] += per_token
            streamer.put(torch.tensor([token]))
        clock[0] += 0.5  # a call's end
        return SimpleNamespace(sequences=torch.tensor([[*prompt, *range(max_new_tokens)]]), acceptance_lengths=[[4]])

    return generate, lambda *_: clock[0]


def test_decode_time_starts_after_the_prefill(pair, monkeypatch):
    """The prompt, which a drafter does not shorten, hides what it gains: speeds are published without it."""
    generate, clock = slow_call(seconds_of_prompt=100.0, seconds_per_token=1.0)
    monkeypatch.setattr(measure, "generate_one", generate)
    monkeypatch.setattr(measure, "now", clock)
    monkeypatch.setattr(measure.time, "perf_counter", clock)
    report = evaluate(*pair, PROMPTS[:2], max_new_tokens=9, runs=2, methods=(TARGET_ALONE, WHOLE_BLOCKS))
    target = report.methods[TARGET_ALONE]
    blocks = report.methods[WHOLE_BLOCKS]
    assert target.prefill_seconds == blocks.prefill_seconds == pytest.approx(100.0 * 3)  # prompts of 4 and 2 tokens
    assert target.decode_seconds_per_token == pytest.approx((8 + 0.5) / 9)
    assert blocks.decode_seconds_per_token == pytest.approx((2 + 0.5) / 9)
    assert blocks.decode_speedup == pytest.approx(8.5 / 2.5) and target.decode_speedup == 1.0
    assert blocks.speedup < 1.05 and blocks.decode_speedup_over_packed is None


def test_packed_target_is_a_baseline(knowing, packs_of_any_size, products):
    methods = (TARGET_ALONE, TARGET_PACKED, WHOLE_BLOCKS)
    report = evaluate(*knowing, PROMPTS, max_new_tokens=NEW, runs=1, methods=methods)
    assert len(products) > NEW and not len(packing_dflash._owners)
    assert all(method.equal == len(PROMPTS) for method in report.methods.values())
    assert report.methods[TARGET_PACKED].speedup_over_packed == report.methods[TARGET_ALONE].speedup == 1.0
    dflash = report.methods[WHOLE_BLOCKS]
    assert dflash.target_forwards < report.methods[TARGET_PACKED].target_forwards == NEW * len(PROMPTS)
    assert dflash.speedup_over_packed == pytest.approx(dflash.speedup / report.methods[TARGET_PACKED].speedup)
    summary = json.loads(report.to_json())["summary"]
    assert (summary["speedup"], summary["speedup_over"]) == (dflash.speedup_over_packed, TARGET_PACKED)
    measured = CardFacts("a/b", report=json.loads(report.to_json()), evaluated_on="c/d")
    assert "speedup, whole blocks over target alone, packed" in str(metadata(measured, "e/f"))
    table = summary_lines(report)
    assert "over packed" in table[3] and any(line.startswith("target alone, packed") for line in table)


def test_compiled_drafters_warm_up_on_every_prompt(pair, monkeypatch):
    """With `--compile` all drafters are compiled, whatever their methods are called."""
    calls = []  # whether a drafter was given, and the prompt
    generate_one = measure.generate_one

    def eagerly(target, prompt, **options):
        drafter = options.get("assistant_model")
        calls.append((drafter is not None, prompt))
        if drafter is not None:
            assert drafter.decoding_config.compile
            options["assistant_model"] = with_decoding_config(drafter, compile=False)
        return generate_one(target, prompt, **options)

    monkeypatch.setattr(measure, "generate_one", eagerly)
    target, draft = pair
    methods = (WHOLE_BLOCKS, TARGET_ALONE, PLAIN_CALL, PROMPT_LOOKUP)
    report = evaluate(
        target, with_decoding_config(draft, compile=True), PROMPTS, max_new_tokens=4, runs=1, methods=methods
    )
    assert calls[:2] == [(False, PROMPTS[0])] * 2
    assert calls[2:8] == [(True, prompt) for prompt in PROMPTS * 2]
    assert [name for name, method in report.methods.items() if method.compiled] == [WHOLE_BLOCKS, PLAIN_CALL]
    assert any(line.startswith("compiling") for line in summary_lines(report))


def test_models_keep_their_modes(pair):
    """It left both models in evaluation mode, in the middle of a training run too."""
    target, draft = pair
    for model in pair:
        model.train()
    draft.layers[0].eval()  # a module may have another mode than its model
    modes = [module.training for model in pair for module in model.modules()]
    try:
        assert decode(pair, runs=1).lossless
        assert [module.training for model in pair for module in model.modules()] == modes
        with pytest.raises(ValueError, match="dimensions"):  # after an error, too
            evaluate(target, draft, [["no ids"]], runs=1)
        assert [module.training for model in pair for module in model.modules()] == modes
    finally:
        for model in pair:
            model.eval()


def test_tau_has_pooled_and_per_response_means():
    lengths = [[4, 4, 4, 4], [1]]
    report = EvalReport({}, lengths, [[0] * 17, [0, 0]], block_size=4)
    assert report.tau == pytest.approx(17 / 5)
    assert report.tau_per_response == pytest.approx((4 + 1) / 2)
    assert report.acceptance_by_position == pytest.approx([4 / 5, 4 / 5, 4 / 5])


def test_tau_by_depth_counts_the_prompt():
    report = EvalReport({}, [[100, 90, 80], [2, 2]], [[0] * 271, [0] * 5], block_size=128, prompt_lengths=[154, 255])
    # Rounds begin behind 155, 255 and 345 tokens, and behind 256 and 258.
    assert report.tau_by_depth == [DepthReport(0, 256, 2, 95.0), DepthReport(256, 1024, 3, 28.0)]
    report.prompt_lengths = []  # in a report of an earlier version
    assert report.tau_by_depth == []
    report.prompt_lengths = [10**6, 10**6]
    assert [(depth.begin, depth.end) for depth in report.tau_by_depth] == [(65536, None)]


def test_failed_write_leaves_the_earlier_report(tmp_path, monkeypatch):
    report = EvalReport({WHOLE_BLOCKS: MethodReport(1.0, None, [], 1, 1, None)}, [], [], 4)
    path = tmp_path / "report.json"
    before = report.save(path).read_bytes()

    def full(self, text, **_):
        self.write_bytes(text[:9].encode())
        raise OSError("the disk is full")

    monkeypatch.setattr(type(path), "write_text", full)
    with pytest.raises(OSError, match="the disk is full"):
        report.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("runs", [1, 2])
def test_wrong_token_makes_a_report_lossy(runs, pair, monkeypatch):
    """In whichever run it is."""
    target, draft = pair
    original = type(target).generate
    spoiled_once = []

    def spoiled(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        if "assistant_model" in kwargs and kwargs["input_ids"].tolist() == [PROMPTS[2]] and not spoiled_once:
            spoiled_once.append(1)
            output.sequences[0, -1] += 1
        return output

    monkeypatch.setattr(type(target), "generate", spoiled)
    report = evaluate(target, draft, PROMPTS, max_new_tokens=8, runs=runs)
    assert not report.lossless and [divergence.prompt for divergence in report.divergences] == [2]
    assert report.methods[WHOLE_BLOCKS].equal == len(PROMPTS) - 1
    assert report.methods[PROMPT_LOOKUP].equal == len(PROMPTS)


def test_evaluation_leaves_process_settings_alone(pair):
    """Progress bars of transformers were switched off in the whole process, for one method that loads weights."""
    target, draft = pair
    bars = []
    threads = torch.get_num_threads()
    hooks = [len(module._forward_pre_hooks) for module in target.modules()]
    watching = {"watching": lambda prompt: bars.append(logging.is_progress_bar_enabled()) or [5]}
    evaluate(
        target,
        draft,
        PROMPTS[:1],
        max_new_tokens=4,
        runs=1,
        methods=(TARGET_ALONE, WHOLE_BLOCKS),
        other_methods=watching,
    )
    assert bars and all(bars)
    assert torch.get_num_threads() == threads
    assert [len(module._forward_pre_hooks) for module in target.modules()] == hooks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts holds 0"),
        ({"prompts": [[3], []]}, "one of them empty"),
        ({"runs": 0}, "runs=0"),
        ({"temperature": -1.0}, "temperature=-1.0 must be 0"),
        ({"block_size": 5}, "block_size=5 must be from 1 to 4"),
        ({"methods": ("target",)}, "lacks \\['dflash'\\]"),
        ({"methods": (*DEFAULT_METHODS, "magic")}, "names \\['magic'\\]"),
    ],
)
def test_wrong_arguments_of_evaluate_are_named(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluate(*pair, **{"prompts": PROMPTS, **arguments})
