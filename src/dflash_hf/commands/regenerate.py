"""
`dflash regenerate`: the target's own responses, in this process or from a server.

    dflash regenerate --target Qwen/Qwen3-0.6B --data prompts.jsonl --output responses.jsonl
    dflash regenerate --target T --data prompts.jsonl --output responses.jsonl --server http://127.0.0.1:8000
"""

from collections import Counter

from dflash_hf.commands import shared
from dflash_hf.commands.pair import NamedPair
from dflash_hf.commands.shared import add_data, add_loading, add_output, add_sampling
from dflash_hf.terminal import (
    Outcome,
    UsageError,
    amount,
    count,
    note,
    output_lines,
    positive,
    template_arguments,
    token_id,
)


AGAIN = "the same command continues with the rows that are missing"


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="the target: a folder or Hub name, or its name on --server")
    add_data(parser, template="the drafter's")
    add_output(parser, ".jsonl file; continued if it exists", output_lines, required=True)
    parser.add_argument("--max-new-tokens", type=positive, default=2048, help="longest answer (default: %(default)s)")
    add_sampling(parser, None, "the target's generation config")
    parser.add_argument("--raw", action="store_true", help="use prompts that are text without the chat template")
    parser.add_argument("--mask-token-id", type=token_id, help="token that is never written (default: first spare id)")
    here = add_loading(parser, title="in this process")
    here.add_argument("--draft", help="a drafter, for speed: a folder or Hub name")
    here.add_argument("--batch-size", type=positive, help="rows at a time (default: the fastest, measured)")
    shared.add_speed(parser, group=here)
    there = parser.add_argument_group("from a server")
    there.add_argument("--server", metavar="URL", help="an OpenAI-compatible server, such as http://127.0.0.1:8000")
    there.add_argument("--concurrency", type=positive, default=32, help="parallel requests (default: %(default)s)")
    there.add_argument("--retries", type=count, default=5, help="retries of a request (default: %(default)s)")
    there.add_argument("--timeout", type=amount, default=600.0, help="seconds for one answer (default: %(default)s)")


