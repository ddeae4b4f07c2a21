"""
The messages of a request: what they may hold, and that no part of them is an address or a file.

transformers' loaders fetch a string that looks like an address and open one that names a file. So a message holds only
parts of the types listed here, and in a part that is not text each string is a `data:` URI.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.meta


_TEXTS = ("text", "input_text", "output_text")
# The other types of parts, and the field with what is loaded.
_LOADED = {"image_url": "image_url", "input_image": "image_url", "video_url": "video_url"}
_LOADED |= {"audio_url": "audio_url", "input_audio": "input_audio"}
_WORDS = ("type", "detail")  # fields of such a part that are never loaded
_PIECE = 4096  # characters that are counted at a time
_DEPTH = 64  # of objects and lists in a body; copying them is recursive
# Fields that the items of `/v1/responses` need, by their type.
_ITEMS = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # transformers' own


# ------------------------------------------------------------------------------------------------------- any body


def check_strings(body: dict) -> None:
    """
    Raises:
        `ValueError`: a string is no text, because it holds half of a surrogate pair, or the body is nested too deeply.
    """
    for place, value in _values("the body", body):
        names = [*value] if isinstance(value, dict) else []
        for text in [value] if isinstance(value, str) else names:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = ascii(text[error.start])
                raise ValueError(
                    f"{place} holds {half}, half of a surrogate pair, which is no character; send the pair, or leave "
                    "it out."
                ) from error


def _values(name: str, whole) -> Iterator[tuple[str, Any]]:
    """Places and values of all that a value holds, itself first; its own name is not in the others' places."""
    waiting: list[tuple[str, Any, int]] = [(name, whole, 0)]
    while waiting:
        place, value, depth = waiting.pop()
        yield place, value
        if depth > _DEPTH:
            raise ValueError(f"The body is nested more than {_DEPTH} deep; flatten it.")
        if isinstance(value, dict):
            before = f"{place}." if depth else ""
            waiting += [(before + ascii(key)[1:-1], item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}[{index}]", item, depth + 1) for index, item in enumerate(value)]


def check_length(tokenizer, value, most: int | None) -> None:
    """
    Refuse what is much too long for the model before upstream reads it: that takes 50 s for 12 MB, in the loop that
    serves everybody. Pieces are counted, so that this takes no longer for 12 MB than for a text of `most` tokens.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        value: What is read together: a string, or messages and other lists and objects with strings. Types of parts
            and `data:` URIs do not count.
        most (`int`, *optional*): Tokens that the model can read. Twice as many pass, as a template may leave some out.

    Raises:
        `ValueError`: it has more.
    """
    strings = [(place, text) for place, text in _values("", value) if isinstance(text, str)]
    texts = [text for place, text in strings if not place.endswith(".type") and not text.startswith("data:")]
    if most is None or sum(map(len, texts)) <= 2 * most:  # it is soon read
        return
    count = 0
    for text in texts:
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            count += len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
            if count > 2 * most:
                raise ValueError(
                    f"The prompt has more than {count} tokens; prompt and answer together may have at most {most}."
                )


# ------------------------------------------------------------------------------------------------------- messages


def check_items(items: list[dict]) -> None:
    """
    Check the items of `/v1/responses`, which become messages.

    Raises:
        `ValueError`: an item lacks a field.
    """
    if items and "role" not in items[0] and items[0].get("type") in (*_TEXTS, *_LOADED):
        return  # the parts of one message
    for index, item in enumerate(items):
        place = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "reasoning":
            content = item.get("content") or []
            if not isinstance(content, list) or not all(_is_text(part) for part in content):
                raise ValueError(f"{place}.content must be a list of parts with a `text`.")
        elif "role" in item:
            if not isinstance(item["role"], str):
                raise ValueError(f"{place}.role={item['role']!r} must be a string.")
        elif kind in _ITEMS:
            missing = [name for name in _ITEMS[kind] if item.get(name) is None]
            if missing:
                raise ValueError(f"{place} of type {kind!r} has no {missing[0]!r}.")
        elif kind == "message":
            raise ValueError(f"{place} has no 'role'.")
        else:
            raise ValueError(f"{place} has type {kind!r}, which is not supported: messages and function calls are.")


def check_messages(messages: list[dict]) -> None:
    """
    Check messages of a chat.

    Raises:
        `ValueError`: a message has no role, its content is neither a string nor a list of parts, a part is of another
            type than those listed here, or is neither text nor a `data:` URI; or the call of a tool is incomplete.
    """
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{place} has no 'role': it must be a string such as 'user'.")
        content = message.get("content")
        if isinstance(content, list):
            for number, part in enumerate(content):
                _check_part(f"{place}.content[{number}]", part)
        elif content is not None and not isinstance(content, str):
            raise ValueError(f"{place}.content={content!r} must be a string or a list of parts.")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise ValueError(f"{place}.tool_calls={calls!r} must be a list.")
        for number, call in enumerate(calls):
            _check_call(f"{place}.tool_calls[{number}]", call)


def _is_text(part) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _check_part(place: str, part) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError(f"{place}={part!r} must be an object with a 'type'.")
    kind = part["type"]
    if kind in _TEXTS:
        if not _is_text(part):
            raise ValueError(f"{place} of type {kind!r} has no 'text': it must be a string.")
        return
    if kind not in _LOADED:
        supported = ", ".join((*_TEXTS, *_LOADED))
        raise ValueError(
            f"{place}: content has a part of type {kind!r}, which the model cannot read; types are {supported}."
        )
    loaded = part.get(_LOADED[kind])
    if kind == "input_audio" and isinstance(loaded, dict):
        loaded = part["input_audio"] = _as_uri(place, loaded)
    if loaded is None:
        raise ValueError(f"{place}: content has a part of type {kind!r}, which has no {_LOADED[kind]!r}.")
    address = loaded.get("url") if isinstance(loaded, dict) else loaded
    if not isinstance(address, str):
        raise ValueError(f"{place}.{_LOADED[kind]} must be a data: URI, as a string or as the 'url' of an object.")
    for inside, value in _values(kind, part):
        if isinstance(value, str) and inside.rpartition(".")[2] not in _WORDS and not value.startswith("data:"):
            raise ValueError(
                f"{place}.{inside} must be a data: URI; this server fetches no addresses and opens no files."
            )


def _as_uri(place: str, audio: dict) -> str:
    """The `data:` URI of OpenAI's `input_audio`, an object with the data in base64 and the name of its format."""
    data = audio.get("data")
    kind = audio.get("format")
    if isinstance(data, str) and data.startswith("data:"):
        return data
    if not isinstance(data, str) or not re.fullmatch(r"[A-Za-z0-9+/]+=*", data):
        raise ValueError(
            f"{place}.input_audio.data must be base64 or a data: URI; this server fetches no addresses and opens no "
            "files."
        )
    if not isinstance(kind, str) or not re.fullmatch(r"[a-z0-9]+", kind):
        raise ValueError(f"{place}.input_audio.format={kind!r} must name the format of the data, such as 'wav'.")
    return f"data:audio/{kind};base64,{data}"


def _check_call(place: str, call) -> None:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place} must have a 'function' with 'name' and 'arguments'.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"{place}.function.arguments is not JSON ({error}).") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{place}.function.arguments must be a JSON object, as a string or as it is.")


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
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if not read([{"role": "user", "content": [part]}], modality)[0]["content"] and part["type"] not in _TEXTS:
                raise ValueError(f"content has a part of type {part['type']!r}, which the model cannot read.")
    return read(messages, modality)


# ------------------------------------------------------------------------------------------------------- templates


def template_arguments_of(processor, asked: dict) -> dict:
    """
    Of the arguments that a request gives the chat template, those that the template reads. Others change nothing; a
    processor would take them for images, or for the names of files.

    Args:
        processor (`PreTrainedTokenizerBase` or `ProcessorMixin`): Who has the template.
        asked (`dict`): The request's `chat_template_kwargs`.

    Raises:
        `ValueError`: an argument is not the template's, but that of `apply_chat_template`.
    """
    reserved = {*inspect.signature(processor.apply_chat_template).parameters, "messages", "kwargs"}
    taken = [name for name in asked if name in reserved]
    if taken:
        raise ValueError(
            f"chat_template_kwargs has {taken[0]!r}, which is no variable of the chat template; leave it out."
        )
    templates = getattr(processor, "chat_template", None) or ""
    texts = templates.values() if isinstance(templates, dict) else [templates]
    read = set().union(*map(_variables_of, texts))
    return {name: value for name, value in asked.items() if name in read}


def _variables_of(template: str) -> set[str]:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return jinja2.meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", template)))
