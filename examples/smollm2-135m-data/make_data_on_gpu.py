"""
As `make_data.py`, many times as fast, on a GPU: all conversations of a round answer their next turn together.

    python examples/smollm2-135m-data/make_data_on_gpu.py WORK --requests 34000 --asked 16000 --turns 2

Writes `conversations.jsonl` and `held_out_conversations.jsonl` into WORK, rows as in `smollm2-135m-dflash/data`, whose
requests, and requests like them, do not come again.
"""

import argparse
import json
import random
from collections.abc import Sequence
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path

import make_data
import torch
from fast_llama import FastLlama
from request_rules import by_rules, follow_up
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf.data.distinct import DistinctTexts, quality_issue
from dflash_hf.evaluation.sets import GENERATED, generated_rows
from dflash_hf.smollm2 import data_folder, smollm2_folder
from dflash_hf.synthetic.magpie import PromptSettings, prefix_ids, user_turn


RULES = cycle(["rewrite"] * 10 + ["task"] * 9 + ["chat"] * 5 + ["code"] * 3 + ["math"] * 3 + ["json"] * 2)
ASKED = PromptSettings(kinds="chat,chat,task,chat,code,chat,rewrite,math,chat,task,json".split(","))
MASK = 16
END = 2
NEW = 128
LONGEST = 768


