"""`dflash regenerate`."""

from dflash_hf.commands.shared import (
    add_data,
    add_examples,
    add_loading,
    add_output,
    add_sampling,
    add_speed,
)
from dflash_hf.terminal import amount, count, positive, token_id


AGAIN = "the same command goes on with the rows that are missing"


def add_arguments(parser) -> None:
    add_data(parser)
    parser.add_argument("--target", required=True, help="folder or Hub name; with --server the name it serves")
    add_output(parser, ".jsonl file; an existing one is continued", required=True)
    parser.add_argument("--max-new-tokens", type=positive, default=2048, help="default: %(default)s")
    add_sampling(parser, None, "the target's own setting; 0 is greedy")
    parser.add_argument("--raw", action="store_true", help="feed prompts that are text without the chat template")
    parser.add_argument("--mask-token-id", type=token_id, help="never generated; default: the first spare row")
    here = add_loading(parser, title="in this process")
    here.add_argument("--draft", help="folder or Hub name of a drafter, for speed")
    here.add_argument("--batch-size", type=positive, help="rows at a time; default: what is fastest here, measured")
    add_speed(parser)
    there = parser.add_argument_group("from a server")
    there.add_argument("--server", help="address of an OpenAI-compatible one, such as http://127.0.0.1:8000")
    there.add_argument("--concurrency", type=positive, default=32, help="requests at a time; default: %(default)s")
    there.add_argument("--retries", type=count, default=5, help="of a request; default: %(default)s")
    there.add_argument("--timeout", type=amount, default=600.0, help="seconds for one answer; default: %(default)s")
    add_examples(
        parser,
        "dflash regenerate prompts.jsonl --target Qwen/Qwen3-0.6B --output responses.jsonl",
        "dflash regenerate prompts.jsonl --target Qwen/Qwen3-0.6B --output responses.jsonl "
        "--server http://127.0.0.1:8000",
        after=AGAIN,
    )


def run(arguments, echo):
    from dflash_hf.data.regenerate import run

    return run(arguments, echo)
