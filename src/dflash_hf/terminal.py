"""What the commands share: colours for those who can see them, and numbers that make sense."""

import argparse
import json
import os
import sys


def wants_color(choice: bool | None, stream) -> bool:
    """`--color` and `--no-color` decide; else `NO_COLOR`; else whether the output is a terminal."""
    if choice is not None:
        return choice
    return not os.environ.get("NO_COLOR") and stream.isatty()


def add_color(parser, what: str) -> None:
    """`--color` and `--no-color`."""
    parser.add_argument(
        "--color",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=f"colour {what}; default: if the output is a terminal and NO_COLOR is unset",
    )


def note(line: str) -> None:
    """Print to standard error what is no result, so that results alone can be piped."""
    print(line, file=sys.stderr, flush=True)


def add_template_arguments(parser) -> None:
    """`--template-args`."""
    parser.add_argument(
        "--template-args",
        metavar="JSON",
        help="arguments of the chat template, such as '{\"enable_thinking\": false}'; default: those that the drafter "
        "or the data was made with",
    )


def template_arguments(text: str | None) -> dict | None:
    """The value of `--template-args`."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--template-args {text} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"--template-args {text} must be a JSON object, such as '{{\"enable_thinking\": false}}'.")
    return value


def positive(text: str) -> int:
    """A whole number of at least 1, for `type=`."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value
