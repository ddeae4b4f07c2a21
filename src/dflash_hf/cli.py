"""
The command line, `dflash COMMAND`. It and `terminal.Echo` are all that prints.

Exit status: 0 done; 1 failed, or a bad result (an error found by `check`, an output that is not the target's own);
2 invalid arguments, nothing was started; 130 interrupted by Ctrl-C; 141 output pipe closed. An error is one line on
standard error, `dflash NAME: error: ...`.
"""

import argparse
import contextlib
import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType

from dflash_hf._io import argument_types, errors, files, terminal
from dflash_hf.commands import packaged
from dflash_hf.data.sources import check_files


# The commands, in the order of use. `commands/__init__.py` describes the module of a command.
GROUPS = {
    "run": {
        "demo": "compare SmolLM2-135M with and without its drafter on this machine",
        "generate": "generate a response to a prompt",
        "chat": "chat in the terminal",
    },
    "train": {
        "prompts": "have the target write prompts to train on",
        "regenerate": "have the target answer the prompts of a dataset",
        "prepare": "show and count the tokens of a dataset that are trained on",
        "features": "store the target's features, to train without its layers",
        "train": "train a drafter",
        "eval": "measure acceptance, speedup and losslessness",
        "doctor": "find out why acceptance is low",
    },
    "publish": {
        "check": "check that vLLM, SGLang and transformers can read a drafter",
        "convert": "convert a drafter to another layout, or to GGUF",
        "publish": "upload a drafter with its model card to the Hub",
    },
    "serve": {"serve": "start an OpenAI-compatible server: transformers, vLLM, SGLang or llama.cpp"},
    "tools": {
        "packaged": "print the local folder of a target that a package contains",
        "env": "print versions and devices, for a bug report",
    },
}
COMMANDS: dict[str, str] = {}
for _commands in GROUPS.values():
    COMMANDS |= _commands
