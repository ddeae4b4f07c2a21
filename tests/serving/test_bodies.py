"""Bodies as clients send them, and as nobody should: an answer, or an error that says why; no 500 and no waiting."""

import json

import pytest
from support.serving import answer_of, chat_ids
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available


if not is_serve_available():
    pytest.skip("serving needs `pip install '.[serving]'`", allow_module_level=True)
from dflash_hf.serving.server import Server


USER = {"role": "user", "content": "Say 1"}
CHAT = {"messages": [USER], "max_tokens": 4, "temperature": 0}
TEXT = {"prompt": "Say 1", "max_tokens": 4, "temperature": 0}
RESPONSE = {"input": "Say 1", "max_output_tokens": 4, "temperature": 0}
PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}
TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "go", "arguments": "{}"}}

# What clients send by default, or when their settings are opened: all of these are answered.
LM_STUDIO = {"model": None, "messages": [{"role": "system", "content": "Be brief."}, USER], "temperature": 0}
LM_STUDIO |= {"max_tokens": -1, "stream": False}
OPEN_WEBUI = {"stream": True, "messages": [USER], "stream_options": {"include_usage": True}, "temperature": 0}
LLAMA_CPP = {"messages": [USER], "stream": True, "reasoning_format": "auto", "temperature": 0, "max_tokens": -1}
LLAMA_CPP |= {"dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
LLAMA_CPP |= {"xtc_probability": 0, "xtc_threshold": 0.1, "typ_p": 1, "repeat_last_n": 64, "repeat_penalty": 1}
LLAMA_CPP |= {"presence_penalty": 0, "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75}
LLAMA_CPP |= {"dry_allowed_length": 2, "dry_penalty_last_n": -1, "samplers": ["top_k", "temperature"]}
LLAMA_CPP |= {"timings_per_token": True, "return_progress": True, "cache_prompt": True}
LANGCHAIN = {"messages": [USER], "n": 1, "temperature": 0, "stream": False, "max_completion_tokens": None}
LANGCHAIN |= {"stop": None, "tools": [TOOL], "parallel_tool_calls": True, "tool_choice": "auto"}
LM_EVAL = {"prompt": [[53, 67, 91], [53, 67, 91, 223]], "temperature": 0, "max_tokens": 1, "logprobs": 1}
LM_EVAL |= {"seed": 1234, "echo": True}
LM_EVAL_TEXT = {"prompt": ["Say 1"], "max_tokens": 4, "temperature": 0, "stop": ["\n", "</s>"], "seed": 1234}
AIDER = {"messages": [{"role": "system", "content": "Edit."}, USER], "temperature": 0, "stream": True, "user": "a"}
CONTINUE = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say 1"}]}], "max_tokens": 4096}
CONTINUE |= {"temperature": 0, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "stop": ["```"]}
CONTINUE |= {"stream": True, "prediction": {"type": "content", "content": "x"}}
QWEN = {**CHAT, "top_p": 0.8, "top_k": 20, "min_p": 0, "repetition_penalty": 1.0, "presence_penalty": 0}
QWEN |= {"chat_template_kwargs": {"enable_thinking": False}}
VLLM = {**CHAT, "ignore_eos": False, "min_tokens": 0, "length_penalty": 1.0, "use_beam_search": False, "best_of": 1}
VLLM |= {"skip_special_tokens": True, "stop_token_ids": [], "include_stop_str_in_output": False, "priority": 0}
TURNS = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}]
TURNS += [{"role": "tool", "tool_call_id": "1", "content": "done", "name": "go"}, USER]
ITEMS = [USER, {"type": "function_call", "call_id": "1", "name": "go", "arguments": "{}"}]
ITEMS += [{"type": "function_call_output", "call_id": "1", "output": "done"}, USER]
GOOD = {"LM Studio": LM_STUDIO, "Open WebUI": OPEN_WEBUI, "llama.cpp": LLAMA_CPP, "LangChain": LANGCHAIN}
GOOD |= {"lm-eval": LM_EVAL, "lm-eval, generation": LM_EVAL_TEXT, "aider": AIDER, "Continue": CONTINUE}
GOOD |= {"Qwen": QWEN, "vLLM": VLLM, "turns": {**CHAT, "messages": TURNS}, "items": {**RESPONSE, "input": ITEMS}}
GOOD |= {
    f"{next(iter(base))} {name}={value}": {**base, name: value}
    for base, fields in (
        (
            CHAT,
            [("stop", []), ("stop", ""), ("stop", ["~"] * 64), ("seed", 0), ("seed", -1), ("seed", 2**70), ("n", 1)]
            + [("top_p", 0), ("top_p", 1), ("logit_bias", {}), ("logprobs", False), ("stream", None), ("tools", [])]
            + [("tool_choice", "none"), ("response_format", {"type": "text"}), ("functions", []), ("metadata", {})]
            + [("temperature", 1e-300), ("temperature", 1e30), ("max_tokens", 10**12), ("top_k", 10**9)]
            + [("generation_config", "{}"), ("generation_config", None), ("frequency_penalty", 2)]
            + [("user", "x"), ("store", True), ("modalities", ["text"]), ("chat_template_kwargs", {"x": 1})]
            + [("max_tokens", None), ("temperature", None), ("n", 8), ("top_logprobs", None), ("messages", [USER] * 5)]
            + [("generation_config", '{"stop_strings": ["", "~"], "max_new_tokens": 4}')]
            + [("generation_config", '{"eos_token_id": [2], "max_new_tokens": 4, "transformers_version": "5"}')],
        ),
        (
            TEXT,
            [("prompt", [53, 67]), ("prompt", ["a", "b"]), ("prompt", [[53], [67]]), ("max_tokens", 0), ("echo", True)]
            + [("logprobs", 0), ("logprobs", 20), ("suffix", ""), ("suffix", None), ("best_of", 1), ("n", 2)]
            + [("max_tokens", -1), ("prompt", "\u0000"), ("prompt", "😀" * 20), ("echo", False), ("user", "x")],
        ),
        (
            RESPONSE,
            [("input", [{"type": "input_text", "text": "Say 1"}]), ("instructions", "Be brief."), ("store", False)]
            + [("max_output_tokens", -1), ("input", [USER]), ("text", {"format": {"type": "text"}}), ("include", [])]
            + [("instructions", [{"type": "input_text", "text": "x"}]), ("truncation", "disabled"), ("stream", True)],
        ),
    )
    for name, value in fields
}
# What is refused, and a word of the error.
BAD = [
    ({**CHAT, name: value}, word)
    for name, value, word in (
        *(("messages", value, "messages") for value in ("x", 5, [5], [None], {}, [[]], True)),
        *(("messages", [{"role": "user", "content": value}], "content") for value in (5, {}, [5], [None], [[]], True)),
        *(("messages", [{"role": value, "content": "x"}], "role") for value in (None, 5, [], {})),
        ("messages", [], "empty"),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}], "text"),
        ("messages", [{"role": "user", "content": [{"type": None}]}], "type"),
        ("messages", [{"role": "assistant", "tool_calls": "x"}], "tool_calls"),
        ("messages", [{"role": "user", "content": "\ud800"}], "surrogate"),
        ("messages", [{"role": "user", "content": "1" * 400}], "at most 256"),
        ("max_tokens", 0, "max_tokens=0"),
        ("max_tokens", "many", "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_tokens", [], "max_tokens"),
        ("temperature", "hot", "temperature"),
        ("temperature", float("inf"), "temperature"),
        ("temperature", float("nan"), "temperature"),
        ("top_p", -0.1, "top_p"),
        ("top_k", 1.5, "top_k"),
        ("min_p", "x", "min_p"),
        ("repetition_penalty", float("inf"), "repetition_penalty"),
        ("n", 0, "n=0"),
        ("n", 9, "n=9"),
        ("n", "x", "n='x'"),
        ("stop", ["x" * 1000], "stop"),
        ("stop", ["x"] * 100, "stop"),
        ("logit_bias", {"5": float("nan")}, "logit_bias"),
        ("logit_bias", {"5": 1e300}, "logit_bias"),
        ("logit_bias", {"-5": 1}, "logit_bias"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logprobs", 21, "logprobs"),
        ("stream", "maybe", "stream"),
        ("tools", "x", "tools"),
        ("tools", [5], "tools"),
        ("tool_choice", "perhaps", "tool_choice"),
        ("response_format", "json", "response_format"),
        ("generation_config", {}, "generation_config"),
        ("generation_config", '{"num_beams": 1000}', "num_beams"),
        ("generation_config", json.dumps({"stop_strings": "x" * 1000}), "stop_strings"),
        ("generation_config", json.dumps({"stop_strings": ["x"] * 100}), "stop_strings"),
        ("generation_config", '{"max_new_tokens": "x"}', "max_new_tokens"),
        ("chat_template_kwargs", {"messages": []}, "messages"),
        ("chat_template_kwargs", {"tokenize": False}, "tokenize"),
        ("model", "another", "does not exist"),
        ("model", 5, "does not exist"),
        ("guided_json", {}, "guided_json"),
        ("presence_penalty", 1, "presence_penalty"),
        ("input", "x", "input"),
        ("\ud800", 1, "surrogate"),
    )
]
BAD += [
    ({"messages": [USER], "temperature": 0, "generation_config": json.dumps({"max_length": length})}, "max_length")
    for length in (1, 20)
]
BAD += [
    ({**TEXT, name: value}, word)
    for name, value, word in (
        *(("prompt", value, "prompt") for value in (None, "", 5, {}, [], [[]], [None], [True], ["a", 1], [[1], "a"])),
        *(("prompt", value, "token") for value in ([-1], [280], [[5], [10**30]])),
        ("prompt", [5] * 256, "at most 256"),
        ("prompt", ["a"] * 257, "prompt"),
        ("max_tokens", -2, "max_tokens"),
        ("best_of", 3, "best_of"),
        ("suffix", "x", "suffix"),
        ("echo", "loudly", "echo"),
    )
]
BAD += [
    ({**RESPONSE, name: value}, word)
    for name, value, word in (
        *(("input", value, "input") for value in (None, 5, {}, [5], [{"type": "message"}], [{"type": "x"}])),
        ("input", [{"type": "function_call_output", "call_id": "1"}], "output"),
        ("input", [{"type": "reasoning", "content": [5]}], "content"),
        ("input", [], "empty"),
        ("max_output_tokens", 0, "max_output_tokens=0"),
        ("n", 2, "n=2"),
        ("instructions", 5, "instructions"),
        ("previous_response_id", "x", "previous_response_id"),
    )
]


