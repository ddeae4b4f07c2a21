"""
SmolLM2-135M as a 4-bit GGUF file in llama.cpp, with its bundled drafter and without.

    pip install xllamacpp
    python examples/benchmarks/llama_cpp_speed.py [--prompts 10] [--max-new-tokens 32]

Two servers of one thread each and this package's plain call, bf16 and packed, answer the same held-out chats in turn,
greedily. Times are CPU times of the process, which the servers are part of, prompts included. The last line is JSON:
the speed with the drafter and that of the package over llama.cpp without a drafter, medians of the chats; how many
texts llama.cpp writes the same with and without it; the tokens that a verification commits.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dflash_hf import packed_weights
from dflash_hf.data.sources import load_rows
from dflash_hf.pairs.packaged_targets import SMOLLM2
from dflash_hf.smollm2 import drafter_folder, load_pair


def server(target: Path, draft: Path | None = None):
    """A running `xllamacpp.Server`; it ends with the last reference to it."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(target)
    params.n_ctx = 1024
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if draft:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
        options = params.speculative.draft
        options.mparams.path = str(draft)
        options.n_max = 7
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(params)


def decode(pair, messages: list[dict], max_new_tokens: int) -> float:
    """CPU seconds for a token of the plain call."""
    inputs = pair.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    start = time.process_time()
    output = pair.target.generate(**inputs, assistant_model=pair.draft, max_new_tokens=max_new_tokens, do_sample=False)
    return (time.process_time() - start) / (output.shape[1] - inputs["input_ids"].shape[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chats = Path(__file__).parents[1] / "smollm2-135m-dflash" / "data" / "held_out.jsonl.gz"
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "dflash-smollm2.gguf"
        command = [sys.executable, "-m", "dflash_hf.cli", "convert", drafter_folder(), draft, "--to", "gguf"]
        subprocess.run([*command, "--target", SMOLLM2.gguf(), "--dtype", "f16"], check=True)
        servers = {"alone": server(SMOLLM2.gguf()), "drafted": server(SMOLLM2.gguf(), draft)}
        pair = load_pair("bfloat16")
        speedups: dict[str, list[float]] = {"drafted": [], "package": []}
        accepted = tokens = equal = 0
        with packed_weights(pair.target, pair.draft):
            for row in list(load_rows(str(chats)))[: arguments.prompts]:
                seconds_per_token = {}
                texts = []
                for name, running in servers.items():
                    request = {"messages": row["messages"], "max_tokens": arguments.max_new_tokens, "temperature": 0}
                    start = time.process_time()
                    answer = running.handle_chat_completions(request)
                    length = answer["usage"]["completion_tokens"]
                    seconds_per_token[name] = (time.process_time() - start) / length
                    texts.append(answer["choices"][0]["message"]["content"])
                accepted += answer["timings"]["draft_n_accepted"]
                tokens += length
                equal += texts[0] == texts[1]
                seconds_per_token["package"] = decode(pair, row["messages"], arguments.max_new_tokens)
                for name, values in speedups.items():
                    values.append(seconds_per_token["alone"] / seconds_per_token[name])
    figures = {name: round(statistics.median(values), 3) for name, values in speedups.items()}
    tau = round(tokens / (tokens - accepted), 3)
    print(json.dumps({**figures, "tau": tau, "prompts": arguments.prompts, "equal": equal}), flush=True)


if __name__ == "__main__":
    main()