_COMMON = """options of all commands:
  --json         print the result as JSON, and messages on standard error
  -q, --quiet    no progress bars; libraries log errors only
  -v, --verbose  log more; -vv logs everything
  --debug        show the traceback of an error (or set DFLASH_DEBUG=1)"""


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments after the program's name. Default: the process's.

    Returns:
        `int`: The exit status, see above.

    Raises:
        `SystemExit`: 2 if the arguments are invalid, 0 after help.
    """
    if hasattr(sys.stdout, "reconfigure"):  # a console may not be UTF-8
        sys.stdout.reconfigure(errors="replace")
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse(words)
    module = _module(arguments.command)
    resume_hint = getattr(module, "RESUME_HINT", "run the same command again")
    try:
        terminal.set_verbosity(arguments.quiet, arguments.verbose)
        _resolve_names(arguments)
        # With `--json`, the standard output holds only the result, whatever libraries print.
        with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            outcome = module.run(arguments, terminal.Echo())
        if arguments.json:
            print(files.json_text({"exit": outcome.code, **outcome.facts}))
        sys.stdout.flush()
        return outcome.code
    except KeyboardInterrupt:
        print(f"\ndflash {arguments.command}: interrupted; {resume_hint}.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports the pipe at exit
        return 141
    except Exception as error:  # every error becomes one line
        if arguments.debug or os.environ.get("DFLASH_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        output = getattr(arguments, "output", None) or getattr(arguments, "output_dir", None)
        message = errors.explain(error, resume_hint, output)
        terminal.note(f"dflash {arguments.command}: error: {_with_option_names(message, arguments)}")
        return 2 if isinstance(error, errors.UsageError) else 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    """
    The arguments in the words of a command line, the command's name first.

    Raises:
        `SystemExit`: 2 if they are invalid, 0 after help.
    """
    from dflash_hf import __version__

    lines = ["Train, publish and run DFlash drafters."]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {name:12}{summary}" for name, summary in commands.items()]
    parser = Parser("dflash", "\n".join(lines), _COMMON)
    parser.usage = "dflash COMMAND [options]"
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action="help", help="show this help; `dflash COMMAND --help` has examples")
    parser.add_argument("--version", action="version", version=f"dflash-hf {__version__}", help="show the version")
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    name = parser.parse_args(words[:1]).command
    rest = list(words[1:])
    command_parser = build_parser(name, all_options=not {"-h", "--help"} & set(rest))
    translate = getattr(_module(name), "translate", None)
    if translate is not None:
        rest = translate(rest, command_parser)
    return command_parser.parse_intermixed_args(rest)


def build_parser(name: str, all_options: bool = False) -> "Parser":
    """
    The parser of one command; other commands are not imported. With `all_options` it also has those that its help does
    not list, for which torch is imported.
    """
    module = _module(name)
    summary = COMMANDS[name]
    _, _, examples = (module.__doc__ or "").partition("\n\n")
    examples = f"examples:\n{examples}".replace("\n    ", "\n  ")
    if hasattr(module, "RESUME_HINT"):
        examples += f"\nafter an interruption: {module.RESUME_HINT}\n"
    end = "all commands: --json, -q/--quiet, -v/--verbose, --debug (see dflash --help)"
    parser = Parser(f"dflash {name}", f"{summary[0].upper()}{summary[1:]}.", f"{examples}\n{end}")
    module.add_arguments(parser)
    if all_options and hasattr(module, "add_more_arguments"):
        module.add_more_arguments(parser)
    parser.remedy = getattr(module, "remedy", None)
    parser.shorten_usage()
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-q", "--quiet", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-v", "--verbose", action="count", default=0, help=argparse.SUPPRESS)
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.set_defaults(command=name, target_name=None)  # see `commands/__init__.py`
    return parser


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of examples, and names values by kind: `N`, `X`, `FILE`, `FOLDER`."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=28)

    def _get_default_metavar_for_optional(self, action):
        metavar = argument_types.METAVARS.get(action.type) or getattr(action.type, "metavar", None)
        return metavar or super()._get_default_metavar_for_optional(action)


class Parser(argparse.ArgumentParser):
    """Errors on one line, as everywhere else, and a usage line that names only the required arguments."""

    def __init__(self, prog: str, description: str, epilog: str):
        super().__init__(prog, None, description, epilog, formatter_class=Formatter, add_help=False)
        self.remedy: Callable[[list[str], list[str], Parser], str] | None = None  # see `commands/__init__.py`
        self.words: list[str] = []

    @property
    def options(self) -> dict[str, argparse.Action]:
        """The options by their spellings; argparse has no public list of them."""
        return {option: action for action in self._actions for option in action.option_strings}

    def parse_intermixed_args(self, args=None, namespace=None):
        self.words = list(args or ())
        return super().parse_intermixed_args(args, namespace)

    def error(self, message: str):
        start, _, unknown = message.partition("unrecognized arguments: ")
        if self.remedy is not None and unknown and not start:
            message = f"{message}; {self.remedy(unknown.split(), self.words, self)}"
        elif (unknown and not start) or message.startswith("the following arguments are required: "):
            message = "; ".join([message, *self.misspelled()])
        self.exit(2, f"{self.prog}: error: {errors.one_line(message, 260)} (see {self.prog} --help)\n")

    def misspelled(self) -> list[str]:
        """A proposal for each option of the command line that resembles one of this command's and is none."""
        proposals = []
        for word in self.words:
            option = word.partition("=")[0]
            if option.startswith("--") and not any(name.startswith(option) for name in self.options):
                nearest = self.nearest_option(option, cutoff=0.75)
                if nearest is not None:
                    proposals.append(f"{option}: did you mean {nearest}?")
        return proposals

    def nearest_option(self, option: str, cutoff: float) -> str | None:
        """The option most like this one; `None` if none reaches the similarity `cutoff`, from 0 to 1."""
        return next(iter(difflib.get_close_matches(option, self.options, n=1, cutoff=cutoff)), None)

    def shorten_usage(self) -> None:
        """Options that are not required are `[options]`."""
        needed = [action for action in self._actions if action.required or not action.option_strings]
        formatter = Formatter(f"{self.prog} [options]")
        formatter.add_usage(None, needed, [], prefix="")
        self.usage = formatter.format_help().strip()


