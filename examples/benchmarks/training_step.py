"""
The training step compared with a naive one on the same shapes, on a CPU.

The naive step computes the logits of all slots in one tensor and leaves the loss to `cross_entropy` and autograd.
Both use the same drafter, mask, features and labels, and must agree on loss and gradients before anything is timed.

    python examples/benchmarks/training_step.py                # time and memory, about 10 minutes on one thread
    python examples/benchmarks/training_step.py --only paper   # 512 anchors x 16 slots x 151,936 tokens of vocabulary

Memory is the peak of the process's resident memory during the loss and its backward, above the level before; every
measurement runs in a separate process. Linux only. Time is CPU time, which other work on the machine disturbs less
than wall-clock time; both are recorded. Results: `results/training_step.md`.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import Qwen3Config

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.modeling.modeling_dflash import additive_mask
from dflash_hf.training.anchors import sample_anchors
from dflash_hf.training.block_mask import block_mask
from dflash_hf.training.blocks import build_blocks
from dflash_hf.training.losses import LogitsHead, block_loss, loss_normalizer, slot_weights, token_losses


RESULTS = Path(__file__).parent / "results"
SHAPES = {
    "timed": {"anchors": 128, "block": 16, "length": 256, "hidden": 256, "vocab": 32768, "dtype": "float32"},
    "small": {"anchors": 256, "block": 16, "length": 512, "hidden": 256, "vocab": 32768, "dtype": "float32"},
    "paper": {"anchors": 512, "block": 16, "length": 3072, "hidden": 1024, "vocab": 151936, "dtype": "bfloat16"},
}
CHUNK = 512


def dense_loss(hidden, head, labels, counted, weights):
    """All logits `[N, A, B, V]`, then the weighted mean."""
    logits = head(hidden).float()
    nll = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    return (nll * counted * weights).sum() / (counted * weights).sum()


def chunked_loss(hidden, head, labels, counted, weights):
    """As in the trainer."""
    losses = token_losses(hidden, LogitsHead(head), labels, counted, CHUNK)
    return block_loss(losses, counted, weights).sum() / loss_normalizer(counted, weights).sum()


LOSSES = {"dense": dense_loss, "chunked": chunked_loss}


def make_head(shape, dtype):
    head = nn.Linear(shape["hidden"], shape["vocab"], bias=False, dtype=dtype)
    return head.requires_grad_(False)


def status(key: str) -> int:
    """Value of a line of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def measure_memory(shape: dict, kind: str) -> dict:
    """Peak memory and seconds of only the loss and its backward, from given hidden states."""
    torch.manual_seed(0)
    dtype = getattr(torch, shape["dtype"])
    head = make_head(shape, dtype)
    tokens = (1, shape["anchors"], shape["block"])
    hidden = torch.randn(*tokens, shape["hidden"]).to(dtype).requires_grad_()
    labels = torch.randint(shape["vocab"], tokens)
    counted = (torch.arange(shape["block"]) > 0).expand(tokens)
    weights = slot_weights(shape["block"])
    small = torch.zeros(1, 1, shape["block"], dtype=torch.bool)
    small[..., 1] = True  # one token, so that the libraries' own buffers are allocated
    LOSSES[kind](hidden[:, :1], head, labels[:, :1], small, weights).backward()
    hidden.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    start = time.perf_counter()
    loss = LOSSES[kind](hidden, head, labels, counted, weights)
    loss.backward()
    return {
        "loss": loss.item(),
        "peak_extra_bytes": status("VmHWM") - before,
        "seconds": time.perf_counter() - start,
        "all_logits_fp32_bytes": 4 * counted.sum().item() * shape["vocab"],
    }


