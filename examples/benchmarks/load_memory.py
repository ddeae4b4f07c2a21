"""
Peak memory of loading a drafter, as a multiple of its size.

Writes a synthetic drafter of about 2 GB (bf16, the published Qwen3-8B sizes), loads it in a fresh process, reads every
weight, and gets that process's peak resident memory from the kernel. Linux only.

    python examples/benchmarks/load_memory.py [--gigabytes 2.1] [--layout z-lab|muse] [--folder FOLDER]

Result on 2 cores of an x86 server without GPU (23 GB of memory, torch 2.13.0+cpu, transformers 5.23.0, one thread),
2.097 GB of bf16 weights: 1.006 x its size, for either layout. Loaded in fp32 (4.195 GB) it is 1.502 x: besides the
weights (1.02 x), the count includes mapped pages of the bf16 file, which the kernel may drop at any time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file


CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "dtype": "bfloat16",
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
}
LOAD = """
import sys, time

def memory(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))

import torch
from dflash_hf import DFlashDraftModel
before = memory("VmRSS")
start = time.perf_counter()
draft = DFlashDraftModel.from_pretrained(sys.argv[1], dtype=sys.argv[2])
seconds = time.perf_counter() - start
size = sum(p.numel() * p.element_size() for p in draft.parameters())
for parameter in draft.parameters():  # upstream maps the file: its pages become resident when they are first read
    parameter.view(-1)[::64].sum()
print("RESULT", before, memory("VmHWM"), memory("VmRSS"), memory("RssAnon"), size, seconds)
"""


def write_drafter(folder: Path, gigabytes: float, layout: str) -> int:
    """Write a synthetic drafter with enough layers for a size; returns its bytes."""
    hidden = CONFIG["hidden_size"]
    inner = CONFIG["intermediate_size"]
    layer = {
        "self_attn.q_proj.weight": (4096, hidden),
        "self_attn.k_proj.weight": (1024, hidden),
        "self_attn.v_proj.weight": (1024, hidden),
        "self_attn.o_proj.weight": (hidden, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    names = {"fc": "fc", "hidden_norm": "hidden_norm"}
    file = {**CONFIG, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16}
    if layout == "muse":
        names = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
        file |= {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    shapes = {f"{names['fc']}.weight": (hidden, 5 * hidden), f"{names['hidden_norm']}.weight": (hidden,)}
    shapes["norm.weight"] = (hidden,)
    per_layer = 2 * sum(torch.Size(shape).numel() for shape in layer.values())
    layers = max(round((gigabytes * 1e9 - 2 * 5 * hidden**2) / per_layer), 1)
    for i in range(layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    file |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    (folder / "config.json").write_text(json.dumps(file))
    tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() * 2 for tensor in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.1)
    parser.add_argument("--layout", choices=["z-lab", "muse"], default="z-lab")
    parser.add_argument("--dtype", default="auto", help="dtype to load in; the file is bf16")
    parser.add_argument("--folder", type=Path, help="where to write the drafter; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        call = f"write_drafter(Path({folder!r}), {arguments.gigabytes}, {arguments.layout!r})"
        write = f"from load_memory import Path, write_drafter; {call}"
        subprocess.run([sys.executable, "-c", write], cwd=Path(__file__).parent, check=True)
        start = time.perf_counter()
        load = [sys.executable, "-c", LOAD, folder, arguments.dtype]
        done = subprocess.run(load, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    before, peak, after, anonymous, size, seconds = map(float, line.split()[1:])
    print(f"size of the drafter    {size / 1e9:8.3f} GB, layout {arguments.layout}, dtype {arguments.dtype}")
    print(f"before loading         {before / 1e9:8.3f} GB resident (interpreter, torch, transformers)")
    print(f"peak, all weights read   {peak / 1e9:7.3f} GB, {(peak - before) / size:.3f} x its size above that")
    print(f"after loading          {after / 1e9:8.3f} GB, of which {anonymous / 1e9:.3f} GB not backed by a file")
    print(f"loading took           {seconds:8.2f} s, the process {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
