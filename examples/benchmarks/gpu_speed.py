"""
Checks and times decoding on a GPU in one go: Qwen3-8B and Qwen3-4B shapes, random bf16 weights, forced acceptance 6.5.

    python examples/benchmarks/gpu_speed.py --reference CHECKOUT_OF_Z_LAB_DFLASH --output results

Prints, for each shape, tokens per second of `generate` alone, of the drafter eager and compiled, and of the reference,
and the share of the bandwidth roofline that a round reaches: the bytes of all weights that a draft and a verification
read, once each, over the bandwidth of this device. First, a small pair is decoded in fp32, eager and compiled, and
must equal the target alone. On a CPU: `--device cpu --shapes tiny --tokens 48`.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from random_pairs import SHAPES, random_pair
from side_by_side import bench

from dflash_hf.evaluation.methods import COMPILED, DFLASH, TARGET


METHODS = (TARGET, DFLASH, COMPILED)


def bandwidth(device: str) -> float:
    """Bytes per second when reading a large tensor, best of ten."""
    size = 2**30 if device != "cpu" else 2**26
    x = torch.ones(size, dtype=torch.bfloat16 if device != "cpu" else torch.float32, device=device)
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        x.amax()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return x.numel() * x.element_size() / best


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def round_bytes(target, draft) -> int:
    """Bytes of weights that one round reads: drafter, target without its embedding table, and the head twice."""
    size = sum(p.numel() * p.element_size() for model in (target, draft) for p in model.parameters())
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return size - embedding.numel() * embedding.element_size() + head.numel() * head.element_size()


def check(device: str) -> None:
    """Raises `SystemExit` if an fp32 output is not the target's own."""
    target, draft, prompts = random_pair("tiny", torch.float32, device, 3)
    trees = ("dflash_tree", "dflash_tree_compiled")
    report, _ = bench(target, draft, prompts, 64, 1, (*METHODS, *trees), forced_acceptance=4.0)
    wrong = [name for name, method in report.methods.items() if method.equal != len(prompts)]
    if wrong:
        raise SystemExit(f"not lossless in fp32 on {device}: {wrong}")
    print(f"lossless in fp32 on {device}: eager and compiled, blocks and trees, tau {report.tau:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["qwen3-8b", "qwen3-4b"])
    parser.add_argument("--device", default="cuda")
    # The target alone takes most of the time; these defaults fit both shapes into a few minutes.
    parser.add_argument("--tokens", type=int, default=192, help="new tokens per call; default: %(default)s")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--reference", help="a checkout of z-lab/dflash")
    parser.add_argument("--output", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    check(arguments.device)
    speed = bandwidth(arguments.device)
    print(f"bandwidth {speed / 1e9:.0f} GB/s (reading one tensor)")
    for shape in arguments.shapes:
        target, draft, prompts = random_pair(shape, torch.bfloat16, arguments.device, arguments.prompts)
        least = round_bytes(target, draft) / speed
        report, rounds = bench(
            target,
            draft,
            prompts,
            arguments.tokens,
            arguments.runs,
            METHODS,
            forced_acceptance=6.5,
            reference=arguments.reference,
        )
        print(f"\n{shape}, bf16, FORCED acceptance (tau {report.tau:.2f}), {report.setting['hardware']}")
        facts = {"shape": shape, "bandwidth": speed, "least_round_seconds": least, "round": asdict(rounds)}
        for name, method in report.methods.items():
            line = f"{name:16} {method.tokens_per_second:8.0f} tokens/s {method.speedup:6.2f}x"
            if name in rounds.rounds:
                facts[f"roofline_{name}"] = least / rounds.rounds[name]
                line += (
                    f"   round {1e3 * rounds.rounds[name]:.2f} ms, {least / rounds.rounds[name]:.0%} of the roofline"
                )
            print(f"{line}   equal {method.equal}/{report.num_prompts}", flush=True)
        facts |= json.loads(report.to_json())
        path = arguments.output / f"gpu_speed_{shape}.json"
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        del target, draft


if __name__ == "__main__":
    main()
