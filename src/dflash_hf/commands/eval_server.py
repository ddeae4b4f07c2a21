"""The part of `dflash eval` that measures a running server."""

import argparse
import json

from dflash_hf._io.argument_types import positive, template_arguments
from dflash_hf._io.errors import UsageError
from dflash_hf._io.progress import bar
from dflash_hf._io.terminal import Outcome
from dflash_hf.commands import shared
from dflash_hf.evaluation.sets import NEW_TOKENS, set_name


# Options about a pair in this process, which a server does not read.
_IN_PROCESS = (
    "draft",
    "raw",
    "prompt_lookup",
    "mtp",
    "threads",
    "context",
    "pretend_tau",
    "compare",
    "table",
    "sets",
    "seed",
    "block_size",
    "dtype",
    "device",
    "revision",
    "draft_revision",
    "trust_remote_code",
    "compile",
    "cuda_graphs",
    "tree_nodes",
    "packed",
)


def add_server_arguments(parser) -> None:
    """Add the options about a server."""
    server = "a server, by its own counters; --concurrency N: requests at a time"
    parser.add_argument("--server", metavar="URL", help=server)
    parser.add_argument("--concurrency", type=positive, default=1, help=argparse.SUPPRESS)


def run_server(arguments, echo) -> Outcome:
    """`echo` what a server counted, and write `server_report.json`."""
    unread = shared.options_given(arguments, _IN_PROCESS)
    if unread:
        raise UsageError(f"--server measures what runs there: leave out {', '.join(unread)}.")
    if arguments.data is None:
        raise UsageError("--server needs --data, the prompts to measure it with.")
    from dflash_hf._io.files import digest_of
    from dflash_hf.evaluation.server_eval import conversations_of, evaluate_server, report_lines
    from dflash_hf.evaluation.sets import dataset_name, eval_rows
    from dflash_hf.synthetic.chat_client import ChatClient

    is_benchmark = set_name(arguments.data) is not None
    kwargs = template_arguments(arguments.template_args)
    if kwargs is None and (is_benchmark or arguments.thinking):
        kwargs = {"enable_thinking": arguments.thinking}
    conversations = conversations_of(eval_rows(arguments.data, arguments.prompts, arguments.split), arguments.data)
    max_new_tokens = arguments.max_new_tokens or (NEW_TOKENS if is_benchmark else 256)
    options = {"max_tokens": max_new_tokens, "temperature": arguments.temperature}
    client = ChatClient(arguments.server, options, kwargs or {}, timeout=3600.0)
    client.options["model"] = arguments.target_name or arguments.target or client.only_model()
    report = evaluate_server(client, conversations, arguments.concurrency, bar("answers"))
    report.setting = {
        "server": client.address,
        "model": client.options["model"],
        "concurrency": arguments.concurrency,
        "dataset": dataset_name(arguments.data),
        "prompts": len(conversations),
        "prompts_digest": digest_of(conversations),
        "max_new_tokens": max_new_tokens,
        "temperature": arguments.temperature,
        "chat_template_kwargs": kwargs or {},
    }
    for line in report_lines(report):
        echo(line)
    if arguments.output is not None:
        echo(f"written           {report.save(arguments.output)}")
    return Outcome(1 if report.rejected else 0, json.loads(report.to_json()))
