"""The prompt of a row, its ids, and the arguments of the chat template."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dflash_hf.data.encode import RowEncoder, given_ids, images_of
from dflash_hf.data.messages import (
    UNSEEN,
    UnusableRow,
    as_text,
    conversation_in,
    request_column,
    tools_of,
    with_arguments,
    without_columns,
)
from dflash_hf.data.response_file import SETTINGS
from dflash_hf.data.template import template_kwargs_of
from dflash_hf.files import read_json


Prompt = str | list[dict]


def prompt_of(row: Mapping, as_chat: bool) -> Prompt:
    """
    The prompt of a row: its messages (or `conversations`) without assistant turns at the end; or `prompt`,
    `instruction` or `question`, as a user message if it is text and `as_chat`. Arguments of tool calls become JSON
    text, which servers expect and files can hold.

    Raises:
        `UnusableRow`: the row has no such column, or its messages cannot be read.
        `ValueError`: there is something else in it.
    """
    said = whole_conversation(row, as_chat)
    while isinstance(said, list) and said and said[-1]["role"] == "assistant":
        said.pop()
    return said


def whole_conversation(row: Mapping, as_chat: bool) -> Prompt:
    """As [`prompt_of`], with the assistant turns at the end."""
    name, said = conversation_in(row)
    if name is None:
        raise without_columns(row, "give `messages`, `conversations`, `prompt`, `instruction` or `question`")
    if name == request_column(row) and not as_chat:
        return "\n\n".join(one["content"] for one in said if one["role"] != "assistant")
    if isinstance(said, str):
        return [{"role": "user", "content": said}] if as_chat and said else said
    return [dict(with_arguments(one, as_text)) for one in said]


def ids_of_prompt(encoder: RowEncoder, prompt: Prompt, tools: list | None = None, **template_kwargs) -> list[int]:
    """
    The ids of a prompt of [`prompt_of`] under the arguments of the chat template; empty for an empty prompt.

    Raises:
        `UnusableRow`: the template rejects it, or it leaves no room for an answer.
    """
    if isinstance(prompt, str):
        ids = encoder.text_ids(prompt)
    else:
        messages = encoder.as_read(prompt, tools)
        ids = encoder.prompt_ids(messages, tools, **template_kwargs) if messages else []
    if encoder.positions is not None and len(ids) >= encoder.positions:
        raise UnusableRow(f"its prompt fills all {encoder.positions:,} positions of the target")
    return ids


def prompt_ids(encoder: RowEncoder, row: Mapping, raw: bool = False) -> list[int]:
    """
    The prompt of a row as ids.

    Args:
        encoder (`RowEncoder`): Tokenizer and chat template.
        row (`Mapping`): With `messages`, whose last answer is dropped; `prompt`, text or messages; or `input_ids`,
            which are cut before the first supervised token.
        raw (`bool`): Treat text as the beginning of the target's own text, not as a user message.

    Raises:
        `ValueError`: the row has no such column, or its prompt is empty.
    """
    images = images_of(row)
    if row.get("input_ids") is not None and not (images and row.get("messages")):
        ids = given_ids(row)
    else:
        # With a `completion`, a text prompt is plain text: training reads such rows in the same way.
        as_chat = not raw and row.get("completion") is None and bool(encoder.tokenizer.chat_template)
        ids = ids_of_prompt(encoder, prompt_of(row, as_chat), tools_of(row), **template_kwargs_of(row))
    if not ids:
        raise ValueError("The prompt is empty.")
    if images and encoder.reader is None:
        raise UnusableRow(UNSEEN)
    return encoder.reader.prompt(ids, images) if images else ids


def template_kwargs(
    given: dict | None,
    data: str | Path | Sequence[str | Path] | None = None,
    stored: Mapping[str, dict] | None = None,
    draft_config=None,
    say: Callable[[str], None] = lambda line: None,
) -> dict:
    """
    The arguments of the chat template: as given; otherwise as the data was made; otherwise as the drafter was trained.

    Args:
        given (`dict`, *optional*): The user's choice.
        data: File or files to train on; `dflash regenerate` writes its settings next to its output.
        stored (`dict[str, dict]`): Arguments of other inputs, such as stored features, by name.
        draft_config (`DFlashDraftConfig`, *optional*): A drafter's configuration, which has those of its training.
        say: Called with a line about the arguments that are used, if there are any.

    Raises:
        `ValueError`: an input was made with other arguments.
    """
    made_with = dict(stored or {})
    for path in [data] if isinstance(data, str | Path) else data or []:
        notes = Path(f"{path}{SETTINGS}")
        if notes.is_file():
            made_with[str(path)] = read_json(notes).get("chat_template_kwargs", {})
    trained_with = None if draft_config is None else (draft_config.dflash_config or {}).get("chat_template_kwargs")
    if given is not None:
        wanted, source = given, "as given"
    elif made_with:
        source, wanted = next(iter(made_with.items()))
        source = f"as {source} was made"
    else:
        wanted, source = trained_with or {}, "as the drafter was trained"
    for name, kwargs in made_with.items():
        if kwargs != wanted:
            raise ValueError(
                f"{name} was made with chat_template_kwargs={kwargs}, not {wanted}; acceptance is low in a mode "
                "that the drafter was not trained in. Make the data again, or leave these arguments out."
            )
    if given is not None or wanted:
        say(f"arguments of the chat template: {json.dumps(wanted)}, {source}")
    if trained_with is not None and wanted != trained_with:
        say(f"the drafter was trained with {json.dumps(trained_with)}: expect lower acceptance")
    return wanted
