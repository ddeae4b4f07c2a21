"""`dflash serve`: OpenAI's own client, tens of requests at once, and every text the target's own."""

import asyncio
import importlib.util
import json
import re
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from support.serving import MAX_TOKENS, chat_ids, save_readable_target
from support.tiny_chat import END
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, set_seed
from transformers.utils.import_utils import is_serve_available

from dflash_hf.cli import main


if not is_serve_available():
    pytest.skip("serving needs `pip install '.[serving]'`", allow_module_level=True)
import openai


ROOT = Path(__file__).parents[2]
PROMPTS = [f"Say {number}" for number in range(12)]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("serve_load", ROOT / "examples" / "benchmarks" / "serve_load.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_load"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_readable_target(tmp_path_factory.mktemp("served") / "target")


@pytest.fixture(scope="module")
def own(bench, folder):
    texts = bench.own_texts(str(folder), PROMPTS, MAX_TOKENS)
    assert len(set(texts.values())) == len(PROMPTS) and all(len(set(text)) > 5 for text in texts.values())
    return texts


def started(bench, folder):
    """A server whose drafter knows the greedy texts of `PROMPTS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"))
        return bench.Server([sys.executable, "-m", "support.serving", "serve", str(folder), *PROMPTS])


@pytest.fixture(scope="module")
def server(bench, folder):
    with started(bench, folder) as server:
        yield server


def requests_of(server, last: str, seconds: float = 10.0) -> list[str]:
    """What the log says of requests, up to a line with `last`, which arrives when it likes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        lines = [line for line in server.log if "tokens/s" in line]
        if lines and last in lines[-1]:
            return lines
        time.sleep(0.05)
    raise AssertionError(server.log)


def test_many_requests_at_once_get_the_target_s_own_texts(bench, server, own):
    """One after the other with the drafter, several at once together or in turn, whichever is faster here."""
    done = bench.load(server, own, requests=12, clients=1, max_tokens=MAX_TOKENS, leave=None)
    assert done.kinds["finished"] == 12
    taus = [float(tau) for line in server.log for tau in re.findall(r"tokens/s, tau ([\d.]+)", line)]
    assert len(taus) == 12 and sum(taus) / len(taus) > 2.0  # of a drafter that is wrong at one place in ten
    done = bench.load(server, own, requests=24, clients=6, max_tokens=MAX_TOKENS)
    assert done.kinds["finished"] >= 21 and done.kinds["finished"] + done.kinds["abandoned"] == 24
    assert any("together with others" in line for line in server.log)


def test_many_requests_without_a_temperature(bench, server, own):
    """Neither they nor the generation configuration say whether to sample: answers are greedy."""
    with bench.ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda n: server.ask(PROMPTS[n], n % 2 == 0, max_tokens=MAX_TOKENS)[0], range(12))
        assert list(answers) == [own[prompt] for prompt in PROMPTS]


def test_clients_that_go_away_are_not_answered(server):
    before = len(server.log)
    long = {"max_tokens": 180, "temperature": 0}
    assert server.ask("Say 1", True, 1.0, **long) == (None, 0)
    assert server.ask("Say 2", False, 0.05, **long) == (None, 0)
    assert (
        server.ask("Say 3", False, max_tokens=2, temperature=0)[1] == 2
    )  # which joins those before, or waits for them
    for _ in range(100):
        gone = [line for line in server.log[before:] if "the client disconnected" in line]
        if len(gone) == 2:
            break
        time.sleep(0.1)
    assert len(gone) == 2 and not any("+ 180 tokens" in line for line in server.log[before:])
    assert not any("Traceback" in line for line in server.log)


def test_a_stop_string_ends_as_it_does_without_a_drafter(server, folder, own):
    tokenizer, target = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = chat_ids(tokenizer, [{"role": "user", "content": "Say 1"}])
    stop = own["Say 1"][10:12]
    output = target.generate(
        **ids, max_new_tokens=MAX_TOKENS, do_sample=False, stop_strings=[stop], tokenizer=tokenizer
    )
    written = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    expected = own["Say 1"][: own["Say 1"].index(stop)]
    assert written == expected + stop
    options = {"max_tokens": MAX_TOKENS, "temperature": 0}
    for stream in (False, True):
        assert server.ask("Say 1", stream, stop=[stop], **options) == (expected, len(written))
        own_field = {"generation_config": json.dumps({"stop_strings": stop, "max_new_tokens": MAX_TOKENS})}
        assert server.ask("Say 1", stream, extra_body=own_field)[0] == expected


