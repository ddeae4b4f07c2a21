"""`dflash serve`: a pair behind the API that tools already speak."""

from dflash_hf.commands.pair import NamedPair
from dflash_hf.commands.shared import add_draft_temperature, add_examples, add_loading, add_speed
from dflash_hf.names import ENGINES, LLAMA_CPP
from dflash_hf.terminal import (
    Outcome,
    UsageError,
    add_template_arguments,
    install,
    port,
    positive,
    template_arguments,
)


AGAIN = "what was asked before has been answered; the same command serves again"


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--draft", help="folder or Hub name of its drafter; without it the target decodes alone")
    parser.add_argument("--engine", choices=(*ENGINES, LLAMA_CPP), default="transformers", help="default: %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: %(default)s, this machine")
    parser.add_argument("--port", type=port, default=8000, help="0 takes a free one; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="print the command of another engine, and end")
    parser.add_argument("--threads", type=positive, help="CPU threads of this process; default: as torch chooses")
    add_draft_temperature(parser)
    add_template_arguments(parser)
    add_loading(parser)
    add_speed(parser)
    add_examples(
        parser,
        "dflash serve --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16",
        "dflash serve --target Qwen/Qwen3-8B --draft my-drafter --engine vllm --dry-run",
        "dflash serve --target target.gguf --draft dflash-my-drafter.gguf --engine llama.cpp",
    )


def run(arguments, echo) -> Outcome:
    if arguments.engine != "transformers":
        return _engine(arguments, echo)
    if arguments.dry_run:
        raise UsageError("--dry-run prints the command of another engine; add --engine vllm or --engine sglang.")
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError(f"Serving needs packages that are not installed: {install('serving')}.")
    from safetensors import SafetensorError

    from dflash_hf.pairs import damaged
    from dflash_hf.serving.server import DraftedServe, bound

    pair = NamedPair(arguments, echo.note)
    loading, at = pair.loading, bound(arguments.host, arguments.port)
    draft = pair.draft()
    try:
        DraftedServe(
            f"{arguments.target}@{loading.revision}" if loading.revision else arguments.target,
            draft,
            say=echo.note,
            at=at,
            packed=arguments.packed,
            template=pair.template(),
            device=pair.device,
            dtype=loading.dtype,
            trust_remote_code=loading.trust_remote_code,
            log_level="info" if arguments.verbose else "error",
        )
    except SafetensorError as error:  # upstream loads the target
        raise ValueError(damaged(f"--target {arguments.target}", error)) from error
    return Outcome()


def _engine(arguments, echo) -> Outcome:
    """Check the drafter's folder, then become the engine's own process."""
    import os
    import shlex
    import sys

    from dflash_hf.data.prompts import template_kwargs
    from dflash_hf.hub.check import check, render
    from dflash_hf.hub.launch import launch_command
    from dflash_hf.pairs import Loading

    engine = arguments.engine
    if arguments.draft is None:
        raise UsageError(f"--engine {engine} needs --draft; without a drafter, run {engine} itself.")
    names = ("compile", "tree_nodes", "draft_temperature", "packed", "device", "threads")
    ours = [name for name in names if getattr(arguments, name)]
    if ours:
        raise UsageError(f"--{ours[0].replace('_', '-')} is for --engine transformers; leave it out for {engine}.")
    if engine == LLAMA_CPP:
        of_pair, target = _llama_cpp_pair(arguments)
        template = template_kwargs(template_arguments(arguments.template_args), draft_config=of_pair[2], say=echo.note)
        loading = Loading.of(arguments)
    else:
        pair = NamedPair(arguments, echo.note)
        target, loading = pair.config.get("text_config", pair.config), pair.loading
        of_pair, template = (arguments.target, arguments.draft, pair.draft_config), pair.template()
    findings = check(of_pair[1], [engine], target, loading.draft_revision)
    echo.note(render(findings))
    if any(finding.severity == "error" for finding in findings):
        return Outcome(1, {"findings": [vars(finding) for finding in findings]})
    environment, command = launch_command(engine, *of_pair, loading, template)
    command += ["--host", arguments.host, "--port", str(arguments.port)]
    line = " ".join([*(f"{name}={value}" for name, value in environment.items()), shlex.join(command)])
    echo(line)
    if arguments.dry_run:
        return Outcome(facts={"command": line})
    # The engine of this environment, whether or not that is activated.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    try:
        os.execvpe(command[0], command, {**os.environ, **environment, "PATH": path})
    except FileNotFoundError as error:
        how = (
            "`brew install llama.cpp`, or its releases" if engine == LLAMA_CPP else f"`pip install {engine}`, on a GPU"
        )
        raise FileNotFoundError(f"--engine {engine} is not installed here ({command[0]}): {how}.") from error


def _llama_cpp_pair(arguments) -> tuple[tuple[str, str, object], dict | None]:
    """Target, drafter and its configuration, and what the target's file says, where that is on this machine."""
    from pathlib import Path

    from dflash_hf.gguf_format import gguf_config, gguf_in, is_gguf, target_config
    from dflash_hf.modeling.configuration_dflash import DFlashDraftConfig
    from dflash_hf.pairs import Loading, draft_config_of

    loading, default = Loading.of(arguments), Loading()
    unread = [name for name, value in vars(loading).items() if value != getattr(default, name)]
    if unread:
        raise UsageError(
            f"--{unread[0].replace('_', '-')} is not for llama.cpp, which reads GGUF files; leave it out."
        )
    if Path(arguments.target).expanduser().is_dir():
        raise UsageError(
            f"--target {arguments.target} is a folder; llama.cpp runs the target's .gguf file: name that."
        )
    draft, folder = arguments.draft, Path(arguments.draft).expanduser()
    if folder.is_dir():
        file = gguf_in(folder)
        if file is None:
            raise FileNotFoundError(
                f"--draft {draft} holds no dflash-*.gguf: `dflash convert {draft} {draft}/dflash-drafter.gguf "
                f"--to gguf --target {arguments.target}` writes one."
            )
        draft = str(file)
    config = DFlashDraftConfig.from_dict(gguf_config(draft)) if is_gguf(draft) else draft_config_of(draft, loading)
    target = target_config(arguments.target) if is_gguf(arguments.target) else None
    return (arguments.target, draft, config), target
