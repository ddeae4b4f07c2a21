"""`dflash serve`: OpenAI's own client, tens of requests at once, and every text the target's own."""

import json
import re
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request

import pytest
from support.serving import MAX_TOKENS, answer_of, chat_ids, save_readable_target
from support.tiny_chat import CHATML, END
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed
from transformers.utils.import_utils import is_serve_available

from dflash_hf.cli import main
from dflash_hf.serving.token_bytes import TokenBytes


if not is_serve_available():
    pytest.skip("serving needs `pip install '.[serving]'`", allow_module_level=True)
import openai


PROMPTS = [f"Say {number}" for number in range(12)]
SAID = [{"role": "user", "content": "Say 1"}]
GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0}
COMPLETION = {"prompt": "Say 1", "messages": None}


def created(server, **more):
    """An answer of the server: a chat, a completion for a `prompt`, a response for an `input`."""
    options = {"model": server.model, "messages": SAID, **GREEDY, **more}
    client = server.client
    create = client.chat.completions.create
    if "input" in more:
        create = client.responses.create
        options["max_output_tokens"] = options.pop("max_tokens")
    elif "prompt" in more:
        create = client.completions.create
    return create(**{name: value for name, value in options.items() if value is not None})


def test_answers_of_one_client_are_drafted(bench, server, own):
    done = bench.load(server, own, requests=12, clients=1, max_tokens=MAX_TOKENS, leave=None)
    assert done.kinds["finished"] == 12
    taus = re.findall(r"tokens/s, tau ([\d.]+)", "\n".join(server.log))[-12:]
    assert sum(map(float, taus)) / 12 > 2.0  # of a drafter that is wrong at one place in ten


def test_many_clients_get_the_targets_own_texts(bench, server, own):
    done = bench.load(server, own, requests=24, clients=6, max_tokens=MAX_TOKENS)
    assert done.kinds["finished"] >= 21 and done.kinds["finished"] + done.kinds["abandoned"] == 24
    assert any("together with others" in line for line in server.log)


def test_answers_are_greedy_without_a_temperature(bench, server, own):
    with bench.ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda n: server.ask(PROMPTS[n], n % 2 == 0, max_tokens=MAX_TOKENS)[0], range(12))
        assert list(answers) == [own[prompt] for prompt in PROMPTS]


def test_generation_stops_for_clients_that_leave(server):
    before = len(server.log)
    long = {"max_tokens": 180, "temperature": 0}
    assert server.ask("Say 1", True, 1.0, **long) == (None, 0)
    assert server.ask("Say 2", False, 0.05, **long) == (None, 0)
    assert server.ask("Say 3", False, max_tokens=2, temperature=0)[1] == 2  # joins those before, or waits for them
    for _ in range(100):
        disconnections = [line for line in server.log[before:] if "the client disconnected" in line]
        if len(disconnections) == 2:
            break
        time.sleep(0.1)
    # The second may have left before its request was seen, and the first's answer may have been complete.
    assert disconnections and not any("+ 180 tokens" in line for line in disconnections)
    # Of these requests: a wrong body of another test fails inside of upstream, which is answered and logged.
    assert not any("Traceback" in line for line in server.log[before:]), "".join(server.log[before:])


def test_stop_string_is_no_part_of_an_answer(server):
    """Each letter is a piece of a stream. What begins in the prompt is no stop string."""
    text = created(server, **COMPLETION).choices[0].text
    never = text[4:7] + "~"  # begins in the middle of the text, and where it ends
    cases = {text[10:13]: text[: text.index(text[10:13])], text[0]: "", never: text, text[-2:] + "~": text}
    cases |= {"1" + text[0]: text, "y 1" + text[:2]: text}
    for stop, expected in cases.items():
        answer = created(server, **COMPLETION, stop=["~", stop]).choices[0]
        pieces = [*created(server, **COMPLETION, stop=["~", stop], stream=True)]
        assert "".join(piece.choices[0].text for piece in pieces) == answer.text == expected
        reason = "length" if expected == text else "stop"
        assert pieces[-1].choices[0].finish_reason == answer.finish_reason == reason


