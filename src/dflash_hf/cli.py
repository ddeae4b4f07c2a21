"""
The command line, `dflash COMMAND`. It and `terminal.Echo` are all that prints.

Exit status: 0 done; 1 it failed, or the result is not what was asked for (an error found by `check`, an output that is
not the target's own); 2 the command line cannot be right and nothing was begun; 130 interrupted by Ctrl-C; 141 nobody
reads its output any more. An error is one line on standard error, `dflash NAME: error: ...`.
"""

import _thread
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dflash_hf.commands.shared import Formatter, Parser, common
from dflash_hf.terminal import Echo, Outcome, UsageError, end_progress_bars, one_line, set_verbosity, stop_printing


# What each is for. The module of its name in `commands` has its `add_arguments(parser)` and `run(arguments, echo)`;
# where a command goes on after an interruption, the module says so in `AGAIN`.
COMMANDS = {
    "demo": "SmolLM2-135M alone and with its drafter, side by side on this machine",
    "generate": "decode a prompt with a target and its drafter",
    "chat": "talk to a target and its drafter in the terminal",
    "serve": "serve a target with its drafter behind the OpenAI API",
    "find": "list drafters of a target on the Hub",
    "smollm2": "print the folder of SmolLM2-135M-Instruct, made by the first call",
    "prompts": "let a chat target write the requests that its drafter is trained on",
    "regenerate": "write the target's own responses to the prompts of a dataset",
    "prepare": "show what of a dataset is learned, count it, and write it as ids",
    "features": "store the target's features of a dataset, for training without its layers",
    "recipes": "list, show or copy the recipes and scripts that come along",
    "train": "train a drafter by a recipe",
    "eval": "measure tau, speed-up and losslessness of a pair on prompts",
    "doctor": "find out by experiment why acceptance is low",
    "bench": "time every way of decoding a pair side by side",
    "check": "will vLLM, SGLang and transformers read a drafter's folder, and read the same?",
    "convert": "rewrite a drafter in another published layout",
    "publish": "upload a drafter with its card to the Hub",
    "env": "print versions and devices, for a report of a defect",
    "completion": "print a completion script for bash, zsh or fish",
}


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments after the program's name. Default: the process's.

    Returns:
        `int`: The exit status, see above. `SystemExit` with 2 where the arguments cannot be parsed, with 0 after help.
    """
    with _interrupts() as interrupted:
        name, again, debug = "", "run the same command again", os.environ.get("DFLASH_DEBUG", "0") not in ("", "0")
        try:
            argv = sys.argv[1:] if argv is None else list(argv)
            name = next((word for word in argv if not word.startswith("-")), "")
            arguments = _parsed(name, argv)
            debug |= arguments.debug
            module = _module(name)
            again = getattr(module, "AGAIN", again)
            set_verbosity(arguments.quiet, arguments.verbose)
            arguments.all_commands = _all_commands
            _resolve_names(arguments)
            outcome = module.run(arguments, Echo(to_stderr=arguments.json))
            outcome = outcome if isinstance(outcome, Outcome) else Outcome(outcome)
            if arguments.json:
                print(json.dumps({"exit": outcome.code, **outcome.facts}, indent=1, default=str))
            sys.stdout.flush()
            return outcome.code
        except BrokenPipeError:
            stop_printing()
            return 141
        except Exception as error:  # every error ends as one line
            if debug:
                traceback.print_exc()
            if interrupted:  # libraries turn a Ctrl-C in the middle of their import into errors of their own
                return _say_interrupted(name, again)
            from dflash_hf.failures import explain

            end_progress_bars()
            print(f"dflash {name}: error: {explain(error, again)}", file=sys.stderr)
            return 2 if isinstance(error, UsageError) else 1
        except KeyboardInterrupt:
            if debug:
                traceback.print_exc()
            return _say_interrupted(name, again)


def build_parser(chosen: str) -> tuple[Parser, Parser | None]:
    """The parser, and that of one command, with its arguments; those of others are not imported."""
    from dflash_hf import __version__

    parser = Parser(prog="dflash", description="Train, publish and run DFlash drafters.", formatter_class=Formatter)
    parser.add_argument("--version", action="version", version=f"dflash-hf {__version__}")
    parser.epilog = (
        "exit status: 0 done, 1 failed, 2 wrong arguments, 130 interrupted, 141 the output is read no more\n"
        "`dflash COMMAND --help` shows arguments and examples; --debug, or DFLASH_DEBUG=1, where an error comes from"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    shared = common()
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary, parents=[shared], formatter_class=Formatter
        )
        if name == chosen:
            _module(name).add_arguments(command)
    return parser, commands.choices.get(chosen)


def _parsed(name: str, argv: list[str]):
    """The arguments; an option that the command lacks is refused, with the one that may be meant."""
    parser, command = build_parser(name)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown and command is not None:
        import difflib

        options = [option for action in command._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, 1, cutoff=0.7)
        meant = f"; did you mean {near[0]}?" if near else ""
        command.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    return arguments


def _module(name: str):
    return importlib.import_module(f"dflash_hf.commands.{name}")


def _all_commands() -> dict[str, Parser]:
    found = {name: build_parser(name)[1] for name in COMMANDS}
    return {name: parser for name, parser in found.items() if parser is not None}


def _resolve_names(arguments) -> None:
    """The pair that needs no Hub goes by its name."""
    for name in ("target", "draft", "base", "src", "gguf"):
        if getattr(arguments, name, None) == "smollm2":
            from dflash_hf.smollm2 import folder_of

            setattr(arguments, name, folder_of("smollm2", drafter=name in ("draft", "src")))


def _say_interrupted(name: str, again: str) -> int:
    eval("None")  # Python forgets a Ctrl-C that fell into an `exec`, as in a dataclass, and would end by the signal
    end_progress_bars()
    print(f"\ndflash {name}: interrupted; {one_line(again)}.", file=sys.stderr)
    return 130


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that holds something once Ctrl-C was pressed: what it raises may arrive as another exception."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield pressed
        return
    again, hook = threading.Timer(0.05, _thread.interrupt_main), sys.unraisablehook

    def press(number, frame):
        pressed.append(number)
        raise KeyboardInterrupt

    def swallowed(unraisable):  # by a destructor or a callback, in which Python drops what is raised
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            hook(unraisable)
        elif again.ident is None:
            again.start()

    signal.signal(signal.SIGINT, press)
    sys.unraisablehook = swallowed
    try:
        yield pressed
    finally:
        again.cancel()
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":  # for `accelerate launch -m dflash_hf.cli train`
    sys.exit(main())
