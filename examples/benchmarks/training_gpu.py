"""
Training on one GPU at the shapes of Qwen3-8B: tokens per second, model FLOPs utilisation, peak memory.

A random target and a fresh drafter of five layers; `DFlashTrainer` with bf16 autocast over fp32 master weights, AdamW,
blocks of 16 at 512 anchors of a sequence of 3072 tokens, flex attention. No download; about 3 minutes on one H200.

    python examples/benchmarks/training_gpu.py [--loss ce|dpace|kl] [--attention flex|dense] [--head NAME]
    python examples/benchmarks/training_gpu.py --tiny        # the same code on a CPU, in seconds
    python examples/benchmarks/training_gpu.py --tiny --length 32768 [--checkpointing]    # results/long_texts.md

On a CPU, seconds are those of the processor, and peak memory is that of the tensors that steps make, without the
weights that were there before. The tiny shapes have the ratios of Qwen3-8B at a sixteenth of its width: a tensor of
hidden states there is 16 times as large.

Model FLOPs of a step, counting a multiply-add as two and no recomputation:

    target    2 * P_run * S + attention                    the layers up to the last feature, forward only
    drafter   3 * (2 * P_block * A*B + 2 * P_context * S + attention)
              P_block: the layers; P_context: fc and the layers' k_proj and v_proj; forward and twice that backward
    head      (1 + 1) * 2 * H * V * (counted slots)        forward, and backward to its input: its weights are frozen
    attention 4 * heads * head_dim * (pairs of a query and a visible key), in each layer

Tokens are those of the sequences, S each; block tokens are A*B. MFU = FLOPs / second / peak (dense bf16, TFLOP/s:
989 for H100 and H200; otherwise pass --peak-tflops).
"""

import argparse
import json
import statistics
import tempfile
import time
import weakref
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.training.block_mask import block_mask
from dflash_hf.training.head_presets import head_presets


RESULTS = Path(__file__).parent / "results"
QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


class Clock(TrainerCallback):
    """Seconds of each optimizer step, on a CPU those of the processor."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = []
        self.start = 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() if self.device.type == "cuda" else time.process_time()

    def on_step_begin(self, *args, **kwargs):
        self.start = self.now()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(self.now() - self.start)


class Alive(TorchDispatchMode):
    """Bytes of the tensors that are made while it is active and still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = 0
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage not in self.storages:
                self.storages.add(storage)
                self.change(storage.nbytes())
                weakref.finalize(storage, self.change, -storage.nbytes())
        return output

    def change(self, count: int) -> None:
        self.bytes += count
        self.peak = max(self.peak, self.bytes)


def flops_of_step(target, draft, batch, counted: int) -> dict[str, float]:
    """Model FLOPs of one step on `batch`; see the top of this file."""
    rows, length = batch["input_ids"].shape
    config = target.config
    size = draft.config
    queries = batch["anchors"].numel() * size.block_size
    run = target.model.layers[: max(size.target_layer_ids) + 1]
    causal_pairs = rows * length * (length + 1) / 2
    per_pair = 4 * config.num_attention_heads * config.head_dim
    visible_pairs = sum(
        block_mask(batch["anchors"][i : i + 1], batch["attention_mask"][i : i + 1], size.block_size).sum().item()
        for i in range(rows)
    )
    draft_pair = 4 * size.num_attention_heads * size.head_dim * len(draft.layers)
    block = sum(p.numel() for p in draft.layers.parameters() if p.dim() == 2)
    context = draft.fc.weight.numel()
    context += sum(m.weight.numel() for a in draft.layers for m in (a.self_attn.k_proj, a.self_attn.v_proj))
    matrices = sum(p.numel() for p in run.parameters() if p.dim() == 2)
    return {
        "target": 2 * matrices * rows * length + per_pair * causal_pairs * len(run),
        "drafter": 3 * (2 * block * queries + 2 * context * rows * length + draft_pair * visible_pairs),
        "head": 4 * config.hidden_size * config.vocab_size * counted,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, also for a CPU")
    parser.add_argument("--rows", type=int, default=1, help="sequences per step")
    parser.add_argument("--steps", type=int, default=12, help="timed steps, after 3 of warm-up on a GPU")
    parser.add_argument("--loss", default="ce", choices=["ce", "dpace", "kl"])
    parser.add_argument("--attention", default="auto", choices=["auto", "flex", "dense"])
    parser.add_argument("--head", choices=sorted(head_presets()), help="a token head, as in dflash train")
    parser.add_argument("--chunk", type=int, default=1024, help="rows of logits at a time")
    parser.add_argument("--checkpointing", action="store_true", help="recompute the drafter's activations")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="peak of the device, dense bf16")
    parser.add_argument("--length", type=int, default=3072, help="tokens of a sequence")
    parser.add_argument("--anchors", type=int, default=512, help="blocks of a sequence")
    parser.add_argument("--save", action="store_true", help="write results/training_gpu.json")
    return parser.parse_args(arguments)


