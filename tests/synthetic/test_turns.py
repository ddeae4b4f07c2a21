"""`dflash regenerate --turns all`: each turn answered anew, tools and others' turns kept, both modes of thinking."""

import json

import pytest
import torch
from support.chat_stand_in import chat_server
from support.tiny_chat import CHATML, END, THINKING, TOOLS, make_tokenizer, save_target
from transformers import AutoModelForCausalLM

from dflash_hf.cli import main
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import ids_of_prompt
from dflash_hf.data.row_layouts import conversation_of
from dflash_hf.data.template import ChatTemplate
from dflash_hf.synthetic.tasks import Response, Task, make_task, output_row, split_turns


pytest.importorskip("datasets")
LENGTH = 8


def chat_message(role, content="", **more):
    return {"role": role, "content": content, **more}


def user(text):
    return chat_message("user", text)


def other(text):
    """An answer of somebody else, which is not learned."""
    return chat_message("assistant", text)


def task_of(row, index=0, every_turn=False):
    return make_task(conversation_of(row, answers=False, ids=False), index, True, every_turn)


CALL = chat_message("assistant", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}])
RESULT = chat_message("tool", "4")
SYSTEM = chat_message("system", "Be kind.")


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([user("a"), other("b")], [[user("a")]]),
        ([user("a"), other("b"), user("c")], [[user("a")], [user("c")]]),
        ([SYSTEM, user("a"), other("b"), user("c"), other("d")], [[SYSTEM, user("a")], [user("c")]]),
        ([user("a"), CALL, RESULT, other("b")], [[user("a"), CALL, RESULT]]),
        ([user("a"), CALL, RESULT, CALL, RESULT, other("b")], [[user("a"), CALL, RESULT, CALL, RESULT]]),
        ([user("a"), CALL], [[user("a")]]),
        ([user("a"), CALL, user("b"), other("c")], [[user("a")], [user("b")]]),
        ([user("a"), other("b"), other("c"), user("d")], [[user("a")], [user("d")]]),
        ([other("Hello."), user("a"), other("b")], [[other("Hello."), user("a")]]),
        ([SYSTEM, other("Hello."), user("a")], [[SYSTEM, other("Hello."), user("a")]]),
    ],
)
def test_turns_split_where_the_target_answers(messages, turns):
    assert split_turns(messages) == turns


def test_json_text_is_read_as_its_messages():
    """Every turn of the rows of a table was taken for the last."""
    messages = [user("a"), other("b"), user("c"), other("d")]
    for every_turn in (True, False):
        expected = task_of({"messages": messages}, every_turn=every_turn)
        assert task_of({"messages": json.dumps(messages)}, every_turn=every_turn) == expected
        assert len(expected.prompts) == 1 + every_turn


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ROWS = [
    {"messages": [user("One"), other("no"), user("Two"), other("no"), user("Three"), other("no")]},
    {"messages": [SYSTEM, user("Call"), CALL, RESULT, other("no"), user("Again")], "tools": [TOOL]},
    {
        "system": "Be kind.",
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "no"},
            {"from": "human", "value": "Bye"},
        ],
    },
    {"prompt": "Alone"},
    *({"messages": [user(f"{i}"), other("no"), user(f"more {i}")]} for i in range(3)),
]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def regenerate(target, data, output, *options):
    options = ("--turns", "all", "--max-new-tokens", LENGTH, *options)
    words = ["regenerate", "--data", data, "--target", target, "--output", output, *options]
    assert main([str(word) for word in words]) == 0
    return sorted(map(json.loads, output.read_text(encoding="utf-8").splitlines()), key=lambda row: row["row"])


def turns_by_generate(target, encoder, row):
    """The turns of a row by `generate`, one after another: messages, and ids of prompt and answer."""
    messages = [{"role": "user", "content": row["prompt"]}] if "prompt" in row else row.get("messages")
    messages = messages or [SYSTEM, user("Hi"), other("no"), user("Bye")]
    messages_so_far = []
    tokens = []
    for turn in split_turns(messages):
        messages_so_far += turn
        kwargs = row.get("chat_template_kwargs", {})
        prompt = ids_of_prompt(encoder, messages_so_far, row.get("tools"), **kwargs)
        output = target.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, suppress_tokens=[259])
        answer = output[0, len(prompt) :].tolist()
        text = encoder.template.tokenizer.decode(answer[: len(answer) - (answer[-1] == END)])
        messages_so_far.append(chat_message("assistant", text))
        tokens.append((prompt, answer))
    return messages_so_far, tokens


@pytest.mark.parametrize("template", [CHATML, TOOLS, THINKING], ids=["chatml", "tools", "thinking"])
def test_every_turn_is_answered_by_the_target(template, data, tmp_path):
    """Its own answers, not those of the data, are what it reads in later turns; and exactly these are learned."""
    folder = save_target(tmp_path / "target", template)
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    encoder = RowEncoder(ChatTemplate(make_tokenizer(template)))
    rows = regenerate(folder, data, tmp_path / "out.jsonl", "--device", "cpu", "--batch-size", 3)
    assert [row["row"] for row in rows] == list(range(len(ROWS)))
    for row, source in zip(rows, ROWS, strict=True):
        messages, tokens = turns_by_generate(target, encoder, source)
        assert row["messages"] == messages and "no" not in [message["content"] for message in messages]
        answered = [row["messages"][i] for i in row["answered"]]
        assert len(answered) == len(tokens) and all(message["role"] == "assistant" for message in answered)
        examples = RowEncoder()(row)
        learned = [
            token for example in examples for token, mask in zip(example["input_ids"], example["loss_mask"]) if mask
        ]
        assert learned == [token for _, answer in tokens for token in answer]
        for prompt, answer in tokens:  # each is learned behind exactly what the target has read
            begins = [
                example
                for example in examples
                if example["input_ids"][: len(prompt) + len(answer)] == [*prompt, *answer]
            ]
            assert begins and begins[0]["loss_mask"][len(prompt) : len(prompt) + len(answer)] == [1] * len(answer)


