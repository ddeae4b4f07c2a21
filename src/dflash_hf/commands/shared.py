"""Options that several commands share; an option means the same in every command."""

from argparse import BooleanOptionalAction
from collections.abc import Iterable
from pathlib import Path

from dflash_hf._io import argument_types
from dflash_hf._io.argument_types import output_path, positive, readable_file
from dflash_hf._io.errors import UsageError
from dflash_hf._io.names import DTYPES
from dflash_hf._io.terminal import note


_TWO_WAY_SWITCHES = ("packed", "color")  # also have a `--no-` form, and are `None` unless one of the two is given


# ------------------------------------------------------------------------------------------------ models, and how fast


def add_pair(parser, default: bool = False, required: bool = False) -> None:
    """Add `--target` and `--draft`; with `default`, SmolLM2-135M and its drafter are used if neither is given."""
    shown = " (default: SmolLM2-135M and its drafter)" if default else ""
    parser.add_argument("--target", required=required, help=f"the target: a folder or Hub name{shown}")
    alone = "; without it, decoding is target-only" if default else ""
    parser.add_argument("--draft", required=required, help=f"its drafter: a folder or Hub name{alone}")


def add_loading(parser, draft: bool = True, title: str = "models", trusted: str = "the target's own code"):
    """Add the options of [`~dflash_hf.pairs.loading.Loading`]; `trusted` names the code that may run."""
    group = parser.add_argument_group(title)
    add_dtype(group, ("auto", *DTYPES), "auto")
    devices = "cpu, cuda, cuda:1, ... or auto (default: an accelerator, if any)"
    group.add_argument("--device", type=argument_types.device, help=devices)
    add_revision(group, draft)
    group.add_argument("--trust-remote-code", action="store_true", help=f"run {trusted}")
    return group


def add_choice(parser, option: str, choices: tuple[str, ...], default: str, prefix: str = "", **more) -> None:
    """Add an option with a few choices, which its help lists after a `prefix`; its metavar is its name's last word."""
    help_text = f"{prefix}{', '.join(choices)} (default: %(default)s)"
    name = option.rpartition("-")[2].upper()
    parser.add_argument(option, choices=choices, metavar=name, default=default, help=help_text, **more)


def add_dtype(parser, choices: tuple[str, ...], default: str, option: str = "--dtype", prefix: str = "") -> None:
    """Add `--dtype`, or another option whose value is a dtype; its help begins with a `prefix`."""
    add_choice(parser, option, choices, default, prefix, type=argument_types.dtype)


def add_revision(group, draft: bool = False, repository: str = "the target's repository") -> None:
    """Add `--revision`, and with `draft` also `--draft-revision`."""
    group.add_argument("--revision", metavar="REV", help=f"branch, tag or commit of {repository}")
    if draft:
        group.add_argument("--draft-revision", metavar="REV", help="branch, tag or commit of the drafter's repository")


def add_threads(parser) -> None:
    """Add `--threads`."""
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's own choice)")


def add_speed(parser, trees: str = "draft trees of N tokens instead of blocks") -> None:
    """Add the options for faster decoding with a drafter."""
    group = parser.add_argument_group("speed")
    group.add_argument("--compile", action="store_true", help="compile the rounds; the first answer waits for it")
    group.add_argument("--cuda-graphs", action="store_true", help="capture the rounds of a call in CUDA graphs")
    group.add_argument("--tree-nodes", type=positive, metavar="N", help=trees)
    add_packed(group)


def add_packed(group) -> None:
    """Add `--packed` and `--no-packed`, for [`~dflash_hf.pairs.packing_choice.pack_if_chosen`]."""
    help_text = "faster CPU inference (default: if memory allows)"
    group.add_argument("--packed", action=BooleanOptionalAction, help=help_text)


# ------------------------------------------------------------------------------------------------------------- answers


def add_answering(parser) -> None:
    """Add the options that `generate` and `chat` share: template, sampling, and how models are loaded."""
    add_template_arguments(parser)
    parser.add_argument("--max-new-tokens", type=positive, default=512, help="longest answer (default: %(default)s)")
    add_sampling(parser)
    add_threads(parser)
    add_color(parser, "accepted draft tokens")
    add_loading(parser)
    add_speed(parser)


def add_sampling(parser, default: float | None = 0.0, shown: str = "0, greedy") -> None:
    """Add `--temperature` (its help shows the default as `shown`), `--top-p` and `--seed`."""
    help_text = f"0 is greedy (default: {shown})"
    parser.add_argument("--temperature", type=argument_types.temperature, default=default, help=help_text)
    parser.add_argument("--top-p", type=argument_types.probability, help="nucleus sampling (default: 1)")
    parser.add_argument("--seed", type=argument_types.seed, default=0, help="sampling seed (default: %(default)s)")


