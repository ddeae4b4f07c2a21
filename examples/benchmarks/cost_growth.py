"""
How the time of a round grows with context and batch, next to the growth of the target's own step.

    python examples/benchmarks/cost_growth.py [--shape demo] [--dtype fp32] [--output examples/benchmarks/results]

Random weights in one of the shapes of `random_pairs.py`; acceptance does not affect the time of a round. Medians over
the rounds of a call, excluding the prompt's forward.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from random_pairs import SHAPES, random_pair
from transformers import LogitsProcessor, LogitsProcessorList

from dflash_hf.decoding.state import GenerationState
from dflash_hf.evaluation.measure import hardware


CONTEXTS = (128, 512, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8)


class Clock(LogitsProcessor):
    """Records the time of each step of plain decoding."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores):
        self.times.append(time.perf_counter())
        return scores


def steps(times: list[float]) -> float:
    """Median of the intervals, without the first, which may include allocations."""
    return statistics.median(b - a for a, b in zip(times[1:], times[2:]))


def measure(target, draft, rows: int, context: int, rounds: int = 14) -> tuple[float, float]:
    """Seconds of `(a step of the target alone, a round)`."""
    torch.manual_seed(context + rows)
    ids = torch.randint(target.config.vocab_size - 1, (rows, context))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": rounds, "do_sample": False}
    clock = Clock()
    times = []
    accept = GenerationState.accept

    def timed_accept(self, *args):
        acceptance = accept(self, *args)
        times.append(time.perf_counter())
        return acceptance

    target.generate(ids, logits_processor=LogitsProcessorList([clock]), **options)
    GenerationState.accept = timed_accept
    try:
        target.generate(ids, assistant_model=draft, **options)
    finally:
        GenerationState.accept = accept
    return steps(clock.times), steps(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    target, draft, _ = random_pair(arguments.shape, dtype, "cpu", 1)
    measure(target, draft, 1, 64)  # warm-up
    growth = {"context": {}, "batch": {}}
    for context in CONTEXTS:
        growth["context"][context] = measure(target, draft, 1, context)
        print("context", context, *(f"{1e3 * t:.2f} ms" for t in growth["context"][context]), flush=True)
    for rows in BATCHES:
        growth["batch"][rows] = measure(target, draft, rows, 512)
        print("batch", rows, *(f"{1e3 * t:.2f} ms" for t in growth["batch"][rows]), flush=True)
    facts = {
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "threads": torch.get_num_threads(),
        "hardware": hardware(target.device),
        "torch": torch.__version__,
        "block_size": draft.config.block_size,
        "seconds": {
            axis: {str(k): {"step": s, "round": r} for k, (s, r) in points.items()} for axis, points in growth.items()
        },
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    name = f"cost_growth_{arguments.shape}_{arguments.dtype}"
    (arguments.output / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    draw(facts, arguments.output / f"{name}.png")


def draw(facts: dict, path: Path) -> None:
    """Two panels: growth over the smallest context, growth over one row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (axis, points) in zip(figure.subplots(1, 2), facts["seconds"].items()):
        sizes = [int(size) for size in points]
        for kind, color, label in (
            ("step", "#8a8f98", "target alone, one step"),
            ("round", "#1a7f5a", f"a round, block of {facts['block_size']}"),
        ):
            times = [point[kind] for point in points.values()]
            axes.plot(
                sizes, [t / times[0] for t in times], "o-", color=color, label=f"{label}: {1e3 * times[0]:.1f} ms"
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("context, tokens (one row)" if axis == "context" else "rows (context 512)")
        axes.set_ylabel(f"time over that at {sizes[0]}")
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"{facts['shape']}, {facts['dtype']}, {facts['threads']} thread(s), {facts['hardware']}", fontsize=9
    )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
