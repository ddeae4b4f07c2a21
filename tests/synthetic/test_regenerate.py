"""`dflash regenerate`: the target's own responses, each once, whatever happens in between."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import torch
from support.chat_stand_in import chat_server
from support.tiny_chat import CHATML, END, TOOLS, make_tokenizer, save_target
from transformers import AutoModelForCausalLM

from dflash_hf.cli import main
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.row_layouts import conversation_of
from dflash_hf.data.sources import load_rows
from dflash_hf.data.template import ChatTemplate
from dflash_hf.synthetic.response_file import ResponseFile


pytest.importorskip("datasets")
QUESTIONS = [f"{'Why ' * (1 + i % 4)}{i}?" for i in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


def write(folder):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path):
    return write(tmp_path)


@pytest.fixture(scope="module")
def begun(folder, tmp_path_factory):
    """A folder with three of the rows."""
    path = tmp_path_factory.mktemp("begun")
    words = ["regenerate", "--data", write(path), "--target", folder, "--output", path / "out.jsonl", "--limit", 3]
    assert main([*map(str, words), "--max-new-tokens", "8", *HERE]) == 0
    return path


def regenerate(capsys, data, target, output, *options):
    options = ["--max-new-tokens", "8", *map(str, options)]
    code = main(["regenerate", "--data", str(data), "--target", str(target), "--output", str(output), *options])
    printed = capsys.readouterr()
    print(printed.err)  # for the report of a failure
    return code, printed.out, (printed.err.strip().splitlines() or [""])[-1]


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check_complete(path):
    rows = rows_of(path)
    assert sorted(row["row"] for row in rows) == list(range(len(QUESTIONS)))
    for row in rows:
        assert row["messages"][0] == {"role": "user", "content": QUESTIONS[row["row"]]}
    return {row["row"]: row for row in rows}


HERE = ("--device", "cpu", "--batch-size", "5")


def test_responses_equal_the_targets_own(folder, data, tmp_path, capsys, monkeypatch):
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = make_tokenizer()
    outputs = []
    packed = []
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    mask = int(target.generate(prompt, max_new_tokens=1)[0, -1])  # which it would write
    monkeypatch.setattr("dflash_hf.pairs.packing_choice.packed_weights", lambda *models: packed.append(len(models)))
    for name, options in (("quietly", ("-q",)), ("packed", ("--packed",))):
        output = tmp_path / f"{name}.jsonl"
        code, out, _ = regenerate(capsys, data, folder, output, *HERE, "--mask-token-id", mask, *options)
        assert code == 0 and "0 of 12 rows are finished" in out and "12 of 12 rows are in" in out
        outputs.append(check_complete(output))
    assert outputs[0] == outputs[1] and packed == [1]
    lengths = set()
    for index, row in outputs[0].items():
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            target_only = target.generate(torch.tensor([prompt]), max_new_tokens=8, suppress_tokens=[mask])[0].tolist()
        assert row["input_ids"] == target_only, index
        assert row["loss_mask"] == [0] * len(prompt) + [1] * (len(target_only) - len(prompt))
        assert row["finish_reason"] == ("stop" if target_only[-1] == END else "length")
        assert RowEncoder()(row) == [{"input_ids": target_only, "loss_mask": row["loss_mask"]}]
        lengths.add(len(prompt))
    assert len(lengths) > 3


def test_raw_prompts_skip_the_chat_template(folder, data, tmp_path, capsys):
    output = tmp_path / "raw.jsonl"
    tokenizer = make_tokenizer(CHATML)
    options = ("--raw", "--temperature", "1.5", "--top-p", "0.9", "--limit", "4")
    assert regenerate(capsys, data, folder, output, *HERE, *options)[0] == 0
    assert sorted(row["prompt"] for row in rows_of(output)) == sorted(QUESTIONS[:4])
    for row in rows_of(output):
        start = tokenizer(row["prompt"])["input_ids"]
        assert row["input_ids"][: len(start)] == start and row["loss_mask"].index(1) == len(start)


@pytest.mark.parametrize("rows", [(), ("--batch-size", 5)])
def test_answers_end_with_the_context(rows, tmp_path, capsys):
    """Learned positions ended each run and its resumes; one broken row of ten megabytes took the memory of all."""
    data = tmp_path / "long.jsonl"
    output = tmp_path / "out.jsonl"
    folder = save_target(tmp_path / "target", family="gpt2", n_positions=64)
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("1?", "a" * 60, "2?")), encoding="utf-8")
    code, out, _ = regenerate(capsys, data, folder, output, "--device", "cpu", "--max-new-tokens", 999, *rows)
    reason = "its prompt fills all 64 positions of the target"
    assert code == 1 and f"  1 rows were refused, and the same command tries them again: {reason}" in out
    ends = {row["row"]: (row["finish_reason"], len(row["input_ids"])) for row in rows_of(output)}
    assert ends == {0: ("length", 64), 2: ("length", 64)}


def talk(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


@pytest.fixture
def chats(tmp_path):
    """Conversations of one to four turns, some without a last answer."""
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": talk(*[f"{question} {i}" for i in range(1 + n % 7)])} for n, question in enumerate(QUESTIONS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("turns", ["last", "all"])
def test_ten_interruptions_lose_and_repeat_nothing(turns, folder, chats, tmp_path, capsys, monkeypatch):
    """Samples too are those of a single run, whatever decodes beside them: cut at any byte, gone on with any batch."""
    options = ("--device", "cpu", "--temperature", "1.2", "--seed", "3", "--turns", turns)
    single_run = tmp_path / "whole.jsonl"
    torn = tmp_path / "torn.jsonl"
    assert regenerate(capsys, chats, folder, single_run, *options, "--batch-size", "5")[0] == 0
    generator = random.Random(0)
    append = ResponseFile.write_row
    interruptions = []

    def tear(self, row):
        before = self.path.stat().st_size
        append(self, row)
        if len(interruptions) < 10 and generator.random() < 0.6:
            interruptions.append(generator.randrange(before, self.path.stat().st_size + 1))
            self.file.truncate(interruptions[-1])
            raise KeyboardInterrupt

    monkeypatch.setattr(ResponseFile, "write_row", tear)
    code = 130
    finished = b""
    repaired = 0
    while code == 130:
        code, out, _ = regenerate(capsys, chats, folder, torn, *options, "--batch-size", generator.randrange(1, 12))
        assert torn.read_bytes().startswith(finished)
        finished = torn.read_bytes().rpartition(b"\n")[0]
        repaired += "removed an incomplete" in out
    assert code == 0 and len(interruptions) == 10 and repaired > 5
    rows, expected = ({row["row"]: row for row in rows_of(path)} for path in (torn, single_run))
    assert rows == expected and set(rows) == set(range(12)) and len(rows_of(torn)) == 12


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (("--temperature", "0.5"), "temperature=None, not 0.5"),
        (("--template-args", '{"enable_thinking": false}'), "chat_template_kwargs={}, not {'enable_thinking': False}"),
        (("--turns", "all"), "turns='last', not 'all'"),
        (("--seed", "1"), "seed=0, not 1"),
        (("--dtype", "bfloat16"), "dtype='torch.float32', not 'torch.bfloat16'"),
        (("--mask-token-id", "270"), "mask_token_id=259, not 270"),
        (("--chat-template", "other.jinja"), "template="),
        (("--target", "weights"), "weights={"),
        (("--target", "tokenizer"), "tokenizer="),
    ],
)
def test_other_settings_are_not_mixed(options, difference, begun, folder, data, tmp_path, capsys, monkeypatch):
    """Rows 0-3 in one format and 4-7 in another, without a word."""
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "out.jsonl"
    template = tmp_path / "other.jinja"
    template.write_text(CHATML.replace("<|im_end|>", "<|im_end|>\n"), encoding="utf-8")
    for path in begun.glob("out.jsonl*"):
        shutil.copy(path, tmp_path)
    before = output.read_bytes()
    if options[0] == "--target":
        save_target(tmp_path / options[1], **({"seed": 5} if options[1] == "weights" else {}))
    if options[1] == "tokenizer":
        tokenizer = make_tokenizer()
        tokenizer.add_tokens(["more"])
        tokenizer.save_pretrained(tmp_path / "tokenizer")
    code, _, error = regenerate(capsys, data, folder, output, *HERE, *options)
    assert code == 1 and "out.jsonl was started with " in error and difference in error
    assert "use the same settings, or choose another output" in error and output.read_bytes() == before


def sampling_copy(folder, target, **settings):
    """A copy of a target whose generation config samples."""
    copied = shutil.copytree(folder, target, dirs_exist_ok=True)
    path = copied / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "do_sample": True, **settings}), encoding="utf-8")
    return copied


def test_top_p_joins_the_targets_own_temperature(folder, data, tmp_path, capsys):
    """It was refused without `--temperature`, which replaces the target's."""
    target = sampling_copy(folder, tmp_path / "target", temperature=3.0)
    texts = []
    for name, options in (("own", ()), ("narrow", ("--top-p", "0.01"))):
        code, _, error = regenerate(capsys, data, target, tmp_path / f"{name}.jsonl", *HERE, *options)
        assert code == 0, error
        texts.append([row["messages"][-1]["content"] for row in rows_of(tmp_path / f"{name}.jsonl")])
    assert regenerate(capsys, data, folder, tmp_path / "greedy.jsonl", *HERE)[0] == 0
    greedy = [row["messages"][-1]["content"] for row in rows_of(tmp_path / "greedy.jsonl")]
    assert sorted(texts[1]) == sorted(greedy) != sorted(texts[0])


