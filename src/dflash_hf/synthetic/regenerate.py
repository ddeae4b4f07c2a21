"""The target's own answers to the prompts of a dataset, generated in this process or by a server."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path
from random import Random
from typing import NamedTuple

from dflash_hf._io.files import digest_of
from dflash_hf.data.conversation import Conversation, Prompt
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.images import load
from dflash_hf.data.messages import NO_IMAGE_READER, UnusableRow, image_uri, images_in, with_text
from dflash_hf.data.prompts import ids_of_prompt
from dflash_hf.data.row_layouts import conversation_of, tools_of
from dflash_hf.synthetic.chat_client import ChatClient, NoAnswer, ServerError
from dflash_hf.synthetic.responses import responses, responses_to_images
from dflash_hf.targets.generation import context_length_of, eos_ids, without_token


RowOrReason = tuple[dict | None, str | None]  # the reason also of a row that ends early
_MAX_TIMEOUTS = 8  # rows without an answer in time, one after the other: the server hangs


class Question(NamedTuple):
    """
    What the target answers of a row.

    Args:
        index (`int`): Number of the row.
        prompts (`list`): What it reads anew before each of its answers: one text, or each time messages.
        tools (`list`, *optional*): The tools of the row.
        template_kwargs (`dict`): The row's own arguments of the chat template.
    """

    index: int
    prompts: list[Prompt]
    tools: list | None = None
    template_kwargs: dict = {}

    @property
    def digest(self) -> str:
        """A digest of all that the target reads except its own answers."""
        prompt = self.prompts[0] if len(self.prompts) == 1 else self.prompts
        read = [prompt, self.tools]
        if self.template_kwargs:
            read.append(self.template_kwargs)
        return digest_of(read)


class Answer(NamedTuple):
    """The target's message, why it ended, and in this process the ids of its prompt and its own."""

    message: dict
    reason: str
    prompt_ids: Sequence[int] = ()
    ids: Sequence[int] = ()


def question_of(
    conversation: Conversation, index: int, as_chat: bool, every_turn: bool = False, images: bool = True
) -> Question:
    """
    The question of a conversation.

    Args:
        conversation (`Conversation`): What a row says, without ids.
        index (`int`): Number of the row.
        as_chat (`bool`): A prompt that is text is a user's message.
        every_turn (`bool`): All assistant turns are answered anew, not only the last one.
        images (`bool`): Whether the target reads them.

    Raises:
        `UnusableRow`: its prompt is empty, or has images that the target does not read.
    """
    prompts = [conversation.prompt(as_chat)]
    if every_turn:
        prompts = turns_of(conversation.turns(as_chat))
    if not any(prompts):
        raise UnusableRow("its prompt is empty")
    if not images and any(images_in(prompt) for prompt in prompts if not isinstance(prompt, str)):
        raise UnusableRow(NO_IMAGE_READER)
    return Question(index, prompts, conversation.tools, conversation.template_kwargs)


def questions_of(
    rows: Iterable[Mapping], source: str, as_chat: bool, every_turn: bool, images: bool
) -> tuple[dict[int, Question], dict[str, int]]:
    """
    The questions of rows by their numbers, and how many rows have none, by reason; see [`question_of`].

    Raises:
        `ValueError`: a row of `source` is invalid, or there is no prompt at all.
    """
    questions: dict[int, Question] = {}
    left_out: Counter[str] = Counter()
    for index, row in enumerate(rows):
        try:
            conversation = conversation_of(row, answers=False, ids=False)
            questions[index] = question_of(conversation, index, as_chat, every_turn, images)
        except UnusableRow as reason:
            left_out[str(reason)] += 1
        except ValueError as error:
            raise ValueError(f"Row {index} of {source}: {error}") from error
    if left_out and not questions:
        reasons = "; ".join(f"{number} because {reason}" for reason, number in left_out.items())
        raise ValueError(f"None of {left_out.total()} rows of {source} has a prompt: {reasons}.")
    return questions, left_out


def with_thinking(question: Question, share: float, seed: int) -> Question:
    """A question that asks for a thought or for none, drawn by its number."""
    thinks = Random(f"{seed} {question.index} thinking").random() < share
    return question._replace(template_kwargs={**question.template_kwargs, "enable_thinking": thinks})


def question_digest(row: Mapping) -> str:
    """The digest of the question that a row of the output answers; rows before 0.2 have none."""
    prompt = row["prompt"] if "prompt" in row else row["messages"][:-1]
    return row.get("question") or digest_of([prompt, tools_of(row)])