def test_answer_that_ends_at_the_limit_is_not_cut(server, own):
    """Upstream says `length` of any answer of that many tokens."""
    stop = own["Say 1"][10:12]
    limit = own["Say 1"].index(stop) + 2
    end = {"max_tokens": 1, "logit_bias": {str(END): 1000}}
    for more, reason in (({"stop": [stop]}, "stop"), ({}, "length"), (end, "stop")):
        more = {"max_tokens": limit, **more}
        assert created(server, **more).choices[0].finish_reason == reason
        assert [*created(server, **more, stream=True)][-1].choices[0].finish_reason == reason


def test_seed_affects_only_its_request(bench, server, folder):
    """Upstream seeds torch when a request arrives, in the middle of the answer before."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder)
    ids = chat_ids(tokenizer, SAID)
    expected = []
    for seed in range(4):
        set_seed(seed)
        output = target.generate(**ids, max_new_tokens=30, do_sample=True, temperature=1.5)
        expected.append(TokenBytes(tokenizer).complete_text(output[0, ids["input_ids"].shape[1] :].tolist()))
    assert len(set(expected)) == 4

    def ask(number: int) -> str:
        seed = number % 4 - 2**33 * (number % 2)  # OpenAI's seeds have 64 bits
        return server.ask("Say 1", False, max_tokens=30, temperature=1.5, seed=seed)[0]

    with bench.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(8))) == [expected[number % 4] for number in range(8)]


PART = [{"type": "text", "text": "Say 1"}]
NO_PART = "content has a part of type '{}', which "


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 leaves no room for an answer; give at least 1, or -1 for all that is left"),
        ({"max_tokens": -2}, "max_tokens=-2 is not supported: Input should be greater than or equal to -1"),
        ({"max_completion_tokens": -3, "stream": True}, "max_completion_tokens=-3 is not supported: Input should be"),
        ({"messages": [{"role": "user", "content": "1" * 300}]}, "The prompt has 3.. tokens; .* at most 256"),
        ({"temperature": -1.0}, "temperature=-1.0 is not supported: Input should be greater than or equal to 0"),
        ({"top_p": 1.5, "temperature": 1}, "top_p=1.5 is not supported: Input should be less than or equal to 1"),
        ({"frequency_penalty": -1}, "frequency_penalty=-1 is not supported: Input should be greater than -1"),
        ({"n": 9}, "n=9 is not supported: Input should be less than or equal to 8"),
        ({"input": "Say 1", "messages": None, "extra_body": {"n": 2}}, "n=2 is not supported by /v1/responses"),
        ({"extra_body": {"echo": True}}, "echo=True is for /v1/completions"),
        ({**COMPLETION, "prompt": []}, "prompt has 0 texts; a request may have 1 to 256"),
        ({**COMPLETION, "prompt": [[]]}, "The prompt is empty"),
        ({**COMPLETION, "prompt": ["a", 1]}, "prompt=.* is not supported: Input should be"),
        ({**COMPLETION, "prompt": [1, 100000]}, "prompt has the token 100000; the model's are 0 to 279"),
        ({**COMPLETION, "prompt": [1] * 256}, "The prompt has 256 tokens"),
        ({**COMPLETION, "prompt": [1] * 257, "max_tokens": 0}, "The prompt has 25. tokens"),
        ({"logit_bias": {"100000": 1}}, "logit_bias has the token 100000; the model's are 0 to 279"),
        ({"extra_body": {"top_k": -2}}, "top_k=-2 is not supported: Input should be greater than or equal to -1"),
        ({"extra_body": {"min_p": 2}}, "min_p=2 is not supported: Input should be less than or equal to 1"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty=0 is not supported: Input should be greater"),
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos=True is not supported: only False is"),
        ({"presence_penalty": 1}, "presence_penalty=1 is not supported: only 0 is"),
        ({"reasoning_effort": "low"}, "reasoning_effort='low' is not supported; leave it out"),
        ({"verbosity": "low"}, "verbosity='low' is not supported"),
        (
            {"parallel_tool_calls": False, "tools": [{"function": {}}]},
            "parallel_tool_calls=False is not supported unl",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools has .*web_search.*: its type must be 'function'"),
        ({"extra_body": {"guided_json": {}}}, "Unexpected fields in the request: .'guided_json'"),
        (
            {"extra_body": {"generation_config": '{"num_return_sequences": 2, "do_sample": true}'}},
            "num_return_sequences=2, which a request may not set; ask for n answers with `n`",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format=.* is not supported: text, json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "is not supported: text"),
        ({"response_format": "json"}, "response_format='json' is not supported: Input should be a valid dict"),
        ({"tool_choice": "required"}, "tool_choice='required' names none of the tools"),
        ({"tool_choice": {"function": "f"}}, "tool_choice=.* names none of the tools"),
        ({"messages": []}, "empty conversation"),
        ({"messages": [{"content": "Say 1"}]}, r"messages\[0\] has no 'role'"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, r"messages\[0\].content={.* must be a string or a li"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            r"content\[0\] of type 'text' has no 'te",
        ),
        ({"messages": [*SAID, {"role": "assistant", "tool_calls": [{}]}]}, r"tool_calls\[0\] must have a 'function'"),
        (
            {
                "messages": [
                    *SAID,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            r"tool_calls\[0\].function.arguments is not JSON",
        ),
        ({"extra_body": {"messages": None}}, "The body has no 'messages', which /v1/chat/completions answers"),
        ({**COMPLETION, "extra_body": {"prompt": None}}, "The body has no 'prompt'"),
        ({"input": [{"type": "function_call"}], "messages": None}, r"input\[0\] of type 'function_call' has no 'call"),
        ({"messages": "Say 1"}, "messages='Say 1' is not supported: Input should be a valid list"),
        ({"seed": "x"}, "seed='x' is not supported: Input should be a valid integer"),
        ({"seed": 1.5, "stream": True}, "seed=1.5 is not supported: Input should be a valid integer"),
        ({"logit_bias": [1]}, "logit_bias=.* Input should be a valid dictionary"),
        ({"top_logprobs": 3}, "top_logprobs=3 is not supported without logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 is not supported: Input should be less than or"),
        ({"stream": True, "stream_options": "usage"}, "stream_options='usage' is not supported: Input should be a"),
        ({"stop": 5}, "stop=5 is not supported: Input should be a valid string; Input should be a valid list"),
        ({"stop": ["a", 5], "stream": True}, "is not supported: Input should be a valid string"),
        (
            {"extra_body": {"generation_config": "{"}, "max_tokens": None},
            "generation_config is not JSON .Expecting prop",
        ),
        ({"extra_body": {"generation_config": 5}}, "generation_config=5 is not supported: Input should be"),
        ({"extra_body": {"chat_template_kwargs": "x"}}, "chat_template_kwargs='x' is not supported: Input should be"),
        ({"modalities": ["audio"]}, "modalities=.* is not supported"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio=.* is not supported; leave it out"),
        ({"web_search_options": {}}, "web_search_options=.* is not supported"),
        *(
            ({"input": "Say 1", "messages": None, **more}, f"{next(iter(more))}=.* is not supported")
            for more in (
                *({name: "x"} for name in ("previous_response_id", "conversation", "background", "truncation")),
                {"reasoning": {"effort": "low"}},
                {"include": ["message.output_text.logprobs"]},
                {"text": {"verbosity": "low"}},
                {"prompt": {"id": "x"}},
                {"top_logprobs": 2},
            )
        ),
        (
            {"input": "Say 1", "messages": None, "extra_body": {"logprobs": True}},
            "logprobs=True is not supported by /v",
        ),
        *(
            ({"messages": [{"role": "user", "content": [*PART, {"type": kind}]}]}, NO_PART.format(kind))
            for kind in ("image_url", "input_audio", "file", "refusal")
        ),
        (
            {
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}],
                "messages": None,
            },
            NO_PART.format("input_image"),
        ),
    ],
    ids=str,
)
def test_wrong_request_gets_a_400(server, more, message):
    """Upstream says `Internal Server Error`, or answers as if it had not been asked for."""
    with pytest.raises(openai.BadRequestError, match=message):
        created(server, **more)


def test_fields_without_effect_are_accepted(server, own):
    """`message.model_dump()` of OpenAI's client has `tool_calls=None`: 400; beside `[]` the text was dropped."""
    more = {"n": 1, "logprobs": False, "stop": [""], "logit_bias": {}, "presence_penalty": 0.0}
    for stream in (False, True):
        assert server.ask("Say 1", stream, **GREEDY, **more)[0] == own["Say 1"]
    assert created(server, messages=[{"role": "user", "content": PART}]).choices[0].message.content == own["Say 1"]
    message = {"role": "assistant", "content": "One"}
    completions = [
        created(server, messages=[*SAID, {**message, **calls}, *SAID])
        for calls in ({}, {"tool_calls": None}, {"tool_calls": []})
    ]
    assert len({(done.usage.prompt_tokens, done.choices[0].message.content) for done in completions}) == 1
    text, tokens = server.ask("1" * 200, False, max_tokens=500, temperature=0)  # more than there is room for
    assert tokens <= 256 - 200


