"""
The gain of draft trees by number of nodes: tokens per verification and speed on the pair of `make demo`.

    OMP_NUM_THREADS=1 python examples/benchmarks/tree_budget.py [--nodes 5 11 15 23 31 63] [--prompts 40]

Every budget, blocks and the target alone alternate on every held-out request, greedy, fp32, in eager rounds. Speeds
are relative to blocks in the same run.
"""

import argparse
import statistics
from itertools import chain
from pathlib import Path

import torch

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.demo.run import demo_prompts
from dflash_hf.evaluation.measure import evaluate, with_decoding_config
from dflash_hf.evaluation.methods import TARGET_ALONE, WHOLE_BLOCKS
from dflash_hf.smollm2 import load_pair


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[5, 8, 11, 15, 23, 31, 63])
    parser.add_argument("--prompts", type=int, default=40, help="held-out requests; default: %(default)s")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    pair = load_pair("float32")
    prompts = [prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), row) for row in demo_prompts(arguments.prompts)]
    lengths: dict[int, dict[tuple, list[int]]] = {nodes: {} for nodes in arguments.nodes}  # by prompt

    def way(nodes: int):
        tree = with_decoding_config(pair.draft, tree_nodes=nodes)

        def decode(prompt: list[int]) -> list[int]:
            ids = torch.tensor([prompt])
            output = pair.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=256,
                do_sample=False,
                return_dict_in_generate=True,
                assistant_model=tree,
            )
            lengths[nodes][tuple(prompt)] = output.acceptance_lengths[0]
            return output.sequences[0, len(prompt) :].tolist()

        return decode

    tree_methods = {f"{nodes} nodes": way(nodes) for nodes in arguments.nodes}
    report = evaluate(
        pair.target, pair.draft, prompts, 256, arguments.runs, (TARGET_ALONE, WHOLE_BLOCKS), other_methods=tree_methods
    )
    blocks = report.methods[WHOLE_BLOCKS]
    lines = [
        f"The pair of `make demo`, {arguments.prompts} held-out requests, greedy, fp32, eager; blocks of "
        f"{report.block_size}; medians of {arguments.runs} alternating runs; {report.setting['hardware']}, "
        f"{report.setting['threads']} thread(s), torch {report.setting['torch']}",
        "",
        "| | tokens per verification | verified tokens | speed over blocks | equal |",
        "|---|---|---|---|---|",
        f"| block | {report.tau:.2f} | {report.block_size} | 1.00x | {blocks.equal}/{len(prompts)} |",
    ]
    for nodes in arguments.nodes:
        method = report.methods[f"{nodes} nodes"]
        tau = statistics.fmean(chain.from_iterable(lengths[nodes].values()))
        ratio = statistics.median(own / base for own, base in zip(method.runs, blocks.runs, strict=True))
        lines.append(f"| tree of {nodes} | {tau:.2f} | {nodes + 1} | {ratio:.2f}x | {method.equal}/{len(prompts)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "tree_budget.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
