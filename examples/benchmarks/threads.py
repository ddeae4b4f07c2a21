"""
The gain of threads: the same drafted calls in four threads and one after the other, on one shared pair.

    OMP_NUM_THREADS=1 python examples/benchmarks/threads.py [--shape 100m] [--threads 4] [--runs 5]

A random pair of a real shape, with an oracle for each prompt whose drafts are right as often as `--tau` requires;
greedy, fp32, eager rounds. Both modes alternate, and the ratio is the median over the runs. Texts must be
equal. If one thread keeps all cores busy, a ratio of 1 is the optimum.
"""

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from random_pairs import SHAPES, oracle_text, random_pair

from dflash_hf.evaluation.scripted_draft import ScriptedDraft


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--calls", type=int, default=8, help="calls per run; default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--tau", type=float, default=4.0, help="tokens per verification; default: %(default)s")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a .json file to write the result to")
    arguments = parser.parse_args()

    target, draft, prompts = random_pair(arguments.shape, torch.float32, "cpu", arguments.calls)
    drafts = []
    expected = []
    for prompt in prompts:  # one oracle text per call, on the same weights
        text = oracle_text(target, prompt, arguments.new_tokens, draft.config.block_size, arguments.tau)
        drafts.append(ScriptedDraft.of(draft, [text]))
        expected.append(generate(target, None, prompt, arguments.new_tokens))

    def call(number: int) -> list[int]:
        return generate(target, drafts[number], prompts[number], arguments.new_tokens)

    def seconds(run) -> float:
        start = time.perf_counter()
        texts = list(run(call, range(arguments.calls)))
        taken = time.perf_counter() - start
        if texts != expected:
            mismatches = sum(text != expected_text for text, expected_text in zip(texts, expected))
            raise SystemExit(f"{mismatches} of {arguments.calls} texts are not those of the target alone.")
        return taken

    with ThreadPoolExecutor(arguments.threads) as pool:
        seconds(map)  # probe and warm up
        runs = [(seconds(map), seconds(pool.map)) for _ in range(arguments.runs)]
    in_turn, in_threads = (statistics.median(times) for times in zip(*runs))
    ratio = statistics.median(alone / together for alone, together in runs)
    tokens = arguments.calls * arguments.new_tokens
    setting = f"{os.cpu_count()} CPUs, {torch.get_num_threads()} thread(s) of torch, torch {torch.__version__}"
    work = f"{arguments.shape}, {arguments.calls} calls of {arguments.new_tokens} tokens, greedy, fp32, eager"
    print(f"{work}; medians of {arguments.runs} alternating runs; {setting}")
    print(f"in turn               {tokens / in_turn:8.1f} tokens/s")
    print(f"in {arguments.threads} thread(s)        {tokens / in_threads:8.1f} tokens/s")
    print(f"ratio                 {ratio:8.2f}  ({', '.join(f'{a / b:.2f}' for a, b in runs)})")
    if arguments.output is not None:
        result = {**vars(arguments), "output": None, "in_turn_s": in_turn, "in_threads_s": in_threads, "ratio": ratio}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def generate(target, draft, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "assistant_model": draft}
    return target.generate(ids, attention_mask=mask, **options)[0].tolist()


if __name__ == "__main__":
    main()
