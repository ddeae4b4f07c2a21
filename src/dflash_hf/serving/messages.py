"""
Checks of a request's messages: which parts they may have, and that no part is an address or names a file.

transformers' loaders fetch a string that looks like an address and open one that names a file. So only parts of the
types listed here are accepted, and in a part that is not text each string must be a `data:` URI.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.meta


# Types of parts that hold text.
_TEXT_TYPES = ("text", "input_text", "output_text")
# The other types of parts, and the field that holds their data.
_DATA_FIELDS = {"image_url": "image_url", "input_image": "image_url", "video_url": "video_url"}
_DATA_FIELDS |= {"audio_url": "audio_url", "input_audio": "input_audio"}
_PLAIN_FIELDS = ("type", "detail")  # fields of such a part that nothing is loaded from
_CHUNK_CHARACTERS = 4096  # characters whose tokens are counted at a time
_MAX_DEPTH = 64  # nested objects and lists of a body: copying them is recursive
# Required fields of the items of `/v1/responses`, by type.
_REQUIRED_FIELDS = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}
# A tag of transformers that marks what is trained on; jinja2 does not know it.
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


# ------------------------------------------------------------------------------------------------------- any body


def check_strings(body: dict) -> None:
    """
    Raises:
        `ValueError`: a string is not valid Unicode, with half of a surrogate pair, or the body is nested too deeply.
    """
    for path, value in _values("the body", body):
        names = [*value] if isinstance(value, dict) else []
        for text in [value] if isinstance(value, str) else names:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = ascii(text[error.start])
                raise ValueError(
                    f"{path} holds {half}, half of a surrogate pair, which is not a character; send the pair, or "
                    "leave it out."
                ) from error


def _values(name: str, whole) -> Iterator[tuple[str, Any]]:
    """
    The path and the value of everything inside a value, itself first. Its own path is its name, which the other paths
    leave out: `messages[0].content`.

    Raises:
        `ValueError`: it is nested too deeply.
    """
    waiting: list[tuple[str, Any, int]] = [(name, whole, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        yield path, value
        if depth > _MAX_DEPTH:
            raise ValueError(f"The body is nested more than {_MAX_DEPTH} deep; flatten it.")
        if isinstance(value, dict):
            before = f"{path}." if depth else ""
            waiting += [(before + ascii(key)[1:-1], item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}[{index}]", item, depth + 1) for index, item in enumerate(value)]


def check_length(tokenizer, value, max_tokens: int | None) -> None:
    """
    Reject what is much too long for the model before upstream encodes it: that takes 50 s for 12 MB, in the event loop
    that serves all requests. Tokens are counted chunk by chunk and only up to the limit, so that 12 MB are rejected as
    fast as a text of `max_tokens` tokens is read.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        value: The prompt: a string, or messages and other lists and objects with strings. Types of parts and `data:`
            URIs do not count.
        max_tokens (`int`, *optional*): Tokens that the model can read. Twice as many pass, as a template may leave
            some out.

    Raises:
        `ValueError`: it has more.
    """
    strings = [(path, text) for path, text in _values("", value) if isinstance(text, str)]
    texts = [text for path, text in strings if not path.endswith(".type") and not text.startswith("data:")]
    if max_tokens is None or sum(map(len, texts)) <= 2 * max_tokens:  # short enough to be encoded at once
        return
    count = 0
    for text in texts:
        for start in range(0, len(text), _CHUNK_CHARACTERS):
            piece = text[start : start + _CHUNK_CHARACTERS]
            count += len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
            if count > 2 * max_tokens:
                raise ValueError(
                    f"The prompt has more than {count} tokens; prompt and answer together may have at most "
                    f"{max_tokens}."
                )


# ------------------------------------------------------------------------------------------------------- messages


def check_items(items: list[dict]) -> None:
    """
    Check the items of `/v1/responses`, which become messages.

    Raises:
        `ValueError`: an item lacks a field.
    """
    if items and "role" not in items[0] and items[0].get("type") in (*_TEXT_TYPES, *_DATA_FIELDS):
        return  # the parts of one message
    for index, item in enumerate(items):
        path = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "reasoning":
            content = item.get("content") or []
            if not isinstance(content, list) or not all(_is_text(part) for part in content):
                raise ValueError(f"{path}.content must be a list of parts with a `text`.")
        elif "role" in item:
            if not isinstance(item["role"], str):
                raise ValueError(f"{path}.role={item['role']!r} must be a string.")
        elif kind in _REQUIRED_FIELDS:
            missing = [name for name in _REQUIRED_FIELDS[kind] if item.get(name) is None]
            if missing:
                raise ValueError(f"{path} of type {kind!r} has no {missing[0]!r}.")
        elif kind == "message":
            raise ValueError(f"{path} has no 'role'.")
        else:
            raise ValueError(f"{path} has type {kind!r}, which is not supported: messages and function calls are.")


def check_messages(messages: list[dict]) -> None:
    """
    Check messages of a chat.

    Raises:
        `ValueError`: a message has no role, its content is neither a string nor a list of parts, a part is of another
            type than those listed here, or is neither text nor a `data:` URI; or the call of a tool is incomplete.
    """
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{path} has no 'role': it must be a string such as 'user'.")
        content = message.get("content")
        if isinstance(content, list):
            for number, part in enumerate(content):
                _check_part(f"{path}.content[{number}]", part)
        elif content is not None and not isinstance(content, str):
            raise ValueError(f"{path}.content={content!r} must be a string or a list of parts.")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise ValueError(f"{path}.tool_calls={calls!r} must be a list.")
        for number, call in enumerate(calls):
            _check_call(f"{path}.tool_calls[{number}]", call)


def _is_text(part) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _check_part(path: str, part) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError(f"{path}={part!r} must be an object with a 'type'.")
    kind = part["type"]
    if kind in _TEXT_TYPES:
        if not _is_text(part):
            raise ValueError(f"{path} of type {kind!r} has no 'text': it must be a string.")
        return
    if kind not in _DATA_FIELDS:
        supported = ", ".join((*_TEXT_TYPES, *_DATA_FIELDS))
        raise ValueError(
            f"{path}: content has a part of type {kind!r}, which the model cannot read; types are {supported}."
        )
    loaded = part.get(_DATA_FIELDS[kind])
    if kind == "input_audio" and isinstance(loaded, dict):
        loaded = part["input_audio"] = _as_uri(path, loaded)
    if loaded is None:
        raise ValueError(f"{path}: content has a part of type {kind!r}, which has no {_DATA_FIELDS[kind]!r}.")
    address = loaded.get("url") if isinstance(loaded, dict) else loaded
    if not isinstance(address, str):
        raise ValueError(f"{path}.{_DATA_FIELDS[kind]} must be a data: URI, as a string or as the 'url' of an object.")
    for inside, value in _values(kind, part):
        if isinstance(value, str) and inside.rpartition(".")[2] not in _PLAIN_FIELDS and not value.startswith("data:"):
            raise ValueError(
                f"{path}.{inside} must be a data: URI; this server fetches no addresses and opens no files."
            )


def _as_uri(path: str, audio: dict) -> str:
    """The `data:` URI of OpenAI's `input_audio`, an object with the data in base64 and the name of its format."""
    data = audio.get("data")
    kind = audio.get("format")
    if isinstance(data, str) and data.startswith("data:"):
        return data
    if not isinstance(data, str) or not re.fullmatch(r"[A-Za-z0-9+/]+=*", data):
        raise ValueError(
            f"{path}.input_audio.data must be base64 or a data: URI; this server fetches no addresses and opens no "
            "files."
        )
    if not isinstance(kind, str) or not re.fullmatch(r"[a-z0-9]+", kind):
        raise ValueError(f"{path}.input_audio.format={kind!r} must name the format of the data, such as 'wav'.")
    return f"data:audio/{kind};base64,{data}"


