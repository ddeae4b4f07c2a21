"""
`dflash prepare`: show which tokens of a dataset are trained on, and write the examples as token ids.

    dflash prepare --target Qwen/Qwen3-0.6B --data responses.jsonl
    dflash prepare --target Qwen/Qwen3-0.6B --data responses.jsonl --output examples.parquet --examples 0
"""

from dflash_hf._io.argument_types import count
from dflash_hf._io.errors import UsageError
from dflash_hf._io.terminal import Outcome, wants_color
from dflash_hf.commands import shared
from dflash_hf.commands.pair import NamedPair


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="the target, whose tokenizer is used: a folder or Hub name")
    shared.add_data(parser)
    shared.add_output(parser, "write the examples to this .jsonl or .parquet file")
    parser.add_argument("--examples", type=count, default=3, help="examples to print (default: %(default)s)")
    shared.add_encoding(parser)
    shared.add_color(parser, "supervised tokens")
    shared.add_revision(parser)
    parser.add_argument("--trust-remote-code", action="store_true", help="run the tokenizer's own code")


def run(arguments, echo) -> Outcome:
    """`echo` a few examples and the counts; write the examples to `--output`, if given."""
    import sys
    from dataclasses import asdict

    from dflash_hf._io.files import atomic
    from dflash_hf.data.prepare import colored_example, prepare_dataset

    output = arguments.output
    if output is not None:
        _check_output(output, arguments.data)
    encoder = shared.encoder_of(NamedPair(arguments))
    rows = shared.rows_of(arguments)
    dataset, report = prepare_dataset(rows, encoder, num_proc=arguments.num_proc, source=arguments.data)
    color = wants_color(arguments.color, sys.stdout)
    for number in range(min(arguments.examples, len(dataset))):
        echo(f"--- example {number}, supervised tokens {'in green' if color else 'in brackets'}")
        echo(colored_example(dataset[number], encoder.template.tokenizer, color))
    if arguments.examples:
        echo("---")
    for line in report.lines():
        echo(line)
    if output is not None:
        with atomic(output) as half:
            if output.suffix == ".parquet":
                dataset.to_parquet(str(half))
            else:
                dataset.to_json(str(half))
        echo(f"written           {output}")
    return Outcome(facts=asdict(report))


def _check_output(output, data: str) -> None:
    """
    Raises:
        `UsageError`, `ValueError`: the output has another suffix, is the data itself, or exists.
    """
    if output.suffix not in (".jsonl", ".parquet"):
        raise UsageError(f"--output {output} must end in .jsonl or .parquet.")
    shared.check_not_data(output, data)
    if output.exists():
        raise ValueError(f"--output {output} exists; choose another file, or remove it.")
