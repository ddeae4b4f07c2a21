"""What clients of `dflash serve` ask for beyond texts, by OpenAI's own client: plain, streamed, several at once."""

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from support.serving import MAX_TOKENS, chat_ids
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available


if not is_serve_available():
    pytest.skip("serving needs `pip install '.[serving]'`", allow_module_level=True)
needs_grammars = pytest.mark.skipif(not importlib.util.find_spec("xgrammar"), reason="needs xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cd"]}, "age": {"enum": [4, 56]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROPERTIES = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "go", "parameters": PROPERTIES}}
NAMED = {"type": "function", "function": {"name": "go"}}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@dataclass
class Answer:
    """An answer, in whatever form it came."""

    text: str = ""
    reason: str | None = None
    calls: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)  # token, its log-probability, the likeliest
    usage: object = None

    def add(self, choice, part) -> None:
        """A message, or a piece of it."""
        self.text += (part.content if hasattr(part, "content") else part.text) or ""
        self.reason = choice.finish_reason or self.reason
        self.calls += [
            (call.function.name, call.function.arguments) for call in getattr(part, "tool_calls", None) or []
        ]
        logprobs = choice.logprobs
        if logprobs is None:
            return
        if hasattr(part, "content"):
            likeliest = [{top.token: top.logprob for top in entry.top_logprobs} for entry in logprobs.content]
            self.logprobs += zip(
                [entry.token for entry in logprobs.content],
                [entry.logprob for entry in logprobs.content],
                likeliest,
            )
        else:
            self.logprobs += zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)


