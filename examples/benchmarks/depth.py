"""
Acceptance and speed by depth: how long the text is that the target has read when it begins to write.

    OMP_NUM_THREADS=1 python examples/benchmarks/depth.py [--dtype bfloat16]
    OMP_NUM_THREADS=1 python examples/benchmarks/depth.py --target gemma3-270m --draft my-drafter
    python examples/benchmarks/depth.py --report

A chat target reads held-out conversations of the bundled drafter's data, joined up to the depth, and answers another
request. A base model reads modules of Python's standard library up to the depth, and goes on. Each finished cell
appends a line to `results/depth.jsonl` and is skipped from then on; `--report` writes `results/depth.md`.
"""

import argparse
import random
import sysconfig
from pathlib import Path

from cells import Cells, capability, described, read_json_lines, speeds_of, table
from transformers import AutoTokenizer

from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.methods import PLAIN_CALL, TARGET_ALONE, TARGET_PACKED, WHOLE_BLOCKS
from dflash_hf.pairs.loading import Loading, load_draft, load_target
from dflash_hf.pairs.packaged_targets import folder_of
from dflash_hf.smollm2 import data_folder, draft_folder_of


CELLS = Cells(Path(__file__).parent / "results" / "depth.jsonl")
DEPTHS = (256, 1024, 4096, 8000)
METHODS = (TARGET_ALONE, TARGET_PACKED, PLAIN_CALL, WHOLE_BLOCKS)


def conversations() -> list[list[dict]]:
    """Held-out conversations that end with an answer."""
    rows = [row["messages"] for row in read_json_lines(data_folder() / "held_out_conversations.jsonl.gz")]
    return [messages for messages in rows if messages[-1]["role"] == "assistant"]


def chat_prompt(tokenizer, depth: int, number: int) -> list[int]:
    """Conversations in one, the longest with fewer than `depth` tokens, and a request that is in none of them."""
    rows = conversations()
    random.Random(number).shuffle(rows)
    request = rows.pop()[:1]

    def ids_of(messages: list[dict]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    messages: list[dict] = []
    ids = ids_of(request)
    for row in rows:
        longer = ids_of([*messages, *row, *request])
        if len(longer) > depth:
            break
        messages += row
        ids = longer
    return ids


def text_prompt(tokenizer, depth: int, number: int) -> list[int]:
    """The beginning of a module of the standard library, and what follows it in the next ones."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(number).shuffle(files)
    text = ""
    for file in files:
        text += file.read_text(encoding="utf-8")
        if len(text) > 8 * depth:
            break
    return tokenizer(text)["input_ids"][:depth]


def measure(arguments) -> None:
    target_folder = folder_of(arguments.target)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    loading = Loading(arguments.dtype, device="cpu")
    draft = load_draft(draft_folder_of(arguments.draft), loading)
    target = load_target(target_folder, loading)
    prompt_of = chat_prompt if tokenizer.chat_template else text_prompt
    limits = {"max_new_tokens": arguments.max_new_tokens, "runs": arguments.runs}
    for depth in DEPTHS:
        cell = {"target": arguments.target, "depth": depth, "dtype": arguments.dtype, "cpu": capability()}
        if CELLS.has(cell):
            continue
        prompts = [prompt_of(tokenizer, depth, number) for number in range(arguments.prompts)]
        report = evaluate(target, draft, prompts, methods=METHODS, **limits)
        plain_call = report.methods[PLAIN_CALL]
        figures = {
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "tau": report.tau,
            "tau_of_plain_call": plain_call.tau,
            "verdict": report.verdict(),
            **speeds_of(report),
            "prefill_over_target": report.methods[TARGET_ALONE].prefill_seconds / plain_call.prefill_seconds,
            "with_prefill_over_target": plain_call.speedup,
            **limits,
        }
        CELLS.add(cell, figures)


def write_report() -> None:
    """`depth.md`: a table for each target, processor and dtype."""
    lines = [
        "# Acceptance and speed by depth",
        "",
        "`OMP_NUM_THREADS=1 python examples/benchmarks/depth.py`, whose description says what the target has read;",
        "every cell is a line of `depth.jsonl`. Speeds are those of decoding, after the prefill: the plain call over",
        "the target alone, over the target with packed weights, and whole blocks over the packed target. *Prefill* is",
        "the target's time until the first token over the plain call's.",
    ]
    columns = ("depth", "tau", "of the plain call", "over target", "over packed", "blocks", "prefill", "texts")
    names = ("tau", "tau_of_plain_call", "over_target", "over_packed_target", "blocks_over_packed_target")
    names += ("prefill_over_target",)
    for (target, cpu, dtype), rows in CELLS.grouped("target", "cpu", "dtype").items():
        first = rows[0]
        size = f"{len(first['prompt_tokens'])} prompts, {first['max_new_tokens']} tokens"
        lines += ["", f"## {target}, {dtype}, {cpu}", ""]
        lines += [f"{described(first)}, {first['threads']} thread; {size} a cell.", ""]
        rows_of_table = []
        for row in sorted(rows, key=lambda row: row["depth"]):
            figures = [f"{row[name]:.2f}" for name in names]
            rows_of_table.append([f"{row['depth']:,}", *figures, row["verdict"]])
        lines += table(columns, rows_of_table)
    CELLS.write_report(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    if not arguments.report:
        measure(arguments)
    write_report()


if __name__ == "__main__":
    main()
