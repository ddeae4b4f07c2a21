"""
Would successors that the target named before pay as further nodes of a draft tree (Graft's refill)? SmolLM2-135M.

    python examples/benchmarks/successors.py [--prompts 4] [--only code]

Every verification tells the target's own token after each drafted one, rejected ones included. Here the latest is kept
for each token, and after every round that drafted it is counted what these would have added: a node below each
verified one, where its estimated gain exceeds its cost at the speed of the text, as in the tree itself; how often such
a successor is right is learned on the way. The text is decoded as usual, copies included. *Ratio*: speed of the rounds
that draft, with these nodes over without, from their tokens and the costs in the cost table.
"""

import argparse
from collections import Counter
from types import SimpleNamespace

import lookup
import torch

from dflash_hf.decoding.adaptive import AdaptiveLength
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.decoding.state import GenerationState
from dflash_hf.smollm2 import load_pair


class Successors:
    """Watches the rounds of a call."""

    def __init__(self):
        self.table, self.right, self.known, self.found = {}, 3.0, 10.0, Counter()
        accept, learn = GenerationState.accept, AdaptiveLength.update_candidate_strategy

        def accepted(text, draft, logits):
            self.draft, self.said = draft, logits[0].argmax(-1).tolist()
            return accept(text, draft, logits)

        def learned(strategy, text, candidates, verdict):
            if strategy.round.tree is not None:
                self.count(strategy, self.draft, verdict, int(text.last[0]))
            self.table.update(zip(self.draft.tokens[0].tolist(), self.said, strict=True))
            learn(strategy, text, candidates, verdict)

        GenerationState.accept, AdaptiveLength.update_candidate_strategy = accepted, learned

    def count(self, strategy, draft, verdict, bonus: int) -> None:
        """After a round that drafted: its tokens and cost, and what further nodes would have added to both."""
        plan, throughput, found, committed = strategy.round, strategy.throughput, self.found, verdict.counts[0]
        costs = strategy.costs.curve(0, strategy.max_draft)
        tokens, parents, chances = draft.tokens[0].tolist(), plan.tree.parents[0].tolist(), plan.chances[0]
        last = committed - 1 if verdict.path is None else int(verdict.path[0, committed - 1])
        likely, covered = [1.0] * len(tokens), [0.0] * len(tokens)
        for node in range(1, len(tokens)):
            chance = throughput.reliability(chances[node])
            likely[node] = likely[parents[node]] * chance
            covered[parents[node]] += chance
        children = {(parents[node], tokens[node]) for node in range(1, len(tokens))}
        candidates = [
            (likely[node] * max(1 - covered[node], 0) * self.right / self.known, node, self.table[token])
            for node, token in enumerate(tokens)
            if token in self.table and (node, self.table[token]) not in children
        ]
        size = len(tokens) - 1
        found.update(rounds=1, tokens=committed, cost=plan.cost)
        for gain, node, successor in sorted(candidates, reverse=True):
            hit = node == last and successor == bonus
            self.known, self.right = self.known + (node == last), self.right + hit
            if size + 1 < len(costs):
                more = costs[size + 1] - costs[size]
                if gain > throughput.speed * more:
                    size += 1
                    found.update(nodes=1, hits=hit, more=more)


def line(name: str, found: Counter) -> str:
    before, rounds = found["tokens"] / found["cost"], found["rounds"]
    after = (found["tokens"] + found["hits"]) / (found["cost"] + found["more"])
    return (
        f"| {name} | {rounds} | {found['nodes'] / rounds:.2f} | {found['hits'] / rounds:.3f} | {after / before:.3f} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    arguments = parser.parse_args()
    options = SimpleNamespace(new_tokens=192, temperature=0)
    torch.set_num_threads(1)
    pair, successors, total = load_pair("bfloat16"), Successors(), Counter()
    packed_weights(pair.target, pair.draft)
    print("| | rounds | nodes | hits | ratio |\n|---|---|---|---|---|")
    for kind, rows in lookup.prompts(arguments.prompts).items():
        if arguments.only not in kind:
            continue
        successors.found = Counter()
        for row in rows:
            successors.table = {}
            lookup.decode(pair, pair.draft, lookup.inputs_of(pair, row), options)
        if successors.found["rounds"]:
            print(line(kind, successors.found), flush=True)
        total += successors.found
    print(line("all", total))


if __name__ == "__main__":
    main()
