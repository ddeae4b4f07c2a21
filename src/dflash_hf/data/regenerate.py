"""The target's own responses to the prompts of a dataset, in this process or from a server; `dflash regenerate`."""

import copy
import json
from collections.abc import Iterator
from itertools import islice

from transformers.utils import logging

from dflash_hf.configs import check_names, check_token_id, positions_of
from dflash_hf.data.chat_client import ChatClient, RequestRefused, in_parallel
from dflash_hf.data.encode import RowEncoder, UnusableRow, digests_of_tokenizer, tools_of, without_none
from dflash_hf.data.prepare import load_tokenizer
from dflash_hf.data.prompts import Prompt, ids_of_prompt, prompt_of, template_kwargs
from dflash_hf.data.response_file import ResponseFile
from dflash_hf.data.sources import load_rows
from dflash_hf.data.time_left import TimeLeft, duration, rows_at_a_time
from dflash_hf.files import digest_of
from dflash_hf.pairs import Loading, configured_draft, device_of, draft_config_of, load_target, pack
from dflash_hf.responses import PLAIN_ROWS, eos_ids, responses
from dflash_hf.target import digest_of_target, spare_token_id, without_token
from dflash_hf.terminal import Outcome, UsageError, note, template_arguments


logger = logging.get_logger(__name__)


def response_row(index: int, prompt: Prompt, tools: list | None, answer: dict, finish_reason: str) -> dict:
    """
    A line of the output: a row that [`~dflash_hf.data.encode.RowEncoder`] reads.

    Args:
        prompt, tools: What was asked, see [`~dflash_hf.data.prompts.prompt_of`].
        answer (`dict`): The assistant's message.
    """
    if isinstance(prompt, str):
        row = {"prompt": prompt, "completion": answer["content"]}
    else:
        row = {"messages": [*prompt, answer], "given": len(prompt)}  # earlier answers are not this target's
    if tools:
        row["tools"] = json.dumps(tools, ensure_ascii=False)  # as text: a table would merge tools of different kinds
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
    Responses of a target in this process as they finish; long prompts first, so that memory runs out early or never.

    The rows hold `input_ids` and `loss_mask` too: exactly what the target read and wrote, without tokenizing again.

    Args:
        target (`PreTrainedModel`): The target.
        encoder (`RowEncoder`): Its tokenizer, and the mask token, which is suppressed.
        prompts (`dict`): Prompt and tools by row number.
        ids (`dict`): Their ids.
        max_new_tokens (`int`): Longest response.
        batch_size (`int`, *optional*): Rows that decode together.
        draft (`DFlashDraftModel`, *optional*): Speeds it up; the responses stay the target's own.
        generation_config (`GenerationConfig`): Default: the target's.
        seed (`int`): Of samples; each row has its own.
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
    """The ids of prompts; those that are empty, or that the template refuses, are left out."""
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
    """Responses of a server, one by one; an empty list for one that it refuses."""
    answers = in_parallel(lambda question: server.answer(*question), prompts.items(), concurrency)
    for (index, question), choice in answers:
        if isinstance(choice, RequestRefused):
            logger.warning_once(f"A row is left out: {choice}")
            yield []
            continue
        message = without_none(choice["message"])
        answer = {"role": "assistant", "content": message.get("content") or ""}
        if thought := message.get("reasoning_content") or message.get("reasoning"):
            answer["reasoning_content"] = thought
        if message.get("tool_calls"):
            answer["tool_calls"] = message["tool_calls"]
        yield [response_row(index, *question, answer, choice.get("finish_reason") or "stop")]


def run(arguments, echo) -> Outcome:
    """`dflash regenerate`: finish what is missing in the output; 1 if some rows were refused."""
    config = _check(arguments)
    draft_config = draft_config_of(arguments.draft, Loading.of(arguments)) if arguments.draft else None
    kwargs = template_kwargs(template_arguments(arguments.template_args), draft_config=draft_config, say=note)
    server = _server(arguments, kwargs) if arguments.server else None
    rows = load_rows(arguments.data, arguments.split, name=arguments.name)
    count = min(arguments.limit or len(rows), len(rows))
    tokenizer = None if server else _tokenizer(arguments)
    as_chat = not arguments.raw and (tokenizer is None or bool(tokenizer.chat_template))
    prompts = {index: _asked(index, row, as_chat, arguments.data) for index, row in enumerate(islice(rows, count))}

    # What the responses depend on. Files are known by their content: data by each prompt, the target by its weights.
    settings = {
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
        "chat_template_kwargs": kwargs,
        "raw": arguments.raw,
        "served": arguments.target if server else None,
        **({"mask_token_id": arguments.mask_token_id} if server else digests_of_tokenizer(tokenizer)),
    }
    with ResponseFile(arguments.output, settings) as output:
        if output.repaired:
            echo(f"cut off a half-written line of {output.repaired} bytes at the end of {arguments.output}")
        for index, before in output.finished.items():
            if index in prompts and digest_of(prompts[index]) != before:
                raise ValueError(
                    f"Row {index} of {arguments.output} answers another prompt than row {index} of {arguments.data}: "
                    "the data has changed; choose another output."
                )
        missing = {index: prompt for index, prompt in prompts.items() if index not in output.finished}
        echo(f"{count - len(missing)} of {count} rows are finished")
        if not missing:
            return Outcome(facts={"rows": count, "finished": count, "refused": 0})
        if server:
            rows, full, batches = arguments.concurrency, True, ask_rows(server, missing, arguments.concurrency)
        else:
            encoder = RowEncoder(tokenizer, chat_template_kwargs=kwargs, positions=positions_of(config))
            rows, full, batches = _in_process(arguments, encoder, missing, output, echo)
        with TimeLeft("row", count, count - len(missing), rows, echo, full) as time_left:
            for batch in batches:
                output.append(batch)
                time_left.count(len(batch), sum(sum(row.get("loss_mask", ())) for row in batch))
    refused = len(set(prompts) - set(output.finished))
    echo(f"{len(output.finished)} of {count} rows are in {arguments.output}")
    if refused:
        echo(f"{refused} rows were refused and are left out; the same command tries them again")
    return Outcome(1 if refused else 0, {"rows": count, "finished": len(output.finished), "refused": refused})


