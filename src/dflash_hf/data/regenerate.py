"""The target's own responses to the prompts of a dataset, in this process or from a server; `dflash regenerate`."""

import copy
from collections.abc import Iterator, Mapping
from itertools import islice

from transformers.utils import logging

from dflash_hf.data.chat_client import ChatClient, RequestRefused, in_parallel
from dflash_hf.data.encode import RowEncoder, UnusableRow
from dflash_hf.data.prepare import load_tokenizer, template_arguments
from dflash_hf.data.response_file import ResponseFile, digest
from dflash_hf.data.sources import load_rows
from dflash_hf.pairs import Loading, check_pair, check_token_id, device_of, load_draft, load_target, set_decoding
from dflash_hf.terminal import Outcome, UsageError


logger = logging.get_logger(__name__)
Prompt = str | list[dict]


def prompt_of(row: Mapping, as_chat: bool) -> Prompt:
    """
    What the target is asked: the messages before the last assistant turn, or those up to the last user's if that
    comes later; `prompt`, as a user's message where it is text and `as_chat`.

    Raises:
        `ValueError`: the row has neither column.
    """
    if row.get("messages"):
        messages = [{key: value for key, value in one.items() if value is not None} for one in row["messages"]]
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        return messages
    prompt = row.get("prompt")
    if prompt is None:
        raise ValueError(f"There is no prompt, only {sorted(row)}; give `messages` or `prompt`.")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if as_chat else prompt
    return [{key: value for key, value in one.items() if value is not None} for one in prompt]


def response_row(index: int, prompt: Prompt, text: str, finish_reason: str, **more) -> dict:
    """A line of the output: a row that [`~dflash_hf.data.encode.RowEncoder`] reads."""
    if isinstance(prompt, str):
        row = {"prompt": prompt, "completion": text}
    else:
        row = {"messages": [*prompt, {"role": "assistant", "content": text}]}
    return {"row": index, **row, "finish_reason": finish_reason, **more}


def generate_rows(
    target,
    encoder: RowEncoder,
    prompts: dict[int, tuple[Prompt, list | None]],
    max_new_tokens: int,
    batch_size: int,
    draft=None,
    generation_config=None,
    seed: int = 0,
) -> Iterator[list[dict]]:
    """
    Responses of a target in this process, batch by batch; long prompts first, so that memory runs out early or never.

    A prompt that is empty or that the template refuses gives an empty list. The rows hold `input_ids` and `loss_mask`
    too: exactly what the target read and wrote, without tokenizing again.

    Args:
        target (`PreTrainedModel`): The target.
        encoder (`RowEncoder`): Its tokenizer, template arguments, and the mask token, which is suppressed.
        prompts (`dict`): Prompt and tools by row number.
        max_new_tokens, batch_size (`int`): Longest response; prompts of a batch.
        draft (`DFlashDraftModel`, *optional*): Speeds it up; the responses stay the target's own.
        generation_config (`GenerationConfig`): Default: the target's.
        seed (`int`): Of samples; each batch has its own.
    """
    from transformers import set_seed

    from dflash_hf.target import generate_responses

    ids = {}
    for index, (prompt, tools) in prompts.items():
        try:
            if isinstance(prompt, str):
                found = encoder.tokenizer(prompt)["input_ids"]
            else:
                found = encoder.render(prompt, tools, add_generation_prompt=True)
            if not found:
                raise UnusableRow("its prompt is empty")
            ids[index] = found
        except UnusableRow as reason:
            logger.warning_once(f"A row is left out: {reason}")
            yield []
    order = sorted(ids, key=lambda index: -len(ids[index]))
    eos = (generation_config or target.generation_config).eos_token_id
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        set_seed(seed + batch[0])
        responses = generate_responses(
            target,
            [ids[index] for index in batch],
            max_new_tokens,
            encoder.mask_token_id,
            batch_size,
            generation_config,
            draft,
        )
        rows = []
        for index, response in zip(batch, responses, strict=True):
            stopped = response[-1] in (eos if isinstance(eos, list) else [eos])
            text = encoder.tokenizer.decode(response[: len(response) - stopped])
            row = response_row(index, prompts[index][0], text, "stop" if stopped else "length")
            row["input_ids"] = [*ids[index], *response]
            row["loss_mask"] = [0] * len(ids[index]) + [1] * len(response)
            rows.append(row)
        yield rows


def ask_rows(server: ChatClient, prompts: dict, concurrency: int) -> Iterator[list[dict]]:
    """Responses of a server, one by one; an empty list for one that it refuses."""
    answers = in_parallel(lambda question: server.answer(*question), prompts.items(), concurrency)
    for (index, (prompt, _)), choice in answers:
        if isinstance(choice, RequestRefused):
            logger.warning_once(f"A row is left out: {choice}")
            yield []
            continue
        message = choice["message"]
        row = response_row(index, prompt, message.get("content") or "", choice.get("finish_reason") or "stop")
        if thought := message.get("reasoning_content") or message.get("reasoning"):
            row["messages"][-1]["reasoning_content"] = thought
        yield [row]