def answered(server, path: str, body: bytes | None, method: str = "POST", kind: str = "application/json"):
    """Status, headers and body of an answer."""
    at = server.url.removesuffix("/v1") + path
    asked = urllib.request.Request(at, body, {"Content-Type": kind}, method=method)
    try:
        with urllib.request.urlopen(asked) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def test_every_error_has_openais_form(server):
    """FastAPI's own were `{"detail": ...}`, or plain text."""
    chat = "/v1/chat/completions"
    good = json.dumps({"messages": []}).encode()
    other = b'{"model": "another"}'
    cases = {
        400: [(chat, body) for body in (b"{", b"[1]", b"null", b"", b'"\xff"', b"[" * 10**5)]
        + [(chat, good, "POST", "")],
        404: [("/v1/nothing", None, "GET"), ("/v1/audio/transcriptions", b"{}"), ("/reset", b"{}")]
        + [("/load_model", other), (chat, other), ("/v1/models/another", None, "GET")],
        405: [(chat, None, "GET"), (chat, good, "PUT")],
    }
    for status, requests in cases.items():
        for request in requests:
            answered_status, headers, text = answered(server, *request)
            error = json.loads(text)["error"]
            assert answered_status == status and error["message"], request
            assert error["type"] == "invalid_request_error"
            assert status != 405 or headers["allow"] == "POST"


