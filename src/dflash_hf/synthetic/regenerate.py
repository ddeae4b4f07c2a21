"""The target's own responses to the prompts of a dataset, generated in this process or by a server."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path
from random import Random

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.images import ImagePrompt, load_image
from dflash_hf.data.messages import UnusableRow, image_uri, images_in, with_text
from dflash_hf.data.prompts import ids_of_prompt
from dflash_hf.synthetic.chat_client import ChatClient, NoAnswer, ServerError
from dflash_hf.synthetic.prompt_queue import PromptQueue
from dflash_hf.synthetic.responses import responses_with_images, stream_responses
from dflash_hf.synthetic.tasks import Response, Task, next_prompt, output_row
from dflash_hf.targets.generation import context_length_of, eos_ids, without_token


RowOrReason = tuple[dict | None, str | None]  # a row, the reason why there is none, or both if a row ends early
_MAX_TIMEOUTS = 8  # consecutive rows without an answer in time: the server hangs


# ------------------------------------------------------------------------------------------------- in this process


def generate_rows(
    target,
    encoder: RowEncoder,
    tasks: Sequence[Task],
    max_new_tokens: int,
    batch_size: int | None = None,
    generation_config=None,
    seed: int = 0,
) -> Iterator[RowOrReason]:
    """
    Yield the rows of tasks that a target in this process answers, as they finish. Long prompts come first, so that
    memory runs out early or never. A conversation goes on with its next turn as soon as it has a response, so that
    batches stay full; it ends early where the template refuses what follows.

    Args:
        target (`PreTrainedModel`): The target.
        encoder (`RowEncoder`): Its tokenizer, and the mask token, which is suppressed.
        tasks (`Sequence[Task]`): What it answers.
        max_new_tokens (`int`): Maximum length of a response.
        batch_size (`int`, *optional*): Prompts that decode together.
        generation_config (`GenerationConfig`): Default: the target's.
        seed (`int`): Seed of sampling, from which each turn of each row gets its own.
    """
    config = without_token(generation_config or target.generation_config, encoder.mask_token_id)
    encoder = replace(encoder, context_length=context_length_of(target))
    # 1. The first turns. The last that is added is answered first: the longest.
    first_turns = []
    for task in tasks:
        try:
            first_turns.append(_make_turn(encoder, task, []))
        except UnusableRow as unusable:
            yield None, str(unusable)
    waiting = _WaitingTurns(encoder)
    for turn in sorted(first_turns, key=lambda turn: len(turn.prompt_ids)):
        waiting.add(turn)
    # 2. Texts are answered together, then prompts with images one by one.
    to_texts = stream_responses(target, waiting.text_prompts, max_new_tokens, config, batch_size, seed)
    to_images = responses_with_images(target, waiting.prompts_with_images(), max_new_tokens, config, seed)
    for key, ids in chain(to_texts, to_images):
        turn = waiting.remove(key)
        task = turn.task
        so_far = [*turn.responses, _decoded_response(encoder, turn.prompt_ids, ids, eos_ids(config))]
        if len(so_far) == len(task.prompts):
            yield output_row(task, so_far), None
            continue
        # 3. The next turn of a conversation waits as soon as it has a response.
        try:
            waiting.add(_make_turn(encoder, task, so_far))
        except UnusableRow as unusable:
            yield output_row(task, so_far), str(unusable)


@dataclass(frozen=True)
class _Turn:
    """
    A prompt of a task that waits for its response.

    Args:
        task (`Task`): The task.
        responses (`Sequence[Response]`): Those to its earlier turns.
        prompt_ids (`list[int]`): The prompt, earlier turns included.
        images (`list[str]`): The images of the prompt.
    """

    task: Task
    responses: Sequence[Response]
    prompt_ids: list[int]
    images: list[str]

    @property
    def key(self) -> int | str:
        """Number of the row, and of its turn from the second on; seeds the samples of this turn."""
        return f"{self.task.index}.{len(self.responses)}" if self.responses else self.task.index


def _make_turn(encoder: RowEncoder, task: Task, responses: Sequence[Response]) -> _Turn:
    """
    The next turn of a task.

    Raises:
        `UnusableRow`: its prompt is empty or too long, or the template rejects it.
    """
    prompt = next_prompt(task, responses)
    ids = ids_of_prompt(encoder, prompt, task.tools, **task.template_kwargs)
    if not ids:
        raise UnusableRow("its prompt is empty")
    return _Turn(task, responses, ids, [] if isinstance(prompt, str) else images_in(prompt))


class _WaitingTurns:
    """
    The turns without a response, in two queues: with images and without.

    Args:
        encoder (`RowEncoder`): Reads images.
    """

    def __init__(self, encoder: RowEncoder):
        self.encoder = encoder
        self.turns: dict[int | str, _Turn] = {}  # by key
        self.text_prompts = PromptQueue()  # of ids
        self._turns_with_images = PromptQueue()

    def add(self, turn: _Turn) -> None:
        self.turns[turn.key] = turn
        if turn.images:
            self._turns_with_images.push(turn.key, turn)
        else:
            self.text_prompts.push(turn.key, turn.prompt_ids)

    def remove(self, key) -> _Turn:
        return self.turns.pop(key)

    def prompts_with_images(self) -> Iterator[tuple[object, ImagePrompt]]:
        """Keys and prompts; images are read one prompt at a time, also those of turns that are added meanwhile."""
        item = self._turns_with_images.pop()
        while item is not None:
            key, turn = item
            yield key, self.encoder.template.reader.prompt(turn.prompt_ids, turn.images)
            item = self._turns_with_images.pop()


def _decoded_response(encoder: RowEncoder, prompt_ids: list[int], ids: list[int], stop_ids: set[int]) -> Response:
    """The response with these ids, of which the last may end it."""
    has_ended = ids[-1] in stop_ids
    text = encoder.template.tokenizer.decode(ids[:-1] if has_ended else ids)
    message = {"role": "assistant", "content": text}
    return Response(message, "stop" if has_ended else "length", prompt_ids, ids)


# -------------------------------------------------------------------------------------------------- from a server


def _message_for_server(message: Mapping) -> Mapping:
    """
    A message in the form that servers read: parts of text joined, since servers join them in other ways, and images
    as `data:` URLs.
    """
    if not images_in([message]):
        return with_text(message)
    content = []
    for part in message["content"]:
        if part["type"] == "image":
            url = part["image"]
            if not url.startswith("data:"):
                load_image(url)  # raises if there is no image
                url = image_uri(Path(url).read_bytes())
            part = {"type": "image_url", "image_url": {"url": url}}
        content.append(part)
    return {**message, "content": content}


def rows_from_server(
    server: ChatClient, tasks: Sequence[Task], concurrency: int, seed: int | None = None
) -> Iterator[RowOrReason]:
    """
    Yield the rows of tasks that a server answers, as they finish. A conversation ends early where the server refuses
    what follows, or where a response calls a tool, since nothing runs it.

    Args:
        server (`ChatClient`): The server.
        tasks (`Sequence[Task]`): What it answers.
        concurrency (`int`): Conversations at a time.
        seed (`int`, *optional*): Each turn of each row is sampled with a seed of its own, see [`seed_of_turn`]; `None`
            leaves the seeds to the server.

    Raises:
        `ServerError`: the server rejects everything, or has answered none of the last rows in time.
    """
    num_timeouts = 0
    # Its threads are daemons: a server that hangs must not keep an interrupted process alive.
    with ThreadPool(concurrency) as pool:
        for row, reason in pool.imap_unordered(partial(_row_from_server, server, seed), tasks):
            if isinstance(reason, NoAnswer) and row is None:
                num_timeouts += 1
            else:
                num_timeouts = 0
            if num_timeouts == _MAX_TIMEOUTS:
                raise ServerError(f"{num_timeouts} consecutive rows: {reason}.")
            yield row, None if reason is None else str(reason)


def seed_of_turn(seed: int, row: int, turn: int) -> int:
    """
    The seed of a turn of a row, 0 to 2^31 - 1. With one seed for all, all responses would be sampled with the same
    random numbers.
    """
    return Random(f"{seed} {row}.{turn}").getrandbits(31)


def _row_from_server(server: ChatClient, seed: int | None, task: Task) -> tuple[dict | None, UnusableRow | None]:
    """The row of a task, as far as the server answers it, and why it goes no further."""
    responses: list[Response] = []
    reason = None
    try:
        while len(responses) < len(task.prompts):
            messages = [_message_for_server(message) for message in next_prompt(task, responses)]
            turn_seed = None if seed is None else seed_of_turn(seed, task.index, len(responses))
            received, finish_reason = server.answer(messages, task.tools, task.template_kwargs, turn_seed)
            responses.append(Response(_assistant_message(received), finish_reason))
            if received.get("tool_calls"):
                break
    except UnusableRow as unusable:
        reason = unusable
    return output_row(task, responses) if responses else None, reason


def _assistant_message(received: Mapping) -> dict:
    """What is kept of a server's message: its text, its thought and its calls of tools."""
    message = {"role": "assistant", "content": received.get("content") or ""}
    thought = received.get("reasoning_content") or received.get("reasoning")
    if thought:
        message["reasoning_content"] = thought
    if received.get("tool_calls"):
        message["tool_calls"] = received["tool_calls"]
    return message
