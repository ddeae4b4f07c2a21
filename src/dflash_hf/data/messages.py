"""Conversations of rows in one form, whatever their layout: messages with `role` and `content`, and lists of tools."""

import base64
import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping

from dflash_hf.terminal import one_line


LAYOUTS = "`role` and `content`, or `from` and `value`"
_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response"), "tool"),
}
_CALLS = {"function_call", "tool_call"}  # roles of answers that are calls as JSON text
_OF_THE_TARGET = {"tool_calls", "reasoning_content", "reasoning", "thinking"}  # an answer may have these alone
_TEXTS = {"text", "input_text", "output_text"}
UNSEEN = "a message has an image, which this target does not read"
_IMAGES = {"image", "image_url", "input_image"}
_MARK = "<image>"  # in LLaVA's and ShareGPT's texts, the place of the next image of the row
# The columns of a request, of what completes it, of its answer, and of a system prompt, as Alpaca, Dolly and OpenOrca
# name them.
_REQUESTS = ("instruction", "question")
_COMPLETE = ("input", "context")
_ANSWERS = ("output", "answer", "response")
_SYSTEM = ("system", "system_prompt")


class UnusableRow(ValueError):
    """A row that is left out. The message is the reason; equal reasons are counted together."""


def column_of(row: Mapping, *names: str) -> str | None:
    """The first of the columns that is there and not null; `None` if there is none."""
    return next((name for name in names if row.get(name) is not None), None)


def without_columns(row: Mapping, remedy: str) -> UnusableRow:
    """The reason for leaving out a row without any column that is read; columns of other rows are null in it."""
    given = sorted(name for name, value in row.items() if value is not None)
    return UnusableRow(f"it has no column to read, only {given}; {remedy}" if given else "all of its columns are null")


def conversation_column(row: Mapping) -> str | None:
    """The column of a row's conversation; `None` if there is none."""
    return column_of(row, "messages", "conversations", "prompt")


def request_column(row: Mapping) -> str | None:
    """The column of a request that is text in a column of its own; `None` if there is none."""
    return column_of(row, *_REQUESTS)


