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
import gzip
import json
import platform
import random
import subprocess
import sysconfig
from datetime import date
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer

from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.methods import PLAIN_CALL, TARGET_ALONE, TARGET_PACKED, WHOLE_BLOCKS
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.pairs.loading import Loading, load_draft, load_target
from dflash_hf.pairs.packaged_targets import folder_of
from dflash_hf.smollm2 import data_folder, draft_folder_of


RESULTS = Path(__file__).parent / "results" / "depth.jsonl"
DEPTHS = (256, 1024, 4096, 8000)
METHODS = (TARGET_ALONE, TARGET_PACKED, PLAIN_CALL, WHOLE_BLOCKS)


def conversations() -> list[list[dict]]:
    """Held-out conversations that end with an answer."""
    with gzip.open(data_folder() / "held_out_conversations.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line in file]
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
    finished = {(row["target"], row["depth"], row["dtype"], row["cpu"]) for row in read_rows()}
    for depth in DEPTHS:
        cell = (arguments.target, depth, arguments.dtype, capability())
        if cell in finished:
            continue
        prompts = [prompt_of(tokenizer, depth, number) for number in range(arguments.prompts)]
        limits = {"max_new_tokens": arguments.max_new_tokens, "runs": arguments.runs}
        report = evaluate(target, draft, prompts, methods=METHODS, **limits)
        plain_call = report.methods[PLAIN_CALL]
        row = dict(zip(("target", "depth", "dtype", "cpu"), cell, strict=True))
        row |= {
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "tau": report.tau,
            "tau_of_plain_call": plain_call.tau,
            "verdict": report.verdict(),
            **speeds_of(report),
            "prefill_over_target": report.methods[TARGET_ALONE].prefill_seconds / plain_call.prefill_seconds,
            "with_prefill_over_target": plain_call.speedup,
            **limits,
            **machine(),
        }
        append_row(RESULTS, row)


def speeds_of(report: EvalReport) -> dict[str, float | None]:
    """Speeds of decoding, after the prefill."""
    plain_call = report.methods[PLAIN_CALL]
    return {
        "over_target": plain_call.decode_speedup,
        "over_packed_target": plain_call.decode_speedup_over_packed,
        "blocks_over_packed_target": report.methods[WHOLE_BLOCKS].decode_speedup_over_packed,
    }


def append_row(results: Path, row: dict) -> None:
    """Add a finished cell to a file of them, and print it."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


def capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


def machine() -> dict:
    """When, where and with what the cell was measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def read_rows() -> list[dict]:
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def write_report() -> None:
    """`depth.md`: a table for each target, processor and dtype."""
    tables: dict[tuple, list[dict]] = {}
    for row in read_rows():
        tables.setdefault((row["target"], row["cpu"], row["dtype"]), []).append(row)
    lines = [
        "# Acceptance and speed by depth",
        "",
        "`OMP_NUM_THREADS=1 python examples/benchmarks/depth.py`, whose description says what the target has read;",
        "every cell is a line of `depth.jsonl`. Speeds are those of decoding, after the prefill: the plain call over",
        "the target alone, over the target with packed weights, and whole blocks over the packed target. *Prefill* is",
        "the target's time until the first token over the plain call's.",
    ]
    for (target, cpu, dtype), rows in tables.items():
        first = rows[0]
        versions = f"torch {first['torch']}, transformers {first['transformers']}"
        size = f"{len(first['prompt_tokens'])} prompts, {first['max_new_tokens']} tokens"
        lines += ["", f"## {target}, {dtype}, {cpu}", ""]
        lines += [
            f"{first['date']}, commit {first['commit']}, {versions}, {first['threads']} thread; {size} a cell.",
            "",
        ]
        lines += ["| depth | tau | of the plain call | over target | over packed | blocks | prefill | texts |"]
        lines += ["|" + "---|" * 8]
        for row in sorted(rows, key=lambda row: row["depth"]):
            names = ("tau", "tau_of_plain_call", "over_target", "over_packed_target", "blocks_over_packed_target")
            figures = [f"{row[name]:.2f}" for name in (*names, "prefill_over_target")]
            lines.append(f"| {row['depth']:,} | " + " | ".join(figures) + f" | {row['verdict']} |")
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


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