def turns_of(messages: Prompt) -> list[Prompt]:
    """
    What stands before each answer of the target: messages of others, calls of tools whose results follow, and what
    the assistant says before anybody else. Several of its messages in a row become one answer; a text has one.
    """
    if isinstance(messages, str):
        return [messages]
    turns: list[Prompt] = []
    waiting: list[dict] = []  # for the next answer
    for place, message in enumerate(messages):
        roles_after = [follower["role"] for follower in messages[place + 1 : place + 2]]
        has_result = bool(message.get("tool_calls")) and roles_after == ["tool"]
        roles_before = {other["role"] for other in waiting}
        is_greeting = not turns and roles_before <= {"system", "developer", "assistant"}
        if message["role"] != "assistant" or has_result or is_greeting:
            waiting.append(message)
        elif waiting:
            turns.append(waiting)
            waiting = []
    return [*turns, waiting] if waiting else turns


def prompt_after(question: Question, answers: Sequence[Answer]) -> Prompt:
    """What the target reads after some of its answers: a text, or all messages up to its next answer."""
    if isinstance(question.prompts[0], str):
        return question.prompts[0]
    messages: list[dict] = []
    for turn, prompt in enumerate(question.prompts[: len(answers) + 1]):
        messages += prompt
        if turn < len(answers):
            messages.append(answers[turn].message)
    return messages


def row_of(question: Question, answers: Sequence[Answer]) -> dict:
    """
    An output row, as [`~dflash_hf.data.encode.RowEncoder`] reads it. In this process it also has the exact ids, so
    that nothing is tokenized again: `document_ids` divide them where a prompt does not begin with the turn before.
    """
    row: dict = {"row": question.index, "question": question.digest}
    if isinstance(question.prompts[0], str):
        row["prompt"] = question.prompts[0]
        row["completion"] = answers[0].message["content"]
    else:
        answered = question._replace(prompts=question.prompts[: len(answers)])
        row["messages"] = prompt_after(answered, answers)
        # Other answers are not this target's.
        row["answered"] = [len(prompt_after(answered, answers[:turn])) for turn in range(len(answers))]
    if question.tools:
        row["tools"] = json.dumps(question.tools, ensure_ascii=False)  # as text: a table would merge other schemas
    if question.template_kwargs:
        row["chat_template_kwargs"] = question.template_kwargs
    reasons = [answer.reason for answer in answers]
    row["finish_reason"] = reasons[0] if len(question.prompts) == 1 else reasons
    if answers[0].ids:
        row |= _id_columns(answers)
    return row


def _id_columns(answers: Sequence[Answer]) -> dict[str, list[int]]:
    """The exact ids of answers and their prompts, and which are learned; turns that begin alike share an example."""
    examples: list[tuple[list[int], list[int]]] = []  # ids and loss mask
    for answer in answers:
        ids: list[int] = []
        mask: list[int] = []
        if examples and _begins(answer.prompt_ids, examples[-1][0]):
            ids, mask = examples.pop()
        new_ids = answer.prompt_ids[len(ids) :]
        ids = [*ids, *new_ids, *answer.ids]
        mask = [*mask, *[0] * len(new_ids), *[1] * len(answer.ids)]
        examples.append((ids, mask))
    columns: dict[str, list[int]] = {"input_ids": [], "loss_mask": []}
    documents = []
    for number, (ids, mask) in enumerate(examples):
        columns["input_ids"] += ids
        columns["loss_mask"] += mask
        documents += [number] * len(ids)
    if len(examples) > 1:
        columns["document_ids"] = documents
    return columns


def _begins(ids: Sequence[int], beginning: list[int]) -> bool:
    """Whether ids begin with others."""
    return list(ids[: len(beginning)]) == beginning


class _Waiting(list):
    """Keys and prompts that wait. Iterating takes the last of them each time, and may go on when more have come."""

    def __iter__(self):
        return self

    def __next__(self):
        if not self:
            raise StopIteration
        return self.pop()