def _request_in(row: Mapping, name: str) -> list[dict]:
    """A request in columns of its own as messages."""
    texts = []
    for names in (_SYSTEM, (name,), _COMPLETE, _ANSWERS):
        column = column_of(row, *names)
        text = "" if column is None else row[column]
        if not isinstance(text, str):
            raise UnusableRow(f"its `{column}` is of the type {type(text).__name__}; give text")
        texts.append(text)
    system, request, more, answer = texts
    if not request.strip():
        raise UnusableRow(f"its `{name}` is empty")
    if column_of_images(row):
        raise UnusableRow(f"it has an image beside its `{name}`, and no place says where it belongs")
    messages = [{"role": "user", "content": f"{request}\n\n{more}" if more else request}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    if answer:
        messages.append({"role": "assistant", "content": answer})
    return messages


def conversation_in(row: Mapping) -> tuple[str | None, str | list[dict]]:
    """
    The column of a row's conversation, and what it holds: messages, or a `prompt` that is text. `None` and no messages
    if there is no such column. An `instruction` or a `question` is the message of a user, with `input` or `context` if
    there is any; `output`, `answer` or `response` is that of the assistant.

    Raises:
        `UnusableRow`, `ValueError`: as [`messages_in`].
    """
    name = conversation_column(row)
    if name is None:
        name = request_column(row)
        return name, [] if name is None else _request_in(row, name)
    return name, row[name] if name == "prompt" and isinstance(row[name], str) else messages_in(row, name)


def messages_in(row: Mapping, name: str) -> list[dict]:
    """
    The messages in a column: a list, or its JSON text. Roles have the names of chat templates, texts in parts are
    parts of the type `text`, and images of the type `image` with a path or a `data:` URI. Images that name none are
    those of the column `images`, in order; where there are no parts, they belong to the marks `<image>`. In
    ShareGPT's layout, a column `system` is the first message.

    Raises:
        `UnusableRow`: there are none, or one that cannot be read.
        `ValueError`: the column holds something else.
    """
    value = row[name]
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value or "null")
    if value is None or value in ([], ()):
        raise UnusableRow(f"its `{name}` is empty")
    if not isinstance(value, list | tuple) or not all(one is None or isinstance(one, Mapping) for one in value):
        raise ValueError(f"`{name}` is {one_line(repr(value), 60)}; give a list of messages with {LAYOUTS}.")
    images = iter(column_of_images(row))
    messages = [_message(one or {}, name, images) for one in value]
    left = list(images)
    if name != "completion" and left:
        messages = _with_images_at_marks(messages, left, name)
    system = row.get("system") if name == "conversations" else None
    if system and isinstance(system, str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _with_images_at_marks(messages: list[dict], images: list, name: str) -> list[dict]:
    """
    Messages whose texts have a mark for each of some images, in order, with these as parts. A line break between mark
    and text only sets them apart, and is dropped.
    """
    marked = [isinstance(one.get("content"), str) and one["role"] != "assistant" for one in messages]
    marks = sum(one["content"].count(_MARK) for one, marks_it in zip(messages, marked, strict=True) if marks_it)
    if marks == 0:
        raise UnusableRow(f"it has more images than its `{name}` has parts of the type 'image'")
    if marks != len(images):
        raise UnusableRow(f"its `{name}` has {marks} marks {_MARK} for {len(images)} images")
    following = iter(images)
    changed = []
    for message, marks_it in zip(messages, marked, strict=True):
        if marks_it and _MARK in message["content"]:
            message = {**message, "content": _parts_of(message["content"], following)}
        changed.append(message)
    return changed


def _parts_of(text: str, images: Iterator) -> list[dict]:
    """A text as parts: an image at each mark, and the texts between them."""
    parts = []
    for place, piece in enumerate(text.split(_MARK)):
        if place > 0:
            parts.append({"type": "image", "image": image_uri(next(images))})
        if piece.strip("\n"):
            parts.append({"type": "text", "text": piece.strip("\n")})
    return parts


def _message(given: Mapping, name: str, images: Iterator) -> dict:
    message = {key: value for key, value in given.items() if value is not None}  # tables have every key in every one
    if not message:
        raise UnusableRow(f"a message in its `{name}` is null or empty")
    if "role" not in message and "from" in message:
        names = {"from": "role", "value": "content"}
        message = {names.get(key, key): value for key, value in message.items()}
    role = message.get("role")
    if not isinstance(role, str):
        raise UnusableRow(f"a message in its `{name}` has {sorted(message)}, not {LAYOUTS}")
    message["role"] = _ROLES.get(role.lower(), role)
    if role in _CALLS:
        message |= {"role": "assistant", "tool_calls": message.pop("content", None)}
    elif "function_call" in message:
        message["tool_calls"] = [message.pop("function_call")]
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"])
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = message["content"] = [_part(one, images) for one in content]
    if content is None or content == []:
        if not any(message.get(key) for key in _OF_THE_TARGET):
            raise UnusableRow(f"a message in its `{name}` has no content")
        message.pop("content", None)
    elif not isinstance(content, str | list):
        raise UnusableRow(f"the content of a message is a {type(content).__name__}; give text")
    return message


def _part(part, images: Iterator) -> dict:
    """A part of a message: text, or an image; `images` are those of parts without one of their own."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") or "text" if isinstance(part, Mapping) else type(part).__name__
    if kind in _IMAGES and isinstance(part, Mapping):
        names = ("image", "url", "path", "base64", "image_url")
        given = next((part[name] for name in names if part.get(name) is not None), None)
        given = f"data:image/png;base64,{given}" if given is part.get("base64") and given else given
        return {"type": "image", "image": image_uri(next(images, None) if given is None else given)}
    if kind not in _TEXTS or not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise UnusableRow(f"a message has a part of type {kind!r} that is neither text nor an image")
    return {"type": "text", "text": part["text"]}


def column_of_images(row: Mapping) -> list:
    """The images in the column `images` or `image`, as they are."""
    given = row.get("images") if row.get("images") is not None else row.get("image")
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def image_uri(given) -> str:
    """The path of an image, or its `data:` URI: what files can hold, and transformers' `load_image` reads."""
    if isinstance(given, Mapping):  # of an OpenAI message, or of `datasets.Image`
        given = next((given[name] for name in ("url", "bytes", "path") if given.get(name) is not None), None)
    if hasattr(given, "save"):  # a PIL image
        file = io.BytesIO()
        (given if given.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else given.convert("RGB")).save(file, "PNG")
        given = file.getvalue()
    if isinstance(given, bytes):
        given = f"data:image/png;base64,{base64.b64encode(given).decode()}"
    if not isinstance(given, str):
        raise UnusableRow("a message has an image that is not there")
    if given.startswith(("http://", "https://")):
        raise UnusableRow("an image is an address, which would be fetched in each epoch; give it as a file")
    if not given.startswith("data:") and not os.path.isfile(given):
        raise UnusableRow(f"there is no image file '{one_line(given, 60)}'")
    return given


def images_in(messages: list[Mapping]) -> list[str]:
    """The images of messages of [`messages_in`], in order."""
    parts = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def _calls(value) -> list[dict]:
    """Tool calls as servers write them, with a `function`; also from JSON text, and from their names and arguments."""
    with contextlib.suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, list) or not all(isinstance(one, Mapping) for one in calls):
        raise UnusableRow("the tool calls of a message are not a list of calls")
    calls = [
        one
        if one.get("function") is not None
        else {"type": "function", "function": {key: one[key] for key in ("name", "arguments") if key in one}}
        for one in calls
    ]
    if not all(isinstance(one["function"], Mapping) and one["function"].get("name") for one in calls):
        raise UnusableRow("a tool call of a message has no name")
    return calls


def text_of(message: Mapping) -> str:
    """The text of a message. Parts are joined with a space, as `transformers serve` does."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part["text"] for part in content if "text" in part)


def with_text(message: Mapping) -> Mapping:
    """A message with its parts as one text, unless there are images among them."""
    if not isinstance(message.get("content"), list) or images_in([message]):
        return message
    return {**message, "content": text_of(message)}


def tools_of(row: Mapping) -> list | None:
    """
    The tools of a row: a list, or JSON text, since tables cannot hold tools of different schemas.

    Raises:
        `ValueError`: `tools` is neither.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except ValueError as error:
            raise ValueError(f"`tools` is text but not JSON ({error}); give a list of tools.") from error
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"`tools` is a {type(tools).__name__}; give a list of tools, or leave it out.")
    return [as_value(one) for one in tools or ()] or None


def with_arguments(message: Mapping, read: Callable) -> Mapping:
    """A message of [`messages_in`] with the arguments of its tool calls as `read` returns them."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if "arguments" in function:
            function["arguments"] = read(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def as_value(text):
    """The value of JSON text, as servers pass the arguments of a call to the template; unchanged if it is none."""
    with contextlib.suppress(ValueError):
        return json.loads(text or "{}") if isinstance(text, str) else text
    return text


def as_text(value) -> str:
    """JSON text, as servers write the arguments of a call."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
