"""
Everything switched on, beside the best way to run the target alone and beside the peers, all in one run.

    python examples/benchmarks/everything.py --peers-draft SHARED --reference CHECKOUT [--prompts 12] [--runs 3]

SmolLM2-135M-Instruct in bf16 on one thread, CPU time. Every method answers the demo's requests, greedily and in
turn. The peers cannot read the bundled drafter's head: SHARED is a drafter with the target's own head
(`dflash convert --share-head`). CHECKOUT is one of z-lab/dflash. The first calls, which compile, are not timed.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import torch
from published import Reference
from transformers import AutoModel
from transformers.generation import CompileConfig

from dflash_hf.conversion.convert import convert
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.demo.run import demo_prompts
from dflash_hf.evaluation.measure import with_decoding_config
from dflash_hf.smollm2 import load_pair
from dflash_hf.targets.generation import generate_one


WARM_UP = 8  # passes over the requests: a size is compiled after 48 rounds of its own


def compiled() -> CompileConfig:
    """Compilation of a static cache's forwards, which upstream only does on GPUs by itself."""
    config = CompileConfig(mode="default")
    config._compile_all_devices = True
    return config


def methods_of(pair, native) -> dict[str, tuple[bool, dict]]:
    """Whether models are packed before, and the arguments of `generate`, by method; the plain call packs by itself."""
    static = {"cache_implementation": "static", "compile_config": compiled()}
    peer = {"assistant_model": native, "speculation_type": "dflash"}
    return {
        "target": (False, {}),
        "target, packed": (True, {}),
        "target, packed, compiled, static cache": (True, static),
        "plain call": (False, {"assistant_model": with_decoding_config(pair.draft)}),
        "plain call, packed=False": (False, {"assistant_model": with_decoding_config(pair.draft, packed=False)}),
        "packed before, compile=True": (True, {"assistant_model": with_decoding_config(pair.draft, compile=True)}),
        "transformers' own": (False, peer),
        "transformers' own, packed": (True, peer),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-draft", required=True)
    parser.add_argument("--reference", required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = load_pair("bfloat16")
    prompts = [prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), row) for row in demo_prompts(arguments.prompts)]
    length = arguments.max_new_tokens

    with tempfile.TemporaryDirectory() as scratch:
        folder = convert(arguments.peers_draft, Path(scratch) / "native", to="native")
        native = AutoModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
        pair.target.save_pretrained(Path(scratch) / "target")
        reference = Reference(arguments.reference, scratch, arguments.peers_draft, pair.target, length)
        methods = methods_of(pair, native)
        other = psutil.Process(reference.process.pid)

        def clock() -> float:
            return time.process_time() + sum(other.cpu_times()[:2])

        def seconds_per_token(name: str, prompt) -> float:
            packed, options = methods.get(name, (False, {}))
            with packed_weights(pair.target, pair.draft) if packed else contextlib.nullcontext():
                start = clock()
                if name == "z-lab's loop":
                    new = len(reference(prompt))
                else:
                    sequences = generate_one(
                        pair.target, prompt, max_new_tokens=length, do_sample=False, **options
                    ).sequences
                    new = sequences.shape[1] - len(prompt)
                return (clock() - start) / new

        names = [*methods, "z-lab's loop"]
        for name in names:
            start = time.perf_counter()
            for prompt in prompts * (WARM_UP if "compile" in name else 1):
                seconds_per_token(name, prompt)
            print(f"{name}: warm after {time.perf_counter() - start:.0f} s", flush=True)
        seconds_of: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in names}
        for run in range(arguments.runs):
            for index, prompt in enumerate(prompts):
                shift = (run + index) % len(names)
                for name in names[shift:] + names[:shift]:
                    seconds_of[name][index].append(seconds_per_token(name, prompt))
        reference.close()

    medians = {name: [statistics.median(seconds) for seconds in by_prompt] for name, by_prompt in seconds_of.items()}

    def over(base: str, name: str) -> float:
        return statistics.geometric_mean(a / b for a, b in zip(medians[base], medians[name], strict=True))

    best_alone = max([name for name in names if name.startswith("target")], key=lambda name: over("target", name))
    peers = [name for name in names if not name.startswith(("target", "plain", "packed"))]
    best_peer = max(peers, key=lambda name: over("target", name))
    print(f"| | tokens/s | over the target | over {best_alone} | over {best_peer} |\n|---|---|---|---|---|")
    for name in names:
        speed = 1 / statistics.geometric_mean(medians[name])
        print(
            f"| {name} | {speed:.0f} | "
            + " | ".join(f"{over(base, name):.2f}x" for base in ("target", best_alone, best_peer))
            + " |"
        )


if __name__ == "__main__":
    main()
