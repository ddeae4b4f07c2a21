"""
`dflash regenerate`: have the target answer the prompts of a dataset, in this process or on a server.

    dflash regenerate --target Qwen/Qwen3-0.6B --data prompts.jsonl --output responses.jsonl
    dflash regenerate --target Qwen/Qwen3-0.6B --data chats.jsonl --turns all --thinking 0.5 --output responses.jsonl
    dflash regenerate --target T --data mixture.yaml --output responses.jsonl --server http://127.0.0.1:8000

a mixture is a YAML file with `seed` and `sources`, each with `data`, `split` and `rows`; see examples/recipes/mixtures
"""

from collections import Counter

from dflash_hf._io.argument_types import amount, output_lines, positive, probability, template_arguments, token_id
from dflash_hf._io.errors import UsageError
from dflash_hf._io.terminal import Outcome, note
from dflash_hf.commands import shared
from dflash_hf.commands.pair import NamedPair
from dflash_hf.commands.shared import add_data, add_loading, add_output, add_sampling


RESUME_HINT = "the same command continues with the rows that are missing"
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
    add_data(parser, template="none", files=".jsonl, .json, .parquet, .csv, .txt, mixture")
    add_output(parser, ".jsonl file; continued if it exists", output_lines, required=True)
    shared.add_choice(parser, "--turns", ("last", "all"), "last", "turns to answer again: ")
    help_text = "share of rows with enable_thinking, drawn by --seed"
    parser.add_argument("--thinking", type=probability, metavar="SHARE", help=help_text)
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
    from dflash_hf.data.prompts import template_kwargs
    from dflash_hf.data.template import digests_of_tokenizer
    from dflash_hf.synthetic.regenerate import rows_from_server
    from dflash_hf.synthetic.response_file import ResponseFile
    from dflash_hf.synthetic.tasks import task_digest_of

    # 1. The options.
    unread = shared.options_given(arguments, _IN_PROCESS)
    if arguments.server and unread:
        raise UsageError(f"--server receives conversations and decodes them itself: leave out {', '.join(unread)}.")
    shared.check_sampling(arguments)
    shared.check_not_data(arguments.output, arguments.data)
    # 2. Who answers: a server, or the target in this process.
    server = None
    pair = None
    if arguments.server:
        kwargs = template_kwargs(template_arguments(arguments.template_args), say=note)
        server = _client_of(arguments, kwargs)
    else:
        pair = _target_of(arguments)
        kwargs = pair.template()
    # 3. The tasks.
    tasks, left_out = _tasks(arguments, pair, echo)
    for reason, number in left_out.items():
        echo(f"{number} rows are left out: {reason}")
    # 4. The rows that are missing. Everything that answers depend on is stored in the output: files are identified by
    #    content, data by each prompt, the target by its weights.
    names = ("turns", "thinking", "max_new_tokens", "temperature", "top_p", "seed", "raw")
    settings = {name: getattr(arguments, name) for name in names}
    settings |= {"chat_template_kwargs": kwargs, "served": arguments.target if pair is None else None}
    if pair is None:
        settings["mask_token_id"] = arguments.mask_token_id
    else:
        settings |= digests_of_tokenizer(pair.tokenizer)
    shortened: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    with ResponseFile(arguments.output, settings, task_digest_of, echo) as output:
        _check_same_prompts(output, tasks, arguments)
        missing = [task for index, task in tasks.items() if index not in output.finished]
        echo(f"{len(tasks) - len(missing)} of {len(tasks)} rows are finished")
        if missing:
            if pair is None:
                seed = None if arguments.temperature == 0 else arguments.seed  # greedy answers need none
                rows = rows_from_server(server, missing, concurrency=arguments.concurrency, seed=seed)
            else:
                rows = _in_process(pair, kwargs, missing, output)
            _write_rows(rows, output, len(tasks), len(tasks) - len(missing), shortened, refused)
            echo(f"{len(tasks) - refused.total()} of {len(tasks)} rows are in {arguments.output}")
    return _outcome(echo, len(tasks), left_out, shortened, refused)


def _target_of(arguments) -> NamedPair:
    """
    The target that answers in this process.

    Raises:
        `ValueError`: it has no such mask token, or its template does not know `--thinking`.
    """
    from dflash_hf.pairs.configs import check_mask_token_id

    pair = NamedPair(arguments)
    check_mask_token_id(arguments.mask_token_id, pair.config)
    _ = pair.image_reader  # before the tokenizer is used: a template may be the processor's
    if arguments.thinking and "enable_thinking" not in str(pair.tokenizer.chat_template):
        raise ValueError("--thinking: the chat template has no `enable_thinking`; leave it out.")
    return pair


