"""
Would successors that the target named before pay as further nodes of a draft tree (Graft's refill)? SmolLM2-135M.

    python examples/benchmarks/successors.py [--prompts 4] [--only code]

Every verification tells the target's own token after each drafted one, rejected ones included. Here the latest is kept
for each token, and after every round that drafted it is counted what these would have added: a node below each
verified one, where its estimated gain exceeds its cost at the speed of the text, as in the tree itself; how often such
a successor is right is learned on the way. The text is decoded as usual, copies included. *Ratio*: speed of the rounds
that draft, with these nodes over without, from their tokens and the latency model.
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
        self.table: dict[int, int] = {}
        self.hits = 3.0
        self.tries = 10.0
        self.totals: Counter = Counter()
        accept = GenerationState.accept
        learn = AdaptiveLength.update_candidate_strategy

        def accept_and_note(state, draft, logits):
            self.choices = logits[0].argmax(-1).tolist()
            return accept(state, draft, logits)

        def learn_and_count(policy, state, candidates, acceptance):
            if policy.round.tree is not None:
                self.count(policy, candidates, acceptance, int(state.anchors[0]))
            self.table.update(zip(candidates.tokens[0].tolist(), self.choices, strict=True))
            learn(policy, state, candidates, acceptance)

        GenerationState.accept = accept_and_note
        AdaptiveLength.update_candidate_strategy = learn_and_count

    def count(self, policy, draft, acceptance, bonus: int) -> None:
        """After a round that drafted: its tokens and cost, and what further nodes would have added to both."""
        latencies = policy._latencies(0, drafted=True)
        committed = acceptance.counts[0]
        tokens = draft.tokens[0].tolist()
        parents = policy.round.tree.parents[0]
        probabilities = policy.round.tree.probabilities[0]
        last = acceptance.paths[0][-1]
        path_chances = [1.0] * len(tokens)
        covered = [0.0] * len(tokens)
        for node in range(1, len(tokens)):
            chance = policy.statistics.calibration(probabilities[node])
            path_chances[node] = path_chances[parents[node]] * chance
            covered[parents[node]] += chance
        children = {(parents[node], tokens[node]) for node in range(1, len(tokens))}
        candidates = [
            (path_chances[node] * max(1 - covered[node], 0) * self.hits / self.tries, node, self.table[token])
            for node, token in enumerate(tokens)
            if token in self.table and (node, self.table[token]) not in children
        ]
        size = len(tokens) - 1
        self.totals.update(rounds=1, tokens=committed, cost=policy.round.latency)
        for gain, node, successor in sorted(candidates, reverse=True):
            hit = node == last and successor == bonus
            self.tries += node == last
            self.hits += hit
            if size + 1 < len(latencies):
                more = latencies[size + 1] - latencies[size]
                if gain > policy.statistics.speed * more:
                    size += 1
                    self.totals.update(nodes=1, hits=hit, more=more)


def line(name: str, totals: Counter) -> str:
    rounds = totals["rounds"]
    before = totals["tokens"] / totals["cost"]
    after = (totals["tokens"] + totals["hits"]) / (totals["cost"] + totals["more"])
    nodes = totals["nodes"] / rounds
    hits = totals["hits"] / rounds
    return f"| {name} | {rounds} | {nodes:.2f} | {hits:.3f} | {after / before:.3f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    arguments = parser.parse_args()
    options = SimpleNamespace(new_tokens=192, temperature=0)
    torch.set_num_threads(1)
    pair = load_pair("bfloat16")
    successors = Successors()
    total = Counter()
    packed_weights(pair.target, pair.draft)
    print("| | rounds | nodes | hits | ratio |\n|---|---|---|---|---|")
    for kind, rows in lookup.prompts(arguments.prompts).items():
        if arguments.only not in kind:
            continue
        successors.totals = Counter()
        for row in rows:
            successors.table = {}
            lookup.decode(pair, pair.draft, lookup.inputs_of(pair, row), options)
        if successors.totals["rounds"]:
            print(line(kind, successors.totals), flush=True)
        total += successors.totals
    print(line("all", total))


if __name__ == "__main__":
    main()
