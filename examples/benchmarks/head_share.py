"""
What a target's head costs: the time of a forward with it and without it, for one token and for eight.

    OMP_NUM_THREADS=1 python examples/benchmarks/head_share.py --target gemma3-270m
"""

import argparse
import statistics
import time

import torch

from dflash_hf.pairs.loading import Loading, load_target
from dflash_hf.pairs.packaged_targets import folder_of


def milliseconds(call, ids: torch.Tensor, runs: int) -> float:
    """The median time of a forward, after one that warms up."""
    times = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        call(ids)
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times[1:])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    target = load_target(folder_of(arguments.target), Loading(arguments.dtype, device="cpu"))
    print("| tokens | forward | without head |\n|---|---|---|")
    for num_tokens in (1, 8):
        ids = torch.randint(5, 10_000, (1, num_tokens))
        whole = milliseconds(target, ids, arguments.runs)
        body = milliseconds(target.get_decoder(), ids, arguments.runs)
        print(f"| {num_tokens} | {whole:.0f} ms | {body:.0f} ms |")


if __name__ == "__main__":
    main()
