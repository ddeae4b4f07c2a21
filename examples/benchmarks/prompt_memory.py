"""
Peak memory of a long prompt with a drafter, as a multiple of the peak without one.

A random target of 14 layers and a drafter of 2 layers that reads 2 of them (about the proportions of published
pairs, 36 and 5), fp32 on the CPU, 8 new tokens. Each figure comes from a fresh process: its resident memory at most,
less that before any model was made. Linux only.

    python examples/benchmarks/prompt_memory.py [--tokens 32768] [--chunk 2048]

Result on 2 cores of an x86 server (torch 2.13.0+cpu, transformers 5.23.0, one thread), `--tokens 8192`: 337 MB plain,
372 MB with a drafter, 1.104 x. With `--chunk 1024`: 277 MB plain, 328 MB with a drafter, 1.183 x.
"""

import argparse
import gc
import subprocess
import sys


def peak(tokens: int, chunk: int | None, drafted: bool) -> float:
    """Megabytes that this process took at most for the models and one call of `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from dflash_hf import DFlashDraftConfig, DFlashDraftModel

    def resident(field: str) -> int:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(field))

    torch.manual_seed(0)
    gc.collect()
    before = resident("VmRSS")
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=14,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=tokens + 64,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    options = {"max_new_tokens": 8, "do_sample": False, "prefill_chunk_size": chunk}
    if drafted:
        fields = {"target_layer_ids": [3, 9], "num_hidden_layers": 2, "block_size": 8}
        options["assistant_model"] = DFlashDraftModel(DFlashDraftConfig.for_target(config, 511, **fields)).eval()
    target.generate(torch.randint(2, 500, (1, tokens)), **options)
    return (resident("VmHWM") - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=None, help="prefill_chunk_size")
    parser.add_argument("--child", choices=("plain", "drafted"))
    arguments = parser.parse_args()
    if arguments.child:
        print(peak(arguments.tokens, arguments.chunk, arguments.child == "drafted"))
        return
    figures = {}
    for kind in ("plain", "drafted"):
        done = subprocess.run([sys.executable, *sys.argv, "--child", kind], capture_output=True, text=True, check=True)
        figures[kind] = float(done.stdout.split()[-1])
    ratio = figures["drafted"] / figures["plain"]
    how = f"prefill_chunk_size={arguments.chunk}" if arguments.chunk else "in one piece"
    print(f"{arguments.tokens} tokens {how}: {figures['plain']:.0f} MB plain, ", end="")
    print(f"{figures['drafted']:.0f} MB with a drafter: {ratio:.3f} x")


if __name__ == "__main__":
    main()
