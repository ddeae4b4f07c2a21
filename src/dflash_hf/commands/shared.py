"""Arguments that several commands take; the same words mean the same everywhere."""

import argparse

from dflash_hf.names import DTYPES
from dflash_hf.terminal import (
    UsageError,
    add_template_arguments,
    device,
    dtype,
    output_path,
    positive,
    probability,
    readable_file,
    seed,
)
from dflash_hf.terminal import temperature as heat


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Examples stay as they are written."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=28)


class Parser(argparse.ArgumentParser):
    """Errors in one line, in the form of all others."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())[:260]} (see {self.prog} --help)\n")


def common() -> Parser:
    """What every command takes."""
    parent = Parser(add_help=False)
    group = parent.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the result as JSON, and all else on standard error")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress bars, and errors only of the libraries")
    group.add_argument("-v", "--verbose", action="count", default=0, help="say more; -vv says everything")
    group.add_argument("--debug", action="store_true", help="show where an error comes from; also DFLASH_DEBUG=1")
    return parent


def add_examples(parser, *lines: str, after: str = "") -> None:
    """Examples, and how the command is gone on with, at the end of its help."""
    text = "examples:\n" + "\n".join(f"  {line}" for line in lines)
    parser.epilog = text if not after else f"{text}\n\nafter an interruption: {after}"


def add_loading(parser, draft: bool = True, code: bool = True, title: str = "models"):
    """How models are loaded: see [`~dflash_hf.pairs.Loading`]."""
    group = parser.add_argument_group(title)
    shown = f"auto, {', '.join(DTYPES)}; default: %(default)s"
    group.add_argument(
        "--dtype",
        type=dtype,
        choices=("auto", *DTYPES),
        metavar="DTYPE",
        default="auto",
        help=f"of the models: {shown}",
    )
    group.add_argument(
        "--device", type=device, help="cpu, cuda, cuda:1, ... or auto, to spread a large target; default: a GPU if any"
    )
    add_revision(group, draft)
    if code:
        group.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the target")
    return group


def add_revision(group, draft: bool = False, of: str = "the target's repository") -> None:
    """`--revision`, and the drafter's where there are two."""
    group.add_argument("--revision", help=f"branch, tag or commit of {of}")
    if draft:
        group.add_argument("--draft-revision", help="branch, tag or commit of the drafter's repository")


PACKED = "pack the weights of all models for a CPU; once"
TREES = "draft trees of so many tokens, not blocks"


def add_speed(parser, packed: str = PACKED, trees: str = TREES) -> None:
    """Ways to decode faster, wherever something is decoded with a drafter; what two of them mean may differ."""
    group = parser.add_argument_group("speed")
    group.add_argument("--compile", action="store_true", help="compile the rounds; the first answer waits for it")
    group.add_argument("--tree-nodes", type=positive, metavar="N", help=trees)
    group.add_argument("--packed", action="store_true", help=packed)


def add_sampling(parser, default: float | None = 0.0, known: str = "0, greedy") -> None:
    """Temperature, nucleus and seed."""
    parser.add_argument("--temperature", type=heat, default=default, help=f"default: {known}")
    parser.add_argument("--top-p", type=probability, help="sample from that share of the probability; default: all")
    add_draft_temperature(parser)
    parser.add_argument("--seed", type=seed, default=0, help="of samples; default: %(default)s")


def add_draft_temperature(parser) -> None:
    """How drafts are chosen where the target samples."""
    parser.add_argument(
        "--draft-temperature",
        type=heat,
        help="draw drafts at it where the target samples; default: the likeliest, of DFlash 2 at its own",
    )


def sampling_options(arguments) -> dict:
    """
    What [`add_sampling`] was given, as arguments of `generate`.

    Raises:
        `UsageError`: a nucleus or drawn drafts without a temperature.
    """
    if arguments.top_p is not None and not arguments.temperature:
        raise UsageError(
            f"--top-p {arguments.top_p} changes nothing in greedy decoding; add --temperature, such as 1."
        )
    if arguments.draft_temperature and not arguments.temperature:
        raise UsageError(
            f"--draft-temperature {arguments.draft_temperature:g} changes nothing in greedy decoding; add "
            "--temperature, such as 1."
        )
    if not arguments.temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": arguments.temperature, "top_p": arguments.top_p or 1.0}


def add_data(parser) -> None:
    """Arguments of every command that reads a dataset."""
    parser.add_argument("data", metavar="DATA", help="a .jsonl, .json, .parquet or .csv file, or a dataset of the Hub")
    parser.add_argument("--split", help="default: train, or the only one")
    parser.add_argument("--name", help="configuration of a dataset of the Hub")
    parser.add_argument("--limit", type=positive, help="take the first rows only")
    parser.add_argument("--chat-template", type=readable_file, help="Jinja file in place of the tokenizer's own")
    add_template_arguments(parser)


def add_output(parser, what: str, kind=output_path, **options) -> None:
    """`--output`, which must be writable."""
    parser.add_argument("--output", type=kind, help=what, **options)