def measure_time(shape: dict, pairs: int) -> dict:
    """Seconds of whole steps of a drafter, the two kinds in turn."""
    torch.manual_seed(0)
    target = Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=3 * shape["hidden"],
        num_hidden_layers=8,
        num_attention_heads=shape["hidden"] // 64,
        num_key_value_heads=shape["hidden"] // 128,
        head_dim=64,
    )
    config = DFlashDraftConfig.for_target(target, shape["vocab"] - 1, num_hidden_layers=2, block_size=shape["block"])
    draft = DFlashDraftModel(config).train()
    head = make_head(shape, torch.float32)
    input_ids = torch.randint(shape["vocab"], (1, shape["length"]))
    ones = torch.ones_like(input_ids)
    features = torch.randn(1, shape["length"], draft.fc.in_features)
    embedding = torch.randn(shape["vocab"], shape["hidden"])
    weights = slot_weights(shape["block"])
    anchors, valid = sample_anchors(ones, shape["anchors"], torch.Generator().manual_seed(0))

    def step(kind):
        draft.zero_grad(set_to_none=True)
        start = time.process_time(), time.perf_counter()
        blocks = build_blocks(input_ids, ones, anchors, valid, shape["block"], config.mask_token_id)
        hidden = draft(
            noise_embeds=embedding[blocks.input_ids],
            context_hidden_states=features,
            attention_mask=additive_mask(block_mask(anchors, ones, shape["block"]), torch.float32),
            position_ids=blocks.position_ids,
        ).last_hidden_state.view(*blocks.labels.shape, -1)
        loss = LOSSES[kind](hidden, head, blocks.labels, blocks.counted, weights)
        loss.backward()
        taken = time.process_time() - start[0], time.perf_counter() - start[1]
        return taken, loss.item(), [p.grad for p in draft.parameters()]

    _, dense, dense_gradients = step("dense")
    _, chunked, gradients = step("chunked")
    torch.testing.assert_close(chunked, dense, atol=0, rtol=1e-5)
    for expected, gradient in zip(dense_gradients, gradients, strict=True):
        torch.testing.assert_close(expected, gradient, atol=1e-6, rtol=1e-3)
    taken = {"dense": [], "chunked": []}  # for each step, CPU and wall-clock seconds
    for pair in range(pairs):
        for kind in ("dense", "chunked") if pair % 2 else ("chunked", "dense"):
            taken[kind].append(step(kind)[0])
    result = {"pairs": pairs}
    for i, clock in enumerate(("processor", "clock")):
        seconds = {kind: [pair[i] for pair in values] for kind, values in taken.items()}
        ratios = [chunked / dense for dense, chunked in zip(*seconds.values(), strict=True)]
        result[clock] = {
            "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
            "spread": {kind: [min(values), max(values)] for kind, values in seconds.items()},
            "ratio_median": statistics.median(ratios),
            "ratio_spread": [min(ratios), max(ratios)],
        }
    return result


def apart(*arguments: str) -> dict:
    """A measurement in a separate process."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def write(results: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "training_step.json").write_text(json.dumps(results, indent=1) + "\n")
    machine = results["machine"]
    lines = ["# The training step compared with a naive one", ""]
    lines.append(
        f"{machine['processor']}, {machine['threads']} thread(s), torch {machine['torch']}, transformers "
        f"{machine['transformers']}. `python examples/benchmarks/training_step.py`"
    )
    lines += ["", "| | dense logits | chunked | chunked / dense |", "|---|---|---|---|"]
    if "time" in results:
        for clock in ("processor", "clock"):
            timed = results["time"][clock]
            seconds = timed["seconds"]
            spread = timed["spread"]
            cells = [f"{seconds[kind]:.2f} s ({spread[kind][0]:.2f}-{spread[kind][1]:.2f})" for kind in LOSSES]
            ratio = f"{timed['ratio_median']:.2f} ({timed['ratio_spread'][0]:.2f}-{timed['ratio_spread'][1]:.2f})"
            name = f"whole step, {clock}, median of {results['time']['pairs']} alternating pairs"
            lines.append(f"| {name} | {cells[0]} | {cells[1]} | {ratio} |")
    if "memory" in results:
        peaks = [results["memory"][kind]["peak_extra_bytes"] / 1e9 for kind in LOSSES]
        lines.append(
            f"| peak memory of the loss part | {peaks[0]:.2f} GB | {peaks[1]:.2f} GB | {peaks[1] / peaks[0]:.2f} |"
        )
    for title, name in (("Step", "timed"), ("Loss part", "small")):
        shape = ", ".join(f"{key} {value}" for key, value in SHAPES[name].items())
        lines += ["", f"{title}: {shape}{'; two draft layers' if name == 'timed' else ''}."]
    lines.append("")
    if "paper" in results:
        paper = results["paper"]
        shape = SHAPES["paper"]
        lines.append(
            f"{shape['anchors']} anchors x {shape['block']} slots x {shape['vocab']} tokens of vocabulary "
            f"({shape['dtype']}, hidden {shape['hidden']}, {CHUNK} rows at a time): "
            f"{paper['peak_extra_bytes'] / 1e9:.2f} GB above the level before, {paper['seconds']:.0f} s for the "
            f"loss and its backward. A copy of all logits in fp32 is {paper['all_logits_fp32_bytes'] / 1e9:.1f} GB."
        )
    (RESULTS / "training_step.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["time", "memory", "paper"], help="one of the three measurements")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--measure", nargs=2, metavar=("SHAPE", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        shape, kind = arguments.measure
        shape = SHAPES[shape]
        print(json.dumps(measure_time(shape, arguments.pairs) if kind == "time" else measure_memory(shape, kind)))
        return
    file = RESULTS / "training_step.json"
    results = json.loads(file.read_text()) if arguments.only and file.exists() else {}
    results["machine"] = {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if arguments.only in (None, "time"):
        results["time"] = apart("--measure", "timed", "time", "--pairs", str(arguments.pairs))
    if arguments.only in (None, "memory"):
        results["memory"] = {kind: apart("--measure", "small", kind) for kind in LOSSES}
    if arguments.only in (None, "paper"):
        results["paper"] = apart("--measure", "paper", "chunked")
    write(results)


if __name__ == "__main__":
    main()