def _module(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"dflash_hf.commands.{name}")


def _with_option_names(message: str, arguments: argparse.Namespace) -> str:
    """
    A message of the library, which names arguments as in Python, with this command's options in their place.

    1. An argument in backticks, which the message proposes: `--share-head` for "`share_head=True`". It stays as it is
       if the command has no such option.
    2. An argument that this command line has set, with its value: `--max-length 64` for "max_length=64".
    """
    actions = {action.dest: action for action in build_parser(arguments.command, all_options=True).options.values()}

    def option_of(match: re.Match) -> str:
        action = actions.get(match["name"])
        return match[0] if action is None else _option(action, match["value"].strip("'\""))

    message = re.sub(r"`(?P<name>[a-z]\w*)=(?P<value>[^`\s]+)`", option_of, message)
    for name, action in actions.items():
        value = getattr(arguments, name, None)
        if value is None or value is False:
            continue
        option = _option(action, " ".join(map(str, value)) if isinstance(value, list) else str(value))
        spellings = {str(value), repr(value)}
        if type(value) is int:
            spellings.add(str(float(value)))  # for a setting that is a float
        for spelling in spellings:
            assignment = re.escape(f"{name}={spelling}")
            # Not a part of a longer name, value or path.
            pattern = rf"(?<![\w./\\-]){assignment}(?![\w/\\]|\.\w)"
            message = re.sub(pattern, option.replace("\\", r"\\"), message)
    return message


def _option(action: argparse.Action, value: str) -> str:
    """An option with a value in Python's spelling, as on the command line; the value `True` is the option alone."""
    if value == "False" and isinstance(action, argparse.BooleanOptionalAction):
        return action.option_strings[-1]
    return action.option_strings[0] if value == "True" else f"{action.option_strings[0]} {value}"


def _resolve_names(arguments: argparse.Namespace) -> None:
    """Resolve `~`, which shells leave in `--target=~/model`, and the names of targets that packages contain."""
    for name in ("target", "draft", "base", "gguf", "data", "source"):
        value = getattr(arguments, name, None)
        if isinstance(value, str):
            setattr(arguments, name, os.path.expanduser(value))
    # The errors of `train` also name misspelt settings; the data of `eval` may be `NAME=FILE`.
    if arguments.command not in ("train", "eval"):
        check_files("data", getattr(arguments, "data", None))
    if getattr(arguments, "target", None) in packaged.NAMES:
        arguments.target_name = arguments.target
    for name in ("target", "draft", "base", "gguf"):
        value = getattr(arguments, name, None)
        if isinstance(value, str):
            _check_spelling(value)
        if value in packaged.NAMES:
            from dflash_hf.pairs.packaged_targets import folder_of
            from dflash_hf.smollm2 import draft_folder_of

            folder = draft_folder_of(value) if name == "draft" else folder_of(value)
            setattr(arguments, name, folder)


def _check_spelling(value: str) -> None:
    """
    Raises:
        `UsageError`: a model's name is almost that of a target in a package.
    """
    if value in packaged.NAMES or "/" in value or os.path.exists(value):
        return
    for name in packaged.NAMES:
        begins_alike = value.lower().startswith(name.partition("-")[0])
        if begins_alike or difflib.get_close_matches(value.lower(), [name], cutoff=0.8):
            raise errors.UsageError(f"{value}: there is no such folder; did you mean {name}?")


if __name__ == "__main__":  # for `accelerate launch -m dflash_hf.cli train`
    sys.exit(main())
