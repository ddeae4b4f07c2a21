"""
The training step compared with a naive one on the same shapes, on a CPU.

The naive step computes the logits of all slots in one tensor and leaves the loss to `cross_entropy` and autograd. The
package's is measured in both of its forms: chunks whose gradients are computed in the forward pass, and chunks whose
logits are computed again in the backward pass, as for a token head, whose parameters are trained. All use the same
drafter, mask, features and labels, and must agree on loss and gradients before anything is timed.

    python examples/benchmarks/training_step.py                # time and memory, about 10 minutes on one thread
    python examples/benchmarks/training_step.py --only paper   # 512 anchors x 16 slots x 151,936 tokens of vocabulary
    python examples/benchmarks/training_step.py --only features  # how long a step waits for stored features

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
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3Config

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.modeling.modeling_dflash import additive_mask
from dflash_hf.training.anchors import sample_anchors
from dflash_hf.training.block_mask import block_mask
from dflash_hf.training.blocks import build_blocks
from dflash_hf.training.features import FeaturesAhead, StoredRow, stored_output
from dflash_hf.training.losses import LogitsHead, block_loss, loss_normalizer, slot_weights, token_losses


RESULTS = Path(__file__).parent / "results"
SHAPES = {
    "timed": {"anchors": 128, "block": 16, "length": 256, "hidden": 256, "vocab": 32768, "dtype": "float32"},
    "small": {"anchors": 256, "block": 16, "length": 512, "hidden": 256, "vocab": 32768, "dtype": "float32"},
    "paper": {"anchors": 512, "block": 16, "length": 3072, "hidden": 1024, "vocab": 151936, "dtype": "bfloat16"},
}
CHUNK = 512
NAMES = {"memory": "small", "paper": "paper's shape"}  # of the shapes whose loss part is measured


def dense_loss(hidden, head, labels, counted, weights):
    """All logits `[N, A, B, V]`, then the weighted mean."""
    logits = head(hidden).float()
    nll = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    return (nll * counted * weights).sum() / (counted * weights).sum()


class ParameterHead(LogitsHead):
    """Scores with a parameter that is trained, and changes nothing."""

    def __init__(self, logits):
        super().__init__(logits)
        self.parameter = nn.Parameter(torch.zeros(()))

    def loss(self, tokens):
        return super().loss(tokens) + self.parameter


def chunked_loss(hidden, head, labels, counted, weights, head_class=LogitsHead):
    """As in the trainer."""
    losses = token_losses(hidden, head_class(head), labels, counted, CHUNK)
    return block_loss(losses, counted, weights).sum() / loss_normalizer(counted, weights).sum()


LOSSES = {"dense": dense_loss, "recomputed": partial(chunked_loss, head_class=ParameterHead), "chunked": chunked_loss}


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
    """Peak memory and CPU seconds of only the loss and its backward, from given hidden states."""
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
    start = time.process_time()
    loss = LOSSES[kind](hidden, head, labels, counted, weights)
    loss.backward()
    return {
        "loss": loss.item(),
        "peak_extra_bytes": status("VmHWM") - before,
        "cpu_seconds": time.process_time() - start,
        "all_logits_fp32_bytes": 4 * counted.sum().item() * shape["vocab"],
    }


def measure_time(shape: dict, rounds: int) -> dict:
    """Seconds of whole steps of a drafter, the kinds in turn."""
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
    for kind in ("recomputed", "chunked"):
        _, loss, gradients = step(kind)
        torch.testing.assert_close(loss, dense, atol=0, rtol=1e-5)
        for expected, gradient in zip(dense_gradients, gradients, strict=True):
            torch.testing.assert_close(expected, gradient, atol=1e-6, rtol=1e-3)
    taken = {kind: [] for kind in LOSSES}  # for each step, CPU and wall-clock seconds
    for round_number in range(rounds):
        for kind in LOSSES if round_number % 2 else reversed(LOSSES):
            taken[kind].append(step(kind)[0])
    result = {"rounds": rounds}
    for i, clock in enumerate(("processor", "clock")):
        seconds = {kind: [pair[i] for pair in values] for kind, values in taken.items()}
        result[clock] = {
            "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
            "spread": {kind: [min(values), max(values)] for kind, values in seconds.items()},
        }
        for kind in ("dense", "recomputed"):
            ratios = [chunked / other for chunked, other in zip(seconds["chunked"], seconds[kind], strict=True)]
            result[clock][f"ratio_to_{kind}"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return result


def measure_features(rounds: int, length: int = 3072, width: int = 5 * 4096, seconds: float = 1.0) -> dict:
    """
    Milliseconds that a step waits for its stored features, read in the step and ahead of it.

    Args:
        rounds: Steps of each kind; each has a row of its own.
        length, width: Of the features of a row, in bf16.
        seconds: What else a step does, on one core.
    """
    waits = {"in the step": [], "ahead": []}
    features = torch.randn(length, width).bfloat16()
    matrix = torch.randn(1024, 1024)
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for number in range(rounds):
            path = Path(folder, f"{number}.safetensors")
            save_file({"features": features}, path)
            rows.append([StoredRow((str(path), path.stat().st_mtime_ns), 0, length)])
        for kind, times in waits.items():
            batches = iter([{"input_ids": torch.zeros(1, length), "stored": row} for row in rows])
            if kind == "ahead":
                batches = FeaturesAhead(batches, states=False, pin_memory=torch.cuda.is_available())
            for batch in batches:
                start = time.perf_counter()
                stored_output(batch, states=False)
                times.append(1000 * (time.perf_counter() - start))
                while time.perf_counter() - start < seconds:
                    matrix @ matrix
            if kind == "ahead":
                batches.close()
    return {"bytes": features.nbytes, **{kind: statistics.median(times[1:]) for kind, times in waits.items()}}


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
    lines += ["", "| | dense logits | recomputed | chunked | chunked / dense | chunked / recomputed |"]
    lines.append("|---|---|---|---|---|---|")
    if "time" in results:
        for clock in ("processor", "clock"):
            timed = results["time"][clock]
            cells = []
            for kind in LOSSES:
                low, high = timed["spread"][kind]
                cells.append(f"{timed['seconds'][kind]:.2f} s ({low:.2f}-{high:.2f})")
            for kind in ("dense", "recomputed"):
                median, low, high = timed[f"ratio_to_{kind}"]
                cells.append(f"{median:.2f} ({low:.2f}-{high:.2f})")
            name = f"whole step, {clock}, median of {results['time']['rounds']} alternating rounds"
            lines.append(f"| {name} | {' | '.join(cells)} |")
    for part in ("memory", "paper"):
        if part not in results:
            continue
        measured = results[part]
        peaks = {kind: values["peak_extra_bytes"] for kind, values in measured.items()}
        cells = [f"{peaks[kind] / 1e9:.2f} GB" if kind in peaks else "" for kind in LOSSES]
        cells += [f"{peaks['chunked'] / peaks[kind]:.2f}" if kind in peaks else "" for kind in ("dense", "recomputed")]
        lines.append(f"| peak memory of the loss part, {NAMES[part]} | {' | '.join(cells)} |")
        seconds = {kind: values["cpu_seconds"] for kind, values in measured.items()}
        cells = [f"{seconds[kind]:.1f} s" if kind in seconds else "" for kind in LOSSES]
        cells += [
            f"{seconds['chunked'] / seconds[kind]:.2f}" if kind in seconds else "" for kind in ("dense", "recomputed")
        ]
        lines.append(f"| CPU time of the loss part, {NAMES[part]} | {' | '.join(cells)} |")
    for title, name in (("Step", "timed"), ("Loss part", "small")):
        shape = ", ".join(f"{key} {value}" for key, value in SHAPES[name].items())
        lines += ["", f"{title}: {shape}{'; two draft layers' if name == 'timed' else ''}."]
    if "paper" in results:
        shape = SHAPES["paper"]
        copy_bytes = results["paper"]["chunked"]["all_logits_fp32_bytes"]
        lines += [
            "",
            f"Paper's shape: {', '.join(f'{key} {value}' for key, value in shape.items())}; {CHUNK} rows at a time.",
        ]
        lines[-1] += f" A copy of all logits in fp32 is {copy_bytes / 1e9:.1f} GB."
    if "features" in results:
        waits = results["features"]
        lines += ["", f"A step waits for the stored features of a row ({waits['bytes'] / 1e6:.0f} MB)"]
        lines[-1] += f" {waits['in the step']:.1f} ms if they are read in the step,"
        lines[-1] += f" {waits['ahead']:.1f} ms if they are read ahead."
    (RESULTS / "training_step.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["time", "memory", "paper", "features"], help="one measurement")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measure", nargs=2, metavar=("SHAPE", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        shape, kind = arguments.measure
        shape = SHAPES[shape]
        print(json.dumps(measure_time(shape, arguments.rounds) if kind == "time" else measure_memory(shape, kind)))
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
        results["time"] = apart("--measure", "timed", "time", "--rounds", str(arguments.rounds))
    if arguments.only in (None, "memory"):
        results["memory"] = {kind: apart("--measure", "small", kind) for kind in LOSSES}
    if arguments.only in (None, "paper"):
        results["paper"] = {kind: apart("--measure", "paper", kind) for kind in ("recomputed", "chunked")}
    if arguments.only in (None, "features"):
        results["features"] = measure_features(arguments.rounds)
    write(results)


if __name__ == "__main__":
    main()
