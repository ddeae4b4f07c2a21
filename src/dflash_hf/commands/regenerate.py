"""
`dflash regenerate`: have the target answer the prompts of a dataset, in this process or on a server.

    dflash regenerate --target Qwen/Qwen3-0.6B --data prompts.jsonl --output responses.jsonl
    dflash regenerate --target Qwen/Qwen3-0.6B --data chats.jsonl --turns all --thinking 0.5 --output responses.jsonl
    dflash regenerate --target T --data prompts.jsonl --output responses.jsonl --server http://127.0.0.1:8000
"""

from collections import Counter

from dflash_hf._io.argument_types import amount, output_lines, positive, probability, template_arguments, token_id
from dflash_hf._io.errors import UsageError
from dflash_hf._io.terminal import Outcome, note
from dflash_hf.commands import shared
from dflash_hf.commands.pair import NamedPair
from dflash_hf.commands.shared import add_data, add_loading, add_output, add_sampling


AGAIN = "the same command continues with the rows that are missing"
# Options for answers of this process, which a server does not read.
_IN_PROCESS = (
    "raw",
    "chat_template",
    "packed",
    "batch_size",
    "device",
    "revision",
    "trust_remote_code",
    "dtype",
)


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="the target: folder, Hub name, or name on --server")
    add_data(parser, template="none", files=".jsonl, .json, .parquet, .csv, .txt")
    add_output(parser, ".jsonl file; continued if it exists", output_lines, required=True)
    shared.add_choice(parser, "--turns", ("last", "all"), "last", "turns to answer again: ")
    help = "share of rows with enable_thinking, drawn by --seed"
    parser.add_argument("--thinking", type=probability, metavar="SHARE", help=help)
    parser.add_argument("--max-new-tokens", type=positive, default=2048, help="longest answer (default: %(default)s)")
    add_sampling(parser, None, "the target's generation config")
    parser.add_argument("--raw", action="store_true", help="use prompts that are text without the chat template")
    parser.add_argument("--mask-token-id", type=token_id, help="token that is never written (default: first spare id)")
    here = add_loading(parser, draft=False, title="in this process")
    here.add_argument("--batch-size", type=positive, help="rows at a time (default: by memory, at most 256)")
    shared.add_packed(here)
    there = parser.add_argument_group("from a server")
    there.add_argument("--server", metavar="URL", help="OpenAI-compatible, such as http://127.0.0.1:8000")
    there.add_argument("--concurrency", type=positive, default=32, help="parallel requests (default: %(default)s)")
    there.add_argument("--timeout", type=amount, default=600.0, help="seconds for one answer (default: %(default)s)")


def run(arguments, echo) -> Outcome:
    """Write the rows that are missing in the output; the exit status is 1 if some were refused."""
    from transformers.utils import logging

    from dflash_hf.data.prompts import template_kwargs
    from dflash_hf.data.template import digests_of_tokenizer
    from dflash_hf.pairs.configs import check_mask_token_id
    from dflash_hf.synthetic.response_file import ResponseFile
    from dflash_hf.synthetic.tasks import make_tasks, task_digest_of, with_thinking

    unread = shared.options_given(arguments, _IN_PROCESS)
    if arguments.server and unread:
        raise UsageError(f"--server receives conversations and decodes them itself: leave out {', '.join(unread)}.")
    shared.check_sampling(arguments)
    shared.check_not_data(arguments.output, arguments.data)
    if arguments.server:
        pair = None
        tokenizer = None
        kwargs = template_kwargs(template_arguments(arguments.template_args), say=note)
        ask_server = _from_server(arguments, kwargs)
        sees = True
    else:
        pair = NamedPair(arguments, note)
        check_mask_token_id(arguments.mask_token_id, pair.config)
        sees = pair.image_reader is not None  # first: a template may be the processor's
        kwargs = pair.template()
        tokenizer = pair.tokenizer
        if arguments.thinking and "enable_thinking" not in str(tokenizer.chat_template):
            raise ValueError("--thinking: the chat template has no `enable_thinking`; leave it out.")
    as_chat = not arguments.raw and (tokenizer is None or bool(tokenizer.chat_template))
    data = shared.rows_of(arguments)
    every_turn = arguments.turns == "all"
    tasks, left_out = make_tasks(data, arguments.data, as_chat, every_turn, sees)
    if arguments.thinking:
        for index, task in tasks.items():
            tasks[index] = with_thinking(task, arguments.thinking, arguments.seed)
    for reason, number in left_out.items():
        echo(f"{number} rows are left out: {reason}")

    # Everything that answers depend on. Files are identified by content: data by each prompt, the target by weights.
    names = ("turns", "thinking", "max_new_tokens", "temperature", "top_p", "seed", "raw")
    settings = {
        **{name: getattr(arguments, name) for name in names},
        "chat_template_kwargs": kwargs,
        "served": arguments.target if arguments.server else None,
        **({"mask_token_id": arguments.mask_token_id} if pair is None else digests_of_tokenizer(tokenizer)),
    }
    total = len(tasks)
    with ResponseFile(arguments.output, settings, task_digest_of, echo) as output:
        for index, digest in output.finished.items():
            if index in tasks and tasks[index].digest != digest:
                raise ValueError(
                    f"Row {index} of {arguments.output} answers another prompt than row {index} of {arguments.data}: "
                    "the data has changed; choose another output."
                )
        missing = [task for index, task in tasks.items() if index not in output.finished]
        echo(f"{total - len(missing)} of {total} rows are finished")
        refused: Counter[str] = Counter()
        shortened: Counter[str] = Counter()
        if missing:
            rows = ask_server(missing) if pair is None else _in_process(pair, kwargs, missing, output)
            with logging.tqdm(total=total, initial=total - len(missing), unit="row") as bar:
                for row, reason in rows:
                    if row:
                        output.write_row(row)
                    if reason and row:
                        shortened[reason] += 1
                    elif reason:
                        refused[reason] += 1
                    bar.update()
            echo(f"{total - refused.total()} of {total} rows are in {arguments.output}")
    return _outcome(echo, total, left_out, shortened, refused)