def check_sampling(arguments) -> None:
    """
    Raises:
        `UsageError`: `--top-p` without a temperature.
    """
    if arguments.top_p and arguments.temperature == 0:
        raise UsageError(f"--top-p {arguments.top_p} has no effect in greedy decoding; add --temperature, such as 1.")


def sampling_options(arguments) -> dict:
    """
    The values of [`add_sampling`]'s options, as arguments of `generate`.

    Raises:
        `UsageError`: as [`check_sampling`].
    """
    check_sampling(arguments)
    if not arguments.temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": arguments.temperature, "top_p": arguments.top_p or 1.0}


def add_template(parser, default: str) -> None:
    """Add `--chat-template` and `--template-args`; the help of the latter shows `default`."""
    parser.add_argument("--chat-template", type=readable_file, help="Jinja file, instead of the tokenizer's own")
    add_template_arguments(parser, default)


def add_template_arguments(parser, default: str = "the drafter's") -> None:
    """Add `--template-args`; its help shows `default`."""
    help_text = f"'{{\"enable_thinking\": false}}' (default: {default})"
    parser.add_argument("--template-args", metavar="JSON", help=help_text)


def add_color(parser, what: str) -> None:
    """Add `--color` and `--no-color`."""
    help_text = f"colour {what} (default: on a terminal without NO_COLOR)"
    parser.add_argument("--color", action=BooleanOptionalAction, help=help_text)


def options_given(arguments, names: Iterable[str]) -> list[str]:
    """The options among these argument names that are set, as written on the command line."""
    options = []
    for name in names:
        value = getattr(arguments, name)
        is_default_dtype = name == "dtype" and value == "auto"  # the only default that is not falsy
        option = name.replace("_", "-")
        if value is False and name in _TWO_WAY_SWITCHES:
            options.append(f"--no-{option}")
        elif value and not is_default_dtype:
            options.append(f"--{option}")
    return options


# ---------------------------------------------------------------------------------------------------------------- data


def add_data(parser, template: str = "those of the data", files: str = ".jsonl, .json, .parquet, .csv") -> None:
    """Add the options of commands that read training data; the help of `--template-args` shows `template`."""
    parser.add_argument("--data", required=True, help=f"a {files} file or Hub dataset")
    parser.add_argument("--split", help="split of the data (default: train, or the only)")
    parser.add_argument("--name", help="configuration of a Hub dataset")
    parser.add_argument("--limit", type=positive, help="use the first N rows only")
    add_template(parser, template)


def add_encoding(parser) -> None:
    """Add the options for encoding the rows of [`add_data`] into examples."""
    parser.add_argument("--max-length", type=positive, default=3072, help="truncate examples (default: %(default)s)")
    masked = "the drafter's mask token; rows with it are left out"
    parser.add_argument("--mask-token-id", type=argument_types.token_id, help=masked)
    parser.add_argument("--num-proc", type=positive, help="worker processes for the data")


def add_output(parser, what: str, kind=output_path, **options) -> None:
    """Add `--output`, a writable path."""
    parser.add_argument("--output", type=kind, help=what, **options)


def encoder_of(pair):
    """
    The `RowEncoder` of [`add_data`]'s and [`add_encoding`]'s arguments, for the target of a `NamedPair`.

    Raises:
        `ValueError`: the target has no such mask token.
    """
    from dflash_hf.data.encode import RowEncoder
    from dflash_hf.data.prompts import template_kwargs
    from dflash_hf.data.template import ChatTemplate
    from dflash_hf.pairs.configs import check_mask_token_id
    from dflash_hf.targets.config_fields import vocab_size_of

    arguments = pair.arguments
    check_mask_token_id(arguments.mask_token_id, pair.config)
    kwargs = template_kwargs(argument_types.template_arguments(arguments.template_args), arguments.data, say=note)
    return RowEncoder(
        ChatTemplate(pair.tokenizer, kwargs, pair.image_reader),
        max_length=arguments.max_length,
        mask_token_id=arguments.mask_token_id,
        vocab_size=vocab_size_of(pair.config),
    )


def rows_of(arguments):
    """Load the dataset that [`add_data`]'s arguments name."""
    from dflash_hf.data.sources import load_rows

    rows = load_rows(arguments.data, arguments.split, name=arguments.name)
    if arguments.limit:
        rows = rows.select(range(min(arguments.limit, len(rows))))
    return rows


def check_not_data(output: Path, data: str) -> None:
    """
    Raises:
        `UsageError`: the output is the data, which would be overwritten.
    """
    source = Path(data)
    if output.exists() and source.exists() and output.samefile(source):
        raise UsageError(f"--output {output} is the data itself, which would be overwritten; choose another file.")