def test_a_stop_string_is_no_part_of_the_answer(server, own):
    """OpenAI's API leaves it out; upstream's answers ended with it. Each letter is a piece of a stream."""
    own = server.client.completions.create(model=server.model, prompt="Say 1", max_tokens=MAX_TOKENS, temperature=0)
    text = own.choices[0].text
    never = text[4:7] + "~"  # begins in the middle of the text, and where it ends
    cases = {text[10:13]: text[: text.index(text[10:13])], text[0]: "", never: text, text[-2:] + "~": text}
    for stop, expected in cases.items():
        asked = {"model": server.model, "prompt": "Say 1", "stop": ["~", stop], "temperature": 0}
        answer = server.client.completions.create(**asked, max_tokens=MAX_TOKENS).choices[0]
        pieces = [*server.client.completions.create(**asked, max_tokens=MAX_TOKENS, stream=True)]
        assert "".join(piece.choices[0].text for piece in pieces) == answer.text == expected
        reason = "length" if expected == text else "stop"
        assert pieces[-1].choices[0].finish_reason == answer.finish_reason == reason


def test_stop_strings_of_the_target_end_answers(bench, folder, own, tmp_path):
    """The server did not start: `generate` wanted a tokenizer for them."""
    shutil.copytree(folder, tmp_path / "stopping")
    settings = GenerationConfig.from_pretrained(folder)
    settings.stop_strings = stop = own["Say 1"][10:12]
    settings.save_pretrained(tmp_path / "stopping")
    command = [sys.executable, "-m", "dflash_hf.cli", "serve", "--target", str(tmp_path / "stopping"), "--port", "0"]
    with bench.Server([*command, "--device", "cpu"]) as server:
        options = {"max_tokens": MAX_TOKENS, "temperature": 0}
        expected = own["Say 1"][: own["Say 1"].index(stop)]
        assert server.ask("Say 1", False, **options) == (expected, len(expected + stop))
        assert server.ask("Say 1", False, stop="~", **options)[0] == own["Say 1"]


def test_a_seed_is_a_request_s_own(bench, server, folder):
    """Upstream seeds torch when a request arrives, in the middle of the answer before."""
    tokenizer, target = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = chat_ids(tokenizer, [{"role": "user", "content": "Say 1"}])
    expected = []
    for seed in range(4):
        set_seed(seed)
        output = target.generate(**ids, max_new_tokens=30, do_sample=True, temperature=1.5)
        expected.append(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    assert len(set(expected)) == 4

    def one(number: int) -> str:
        seed = number % 4 - 2**33 * (number % 2)  # OpenAI's seeds have 64 bits
        return server.ask("Say 1", False, max_tokens=30, temperature=1.5, seed=seed)[0]

    with bench.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(8))) == [expected[number % 4] for number in range(8)]


def test_what_cannot_be_answered_is_told(server):
    messages = [{"role": "user", "content": "Say 1"}]
    chat = server.client.chat.completions
    with pytest.raises(openai.NotFoundError, match="'another' does not exist; this server serves"):
        chat.create(model="another", messages=messages)
    for stream in (False, True):
        with pytest.raises(
            openai.BadRequestError, match="The prompt has 3.. tokens; prompt and answer together may have at most 256"
        ):
            chat.create(model=server.model, messages=[{"role": "user", "content": "1" * 300}], stream=stream)
    # As many tokens as there is room for, where more are asked for.
    text, tokens = server.ask("1" * 200, False, max_tokens=500, temperature=0)
    assert tokens <= 256 - 200
    assert [model.id for model in server.client.models.list()] == [server.model]
    assert server.client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError, match="'another' does not exist"):
        server.client.models.retrieve("another")
    assert server.client.get(server.url.removesuffix("/v1") + "/health", cast_to=object) == {"status": "ok"}


