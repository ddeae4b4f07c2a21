"""The data of SmolLM2-135M: requests by rules, what is dropped, what is held out, and what lies in the repository."""

import gzip
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from support.pairs import make_target
from support.tiny_chat import CHATML, make_tokenizer

from dflash_hf.data.distinct import DistinctTexts
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.template import ChatTemplate
from dflash_hf.evaluation.sets import GENERATED, generated_rows
from dflash_hf.smollm2 import data_folder


SCRIPTS = Path(__file__).parents[1] / "examples" / "smollm2-135m-data"
TEXT = "The committee has met twice this year. It did not agree on a date, and everybody went home early."


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import make_data
    import request_rules

    yield make_data, request_rules
    for name in ("make_data", *(f"request_{part}" for part in ("rules", "tasks", "texts", "words"))):
        del sys.modules[name]


def rows_of(path):
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("kind", ["chat", "code", "math", "json", "rewrite", "task"])
def test_rules_write_distinct_requests(kind, scripts):
    """Of one seed always the same, hardly any like another, and no rule leaves a gap in its form."""
    if kind == "math":
        pytest.importorskip("reasoning_gym")
    rules = scripts[1]
    texts = [TEXT.replace("twice", f"{i} times") for i in range(300)]
    draw = random.Random(1)
    again = random.Random(1)
    seen = DistinctTexts()
    requests = [rules.by_rules(kind, draw, texts) for _ in range(200)]
    assert requests == [rules.by_rules(kind, again, texts) for _ in range(200)]
    assert sum(map(seen.add, requests)) > 150
    follow_ups = [rules.follow_up(kind, draw) for _ in range(300)]
    requests += [rules.by_rules(kind, draw, texts) for _ in range(0 if kind == "math" else 3000)]  # all forms
    assert not any(re.search(r"\{[a-z]", text) for text in requests + follow_ups)
    assert all(text.strip() for text in requests) and len(set(follow_ups)) > 8


def test_looping_answers_are_recognised(scripts):
    loops = scripts[0].loops
    assert not loops(TEXT) and not loops("Yes.") and not loops("1. Run\n2. Swim\n3. Read\n4. Cook\n5. Sleep\n6. Walk")
    assert loops(TEXT + " And so on and on it goes." * 6)
    assert loops("x = [" + "0, 1, 2, 3, " * 20)
    assert loops("The colour of the sky is blue and " * 8)


def answer(tokenizer, row, messages, text, reason):
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    written = tokenizer(text)["input_ids"] + ([2] if reason == "stop" else [])
    told = [*messages, {"role": "assistant", "content": text}]
    ids = [*asked, *written]
    mask = [0] * len(asked) + [1] * len(written)
    return {"row": row, "messages": told, "finish_reason": reason, "input_ids": ids, "loss_mask": mask}


