"""
What SmolLM2-135M's drafter would draft at every token of the target's own answers, and what rounds cost on a device:
recorded once, so that policies for the draft length can be compared without models and without a clock.

    python examples/benchmarks/recorded_rounds.py answers ANSWERS.pt [--prompts 16] [--tokens 64]
    python examples/benchmarks/recorded_rounds.py latencies FILE.json [--dtype float32]

Kinds of text: held-out requests for chat and code, generated ones for JSON and rewriting, and questions in
other languages, each greedily and sampled at T = 1; and chat with a drafter of random weights. Latencies are in CPU
seconds of one thread.
"""

import argparse
import copy
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from cells import read_json_lines
from lookup import DATA, inputs_of
from sizes import TEXTS

from dflash_hf.decoding.acceptance import Block
from dflash_hf.decoding.calibration import HostTree
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.decoding.policies import DraftPolicy
from dflash_hf.decoding.trees import Tree
from dflash_hf.evaluation.sets import GENERATED, conversations
from dflash_hf.smollm2 import load_pair


NODES = 64  # drafted tokens that are recorded at each token
KINDS = ("chat", "code", "json", "rewriting", "foreign")
ROWS = (1, 2, 4, 8)
DRAFTED = (0, 1, 2, 4, 8, 16)  # sizes of rounds that are timed, with a draft
COPIED = (0, 1, 4, 8, 16)  # and without


@dataclass
class Answer:
    """
    The target's answer to a prompt.

    Args:
        prompt (`list[int]`), tokens (`list[int]`): Both texts.
        trees (`list[Tree]`): What would be drafted after each of these tokens but the last.
    """

    prompt: list[int]
    tokens: list[int]
    trees: list[Tree]


class Recording(DraftPolicy):
    """Decodes one token a round, and appends the tree that would be drafted there to `draft.recorded`."""

    def get_candidates(self, state):
        self.call.draft.recorded.append(self.draft_tree(state, NODES))
        return self.no_draft(state)


def conversations_of(kind: str, count: int) -> list[list[dict]]:
    """Requests of a kind of text."""
    if kind == "foreign":
        return TEXTS["foreign"](count)
    if kind in GENERATED:
        return [[{"role": "user", "content": turns[0]}] for turns in conversations(kind, count)]
    requests = []
    for row in read_json_lines(DATA / "held_out.jsonl.gz"):
        if row["kind"] == kind:
            requests.append([message for message in row["messages"] if message["role"] != "assistant"])
    return requests[:count]


def answers_of(pair, draft, kind: str, count: int, tokens: int, sampled: bool) -> list[Answer]:
    """The answers to some requests of a kind, with what is drafted on the way."""
    answers = []
    for number, messages in enumerate(conversations_of(kind, count)):
        inputs = inputs_of(pair, messages)
        draft.recorded = []
        torch.manual_seed(number)
        options = (
            {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {"do_sample": False}
        )
        with mock.patch.object(draft.decoding_config, "policy", Recording):
            output = pair.target.generate(**inputs, assistant_model=draft, max_new_tokens=tokens, **options)
        prompt = inputs["input_ids"][0].tolist()
        answers.append(Answer(prompt, output[0, len(prompt) :].tolist(), draft.recorded))
    return answers


def with_random_weights(draft):
    """A copy of a drafter that has learned nothing."""
    draft = copy.deepcopy(draft)
    torch.manual_seed(0)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    return draft


def record_answers(path: Path, count: int, tokens: int) -> None:
    pair = load_pair("bfloat16")
    packed_weights(pair.target, pair.draft)
    answers = {}
    for sampled in (False, True):
        for kind in KINDS:
            answers[f"{kind}, T = {int(sampled)}"] = answers_of(pair, pair.draft, kind, count, tokens, sampled)
            print(kind, sampled, flush=True)
    answers["random drafter"] = answers_of(pair, with_random_weights(pair.draft), "chat", count, tokens, False)
    torch.save(answers, path)


class Timing(DraftPolicy):
    """Rounds of all sizes in turn; how long each took is appended to `draft.timed`."""

    max_draft = max(DRAFTED)

    def __init__(self, call, drafter):
        super().__init__(call, drafter)
        sizes = [(size, True) for size in DRAFTED] + [(size, False) for size in COPIED]
        self.sizes = itertools.cycle(sizes)
        self.began = 0.0
        self.size_now = (0, False)

    def get_candidates(self, state):
        self.began = time.thread_time()
        self.size_now = next(self.sizes)
        size, drafted = self.size_now
        if drafted:
            candidates = self.draft_tree(state, max(DRAFTED)).first(size + 1)
            is_path = HostTree.of(candidates).is_path(size + 1)
            return Block(candidates.tokens) if is_path else candidates
        return self.copied(state, state.anchors[:, None].expand(-1, size).tolist())

    def update_candidate_strategy(self, state, candidates, acceptance):
        self.call.draft.timed.append((self.size_now, time.thread_time() - self.began))


def record_latencies(path: Path, dtype: str, tokens: int) -> None:
    """Median seconds of a round, for each number of rows: `{rows: [[size, drafted, seconds], ...]}`."""
    pair = load_pair(dtype)
    packed_weights(pair.target, pair.draft)
    latencies = {}
    messages = conversations_of("chat", 1)[0]
    for rows in ROWS:
        inputs = {name: value.expand(rows, -1) for name, value in inputs_of(pair, messages).items()}
        pair.draft.timed = []
        with mock.patch.object(pair.draft.decoding_config, "policy", Timing):
            pair.target.generate(**inputs, assistant_model=pair.draft, max_new_tokens=tokens, do_sample=False)
        seconds: dict = {}
        for size, spent in pair.draft.timed[3:]:
            seconds.setdefault(size, []).append(spent)
        latencies[rows] = [[*size, statistics.median(spent)] for size, spent in sorted(seconds.items())]
        plain = {tuple(size): spent for *size, spent in latencies[rows]}[0, False]
        print(rows, [(*size, round(spent / plain, 2)) for *size, spent in latencies[rows]], flush=True)
    path.write_text(json.dumps(latencies) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("answers", "latencies"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--prompts", type=int, default=16, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.part == "answers":
        record_answers(arguments.path, arguments.prompts, arguments.tokens)
    else:
        record_latencies(arguments.path, arguments.dtype, arguments.tokens)


if __name__ == "__main__":
    main()
