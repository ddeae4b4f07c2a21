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

from dflash_hf.data.chat_client import ChatClient, NoAnswer, ServerError
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.images import load
from dflash_hf.data.messages import UNSEEN, UnusableRow, image_uri, images_in, tools_of, with_text
from dflash_hf.data.prompts import Prompt, ids_of_prompt, prompt_of, whole_conversation
from dflash_hf.data.template import template_kwargs_of
from dflash_hf.files import digest_of
from dflash_hf.responses import context_of, eos_ids, responses, responses_to_images
from dflash_hf.target import without_token


RowOrReason = tuple[dict | None, str | None]  # the reason also of a row that ends early
_SILENT = 8  # rows without an answer in time, one after the other: the server hangs


class Question(NamedTuple):
    """
    What the target answers of a row.

    Args:
        index (`int`): Number of the row.
        ahead (`list`): What it reads before each of its answers: one text, or each time messages.
        tools (`list`, *optional*): The tools of the row.
        template_kwargs (`dict`): The row's own arguments of the chat template.
    """

    index: int
    ahead: list[Prompt]
    tools: list | None = None
    template_kwargs: dict = {}

    @property
    def digest(self) -> str:
        """A digest of all that the target reads except its own answers."""
        prompt = self.ahead[0] if len(self.ahead) == 1 else self.ahead
        return digest_of([prompt, self.tools, *([self.template_kwargs] if self.template_kwargs else [])])


class Answer(NamedTuple):
    """The target's message, why it ended, and in this process the ids of its prompt and its own."""

    message: dict
    reason: str
    prompt_ids: Sequence[int] = ()
    ids: Sequence[int] = ()


def question_of(row: Mapping, index: int, as_chat: bool, every_turn: bool = False, images: bool = True) -> Question:
    """
    The question of a row; with `every_turn`, all assistant turns are answered anew, not only the last one. `images`:
    whether the target reads them.

    Raises:
        `UnusableRow`, `ValueError`: see [`~dflash_hf.data.prompts.prompt_of`].
    """
    ahead = turns_of(whole_conversation(row, as_chat)) if every_turn else [prompt_of(row, as_chat)]
    if not any(ahead):
        raise UnusableRow("its prompt is empty")
    if not images and any(images_in(part) for part in ahead if not isinstance(part, str)):
        raise UnusableRow(UNSEEN)
    return Question(index, ahead, tools_of(row), template_kwargs_of(row))


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
            questions[index] = question_of(row, index, as_chat, every_turn, images)
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
    kept: list[dict] = []
    for place, message in enumerate(messages):
        called = message.get("tool_calls") and [one["role"] for one in messages[place + 1 : place + 2]] == ["tool"]
        asked = turns or any(one["role"] not in ("system", "developer", "assistant") for one in kept)
        if message["role"] != "assistant" or called or not asked:
            kept.append(message)
        elif kept:
            turns.append(kept)
            kept = []
    return [*turns, kept] if kept else turns


def conversation(question: Question, answers: Sequence[Answer]) -> Prompt:
    """A text, or the messages up to the target's next answer."""
    if isinstance(question.ahead[0], str):
        return question.ahead[0]
    messages: list[dict] = []
    for turn, part in enumerate(question.ahead[: len(answers) + 1]):
        messages += part
        if turn < len(answers):
            messages.append(answers[turn].message)
    return messages