def test_collected_conversations_are_clean(scripts, tmp_path, capsys):
    """A conversation as far as it went; none that loops or is held out; no answer twice; of other ids, the ids."""
    make_data, _ = scripts
    tokenizer = make_tokenizer(CHATML)
    work = tmp_path / "work"
    out = tmp_path / "out"
    part = work / "part-000"
    published = rows_of(data_folder() / "answers.jsonl.gz")[0]["messages"]
    part.mkdir(parents=True)
    out.mkdir()
    questions = [f"Question {i}?" for i in range(200)]
    held_out = next(question for question in questions if make_data.is_held_out(question))
    trained = [question for question in questions if not make_data.is_held_out(question)][:4]
    first = [[{"role": "user", "content": text}] for text in (*trained, held_out)]
    texts = ["It is one.", "again and again and again " * 9, "It is cut o", "It is odd.", "It is held out."]
    reasons = ["stop", "length", "length", "stop", "stop"]
    answers = []
    for i, (messages, text, reason) in enumerate(zip(first, texts, reasons, strict=True)):
        answers.append(answer(tokenizer, i, messages, text, reason))
    answers[3]["input_ids"][-3] = 7  # what the target wrote is not how its text is read
    second = [
        [*answers[0]["messages"], {"role": "user", "content": "Why?"}],
        [*published, {"role": "assistant", "content": "Before."}, {"role": "user", "content": "Why?"}],
    ]
    make_data.write(part / "1-requests.jsonl", [{"kind": "chat", "messages": messages} for messages in first])
    make_data.write(part / "1-answers.jsonl", answers[::-1])
    make_data.write(part / "2-requests.jsonl", [{"kind": "code", "messages": messages} for messages in second])
    more = [answer(tokenizer, i, messages, f"Because {i}.", "stop") for i, messages in enumerate(second)]
    make_data.write(part / "2-answers.jsonl", more)
    make_data.collect(work, tokenizer, out)
    rows = {row["messages"][0]["content"]: row for row in rows_of(out / "conversations.jsonl.gz")}
    assert list(rows) == [trained[0], *trained[2:], published[0]["content"]]
    assert rows[trained[0]]["messages"] == more[0]["messages"] and rows[published[0]["content"]]["given"] == 2
    assert [row["messages"][0]["content"] for row in rows_of(out / "held_out_conversations.jsonl.gz")] == [held_out]
    assert "conversations: 4 conversations, 5 answers, 3 of several turns" in capsys.readouterr().out
    encoder = RowEncoder(ChatTemplate(tokenizer))
    for i, text in ((2, trained[2]), (3, trained[3])):
        (example,) = encoder(rows[text])
        length = len(answers[i]["input_ids"])
        assert example["input_ids"][:length] == answers[i]["input_ids"]
        assert example["loss_mask"] == answers[i]["loss_mask"] + [0] * (len(example["loss_mask"]) - length)
    (example,) = encoder(rows[trained[0]])
    assert sum(example["loss_mask"]) == sum(sum(row["loss_mask"]) for row in (answers[0], more[0]))
    further = rows[trained[0]] | {"messages": rows[trained[0]]["messages"] * 2}  # it went on elsewhere
    (out / "conversations.jsonl.gz").write_bytes(gzip.compress(json.dumps(further).encode()))
    make_data.collect(work, tokenizer, out)
    assert rows_of(out / "conversations.jsonl.gz")[0] == further


def test_fast_llama_writes_what_generate_writes(monkeypatch):
    """Rows of other lengths, more than fit at once; with a narrow top-p a sample is the likeliest token."""
    monkeypatch.syspath_prepend(SCRIPTS)
    from fast_llama import FastLlama

    target = make_target("llama", tie_word_embeddings=True)
    end = 3
    banned = 9
    prompts = [[5, 8, 13], [7], list(range(10, 24)), [60, 2], [4] * 9]
    expected = []
    for prompt in prompts:
        options = {"eos_token_id": end, "suppress_tokens": [banned], "pad_token_id": 0, "do_sample": False}
        output = target.generate(torch.tensor([prompt]), max_new_tokens=40, **options)
        expected.append(output[0, len(prompt) :].tolist())
    assert len({len(text) for text in expected}) > 1
    fast = FastLlama(target, rows=2, longest=64, eos=end, banned=banned)
    assert fast.answers(prompts, 40) == expected
    assert fast.answers(prompts, 40, top_p=1e-9) == expected


def test_held_out_requests_are_not_trained_on():
    """Nor one that is nearly the same."""
    texts = {"held_out": [], "trained": []}
    for path in data_folder().glob("*.jsonl.gz"):
        requests = [row["messages"][0]["content"] for row in rows_of(path)]
        texts["held_out" if path.name.startswith("held_out") else "trained"] += requests
    seen = DistinctTexts()
    for kind in GENERATED:
        for row in generated_rows(kind, 100):  # what `dflash eval` makes up
            seen.add(row["prompt"])
    assert len(texts["held_out"]) >= 228 and all(seen.add(text) for text in texts["held_out"])
    assert all(seen.add(text) for text in dict.fromkeys(texts["trained"]))
