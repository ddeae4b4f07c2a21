"""`dflash check`."""

from dflash_hf.commands.shared import add_examples, add_revision
from dflash_hf.names import ENGINES, LLAMA_CPP, READERS
from dflash_hf.terminal import Outcome


def add_arguments(parser) -> None:
    parser.add_argument(
        "folder", help="folder of a drafter, or its Hub name, of which no weights are downloaded; or a .gguf file"
    )
    choices = (*ENGINES, LLAMA_CPP, *READERS)
    default = ", ".join(ENGINES)
    parser.add_argument(
        "--engine", "--for", choices=choices, action="append", help=f"may be repeated; default: {default}"
    )
    parser.add_argument("--target", help="folder, config.json, .gguf file or Hub name of the target, to compare with")
    parser.add_argument("--weights", action="store_true", help="read every tensor too: are all numbers finite?")
    add_revision(parser, of="the drafter's repository")
    parser.add_argument("--subfolder", default="", help="where in the folder or repository the drafter lies")
    add_examples(
        parser,
        "dflash check my-drafter --target Qwen/Qwen3-0.6B --weights",
        "dflash check z-lab/Qwen3-8B-DFlash-b16 --engine vllm",
        "dflash check my-drafter --for llama.cpp --target target.gguf",
    )


def run(arguments, echo) -> Outcome:
    """`echo` the table; 1 when there is an error, else 0."""
    from pathlib import Path

    from dflash_hf.configs import read_config
    from dflash_hf.hub.check import check, render
    from dflash_hf.repositories import looks_local

    file = arguments.folder.endswith(".gguf")
    if looks_local(arguments.folder) and not file and not Path(arguments.folder).expanduser().is_dir():
        raise FileNotFoundError(f"{arguments.folder}: there is no such folder.")
    target = arguments.target
    if target is not None and not Path(target).expanduser().is_file():
        config = read_config(target, f"--target {target}")
        target = config.get("text_config", config)
    findings = check(
        arguments.folder,
        arguments.engine or ([LLAMA_CPP] if file else ENGINES),
        target,
        arguments.revision,
        arguments.subfolder,
        arguments.weights,
    )
    echo(render(findings))
    code = int(any(finding.severity == "error" for finding in findings))
    return Outcome(code, {"findings": [vars(finding) for finding in findings]})