def _check_call(path: str, call) -> None:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{path} must have a 'function' with 'name' and 'arguments'.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"{path}.function.arguments is not JSON ({error}).") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{path}.function.arguments must be a JSON object, as a string or as it is.")


def read_messages(read: Callable, messages: list[dict], modality) -> list[dict]:
    """
    Messages as upstream's `read` makes them for a chat template. It drops parts that the model cannot read, and the
    text beside an empty `tool_calls`.

    Args:
        read (`Callable`): Upstream's `get_processor_inputs_from_messages`.
        messages (`list[dict]`): A chat's.
        modality (`Modality`): What the model reads.

    Raises:
        `ValueError`: see [`check_messages`]; or the model cannot read a part.
    """
    messages = [{key: value for key, value in message.items() if key != "tool_calls" or value} for message in messages]
    check_messages(messages)
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            is_dropped = not read([{"role": "user", "content": [part]}], modality)[0]["content"]
            if is_dropped and part["type"] not in _TEXT_TYPES:
                raise ValueError(f"content has a part of type {part['type']!r}, which the model cannot read.")
    return read(messages, modality)


# ------------------------------------------------------------------------------------------------------- templates


def template_arguments_of(processor, arguments: dict) -> dict:
    """
    The arguments of a request that its chat template reads. Others change nothing, but a processor would take them for
    images, or for names of files.

    Args:
        processor (`PreTrainedTokenizerBase` or `ProcessorMixin`): The processor with the template.
        arguments (`dict`): The request's `chat_template_kwargs`.

    Raises:
        `ValueError`: an argument is not the template's, but that of `apply_chat_template`.
    """
    reserved = {*inspect.signature(processor.apply_chat_template).parameters, "messages", "kwargs"}
    reserved_names = [name for name in arguments if name in reserved]
    if reserved_names:
        raise ValueError(
            f"chat_template_kwargs has {reserved_names[0]!r}, which is not a variable of the chat template; leave it "
            "out."
        )
    templates = getattr(processor, "chat_template", None) or ""
    texts = templates.values() if isinstance(templates, dict) else [templates]
    read = set().union(*map(_variables_of, texts))
    return {name: value for name, value in arguments.items() if name in read}


def _variables_of(template: str) -> set[str]:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return jinja2.meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", template)))