def _tasks(arguments, pair: NamedPair | None, echo) -> tuple[dict, dict[str, int]]:
    """The tasks by the index of their row, and how many rows are left out, by the reason; no `pair`: a server."""
    from dflash_hf.synthetic.tasks import make_tasks, with_thinking

    as_chat = not arguments.raw and (pair is None or bool(pair.tokenizer.chat_template))
    reads_images = pair is None or pair.image_reader is not None
    passed_over: Counter[str] = Counter()
    rows = _rows(arguments, passed_over)
    tasks, left_out = make_tasks(rows, arguments.data, as_chat, arguments.turns == "all", reads_images)
    for reason, number in passed_over.items():
        echo(f"{number} rows are passed over, others drawn: {reason}")
    if arguments.thinking:
        for index, task in tasks.items():
            tasks[index] = with_thinking(task, arguments.thinking, arguments.seed)
    return tasks, left_out


def _rows(arguments, passed_over: Counter):
    """
    The rows of `--data`, which may be a mixture; `passed_over` counts those of its sources that have no prompt.

    Raises:
        `UsageError`: `--split` or `--name` for a mixture, whose sources have their own.
    """
    from itertools import islice

    from dflash_hf.data.mixture import is_mixture, mixed_rows, read_mixture

    if not is_mixture(arguments.data):
        return shared.rows_of(arguments)
    useless = shared.options_given(arguments, ("split", "name"))
    if useless:
        raise UsageError(
            f"--data {arguments.data} is a mixture, whose sources have their own: leave out {useless[0]}."
        )
    mixture = read_mixture(arguments.data)
    for source in mixture.sources:
        terms = "; ".join(filter(None, (source.license, source.access)))
        note(f"{source.rows:,} rows of {source.key}: {terms or 'terms unknown'}")
    return islice(mixed_rows(mixture, passed_over), arguments.limit)


def _check_same_prompts(output, tasks: dict, arguments) -> None:
    """
    Raises:
        `ValueError`: a row of the output answers another prompt than the data now has.
    """
    for index, digest in output.finished.items():
        if index in tasks and tasks[index].digest != digest:
            raise ValueError(
                f"Row {index} of {arguments.output} answers another prompt than row {index} of {arguments.data}: "
                "the data has changed; choose another output."
            )


def _write_rows(rows, output, total: int, num_finished: int, shortened: Counter, refused: Counter) -> None:
    """Write the rows as they are answered, and count, by reason, the rows with a cut answer and those without one."""
    from transformers.utils import logging

    with logging.tqdm(total=total, initial=num_finished, unit="row") as bar:
        for row, reason in rows:
            if row:
                output.write_row(row)
            if reason and row:
                shortened[reason] += 1
            elif reason:
                refused[reason] += 1
            bar.update()


def _outcome(echo, total: int, left_out: dict[str, int], shortened: Counter, refused: Counter) -> Outcome:
    """`echo` why rows end early or were refused."""
    for reason, number in shortened.most_common():
        echo(f"  {number} rows end early: {reason}")
    for reason, number in refused.most_common():
        echo(f"  {number} rows were refused, and the same command tries them again: {reason}")
    facts = {"rows": total, "finished": total - refused.total(), "left_out": left_out, "refused": dict(refused)}
    return Outcome(1 if refused else 0, {**facts, "shortened": dict(shortened)})


def _client_of(arguments, kwargs: dict):
    """A client of `--server`, which asks for answers with the options of this command."""
    from dflash_hf.synthetic.chat_client import ChatClient

    options = {"model": arguments.target, "max_tokens": arguments.max_new_tokens}
    if arguments.mask_token_id is not None:  # a bias of -100 bans the token
        options["logit_bias"] = {str(arguments.mask_token_id): -100}
    sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    options |= {name: value for name, value in sampling.items() if value is not None}
    return ChatClient(arguments.server, options, kwargs, arguments.timeout)


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
    from dflash_hf.pairs.packing_choice import pack_if_chosen
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
    pack_if_chosen(arguments.packed, target)
    rows = arguments.batch_size or rows_that_fit(target, config, 128 + arguments.max_new_tokens // 2, len(tasks))
    return generate_rows(target, encoder, tasks, arguments.max_new_tokens, rows, config, arguments.seed)
