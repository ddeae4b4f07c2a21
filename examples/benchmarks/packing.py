"""
How long `packed_weights` takes to copy SmolLM2's weights.

    OMP_NUM_THREADS=1 python examples/benchmarks/packing.py [--runs 5]

The last line is JSON: the median of the CPU time in seconds.
"""

import argparse
import json
import statistics
import time

from dflash_hf import packed_weights
from dflash_hf.smollm2 import load_pair


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    arguments = parser.parse_args()
    target = load_pair(arguments.dtype).target
    seconds = []
    for _ in range(arguments.runs):
        start = time.process_time()
        with packed_weights(target):
            seconds.append(time.process_time() - start)
    print(json.dumps({"seconds": round(statistics.median(seconds), 3)}))


if __name__ == "__main__":
    main()
