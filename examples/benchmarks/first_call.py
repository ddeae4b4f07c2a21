"""
The first call of a fresh process on a machine that knows nothing yet, with the drafter and without: SmolLM2-135M, both
models packed, one thread, CPU time; the probe of the target and the exploration of sizes included.

    python examples/benchmarks/first_call.py [--processes 5] [--max-new-tokens 48]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time


QUESTION = "Explain why the sky is blue."


def calls(drafted: bool, max_new_tokens: int) -> list[float]:
    """CPU seconds of a process's first calls."""
    import torch

    from dflash_hf.decoding.packing import packed_weights
    from dflash_hf.smollm2 import load_pair

    torch.set_num_threads(1)
    pair = load_pair("bfloat16")
    seconds = []
    packed_weights(pair.target, pair.draft)
    chat = [{"role": "user", "content": QUESTION}]
    inputs = pair.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    for _ in range(3):
        start = time.thread_time()
        pair.target.generate(**inputs, **options, assistant_model=pair.draft if drafted else None)
        seconds.append(time.thread_time() - start)
    return seconds


def in_a_process(drafted: bool, arguments) -> list[float]:
    command = [sys.executable, __file__, "--drafted" if drafted else "--plain"]
    command += ["--max-new-tokens", str(arguments.max_new_tokens)]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "DFLASH_HF_HOME": home, "OMP_NUM_THREADS": "1"}
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return [float(number) for number in output.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5, help="of each kind, in turn")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    for name in ("--drafted", "--plain"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drafted or arguments.plain:
        print(*calls(arguments.drafted, arguments.max_new_tokens))
        return
    ratios = []
    for _ in range(arguments.processes):
        plain = in_a_process(False, arguments)
        drafted = in_a_process(True, arguments)
        ratios.append([with_drafter / target_only for with_drafter, target_only in zip(drafted, plain, strict=True)])
        print(f"plain {plain[0]:.2f} s, with the drafter {drafted[0]:.2f} s: {ratios[-1][0]:.2f}x", flush=True)
    for name, values in zip(("first", "second", "third"), zip(*ratios, strict=True), strict=True):
        print(f"{name} call {statistics.median(values):.2f}x ({min(values):.2f}-{max(values):.2f}) of plain")


if __name__ == "__main__":
    main()