@pytest.mark.parametrize(
    "more, message",
    [
        ({"max_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_tokens": -3, "stream": True}, "max_new_tokens=-3 must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1 must be 0, for greedy decoding, or a positive number"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "chat template of readable does not support tools",
        ),
        ({"n": 2}, "n=2 is not supported"),
        ({"logprobs": 3}, "logprobs=3 is not supported here; in a chat, pass logprobs=true"),
        ({"response_format": {"type": "grammar"}}, "response_format=.* is not supported; use text, json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "is not supported; use text"),
        ({"response_format": "json"}, "response_format='json' is not supported; use text"),
        ({"messages": []}, "empty conversation"),
        ({"messages": [{"content": "Say 1"}]}, "KeyError: 'role'"),
        ({"messages": "Say 1"}, "messages='Say 1' must be a list of objects"),
        ({"seed": "x"}, "seed='x' must be a whole number"),
        ({"seed": 1.5, "stream": True}, "seed=1.5 must be a whole number"),
        ({"logit_bias": [1]}, "logit_bias=.* must be an object"),
        ({"top_logprobs": 3}, "top_logprobs=3 is not supported"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 must be a whole number from 0 to 20"),
        ({"stream": True, "stream_options": "usage"}, "stream_options='usage' must be an object"),
        ({"stop": 5}, "stop=5 must be a string or a list of strings"),
        ({"stop": ["a", 5], "stream": True}, "must be a string or a list of strings"),
        ({"extra_body": {"generation_config": "{"}}, "Expecting property name"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_request_is_told(server, own, more, message):
    """Upstream says `Internal Server Error`, or answers as if it had not been asked for."""
    asked = {"model": server.model, "messages": [{"role": "user", "content": "Say 1"}], "max_tokens": 8}
    with pytest.raises(openai.BadRequestError, match=message):
        server.client.chat.completions.create(**{**asked, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"modalities": ["audio"]},
        {"audio": {"voice": "x", "format": "wav"}},
        {"web_search_options": {}},
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"background": True},
    ],
    ids=str,
)
def test_what_upstream_does_not_do_is_refused(server, more):
    """It answered as if it had not been asked: a response without the conversation that it continues, and no JSON."""
    create = server.client.chat.completions.create
    asked = {"messages": [{"role": "user", "content": "Say 1"}], "max_tokens": 2}
    if not more.keys() & {"modalities", "audio", "web_search_options"}:
        create, asked = server.client.responses.create, {"input": "Say 1", "max_output_tokens": 2}
    with pytest.raises(openai.BadRequestError, match=f"{next(iter(more))}=.* is not supported"):
        create(model=server.model, **asked, **more)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
def test_a_part_that_a_target_cannot_read_is_refused(server, own, kind):
    """Upstream dropped it, and answered as if it had seen the picture."""
    parts = [{"type": "text", "text": "Say 1"}, {"type": kind, kind: {"url": "data:,x"}}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=f"content has a part of type '{kind}'"):
            server.ask(parts, stream, max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="content has a part of type 'input_image'"):
        parts = [{"type": "input_text", "text": "Say 1"}, {"type": "input_image", "image_url": "data:,x"}]
        server.client.responses.create(model=server.model, input=[{"role": "user", "content": parts}])
    assert server.ask(parts[:1], False, max_tokens=MAX_TOKENS, temperature=0)[0] == own["Say 1"]


@pytest.mark.parametrize("calls", [None, []], ids=str)
def test_an_answer_without_tool_calls_keeps_its_text(server, calls):
    """`message.model_dump()` of OpenAI's client has `tool_calls=None`: 400; beside `[]` the text was dropped."""
    said, asked = {"role": "assistant", "content": "One"}, {"role": "user", "content": "Say 1"}
    settings = {"model": server.model, "max_tokens": MAX_TOKENS, "temperature": 0}
    expected, found = (
        server.client.chat.completions.create(messages=[asked, answer, asked], **settings)
        for answer in (said, {**said, "tool_calls": calls})
    )
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    assert found.choices[0].message == expected.choices[0].message


def answered(server, path: str, body: bytes | None, method: str = "POST", kind: str = "application/json"):
    """Status, headers and body of an answer."""
    at = server.url.removesuffix("/v1") + path
    asked = urllib.request.Request(at, body, {"Content-Type": kind}, method=method)
    try:
        with urllib.request.urlopen(asked) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def test_every_error_has_openai_s_form(server):
    """FastAPI's own were `{"detail": ...}`, or plain text."""
    chat, good = "/v1/chat/completions", json.dumps({"messages": []}).encode()
    cases = {
        400: [(chat, body) for body in (b"{", b"[1]", b"null", b"", b'"\xff"', b"[" * 10**5)]
        + [(chat, good, "POST", "")],
        404: [("/v1/nothing", None, "GET"), ("/v1/audio/transcriptions", b"{}"), ("/reset", b"{}")],
        405: [(chat, None, "GET"), (chat, good, "PUT")],
        422: [("/v1/systemone", b"{}")],
        500: [("/load_model", b'{"model": 5}')],
    }
    for status, requests in cases.items():
        for request in requests:
            found, headers, text = answered(server, *request)
            error = json.loads(text)["error"]
            assert found == status and error["message"], request
            assert error["type"] == ("server_error" if status == 500 else "invalid_request_error")
            assert status != 405 or headers["allow"] == "POST"


def test_a_stream_ends_as_openai_s(server):
    """There was no `[DONE]`, and an error was a text, which OpenAI's client did not show."""
    asked = {"messages": [{"role": "user", "content": "Say 1"}], "max_tokens": 4, "temperature": 0, "stream": True}
    for path, more in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "Say 1", "messages": None})):
        body = {name: value for name, value in {**asked, **more}.items() if value is not None}
        _, _, text = answered(server, path, json.dumps(body).encode())
        *events, end = text.strip().split("\n\n")
        assert end == "data: [DONE]" and all(json.loads(event.removeprefix("data: ")) for event in events)
    beams = {"model": server.model, "extra_body": {"generation_config": '{"num_beams": 2, "max_new_tokens": 4}'}}
    with pytest.raises(openai.APIError, match="beam_search"):
        list(server.client.chat.completions.create(**beams, **{**asked, "max_tokens": None}))