def test_changed_generation_config_is_noticed(folder, data, tmp_path, capsys):
    """The rows of a file were sampled with temperature 0.6, those after an interruption with 3."""
    output = tmp_path / "out.jsonl"
    target = sampling_copy(folder, tmp_path / "target", temperature=0.6)
    assert regenerate(capsys, data, target, output, *HERE, "--limit", "3")[0] == 0
    before = output.read_bytes()
    sampling_copy(folder, target, temperature=3.0)
    code, _, error = regenerate(capsys, data, target, output, *HERE)
    assert code == 1 and "was started with generation_config={" in error and "'temperature': 0.6" in error
    assert output.read_bytes() == before
    sampling_copy(folder, target, temperature=0.6)
    assert regenerate(capsys, data, target, output, *HERE)[0] == 0


def test_other_files_are_refused_and_kept(folder, data, tmp_path, capsys):
    """A file of one unfinished line was taken for a response that a kill had cut off, and removed."""
    output = tmp_path / "out.jsonl"
    notes = tmp_path / "out.jsonl.settings.json"
    assert regenerate(capsys, data, folder, output, *HERE, "--limit", "3")[0] == 0
    lines = output.read_text(encoding="utf-8").splitlines(keepends=True)
    same_settings = notes.read_text(encoding="utf-8")
    data.write_text(data.read_text(encoding="utf-8").replace("Why 0?", "Who 0?"), encoding="utf-8")
    for text, settings, message in (
        (lines, same_settings, "Row 0 of"),
        (lines, same_settings, "the data has changed; choose another output"),
        (lines[:2] + lines[:1], same_settings, "is in an earlier line"),
        ([lines[0], "nonsense\n", lines[1]], same_settings, "Line 2 of"),
        (['{"row": 0, "text": "Hi"}\n'], same_settings, "is not a row of such a file (KeyError('messages'))"),
        (lines, "{", "out.jsonl.settings.json is not JSON"),
        (['{"minified": true}'], None, "out.jsonl is not a file of such rows; choose another output"),
    ):
        output.write_text("".join(text), encoding="utf-8")
        notes.unlink() if settings is None else notes.write_text(settings, encoding="utf-8")
        code, _, error = regenerate(capsys, data, folder, output, *HERE)
        assert code == 1 and message in error
        assert output.read_text(encoding="utf-8") == "".join(text) and notes.exists() == (settings is not None)


