"""
`dflash serve`: serve a target and its drafter with an OpenAI-compatible API.

    dflash serve
    dflash serve --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16
    dflash serve --target Qwen/Qwen3-8B --draft my-drafter --engine vllm --dry-run
    dflash serve --target target.gguf --draft dflash-my-drafter.gguf --engine llama.cpp
"""

from typing import Any, NamedTuple

from dflash_hf._io.argument_types import port, template_arguments
from dflash_hf._io.errors import UsageError, install_hint
from dflash_hf._io.names import ENGINES, LLAMA_CPP
from dflash_hf._io.terminal import Outcome, note
from dflash_hf.commands import shared
from dflash_hf.commands.pair import NamedPair, take_default


RESUME_HINT = "the same command starts the server again"
# The environment variables that engines read the API key from. SGLang reads none: `_SGLANG_WITH_KEY` passes it on.
_API_KEY_VARIABLES = {"vllm": "VLLM_API_KEY", "sglang": "DFLASH_API_KEY", LLAMA_CPP: "LLAMA_API_KEY"}
_SGLANG_WITH_KEY = (
    "import os, runpy, sys; sys.argv += ['--api-key', os.environ['DFLASH_API_KEY']]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)


def add_arguments(parser) -> None:
    shared.add_pair(parser, default=True)
    shared.add_choice(parser, "--engine", (*ENGINES, LLAMA_CPP), "transformers")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind to (default: %(default)s)")
    free = "0: any free one, without --engine (default: %(default)s)"
    parser.add_argument("--port", type=port, default=8000, help=free)
    parser.add_argument("--served-model-name", metavar="NAME", help="the model's id in the API (default: --target)")
    parser.add_argument("--api-key", metavar="KEY", help="require this key (default: the variable DFLASH_API_KEY)")
    parser.add_argument("--enable-cors", action="store_true", help="let web pages of any origin call the server")
    parser.add_argument("--dry-run", action="store_true", help="print the command of another engine and exit")
    shared.add_threads(parser)
    shared.add_template_arguments(parser)
    shared.add_loading(parser, trusted="the target's own code; vllm and sglang then also run the drafter's")
    shared.add_speed(parser)


def run(arguments, echo) -> Outcome:
    """Serve in this process until it is stopped; or become the server of another engine."""
    import os

    take_default(arguments)
    arguments.api_key = arguments.api_key or os.environ.get("DFLASH_API_KEY") or None
    if arguments.api_key is None and not _is_loopback(arguments.host):
        echo.note(
            f"warning: --host {arguments.host} lets other machines use the server without a key; "
            "set DFLASH_API_KEY or --api-key."
        )
    if arguments.engine == "transformers":
        return _serve(arguments, echo)
    return _run_engine(arguments, echo)


def _serve(arguments, echo) -> Outcome:
    """Serve in this process."""
    import logging

    from transformers.utils.import_utils import is_serve_available

    if arguments.dry_run:
        raise UsageError("--dry-run prints the command of another engine; add --engine vllm or --engine sglang.")
    if not is_serve_available():
        raise ImportError(f"Serving needs packages that are not installed: {install_hint('serving')}.")
    from transformers import AutoProcessor

    from dflash_hf.serving.server import Server, listen

    pair = NamedPair(arguments)
    _ = pair.tokenizer  # raises if there is none: transformers would read with an empty one
    options = {"revision": pair.loading.revision or "main", "trust_remote_code": pair.loading.trust_remote_code}
    processor = AutoProcessor.from_pretrained(arguments.target, **options)
    listener = listen(arguments.host, arguments.port)  # before the models are loaded: the port may be taken
    target, draft = pair.ready()
    if not arguments.verbose:
        logging.getLogger("transformers.cli.serving").setLevel("ERROR")  # upstream logs each request as a warning
    name = arguments.served_model_name or arguments.target_name or arguments.target
    server = Server(target, processor, draft, name, echo.note, pair.template())
    app = server.app(arguments.api_key, arguments.enable_cors)
    server.run(listener, app, "info" if arguments.verbose else "warning")
    return Outcome()


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _absolute(name: str) -> str:
    """The absolute path of a folder, so that a printed command runs anywhere; other names are unchanged."""
    import os

    return os.path.abspath(name) if os.path.isdir(name) else name


class _EnginePair(NamedTuple):
    """
    A pair as an engine loads it.

    Args:
        target (`str`), draft (`str`): Folders, files or names on the Hub.
        target_config (`dict`, *optional*): The configuration of the target's text model; `None` if it is unknown.
        draft_config (`DFlashDraftConfig`): The drafter's configuration.
        loading (`Loading`): Dtypes, revisions, and whether the models' own code may run.
        template (`dict`): Arguments of the chat template.
    """

    target: str
    draft: str
    target_config: Any
    draft_config: Any
    loading: Any
    template: dict


def _run_engine(arguments, echo) -> Outcome:
    """Check the drafter, then replace this process with the engine."""
    import shlex

    from dflash_hf.hub.launch import launch_command

    # 1. The options and the pair.
    engine = arguments.engine
    _check_engine_options(arguments)
    pair = _llama_cpp_pair(arguments) if engine == LLAMA_CPP else _hub_pair(arguments)
    # 2. Can the engine read the drafter?
    findings = _check_drafter(engine, pair, echo)
    if any(finding.severity == "error" for finding in findings):
        return Outcome(1, {"findings": [vars(finding) for finding in findings]})
    if pair.loading.trust_remote_code:
        echo.note(f"warning: {engine} has one --trust-remote-code for both models: it also runs the drafter's code.")
    # 3. The command, printed without the key.
    environment, command = launch_command(
        engine, pair.target, pair.draft, pair.draft_config, pair.loading, pair.template
    )
    command += ["--host", arguments.host, "--port", str(arguments.port)]
    name = arguments.served_model_name or arguments.target_name
    if name:
        command += ["--alias" if engine == LLAMA_CPP else "--served-model-name", name]
    assignments = [f"{variable}={value}" for variable, value in environment.items()]
    key_option = ["--api-key", "***"] if arguments.api_key else []
    line = " ".join([*assignments, shlex.join([*command, *key_option])])
    echo(line)
    if arguments.dry_run:
        return Outcome(facts={"command": line})
    # 4. The engine.
    if arguments.api_key:  # every user of the machine can read the arguments of a process
        environment[_API_KEY_VARIABLES[engine]] = arguments.api_key
        if engine == "sglang":  # reads no variable
            command = [command[0], "-c", _SGLANG_WITH_KEY, *command[3:]]
    _replace_process(engine, command, environment)
    return Outcome()


def _check_engine_options(arguments) -> None:
    """
    Raises:
        `UsageError`: there is no drafter, or an option is for transformers only.
    """
    engine = arguments.engine
    if arguments.draft is None:
        raise UsageError(f"--engine {engine} needs --draft; without a drafter, run {engine} itself.")
    names = ("compile", "cuda_graphs", "tree_nodes", "packed", "device", "threads", "enable_cors")
    unread = shared.options_given(arguments, names)
    if unread:
        raise UsageError(f"{unread[0]} is for --engine transformers; leave it out for {engine}.")
    if arguments.port == 0:
        raise UsageError(f"--port 0 is for --engine transformers, which chooses a free port; name one for {engine}.")


def _check_drafter(engine: str, pair: _EnginePair, echo) -> list:
    """The findings of a check for the engine, which are printed with the version that was checked."""
    from dflash_hf.hub.check import check
    from dflash_hf.hub.engines import engine_versions
    from dflash_hf.hub.findings import render

    findings = check(pair.draft, [engine], pair.target_config, pair.loading.draft_revision)
    echo.note(render(findings))
    for version in engine_versions([engine]):
        echo.note(f"Checked for {version}.")
        if version.warning is not None:
            echo.note(f"warning: {version.warning}")
    return findings


def _replace_process(engine: str, command: list[str], environment: dict[str, str]) -> None:
    """
    Replace this process with an engine's server.

    Raises:
        `FileNotFoundError`: the engine is not installed.
    """
    import os
    import sys

    # The engine installed in this environment, whether or not it is activated.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    try:
        os.execvpe(command[0], command, {**os.environ, **environment, "PATH": path})
    except FileNotFoundError as error:
        how = "`brew install llama.cpp`, or a release" if engine == LLAMA_CPP else f"`pip install {engine}`, on a GPU"
        raise FileNotFoundError(f"--engine {engine} is not installed ({command[0]}): {how}.") from error


def _hub_pair(arguments) -> _EnginePair:
    """The pair of an engine that reads folders and names on the Hub."""
    from dflash_hf.targets.config_fields import text_part

    pair = NamedPair(arguments)
    return _EnginePair(
        target=_absolute(arguments.target),
        draft=_absolute(arguments.draft),
        target_config=text_part(pair.config),
        draft_config=pair.draft_config,
        loading=pair.loading,
        template=pair.template(),
    )


def _llama_cpp_pair(arguments) -> _EnginePair:
    """
    The pair of llama.cpp, which reads GGUF files.

    Raises:
        `UsageError`: options or a target that llama.cpp does not read.
        `FileNotFoundError`: the folder of the drafter has no GGUF file.
    """
    from pathlib import Path

    from dflash_hf._io.repositories import is_gguf
    from dflash_hf.conversion.gguf_names import gguf_in
    from dflash_hf.conversion.gguf_read import gguf_config, target_config
    from dflash_hf.data.prompts import template_kwargs
    from dflash_hf.layouts.configuration import DFlashDraftConfig
    from dflash_hf.pairs.loading import Loading, load_draft_config

    unread = shared.options_given(arguments, Loading.__dataclass_fields__)
    if unread:
        raise UsageError(f"{unread[0]} is not for llama.cpp, which reads GGUF files; leave it out.")
    if Path(arguments.target).is_dir():
        raise UsageError(
            f"--target {arguments.target} is a folder, but llama.cpp runs .gguf files; name the target's .gguf file."
        )
    draft = arguments.draft
    folder = Path(draft)
    if folder.is_dir():
        file = gguf_in(folder)
        if file is None:
            raise FileNotFoundError(
                f"--draft {draft} holds no dflash-*.gguf: `dflash convert {draft} {draft}/dflash-drafter.gguf "
                f"--to gguf --target {arguments.target}` writes one."
            )
        draft = str(file)
    loading = Loading()
    if is_gguf(draft):
        draft_config = DFlashDraftConfig.from_dict(gguf_config(draft))
    else:
        draft_config = load_draft_config(draft, loading)
    return _EnginePair(
        target=arguments.target,
        draft=draft,
        target_config=target_config(arguments.target) if is_gguf(arguments.target) else None,
        draft_config=draft_config,
        loading=loading,
        template=template_kwargs(template_arguments(arguments.template_args), draft_config=draft_config, say=note),
    )
