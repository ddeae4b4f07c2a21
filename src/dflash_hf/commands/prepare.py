"""`dflash prepare`."""

from dflash_hf.commands.shared import add_data, add_examples, add_output, add_revision
from dflash_hf.terminal import add_color, count, positive, token_id


def add_arguments(parser) -> None:
    add_data(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", help="folder or Hub name of a tokenizer")
    which.add_argument("--target", help="folder or Hub name of the target, whose tokenizer is taken")
    add_revision(parser)
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the tokenizer")
    parser.add_argument("--max-length", type=positive, default=3072, help="cut examples here; default: %(default)s")
    parser.add_argument("--mask-token-id", type=token_id, help="the drafter's mask token; rows that hold it drop out")
    parser.add_argument("--examples", type=count, default=3, help="examples to show; default: %(default)s")
    add_output(parser, "write the examples here, as .jsonl or .parquet")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--num-proc", type=positive, help="processes")
    add_color(parser, "supervised tokens")
    add_examples(
        parser,
        "dflash prepare responses.jsonl --target Qwen/Qwen3-0.6B",
        "dflash prepare responses.jsonl --target Qwen/Qwen3-0.6B --output examples.parquet --examples 0",
    )


def run(arguments, echo):
    from dflash_hf.data.prepare import run

    return run(arguments, echo)
