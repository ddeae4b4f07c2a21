"""`dflash completion`: a script for the shell, made from the parsers themselves, so that it cannot grow stale."""

import argparse

from dflash_hf.commands.shared import Parser, add_examples
from dflash_hf.terminal import Outcome


_BASH = """\
# dflash: completion for {shell}. Written by `dflash completion {shell}`.
{prelude}_dflash() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
        *) if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "$words" -- "$word"))
           else COMPREPLY=($(compgen -f -- "$word") $(compgen -W "$words" -- "$word")); fi ;;
    esac
}}
complete -o filenames -F _dflash dflash
"""


def add_arguments(parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="for which shell")
    add_examples(
        parser,
        'eval "$(dflash completion bash)"        # in ~/.bashrc; zsh likewise, in ~/.zshrc',
        "dflash completion fish > ~/.config/fish/completions/dflash.fish",
    )
    parser.set_defaults(parser=parser)


def run(arguments, echo) -> Outcome:
    text = script(arguments.shell, arguments.all_commands())
    echo(text.rstrip("\n"))
    return Outcome(facts={"shell": arguments.shell, "script": text})


def script(shell: str, parsers: dict[str, Parser]) -> str:
    """The script for a shell, of all commands with their parsers."""
    words = {name: _words(parser) for name, parser in parsers.items()}
    if shell == "fish":
        lines = ["complete -c dflash -n __fish_use_subcommand -f"]
        lines += [
            f"complete -c dflash -n __fish_use_subcommand -a {name} -d {_quoted(parser.description or '')}"
            for name, parser in parsers.items()
        ]
        for name, listed in words.items():
            seen = f'"__fish_seen_subcommand_from {name}"'
            lines += [f"complete -c dflash -n {seen} -l {word[2:]}" for word in listed if word.startswith("--")]
            lines += [f"complete -c dflash -n {seen} -a {word}" for word in listed if not word.startswith("-")]
        return "\n".join(lines) + "\n"
    cases = "\n".join(f'            {name}) words="{" ".join(listed)}" ;;' for name, listed in words.items())
    prelude = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return _BASH.format(shell=shell, prelude=prelude, commands=" ".join(words), cases=cases)


def _words(parser: Parser) -> list[str]:
    words: list[str] = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        words += [word for word in action.option_strings if word.startswith("--")]
        if not action.option_strings and action.choices:
            words += map(str, action.choices)
    return words


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