def test_a_stop_string_that_begins_in_the_prompt_is_none(server):
    """The answer ended after its first letter, which was there."""
    asked = {"model": server.model, "prompt": "Say 1", "max_tokens": 12, "temperature": 0}
    text = server.client.completions.create(**asked).choices[0].text
    stop = ["1" + text[0], "y 1" + text[:2]]
    answer = server.client.completions.create(**asked, stop=stop)
    assert answer.choices[0].text == text and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    pieces = [*server.client.completions.create(**asked, stop=stop, stream=True)]
    assert "".join(piece.choices[0].text for piece in pieces) == text


def test_the_usage_of_a_stream_is_a_chunk_of_its_own(server):
    """If it is asked for, it comes without choices, by which clients recognise it; upstream's came with the last."""
    asked = {"model": server.model, "max_tokens": 4, "temperature": 0, "stream": True}
    messages = [{"role": "user", "content": "Say 1"}]
    for create, more in (
        (server.client.chat.completions.create, {"messages": messages}),
        (server.client.completions.create, {"prompt": "Say 1"}),
    ):
        *pieces, usage = create(**asked, **more, stream_options={"include_usage": True})
        assert usage.choices == [] and usage.usage.completion_tokens == 4 and usage.id == pieces[0].id
        assert pieces[-1].choices[0].finish_reason == "length" and not any(piece.usage for piece in pieces)
        assert len(pieces) == len([*create(**asked, **more)])


