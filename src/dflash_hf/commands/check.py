"""
`dflash check`.

    dflash check my-drafter --target Qwen/Qwen3-0.6B
    dflash check z-lab/Qwen3-8B-DFlash-b16 --engine vllm
    dflash check my-drafter --engine llama.cpp --target target.gguf

The exit status is 1 if an engine of --engine cannot read it; without --engine, if transformers or all servers cannot.
"""

from dflash_hf.commands.shared import add_revision
from dflash_hf.names import ENGINES, LLAMA_CPP, SERVERS
from dflash_hf.terminal import Outcome


def add_arguments(parser) -> None:
    parser.add_argument("draft", metavar="DRAFT", help="a drafter: folder, .gguf file or Hub name")
    choices = (*ENGINES, LLAMA_CPP)
    engines = f"{', '.join(choices)}; repeatable (default: {', '.join(ENGINES)})"
    parser.add_argument("--engine", choices=choices, metavar="ENGINE", action="append", help=engines)
    parser.add_argument("--target", help="folder, config.json, .gguf file or Hub name of the target, to compare with")
    add_revision(parser, of="the drafter's repository")


def run(arguments, echo) -> Outcome:
    """
    `echo` the table and who can read the drafter. The exit status is 1 if an engine that was asked for cannot; if none
    was, only if transformers or all of the servers cannot.
    """
    from dflash_hf.hub.check import check, readers, render
    from dflash_hf.repositories import is_gguf

    is_file = is_gguf(arguments.draft)
    engines = arguments.engine or ([LLAMA_CPP] if is_file else ENGINES)
    findings = check(arguments.draft, engines, arguments.target, arguments.revision)
    echo(render(findings))
    can_read = readers(findings, engines)
    able = [engine for engine in engines if can_read[engine]]
    unable = [engine for engine in engines if not can_read[engine]]
    if able:
        echo(f"This {'file' if is_file else 'folder'} is read by {', '.join(able)}.")
    if unable:
        echo(f"It is not read by {', '.join(unable)}." if able else f"No engine reads it: not {', '.join(unable)}.")
    failed = bool(unable)
    if arguments.engine is None and not is_file:
        servers_fail = not any(can_read[engine] for engine in SERVERS)
        failed = servers_fail or not can_read["transformers"]
    return Outcome(int(failed), {"findings": [vars(finding) for finding in findings], "read_by": can_read})