def row_of(question: Question, answers: Sequence[Answer]) -> dict:
    """
    An output row, as [`~dflash_hf.data.encode.RowEncoder`] reads it. In this process it also has the exact ids, so
    that nothing is tokenized again: `document_ids` divide them where a prompt does not begin with the turn before.
    """
    row: dict = {"row": question.index, "question": question.digest}
    if isinstance(question.ahead[0], str):
        row |= {"prompt": question.ahead[0], "completion": answers[0].message["content"]}
    else:
        done = question._replace(ahead=question.ahead[: len(answers)])
        places = [len(conversation(done, answers[:turn])) for turn in range(len(answers))]
        row |= {"messages": conversation(done, answers), "answered": places}  # other answers are not this target's
    if question.tools:
        row["tools"] = json.dumps(question.tools, ensure_ascii=False)  # as text: a table would merge other schemas
    if question.template_kwargs:
        row["chat_template_kwargs"] = question.template_kwargs
    reasons = [answer.reason for answer in answers]
    row["finish_reason"] = reasons[0] if len(question.ahead) == 1 else reasons
    if not answers[0].ids:
        return row
    examples: list[tuple[list[int], list[int]]] = []
    for answer in answers:
        ids, mask = examples.pop() if examples and _begins(answer.prompt_ids, examples[-1][0]) else ([], [])
        more = answer.prompt_ids[len(ids) :]
        examples.append(([*ids, *more, *answer.ids], [*mask, *[0] * len(more), *[1] * len(answer.ids)]))
    row["input_ids"] = [one for ids, _ in examples for one in ids]
    row["loss_mask"] = [one for _, mask in examples for one in mask]
    if len(examples) > 1:
        row["document_ids"] = [number for number, (ids, _) in enumerate(examples) for _ in ids]
    return row


def _begins(ids: Sequence[int], beginning: list[int]) -> bool:
    return list(ids[: len(beginning)]) == beginning


class _Waiting(list):
    """What waits for its turn. Iterating takes the last of it each time, and may go on when more has come."""

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
    encoder = replace(encoder, positions=context_of(target))
    waiting, seeing, running = _Waiting(), _Waiting(), {}  # texts, prompts with images, and what was asked

    def ask(question: Question, answers: list[Answer]) -> RowOrReason | None:
        """Have the next turn wait for its answer; what becomes of the row if there is none."""
        if len(answers) == len(question.ahead):
            return row_of(question, answers), None
        said = conversation(question, answers)
        try:
            ids = ids_of_prompt(encoder, said, question.tools, **question.template_kwargs)
            if not ids:
                raise UnusableRow("its prompt is empty")
        except UnusableRow as unusable:
            return row_of(question, answers) if answers else None, str(unusable)
        key = f"{question.index}.{len(answers)}" if answers else question.index
        running[key] = question, answers, ids
        if images := [] if isinstance(said, str) else images_in(said):
            seeing.append((key, images))
        else:
            waiting.append((key, ids))
        return None

    yield from filter(None, [ask(question, []) for question in questions])
    waiting.sort(key=lambda one: len(one[1]))
    texts = responses(target, waiting, max_new_tokens, config, batch_size, seed)
    shown = ((key, encoder.reader.prompt(running[key][2], images)) for key, images in seeing)
    for key, ids in chain(texts, responses_to_images(target, shown, max_new_tokens, config, seed)):
        question, answers, prompt = running.pop(key)
        stopped = ids[-1] in eos_ids(config)
        text = encoder.tokenizer.decode(ids[: len(ids) - stopped])
        message = {"role": "assistant", "content": text}
        answers.append(Answer(message, "stop" if stopped else "length", prompt, ids))
        if outcome := ask(question, answers):
            yield outcome


def _as_sent(message: Mapping) -> Mapping:
    """A message for a server: texts in parts as one text, which servers join otherwise; images with their content."""
    if not images_in([message]):
        return with_text(message)
    content = []
    for part in message["content"]:
        if part["type"] == "image":
            if not (address := part["image"]).startswith("data:"):
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
            if late == _SILENT:
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
        while len(answers) < len(question.ahead) and not (answers and answers[-1].message.get("tool_calls")):
            messages = [_as_sent(one) for one in conversation(question, answers)]
            own = None if seed is None else seed_of(seed, question.index, len(answers))
            message, ended = server.answer(messages, question.tools, question.template_kwargs, own)
            answer = {"role": "assistant", "content": message.get("content") or ""}
            if thought := message.get("reasoning_content") or message.get("reasoning"):
                answer["reasoning_content"] = thought
            if message.get("tool_calls"):
                answer["tool_calls"] = message["tool_calls"]
            answers.append(Answer(answer, ended))
    except UnusableRow as unusable:
        reason = unusable
    return row_of(question, answers) if answers else None, reason
