"""
Checks and times decoding on a GPU in one go, in eight minutes: the shape of Qwen3-8B and that of a mixture of experts,
random bf16 weights, forced acceptance 6.5.

    python examples/benchmarks/gpu_speed.py --reference CHECKOUT_OF_Z_LAB_DFLASH --output results

Prints, for each shape, tokens per second of `generate` alone, with a dynamic and a static cache, of transformers' own
path, of the plain call with the drafter, of blocks (eager, sampled, compiled) and of the reference; the share of the
bandwidth roofline that a round reaches (the bytes of all weights that a draft and a verification read, once each, over
the bandwidth of this device); and kernels, graphs and synchronisations of a round. First, a small pair is decoded in
fp32, eager and compiled, and must equal the target alone. On a CPU: `--device cpu --shapes tiny tiny-moe --tokens 48`.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from random_pairs import SHAPES, oracle_text, random_pair, slot_accuracy
from side_by_side import NATIVE, STATIC, bench

from dflash_hf import DFlashDecodingConfig
from dflash_hf.evaluation.methods import AUTO, COMPILED, DFLASH, TARGET


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.scripted_draft import ScriptedDraft


TAU = 6.5  # tokens per verification of the oracle
METHODS = (TARGET, STATIC, NATIVE, AUTO, DFLASH, COMPILED)
# What the CUDA runtime does for a round, by the beginnings of its calls' names.
CALLS = {
    "kernels": ("cudaLaunchKernel", "cuLaunchKernel"),
    "graphs": ("cudaGraphLaunch",),
    "syncs": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}


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


def calls_per_round(target, draft, prompt, tokens: int, **sampling) -> dict[str, float]:
    """Kernels, graphs and synchronisations: those of a whole answer beyond those of half of it, for each round."""
    ids = torch.tensor([prompt], device=target.device)
    counts, rounds = [], []
    for length in (tokens // 2, tokens):
        options = {"max_new_tokens": length, "return_dict_in_generate": True, **sampling}
        with torch.profiler.profile() as profile:
            output = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **options)
        events = profile.key_averages()
        counts.append({k: sum(e.count for e in events if e.key.startswith(names)) for k, names in CALLS.items()})
        rounds.append(len(output.acceptance_lengths[0]))
    return {name: (counts[1][name] - counts[0][name]) / max(rounds[1] - rounds[0], 1) for name in CALLS}


def engine(target, draft, prompt, tokens: int, runs: int) -> dict[str, dict]:
    """Greedy and sampled blocks of an oracle: tokens per second, tokens per round, and calls per round."""
    text = oracle_text(target, prompt, tokens, draft.config.block_size, TAU)
    scripted, found = ScriptedDraft.of(draft, [text], certainty=slot_accuracy(TAU, draft.config.block_size)), {}
    ids = torch.tensor([prompt], device=target.device)
    for name, compiled, sampling in (
        ("greedy", False, {"do_sample": False}),
        ("sampled", False, {"do_sample": True, "temperature": 0.7}),
        ("compiled", True, {"do_sample": False}),
    ):
        scripted.decoding_config = DFlashDecodingConfig(block_size=draft.config.block_size, compile=compiled)
        options = {"max_new_tokens": tokens, "return_dict_in_generate": True, **sampling}
        seconds = []
        for _ in range(runs + 1):  # the first one compiles
            synchronize(target.device.type)
            start = time.perf_counter()
            output = target.generate(
                ids, attention_mask=torch.ones_like(ids), assistant_model=scripted, pad_token_id=0, **options
            )
            synchronize(target.device.type)
            seconds.append(time.perf_counter() - start)
        counts = output.acceptance_lengths[0]
        calls = calls_per_round(target, scripted, prompt, tokens, **sampling)
        best = statistics.median(seconds[1:])
        found[name] = {"tokens_per_second": tokens / best, "tau": sum(counts) / len(counts), **calls}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["qwen3-8b", "qwen3-moe"])
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
            forced_acceptance=TAU,
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
        facts["engine"] = engine(target, draft, prompts[0], arguments.tokens, arguments.runs)
        for name, row in facts["engine"].items():
            print(f"block, {name:9} " + "   ".join(f"{value:.1f} {key}" for key, value in row.items()), flush=True)
        facts |= json.loads(report.to_json())
        path = arguments.output / f"gpu_speed_{shape}.json"
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        del target, draft


if __name__ == "__main__":
    main()
