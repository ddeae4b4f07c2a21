"""
Build the documentation: `python docs/build.py`, then open `site/index.html`. A warning is an error.

    1. pages      README, guides, results, the notebook: copied to where they are in the repository, so that links hold
    2. reference  a page for each group of public names, made from their docstrings, without importing anything
    3. site       mkdocs, strict
"""

import ast
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "pages"
TEXTS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "RELEASE.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "LICENSE",
    "examples/guides/*.md",
    "examples/recipes/README.md",
    "examples/benchmarks/results/*.md",
    "examples/smollm2-135m-dflash/README.md",
)
GUIDES = {
    "Start": (
        "training",
        "data",
        "a_second_target",
        "a_model_that_sees",
        "several_gpus",
        "scale",
        "serving",
        "laptop",
    ),
    "Understand": (
        "glossary",
        "reading_a_report",
        "papers_tables",
        "ablations",
        "acceptance_experiment",
        "decoding",
        "recipes",
        "command_line",
        "what_we_tried",
    ),
    "Extend": ("own_policy", "candidate_generator", "add_a_head", "add_a_layout", "add_an_engine_limit"),
}
# The public names of `dflash_hf`, by what they are for.
REFERENCE = {
    "Drafters": ("DFlashDraftConfig", "DFlashDraftModel"),
    "Decoding": (
        "DFlashDecodingConfig",
        "DFlashGenerateOutput",
        "DFlashCandidateGenerator",
        "DraftPolicy",
        "packed_weights",
        "install_hook",
        "remove_hook",
    ),
    "Data": ("generate_prompts", "PromptSettings", "generate_responses", "make_example", "DFlashCollator"),
    "Training": (
        "DFlashTrainer",
        "DFlashTrainingArguments",
        "StoredFeatures",
    ),
}


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    for pattern in TEXTS:
        for path in sorted(ROOT.glob(pattern)):
            copy(path)
    notebook(ROOT / "examples" / "how_dflash_works.ipynb")
    reference()
    shutil.copy(PAGES.parent / "site.css", PAGES)
    with (PAGES.parent / "mkdocs.yml").open(encoding="utf-8") as file:
        settings = file.read()
    built = PAGES.parent / ".mkdocs.yml"
    built.write_text(settings + "nav:\n" + "\n".join(navigation()) + "\n", encoding="utf-8")
    try:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(built)]
        return subprocess.call(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    finally:
        built.unlink()


def copy(path: Path) -> None:
    """A page with the pictures and files that it links to."""
    destination = PAGES / path.relative_to(ROOT)
    destination.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        linked = (path.parent / link).resolve()
        if linked.is_file() and linked.suffix not in (".md", ".ipynb"):
            copied = PAGES / linked.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, copied)
    if text.startswith("---\n"):  # the front matter of a model card
        text = text.split("---\n", 2)[2]
    if path == ROOT / "README.md":  # the only page of its section
        text = "---\nhide: [navigation]\n---\n" + text
    text = re.sub(r"(?ms)^(`{3,})(\w*)\n(.*?)^\1$", printed_table, text)
    destination.write_text(text.replace("how_dflash_works.ipynb", "how_dflash_works.md"), encoding="utf-8")


def printed_table(block: re.Match) -> str:
    """A block of code; text with columns gets the class `table`, whose lines do not wrap."""
    fence, language, text = block.groups()
    is_table = language in ("", "text") and re.search(r"\S {3,}\S", text)
    return f"{fence}{{.text .table}}\n{text}{fence}" if is_table else block[0]


def notebook(path: Path) -> None:
    """A notebook as a page: its text, code, printed output and pictures."""
    folder = PAGES / path.relative_to(ROOT).parent
    folder.mkdir(parents=True, exist_ok=True)
    blocks = []
    pictures = 0
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        blocks.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                pictures += 1
                name = f"{path.stem}_{pictures}.png"
                (folder / name).write_bytes(base64.b64decode(data["image/png"]))
                blocks.append(f"![Output]({name})")
                continue
            text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
            if text:
                fence = max(["``", *re.findall("`+", text)], key=len) + "`"  # the output may hold fences
                blocks.append(f"{fence}text\n{text}\n{fence}")
    (folder / f"{path.stem}.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def reference() -> None:
    """Pages of the public names; the package is put together from its folders, as the wheel has it."""
    package = PAGES / ".package" / "dflash_hf"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "dflash_hf", package, ignore=ignored)
    shutil.copytree(ROOT / "modeling", package / "modeling", ignore=ignored)
    for file in package.rglob("*.py"):
        file.write_text(plain(file.read_text(encoding="utf-8")), encoding="utf-8")
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    (lazy,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "_LAZY"]
    modules = ast.literal_eval(lazy)
    listed = [name for names in REFERENCE.values() for name in names]
    if sorted(listed) != sorted(modules):
        raise SystemExit(f"docs/build.py: REFERENCE and the public names differ: {set(listed) ^ set(modules)}")
    (PAGES / "reference").mkdir()
    for title, names in REFERENCE.items():
        blocks = [f"# {title}", *(f"::: dflash_hf{modules[name]}.{name}" for name in names)]
        (PAGES / "reference" / f"{title.lower()}.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def plain(source: str) -> str:
    """Docstrings without transformers' marks: names as [`~module.Name`], types in backticks, `*optional*`."""
    source = re.sub(r"\[`~?(?:[\w.]+\.)?(\w+)`\]", r"`\1`", source)
    source = re.sub(r"(?m)^( +)`([\w\[\], .|]+)`: ", r"\1\2: ", source)  # what is returned or raised
    return re.sub(
        r"(?m)^( +[\w, `()|\[\]*]+ \()(`.*?)(\): )",
        lambda match: match[1].replace("`", "") + re.sub("[`*]", "", match[2]) + match[3],
        source,
    )


def navigation() -> list[str]:
    """All pages, for mkdocs."""
    lines = ["  - Home: README.md", "  - Guides:", "    - examples/guides/README.md"]
    for title, names in GUIDES.items():
        lines += [f"    - {title}:", *(f"      - examples/guides/{name}.md" for name in names)]
    lines += [
        "    - One round, drawn: examples/how_dflash_works.md",
        "    - Training recipes: examples/recipes/README.md",
    ]
    lines += ["  - Reference:", *(f"    - {title}: reference/{title.lower()}.md" for title in REFERENCE)]
    lines += ["  - Results:", "    - examples/benchmarks/results/README.md"]
    lines += ["    - The drafter of SmolLM2-135M: examples/smollm2-135m-dflash/README.md"]
    results = sorted((PAGES / "examples" / "benchmarks" / "results").glob("*.md"))
    for path in results:
        if path.name != "README.md":
            title = path.read_text(encoding="utf-8").splitlines()[0]
            name = title[2:].replace("`", "") if title.startswith("# ") else path.stem.replace("_", " ")
            lines.append(f"    - {json.dumps(name)}: examples/benchmarks/results/{path.name}")
    lines += ["  - Project:", "    - Changelog: CHANGELOG.md", "    - Contributing: CONTRIBUTING.md"]
    lines += ["    - Releases: RELEASE.md", "    - Security: SECURITY.md", "    - Code of conduct: CODE_OF_CONDUCT.md"]
    return lines


if __name__ == "__main__":
    sys.exit(main())