@pytest.fixture(scope="module")
def served(folder):
    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    server = Server(target, tokenizer, None, "one", lambda line: None)
    yield server.app(), target, tokenizer
    server.decoder.stop()


def answer_to(app, body) -> tuple[int, str]:
    path = next(path for name, path in PATHS.items() if name in body)
    return answer_of(app, path, body)


@pytest.mark.parametrize("name", GOOD)
def test_bodies_of_clients_are_answered(name, served):
    """With the target's own text, where it is greedy and of one prompt."""
    app, target, tokenizer = served
    body = GOOD[name]
    status, text = answer_to(app, body)
    assert status == 200 and "server_error" not in text, text
    if (
        "messages" in body
        and body["messages"][-1] == USER
        and body.get("frequency_penalty", 0) == 0
        and not (body.get("temperature") is None or body["temperature"] > 1 or body.get("tools"))
    ):
        messages = [
            {key: value for key, value in message.items() if key in ("role", "content")}
            for message in body["messages"]
        ]
        if "turns" in name:
            return
        ids = chat_ids(tokenizer, messages)
        limit = body.get("max_tokens", -1)
        count = 256 - ids["input_ids"].shape[1]  # what the context has room for
        if limit is None:
            count = min(count, 1024)
        elif limit > 0:
            count = min(count, limit)
        own = target.generate(**ids, max_new_tokens=count, do_sample=False)[0, ids["input_ids"].shape[1] :]
        if body.get("stream"):
            events = [json.loads(event[6:]) for event in text.strip().split("\n\n")[:-1]]
            choices = [choice for event in events for choice in event["choices"]]
            answer = "".join(choice["delta"].get("content") or "" for choice in choices)
        else:
            answer = json.loads(text)["choices"][0]["message"]["content"]
        assert answer == tokenizer.decode(own, skip_special_tokens=True)