def test_an_answer_that_ends_at_the_limit_was_not_cut(server, own):
    """Upstream says `length` of any answer of that many tokens."""
    text = own["Say 1"]
    stop, ends = text[10:12], {"a stop string": "stop", "cut": "length", "the end": "stop"}
    limit = text.index(stop) + 2  # each letter is a token
    end = {"logit_bias": {str(END): 1000}}
    for stream in (False, True):
        found = []
        for more in ({"stop": [stop], "max_tokens": limit}, {"max_tokens": limit}, {"max_tokens": 1, **end}):
            answer = server.client.chat.completions.create(
                model=server.model,
                messages=[{"role": "user", "content": "Say 1"}],
                temperature=0,
                stream=stream,
                **more,
            )
            found.append([*answer][-1].choices[0].finish_reason if stream else answer.choices[0].finish_reason)
        assert found == list(ends.values())


def test_what_changes_nothing_is_not_refused(server, own):
    kind = {"type": "text"}
    more = {"n": 1, "logprobs": False, "stop": [""], "logit_bias": {}, "response_format": kind, "presence_penalty": 0}
    more |= {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}]}
    for stream in (False, True):
        assert server.ask("Say 1", stream, max_tokens=MAX_TOKENS, temperature=0, **more)[0] == own["Say 1"]


def test_a_response_is_streamed_only_if_asked_for(server, own):
    """`/v1/responses` of upstream streamed by default, where OpenAI's does not."""
    settings = {"model": server.model, "input": "Say 1", "max_output_tokens": MAX_TOKENS, "temperature": 0}
    response = server.client.responses.create(**settings)
    assert response.output_text == own["Say 1"] and response.model == server.model  # it was the path of its folder
    kinds = [event.type for event in server.client.responses.create(**settings, stream=True)]
    assert kinds[-1] == "response.completed" and "response.output_text.delta" in kinds


