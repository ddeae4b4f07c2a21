"""
The layouts of rows: how each is recognised, and how it becomes a [`~dflash_hf.data.conversation.Conversation`].

No other file knows the columns of rows. `ROW_LAYOUTS` is the table, which [`conversation_of`] applies to a row:

1. The layout of the row is the first whose columns are all there, and not null.
2. Its `read` returns the content of the row: messages, a text or ids.
3. Its `mark_supervised` chooses which part of the content is supervised. It is not called where the target answers the
   row again; the columns of answers may then hold anything.
4. Columns that every layout may have are added: tools, and arguments of the chat template.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_hf._io.errors import one_line
from dflash_hf.data.conversation import Conversation, TokenizedText, check_template_kwargs
from dflash_hf.data.messages import UnusableRow, as_value, image_uri, images_in, looks_like_messages, messages_of


_ID_COLUMNS = ("input_ids", "loss_mask", "labels", "document_ids")
_CONVERSATION_COLUMNS = ("messages", "conversations", "prompt")  # beside ids, they may have the images among these
_IMAGE_COLUMNS = ("images", "image")
# Columns beside an `instruction` or a `question`, as Alpaca, Dolly and OpenOrca name them.
_CONTEXT_COLUMNS = ("input", "context")
_ANSWER_COLUMNS = ("output", "answer", "response")
_SYSTEM_COLUMNS = ("system", "system_prompt")
_IGNORED_LABEL = -100  # as in transformers' losses


# --------------------------------------------------------------------------------------------------- what a row says


def _read_ids(row: Mapping) -> Conversation:
    """`input_ids` with `loss_mask`, or with `labels` that are not shifted, and -100 where they are ignored."""
    ids = integers_in(row, "input_ids")
    mask = None
    if row.get("loss_mask") is not None:
        mask = integers_in(row, "loss_mask") != 0
    elif row.get("labels") is not None:
        labels = integers_in(row, "labels")
        mask = labels != _IGNORED_LABEL
        _check_not_shifted(ids, labels, mask)
    documents = None
    if row.get("document_ids") is not None:
        documents = integers_in(row, "document_ids")
    messages, images = _images_among_ids(row)
    return Conversation(messages, tokens=TokenizedText(ids, mask, documents, images))


def _check_not_shifted(ids: np.ndarray, labels: np.ndarray, mask: np.ndarray) -> None:
    """Raise `ValueError` if a label is not the id of its own token."""
    if len(labels) != len(ids):
        return  # `_check_id_columns` reports it, as for any mask
    shifted = mask & (labels != ids)
    if shifted.any():
        index = int(shifted.argmax())
        raise ValueError(
            f"labels[{index}]={labels[index]} is not input_ids[{index}]={ids[index]}: labels must not be shifted, as "
            "in transformers."
        )


def _images_among_ids(row: Mapping) -> tuple[list[dict], list[str]]:
    """
    The images of a row of ids, after the messages that have them: those of the row's messages, or of what `dflash
    prepare` wrote. Text beside ids may be anything.
    """
    name = _first_column(row, *_CONVERSATION_COLUMNS)
    if name is None:
        return [], [image_uri(image) for image in _images_beside(row)]
    if not looks_like_messages(row[name]):
        return [], []
    messages = messages_of(row[name], name, _images_beside(row))
    images = images_in(messages)
    return messages if images else [], images


def _read_messages(row: Mapping) -> Conversation:
    """`messages`, in OpenAI's layout or any other one of messages."""
    return Conversation(messages_of(row["messages"], "messages", _images_beside(row)))


def _read_sharegpt(row: Mapping) -> Conversation:
    """`conversations`, with the system prompt in a column of its own."""
    messages = messages_of(row["conversations"], "conversations", _images_beside(row))
    system = row.get("system")
    if system and isinstance(system, str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages)


def _read_prompt(row: Mapping) -> Conversation:
    """A `prompt`: messages, or text, which is a user's message under a chat template."""
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        return Conversation(messages_of(prompt, "prompt", _images_beside(row)))
    messages = [{"role": "user", "content": prompt}] if prompt else []
    return Conversation(messages, prompt)


def _read_prompt_of_completion(row: Mapping) -> Conversation:
    """The `prompt` of a `completion`: text that it continues, or messages that it answers."""
    return replace(_read_prompt(row), is_plain_text=isinstance(row["prompt"], str))


def _read_instruction(row: Mapping) -> Conversation:
    """An `instruction` with its input and output, as Alpaca and Dolly have them."""
    return _read_request(row, "instruction")


def _read_question(row: Mapping) -> Conversation:
    """A `question` with its context and answer, as OpenOrca has them."""
    return _read_request(row, "question")


def _read_request(row: Mapping, name: str) -> Conversation:
    """A request in columns of its own: system prompt, request, its context and its answer, all text."""
    system = _text_in(row, *_SYSTEM_COLUMNS)
    request = _text_in(row, name)
    context = _text_in(row, *_CONTEXT_COLUMNS)
    answer = _text_in(row, *_ANSWER_COLUMNS)
    if not request.strip():
        raise UnusableRow(f"its `{name}` is empty")
    if _images_beside(row):
        raise UnusableRow(f"it has an image beside its `{name}`, and no place says where it belongs")
    messages = [{"role": "user", "content": f"{request}\n\n{context}" if context else request}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    text = "\n\n".join(message["content"] for message in messages)
    if answer:
        messages.append({"role": "assistant", "content": answer})
    return Conversation(messages, text)


# --------------------------------------------------------------------------------------- what is supervised of a row


def _supervise_answers(row: Mapping, conversation: Conversation) -> Conversation:
    """
    Supervise all assistant turns, except among the first `given` messages; or those with the indices in `answered`;
    or, instead of turns, the exact ids of the answer in `response_ids`.
    """
    if row.get("response_ids") is not None:
        return replace(conversation, answer_ids=integers_in(row, "response_ids"))
    turns = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    answered = row.get("answered")
    if answered is not None:
        if not isinstance(answered, list) or not all(index in turns for index in answered):
            raise ValueError(f"`answered` is {answered!r}; give indices of assistant messages, which are {turns}.")
        return _with_supervised(row, conversation, sorted(answered))
    first = row.get("given") or 0
    if not isinstance(first, int | float) or first % 1 != 0:
        raise ValueError(f"`given` is {first!r}; give the number of messages that are not supervised.")
    return _with_supervised(row, conversation, [index for index in turns if index >= first])


def _supervise_completion(row: Mapping, conversation: Conversation) -> Conversation:
    """Supervise the `completion` alone, not the answers that are part of the prompt."""
    completion = row["completion"]
    if conversation.text is not None:
        if not isinstance(completion, str):
            raise ValueError("`prompt` is text but `completion` is not; give both as text or both as messages.")
        return replace(conversation, completion=completion)
    turns = [{"role": "assistant", "content": completion}]
    if not isinstance(completion, str):
        turns = messages_of(completion, "completion", _images_beside(row), every_image_has_a_place=False)
    messages = [*conversation.messages, *turns]
    new_indices = range(len(conversation.messages), len(messages))
    supervised = [index for index in new_indices if messages[index]["role"] == "assistant"]
    return _with_supervised(row, replace(conversation, messages=messages), supervised)


def _with_supervised(row: Mapping, conversation: Conversation, supervised: list[int]) -> Conversation:
    """A conversation with the indices of its supervised messages, and the reason why each of them ended."""
    reasons = row.get("finish_reason")
    if not isinstance(reasons, list):  # of the last answer
        reasons = [None] * (len(supervised) - 1) + [reasons]
    reasons = [*reasons, *[None] * len(supervised)]
    return replace(conversation, supervised=supervised, finish_reasons=reasons[: len(supervised)])


def _reject_without_answer(row: Mapping, conversation: Conversation) -> Conversation:
    """Raise `UnusableRow`: a prompt without an answer is left out of training."""
    remedy = "have the target answer the prompts with `dflash regenerate`, or give answers as `completion`"
    raise _no_column_error(row, remedy)


def _check_id_columns(row: Mapping, conversation: Conversation) -> Conversation:
    """Check that the ids of a row fit its `loss_mask` or `labels`, which mark the supervised ones."""
    ids = conversation.tokens.ids
    mask = conversation.tokens.mask
    name = _first_column(row, "loss_mask", "labels")
    if name is None:
        raise UnusableRow("its `input_ids` need a `loss_mask` (1 on the response) or `labels` (-100 elsewhere).")
    if len(ids) == 0:
        raise UnusableRow("its `input_ids` are empty")
    if len(mask) != len(ids):
        raise ValueError(f"There are {len(ids)} input_ids but {len(mask)} {name}; give one for each token.")
    if not mask.any():
        raise UnusableRow(f"its {name} supervise no token; mark the response")
    documents = conversation.tokens.document_ids
    if documents is not None and len(documents) != len(ids):
        raise ValueError(f"There are {len(ids)} input_ids but {len(documents)} document_ids; give one for each token.")
    return conversation


# ----------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class RowLayout:
    """
    A layout of rows.

    Args:
        columns (`tuple[str, ...]`): A row with all of these, none of them null, has this layout.
        read (`Callable`): Gives what a row says as a [`~dflash_hf.data.conversation.Conversation`].
        mark_supervised (`Callable`): Completes the conversation of `read` by what is supervised of it.
        hint (`str`): The columns as messages of errors list them; empty to leave them out there.
    """

    columns: tuple[str, ...]
    read: Callable[[Mapping], Conversation]
    mark_supervised: Callable[[Mapping, Conversation], Conversation] = _supervise_answers
    hint: str = ""

    def fits(self, row: Mapping) -> bool:
        """Whether a row has this layout."""
        for column in self.columns:
            if row.get(column) is None:
                return False
        return True


_IDS = RowLayout(("input_ids",), _read_ids, _check_id_columns, hint="`input_ids` with `loss_mask` or `labels`")
# The order is that of precedence: ids before texts, and a prompt with its completion before a prompt alone.
ROW_LAYOUTS = (
    _IDS,
    RowLayout(("messages",), _read_messages, hint="`messages` or `conversations`, alone or with `response_ids`"),
    RowLayout(("conversations",), _read_sharegpt),
    RowLayout(
        ("prompt", "completion"), _read_prompt_of_completion, _supervise_completion, hint="`prompt` and `completion`"
    ),
    RowLayout(("prompt",), _read_prompt, _reject_without_answer),
    RowLayout(("instruction",), _read_instruction, hint="`instruction` and `output`"),
    RowLayout(("question",), _read_question, hint="`question` and `answer`"),
)


def conversation_of(row: Mapping, answers: bool = True, ids: bool = True) -> Conversation:
    """
    What a row says, whatever its layout.

    Args:
        row (`Mapping`): A row of a dataset; columns that are null count as absent.
        answers (`bool`): Also read what is supervised. Without, the columns of its answers may hold anything.
        ids (`bool`): Read ids, if there are any, in the place of texts.

    Raises:
        `UnusableRow`: it has no column that is read, or something in it is unreadable: the row is left out.
        `ValueError`: the dataset is invalid.
    """
    layout = _layout_of(row, ids)
    if layout is None:
        raise _no_column_error(row, f"give {_columns_with_answers() if answers else _columns_with_prompts()}")
    conversation = layout.read(row)
    if answers:
        conversation = layout.mark_supervised(row, conversation)
    if conversation.tokens is not None or conversation.completion is not None:
        return conversation  # no chat template is needed
    tools = tools_of(row)
    template_kwargs = template_kwargs_of(row)
    if not tools and not template_kwargs:
        return conversation
    return replace(conversation, tools=tools, template_kwargs=template_kwargs)


def _layout_of(row: Mapping, ids: bool) -> RowLayout | None:
    """The first layout that fits a row, with that of ids or without; `None` if none does."""
    for layout in ROW_LAYOUTS:
        if layout.fits(row) and (ids or layout is not _IDS):
            return layout
    return None


def _columns_with_answers() -> str:
    """The columns of rows with answers, for a message: ids last, since few people have them."""
    layouts = [layout for layout in ROW_LAYOUTS if layout is not _IDS]
    hints = [layout.hint for layout in layouts if layout.hint]
    return f"{', '.join(hints)}, or {_IDS.hint}"


def _columns_with_prompts() -> str:
    """The columns of prompts, for a message."""
    columns = dict.fromkeys(f"`{layout.columns[0]}`" for layout in ROW_LAYOUTS if layout is not _IDS)
    *others, last = columns
    return f"{', '.join(others)} or {last}"


def _no_column_error(row: Mapping, remedy: str) -> UnusableRow:
    """The reason for leaving out a row without any column that is read; columns of other rows are null in it."""
    names = sorted(name for name, value in row.items() if value is not None)
    return UnusableRow(f"it has no column to read, only {names}; {remedy}" if names else "all of its columns are null")


# ------------------------------------------------------------------------------------------------------------- columns


def _first_column(row: Mapping, *names: str) -> str | None:
    """The first of the columns that is there and not null; `None` if there is none."""
    for name in names:
        if row.get(name) is not None:
            return name
    return None


def columns_of_ids(names: Sequence[str]) -> list[str]:
    """The columns to read if a dataset's rows are ids alone, without images; otherwise none."""
    may_have_images = set(_CONVERSATION_COLUMNS + _IMAGE_COLUMNS) & set(names)
    if "input_ids" not in names or may_have_images:
        return []
    return [name for name in _ID_COLUMNS if name in names]


def _images_beside(row: Mapping) -> list:
    """The images in the column `images` or `image`, as they are."""
    name = _first_column(row, *_IMAGE_COLUMNS)
    if name is None:
        return []
    images = row[name]
    return list(images) if isinstance(images, list | tuple) else [images]


def _text_in(row: Mapping, *names: str) -> str:
    """The text of the first of some columns that is there; empty if none is."""
    column = _first_column(row, *names)
    if column is None:
        return ""
    if not isinstance(row[column], str):
        raise UnusableRow(f"its `{column}` is of the type {type(row[column]).__name__}; give text")
    return row[column]


def integers_in(row: Mapping, name: str) -> np.ndarray:
    """
    The integers in a column of token ids, labels or a loss mask, `[T]`.

    Raises:
        `ValueError`: it holds something else.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError), np.errstate(invalid="ignore"):
        values = np.asarray(row[name])
        if values.dtype.kind in "bi" and values.ndim == 1:
            return values.astype(np.int64)
        integers = values.astype(np.int64, casting="unsafe" if values.dtype.kind == "f" else "same_kind")
        if integers.ndim == 1 and (integers == values).all():
            return integers
    raise ValueError(f"`{name}` is {one_line(repr(row[name]), 60)}; give a flat list with one integer for each token.")


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
    return [as_value(tool) for tool in tools or ()] or None


def template_kwargs_of(row: Mapping) -> dict:
    """
    A row's own arguments of the chat template: a mapping or its JSON text.

    Raises:
        `ValueError`: `chat_template_kwargs` is neither, or sets what is not the template's.
    """
    kwargs = as_value(row.get("chat_template_kwargs") or {})
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"`chat_template_kwargs` is {one_line(repr(kwargs), 60)}; give a mapping.")
    check_template_kwargs(kwargs)
    return dict(kwargs)
