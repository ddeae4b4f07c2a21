"""Messages in one form, whatever their layout: `role` and `content`, tool calls, parts of text and images."""

import base64
import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from dflash_hf._io.errors import one_line


MESSAGE_LAYOUTS = "`role` and `content`, or `from` and `value`"
NO_IMAGE_READER = "a message has an image, which this target does not read"
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_CALL_ROLES = {"function_call", "tool_call"}  # of answers that are calls as JSON text
_ANSWER_FIELDS = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # an answer may have these alone
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image", "image_url", "input_image")
_IMAGE_FIELDS = ("image", "url", "path", "base64", "image_url")
# Media types other than PNG's, by the beginning of a file in base64. Strict servers refuse an image of another type.
_MEDIA_TYPES = {"/9j/": "image/jpeg", "R0lGOD": "image/gif", "UklGR": "image/webp"}
_IMAGE_MARK = "<image>"  # in LLaVA's and ShareGPT's texts, the place of the next image of the row


class UnusableRow(ValueError):
    """A row that is left out. The message is the reason; equal reasons are counted together."""


def messages_of(value, name: str, images: Sequence = (), every_image_has_a_place: bool = True) -> list[dict]:
    """
    The messages in a column: a list, or its JSON text. Roles have the names of chat templates, texts in parts are
    parts of the type `text`, and images of the type `image` with a path or a `data:` URI.

    Args:
        value: What the column holds.
        name (`str`): The name of the column, for messages of errors.
        images (`Sequence`): The row's images beside its messages. They belong, in order, to the parts of the type
            `image` that name none; where there are no parts, to the marks `<image>` in the texts.
        every_image_has_a_place (`bool`): Whether the row is left out if an image belongs nowhere.

    Raises:
        `UnusableRow`: there are none, or one that cannot be read.
        `ValueError`: the column holds something else.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value or "null")
    if value is None or value in ([], ()):
        raise UnusableRow(f"its `{name}` is empty")
    if not isinstance(value, list | tuple) or not all(item is None or isinstance(item, Mapping) for item in value):
        raise ValueError(f"`{name}` is {one_line(repr(value), 60)}; give a list of messages with {MESSAGE_LAYOUTS}.")
    next_images = iter(images)
    messages = [_message(item or {}, name, next_images) for item in value]
    images_left = list(next_images)
    if images_left and every_image_has_a_place:
        messages = _with_images_at_marks(messages, images_left, name)
    return messages


def looks_like_messages(value) -> bool:
    """Whether a column holds messages rather than any other text or value."""
    if isinstance(value, str):
        return value.lstrip().startswith("[{")
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Mapping)


def _with_images_at_marks(messages: list[dict], images: list, name: str) -> list[dict]:
    """
    Messages whose texts have a mark for each of some images, in order, with these as parts. A line break between mark
    and text only sets them apart, and is dropped.
    """
    marks = sum(message["content"].count(_IMAGE_MARK) for message in messages if _may_have_marks(message))
    if marks == 0:
        raise UnusableRow(f"it has more images than its `{name}` has parts of the type 'image'")
    if marks != len(images):
        raise UnusableRow(f"its `{name}` has {marks} marks {_IMAGE_MARK} for {len(images)} images")
    next_images = iter(images)
    changed = []
    for message in messages:
        if _may_have_marks(message) and _IMAGE_MARK in message["content"]:
            message = {**message, "content": _parts_at_marks(message["content"], next_images)}
        changed.append(message)
    return changed


def _may_have_marks(message: Mapping) -> bool:
    """Whether marks in a message are places of images: in a text that is not the assistant's."""
    return isinstance(message.get("content"), str) and message["role"] != "assistant"


def _parts_at_marks(text: str, images: Iterator) -> list[dict]:
    """A text as parts: an image at each mark, and the texts between them."""
    parts = []
    for number, piece in enumerate(text.split(_IMAGE_MARK)):
        if number > 0:
            parts.append({"type": "image", "image": image_uri(next(images))})
        if piece.strip("\n"):
            parts.append({"type": "text", "text": piece.strip("\n")})
    return parts