def test_a_page_may_ask_and_needs_the_key(bench, folder, own, monkeypatch):
    """There was no CORS (a preflight got 405), no key, and the model's id was the path of its folder."""
    monkeypatch.setenv("DFLASH_API_KEY", "secret")
    command = [
        sys.executable,
        "-m",
        "dflash_hf.cli",
        "serve",
        "--target",
        str(folder),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    with bench.Server([*command, "--enable-cors", "--served-model-name", "my-model"], api_key="secret") as server:
        assert server.model == "my-model" and not any("secret" in line for line in server.log)
        assert server.ask("Say 1", False, max_tokens=MAX_TOKENS, temperature=0)[0] == own["Say 1"]
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


def test_a_bias_is_a_whole_number_too(server, folder):
    letter = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("Q")
    options = {"max_tokens": 5, "temperature": 0, "logit_bias": {str(letter): 1000}}
    assert [server.ask("Say 1", stream, **options)[0] for stream in (False, True)] == ["QQQQQ"] * 2
    # Upstream ignored it in the older form of a completion.
    completion = server.client.completions.create(model=server.model, prompt="Say 1", **options)
    assert completion.choices[0].text == "QQQQQ"


def test_words_may_be_forbidden(server, own, folder):
    """A batch was considered before the settings were complete: a 400."""
    letter = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(own["Say 1"][0])
    settings = {"bad_words_ids": [[letter]], "max_new_tokens": 4}
    text, tokens = server.ask("Say 1", False, extra_body={"generation_config": json.dumps(settings)})
    assert tokens == 4 and own["Say 1"][0] not in text


def test_a_port_has_one_server():
    """Until one of two servers listened, both had the port; the second failed when its model was loaded."""
    from dflash_hf.serving.server import bound

    with bound("127.0.0.1", 0) as first, pytest.raises(ValueError, match="Cannot bind to --host 127.0.0.1 --port"):
        bound(*first.getsockname())


def test_the_model_stays_as_it_was_loaded(server):
    """Upstream would unload it, and load it again unpacked; and load any other that a client names."""
    at = server.url.removesuffix("/v1")
    with pytest.raises(openai.NotFoundError):
        server.client.post(f"{at}/reset", cast_to=object)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        server.client.post(f"{at}/load_model", body={"model": "another"}, cast_to=object)
    assert '"ready"' in server.client.post(f"{at}/load_model", body={"model": server.model}, cast_to=str)


def test_an_error_of_ours_is_no_400(folder):
    """What is wrong with the request is; and in a stream either is JSON."""
    from fastapi import HTTPException

    from dflash_hf.serving.decoder import Decoder
    from dflash_hf.serving.options import Options
    from dflash_hf.serving.server import PairManager, _options

    class Model:
        config, device, generation_config = LlamaConfig(max_position_embeddings=64), "cpu", GenerationConfig()

        def generate(self, **_):
            raise errors.pop()

        def _get_logits_processor(self, settings):
            return []

    async def asked(manager, stream: bool):
        _options.set(Options())
        inputs, settings = {"input_ids": torch.ones(1, 3, dtype=torch.long)}, GenerationConfig(max_new_tokens=4)
        if not stream:
            return await manager.generate_non_streaming(None, None, inputs, settings, "")
        events, _ = manager.generate_streaming(None, None, inputs, settings, "")
        return await events.get()

    lines: list[str] = []
    errors = [TypeError("of ours"), *2 * [ValueError('a "quoted" word\nin two lines')]]
    manager = PairManager(Decoder(Model(), AutoTokenizer.from_pretrained(folder)), lines.append)
    error = asyncio.run(asked(manager, True))
    assert json.loads(f'{{"error": "{error.msg}"}}') == {"error": 'a "quoted" word in two lines'}
    with pytest.raises(ValueError, match="quoted"):
        asyncio.run(asked(manager, False))
    with pytest.raises(HTTPException) as raised:  # and no 400: the request is right
        asyncio.run(asked(manager, False))
    assert raised.value.status_code == 500 and raised.value.detail == "TypeError: of ours"


def test_a_target_that_is_half_written_is_told(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert main(["serve", "--target", str(tmp_path / "torn"), "--port", "0", "--device", "cpu"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.endswith("; download or save them again.") and "safetensors are damaged or only half written" in error


@pytest.mark.slow
def test_two_hundred_requests_from_eight_clients(bench, server, own):
    done = bench.load(server, own, requests=200, clients=8, max_tokens=MAX_TOKENS, leave=0.05)
    assert done.kinds["other"] == done.kinds["failed"] == 0 and done.kinds["abandoned"] >= 15
    assert done.kinds["finished"] + done.kinds["abandoned"] == 200
    assert max(done.memory[1:]) - done.memory[1] < 16, f"MiB after each tenth of the requests: {done.memory}"


def test_sigterm_finishes_what_was_begun(bench, folder, own):
    with started(bench, folder) as server:  # of its own: tests may run in another order
        assert bench.ended(server, own, clients=6, max_tokens=MAX_TOKENS) == (0, 6)


def test_a_body_that_does_not_arrive_delays_no_shutdown(bench, folder):
    """The server waited for its client to send the rest, or to go away."""
    with started(bench, folder) as server:
        host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            client.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"prompt": '.encode())
            time.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=15) == 0
            answer = client.makefile("rb").read().decode()
        assert answer.startswith("HTTP/1.1 408") and "The body did not continue for 5 seconds." in answer
        assert not any("Traceback" in line for line in server.log)


def test_the_command_serves_a_target_alone(bench, folder, own):
    command = [sys.executable, "-m", "dflash_hf.cli", "serve", "--target", str(folder), "--port", "0"]
    with bench.Server([*command, "--device", "cpu", "--threads", "1"]) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.ask("Say 1", False, max_tokens=MAX_TOKENS, temperature=0)[0] == own["Say 1"]
        assert "tau" not in requests_of(server, "tokens in")[-1]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


def test_a_signal_at_the_first_word_is_heard(folder):
    """A supervisor may end a server the moment that it says it is ready."""
    from dflash_hf.serving.server import DraftedServe, bound

    def say(line: str) -> None:
        if line.startswith("serving "):
            signal.raise_signal(signal.SIGTERM)

    def unheard(*_):
        raise AssertionError("SIGTERM before anybody listens")

    before = signal.signal(signal.SIGTERM, unheard)
    try:
        DraftedServe(str(folder), None, say, bound("127.0.0.1", 0), device="cpu")
        assert signal.getsignal(signal.SIGTERM) is unheard
    finally:
        signal.signal(signal.SIGTERM, before)