def test_one_model_is_served_and_stays_loaded(server):
    """Upstream lists what its cache has, would load any, and unload this one."""
    assert [model.id for model in server.client.models.list()] == [server.model]
    assert server.client.models.retrieve(server.model).id == server.model
    assert answered(server, "/health", None, "GET")[2] == '{"status":"ok"}'
    assert '"ready"' in answered(server, "/load_model", json.dumps({"model": server.model}).encode())[2]


def test_health_fails_when_the_thread_has_ended(folder):
    """It said `ok`, and requests waited for ever."""
    from dflash_hf.serving.server import Server

    server = Server(
        AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), None, "a", print
    )
    app = server.app()
    body = {"messages": SAID, "max_tokens": 1}
    assert answer_of(app, "/health", None) == (200, '{"status":"ok"}')
    assert answer_of(app, "/v1/chat/completions", body)[0] == 200
    server.decoder.stop()
    for path, stream in (("/health", None), ("/v1/chat/completions", True), ("/v1/chat/completions", False)):
        status, text = answer_of(app, path, stream if stream is None else {**body, "stream": stream})
        assert status == 503 and "The thread that decodes has ended" in json.loads(text)["error"]["message"]


def test_stream_ends_as_openais(server):
    """There was no `[DONE]`, no usage of its own, and an error was a text, which OpenAI's client did not show."""
    for path, more in (("chat/completions", {"messages": SAID}), ("completions", {"prompt": "Say 1"})):
        body = {**GREEDY, **more, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
        *events, end = answered(server, f"/v1/{path}", json.dumps(body).encode())[2].strip().split("\n\n")
        *pieces, usage = [json.loads(event.removeprefix("data: ")) for event in events]
        assert end == "data: [DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
        assert usage["id"] == pieces[0]["id"] and not any(piece.get("usage") for piece in pieces)
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    unknown = {"extra_body": {"generation_config": '{"bad_words_ids": [[1000000]], "max_new_tokens": 4}'}}
    with pytest.raises(openai.APIError, match="1000000"):
        list(created(server, **unknown, max_tokens=None, stream=True))


def test_response_is_streamed_only_on_request(server, own):
    """`/v1/responses` of upstream streamed by default, where OpenAI's does not."""
    response = created(server, input="Say 1", messages=None)
    assert response.output_text == own["Say 1"] and response.model == server.model
    kinds = [event.type for event in created(server, input="Say 1", messages=None, stream=True)]
    assert kinds[-1] == "response.incomplete" and "response.output_text.delta" in kinds


def test_logit_bias_prefers_and_forbids_tokens(server, own, folder):
    """Upstream ignored a bias in a completion; a batch was considered before the settings were complete: a 400."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bias = {"max_tokens": 5, "logit_bias": {str(tokenizer.convert_tokens_to_ids("Q")): 1000}}
    assert [server.ask("Say 1", stream, temperature=0, **bias)[0] for stream in (False, True)] == ["QQQQQ"] * 2
    assert created(server, **COMPLETION, **bias).choices[0].text == "QQQQQ"
    settings = {"bad_words_ids": [[tokenizer.convert_tokens_to_ids(own["Say 1"][0])]], "max_new_tokens": 4}
    text, tokens = server.ask("Say 1", False, extra_body={"generation_config": json.dumps(settings)})
    assert tokens == 4 and own["Say 1"][0] not in text


def served_without_drafter(folder):
    """A server in this process, and its application."""
    from dflash_hf.serving.server import Server

    target = AutoModelForCausalLM.from_pretrained(folder)
    server = Server(target, AutoTokenizer.from_pretrained(folder), None, "a", lambda line: None)
    return server, server.app()


def raising(error):
    def fail(*args, **options):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TypeError("of ours"), (500, "TypeError: of ours", "server_error")),
        (ValueError("a wrong setting"), (400, "a wrong setting", "invalid_request_error")),
    ],
    ids=["error", "setting"],
)
def test_error_of_decoding_has_its_status(error, expected, folder, monkeypatch):
    """`generate` checks the settings of a request first; its other errors are no fault of the client."""
    server, app = served_without_drafter(folder)
    monkeypatch.setattr(server.target, "generate", raising(error), raising=False)
    status, text = answer_of(app, "/v1/chat/completions", {"messages": SAID, "max_tokens": 1})
    body = json.loads(text)["error"]
    assert (status, body["message"], body["type"]) == expected
    server.decoder.stop()


@pytest.mark.parametrize("error", [KeyError("of ours"), ValueError("of ours")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", ["request", "response"])
def test_error_after_an_answer_is_the_servers(error, step, folder, monkeypatch):
    """The response of a decoded answer was a 400 if it could not be written; what is not read of a body still is."""
    from dflash_hf.serving.upstream import ChatHandler

    server, app = served_without_drafter(folder)
    method = "_build_completion" if step == "response" else "_build_generation_config"
    monkeypatch.setattr(ChatHandler, method, raising(error))
    status, text = answer_of(app, "/v1/chat/completions", {"messages": SAID, "max_tokens": 1})
    assert status == (500 if step == "response" else 400) and "of ours" in text
    server.decoder.stop()


def test_value_error_amid_an_answer_is_the_servers(folder, monkeypatch):
    """Settings are checked before the first token."""
    from dflash_hf.serving.request import Request

    server, app = served_without_drafter(folder)
    append = Request.append

    def fails_later(request, tokens):
        if request.tokens:
            raise ValueError("of ours")
        append(request, tokens)

    monkeypatch.setattr(Request, "append", fails_later)
    status, text = answer_of(app, "/v1/chat/completions", {"messages": SAID, "max_tokens": 4})
    assert status == 500 and "of ours" in text
    server.decoder.stop()


def test_one_wrong_prompt_of_several_is_a_400(folder):
    """The others are submitted when it is encoded."""
    server, app = served_without_drafter(folder)
    status, text = answer_of(app, "/v1/completions", {"prompt": ["Say 1", "1" * 300], "max_tokens": 1})
    assert status == 400 and "300" in text, text
    server.decoder.stop()


def test_error_in_a_stream_is_json(folder, monkeypatch):
    server, app = served_without_drafter(folder)
    monkeypatch.setattr(server.target, "generate", raising(ValueError('a "quoted" word\nin two lines')), raising=False)
    status, text = answer_of(app, "/v1/chat/completions", {"messages": SAID, "max_tokens": 1, "stream": True})
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert status == 200 and json.loads(events[-2])["error"]["message"] == 'a "quoted" word in two lines'
    server.decoder.stop()


@pytest.mark.slow
def test_two_hundred_requests_of_eight_clients_pass(bench, server, own):
    done = bench.load(server, own, requests=200, clients=8, max_tokens=MAX_TOKENS, leave=0.05)
    assert done.kinds["other"] == done.kinds["failed"] == 0 and done.kinds["abandoned"] >= 15
    assert done.kinds["finished"] + done.kinds["abandoned"] == 200
    assert max(done.memory[1:]) - done.memory[1] < 16, f"MiB after each tenth of the requests: {done.memory}"


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def stopping(folder, own, tmp_path_factory):
    """A target with stop strings, and without tools in its template."""
    path = save_readable_target(tmp_path_factory.mktemp("stopping") / "target", CHATML)
    settings = GenerationConfig.from_pretrained(path)
    settings.stop_strings = own["Say 1"][10:12]
    settings.update(do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    settings.save_pretrained(path)
    return path


def test_command_serves_a_target_without_drafter(bench, stopping, own, monkeypatch):
    """With a key, for pages; SIGTERM ends it when open requests are answered."""
    monkeypatch.setenv("DFLASH_API_KEY", "secret")
    command = [sys.executable, "-m", "dflash_hf.cli", "serve", "--target", str(stopping), "--port", "0"]
    command += ["--device", "cpu", "--threads", "1", "--enable-cors", "--served-model-name", "my-model"]
    with bench.Server(command, api_key="secret") as server:
        assert server.url.startswith("http://127.0.0.1:") and server.model == "my-model"
        stop = own["Say 1"][10:12]  # the server did not start: `generate` wanted a tokenizer for them
        expected = own["Say 1"][: own["Say 1"].index(stop)]
        for stream in (False, True):
            assert server.ask("Say 1", stream, **GREEDY) == (expected, len(expected + stop))
        assert server.ask("Say 1", False, stop="~", **GREEDY)[0] == own["Say 1"]
        tools = [{"type": "function", "function": {"name": "f"}}]
        with pytest.raises(openai.BadRequestError, match="chat template of my-model does not support tools"):
            created(server, tools=tools)
        assert created(server, tools=tools, tool_choice="none").choices[0].message.content == expected

        with pytest.raises(openai.AuthenticationError, match="Wrong or missing API key"):
            server.client.with_options(api_key="guess").models.list()
        asked = {"Origin": "https://a.page", "Access-Control-Request-Method": "POST"}
        preflight = urllib.request.Request(f"{server.url}/chat/completions", headers=asked, method="OPTIONS")
        with urllib.request.urlopen(preflight) as answer:
            assert answer.status == 200 and answer.headers["access-control-allow-origin"]
        keyless = urllib.request.Request(f"{server.url}/models", headers={"Origin": "https://a.page"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(keyless)
        assert refused.value.code == 401 and refused.value.headers["access-control-allow-origin"]
        assert answered(server, "/v1/chat/completions", b"{")[0] == 401  # before the body is parsed
        assert answered(server, "/health", None, "GET")[0] == 200

        texts = {"Say 1": expected, **{prompt: own[prompt].partition(stop)[0] for prompt in PROMPTS[2:7]}}
        assert bench.ended(server, texts, clients=6, max_tokens=MAX_TOKENS) == (0, 6)
        unsaid = ("Traceback", "secret", "tau", "flags are not valid")
        log = "\n".join(server.log)
        assert not any(word in log for word in unsaid), server.log


def test_signal_at_startup_ends_the_server(folder):
    """A supervisor may end a server the moment that it says it is ready."""
    from dflash_hf.serving.server import Server, listen

    def say(line: str) -> None:
        if line.startswith("serving "):
            signal.raise_signal(signal.SIGTERM)

    def unheard(*_):
        raise AssertionError("SIGTERM before anybody listens")

    before = signal.signal(signal.SIGTERM, unheard)
    try:
        target = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        server = Server(target, tokenizer, None, "one", say)
        server.run(listen("127.0.0.1", 0), server.app())
        assert signal.getsignal(signal.SIGTERM) is unheard
    finally:
        signal.signal(signal.SIGTERM, before)


def test_second_server_on_a_port_is_refused():
    """Until one of two servers listened, both had the port; the second failed when its model was loaded."""
    from dflash_hf.serving.server import listen

    with listen("127.0.0.1", 0) as first, pytest.raises(ValueError, match="Cannot bind to --host 127.0.0.1 --port"):
        listen(*first.getsockname())


def test_incomplete_target_is_named(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert main(["serve", "--target", str(tmp_path / "torn"), "--port", "0", "--device", "cpu"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.endswith("; download or save them again.") and "safetensors are damaged or only half written" in error
