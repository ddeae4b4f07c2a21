"""`dflash serve`: a pair behind the API that tools already speak."""

from dflash_hf.commands.pair import NamedPair
from dflash_hf.commands.shared import add_draft_temperature, add_examples, add_loading, add_speed
from dflash_hf.names import ENGINES
from dflash_hf.terminal import Outcome, UsageError, add_template_arguments, install, port, positive


AGAIN = "what was asked before has been answered; the same command serves again"


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--draft", help="folder or Hub name of its drafter; without it the target decodes alone")
    parser.add_argument("--engine", choices=ENGINES, default="transformers", help="default: %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: %(default)s, this machine")
    parser.add_argument("--port", type=port, default=8000, help="0 takes a free one; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="print the command of vllm or sglang, and end")
    parser.add_argument("--threads", type=positive, help="CPU threads of this process; default: as torch chooses")
    add_draft_temperature(parser)
    add_template_arguments(parser)
    add_loading(parser)
    add_speed(parser)
    add_examples(
        parser,
        "dflash serve --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16",
        "dflash serve --target Qwen/Qwen3-8B --draft my-drafter --engine vllm --dry-run",
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

    from dflash_hf.hub.check import check, render
    from dflash_hf.hub.launch import launch_command

    engine = arguments.engine
    if arguments.draft is None:
        raise UsageError(f"--engine {engine} needs --draft; without a drafter, run {engine} itself.")
    names = ("compile", "tree_nodes", "draft_temperature", "packed", "device", "threads")
    ours = [name for name in names if getattr(arguments, name)]
    if ours:
        raise UsageError(f"--{ours[0].replace('_', '-')} is for --engine transformers; leave it out for {engine}.")
    pair = NamedPair(arguments, echo.note)
    target, loading = pair.config.get("text_config", pair.config), pair.loading
    findings = check(arguments.draft, [engine], target, loading.draft_revision)
    echo.note(render(findings))
    if any(finding.severity == "error" for finding in findings):
        return Outcome(1, {"findings": [vars(finding) for finding in findings]})
    of_pair = (arguments.target, arguments.draft, pair.draft_config)
    environment, command = launch_command(engine, *of_pair, loading, pair.template())
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
        raise FileNotFoundError(
            f"--engine {engine} is not installed here; `pip install {engine}` on a machine with a GPU."
        ) from error