def test_moved_files_are_continued(folder, data, tmp_path, capsys):
    """Rows before 0.2 as well: they have no digest of their question."""
    output = tmp_path / "out.jsonl"
    assert regenerate(capsys, data, folder, output, *HERE, "--limit", "3")[0] == 0
    rows = [{"given": 1, **row} for row in rows_of(output)]
    del rows[0]["question"], rows[0]["answered"]
    output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    moved = data.rename(tmp_path / "moved.jsonl")
    copied_target = shutil.copytree(folder, tmp_path / "again")
    template = tmp_path / "same.jinja"
    template.write_text(CHATML, encoding="utf-8")
    options = ("--dtype", "float32", "--chat-template", template)
    code, out, error = regenerate(capsys, moved, copied_target, output, *HERE, *options)
    assert code == 0 and "3 of 12 rows are finished" in out, error
    check_complete(output)


# ------------------------------------------------------------------------------------------------------------ a server


@pytest.fixture
def quick(monkeypatch):
    """Waits take no time."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.0)


def test_answers_of_a_server_stay_unchanged(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with chat_server(lambda body: f"You asked {body['messages'][0]['content']}") as (url, received):
        options = ["--server", url + "/v1", "--temperature", "0", "--template-args", '{"enable_thinking": false}']
        options += ["--mask-token-id", "16"]
        assert regenerate(capsys, data, "served", tmp_path / "out.jsonl", *options)[0] == 0
    for index, row in check_complete(tmp_path / "out.jsonl").items():
        assert row["messages"][1] == {"role": "assistant", "content": f"You asked {QUESTIONS[index]}"}
    assert len(received) == 12
    body = received[0]
    assert (body["path"], body["key"], body["model"]) == ("/v1/chat/completions", "Bearer secret", "served")
    assert (body["max_tokens"], body["temperature"]) == (8, 0.0)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["logit_bias"] == {"16": -100}


@pytest.mark.parametrize("options", [(), ("--temperature", "0.7"), ("--temperature", "0")])
def test_each_row_has_its_own_seed(options, data, tmp_path, capsys):
    """With one seed for all, every answer followed the same noise."""
    output = tmp_path / "out.jsonl"
    sampling = ("--seed", "3", *options)
    with chat_server(lambda body: "Yes.") as (url, received):
        for limit in (5, 12):  # interrupted, and continued
            words = ("--server", url, "--limit", limit, *sampling)
            assert regenerate(capsys, data, "served", output, *words)[0] == 0
        assert regenerate(capsys, data, "served", tmp_path / "again.jsonl", "--server", url, *sampling)[0] == 0
    seeds = [
        {body["messages"][0]["content"]: body.get("seed") for body in requests}
        for requests in (received[:12], received[12:])
    ]
    assert seeds[0] == seeds[1] and len(seeds[0]) == 12
    if options and options[1] == "0":
        assert set(seeds[0].values()) == {None}
    else:
        assert len(set(seeds[0].values())) == 12 and all(0 <= seed < 2**31 for seed in seeds[0].values())


def tool(name, **properties):
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def call(name, arguments):
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


# Tables merge what rows have in common: tools of different kinds, mappings with different keys, none at all.
TOOL_ROWS = [
    {"messages": [{"role": "user", "content": "Weather?"}], "tools": [tool("weather", city={"type": "string"})]},
    {"messages": [{"role": "user", "content": "Sum?"}], "tools": [tool("sum", of={"type": "array", "minItems": 2})]},
    {
        "messages": [
            {"role": "user", "content": "Both?"},
            {"role": "assistant", "content": "", "tool_calls": [call("weather", {"city": "Rome"})]},
            {"role": "tool", "content": "rain"},
        ],
        "tools": [tool("weather", city={"type": "string"}), tool("none")],
    },
    {"messages": [{"role": "user", "content": "Hi"}]},
]
TOOL_ANSWERS = {  # as served, and as the template writes it
    "Weather?": (
        {"role": "assistant", "content": None, "tool_calls": [call("weather", '{"city": "Oslo"}')]},
        '<call>weather(city="Oslo";)',
    ),
    "Sum?": (
        {"role": "assistant", "content": "So:", "tool_calls": [call("sum", '{"of": [1, 2], "exact": true}')]},
        "So:<call>sum(of=[1, 2];exact=true;)",
    ),
    "Both?": ({"role": "assistant", "content": "Take an umbrella."}, "Take an umbrella."),
    "Hi": ({"role": "assistant", "content": None, "tool_calls": [call("x", "{}")]}, "<call>x()"),
}


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_calls_are_learned_as_served(as_text, tmp_path, capsys):
    """`tools` was sent but not written, and an answer that calls one became an empty text."""
    data = tmp_path / "tools.jsonl"
    output = tmp_path / "out.jsonl"
    encoder = RowEncoder(ChatTemplate(make_tokenizer(TOOLS)))
    rows = [{**row, "tools": json.dumps(row["tools"])} if as_text and "tools" in row else row for row in TOOL_ROWS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with chat_server(lambda body: TOOL_ANSWERS[body["messages"][0]["content"]][0]) as (url, received):
        for _ in range(2):  # the prompts are known again
            assert regenerate(capsys, data, "served", output, "--server", url, "--concurrency", "1")[0] == 0
    assert [body.get("tools") for body in received] == [row.get("tools") for row in TOOL_ROWS]
    assert received[2]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    for row, source in zip(load_rows(output), TOOL_ROWS, strict=True):
        ((ids, mask, _),) = encoder.encode(conversation_of(row))
        prompt = encoder.template.tokenizer.decode(ids[mask == 0])
        answer = encoder.template.tokenizer.decode(ids[mask == 1])
        assert answer == TOOL_ANSWERS[source["messages"][0]["content"]][1] + "<|im_end|>"
        tools = [f"system\n{json.dumps(source['tools'])}<|im_end|>\n"] if "tools" in source else []
        assert prompt.startswith(
            "<|im_start|>" + "<|im_start|>".join([*tools, f"user\n{row['messages'][0]['content']}"])
        )
        assert ('<call>weather(city="Rome";)' in prompt) == (len(source["messages"]) > 1)


def test_busy_server_is_asked_again(data, tmp_path, capsys, quick):
    attempts = dict.fromkeys(QUESTIONS, 0)

    def reply(body):
        question = body["messages"][0]["content"]
        attempts[question] += 1
        return {1: None, 2: (503, "loading"), 3: "Yes."}[attempts[question]]

    with chat_server(reply) as (url, received):
        assert regenerate(capsys, data, "served", tmp_path / "out.jsonl", "--server", url)[0] == 0
    check_complete(tmp_path / "out.jsonl")
    assert len(received) == 36


def test_failed_server_leaves_finished_rows(data, tmp_path, capsys, quick):
    answered = []
    output = tmp_path / "out.jsonl"
    options = ("--concurrency", "1", "--server")

    def reply(body):
        answered.append(body)
        return "Yes." if len(answered) <= 5 else None

    with chat_server(reply) as (url, _):
        code, _, error = regenerate(capsys, data, "served", output, *options, url)
    assert code == 1 and f"{url} does not answer" in error
    assert "tried 6 times; is the server still running?" in error
    assert len(rows_of(output)) == 5
    code, _, error = regenerate(capsys, data, "served", output, *options, url)  # now there is nobody
    assert code == 1 and "Connection refused" in error
    with chat_server(lambda body: "Yes.") as (url, received):
        assert regenerate(capsys, data, "served", output, *options, url)[0] == 0
    check_complete(output)
    assert len(received) == 7


def test_slow_answers_are_left_out(data, tmp_path, capsys, monkeypatch):
    """One request above `--timeout` ended the run."""
    monkeypatch.setattr("dflash_hf.synthetic.chat_client.RETRIES", 0)
    slow = set(QUESTIONS[3:5])
    over = threading.Event()
    output = tmp_path / "out.jsonl"

    def reply(body):
        if body["messages"][0]["content"] in slow:
            over.wait(60)
        return "Yes."

    with chat_server(reply) as (url, received):
        options = ("--server", url, "--timeout", "3", "--concurrency", "8")
        code, out, _ = regenerate(capsys, data, "served", output, *options)
        assert code == 1 and "10 of 12 rows are in" in out
        reason = f"{url} gives no answer within 3 seconds, tried 1 times; raise timeout"
        assert f"  2 rows were refused, and the same command tries them again: {reason}" in out
        slow.update(QUESTIONS)
        code, _, error = regenerate(capsys, data, "served", tmp_path / "hung.jsonl", *options)
        assert code == 1 and f"8 consecutive rows: {url} gives no answer within 3 seconds" in error
        slow.clear()
        over.set()
        assert regenerate(capsys, data, "served", output, *options)[0] == 0
    check_complete(output)


NO_CHOICES = ("null", '{"message": null}', '{"message": "Yes."}')


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, "no key"), "answers 401: no key; set OPENAI_API_KEY."),
        ((404, "no model"), "does it serve this model there?"),
        ((501, "<html>"), "answers 501: <html>; tried 6 times; see its log."),
        *(
            ((200, text), "did not return a chat completion")
            for text in ("<html>", "{}", "[" * 10**5, *(f'{{"choices": [{choice}]}}' for choice in NO_CHOICES))
        ),
        *(((status, "http://elsewhere"), "it redirects to http://elsewhere") for status in (301, 302, 303, 307)),
    ],
)
def test_refusing_server_ends_the_run(answer, message, data, tmp_path, capsys, quick):
    """No redirect is followed: it would take the key to another host."""
    with chat_server(lambda body: answer) as (url, received):
        output = tmp_path / "out.jsonl"
        code, _, error = regenerate(capsys, data, "served", output, "--server", url, "--concurrency", "1")
    assert code == 1 and message in error and error.startswith("dflash regenerate: ")
    attempts = Counter(body["messages"][0]["content"] for body in received)
    assert max(attempts.values()) == (6 if answer[0] == 501 else 1)


def test_password_is_sent_and_never_shown(data, tmp_path, capsys, quick):
    with chat_server(lambda body: (401, "who?")) as (url, received):
        address = url.replace("http://", "http://ann:s%20cret@")
        code, out, error = regenerate(capsys, data, "served", tmp_path / "out.jsonl", "--server", address)
    assert code == 1 and "cret" not in out + error and received[0]["key"] == "Basic YW5uOnMgY3JldA=="
    code, out, error = regenerate(capsys, data, "served", tmp_path / "out.jsonl", "--server", "ann:secret@host")
    assert code == 1 and "server='***' must be an address" in error


def test_refused_row_is_left_out(data, tmp_path, capsys):
    def reply(body):
        return (400, "too long") if body["messages"][0]["content"] == QUESTIONS[3] else "Yes."

    with chat_server(reply) as (url, _):
        code, out, _ = regenerate(capsys, data, "served", tmp_path / "out.jsonl", "--server", url)
    assert code == 1 and "11 of 12 rows are in" in out
    assert "  1 rows were refused, and the same command tries them again: the server answers 400: too long" in out
    assert sorted(row["row"] for row in rows_of(tmp_path / "out.jsonl")) == [0, 1, 2, *range(4, 12)]
    with chat_server(lambda body: "Yes.") as (url, _):
        code, out, _ = regenerate(capsys, data, "served", tmp_path / "out.jsonl", "--server", url, "--limit", "4")
    assert code == 0 and "4 of 4 rows are in" in out  # not 12 of 4


def test_lone_surrogate_of_an_answer_is_written(data, tmp_path, capsys):
    """It was a `UnicodeEncodeError`, and all answers after it were lost."""
    output = tmp_path / "out.jsonl"
    with chat_server(lambda body: "Yes \ud83d.") as (url, _):
        assert regenerate(capsys, data, "served", output, "--server", url)[0] == 0
    assert {row["messages"][-1]["content"] for row in check_complete(output).values()} == {"Yes ?."}
    assert len(load_rows(output)) == len(QUESTIONS)


ELSEWHERE = ("--server", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--server", "localhost:8000"), 1, "--server localhost:8000 must be an address"),
        ((*ELSEWHERE, "--raw"), 2, "leave out --raw"),
        ((*ELSEWHERE, "--no-packed"), 2, "leave out --no-packed"),
        ((*ELSEWHERE, "--packed", "--dtype", "fp16", "--batch-size", "4"), 2, "out --packed, --batch-size, --dtype"),
        (("--temperature", "-1"), 2, "argument --temperature: -1 must be 0"),
        (("--top-p", "2"), 2, "argument --top-p: 2 must be above 0"),
        (("--mask-token-id", "-7"), 2, "argument --mask-token-id: -7 is not a token id"),
        (("--temperature", "0", "--top-p", "0.9"), 2, "--top-p 0.9 has no effect in greedy decoding; add"),
        (("--top-p", "0.5"), 2, "--top-p 0.5 has no effect: the target's generation config is greedy; add --temper"),
        (("--target", "absent"), 1, "there is no such folder"),
        (("--output", "prompts.jsonl"), 2, "is the data itself, which would be overwritten; choose another file"),
        (("--data", "text.jsonl"), 1, "None of 1 rows of text.jsonl has a prompt: 1 because it has no column to read"),
        (("--data", "null.jsonl"), 1, "None of 2 rows of null.jsonl has a prompt: 1 because all of its columns are"),
        (("--data", "odd.jsonl"), 1, "Row 0 of odd.jsonl: `prompt` is 3; give a list of messages with `role` and"),
    ],
)
def test_errors_are_one_line(options, status, message, folder, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = data.read_bytes()
    rows = {"text": '{"text": "Say 1"}', "null": '{"messages": null}\n{"messages": []}', "odd": '{"prompt": 3}'}
    for name, text in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{text}\n", encoding="utf-8")
    try:
        code, _, error = regenerate(capsys, data, folder, tmp_path / "out.jsonl", *options)
    except SystemExit as stopped:
        code = stopped.code
        error = capsys.readouterr().err
    assert code == status and message in error
    assert data.read_bytes() == before and not list(tmp_path.glob("prompts.jsonl.*"))
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes()


def command(*arguments):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, "-m", "dflash_hf.cli", *map(str, arguments)]
    return subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_killed_run_continues(data, tmp_path, capsys):
    """A real SIGKILL, a second process at the same time, and a third that finishes."""
    output = tmp_path / "out.jsonl"

    def reply(body):
        time.sleep(0.05)
        return "Yes."

    with chat_server(reply) as (url, received):
        options = ("--server", url, "--concurrency", 1, "--max-new-tokens", 8)
        process = command("regenerate", "--data", data, "--target", "served", "--output", output, *options)
        try:
            deadline = time.monotonic() + 120
            while not output.exists() or output.read_bytes().count(b"\n") < 3:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            code, _, error = regenerate(capsys, data, "served", output, *options)
            assert code == 1 and "is being written by another process" in error
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        finished = output.read_bytes()
        assert 3 <= finished.count(b"\n") < 12
        assert regenerate(capsys, data, "served", output, *options)[0] == 0
    check_complete(output)
    assert output.read_bytes().startswith(finished[: finished.rindex(b"\n") + 1])
