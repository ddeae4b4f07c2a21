"""
`dflash check`: report which engines can load a drafter, and load it correctly.

    dflash check my-drafter --target Qwen/Qwen3-0.6B
    dflash check z-lab/Qwen3-8B-DFlash-b16 --engine vllm
    dflash check my-drafter --engine vllm==0.26.0
    dflash check my-drafter --engine llama.cpp --target target.gguf

The exit status is 1 if an engine given by --engine cannot read the drafter; without --engine, if transformers or all
servers cannot.
"""

from argparse import ArgumentTypeError

from dflash_hf._io.names import ENGINES, LLAMA_CPP, SERVERS
from dflash_hf._io.terminal import Outcome
from dflash_hf.commands.shared import add_revision


def add_arguments(parser) -> None:
    parser.add_argument("draft", metavar="DRAFT", help="a drafter: folder, .gguf file or Hub name")
    choices = ", ".join((*ENGINES, LLAMA_CPP))
    engines = f"{choices}, or one with a version: vllm==0.26.0; repeatable (default: {', '.join(ENGINES)})"
    parser.add_argument("--engine", type=_engine, metavar="ENGINE", action="append", help=engines)
    parser.add_argument("--target", help="folder, config.json, .gguf file or Hub name of the target, to compare with")
    add_revision(parser, repository="the drafter's repository")


def _engine(text: str) -> str:
    """An engine's name, with or without a version, which [`~dflash_hf.hub.engines.split_engine`] checks."""
    name = text.partition("==")[0]
    if name not in (*ENGINES, LLAMA_CPP):
        raise ArgumentTypeError(f"{text!r} is not an engine; use {', '.join((*ENGINES, LLAMA_CPP))}")
    return text


def run(arguments, echo) -> Outcome:
    """
    `echo` the table of findings, the versions that were checked, and the engines that can read the drafter. The exit
    status is 1 if an engine given by `--engine` cannot read it; without `--engine`, if transformers or all servers
    cannot.
    """
    from dflash_hf._io.repositories import is_gguf
    from dflash_hf.hub.check import check
    from dflash_hf.hub.engines import engine_versions, split_engine
    from dflash_hf.hub.findings import can_read_by_engine, render

    is_file = is_gguf(arguments.draft)
    engines = arguments.engine or ([LLAMA_CPP] if is_file else ENGINES)
    findings = check(arguments.draft, engines, arguments.target, arguments.revision)
    echo(render(findings))
    versions = engine_versions(engines)
    for version in versions:
        if version.warning is not None:
            echo.note(f"warning: {version.warning}")
    if versions:
        echo(f"Checked for {', '.join(map(str, versions))}.")
    names = list(dict.fromkeys(split_engine(engine)[0] for engine in engines))
    can_read = can_read_by_engine(findings, names)
    able = [name for name in names if can_read[name]]
    unable = [name for name in names if can_read[name] is False]
    not_known = [name for name in names if can_read[name] is None]
    if able:
        echo(f"This {'file' if is_file else 'folder'} is read by {', '.join(able)}.")
    if unable and not able and not not_known:
        echo(f"No engine reads it: not {', '.join(unable)}.")
    elif unable:
        echo(f"It is not read by {', '.join(unable)}.")
    if not_known:
        echo(f"Whether it is read by {', '.join(not_known)} is not known.")
    failed = bool(unable)
    if arguments.engine is None and not is_file:
        servers_fail = not any(can_read[engine] for engine in SERVERS)
        failed = servers_fail or not can_read["transformers"]
    facts = {
        "findings": [vars(finding) for finding in findings],
        "read_by": can_read,
        "versions": {version.engine: version.version for version in versions},
    }
    return Outcome(int(failed), facts)
