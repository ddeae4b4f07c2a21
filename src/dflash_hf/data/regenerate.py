"""The target's own responses to the prompts of a dataset, generated in this process or by a server."""

import json
from collections.abc import Iterator

from transformers.utils import logging

from dflash_hf.data.chat_client import ChatClient, RequestRefused, in_parallel
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.messages import UnusableRow
from dflash_hf.data.prompts import Prompt, ids_of_prompt
from dflash_hf.responses import eos_ids, responses
from dflash_hf.target import without_token


logger = logging.get_logger(__name__)


def response_row(index: int, prompt: Prompt, tools: list | None, answer: dict, finish_reason: str) -> dict:
    """
    An output row, as [`~dflash_hf.data.encode.RowEncoder`] reads it.

    Args:
        prompt, tools: See [`~dflash_hf.data.prompts.prompt_of`].
        answer (`dict`): The assistant's message.
    """
    if isinstance(prompt, str):
        row = {"prompt": prompt, "completion": answer["content"]}
    else:
        row = {"messages": [*prompt, answer], "given": len(prompt)}  # earlier answers are not this target's
    if tools:
        row["tools"] = json.dumps(tools, ensure_ascii=False)  # as text: a table would merge different schemas
    return {"row": index, **row, "finish_reason": finish_reason}


def generate_rows(
    target,
    encoder: RowEncoder,
    prompts: dict[int, tuple[Prompt, list | None]],
    ids: dict[int, list[int]],
    max_new_tokens: int,
    batch_size: int | None = None,
    draft=None,
    generation_config=None,
    seed: int = 0,
) -> Iterator[list[dict]]:
    """
    Yield responses of a target in this process as they finish, long prompts first, so that memory runs out early or
    never.

    The rows also have `input_ids` and `loss_mask`: the exact tokens, so that nothing is tokenized again.

    Args:
        target (`PreTrainedModel`): The target.
        encoder (`RowEncoder`): Its tokenizer, and the mask token, which is suppressed.
        prompts (`dict`): Prompt and tools by row number.
        ids (`dict`): Prompt ids by row number.
        max_new_tokens (`int`): Maximum length of a response.
        batch_size (`int`, *optional*): Rows that decode together.
        draft (`DFlashDraftModel`, *optional*): Makes decoding faster; the responses stay the target's own.
        generation_config (`GenerationConfig`): Default: the target's.
        seed (`int`): Seed of sampling, from which each row gets its own.
    """
    config = without_token(generation_config or target.generation_config, encoder.mask_token_id)
    order = sorted(ids.items(), key=lambda one: -len(one[1]))
    for index, response in responses(target, order, max_new_tokens, config, batch_size, seed, draft):
        stopped = response[-1] in eos_ids(config)
        text = encoder.tokenizer.decode(response[: len(response) - stopped])
        answer = {"role": "assistant", "content": text}
        row = response_row(index, *prompts[index], answer, "stop" if stopped else "length")
        row["input_ids"] = [*ids[index], *response]
        row["loss_mask"] = [0] * len(ids[index]) + [1] * len(response)
        yield [row]


def usable_ids(encoder: RowEncoder, prompts: dict[int, tuple[Prompt, list | None]]) -> dict[int, list[int]]:
    """The ids of prompts, without empty prompts and prompts that the template rejects."""
    ids = {}
    for index, (prompt, tools) in prompts.items():
        try:
            ids[index] = ids_of_prompt(encoder, prompt, tools)
            if not ids[index]:
                del ids[index]
                raise UnusableRow("its prompt is empty")
        except UnusableRow as reason:
            logger.warning_once(f"A row is left out: {reason}")
    return ids


def ask_rows(server: ChatClient, prompts: dict, concurrency: int) -> Iterator[list[dict]]:
    """Responses of a server, one by one; an empty list for a rejected conversation."""
    answers = in_parallel(lambda question: server.answer(*question), prompts.items(), concurrency)
    for (index, question), choice in answers:
        if isinstance(choice, RequestRefused):
            logger.warning_once(f"A row is left out: {choice}")
            yield []
            continue
        message = choice["message"]
        answer = {"role": "assistant", "content": message.get("content") or ""}
        if thought := message.get("reasoning_content") or message.get("reasoning"):
            answer["reasoning_content"] = thought
        if message.get("tool_calls"):
            answer["tool_calls"] = message["tool_calls"]
        yield [response_row(index, *question, answer, choice.get("finish_reason") or "stop")]
