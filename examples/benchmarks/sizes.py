"""
The plain call against fixed sizes: SmolLM2-135M with its drafter, with nothing set, with whole blocks, with trees.

    python examples/benchmarks/sizes.py [SITUATION ...] [--dtype float32] [--prompts 6] [--output results/sizes.md]

Every way decodes the same prompts in turn, on one thread, both models packed; ratios are over the packed target alone,
medians of prompts (of batches). Time is that of the thread. The first prompt warms up. Unless `--known` is given, the
plain call has measured nothing before it: what it tries on purpose to learn what rounds cost is part of its time. With
`--known` it begins with what was measured on this machine, as later processes do.
"""

import argparse
import copy
import os
import statistics
import time
from pathlib import Path

import torch

from dflash_hf.demo.run import load_pair, requests
from dflash_hf.packed_linear import packed_weights


# Rows, new tokens, further options of `generate`, and whether the drafter has random weights.
SITUATIONS = {
    "one row": (1, 48, {}, False),
    "one row, T = 1": (1, 48, {"do_sample": True, "temperature": 1.0, "top_k": 0}, False),
    "answers of 4 tokens": (1, 4, {}, False),
    "answers of 16 tokens": (1, 16, {}, False),
    "mixed stream": (1, 32, {}, False),
    "four rows": (4, 32, {}, False),
    "four rows, repetition penalty": (4, 32, {"repetition_penalty": 1.2}, False),
    "eight rows": (8, 24, {}, False),
    "random drafter": (1, 32, {}, True),
}
# Prompts of the mixed stream, which take turns with requests.
OTHERS = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "Die Hauptstadt von Frankreich ist",
    "qX7#p0v !!zz ~k3 9w_Lr (%",
]
WAYS = {
    "target": None,
    "plain call": {},
    "blocks of 3": {"block_size": 3},
    "blocks of 8": {"block_size": 8},
    "trees of 7": {"tree_nodes": 7},
}


def batches(pair, rows: int, count: int, mixed: bool = False):
    tokenizer = pair.tokenizer
    tokenizer.padding_side = "left"
    texts = [
        tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, tokenize=False)
        for row in requests(rows * count)
    ]
    if mixed:
        texts[1::2] = [OTHERS[number % len(OTHERS)] for number in range(len(texts[1::2]))]
    options = {"return_tensors": "pt", "padding": True, "add_special_tokens": False}
    return [tokenizer(texts[first : first + rows], **options) for first in range(0, rows * count, rows)]


def seconds(pair, draft, batch, new: int, options: dict) -> tuple[float, list[int]]:
    """For each generated token, and the acceptance lengths."""
    torch.manual_seed(0)
    start = time.thread_time()
    output = pair.target.generate(
        **batch,
        assistant_model=draft,
        max_new_tokens=new,
        min_new_tokens=new if options.get("do_sample") else None,
        return_dict_in_generate=True,
        **{"do_sample": False, **options},
    )
    lengths = [n for row in getattr(output, "acceptance_lengths", [[]]) for n in row]
    return time.thread_time() - start, lengths


def measure(pair, name: str, prompts: int) -> str:
    rows, new, options, random = SITUATIONS[name]
    base = copy.deepcopy(pair.draft) if random else pair.draft
    if random:
        torch.manual_seed(0)
        for parameter in base.parameters():
            torch.nn.init.normal_(parameter.data, std=0.02)
    times, taken = {way: [] for way in WAYS}, {way: [] for way in WAYS}
    for number, batch in enumerate(batches(pair, rows, prompts + 1, name == "mixed stream")):
        for way, settings in WAYS.items():
            base.decoding_config.block_size = base.decoding_config.tree_nodes = None
            for field, value in (settings or {}).items():
                setattr(base.decoding_config, field, value)
            spent, lengths = seconds(pair, None if settings is None else base, batch, new, options)
            if number:
                times[way].append(spent)
                taken[way] += lengths
    cells = []
    for way in list(WAYS)[1:]:
        ratios = [alone / spent for alone, spent in zip(times["target"], times[way], strict=True)]
        cells.append(f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})")
    return f"| {name} | {' | '.join(cells)} | {statistics.fmean(taken['plain call']):.2f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("situations", nargs="*", default=list(SITUATIONS), metavar="SITUATION")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--known", action="store_true", help="begin with what rounds were measured to cost here")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.known:
        os.environ["DFLASH_HF_REMEMBER"] = "0"
    pair = load_pair(getattr(torch, arguments.dtype))
    packed_weights(pair.target, pair.draft)
    lines = ["| | " + " | ".join(list(WAYS)[1:]) + " | tau of the plain call |", "|---" * (len(WAYS) + 1) + "|"]
    for name in arguments.situations:
        lines.append(measure(pair, name, arguments.prompts))
        print(lines[-1], flush=True)
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