class Maker:
    """Makes rows, with a pool of processes for what is done to each text."""

    def __init__(self, rows: int, processes: int, seed: int):
        folder = smollm2_folder()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.seed = seed
        self.turn = user_turn(self.tokenizer, ASKED)
        global _maker
        _maker = self  # forked processes find it there
        self.pool = get_context("fork").Pool(processes)  # before CUDA starts
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        torch.manual_seed(seed)
        self.target = FastLlama(model, rows, LONGEST, END, MASK)
        self.finished = {}

    def each(self, name: str, jobs: Sequence) -> list:
        """What a method of this class makes of each of `jobs`."""
        return self.pool.map(_call, [(name, job) for job in jobs], chunksize=200)

    def first(self, by_rule: int, asked: int) -> list[dict]:
        """Conversations of one request: of the rules, and of the target in the user's place."""
        draw = random.Random(f"first {self.seed}")
        seen = DistinctTexts()
        requests = []
        old = [row for path in sorted(data_folder().glob("*.jsonl.gz")) for row in make_data.rows_of(path)]
        for row in old:
            seen.add(row["messages"][0]["content"])
        for row in (row for kind in GENERATED for row in generated_rows(kind, 100)):
            seen.add(row["prompt"])
        texts = [row["messages"][-1]["content"] for row in old if row["messages"][-1]["role"] == "assistant"]
        texts = [text for text in texts if 80 < len(text) < 500 and "```" not in text and not make_data.loops(text)]
        for _, kind in zip(range(20 * by_rule), RULES, strict=False):
            request = by_rules(kind, draw, texts)
            if len(requests) < by_rule and len(request) < 700 and seen.add(request):
                requests.append((kind, request))
        starts = self.each("start", range(asked))
        written = self.target.answers(starts, 64, top_p=0.95) if asked else []
        requests += [
            kind_and_request
            for kind_and_request in self.each("request", list(enumerate(written)))
            if kind_and_request and seen.add(kind_and_request[1])
        ]
        return [{"kind": kind, "messages": [{"role": "user", "content": text}]} for kind, text in requests]

    def start(self, number: int) -> list[int]:
        """The ids after which the target writes a request."""
        return prefix_ids(self.tokenizer, self.turn, ASKED.kind_and_beginning(number)[1])

    def request(self, job) -> tuple[str, str] | None:
        """Kind and text of a request that the target wrote, if it is one."""
        kind, begin = ASKED.kind_and_beginning(job[0])
        ids = job[1]
        if ids[-1] != END:
            return None
        start = self.start(job[0])
        text = self.tokenizer.decode([*start, *ids[:-1]])[len(self.tokenizer.decode(start)) :]
        text = (begin + text).strip()
        return None if quality_issue(text) or len(text) >= 700 or "<|" in text else (kind, text)

    def answered(self, rows: list[dict]) -> list[dict]:
        """Rows with the target's next answer, those that can go on; all that are good are kept."""
        prompts = self.each("prompt", [row["messages"] for row in rows])
        fit = [i for i, ids in enumerate(prompts) if len(ids) + NEW <= LONGEST - 64]
        answers = self.target.answers([prompts[i] for i in fit], NEW)
        going = []
        jobs = [(rows[i]["messages"], prompts[i], ids) for i, ids in zip(fit, answers, strict=True)]
        for i, ids, (text, good, same) in zip(fit, answers, self.each("judged", jobs), strict=True):
            kind = rows[i]["kind"]
            asked = rows[i]["messages"]
            ended = ids[-1] == END
            row = {"kind": kind, "messages": asked, "finish_reason": "stop" if ended else "length"}
            if good and not same and len(asked) == 1:  # what is learned is the text, so these ids are kept
                self.finished[asked[0]["content"]] = {**row, "response_ids": ids}
            elif good and same:
                row["messages"] = [*asked, {"role": "assistant", "content": text}]
                self.finished[asked[0]["content"]] = row
                going += [{"kind": kind, "messages": row["messages"]}] if ended else []
        return going

    def prompt(self, messages) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def judged(self, job) -> tuple[str, bool, bool]:
        """An answer's text, whether it says something without end, and whether the tokenizer reads it as its ids."""
        messages, prompt, ids = job
        text = self.tokenizer.decode(ids[:-1] if ids[-1] == END else ids)
        row = [*messages, {"role": "assistant", "content": text}]
        again = self.tokenizer.apply_chat_template(row, return_dict=False)
        whole = [*prompt, *ids]
        return text, bool(text.strip()) and not make_data.loops(text), again[: len(whole)] == whole

    def go_on(self, rows: list[dict], turn: int) -> list[dict]:
        """Conversations with the user's next turn: by rules, and in every third by the target in the user's place."""
        draw = random.Random(f"{turn} {self.seed}")
        short = [
            row for row in rows if sum(len(message["content"]) for message in row["messages"]) < make_data.LONGEST
        ]
        rows = [row for row in short if draw.random() < make_data.GOES_ON[turn]]
        chosen = [row for row in rows if draw.random() < 0.33]
        texts = self.target.answers(self.each("said", [row["messages"] for row in chosen]), 40, top_p=0.95)
        questions = {}
        for row, ids in zip(chosen, texts, strict=True):
            text = self.tokenizer.decode(ids[:-1]).strip()
            before = [message["content"] for message in row["messages"]]
            if ids[-1] == END and 12 <= len(text) <= 250 and "<|" not in text and text not in before:
                questions[row["messages"][0]["content"]] = text
        for row in rows:
            text = questions.get(row["messages"][0]["content"]) or follow_up(row["kind"], draw)
            row["messages"] = [*row["messages"], {"role": "user", "content": text}]
        return rows

    def said(self, messages) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False) + "<|im_start|>user\n"
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _call(job):
    return getattr(_maker, job[0])(job[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--requests", type=int, default=34000, help="by rules")
    parser.add_argument("--asked", type=int, default=16000, help="samples of the target in the user's place")
    parser.add_argument("--turns", type=int, default=2, choices=range(1, make_data.TURNS + 1))
    parser.add_argument("--rows", type=int, default=2048, help="rows that decode together: 36 GB of memory")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seed", type=int, default=24, help="another for more data")
    arguments = parser.parse_args()
    maker = Maker(arguments.rows, arguments.processes, arguments.seed)
    rows = maker.answered(maker.first(arguments.requests, arguments.asked))
    for turn in range(2, arguments.turns + 1):
        rows = maker.answered(maker.go_on(rows, turn))
    maker.pool.terminate()
    sets: dict[str, list[dict]] = {"conversations": [], "held_out_conversations": []}
    for request, row in maker.finished.items():
        sets["held_out_conversations" if make_data.is_held_out(request) else "conversations"].append(row)
    for name, rows in sets.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (arguments.work / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{name}: {len(rows)} conversations, {sum((len(row['messages']) + 1) // 2 for row in rows)} answers")


if __name__ == "__main__":
    main()
