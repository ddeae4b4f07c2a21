"""
From the rows of a dataset to what a target has to answer of them, and back to rows with its responses.

A [`Task`] is made of a row; `regenerate.py` collects its [`Response`]s, one for each turn; [`output_row`] writes both.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from dflash_hf._io.files import digest_of
from dflash_hf.data.conversation import Conversation, Prompt
from dflash_hf.data.messages import NO_IMAGE_READER, UnusableRow, images_in
from dflash_hf.data.row_layouts import conversation_of, tools_of


class Task(NamedTuple):
    """
    What a target has to answer of one row of a dataset: a prompt, or several turns of a conversation.

    Args:
        index (`int`): Number of the row.
        prompts (`list`): For each response, the messages that are added before it; or a single text.
        tools (`list`, *optional*): The tools of the row.
        template_kwargs (`dict`): The row's own arguments of the chat template.
    """

    index: int
    prompts: list[Prompt]
    tools: list | None = None
    template_kwargs: dict = {}

    @property
    def digest(self) -> str:
        """A digest of all that the target reads except its own responses."""
        prompt = self.prompts[0] if len(self.prompts) == 1 else self.prompts
        content = [prompt, self.tools]
        if self.template_kwargs:
            content.append(self.template_kwargs)
        return digest_of(content)


class Response(NamedTuple):
    """
    One response of the target.

    Args:
        message (`dict`): The assistant's message.
        finish_reason (`str`): `"stop"`, `"length"`, or another reason that a server gives.
        prompt_ids, ids (`Sequence[int]`): The ids of prompt and response; empty if a server has answered.
    """

    message: dict
    finish_reason: str
    prompt_ids: Sequence[int] = ()
    ids: Sequence[int] = ()


def make_task(
    conversation: Conversation, index: int, as_chat: bool, every_turn: bool = False, images: bool = True
) -> Task:
    """
    The task that a conversation poses to the target.

    Args:
        conversation (`Conversation`): The content of a row, without ids.
        index (`int`): Number of the row.
        as_chat (`bool`): Whether a prompt that is text is a user's message.
        every_turn (`bool`): Whether the target replaces all assistant turns, or only the last one.
        images (`bool`): Whether the target reads images.

    Raises:
        `UnusableRow`: its prompt is empty, or has images that the target does not read.
    """
    prompts = [conversation.prompt(as_chat)]
    if every_turn:
        prompts = split_turns(conversation.turns(as_chat))
    if not any(prompts):
        raise UnusableRow("its prompt is empty")
    if not images and any(images_in(prompt) for prompt in prompts if not isinstance(prompt, str)):
        raise UnusableRow(NO_IMAGE_READER)
    return Task(index, prompts, conversation.tools, conversation.template_kwargs)


def make_tasks(
    rows: Iterable[Mapping], source: str, as_chat: bool, every_turn: bool, images: bool
) -> tuple[dict[int, Task], dict[str, int]]:
    """
    The tasks of rows by their numbers, and how many rows are left out, by reason; see [`make_task`].

    Raises:
        `ValueError`: a row of `source` is invalid, or there is no prompt at all.
    """
    tasks: dict[int, Task] = {}
    left_out: Counter[str] = Counter()
    for index, row in enumerate(rows):
        try:
            conversation = conversation_of(row, answers=False, ids=False)
            tasks[index] = make_task(conversation, index, as_chat, every_turn, images)
        except UnusableRow as reason:
            left_out[str(reason)] += 1
        except ValueError as error:
            raise ValueError(f"Row {index} of {source}: {error}") from error
    if left_out and not tasks:
        reasons = "; ".join(f"{number} because {reason}" for reason, number in left_out.items())
        raise ValueError(f"None of {left_out.total()} rows of {source} has a prompt: {reasons}.")
    return tasks, left_out


def with_thinking(task: Task, share: float, seed: int) -> Task:
    """A task with `enable_thinking` on or off: on for a share of all rows, sampled by row number and seed."""
    thinks = Random(f"{seed} {task.index} thinking").random() < share
    return task._replace(template_kwargs={**task.template_kwargs, "enable_thinking": thinks})


def task_digest_of(row: Mapping) -> str:
    """[`Task.digest`] of the task that a row of the output answers; rows written before 0.2 do not store it."""
    prompt = row["prompt"] if "prompt" in row else row["messages"][:-1]
    return row.get("question") or digest_of([prompt, tools_of(row)])


def split_turns(messages: Prompt) -> list[Prompt]:
    """
    The messages that are added before each response of the target.

    They are those of the system, users and tools, and those of the assistant that the target does not replace: calls
    of tools whose results follow, and a greeting at the start. Several assistant messages in a row are replaced by one
    response. A text has one.
    """
    if isinstance(messages, str):
        return [messages]
    turns: list[Prompt] = []
    before_response: list[dict] = []
    for i, message in enumerate(messages):
        next_roles = [follower["role"] for follower in messages[i + 1 : i + 2]]
        has_result = bool(message.get("tool_calls")) and next_roles == ["tool"]
        previous_roles = {other["role"] for other in before_response}
        is_greeting = not turns and previous_roles <= {"system", "developer", "assistant"}
        if message["role"] != "assistant" or has_result or is_greeting:
            before_response.append(message)
        elif before_response:
            turns.append(before_response)
            before_response = []
    if before_response:
        turns.append(before_response)
    return turns


def next_prompt(task: Task, responses: Sequence[Response]) -> Prompt:
    """The prompt of the next response: a text, or all messages so far, the responses included."""
    if isinstance(task.prompts[0], str):
        return task.prompts[0]
    messages: list[dict] = []
    for turn, prompt in enumerate(task.prompts[: len(responses) + 1]):
        messages += prompt
        if turn < len(responses):
            messages.append(responses[turn].message)
    return messages


def output_row(task: Task, responses: Sequence[Response]) -> dict:
    """
    A row of the output, which [`~dflash_hf.data.encode.RowEncoder`] reads. Responses that were generated in this
    process are written with their exact ids, so that nothing is tokenized again.
    """
    row: dict = {"row": task.index, "question": task.digest}
    if isinstance(task.prompts[0], str):
        row["prompt"] = task.prompts[0]
        row["completion"] = responses[0].message["content"]
    else:
        answered = task._replace(prompts=task.prompts[: len(responses)])
        row["messages"] = next_prompt(answered, responses)
        # Which messages are the target's; other assistant messages are not supervised.
        row["answered"] = [len(next_prompt(answered, responses[:turn])) for turn in range(len(responses))]
    if task.tools:
        row["tools"] = json.dumps(task.tools, ensure_ascii=False)  # as text: a table would merge other schemas
    if task.template_kwargs:
        row["chat_template_kwargs"] = task.template_kwargs
    reasons = [response.finish_reason for response in responses]
    row["finish_reason"] = reasons[0] if len(task.prompts) == 1 else reasons
    if responses[0].ids:
        row |= _id_columns(responses)
    return row


def _id_columns(responses: Sequence[Response]) -> dict[str, list[int]]:
    """
    The exact ids of prompts and responses, and a loss mask that supervises the responses. A turn whose prompt begins
    with the previous turn's ids continues its example; otherwise it starts another, and `document_ids` separate them.
    """
    examples: list[tuple[list[int], list[int]]] = []  # ids and loss mask
    for response in responses:
        ids: list[int] = []
        mask: list[int] = []
        if examples and _starts_with(response.prompt_ids, examples[-1][0]):
            ids, mask = examples.pop()
        new_ids = response.prompt_ids[len(ids) :]
        ids = [*ids, *new_ids, *response.ids]
        mask = [*mask, *[0] * len(new_ids), *[1] * len(response.ids)]
        examples.append((ids, mask))
    columns: dict[str, list[int]] = {"input_ids": [], "loss_mask": []}
    document_ids = []
    for number, (ids, mask) in enumerate(examples):
        columns["input_ids"] += ids
        columns["loss_mask"] += mask
        document_ids += [number] * len(ids)
    if len(examples) > 1:
        columns["document_ids"] = document_ids
    return columns


def _starts_with(ids: Sequence[int], prefix: list[int]) -> bool:
    return list(ids[: len(prefix)]) == prefix
