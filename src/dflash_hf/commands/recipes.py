"""
`dflash recipes`: the recipes and scripts in the package.

    dflash recipes
    dflash recipes show qwen3-4b.yaml
    dflash recipes copy demo.yaml && dflash train --config demo.yaml --dry-run
"""

import ast
import shutil
import textwrap
from pathlib import Path

from dflash_hf.commands.shared import add_choice
from dflash_hf.terminal import Outcome, UsageError, output_path


def add_arguments(parser) -> None:
    add_choice(parser, "action", ("list", "show", "copy"), "list", nargs="?")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name from the list")
    parser.add_argument("to", nargs="?", metavar="TO", type=output_path, help="file or folder to copy to (default: .)")


def run(arguments, echo) -> Outcome:
    files = shipped()
    if arguments.action == "list":
        for name, path in files.items():
            echo(f"{name:24} {_summary(path)}")
        return Outcome(facts={"recipes": {name: str(path) for name, path in files.items()}})
    if arguments.name is None:
        raise UsageError(f"dflash recipes {arguments.action} needs a name: {', '.join(files)}.")
    if arguments.name not in files:
        raise UsageError(f"Unknown recipe {arguments.name!r}; choose from {', '.join(files)}.")
    path = files[arguments.name]
    if arguments.action == "show":
        echo(path.read_text(encoding="utf-8").rstrip("\n"))
        return Outcome(facts={"name": arguments.name, "text": path.read_text(encoding="utf-8")})
    goal = arguments.to or Path.cwd()
    goal = goal / path.name if goal.is_dir() else goal
    if goal.exists():
        raise FileExistsError(f"{goal} exists; choose another file.")
    goal.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, goal)
    echo(f"Wrote {goal}.")
    return Outcome(facts={"file": str(goal)})


def shipped() -> dict[str, Path]:
    """Recipes, their data, launcher configurations and scripts, by name."""
    from dflash_hf import examples

    folder = Path(examples.__file__).parent
    found = [path for kind in ("[!_]*.py", "recipes/*", "accelerate/*") for path in sorted(folder.glob(kind))]
    return {path.name: path for path in found if path.suffix in (".py", ".jsonl", ".yaml")}


def _summary(path: Path) -> str:
    """The first sentence of a file's header, or of a script's docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return "prompts of demo.yaml"
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    lines = [line.lstrip("# ").strip() for line in text.splitlines()[:6]]
    return textwrap.shorten(" ".join(filter(None, lines)).split(". ")[0], 88, placeholder=" ...")