def test_turns_with_a_common_prefix_share_an_example():
    task = Task(3, [[user("a")], [user("b")], [user("c")]])
    prompts = [[1, 2], [1, 2, 5, 6, 3], [1, 4]]
    answers = [Response(other("x"), "stop", prompt, ids) for prompt, ids in zip(prompts, ([5, 6], [7], [8, 9]))]
    row = output_row(task, answers)
    assert row["input_ids"] == [1, 2, 5, 6, 3, 7, 1, 4, 8, 9] and row["document_ids"] == [0] * 6 + [1] * 4
    assert row["loss_mask"] == [0, 0, 1, 1, 0, 1, 0, 0, 1, 1]
    assert "document_ids" not in output_row(task, answers[:2])
    expected = [{"input_ids": [1, 2, 5, 6, 3, 7], "loss_mask": [0, 0, 1, 1, 0, 1]}]
    assert RowEncoder()(row) == [*expected, {"input_ids": [1, 4, 8, 9], "loss_mask": [0, 0, 1, 1]}]


@pytest.mark.parametrize(
    "changes",
    [{"messages": [user("b")]}, {"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}],
    ids=lambda changes: next(iter(changes)),
)
def test_digest_covers_all_of_a_task(changes):
    """A file of responses to other prompts is not continued."""
    row = {"messages": [user("a")]}
    digests = [task_of(row, number).digest for number, row in enumerate((row, row, {**row, **changes}))]
    assert digests[0] == digests[1] != digests[2]


def test_server_answers_every_turn(data, tmp_path, capsys):
    """What it wrote is learned, a call that was kept is not; a call that nobody runs ends the conversation."""

    def reply(body):
        count = sum(message["role"] == "assistant" for message in body["messages"])
        return CALL if body["messages"][0]["content"] == "One" and count == 1 else f"answer {count}"

    with chat_server(reply) as (url, received):
        rows = regenerate("served", data, tmp_path / "out.jsonl", "--server", url)
    assert len(received) == 2 + 2 + 2 + 1 + 3 * 2
    assert [message["content"] for message in rows[0]["messages"]] == ["One", "answer 0", "Two", ""]
    assert rows[0]["finish_reason"] == ["stop", "tool_calls"]
    assert [message.get("content") for message in rows[1]["messages"]][-3:] == ["answer 1", "Again", "answer 2"]
    assert rows[1]["answered"] == [4, 6] and rows[1]["messages"][2] == CALL
    encoder = RowEncoder(ChatTemplate(make_tokenizer(TOOLS)))
    (example,) = encoder(rows[1])
    mask = example["loss_mask"]
    learned = [i for i in range(len(mask)) if mask[i]]
    text = encoder.template.tokenizer.decode([example["input_ids"][i] for i in learned])
    assert text == "answer 1<|im_end|>answer 2<|im_end|>"
    (cut,) = encoder({**rows[1], "finish_reason": ["length", "stop"]})
    assert sum(cut["loss_mask"]) == sum(mask) - 1


def test_refused_turn_keeps_earlier_answers(data, tmp_path, capsys):
    def reply(body):
        return (400, "too long") if sum(message["content"] == "Yes." for message in body["messages"]) == 2 else "Yes."

    with chat_server(reply) as (url, _):
        rows = regenerate("served", data, tmp_path / "out.jsonl", "--server", url)
    assert [len(row["answered"]) for row in rows] == [2] * 3 + [1] + [2] * 3


def test_one_file_has_both_modes_of_thinking(data, tmp_path, capsys):
    """Drawn by row and seed, saved with the row, and followed by whoever reads it."""
    folder = save_target(tmp_path / "target", THINKING)
    run_options = ("--device", "cpu", "--thinking", 0.5)
    rows = regenerate(folder, data, tmp_path / "out.jsonl", *run_options, "--batch-size", 3)
    modes = [row["chat_template_kwargs"]["enable_thinking"] for row in rows]
    assert 0 < sum(modes) < len(modes)
    repeated = regenerate(folder, data, tmp_path / "more.jsonl", *run_options, "--batch-size", 7)
    assert repeated == rows
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    encoder = RowEncoder(ChatTemplate(make_tokenizer(THINKING)))
    for row, source in zip(rows, ROWS, strict=True):
        messages, _ = turns_by_generate(
            target, encoder, {**source, "chat_template_kwargs": row["chat_template_kwargs"]}
        )
        assert row["messages"] == messages
        # Without the exact ids, `prepare` renders each row in its own mode.
        text = {key: value for key, value in row.items() if key not in ("input_ids", "loss_mask", "document_ids")}
        first_text = encoder.template.tokenizer.decode(encoder(text)[0]["input_ids"])
        assert ("<think>\n\n</think>\n\n" in first_text) or row["chat_template_kwargs"]["enable_thinking"]
    for options, message in (
        (("--target", save_target(tmp_path / "plain")), "--thinking: the chat template has no `enable_thinking`"),
        (("--target", folder, "--seed", 1), "seed=0, not 1"),
    ):
        words = [
            "regenerate",
            "--data",
            data,
            "--output",
            tmp_path / "out.jsonl",
            "--turns",
            "all",
            *run_options,
            *options,
        ]
        assert main([str(word) for word in words]) == 1 and message in capsys.readouterr().err