def measure(arguments: argparse.Namespace) -> dict:
    """Train for some steps. Returns setting and figures, as they are printed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = TINY if arguments.tiny else QWEN3_8B
    length = arguments.length
    anchors = arguments.anchors

    # 1. A random target in bf16 on the device, and a fresh drafter in fp32.
    torch.manual_seed(0)
    with torch.device(device):
        target = Qwen3ForCausalLM._from_config(Qwen3Config(**shape), dtype=torch.bfloat16)
        head = head_presets()[arguments.head].draft_config if arguments.head else {}
        config = DFlashDraftConfig.for_target(target.config, shape["vocab_size"] - 1, block_size=16, **head)
        draft = DFlashDraftModel(config)

    # 2. Random rows, one sixth of each a prompt.
    generator = torch.Generator().manual_seed(0)
    mask = [0] * (length // 6) + [1] * (length - length // 6)
    warm_up = 3 if device.type == "cuda" else 0
    steps = arguments.steps + warm_up
    rows = [
        {"input_ids": torch.randint(shape["vocab_size"] - 1, (length,), generator=generator), "loss_mask": mask}
        for _ in range(steps * arguments.rows)
    ]
    clock = Clock(device)
    if arguments.checkpointing:  # renamed in transformers 5.23
        (getattr(draft, "activation_checkpointing_enable", None) or draft.gradient_checkpointing_enable)()
    trainer = DFlashTrainer(
        model=draft,
        target=target,
        args=DFlashTrainingArguments(
            output_dir=str(Path(tempfile.gettempdir(), "dflash-training-gpu")),
            per_device_train_batch_size=arguments.rows,
            max_steps=steps,
            num_anchors=anchors,
            loss_type=arguments.loss,
            loss_chunk_size=arguments.chunk,
            block_attention=arguments.attention,
            bf16=True,
            use_cpu=device.type == "cpu",
            logging_steps=steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows,
        callbacks=[clock],
    )

    # 3. FLOPs of a step, then the steps.
    batch = trainer.data_collator(rows[: arguments.rows])
    trainer.objective.draw_anchors(batch, 0)
    flops = flops_of_step(target, draft, batch, int(trainer.objective.build_blocks(batch).counted.sum()))
    alive = nullcontext() if device.type == "cuda" else Alive()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with alive:
        trainer.train()
    seconds = statistics.median(clock.seconds[warm_up:])
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shapes": "tiny" if arguments.tiny else "Qwen3-8B",
        "rows": arguments.rows,
        "length": length,
        "anchors": anchors,
        "block_size": 16,
        "loss": arguments.loss,
        "head": arguments.head,
        "attention": "flex" if trainer.objective.uses_flex else "dense",
        "checkpointing": arguments.checkpointing,
        "seconds_per_step": seconds,
        "seconds_spread": [min(clock.seconds[warm_up:]), max(clock.seconds[warm_up:])],
        "first_step_seconds": clock.seconds[0],
        "tokens_per_second": arguments.rows * length / seconds,
        "block_tokens_per_second": arguments.rows * anchors * 16 / seconds,
        "tflop_per_step": {part: value / 1e12 for part, value in flops.items()},
        "mfu": sum(flops.values()) / seconds / (arguments.peak_tflops * 1e12),
        "peak_memory_gb": (torch.cuda.max_memory_allocated() if device.type == "cuda" else alive.peak) / 1e9,
    }


def main() -> None:
    arguments = parse()
    result = measure(arguments)
    print(json.dumps(result, indent=1))
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "training_gpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