def run(arguments, echo) -> Outcome:
    """`dflash regenerate`: finish what is missing in the output; 1 if some rows were refused."""
    _check(arguments)
    template_kwargs = template_arguments(arguments.template_args) or {}
    server = _server(arguments, template_kwargs) if arguments.server else None
    rows = load_rows(arguments.data, arguments.split, name=arguments.name)
    count = min(arguments.limit or len(rows), len(rows))
    tokenizer = None if arguments.server else _tokenizer(arguments)
    as_chat = not arguments.raw and (tokenizer is None or bool(tokenizer.chat_template))
    prompts = {}
    for index, row in enumerate(islice(rows, count)):
        prompts[index] = prompt_of(row, as_chat), row.get("tools")

    settings = {
        "data": str(arguments.data),
        "split": arguments.split,
        "target": arguments.target,
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "chat_template_kwargs": template_kwargs,
        "raw": arguments.raw,
    }
    with ResponseFile(arguments.output, settings) as output:
        if output.repaired:
            echo(f"cut off a half-written line of {output.repaired} bytes at the end of {arguments.output}")
        for index, before in output.finished.items():
            if index in prompts and digest(prompts[index][0]) != before:
                raise ValueError(
                    f"Row {index} of {arguments.output} answers another prompt than row {index} of {arguments.data}: "
                    "the data has changed; choose another output."
                )
        missing = {index: prompt for index, prompt in prompts.items() if index not in output.finished}
        echo(f"{count - len(missing)} of {count} rows are finished")
        if not missing:
            return Outcome(facts={"rows": count, "finished": count, "refused": 0})
        if server:
            batches = ask_rows(server, missing, arguments.concurrency)
        else:
            encoder = RowEncoder(tokenizer, chat_template_kwargs=template_kwargs)
            batches = _in_process(arguments, encoder, missing)
        refused = 0
        with logging.tqdm(total=count, initial=count - len(missing), unit="row", desc="regenerate") as bar:
            for batch in batches:
                output.append(batch)
                refused += not batch
                bar.update(max(len(batch), 1))
    echo(f"{len(output.finished)} of {count} rows are in {arguments.output}")
    if refused:
        echo(f"{refused} rows were refused and are left out; the same command tries them again")
    return Outcome(1 if refused else 0, {"rows": count, "finished": len(output.finished), "refused": refused})


def _check(arguments) -> None:
    if arguments.server and (arguments.raw or arguments.draft or arguments.chat_template):
        raise ValueError("--server takes conversations and decodes itself: leave out --raw, --draft, --chat-template.")
    if arguments.temperature == 0 and arguments.top_p is not None:
        raise UsageError(f"--top-p {arguments.top_p} changes nothing at --temperature 0; raise it, or leave one out.")
    if not arguments.server:
        config = check_pair(arguments.target, arguments.draft, Loading.of(arguments))
        check_token_id(arguments.mask_token_id, config)
        device_of(arguments.device)


def _tokenizer(arguments):
    return load_tokenizer(arguments.target, arguments.chat_template, arguments.revision, arguments.trust_remote_code)


def _server(arguments, template_kwargs: dict) -> ChatClient:
    options = {"max_tokens": arguments.max_new_tokens, "seed": arguments.seed, "stream": False}
    for name in ("temperature", "top_p"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    if template_kwargs:
        options["chat_template_kwargs"] = template_kwargs
    return ChatClient(arguments.server, arguments.target, options, arguments.retries, arguments.timeout)


def _in_process(arguments, encoder: RowEncoder, prompts: dict) -> Iterator[list[dict]]:
    from dflash_hf.target import spare_token_id

    loading = Loading.of(arguments)
    draft = load_draft(arguments.draft, loading) if arguments.draft else None
    set_decoding(draft, arguments)
    target = load_target(arguments.target, loading)
    encoder.mask_token_id = arguments.mask_token_id
    if encoder.mask_token_id is None:
        encoder.mask_token_id = draft.config.mask_token_id if draft else spare_token_id(target, encoder.tokenizer)
    config = copy.deepcopy(target.generation_config)
    if arguments.temperature is not None:
        config.do_sample = arguments.temperature > 0
        config.temperature = arguments.temperature or None
        if not config.do_sample:
            config.top_p = config.top_k = None
    if arguments.top_p is not None:
        config.top_p = arguments.top_p
    return generate_rows(
        target, encoder, prompts, arguments.max_new_tokens, arguments.batch_size, draft, config, arguments.seed
    )
