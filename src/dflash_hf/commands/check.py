"""
`dflash check`.

    dflash check my-drafter --target Qwen/Qwen3-0.6B
    dflash check z-lab/Qwen3-8B-DFlash-b16 --engine vllm
    dflash check my-drafter --engine llama.cpp --target target.gguf
"""

from dflash_hf.commands.shared import add_revision
from dflash_hf.names import ENGINES, LLAMA_CPP
from dflash_hf.terminal import Outcome


def add_arguments(parser) -> None:
    parser.add_argument("draft", metavar="DRAFT", help="a drafter: folder, .gguf file or Hub name")
    choices = (*ENGINES, LLAMA_CPP)
    known = f"{', '.join(choices)}; repeatable (default: {', '.join(ENGINES)})"
    parser.add_argument("--engine", choices=choices, metavar="ENGINE", action="append", help=known)
    parser.add_argument("--target", help="folder, config.json, .gguf file or Hub name of the target, to compare with")
    add_revision(parser, of="the drafter's repository")


def run(arguments, echo) -> Outcome:
    """`echo` the table; exit status 1 if there is an error, else 0."""
    from dflash_hf.hub.check import check, render
    from dflash_hf.repositories import is_gguf

    engines = arguments.engine or ([LLAMA_CPP] if is_gguf(arguments.draft) else ENGINES)
    findings = check(arguments.draft, engines, arguments.target, arguments.revision)
    echo(render(findings))
    code = int(any(finding.severity == "error" for finding in findings))
    return Outcome(code, {"findings": [vars(finding) for finding in findings]})
