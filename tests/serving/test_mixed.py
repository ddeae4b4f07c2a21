"""Hundreds of requests of all kinds at once: every answer the target's own, and memory that does not grow."""

import http.client
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import torch
from support.serving import chat_ids
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available


if not is_serve_available():
    pytest.skip("serving needs `pip install '.[serving]'`", allow_module_level=True)

REQUESTS = 300
CLIENTS = 6
TOKENS = 24
ENDPOINTS = ("chat/completions", "completions", "responses")
# What is decoded in a batch, and what is not; a penalty changes the text.
SETTINGS = (
    {},
    {"stop": ["~"]},
    {"seed": 5},
    {"logprobs": True},
    {"repetition_penalty": 1.3},
    {"n": 2},
    {"min_p": 0.5},
)


def body_of(number: int) -> tuple[str, str, dict, bool]:
    """Endpoint, prompt, body, and whether the client leaves, of a request."""
    endpoint = ENDPOINTS[number % 3]
    settings = dict(SETTINGS[number % len(SETTINGS)])
    prompt = f"Say {number % 11}"
    if endpoint == "completions" and "logprobs" in settings:
        settings["logprobs"] = 2
    if endpoint == "responses":
        settings = {name: value for name, value in settings.items() if name not in ("logprobs", "n")}
    limit = "max_output_tokens" if endpoint == "responses" else "max_tokens"
    inputs = {"chat/completions": {"messages": [{"role": "user", "content": prompt}]}}
    inputs |= {"completions": {"prompt": prompt}, "responses": {"input": prompt}}
    body = {**inputs[endpoint], limit: TOKENS, "temperature": 0, "stream": number % 2 == 0, **settings}
    return endpoint, prompt, body, number % 10 == 7


def ask(url: str, endpoint: str, body: dict, leaves: bool) -> list[str] | None:
    """The texts of an answer; `None` if the client has left."""
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=300)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/v1/{endpoint}", json.dumps(body), headers)
        if leaves and not body["stream"]:
            return None
        answer = connection.getresponse()
        if leaves:
            answer.read(40)
            return None
        text = answer.read().decode()
        assert answer.status == 200, text
    finally:
        connection.close()
    if not body["stream"]:
        whole = json.loads(text)
        if endpoint == "responses":
            return [part["text"] for item in whole["output"] for part in item["content"]]
        return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in whole["choices"]]
    texts: dict[int, str] = {}
    for event in text.strip().split("\n\n"):
        piece = {} if event.endswith("[DONE]") else json.loads(event.removeprefix("data: "))
        assert "error" not in piece, piece
        if piece.get("type") == "response.output_text.delta":
            texts[0] = texts.get(0, "") + piece["delta"]
        for choice in piece.get("choices", ()):
            part = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + part
    return [texts[index] for index in sorted(texts)]


@pytest.mark.slow
def test_three_hundred_mixed_requests_stay_lossless(server, folder):
    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def own(endpoint: str, prompt: str, penalty: float) -> str:
        ids = tokenizer(prompt, return_tensors="pt")
        if endpoint != "completions":
            ids = chat_ids(tokenizer, [{"role": "user", "content": prompt}])
        ids.pop("token_type_ids", None)
        output = target.generate(**ids, max_new_tokens=TOKENS, do_sample=False, repetition_penalty=penalty)
        return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)

    expected: dict[tuple, str] = {}
    kinds: Counter = Counter()
    memory: list[int] = []

    def send(number: int) -> None:
        endpoint, prompt, body, leaves = body_of(number)
        key = endpoint, prompt, body.get("repetition_penalty", 1.0)
        texts = ask(server.url, endpoint, body, leaves)
        if texts is None:
            kinds["left"] += 1
        else:
            same = texts == [expected[key]] * body.get("n", 1)
            kinds["same" if same else f"another: {body} {texts} {expected[key]}"] += 1
        if number % 30 == 29:
            memory.append(server.memory())

    with torch.no_grad():
        for number in range(REQUESTS):
            endpoint, prompt, body, _ = body_of(number)
            key = endpoint, prompt, body.get("repetition_penalty", 1.0)
            if key not in expected:
                expected[key] = own(*key)
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(send, range(REQUESTS)))
    print(f"\n{dict(kinds)}; MiB after each 30 requests: {memory}")
    assert kinds == {"same": REQUESTS * 9 // 10, "left": REQUESTS // 10}
    assert max(memory[4:]) - memory[3] < 24, f"MiB after each 30 requests: {memory}"
    repeated = ask(server.url, *body_of(0)[0::2], False)
    assert repeated == [expected["chat/completions", "Say 0", 1.0]]