def _asked(index: int, row: dict, as_chat: bool, data: str) -> tuple[Prompt, list | None]:
    try:
        return prompt_of(row, as_chat), tools_of(row)
    except ValueError as error:
        raise ValueError(f"Row {index} of {data}: {error}") from error


def _check(arguments) -> dict:
    """Whether the arguments go together; the target's configuration, of a server none."""
    ours = ("raw", "draft", "chat_template", "packed", "compile", "tree_nodes", "draft_temperature")
    if arguments.server and any(getattr(arguments, name) for name in ours):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in ours)
        raise ValueError(f"--server takes conversations and decodes itself: leave out {options}.")
    if arguments.temperature == 0 and arguments.top_p is not None:
        raise UsageError(f"--top-p {arguments.top_p} changes nothing at --temperature 0; raise it, or leave one out.")
    if arguments.temperature == 0 and arguments.draft_temperature:
        raise UsageError("--draft-temperature changes nothing at --temperature 0; raise it, or leave one out.")
    if arguments.server:
        return {}
    config = check_names(arguments.target, arguments.draft, Loading.of(arguments))
    check_token_id(arguments.mask_token_id, config)
    device_of(arguments.device)
    return config


def _tokenizer(arguments):
    return load_tokenizer(arguments.target, arguments.chat_template, arguments.revision, arguments.trust_remote_code)


def _server(arguments, kwargs: dict) -> ChatClient:
    options = {"max_tokens": arguments.max_new_tokens, "seed": arguments.seed, "stream": False}
    if arguments.mask_token_id is not None:  # a bias of -100 is a ban
        options["logit_bias"] = {str(arguments.mask_token_id): -100}
    for name in ("temperature", "top_p"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    if kwargs:
        options["chat_template_kwargs"] = kwargs
    return ChatClient(arguments.server, arguments.target, options, arguments.retries, arguments.timeout)


def _in_process(arguments, encoder: RowEncoder, prompts: dict, output: ResponseFile, echo):
    """How many rows decode together, whether they always do, and the responses."""
    loading = Loading.of(arguments)
    draft = configured_draft(arguments, loading)
    target = load_target(arguments.target, loading)
    encoder.mask_token_id = arguments.mask_token_id
    if encoder.mask_token_id is None:
        encoder.mask_token_id = draft.config.mask_token_id if draft else spare_token_id(target, encoder.tokenizer)
    known = {"weights": digest_of_target(target), "dtype": str(target.dtype), "mask_token_id": encoder.mask_token_id}
    output.settle(known)
    pack(arguments.packed, target, draft)
    config = copy.deepcopy(target.generation_config)
    if arguments.temperature is not None:
        config.do_sample = arguments.temperature > 0
        config.temperature = arguments.temperature or None
        if not config.do_sample:
            config.top_p = config.top_k = None
    if arguments.top_p is not None:
        config.top_p = arguments.top_p
    if not config.do_sample and (arguments.top_p or arguments.draft_temperature):
        raise ValueError(
            "The target's own setting is greedy, where --top-p and --draft-temperature change nothing; add "
            "--temperature, such as 1."
        )
    ids, longest = usable_ids(encoder, prompts), arguments.max_new_tokens
    rows, speed = arguments.batch_size or PLAIN_ROWS, None
    if ids and draft is None:
        read = sum(map(len, ids.values()))
        rows, speed = rows_at_a_time(arguments.batch_size, target, config, (read // len(ids)) + longest // 2, len(ids))
        if speed:
            time = duration((read + len(ids) * longest) / speed)
            echo(f"{rows} rows at a time, {speed:,.0f} tokens a second: at most {time}")
    found = generate_rows(target, encoder, prompts, ids, longest, rows, draft, config, arguments.seed)
    return rows, speed is not None, found