def run(arguments, echo) -> Outcome:
    """Write the rows missing in the output; exit status 1 if some were refused."""
    from dflash_hf.configs import check_token_id
    from dflash_hf.data.encode import digests_of_tokenizer
    from dflash_hf.data.prompts import template_kwargs
    from dflash_hf.data.regenerate import ask_rows
    from dflash_hf.data.response_file import ResponseFile
    from dflash_hf.data.time_left import TimeLeft
    from dflash_hf.files import digest_of

    _check(arguments)
    if arguments.server:
        kwargs = template_kwargs(template_arguments(arguments.template_args), say=note)
        pair, server = None, _server(arguments, kwargs)
    else:
        pair, server = NamedPair(arguments, note), None
        check_token_id(arguments.mask_token_id, pair.config)
        kwargs = pair.template()
    tokenizer = pair.tokenizer if pair else None
    as_chat = not arguments.raw and (tokenizer is None or bool(tokenizer.chat_template))
    prompts, left_out = _asked(arguments, as_chat)
    count = len(prompts)
    for reason, number in left_out.items():
        echo(f"{number} rows are left out: {reason}")

    # Everything that responses depend on. Files are identified by content: data by each prompt, the target by weights.
    settings = {
        **{name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_p", "seed", "raw")},
        "chat_template_kwargs": kwargs,
        "served": arguments.target if server else None,
        **({"mask_token_id": arguments.mask_token_id} if server else digests_of_tokenizer(tokenizer)),
    }
    with ResponseFile(arguments.output, settings) as output:
        if output.repaired:
            echo(f"removed an incomplete line of {output.repaired} bytes at the end of {arguments.output}")
        for index, before in output.finished.items():
            if index in prompts and digest_of(prompts[index]) != before:
                raise ValueError(
                    f"Row {index} of {arguments.output} answers another prompt than row {index} of {arguments.data}: "
                    "the data has changed; choose another output."
                )
        missing = {index: prompt for index, prompt in prompts.items() if index not in output.finished}
        echo(f"{count - len(missing)} of {count} rows are finished")
        if not missing:
            return Outcome(facts={"rows": count, "finished": count, "refused": 0, "left_out": left_out})
        if pair is None:
            rows, full, batches = arguments.concurrency, True, ask_rows(server, missing, arguments.concurrency)
        else:
            rows, full, batches = _in_process(pair, pair.encoder(kwargs), missing, output, echo)
        with TimeLeft("row", count, count - len(missing), rows, echo, full) as time_left:
            for batch in batches:
                output.write_rows(batch)
                time_left.count(len(batch), sum(sum(row.get("loss_mask", ())) for row in batch))
    refused = len(set(prompts) - set(output.finished))
    finished = count - refused  # the file may have more, of an earlier run
    echo(f"{finished} of {count} rows are in {arguments.output}")
    if refused:
        echo(f"{refused} rows were refused; run the same command again to retry them")
    facts = {"rows": count, "finished": finished, "refused": refused, "left_out": left_out}
    return Outcome(1 if refused else 0, facts)


def _asked(arguments, as_chat: bool) -> tuple[dict[int, tuple], dict[str, int]]:
    """
    Prompt and tools of each row, and the number of rows without a prompt, by reason.

    Raises:
        `ValueError`: a row is invalid, or there is no prompt at all.
    """
    from dflash_hf.data.messages import UnusableRow, tools_of, with_text
    from dflash_hf.data.prompts import prompt_of

    prompts: dict[int, tuple] = {}
    left_out: Counter[str] = Counter()
    index = -1
    for index, row in enumerate(shared.rows_of(arguments)):
        try:
            prompt = prompt_of(row, as_chat)
            if not prompt:
                raise UnusableRow("its prompt is empty")
            if arguments.server and not isinstance(prompt, str):  # servers join parts in different ways
                prompt = [with_text(one) for one in prompt]
            prompts[index] = prompt, tools_of(row)
        except UnusableRow as reason:
            left_out[str(reason)] += 1
        except ValueError as error:
            raise ValueError(f"Row {index} of {arguments.data}: {error}") from error
    if left_out and not prompts:
        reasons = "; ".join(f"{number} because {reason}" for reason, number in left_out.items())
        raise ValueError(f"None of {index + 1} rows of {arguments.data} has a prompt: {reasons}.")
    return prompts, left_out


def _check(arguments) -> None:
    """Check that the arguments fit together."""
    names = (
        *("raw", "draft", "chat_template", "packed", "compile", "tree_nodes", "batch_size"),
        *("device", "revision", "draft_revision", "trust_remote_code", "dtype"),
    )
    if arguments.server and (ours := shared.given(arguments, names)):
        raise UsageError(f"--server receives conversations and decodes them itself: leave out {', '.join(ours)}.")
    shared.check_sampling(arguments)
    shared.check_not_data(arguments.output, arguments.data)


def _server(arguments, kwargs: dict):
    from dflash_hf.data.chat_client import ChatClient, Server

    options = {"max_tokens": arguments.max_new_tokens, "seed": arguments.seed, "stream": False}
    if arguments.mask_token_id is not None:  # a bias of -100 bans the token
        options["logit_bias"] = {str(arguments.mask_token_id): -100}
    for name in ("temperature", "top_p"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    if kwargs:
        options["chat_template_kwargs"] = kwargs
    return ChatClient(Server(arguments.server), arguments.target, options, arguments.retries, arguments.timeout)


def _in_process(pair: NamedPair, encoder, prompts: dict, output, echo):
    """The number of rows that decode together, whether it is fixed, and the responses."""
    import copy

    from dflash_hf.data.regenerate import generate_rows, usable_ids
    from dflash_hf.data.time_left import duration, rows_at_a_time
    from dflash_hf.pairs import pack
    from dflash_hf.responses import PLAIN_ROWS
    from dflash_hf.target import digest_of_target, mask_token_remedy, spare_token_id

    arguments, draft, target = pair.arguments, pair.draft(), pair.target()
    encoder.mask_token_id = arguments.mask_token_id
    if encoder.mask_token_id is None:
        encoder.mask_token_id = draft.config.mask_token_id if draft else spare_token_id(target, encoder.tokenizer)
    if encoder.mask_token_id is None:
        remedy = mask_token_remedy(encoder.tokenizer, "--mask-token-id")
        note(f"{arguments.target} has no spare embedding row for a mask token, which training needs: {remedy}")
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
    if not config.do_sample and arguments.top_p:
        raise ValueError(
            "The target's generation config is greedy, so --top-p has no effect; add --temperature, such as 1."
        )
    ids, longest = usable_ids(encoder, prompts), arguments.max_new_tokens
    rows, speed = arguments.batch_size or PLAIN_ROWS, None
    if ids and draft is None:
        read = sum(map(len, ids.values()))
        rows, speed = rows_at_a_time(arguments.batch_size, target, config, (read // len(ids)) + longest // 2, len(ids))
        if speed:
            time = duration((read + len(ids) * longest) / speed)
            echo(f"{rows} rows at a time, {speed:,.0f} tokens/s: at most {time}")
    found = generate_rows(target, encoder, prompts, ids, longest, rows, draft, config, arguments.seed)
    return rows, speed is not None, found