def generate_rows(
    target,
    encoder: RowEncoder,
    questions: Sequence[Question],
    max_new_tokens: int,
    batch_size: int | None = None,
    generation_config=None,
    seed: int = 0,
) -> Iterator[RowOrReason]:
    """
    Yield what a target in this process makes of questions, as it finishes; long prompts first, so that memory runs out
    early or never. A conversation goes on with its next turn as soon as it has an answer, so that batches stay full;
    it ends early where the template refuses what follows.

    Args:
        target (`PreTrainedModel`): The target.
        encoder (`RowEncoder`): Its tokenizer, and the mask token, which is suppressed.
        questions (`Sequence[Question]`): What it answers.
        max_new_tokens (`int`): Maximum length of an answer.
        batch_size (`int`, *optional*): Rows that decode together.
        generation_config (`GenerationConfig`): Default: the target's.
        seed (`int`): Seed of sampling, from which each turn of each row gets its own.
    """
    config = without_token(generation_config or target.generation_config, encoder.mask_token_id)
    encoder = replace(encoder, positions=context_length_of(target))
    waiting = _Waiting()  # prompts of text, by key
    waiting_with_images = _Waiting()  # images of prompts, by key
    running: dict = {}  # by key: the question, its answers so far, and the ids of its next prompt

    def next_turn(question: Question, answers: list[Answer]) -> RowOrReason | None:
        """Have the next turn wait for its answer; what becomes of the row if there is none."""
        if len(answers) == len(question.prompts):
            return row_of(question, answers), None
        prompt = prompt_after(question, answers)
        try:
            ids = ids_of_prompt(encoder, prompt, question.tools, **question.template_kwargs)
            if not ids:
                raise UnusableRow("its prompt is empty")
        except UnusableRow as unusable:
            return row_of(question, answers) if answers else None, str(unusable)
        key = f"{question.index}.{len(answers)}" if answers else question.index
        running[key] = question, answers, ids
        images = [] if isinstance(prompt, str) else images_in(prompt)
        if images:
            waiting_with_images.append((key, images))
        else:
            waiting.append((key, ids))
        return None

    # 1. First turns wait, the longest last: it is taken first.
    for question in questions:
        outcome = next_turn(question, [])
        if outcome:
            yield outcome
    waiting.sort(key=lambda keyed_ids: len(keyed_ids[1]))
    # 2. Texts are answered together, then prompts with images one by one.
    texts = responses(target, waiting, max_new_tokens, config, batch_size, seed)
    image_prompts = _image_prompts(encoder, waiting_with_images, running)
    for key, ids in chain(texts, responses_to_images(target, image_prompts, max_new_tokens, config, seed)):
        question, answers, prompt_ids = running.pop(key)
        stopped = ids[-1] in eos_ids(config)
        text = encoder.tokenizer.decode(ids[:-1] if stopped else ids)
        message = {"role": "assistant", "content": text}
        answers.append(Answer(message, "stop" if stopped else "length", prompt_ids, ids))
        # 3. Later turns of a conversation wait as soon as it has an answer.
        outcome = next_turn(question, answers)
        if outcome:
            yield outcome


def _image_prompts(encoder: RowEncoder, waiting: _Waiting, running: Mapping) -> Iterator[tuple]:
    """Keys and prompts with images; also of those that begin to wait meanwhile."""
    for key, images in waiting:
        _, _, ids = running[key]
        yield key, encoder.reader.prompt(ids, images)


def _as_sent(message: Mapping) -> Mapping:
    """A message for a server: texts in parts as one text, which servers join otherwise; images with their content."""
    if not images_in([message]):
        return with_text(message)
    content = []
    for part in message["content"]:
        if part["type"] == "image":
            address = part["image"]
            if not address.startswith("data:"):
                load(address)  # raises if there is no image
                address = image_uri(Path(address).read_bytes())
            part = {"type": "image_url", "image_url": {"url": address}}
        content.append(part)
    return {**message, "content": content}


def ask_rows(
    server: ChatClient, questions: Sequence[Question], concurrency: int, seed: int | None = None
) -> Iterator[RowOrReason]:
    """
    Yield what a server makes of questions, as it answers. A conversation ends early where the server refuses what
    follows, or where the answer calls a tool: nobody runs it. Each turn of each row is sampled with a seed of its own,
    see [`seed_of`]; with `seed` of `None`, the server's own.

    Raises:
        `ServerError`: the server rejects everything, or has answered none of the last rows in time.
    """
    late = 0
    # Its threads are daemons: a server that hangs must not keep an interrupted process alive.
    with ThreadPool(concurrency) as pool:
        for row, reason in pool.imap_unordered(partial(_answered, server, seed), questions):
            late = late + 1 if isinstance(reason, NoAnswer) and row is None else 0
            if late == _MAX_TIMEOUTS:
                raise ServerError(f"{late} rows in a row: {reason}.")
            yield row, None if reason is None else str(reason)


def seed_of(seed: int, row: int, turn: int) -> int:
    """The seed of a turn of a row, 0 to 2^31 - 1: with one seed for all, their samples would follow the same noise."""
    return Random(f"{seed} {row}.{turn}").getrandbits(31)


def _answered(server: ChatClient, seed: int | None, question: Question) -> tuple[dict | None, UnusableRow | None]:
    """The row of a question, as far as the server answers it, and why it goes no further."""
    answers: list[Answer] = []
    reason = None
    try:
        while len(answers) < len(question.prompts):
            messages = [_as_sent(message) for message in prompt_after(question, answers)]
            turn_seed = None if seed is None else seed_of(seed, question.index, len(answers))
            message, ended = server.answer(messages, question.tools, question.template_kwargs, turn_seed)
            answer = {"role": "assistant", "content": message.get("content") or ""}
            thought = message.get("reasoning_content") or message.get("reasoning")
            if thought:
                answer["reasoning_content"] = thought
            if message.get("tool_calls"):
                answer["tool_calls"] = message["tool_calls"]
            answers.append(Answer(answer, ended))
            if message.get("tool_calls"):
                break
    except UnusableRow as unusable:
        reason = unusable
    return row_of(question, answers) if answers else None, reason
