"""What messages may hold: parts by list, no addresses and no files, in every endpoint and every role."""

import builtins
import copy
import json
import os
import socket
import urllib.request

import pytest
from support.serving import answer_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from dflash_hf.serving.messages import check_strings, read_messages, template_arguments_of


if not is_serve_available():
    pytest.skip("serving needs `pip install '.[serving]'`", allow_module_level=True)
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality

from dflash_hf.serving.server import Server


ELSEWHERE = [
    "http://10.0.0.1/x",
    "HTTPS://10.0.0.1/x",
    "/etc/passwd",
    "etc/passwd",
    "file:///etc/passwd",
    " data:,x",
    "",
]
FORMS = {
    "image_url": lambda at: {"type": "image_url", "image_url": {"url": at}},
    "image_url, a string": lambda at: {"type": "image_url", "image_url": at},
    "image_url, two": lambda at: {"type": "image_url", "image_url": {"url": "data:,x", "path": at}},
    "image_url, deeper": lambda at: {"type": "image_url", "image_url": {"url": {"url": at}}},
    "image_url, a list": lambda at: {"type": "image_url", "image_url": [at]},
    "image_url, beside": lambda at: {"type": "image_url", "image_url": {"url": "data:,x"}, "url": at},
    "image_url, elsewhere": lambda at: {"type": "image_url", "image_url": "data:,x", "more": [{"detail": {"a": at}}]},
    "input_image": lambda at: {"type": "input_image", "image_url": at},
    "input_image, file_id": lambda at: {"type": "input_image", "image_url": "data:,x", "file_id": at},
    "video_url": lambda at: {"type": "video_url", "video_url": {"url": at}},
    "video_url, a list": lambda at: {"type": "video_url", "video_url": {"url": [at, at]}},
    "audio_url": lambda at: {"type": "audio_url", "audio_url": {"url": at}},
    "input_audio": lambda at: {"type": "input_audio", "input_audio": at},
    "input_audio, data": lambda at: {"type": "input_audio", "input_audio": {"data": at}},
    "input_audio, format": lambda at: {"type": "input_audio", "input_audio": {"data": "UklG", "format": at}},
    "input_audio, url": lambda at: {
        "type": "input_audio",
        "input_audio": {"data": "UklG", "format": "wav"},
        "url": at,
    },
    "image": lambda at: {"type": "image", "url": at},
    "image, a path": lambda at: {"type": "image", "path": at},
    "video": lambda at: {"type": "video", "video": at},
    "audio": lambda at: {"type": "audio", "url": at},
    "file": lambda at: {"type": "file", "file": {"file_data": at}},
    "input_file": lambda at: {"type": "input_file", "file_url": at},
    "unknown": lambda at: {"type": "x", "x": at},
    "no type": lambda at: {"url": at},
    "no object": lambda at: [at],
}
HELD = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "high"}},
    {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "input_audio", "input_audio": "data:audio/wav;base64,AAAA"},
]


@pytest.fixture(scope="module")
def reading(folder):
    """A server of a model that reads images, videos and audio, and what was given to its processor to load."""
    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded: list[str] = []

    class Processor:
        """As transformers' own: it loads what its messages hold."""

        def __init__(self):
            self.tokenizer = tokenizer
            self.chat_template = tokenizer.chat_template

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def apply_chat_template(self, conversation, chat_template=None, processor_kwargs=None, **options):
            for message in conversation:
                loaded.extend(part["url"] for part in message["content"] if "url" in part)
            loaded.extend(str(value) for name, value in options.items() if name == "images")
            texts = [{**message, "content": "Say 1"} for message in conversation]
            return tokenizer.apply_chat_template(texts, **options)

    server = Server(target, Processor(), None, "one", print)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelManager, "get_model_modality", staticmethod(lambda *args, **more: Modality.MULTIMODAL))
        yield server.app(), loaded
    server.decoder.stop()


@pytest.fixture
def shut(monkeypatch):
    """Nothing is fetched or opened."""

    def refuse(*args, **more):
        raise AssertionError(f"opened: {args}")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(os, "open", refuse)


def bodies_with(part) -> list[tuple[str, dict]]:
    """Requests that hold a part somewhere."""
    turns = [{"role": "user", "content": "Say 1"}]
    answer = {"role": "assistant", "content": "1"}
    text = {"type": "text", "text": "Say 1"}
    chats = [[{"role": role, "content": [text, part]}, *turns] for role in ("system", "user", "assistant", "tool")]
    chats += [[*turns, answer, {"role": "user", "content": [part]}]]
    bodies = [("/v1/chat/completions", {"messages": chat}) for chat in chats]
    bodies += [("/v1/responses", {"input": chat}) for chat in chats]
    bodies += [("/v1/responses", {"input": [part]}), ("/v1/responses", {"input": "Say 1", "instructions": [part]})]
    output = {"type": "function_call_output", "call_id": "1", "output": [part]}
    bodies += [("/v1/responses", {"input": [*turns, output]})]
    bodies += [("/v1/completions", {"prompt": prompt}) for prompt in (part, [part], [text, part])]
    for name in ("images", "processor_kwargs", "chat_template", "conversation", "messages"):
        bodies += [("/v1/chat/completions", {"messages": turns, "chat_template_kwargs": {name: part}})]
    return bodies


