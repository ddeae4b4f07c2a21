"""
Peak memory of a long prompt with a drafter, as a multiple of the peak without one.

A random target with the proportions of Qwen3-8B and its published drafter at a 64th of the width: 36 layers, keys and
values of a quarter of the width, an MLP of three times the width; 5 draft layers that read 5 of the target's. fp32 on
the CPU, 8 new tokens, one thread. Every figure comes from a fresh process and is beyond the loaded models:

- *allocated*: peak bytes of all live tensors, counted operation by operation; the same in every run;
- *resident*: peak resident memory of the process (Linux).

    python examples/benchmarks/prompt_memory.py [--tokens 8192 32768] [--chunks 0 64] [--runs 3]

Chunks of 64 correspond to about 2,000 of Qwen3-8B: the mask of a chunk does not shrink with the width. By default
glibc keeps large freed blocks for reuse, and how many it holds is random; MALLOC_MMAP_THRESHOLD_ is set for the
measured processes, so that blocks return to the system immediately, like tensors of real size.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors created inside: `now` and `peak`."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}  # storage -> bytes
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        argument_ids = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and id_of(tensor) not in argument_ids | self.sizes.keys():
                storage = tensor.untyped_storage()
                self.sizes[id_of(tensor)] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, id_of(tensor))
        self.peak = max(self.peak, self.now)
        return output

    def _gone(self, storage: int) -> None:
        self.now -= self.sizes.pop(storage)


def id_of(tensor: torch.Tensor) -> int:
    """The same number for all views of a storage."""
    return tensor.untyped_storage()._cdata


def make_pair(tokens: int, width: int = 64):
    """A random target and drafter in the proportions of Qwen3-8B, for prompts of `tokens` tokens."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from dflash_hf import DFlashDraftConfig, DFlashDraftModel

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=36,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=width // 8,
        max_position_embeddings=tokens + 64,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    fields = {"target_layer_ids": [1, 9, 17, 25, 33], "num_hidden_layers": 5, "block_size": 16}
    return target, DFlashDraftModel(DFlashDraftConfig.for_target(config, 511, **fields)).eval()


def resident(field: str) -> int:
    """Resident bytes: `VmRSS` now, `VmHWM` at peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


def measure(tokens: int, chunk: int | None, drafted: bool) -> dict:
    """Peaks of one call of `generate` beyond the loaded models, in bytes, and its CPU seconds."""
    target, draft = make_pair(tokens)
    options = {"max_new_tokens": 8, "do_sample": False, "assistant_model": draft if drafted else None}
    target.generate(torch.randint(2, 500, (1, 70)), **options, prefill_chunk_size=chunk)  # probe, and load kernels
    prompt = torch.randint(2, 500, (1, tokens))
    counted = LiveBytes()
    before = resident("VmRSS")
    start = time.process_time()
    with counted:
        target.generate(prompt, **options, prefill_chunk_size=chunk)
    seconds = time.process_time() - start
    return {"allocated": counted.peak, "resident": resident("VmHWM") - before, "seconds": seconds}


def in_fresh_process(*arguments) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--measure", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 64], help="prefill_chunk_size; 0 is one piece")
    parser.add_argument("--runs", type=int, default=1, help="runs; the median is shown")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    print(
        "| prompt | prefill | allocated MB, plain | drafted | ratio | resident MB, plain | drafted | ratio | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for tokens in arguments.tokens:
        for chunk in arguments.chunks:
            cells = []
            kinds = [
                [in_fresh_process(tokens, chunk or None, k) for _ in range(arguments.runs)] for k in (False, True)
            ]
            for name in ("allocated", "resident"):
                plain, drafted = (statistics.median(run[name] for run in runs) / 2**20 for runs in kinds)
                cells += [f"{plain:.0f}", f"{drafted:.0f}", f"{drafted / plain:.3f}"]
            cells.append(" / ".join(f"{statistics.median(run['seconds'] for run in runs):.0f}" for runs in kinds))
            how = f"chunks of {chunk}" if chunk else "one piece"
            print(f"| {tokens} | {how} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
