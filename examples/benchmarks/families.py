"""
Is decoding with a drafter lossless for every family, and how is each target rolled back?

A tiny random target of every causal language model of the installed transformers, and of its wrappers that also read
images, made from its configuration's own defaults (`tests/support/tiny_models.py`), in fp32 on the CPU; drafters that
know the text but get one token in seven wrong, so that drafts are accepted and rejected. Greedy, from a single prompt
and from four of different lengths, left-padded. Each family runs in a separate process. Twenty minutes on one core.

    python examples/benchmarks/families.py > examples/benchmarks/results/families.md
    python examples/benchmarks/families.py qwen3 llava+    # only these, wrappers with a plus
"""

import collections
import platform
import sys
import time
from pathlib import Path

import torch
import transformers
from tqdm import tqdm


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support import every_family
from support.every_family import BLOCK_SIZE, LONG, NEW_TOKENS, SHORT, Outcome


TITLES = {
    "right": "drafted, equal at batch 1 and 4",
    "plain": "decoded plainly, with a warning",
    "refused": "no drafter possible, reported up front",
    "wrong": "WRONG",
    "leaks": "LEAKS",
    "error": "ERROR",
    "not made": "no tiny model that generates text",
}


def line(outcome: Outcome) -> str:
    detail = outcome.detail.replace("|", "/").removesuffix(".")
    if outcome.verdict != "right":
        return f"| {outcome.name or '-'} | {outcome.model_type} | {TITLES[outcome.verdict]} | | | | {detail} |"
    one_row, four_rows = outcome.tau
    growth = f"{outcome.growth / 1024:.0f}"
    return f"| {outcome.name} | {outcome.model_type} | {detail} | {one_row:.2f} | {four_rows:.2f} | {growth} | |"


def main() -> None:
    began = time.time()
    names = [(name.removesuffix("+"), name.endswith("+")) for name in sys.argv[1:]] or every_family.families()
    with tqdm(total=len(names), unit="family") as bar:

        def report(outcome: Outcome) -> None:
            bar.update()
            if outcome.verdict in ("wrong", "leaks", "error"):
                bar.write(f"{outcome.model_type}: {outcome.verdict}: {outcome.detail}", file=sys.stderr)

        outcomes = every_family.examine_all(names, report)
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    order = list(TITLES)

    print("# Families\n")
    print(f"{len(outcomes)} families: {', '.join(f'{counts[verdict]} {TITLES[verdict]}' for verdict in order)}.\n")
    print("Tiny random targets made from the defaults of their configuration classes, fp32, CPU. Greedy,")
    print(f"{NEW_TOKENS} new tokens, from one prompt and from four of different lengths, left-padded; blocks of")
    print(f"{BLOCK_SIZE}, drafts with one token in seven wrong. tau: tokens committed per verification, the target's")
    print(
        "own included. Wrappers get only text. growth: KB by which the peak of live tensors of a call of four rows is"
    )
    print(f"higher for {LONG} new tokens than for {SHORT}; parameters require gradients.\n")
    print("```\npython examples/benchmarks/families.py > examples/benchmarks/results/families.md\n```\n")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {platform.machine()}, 1 thread,")
    print(f"{time.time() - began:.0f} s.\n")
    print("| target | model type | rollback method | tau | tau, batch | growth | remark |")
    print("|---|---|---|---|---|---|---|")
    for outcome in sorted(outcomes, key=lambda outcome: (-order.index(outcome.verdict), outcome.name)):
        print(line(outcome))


if __name__ == "__main__":
    main()
