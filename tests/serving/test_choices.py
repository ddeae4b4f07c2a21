"""What clients send that a chat of OpenAI's does not: several choices and prompts, ids, echoes, other samplers."""

import json
from collections import Counter

import pytest
import torch
from support.serving import MAX_TOKENS, answer_of
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

from dflash_hf.serving.token_bytes import TokenBytes


if not is_serve_available():
    pytest.skip("serving needs `pip install '.[serving]'`", allow_module_level=True)
from dflash_hf.serving.logprobs import LogProbs
from dflash_hf.serving.options import Options
from dflash_hf.serving.server import Server


CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
SAID = {"messages": [{"role": "user", "content": "Say 1"}], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def served(folder):
    """A target of letters, its server, and its tokenizer."""
    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    server = Server(target, tokenizer, None, "one", lambda line: None)
    yield target, server.app(), tokenizer
    server.decoder.stop()


def answered(app, path, **body) -> dict:
    """The answer to a body, put together from a stream if it asks for one."""
    status, text = answer_of(app, path, body)
    assert status == 200, text
    if not body.get("stream"):
        return json.loads(text)
    *events, end = text.strip().split("\n\n")
    assert end == "data: [DONE]"
    whole: dict = {"choices": {}, "usage": None}
    for piece in (json.loads(event.removeprefix("data: ")) for event in events):
        assert "error" not in piece, piece
        whole["usage"] = piece.get("usage") or whole["usage"]
        for choice in piece["choices"]:
            merged = whole["choices"].setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": []})
            merged["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            merged["finish_reason"] = choice.get("finish_reason") or merged["finish_reason"]
            merged["logprobs"].append(choice.get("logprobs"))
    whole["choices"] = [{**choice, "index": index} for index, choice in sorted(whole["choices"].items())]
    return whole


def texts_of(answer) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == [*range(len(answer["choices"]))]
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_are_n_answers(stream, served):
    _, app, _ = served
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    alone = answered(app, CHAT, **SAID)
    answer = answered(app, CHAT, **SAID, **more, n=3)
    assert texts_of(answer) == texts_of(alone) * 3
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * alone["usage"]["completion_tokens"]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    hot = {**SAID, "temperature": 1.5, "seed": 5}
    one_by_one = [texts_of(answered(app, CHAT, **{**hot, "seed": 5 + number}))[0] for number in range(3)]
    assert texts_of(answered(app, CHAT, **hot, **more, n=3)) == one_by_one and len(set(one_by_one)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_texts_or_ids(stream, served):
    target, app, tokenizer = served
    texts = ["Say 1", "Say 2", "And 3"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    own = []
    for prompt in ids:
        output = target.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
        own.append(output[0, len(prompt) :])
    expected = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in own]
    more = {"max_tokens": 9, "temperature": 0, "stream": stream}
    for prompt in (texts, ids):
        assert texts_of(answered(app, COMPLETION, prompt=prompt, **more)) == expected
        assert texts_of(answered(app, COMPLETION, prompt=prompt[0], **more)) == expected[:1]
    twice = [expected[0], expected[0], expected[1], expected[1]]
    assert texts_of(answered(app, COMPLETION, prompt=ids[:2], n=2, **more)) == twice
    assert texts_of(answered(app, COMPLETION, prompt=texts, echo=True, **more)) == [
        before + after for before, after in zip(texts, expected, strict=True)
    ]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_echo_has_log_probabilities_of_the_prompt(limit, served, monkeypatch):
    """As lm-eval asks for, which reads those of a continuation: `[number of tokens before it : -1]`."""
    monkeypatch.setattr("dflash_hf.serving.logprobs._CHUNK_TOKENS", 7)
    target, app, tokenizer = served
    for prompt in ("Say 1, and then say 2", "x"):
        ids = tokenizer(prompt)["input_ids"]
        body = {
            "prompt": [ids, ids],
            "echo": True,
            "logprobs": 2,
            "max_tokens": limit,
            "temperature": 0,
            "seed": 1234,
        }
        answer = answered(app, COMPLETION, **body)
        text = target.generate(torch.tensor([ids]), max_new_tokens=limit, do_sample=False)[0] if limit else ids
        text = torch.as_tensor(text)
        with torch.no_grad():
            expected = target(text[None]).logits[0].log_softmax(-1)
        for choice in answer["choices"]:
            logprobs = choice["logprobs"]
            assert choice["text"] == tokenizer.decode(text) and "".join(logprobs["tokens"]) == choice["text"]
            assert choice["finish_reason"] == "length"
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
            rows = expected[:-1].gather(1, text[1:, None])[:, 0].tolist()
            assert logprobs["token_logprobs"][1:] == pytest.approx(rows, abs=1e-4)
            tops = expected[:-1].topk(2).values
            for values, top in zip(tops, logprobs["top_logprobs"][1:], strict=True):
                assert [*top.values()] == pytest.approx(values.tolist(), abs=1e-4)
        count = sum(len(choice["logprobs"]["tokens"]) for choice in answer["choices"]) - 2 * len(ids)
        assert answer["usage"]["completion_tokens"] == count == 2 * limit
        assert answer["usage"]["prompt_tokens"] == 2 * len(ids)
        streamed = answered(app, COMPLETION, **body, stream=True)
        assert texts_of(streamed) == texts_of(answer)
        tokens = []
        for choice in streamed["choices"]:
            tokens.append([token for part in choice["logprobs"] if part for token in part["tokens"]])
        assert tokens == [choice["logprobs"]["tokens"] for choice in answer["choices"]]


def test_limits_of_other_clients_are_understood(served):
    """LM Studio and llama.cpp send -1 for all that is left; `null` is as left out."""
    _, app, tokenizer = served
    default_usage = answered(app, CHAT, **{**SAID, "max_tokens": None})["usage"]
    for path, name in ((CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), ("/v1/responses", "max_output_tokens")):
        body = {"temperature": 0, **({"input": "Say 1"} if "responses" in path else {"messages": SAID["messages"]})}
        for limit in (-1, None, 10**9):
            usage = answered(app, path, **body, **{name: limit})["usage"]
            assert usage["total_tokens"] == default_usage["total_tokens"] <= 256
    reads = answered(app, COMPLETION, prompt="Say 1", max_tokens=0)
    assert texts_of(reads) == [""] and reads["usage"]["completion_tokens"] == 0
    assert len(tokenizer("Say 1")["input_ids"]) == reads["usage"]["prompt_tokens"]


def test_samplers_of_other_servers_are_followed(served):
    _, app, _ = served
    greedy = texts_of(answered(app, CHAT, **SAID))
    hot = {**SAID, "temperature": 2.0}
    for more in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 0}, {"top_p": 1e-9}, {"temperature": 1e-30}):
        assert texts_of(answered(app, CHAT, **{**hot, **more})) == greedy, more
        assert texts_of(answered(app, CHAT, **{**SAID, **more})) == greedy, more
    assert texts_of(answered(app, CHAT, **SAID, top_p=0, top_k=-1, min_p=0)) == greedy
    for name in ("repetition_penalty", "repeat_penalty"):
        (text,) = texts_of(answered(app, CHAT, **{**SAID, "max_tokens": MAX_TOKENS}, **{name: 100.0}))
        assert max(Counter(text).values()) == 1  # no letter twice
        assert texts_of(answered(app, CHAT, **SAID, **{name: 1.0})) == greedy
    settings = json.dumps({"top_k": 3, "max_new_tokens": 12, "do_sample": False})
    assert texts_of(answered(app, CHAT, messages=SAID["messages"], generation_config=settings)) == greedy


# ------------------------------------------------------------------------------------------------- parts of characters


def sentencepiece():
    """A tokenizer as Llama 2's: words with their space, and bytes for what is in none of them."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "a", "▁", "é"]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw)


TEXTS = ["a é😀", "😀", "日本", "a", "\ufffd", "é\ufffd"]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_tokens_have_their_own_bytes(kind, folder):
    """They had those of the replacement mark, and all the same text."""
    tokenizer = AutoTokenizer.from_pretrained(folder) if kind == "bytes" else sentencepiece()
    bytes_of = TokenBytes(tokenizer)
    for text in TEXTS:
        data = text.encode()
        ids = tokenizer(text)["input_ids"] if kind == "bytes" else [1 + byte for byte in data]
        assert b"".join(map(bytes_of, ids)) == data
        assert tokenizer.decode(ids) == bytes_of.complete_text(ids) == text
        for cut in range(len(ids)):
            whole = data[:cut].decode(errors="ignore")
            assert bytes_of.complete_text(ids[:cut]) == whole
    smile = tokenizer("😀")["input_ids"] if kind == "bytes" else [1 + byte for byte in "😀".encode()]
    assert [bytes_of.shown(token) for token in smile] == [f"bytes:\\x{byte:02x}" for byte in "😀".encode()]
    if kind == "sentencepiece":
        assert (bytes_of(257), bytes_of(258), bytes_of(259)) == (b" a", b"a", b" ")


def test_partial_characters_keep_their_own_bytes(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    log_probs = LogProbs(TokenBytes(tokenizer), 4)
    tokens = tokenizer("😀")["input_ids"]
    scores = torch.zeros(1, 280)
    scores[0, tokens] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    log_probs(None, scores)
    log_probs.on_token(tokens[1])
    (entry,) = log_probs._entries
    assert entry["bytes"] == [0x9F] and entry["token"] == "bytes:\\x9f"
    assert [top["bytes"] for top in entry["top_logprobs"]] == [[byte] for byte in "😀".encode()]
    assert len(log_probs.pop_entries(is_chat=False)["top_logprobs"][0]) == 4


@pytest.mark.parametrize("cut", range(1, 10))
def test_cut_characters_are_left_out(cut, served, monkeypatch):
    """They were replacement marks, unless the answer was streamed."""
    target, app, tokenizer = served
    tokens = tokenizer("aé😀b")["input_ids"]

    def forced(self, input_ids, scores):
        self._log_probs = scores[0]
        scores = torch.full_like(scores, -1000.0)
        place = input_ids.shape[1] - len(tokenizer("Say 1")["input_ids"])
        scores[:, tokens[place] if place < len(tokens) else 2] = 0.0
        return scores

    monkeypatch.setattr(LogProbs, "__call__", forced)
    body = {"prompt": "Say 1", "max_tokens": cut, "temperature": 0, "logprobs": 0}
    expected = "aé😀b".encode()[:cut].decode(errors="ignore")
    assert texts_of(answered(app, COMPLETION, **body)) == [expected]
    assert texts_of(answered(app, COMPLETION, **body, stream=True)) == [expected]


def test_own_options_are_removed_for_upstream():
    """It refuses fields that it does not know."""
    body = {
        "messages": [],
        "n": 2,
        "top_k": 1,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "length_penalty": 2.0,
        "user": "x",
    }
    body |= {"timings_per_token": True, "samplers": ["top_k"], "functions": [], "suffix": "", "presence_penalty": 0}
    Options.from_body(body)
    assert body == {"messages": []}
