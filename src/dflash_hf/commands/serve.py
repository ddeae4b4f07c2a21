"""`dflash serve`: a pair behind the API that tools already speak."""

import argparse

from dflash_hf.commands.shared import add_draft_temperature, add_examples, add_loading, add_speed
from dflash_hf.terminal import Outcome, UsageError, add_template_arguments, install, positive, template_arguments


AGAIN = "what was asked before has been answered; the same command serves again"
ENGINES = ("transformers", "vllm", "sglang", "llama.cpp")


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--draft", help="folder or Hub name of its drafter; without it the target decodes alone")
    parser.add_argument("--engine", choices=ENGINES, default="transformers", help="default: %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: %(default)s, this machine")
    parser.add_argument("--port", type=_port, default=8000, help="0 takes a free one; default: %(default)s")
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

    from dflash_hf.pairs import Loading, check_pair, damaged, device_of, drafter_of

    if not is_serve_available():
        raise ImportError(f"Serving needs packages that are not installed: {install('serving')}.")
    import torch
    from safetensors import SafetensorError

    from dflash_hf.data.prompts import template_kwargs
    from dflash_hf.serving.server import DraftedServe, bound

    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    loading = Loading.of(arguments)
    check_pair(arguments.target, arguments.draft, loading)
    at = bound(arguments.host, arguments.port)
    device = device_of(loading.device)
    draft = drafter_of(arguments, loading, device)
    given = template_arguments(arguments.template_args)
    try:
        DraftedServe(
            f"{arguments.target}@{loading.revision}" if loading.revision else arguments.target,
            draft,
            say=echo.note,
            at=at,
            packed=arguments.packed,
            template=template_kwargs(given, draft_config=draft and draft.config, say=echo.note),
            device=device,
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
    from dflash_hf.pairs import Loading, check_pair

    engine, loading = arguments.engine, Loading.of(arguments)
    if arguments.draft is None:
        raise UsageError(f"--engine {engine} needs --draft; without a drafter, run {engine} itself.")
    names = ("compile", "tree_nodes", "draft_temperature", "packed", "device", "threads")
    ours = [name for name in names if getattr(arguments, name)]
    if ours:
        raise UsageError(f"--{ours[0].replace('_', '-')} is for --engine transformers; leave it out for {engine}.")
    draft = arguments.draft
    if engine == "llama.cpp":
        draft, target = _llama_cpp_pair(arguments, loading)
    else:
        target = check_pair(arguments.target, draft, loading)
        target = target.get("text_config", target)
    findings = check(draft, [engine], target, loading.draft_revision)
    echo.note(render(findings))
    if any(finding.severity == "error" for finding in findings):
        return Outcome(1, {"findings": [vars(finding) for finding in findings]})
    config = _config_of(draft, loading)
    template = template_kwargs(template_arguments(arguments.template_args), draft_config=config, say=echo.note)
    environment, command = launch_command(engine, arguments.target, draft, config, loading, template)
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
            "`brew install llama.cpp`, or its releases"
            if engine == "llama.cpp"
            else f"`pip install {engine}`, on a GPU"
        )
        raise FileNotFoundError(f"--engine {engine} is not installed here ({command[0]}): {how}.") from error


def _llama_cpp_pair(arguments, loading) -> tuple[str, dict | None]:
    """The drafter's GGUF file, or its repository, and what the target's file says, where that is on this machine."""
    from pathlib import Path

    from dflash_hf.gguf_format import gguf_in, is_gguf, target_config

    default = type(loading)()
    unread = [name for name, value in vars(loading).items() if value != getattr(default, name)]
    if unread:
        raise UsageError(
            f"--{unread[0].replace('_', '-')} is not for llama.cpp, which reads GGUF files; leave it out."
        )
    if Path(arguments.target).expanduser().is_dir():
        raise UsageError(
            f"--target {arguments.target} is a folder; llama.cpp runs the target's .gguf file: name that."
        )
    draft = Path(arguments.draft).expanduser()
    if draft.is_dir():
        file = gguf_in(draft)
        if file is None:
            raise FileNotFoundError(
                f"--draft {arguments.draft} holds no dflash-*.gguf: `dflash convert {arguments.draft} "
                f"{arguments.draft}/dflash-drafter.gguf --to gguf --target {arguments.target}` writes one."
            )
        return str(file), target_config(arguments.target) if is_gguf(arguments.target) else None
    return arguments.draft, target_config(arguments.target) if is_gguf(arguments.target) else None


def _config_of(draft: str, loading):
    from dflash_hf.gguf_format import gguf_config, is_gguf
    from dflash_hf.modeling.configuration_dflash import DFlashDraftConfig
    from dflash_hf.pairs import draft_config_of

    return DFlashDraftConfig.from_dict(gguf_config(draft)) if is_gguf(draft) else draft_config_of(draft, loading)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{value} is no port: 0 to 65535")
    return value