def _outcome(echo, total: int, left_out: dict[str, int], shortened: Counter, refused: Counter) -> Outcome:
    """`echo` why rows end early or were refused."""
    for reason, number in shortened.most_common():
        echo(f"  {number} rows end early: {reason}")
    for reason, number in refused.most_common():
        echo(f"  {number} rows were refused, and the same command tries them again: {reason}")
    facts = {"rows": total, "finished": total - refused.total(), "left_out": left_out, "refused": dict(refused)}
    return Outcome(1 if refused else 0, {**facts, "shortened": dict(shortened)})


def _from_server(arguments, kwargs: dict):
    """A function that has a server answer tasks, and gives their rows."""
    from functools import partial

    from dflash_hf.synthetic.chat_client import ChatClient
    from dflash_hf.synthetic.regenerate import rows_from_server

    options = {"model": arguments.target, "max_tokens": arguments.max_new_tokens}
    if arguments.mask_token_id is not None:  # a bias of -100 bans the token
        options["logit_bias"] = {str(arguments.mask_token_id): -100}
    sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    options |= {name: value for name, value in sampling.items() if value is not None}
    server = ChatClient(arguments.server, options, kwargs, arguments.timeout)
    seed = None if arguments.temperature == 0 else arguments.seed  # greedy answers need none
    return partial(rows_from_server, server, concurrency=arguments.concurrency, seed=seed)


def _generation_config(target, arguments):
    """
    The target's generation configuration, with the sampling that is asked for.

    Raises:
        `UsageError`: `--top-p` for a target that decodes greedily.
    """
    import copy

    config = copy.deepcopy(target.generation_config)
    if arguments.temperature is not None:
        config.do_sample = arguments.temperature > 0
        config.temperature = arguments.temperature or None
        if not config.do_sample:
            config.top_p = config.top_k = None
    if arguments.top_p is not None:
        if not config.do_sample:
            raise UsageError(
                f"--top-p {arguments.top_p} has no effect: the target's generation config is greedy; add "
                "--temperature, such as 1."
            )
        config.top_p = arguments.top_p
    return config


def _in_process(pair: NamedPair, kwargs: dict, tasks: list, output):
    """The rows as they are answered."""
    from dflash_hf.pairs.loading import pack
    from dflash_hf.synthetic.regenerate import generate_rows
    from dflash_hf.synthetic.responses import rows_that_fit
    from dflash_hf.targets.digests import digest_of_target
    from dflash_hf.targets.mask_token import mask_token_remedy, spare_token_id

    arguments = pair.arguments
    tokenizer = pair.tokenizer
    target = pair.target()
    mask_token_id = arguments.mask_token_id
    if mask_token_id is None:
        mask_token_id = spare_token_id(target, tokenizer)
        if mask_token_id is None:
            remedy = mask_token_remedy(tokenizer, "--mask-token-id")
            note(
                f"{arguments.target} has no spare embedding row for a mask token, which training needs: {remedy}; to "
                "go on with a trained drafter, give its own"
            )
    elif mask_token_id < len(tokenizer) and mask_token_id not in tokenizer.added_tokens_decoder:
        written = tokenizer.decode([mask_token_id])
        note(f"--mask-token-id {mask_token_id} is the ordinary token {written!r}: answers are written without it")
    encoder = pair.encoder(kwargs, mask_token_id)
    config = _generation_config(target, arguments)
    generation = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
    made_with = {"weights": digest_of_target(target), "dtype": str(target.dtype), "mask_token_id": mask_token_id}
    output.add_settings({**made_with, "generation_config": generation})
    pack(arguments.packed, target)
    rows = arguments.batch_size or rows_that_fit(target, config, 128 + arguments.max_new_tokens // 2, len(tasks))
    return generate_rows(target, encoder, tasks, arguments.max_new_tokens, rows, config, arguments.seed)