@pytest.mark.parametrize("number", range(len(BAD)))
def test_wrong_bodies_get_a_reason(number, served):
    body, word = BAD[number]
    for stream in (False, True):
        status, text = answer_to(served[0], body if "stream" in body else {**body, "stream": stream})
        assert status in (400, 404), (body, text)
        message = json.loads(text)["error"]["message"]
        assert word in message, (body, message)
        assert not message.startswith(("KeyError", "TypeError", "AttributeError", "IndexError")), (body, message)


@pytest.mark.parametrize(
    "body",
    [
        {**CHAT, "messages": [{"role": "user", "content": "1" * 1_000_000}]},
        {**CHAT, "messages": [USER] * 20_000},
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "1" * 1_000_000}]}]},
        {**TEXT, "prompt": ["Say 1", "1" * 1_000_000]},
        {**RESPONSE, "input": "1" * 1_000_000},
        {**RESPONSE, "instructions": "1" * 1_000_000},
    ],
)
def test_long_prompts_are_refused_before_tokenizing(body, served, monkeypatch):
    """12 MB took 50 s in the server's loop, where nobody was answered meanwhile."""
    app, _, tokenizer = served
    read = []
    call = type(tokenizer)._encode_plus

    def encode(self, text, *args, **kwargs):
        read.append(len(text))
        return call(self, text, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "_encode_plus", encode)
    status, text = answer_to(app, body)
    assert status == 400 and "together may have at most 256" in json.loads(text)["error"]["message"]
    assert 0 < sum(read) < 10_000


def test_length_limit_applies_to_each_prompt(served):
    """Together they are longer than the model's context."""
    status, text = answer_to(served[0], {**TEXT, "prompt": ["1" * 100] * 8, "max_tokens": 1})
    assert status == 200 and len(json.loads(text)["choices"]) == 8