def asked(server, prompt: str, stream: bool, raw: bool = False, leave: int | None = None, **options) -> Answer:
    """Ask for a chat or, with `raw`, a completion; leave after so many pieces of its stream."""
    options = {"model": server.model, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": stream, **options}
    options |= {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    create = (server.client.completions if raw else server.client.chat.completions).create
    answer = Answer()
    if not stream:
        completion = create(**options)
        choice = completion.choices[0]
        answer.add(choice, choice if raw else choice.message)
        answer.usage = completion.usage
        return answer
    with create(stream_options={"include_usage": True}, **options) as pieces:
        for number, piece in enumerate(pieces):
            if number == leave:
                return answer
            for choice in piece.choices:
                answer.add(choice, choice if raw else choice.delta)
            answer.usage = piece.usage or answer.usage
    return answer


FORMS = {
    "schema": {"response_format": AS_SCHEMA},
    "schema, completion": {"raw": True, "extra_body": {"response_format": AS_SCHEMA}},
    "object": {"response_format": {"type": "json_object"}},
    "named tool": {"tools": [TOOL], "tool_choice": NAMED},
    "any tool": {"tools": [TOOL], "tool_choice": "required"},
    "cut call": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 28},
    "text": {"response_format": {"type": "text"}},
    "no tool": {"tools": [TOOL], "tool_choice": "none"},
    "log-probabilities": {"logprobs": True, "top_logprobs": 3},
    "log-probabilities, completion": {"logprobs": 3, "raw": True},
    "stop": {"logprobs": True},
}


@pytest.mark.parametrize("form", [pytest.param(form, marks=needs_grammars) for form in [*FORMS][:6]] + [*FORMS][6:])
def test_streamed_answers_equal_plain_ones(form, server, folder, own):
    more = dict(FORMS[form])
    if form == "stop":
        more["stop"] = ["~", own["Say 1"][10:12]]
    plain, streamed = (asked(server, "Say 1", stream, **more) for stream in (False, True))
    count = plain.usage.completion_tokens
    assert (plain.text, plain.reason, plain.calls) == (streamed.text, streamed.reason, streamed.calls)
    assert count == streamed.usage.completion_tokens and len(plain.logprobs) in (0, count)
    assert [token for token, _, _ in plain.logprobs] == [token for token, _, _ in streamed.logprobs]
    if "schema" in form:
        value = json.loads(plain.text)
        assert value["name"] in ("ab", "cd") and value["age"] in (4, 56) and plain.reason == "stop"
    elif form == "object":
        assert plain.text.startswith("{") and plain.reason == "length"
    elif "tool" in form and form != "no tool":
        ((name, arguments),) = plain.calls
        assert name == "go" and json.loads(arguments)["n"] in (1, 2) and plain.reason == "tool_calls"
    elif form == "cut call":
        ((name, arguments),) = plain.calls
        assert (
            name == "go"
            and '{"n":1}'.startswith(arguments.replace("2", "1"))
            and plain.reason == "length"
            and not plain.text
        )
    elif form == "stop":
        assert plain.text == own["Say 1"][:10] and plain.reason == "stop" and count == 12
    elif "completion" not in form:
        assert plain.text == own["Say 1"]
    if plain.logprobs:
        check_logprobs(folder, plain, raw="completion" in form)


def check_logprobs(folder, answer: Answer, raw: bool) -> None:
    """Against a forward over the whole text."""
    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Say 1"}]
    prompt = tokenizer("Say 1", return_tensors="pt") if raw else chat_ids(tokenizer, messages)
    ids = tokenizer.convert_tokens_to_ids([token for token, _, _ in answer.logprobs])
    text = torch.cat([prompt["input_ids"], torch.tensor([ids])], 1)
    with torch.no_grad():
        expected = target(text).logits[0, -len(ids) - 1 : -1].log_softmax(-1)  # [N, V]
    for row, token, (_, logprob, likeliest) in zip(expected, ids, answer.logprobs, strict=True):
        assert logprob == pytest.approx(row[token].item(), abs=1e-4)
        top = row.topk(len(likeliest)) if likeliest else None
        assert top is None or [*likeliest.values()] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_usage_counts_drafted_and_cached_tokens(server, own):
    """The drafter is wrong at one place in ten; the next turn has all but one token of this one in a cache."""
    answer = asked(server, "Say 2", True)
    drafted = answer.usage.completion_tokens_details
    assert answer.text == own["Say 2"] and drafted.accepted_prediction_tokens > MAX_TOKENS // 2
    assert drafted.rejected_prediction_tokens > 0
    turns = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And?"}]
    messages = [{"role": "user", "content": "Say 2"}, *turns]
    create = server.client.chat.completions.create
    turn = create(model=server.model, messages=messages, max_tokens=2, temperature=0).usage
    assert turn.prompt_tokens_details.cached_tokens == answer.usage.total_tokens - 1 < turn.prompt_tokens


def test_responses_stop_and_count_tokens(server, own):
    """Stop strings were unknown, the usage had zeros, and an answer that was cut was `completed`."""
    create = server.client.responses.create
    text = own["Say 3"]
    options = {"model": server.model, "input": "Say 3", "temperature": 0, "max_output_tokens": MAX_TOKENS}
    stop = {"extra_body": {"stop": ["~", text[10:12]]}}
    whole = None
    for more, expected, count, status in (({}, text, MAX_TOKENS, "incomplete"), (stop, text[:10], 12, "completed")):
        plain = create(**options, **more)
        *pieces, last = create(**options, **more, stream=True)
        streamed = "".join(event.delta for event in pieces if event.type.endswith("text.delta"))
        assert plain.output_text == streamed == last.response.output_text == expected
        assert plain.status == last.response.status == status == last.type.removeprefix("response.")
        whole = whole or plain.usage
        for usage in (plain.usage, last.response.usage):
            assert usage.output_tokens == count and usage.output_tokens_details.accepted_prediction_tokens > 4
    turns = [{"role": "user", "content": "Say 3"}, {"role": "assistant", "content": text}]
    turn = create(**options | {"input": [*turns, {"role": "user", "content": "And?"}], "max_output_tokens": 2})
    assert turn.usage.input_tokens_details.cached_tokens == whole.total_tokens - 1


@needs_grammars
def test_responses_follow_schemas_and_call_tools(server):
    create = server.client.responses.create
    options = {"model": server.model, "input": "Say 1", "temperature": 0}
    schema = {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
    assert json.loads(create(**options, **schema).output_text)["name"] in ("ab", "cd")
    pieces = [event.delta for event in create(**options, **schema, stream=True) if event.type.endswith("text.delta")]
    assert json.loads("".join(pieces))["age"] in (4, 56)
    calls = {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required"}
    (call,) = [item for item in create(**options, **calls).output if item.type == "function_call"]
    done = [event for event in create(**options, **calls, stream=True) if event.type.endswith("arguments.done")]
    assert call.name == done[0].name == "go" and call.arguments == done[0].arguments
    assert json.loads(call.arguments)["n"] in (1, 2)


@pytest.mark.parametrize("form", ["text", "stop", pytest.param("schema", marks=needs_grammars)])
def test_eight_clients_get_the_text_of_one(form, server, own):
    """Though another one leaves in the middle of its answer."""
    more = {"text": {}, "stop": {"stop": ["b", "r", "h"]}, "schema": {"response_format": AS_SCHEMA}}[form]
    alone = [asked(server, f"Say {number}", False, **more) for number in range(8)]
    with ThreadPoolExecutor(9) as pool:
        left = pool.submit(asked, server, "Say 8", True, leave=3, **more)
        answers = [*pool.map(lambda number: asked(server, f"Say {number}", number % 2 == 0, **more), range(8))]
    assert len(left.result().text) < 4
    assert [(answer.text, answer.reason) for answer in answers] == [(answer.text, answer.reason) for answer in alone]
    if form == "text":
        assert [answer.text for answer in answers] == [own[f"Say {number}"] for number in range(8)]


def test_max_completion_tokens_is_read():
    """transformers 5.20 ignores it."""
    from dflash_hf.serving.options import Options

    body = {"max_completion_tokens": 3, "messages": []}
    Options.from_body(body)
    assert body == {"max_tokens": 3, "messages": []}


def test_missing_xgrammar_is_named(monkeypatch):
    from dflash_hf.serving.grammars import GrammarCompiler

    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ValueError, match="not supported without xgrammar; install it: `pip install xgrammar`"):
        GrammarCompiler(None, None).processor(SCHEMA)


@needs_grammars
def test_unsupported_schema_is_named(server):
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(Exception, match="Error code: 400 .*JSON schema cannot be followed"):
        asked(server, "Say 1", False, response_format=bad)