@pytest.mark.parametrize("form", FORMS)
def test_addresses_and_files_are_refused(form, reading, shut):
    """Those of videos and audio went on to transformers' loaders, which fetched and opened them."""
    app, loaded = reading
    loaded.clear()
    for at in ELSEWHERE:
        if form == "input_audio, data" and at == "etc/passwd":
            continue  # base64, which has no format
        for path, body in bodies_with(FORMS[form](at)):
            limit = "max_output_tokens" if "responses" in path else "max_tokens"
            for stream in (False, True):
                status, text = answer_of(app, path, {**copy.deepcopy(body), limit: 1, "stream": stream})
                of_nobody = "images" in body.get("chat_template_kwargs", ())  # no variable of this template
                if of_nobody or body.get("prompt") == [at]:  # or the text of a prompt
                    assert status == (400 if body.get("prompt") == [""] else 200) and not loaded
                    continue
                assert status == 400 and '"message":' in text and "opened" not in text, (path, body, text)
    assert not loaded


@pytest.mark.parametrize("part", HELD, ids=str)
def test_data_of_a_request_is_read(part, reading, shut):
    app, loaded = reading
    for path, body in bodies_with(part)[:8]:
        loaded.clear()
        limit = "max_output_tokens" if "responses" in path else "max_tokens"
        status, text = answer_of(app, path, {**copy.deepcopy(body), limit: 1, "temperature": 0})
        assert status == 200, (body, text)
        assert len(loaded) == 1 and loaded[0].startswith("data:") and loaded[0].endswith("base64,AAAA")


def test_error_names_the_wrong_part(reading):
    app, _ = reading
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": [FORMS["video_url"]("http://a")]}]
    _, text = answer_of(app, "/v1/chat/completions", {"messages": messages})
    message = "messages[1].content[0].video_url.url must be a data: URI; this server fetches no addresses"
    assert message in json.loads(text)["error"]["message"]
    messages[1]["content"] = [FORMS["file"]("x")]
    _, text = answer_of(app, "/v1/chat/completions", {"messages": messages})
    error = json.loads(text)["error"]["message"]
    assert "messages[1].content[0]" in error and "'file'" in error and "image_url" in error


@pytest.mark.parametrize("modality", [Modality.LLM, Modality.VLM])
def test_parts_a_model_cannot_read_are_refused(modality):
    """transformers drops it."""
    read = ChatCompletionHandler.get_processor_inputs_from_messages
    for part in HELD[3:] if modality is Modality.VLM else HELD:
        with pytest.raises(ValueError, match=f"part of type '{part['type']}', which the model cannot read"):
            read_messages(read, [{"role": "user", "content": [copy.deepcopy(part)]}], modality)


def test_lone_surrogate_of_a_message_is_refused():
    """The tokenizer said `TextEncodeInput must be Union[TextInputSequence, ...]`."""
    for body, place in (
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, r"messages\[0\].content"),
        ({"stop": ["a", "\udc00"]}, r"stop\[1\]"),
        ({"logit_bias": {"\ud800": 1}}, "logit_bias"),
        ({"\ud800": 1}, "the body"),
    ):
        with pytest.raises(ValueError, match=f"^{place} holds '.ud.00', half of a surrogate pair"):
            check_strings(body)
    check_strings({"messages": [{"content": "\U0001f600 é", "more": [1, None, True]}]})
    deep: list = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than"):
        check_strings({"messages": deep})


def test_templates_get_their_own_arguments(folder):
    """A processor takes the others for images to load."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% generation %}{% if thinking %}{{ messages }}{% endif %}{% endgeneration %}"
    asked = {"thinking": False, "images": ["http://10.0.0.1/x"], "enable_thinking": True}
    assert template_arguments_of(tokenizer, asked) == {"thinking": False}
    tokenizer.chat_template = {"default": "{{ a }}", "tool_use": "{% set images = b %}{{ images }}"}
    assert template_arguments_of(tokenizer, {"a": 1, "b": 2, "images": 3}) == {"a": 1, "b": 2}
    for name in ("tokenize", "chat_template", "tools", "return_dict"):
        with pytest.raises(ValueError, match=f"'{name}', which is not a variable of the chat template"):
            template_arguments_of(tokenizer, {name: "x"})
