"""
The command line, `dflash COMMAND`. It and `terminal.Echo` are all that prints.

Exit status: 0 done; 1 failed, or a bad result (an error found by `check`, an output that is not the target's own);
2 invalid arguments, nothing was started; 130 interrupted by Ctrl-C; 141 output pipe closed. An error is one line on
standard error, `dflash NAME: error: ...`.
"""

import _thread
import argparse
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dflash_hf import terminal
from dflash_hf.commands.shared import COMMON, Formatter, Parser, add_common, add_examples
from dflash_hf.data.sources import check_files


# The commands, in the order of use. The module of a command's name in `commands` has `add_arguments(parser)` and
# `run(arguments, echo) -> Outcome`; `AGAIN` says how a command that was interrupted is resumed. Its docstring ends
# with the examples of the command's help.
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
        "eval": "measure acceptance, speed-up and losslessness",
        "doctor": "find out why acceptance is low",
    },
    "publish": {
        "check": "check that vLLM, SGLang and transformers can read a drafter",
        "convert": "convert a drafter to another layout, or to GGUF",
        "publish": "upload a drafter with its model card to the Hub",
    },
    "serve": {"serve": "start an OpenAI-compatible server: transformers, vLLM, SGLang or llama.cpp"},
    "tools": {
        "find": "list the drafters of a target on the Hub",
        "recipes": "list, show or copy training recipes",
        "smollm2": "print the local folder of SmolLM2-135M-Instruct",
        "env": "print versions and devices, for a bug report",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments after the program's name. Default: the process's.

    Returns:
        `int`: The exit status, see above. Raises `SystemExit`: 2 if the arguments are invalid, 0 after help.
    """
    terminal.open_missing_streams()
    with _interrupts(exits=argv is None) as interrupted:
        name, again, debug = "", "run the same command again", os.environ.get("DFLASH_DEBUG", "0") not in ("", "0")
        try:
            argv = sys.argv[1:] if argv is None else list(argv)
            name = next((word for word in argv if not word.startswith("-")), "")
            arguments = _parsed(name, argv)
            debug |= arguments.debug
            module = _module(name)
            again = getattr(module, "AGAIN", again)
            terminal.set_verbosity(arguments.quiet, arguments.verbose)
            _resolve_names(arguments)
            outcome = module.run(arguments, terminal.Echo(to_stderr=arguments.json))
            if arguments.json:
                print(terminal.json_text({"exit": outcome.code, **outcome.facts}))
            sys.stdout.flush()
            return outcome.code
        except BrokenPipeError:
            terminal.stop_printing()
            return 141
        except (Exception, KeyboardInterrupt) as error:  # every error becomes one line
            if debug:
                traceback.print_exc()
            # Libraries turn a Ctrl-C during their import into their own errors.
            if interrupted or isinstance(error, KeyboardInterrupt):
                eval("None")  # clears a Ctrl-C during an `exec`, as in a dataclass; else Python exits by the signal
                terminal.end_progress_bars()
                print(f"\ndflash {name}: interrupted; {terminal.one_line(again)}.", file=sys.stderr)
                return 130
            from dflash_hf.failures import explain

            terminal.end_progress_bars()
            print(f"dflash {name}: error: {explain(error, again)}", file=sys.stderr)
            return 2 if isinstance(error, terminal.UsageError) else 1


def build_parser(chosen: str) -> tuple[Parser, Parser | None]:
    """The parser, and the parser of one command with its arguments; other commands are not imported."""
    from dflash_hf import __version__

    lines = ["Train, publish and run DFlash drafters."]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:12}{summary}" for name, summary in commands.items())]
    parser = Parser(prog="dflash", usage="dflash COMMAND [options]", formatter_class=Formatter, add_help=False)
    parser.description, parser.epilog = "\n".join(lines), COMMON
    options = parser.add_argument_group("options")
    options.add_argument("-h", "--help", action="help", help="show this help; `dflash COMMAND --help` has examples")
    options.add_argument("--version", action="version", version=f"dflash-hf {__version__}", help="show the version")
    # Listed above, in groups.
    found = parser.add_subparsers(
        dest="command", metavar="COMMAND", prog="dflash", parser_class=Parser, help=argparse.SUPPRESS
    )
    for name, summary in COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        command = found.add_parser(name, description=description, formatter_class=Formatter, add_help=False)
        if name == chosen:
            add_examples(command, _module(name))
            _module(name).add_arguments(command)
            command.shorten_usage()
        add_common(command)
    return parser, found.choices.get(chosen)


def _parsed(name: str, argv: list[str]):
    """Parse the arguments; for an unknown option, suggest a similar one."""
    parser, command = build_parser(name)
    if not argv:
        print(parser.format_help(), end="", file=sys.stderr)
        raise SystemExit(2)
    arguments, unknown = parser.parse_known_args(argv)
    hint = ""
    if hasattr(arguments, "overrides"):  # argparse only takes those up to the next option
        arguments.overrides += [word for word in unknown if "=" in word and not word.startswith("-")]
        unknown = [word for word in unknown if word not in arguments.overrides]
        if unknown:
            key, _, value = unknown[0].lstrip("-").partition("=")
            value = value or (unknown[1] if len(unknown) > 1 else "VALUE")
            hint = f"; write settings of the recipe as {key.replace('-', '_')}={value}"
    if unknown and command is not None:
        import difflib

        options = [option for action in command._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, 1, cutoff=0.7)
        meant = f"; did you mean {near[0]}?" if near else hint
        command.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    return arguments


def _module(name: str):
    return importlib.import_module(f"dflash_hf.commands.{name}")


def _resolve_names(arguments) -> None:
    """Resolve `~`, which shells leave in `--target=~/model`, and `smollm2`, the name of the pair that needs no Hub."""
    for name in ("target", "draft", "base", "gguf", "data", "tokenizer", "draft_config", "folder"):
        if isinstance(given := getattr(arguments, name, None), str):
            setattr(arguments, name, os.path.expanduser(given))
    check_files("data", getattr(arguments, "data", None))
    arguments.target_name = "smollm2" if getattr(arguments, "target", None) == "smollm2" else None
    for name in ("target", "draft", "base", "gguf"):
        if getattr(arguments, name, None) == "smollm2":
            from dflash_hf.smollm2 import folder_of

            setattr(arguments, name, folder_of("smollm2", drafter=name == "draft"))


@contextmanager
def _interrupts(exits: bool) -> Iterator[list[int]]:
    """
    A list that is non-empty once Ctrl-C was pressed, which libraries may turn into another exception. If the process
    `exits` afterwards, another Ctrl-C ends it immediately: at its exit, Python would print a traceback.
    """
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield pressed
        return
    again, hook = threading.Timer(0.05, _thread.interrupt_main), sys.unraisablehook

    def press(number, frame):
        pressed.append(number)
        raise KeyboardInterrupt

    def swallowed(unraisable):  # by a destructor or a callback, where Python drops exceptions
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
        signal.signal(signal.SIGINT, signal.SIG_DFL if exits and pressed else before)


if __name__ == "__main__":  # for `accelerate launch -m dflash_hf.cli train`
    sys.exit(main())