def _message(fields: Mapping, name: str, images: Iterator) -> dict:
    """A message of a column in the common form; `images` are those of parts that name none."""
    # 1. Its fields, with OpenAI's names. In a table, every row has every key: a key that is null is absent.
    message = {key: value for key, value in fields.items() if value is not None}
    if not message:
        raise UnusableRow(f"a message in its `{name}` is null or empty")
    if "role" not in message and "from" in message:
        new_names = {"from": "role", "value": "content"}
        message = {new_names.get(key, key): value for key, value in message.items()}
    # 2. Its role, with the name of chat templates.
    role = message.get("role")
    if not isinstance(role, str):
        raise UnusableRow(f"a message in its `{name}` has {sorted(message)}, not {MESSAGE_LAYOUTS}")
    message["role"] = _ROLES.get(role.lower(), role)
    # 3. Its tool calls, which may be a role of their own, or in the field that preceded `tool_calls`.
    if role in _CALL_ROLES:
        message |= {"role": "assistant", "tool_calls": message.pop("content", None)}
    elif "function_call" in message:
        message["tool_calls"] = [message.pop("function_call")]
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"])
    # 4. Its content: text, parts, or nothing beside a call or a thought.
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = [_part(part, images) for part in content]
        message["content"] = content
    if content is None or content == []:
        if not any(message.get(key) for key in _ANSWER_FIELDS):
            raise UnusableRow(f"a message in its `{name}` has no content")
        message.pop("content", None)
    elif not isinstance(content, str | list):
        raise UnusableRow(f"the content of a message is a {type(content).__name__}; give text")
    return message


def _part(part, images: Iterator) -> dict:
    """A part of a message: text, or an image; `images` are those of parts without one of their own."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        kind = type(part).__name__
        raise UnusableRow(f"a message has a part of type {kind!r} that is neither text nor an image")
    kind = part.get("type") or "text"
    if kind in _IMAGE_PARTS:
        return {"type": "image", "image": image_uri(_image_in_part(part, images))}
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise UnusableRow(f"a message has a part of type {kind!r} that is neither text nor an image")
    return {"type": "text", "text": part["text"]}


def _image_in_part(part: Mapping, images: Iterator):
    """The image that a part names, as it is written; or the next of `images`, if there is any."""
    for name in _IMAGE_FIELDS:
        image = part.get(name)
        if image is None:
            continue
        if name == "base64" and image:
            return _data_uri(image)
        return image
    return next(images, None)


def image_uri(image) -> str:
    """
    The path of an image, or its `data:` URI: what files can hold, and transformers' `load_image` reads.

    Args:
        image: A path or URI, bytes, a PIL image, or a mapping with `url`, `bytes` or `path`, as in OpenAI's messages
            and in `datasets.Image`.

    Raises:
        `UnusableRow`: it is an address of the web, there is no such file, or it is something else.
    """
    if isinstance(image, Mapping):
        values = [image.get(name) for name in ("url", "bytes", "path")]
        image = next((value for value in values if value is not None), None)
    if hasattr(image, "save"):  # a PIL image
        file = io.BytesIO()
        if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
            image = image.convert("RGB")
        image.save(file, "PNG")
        image = file.getvalue()
    if isinstance(image, bytes):
        image = _data_uri(base64.b64encode(image).decode())
    if not isinstance(image, str):
        raise UnusableRow("a message has an image that is not there")
    if image.startswith(("http://", "https://")):
        raise UnusableRow("an image is an address, which would be fetched in each epoch; give it as a file")
    if not image.startswith("data:") and not os.path.isfile(image):
        raise UnusableRow(f"there is no image file '{one_line(image, 60)}'")
    return image


def _data_uri(content: str) -> str:
    """The content of an image file, in base64, as a `data:` URI with its media type."""
    media_type = "image/png"
    for beginning, other_type in _MEDIA_TYPES.items():
        if content.startswith(beginning):
            media_type = other_type
    return f"data:{media_type};base64,{content}"


def images_in(messages: Sequence[Mapping]) -> list[str]:
    """The images of messages of [`messages_of`], in order."""
    images = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            images += [part["image"] for part in content if part["type"] == "image"]
    return images


def _calls(value) -> list[dict]:
    """Tool calls as servers write them, with a `function`; also from JSON text, and from their names and arguments."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UnusableRow("the tool calls of a message are not a list of calls")
    calls = [_call(call) for call in calls]
    if not all(isinstance(call["function"], Mapping) and call["function"].get("name") for call in calls):
        raise UnusableRow("a tool call of a message has no name")
    return calls


def _call(call: Mapping) -> dict:
    """A tool call with a `function`."""
    if call.get("function") is not None:
        return call
    return {"type": "function", "function": {key: call[key] for key in ("name", "arguments") if key in call}}


def text_of(message: Mapping) -> str:
    """The text of a message. Parts are joined with a space, as `transformers serve` does."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if "text" in part)


def with_text(message: Mapping) -> Mapping:
    """A message with its parts as one text, unless there are images among them."""
    if not isinstance(message.get("content"), list) or images_in([message]):
        return message
    return {**message, "content": text_of(message)}


def with_arguments(message: Mapping, read: Callable) -> Mapping:
    """A message of [`messages_of`] with the arguments of its tool calls as `read` returns them."""
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
    """The value of JSON text, as servers pass the arguments of a call to the template; other values are unchanged."""
    if isinstance(text, str):
        with contextlib.suppress(ValueError):
            return json.loads(text or "{}")
    return text


def as_text(value) -> str:
    """JSON text, as servers write the arguments of a call."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
