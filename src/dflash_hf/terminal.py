"""What the commands share: colours for those who can see them, and numbers that make sense."""

import argparse
import os


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


def positive(text: str) -> int:
    """A whole number of at least 1, for `type=`."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value
