"""The prompt of a row as ids, and the arguments of the chat template."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dflash_hf._io.files import read_json
from dflash_hf.data.conversation import Prompt
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.messages import NO_IMAGE_READER, UnusableRow
from dflash_hf.data.row_layouts import conversation_of
from dflash_hf.data.sources import SETTINGS_SUFFIX


def ids_of_prompt(encoder: RowEncoder, prompt: Prompt, tools: list | None = None, **template_kwargs) -> list[int]:
    """
    The ids of a text or of messages under the arguments of the chat template; empty for an empty prompt.

    Args:
        encoder (`RowEncoder`): Tokenizer and chat template.
        prompt: See [`~dflash_hf.data.conversation.Conversation.prompt`].
        tools (`list`, *optional*): Tools for the template.

    Raises:
        `UnusableRow`: the template rejects it, or it leaves no room for an answer.
    """
    if isinstance(prompt, str):
        ids = encoder.template.text_ids(prompt)
    else:
        messages = encoder.template.normalize_messages(prompt, tools)
        ids = encoder.template.prompt_ids(messages, tools, **template_kwargs) if messages else []
    if encoder.context_length is not None and len(ids) >= encoder.context_length:
        raise UnusableRow(f"its prompt fills all {encoder.context_length:,} positions of the target")
    return ids


def prompt_ids(encoder: RowEncoder, row: Mapping, raw: bool = False) -> list[int]:
    """
    The prompt of a row as ids.

    Args:
        encoder (`RowEncoder`): Tokenizer and chat template.
        row (`Mapping`): Of any layout, see [`~dflash_hf.data.row_layouts.conversation_of`]. Its last answer is
            dropped; ids are cut before the first supervised one.
        raw (`bool`): Treat text as the beginning of the target's own text, not as a user message.

    Raises:
        `ValueError`: the row has no such column, or its prompt is empty.
    """
    conversation = conversation_of(row, answers=False)
    if conversation.tokens is not None and conversation.messages:
        # Images of later turns are not in the prompt's ids, so the messages are encoded instead.
        conversation = conversation_of(row, answers=False, ids=False)
    if conversation.tokens is not None:
        ids = conversation.tokens.prompt_ids
    else:
        # A text with a `completion` is plain text: training reads such rows in the same way.
        as_chat = bool(encoder.template.tokenizer.chat_template) and not raw and not conversation.is_plain_text
        prompt = conversation.prompt(as_chat)
        ids = ids_of_prompt(encoder, prompt, conversation.tools, **conversation.template_kwargs)
    if not ids:
        raise ValueError("The prompt is empty.")
    images = conversation.images
    if images and encoder.template.reader is None:
        raise UnusableRow(NO_IMAGE_READER)
    return encoder.template.reader.prompt(ids, images) if images else ids


def template_kwargs(
    chosen: dict | None,
    data: str | Path | Sequence[str | Path] | None = None,
    stored: Mapping[str, dict] | None = None,
    draft_config=None,
    say: Callable[[str], None] = lambda line: None,
) -> dict:
    """
    The arguments of the chat template: the user's, else those of the data, else those of the drafter's training.

    Args:
        chosen (`dict`, *optional*): The user's choice.
        data: File or files to train on; `dflash regenerate` writes its settings next to its output.
        stored (`dict[str, dict]`): Arguments of other inputs, such as stored features, by name.
        draft_config (`DFlashDraftConfig`, *optional*): A drafter's configuration, which has those of its training.
        say: Called with a line about the arguments that are used, if there are any.

    Raises:
        `ValueError`: an input was made with other arguments.
    """
    made_with = dict(stored or {})
    paths = [data] if isinstance(data, str | Path) else data or []
    for path in paths:
        settings = Path(f"{path}{SETTINGS_SUFFIX}")
        if settings.is_file():
            made_with[str(path)] = read_json(settings).get("chat_template_kwargs", {})
    trained_with = None
    if draft_config is not None:
        trained_with = (draft_config.dflash_config or {}).get("chat_template_kwargs")

    if chosen is not None:
        kwargs = chosen
        source = "as given"
    elif made_with:
        first, kwargs = next(iter(made_with.items()))
        source = f"as {first} was made"
    else:
        kwargs = trained_with or {}
        source = "as the drafter was trained"
    for name, other_kwargs in made_with.items():
        if other_kwargs != kwargs:
            raise ValueError(
                f"{name} was made with chat_template_kwargs={other_kwargs}, not {kwargs}; acceptance is low in a mode "
                "that the drafter was not trained in. Make the data again, or leave these arguments out."
            )
    if chosen is not None or kwargs:
        say(f"arguments of the chat template: {json.dumps(kwargs)}, {source}")
    if trained_with is not None and kwargs != trained_with:
        say(f"the drafter was trained with {json.dumps(trained_with)}: expect lower acceptance")
    return kwargs
