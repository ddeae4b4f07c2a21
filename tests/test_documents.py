"""
What the tracked Markdown files state of commands, options, settings and files, against the parsers, classes and files
that they speak of. `test_figures.py` compares the figures that they quote.

`test_guides.py` runs the pages; here is all else: options in a sentence, `key=value`, a path in passing, the commands
of results and cards. `CHANGELOG.md` speaks of what is gone, and is left out.
"""

import argparse
import dataclasses
import fnmatch
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml
from support import layouts
from support.guides import ROOT
from transformers import GenerationConfig, GenerationMixin

from dflash_hf import DFlashDecodingConfig, DFlashDraftConfig, DFlashTrainingArguments
from dflash_hf._io.argument_types import METAVARS
from dflash_hf.cli import COMMANDS, build_parser
from dflash_hf.commands.train import translate
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.evaluation.text import summary_lines
from dflash_hf.hub.check import check
from dflash_hf.training.arguments import ScriptArguments


IGNORED_FOLDERS = {".venv", "venv", "site", "pages", "build", "dist", "node_modules"}
SCRIPT_FOLDERS = ("examples/benchmarks", "examples/smollm2-135m-data", "examples", "docs")
# Options of programs that are not ours, as the documents name them.
FOREIGN_OPTIONS = {
    "accelerate": {"--config_file", "--num_processes", "--num_machines"},
    "hf": {"--repo-type"},
    "llama-server": {"--spec-draft-n-max", "--spec-type", "--port"},
    "pip": {"--no-deps"},
    "SGLang": {"--speculative-num-draft-tokens", "--speculative-dspark-block-size"},
    "transformers": {"--continuous-batching"},
    "ruff": {"--check"},
}
# `key=value` of programs that are not ours, and of Python.
FOREIGN_KEYS = set(
    "CUDA_VISIBLE_DEVICES OMP_NUM_THREADS PIP_EXTRA_INDEX_URL DFLASH_DEBUG DFLASH_WRITE_NOTEBOOK "
    "weights_only packed key dtype attn_implementation trust_remote_code use_kernels".split()
)
# Files and folders that a command writes, or that are the reader's own.
NAMES_OF_READERS = {"my-drafter", "report", "adapter", "adapters", "recipe.yaml", "gpu.md"}
NAMES_OF_READERS |= {"head_bigram_dflash.py"}


@dataclass(frozen=True)
class Document:
    """
    A Markdown file.

    Attributes:
        name (`str`): Its path from the root of the repository.
        text (`str`): What it says.
    """

    name: str
    text: str

    @classmethod
    def read(cls, path: Path) -> "Document":
        return cls(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


@cache
def documents() -> tuple[Path, ...]:
    """Every Markdown file but the changelog: the tracked ones, or all of them where there is no git."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "*.md"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in listed.split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*.md") if not IGNORED_FOLDERS & set(path.parts)]
    return tuple(sorted(path for path in paths if path.name != "CHANGELOG.md" and path.is_file()))


@dataclass(frozen=True)
class Span:
    """
    Something in a document that is meant literally.

    Attributes:
        where (`str`): Document and line.
        text (`str`): The text, on one line.
        sentence (`str`): The sentence that it is part of; the text itself in a block.
        is_whole (`bool`): Whether it stands on a line of its own, as a whole command does.
    """

    where: str
    text: str
    sentence: str
    is_whole: bool


FENCE = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
SENTENCE = re.compile(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |\|))|(?<=[.:;]) +(?=[A-Z`])|(?<=[.:;])\n")


@cache
def spans_of(document: Document) -> tuple[Span, ...]:
    """Inline code in sentences, and the lines of shell blocks and of indented commands."""
    text = document.text
    name = document.name
    spans = []
    for fence in FENCE.finditer(text):
        if fence[2] != "bash":
            continue
        first = text[: fence.start()].count("\n") + 2
        for number, line in _joined_lines(fence[3], first):
            spans.append(Span(f"{name}:{number}", line, line, is_whole=True))
    prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for number, line in _joined_lines(prose, 1):
        if line.startswith("    ") and re.match(r"(?:\w+=\S+ )*(?:dflash|python|make) ", line.strip()):
            spans.append(Span(f"{name}:{number}", line.strip(), line, is_whole=True))
    start = 0
    for end in [*(match.start() for match in SENTENCE.finditer(prose)), len(prose)]:
        sentence = prose[start:end]
        for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", sentence):
            number = prose[: start + match.start()].count("\n") + 1
            spans.append(Span(f"{name}:{number}", " ".join(match[1].split()), sentence, is_whole=False))
        start = end
    return tuple(spans)


def _joined_lines(text: str, first: int) -> list[tuple[int, str]]:
    """Lines with their numbers; one that ends in a backslash goes on in the next."""
    lines: list[tuple[int, str]] = []
    continues = False
    for number, line in enumerate(text.splitlines(), start=first):
        if continues:
            begun, before = lines.pop()
            lines.append((begun, f"{before[:-1].rstrip()} {line.strip()}"))
        else:
            lines.append((number, line))
        continues = line.endswith("\\")
    return lines


def words_of(text: str) -> list[str]:
    """The words of a command, without assignments before it, a comment after it, and redirections."""
    try:
        words = shlex.split(re.sub(r"\$\([^)]*\)", "SUBSTITUTED", text), comments=True)
    except ValueError:  # a quotation that is none: no command
        return []
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    ends = [index for index, word in enumerate(words) if word in ("|", "&&", ">", "<", "2>&1")]
    return words[: ends[0]] if ends else words


# ------------------------------------------------------------------------------------------------------ the parsers


class _Captured(Exception):
    """Carries a script's parser out of its `main`."""


@cache
def script_parser(script: Path) -> argparse.ArgumentParser | None:
    """The parser that a script builds, taken when it is about to parse; `None` if it has none."""
    source = script.read_text(encoding="utf-8")
    if "parse_args" not in source:
        return None

    def stop(parser, *_args, **_options):
        raise _Captured(parser)

    spec = importlib.util.spec_from_file_location(f"documented_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    patch = pytest.MonkeyPatch()
    try:
        for name in ("parse_args", "parse_intermixed_args", "parse_known_args"):
            patch.setattr(argparse.ArgumentParser, name, stop)
        patch.syspath_prepend(str(script.parent))
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        module.main()
    except _Captured as captured:
        return captured.args[0]
    finally:
        patch.undo()
    raise AssertionError(f"{script.name} has a parser, but its main() does not parse")


def find_script(name: str) -> Path | None:
    """A script by its path, or by its name alone, as in the results of benchmarks."""
    places = [ROOT / name, *(ROOT / folder / name for folder in SCRIPT_FOLDERS)]
    return next((place for place in places if place.suffix == ".py" and place.is_file()), None)


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a parser and of its subcommands."""
    options = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                options |= options_of(inner)
    return options


@cache
def recipe_keys() -> frozenset[str]:
    fields = [*dataclasses.fields(ScriptArguments), *dataclasses.fields(DFlashTrainingArguments)]
    return frozenset(field.name for field in fields)


@cache
def python_names() -> frozenset[str]:
    """What else is written as `name=value`: fields of configurations, and arguments of `generate`."""
    fields = [field.name for field in dataclasses.fields(DFlashDecodingConfig)]
    generate = inspect.signature(GenerationMixin.generate).parameters
    return frozenset([*fields, *generate, *vars(GenerationConfig()), *DFlashDraftConfig.field_names()])


def faults_of_command(words: list[str], is_whole: bool) -> list[str]:
    """What is wrong with the words of a command of ours; nothing for those of others."""
    program, *rest = words
    if program == "dflash":
        return faults_of_dflash(rest, is_whole)
    if program in COMMANDS and rest and rest[0].startswith("-"):  # `publish --dry-run`
        return faults_of_dflash(words, is_whole=False)
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        named = [word for word in rest if re.fullmatch(r"[a-z]+", word)]
        return [f"the Makefile has no target {word!r}" for word in named if word not in targets]
    if program == "accelerate" and "dflash_hf.cli" in rest:
        return faults_of_dflash(rest[rest.index("dflash_hf.cli") + 1 :], is_whole)
    if program.endswith(".py"):
        program = "python"
        rest = words
    if program in ("python", "python3", ".venv/bin/python") and rest and rest[0].endswith(".py"):
        script = find_script(rest[0])
        if script is None:
            return [f"there is no script {rest[0]}"]
        return faults_of_options(script_parser(script), rest[1:], script.name)
    if program in ("bash", "sh") or program.startswith("."):
        file = rest[0] if program in ("bash", "sh") else program
        is_ours = file.startswith(("examples/", ".ci/", ".gpu/"))
        return [f"there is no file {file}"] if is_ours and not (ROOT / file).is_file() else []
    return []


def faults_of_options(parser: argparse.ArgumentParser | None, words: list[str], name: str) -> list[str]:
    options = set() if parser is None else options_of(parser)
    named = {word.strip("[]").partition("=")[0] for word in words if re.match(r"\[?--[a-z]", word)}
    return [f"{name} has no option {option}" for option in sorted(named - options)]


def faults_of_dflash(words: list[str], is_whole: bool) -> list[str]:
    """Parse a command; one in a sentence may lack required arguments and have any values."""
    if not words or words[0].startswith("-") or words[0].rstrip(":").isupper():
        return []
    if words[0] not in COMMANDS:
        return [f"there is no command `dflash {words[0]}`"]
    parser = build_parser(words[0], all_options=True)
    command = words[0]
    words = [word.strip("[]") for word in words[1:] if word not in ("...", "...]")]
    if command == "train":
        words = translate(words, parser)
    for action in parser._actions:
        if not is_whole:
            action.required = False
            action.choices = None
        if not is_whole or action.type in METAVARS:  # a file need not be here
            action.type = None
        if action.nargs is None and not is_whole and action.option_strings:
            action.nargs = "?"
    patch = pytest.MonkeyPatch()
    messages: list[str] = []

    def fail(_parser, message):
        messages.append(message)
        raise _Captured

    patch.setattr(type(parser), "error", fail)
    try:
        arguments = parser.parse_intermixed_args(words)
    except (_Captured, SystemExit):
        return [f"dflash {shlex.join([parser.prog.split()[-1], *words])}: {message}" for message in messages]
    finally:
        patch.undo()
    entries = getattr(arguments, "entry", None) or []
    keys = [entry.partition("=")[0].partition(".")[0] for entry in entries]
    return [f"a recipe has no key {key!r}" for key in keys if key not in recipe_keys()]


# ------------------------------------------------------------------------------------------------------ what is said


def faults_of_loose_options(span: Span, document: Document) -> list[str]:
    """
    Options in a sentence, without a command before them: they belong to one of the commands that the sentence
    names, or else, where it names none, to any command, or to a script that the document names.
    """
    words = words_of(span.text)
    options = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
    commands = set()
    for neighbour in spans_of(document):
        line = words_of(neighbour.text) if neighbour.sentence == span.sentence else []
        if line[:1] == ["dflash"] and len(line) > 1 and line[1] in COMMANDS:
            commands.add(line[1])
    commands -= {"env"}  # has no options of its own
    existing: set[str] = {"--help"}
    for command in commands or COMMANDS:
        existing |= options_of(build_parser(command, all_options=True))
    for script in set(re.findall(r"[\w./-]+\.py", document.text)):
        file = find_script(script)
        is_script = file is not None and not file.name.startswith("test_")
        if is_script and not file.resolve().is_relative_to(ROOT / "src"):
            parser = script_parser(file)
            existing |= set() if parser is None else options_of(parser)
    for program, foreign_options in FOREIGN_OPTIONS.items():
        existing |= foreign_options if program in document.text else set()
    return [f"no command here has an option {option}" for option in options if option not in existing]


def faults_of_key(text: str) -> list[str]:
    name = re.match(r"[\w.]+", text)[0]
    keys = recipe_keys() | python_names() | FOREIGN_KEYS
    first, _, inner = name.partition(".")
    faults = [] if first in keys else [f"nothing has a setting {first!r}"]
    if first == "draft_config" and inner not in ("", *DFlashDraftConfig.field_names()):
        faults.append(f"a drafter's configuration has no {inner!r}")
    return faults


@cache
def tree() -> tuple[str, ...]:
    """All files of the checkout and all their folders, relative to it."""
    files = [path for path in ROOT.rglob("*") if not (IGNORED_FOLDERS | {".git"}) & set(path.relative_to(ROOT).parts)]
    return tuple(path.relative_to(ROOT).as_posix() for path in files)


OURS = ("py", "md", "sh", "yaml", "cfg", "toml")  # other files by their name alone are often the reader's
FOLDERS = ("examples", "tests", "src", "modeling", "hub_cards", "docs", ".ci", ".gpu", ".github")
PATH = re.compile(rf"(?:[\w.*-]+/)+[\w.*-]*|[\w.*-]+\.(?:{'|'.join(OURS)})")


def faults_of_path(text: str) -> list[str]:
    """A path of the repository exists: from its root, beside the document, in the package or in the tests."""
    first = text.partition("/")[0]
    if not PATH.fullmatch(text) or first in NAMES_OF_READERS:
        return []
    if first in FOLDERS:  # from the root; CONTRIBUTING names tests from theirs
        patterns = [text.rstrip("/"), f"tests/{text}"]
    elif text.rpartition(".")[2] in OURS:
        patterns = [text, f"*/{text}"]
    else:
        return []
    exists = any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns for path in tree())
    return [] if exists else [f"there is no {text}"]


def faults_of(span: Span, document: Document) -> list[str]:
    text = span.text
    faults = []
    fields = {field.name for field in dataclasses.fields(DFlashDecodingConfig)}
    for name in re.findall(r"decoding_config\.(\w+)", text):
        if name not in fields:
            faults.append(f"decoding_config has no field {name!r}")
    words = words_of(text)
    if not words:
        return faults
    if not span.is_whole and text.startswith("--"):
        return faults + faults_of_loose_options(span, document)
    if not span.is_whole and re.match(r"[a-z_]+(?:\.\w+)*=(?!=)", text) and " " not in text.partition("=")[0]:
        return faults + faults_of_key(text)
    if len(words) == 1:
        return faults + faults_of_path(text)
    return faults + faults_of_command(words, span.is_whole)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document_names_what_exists(path):
    document = Document.read(path)
    faults_of_spans = {f"{span.where}: {span.text}": faults_of(span, document) for span in spans_of(document)}
    assert not {where: faults for where, faults in faults_of_spans.items() if faults}


MISTAKES = {
    "an option that is gone": "`dflash check --weights` reads every tensor.",
    "an option beside its command": "`dflash check` reads all with `--weights`.",
    "an option of another command": "`dflash check` reads all with `--tree-nodes`.",
    "an option alone": "Use `--weights`.",
    "a command": "`dflash inspect my-drafter`",
    "an argument that is missing": "```bash\ndflash check\n```",
    "an option in a block": "```bash\ndflash check my-drafter \\\n  --weights\n```",
    "a value": "```bash\ndflash check my-drafter --engine tgi\n```",
    "a target": "```bash\nmake benchmark\n```",
    "a key": "Set `learning_rat=1`.",
    "a key on the command line": "`dflash train --config FILE learning_rat=1`",
    "a key of the drafter": "Set `draft_config.selector_rnk=1`.",
    "a field": "Set `draft.decoding_config.blocksize = 4`.",
    "a file": "See `tests/test_gone.py`.",
    "a file by its name": "See `gone_for_good.py`.",
    "a folder": "See `examples/gone/`.",
    "a script": "`python examples/benchmarks/gone.py`",
    "an option of a script": "`python examples/benchmarks/sizes.py --promts 3`",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_document_check_finds_the_mistake(mistake):
    document = Document("page.md", f"# A page\n\n{MISTAKES[mistake]}\n")
    assert [fault for span in spans_of(document) for fault in faults_of(span, document)]


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document_links_lead_somewhere(path):
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s{]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        there = (path.parent / file).resolve() if file else path
        is_written_by_publish = file in ("eval_report.png", "../eval_report.png")
        assert there.exists() or is_written_by_publish, link
        if anchor:
            heads = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads], link


def test_glossary_names_are_in_their_files():
    path = ROOT / "examples" / "guides" / "glossary.md"
    rows = re.findall(r"^\| (.+) \| (.+) \| (.*) \|$", path.read_text(encoding="utf-8"), re.MULTILINE)
    missing = []
    checked = 0
    for term, _, where in rows:
        for link, names in re.findall(r"\]\(([^)#]+\.py)\)((?: `\w+`)*)", where):
            text = (path.parent / link).read_text(encoding="utf-8")
            for name in re.findall(r"\w+", names):
                checked += 1
                if name not in text:
                    missing.append(f"{term}: {link} has no {name}")
    assert checked > 30
    assert missing == []


VARIABLE_IS_READ = re.compile(r"""environ(?:\.get\(|\[|\.setdefault\()\s*["'](\w+)["']""")


@pytest.mark.parametrize(
    ("page", "folder", "prefix"),
    [("examples/guides/command_line.md", "src", ""), ("CONTRIBUTING.md", "tests", "DFLASH_")],
    ids=["package", "tests"],
)
def test_environment_variables_are_listed(page, folder, prefix):
    """In one table each: those that the package reads, and those of its own that the tests read."""
    read = {name for path in (ROOT / folder).rglob("*.py") for name in VARIABLE_IS_READ.findall(path.read_text())}
    table = (ROOT / page).read_text(encoding="utf-8").partition("| Variable | Effect |")[2].partition("\n\n")[0]
    listed = set()
    for line in table.splitlines()[2:]:
        variables, effect = line.strip("|").split("|")[:2]
        listed |= set(re.findall(r"`(\w+)`", variables)) | set(re.findall(r"`(XDG_\w+)`", effect))
    assert listed == {name for name in read if name.startswith(prefix)} - {"PATH", "PYTHONPATH"}


def test_yaml_blocks_have_keys_of_recipes():
    blocks = [fence[3] for path in documents() for fence in FENCE.finditer(path.read_text()) if fence[2] == "yaml"]
    assert blocks
    for block in blocks:
        assert set(yaml.safe_load(block)) <= recipe_keys()


def test_decoding_fields_have_their_rows():
    text = (ROOT / "examples" / "guides" / "decoding.md").read_text(encoding="utf-8")
    table = text.partition("| Field | Meaning |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(field.name for field in dataclasses.fields(DFlashDecodingConfig))


# ---------------------------------------------------------------------------------------------- tables and figures


# Of each project whose layout is read, a drafter as it writes it.
WRITTEN_BY = {
    "z-lab": ["z-lab v1", "z-lab DFlash 2"],
    "transformers": ["muse assistant"],
    "speculators": ["speculators", "speculators, DFlash 2", "DSpark, speculators"],
    "DeepSpec": ["DSpark, Automodel"],
    "SpecForge": ["SpecForge, early", "SpecForge, logit head", "DSpark, SpecForge", "Domino, SpecForge"],
    "ModelOpt": ["ModelOpt", "DSpark, ModelOpt", "Domino, ModelOpt", "JetSpec, ModelOpt"],
    "NeMo Automodel": ["Automodel", "Automodel, DFlash 2 with a factor of the target's"],
    "TorchSpec": ["TorchSpec"],
    "verl": ["verl"],
}


def test_layouts_are_read_by_the_engines_named(tmp_path):
    """The table of what is read says of each engine what `dflash check` says of these drafters."""
    text = (ROOT / "examples" / "guides" / "add_a_layout.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w -]+) \| [^|]* \| (yes|no)[^|]* \| (yes|no)[^|]* \|$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(WRITTEN_BY)
    for name, *columns in rows:
        for number, layout in enumerate(WRITTEN_BY[name]):
            folder = tmp_path / f"{name} {number}"
            layouts.write(folder, layout)
            for engine, column in zip(("vllm", "sglang"), columns, strict=True):
                is_refused = any(finding.severity == "error" for finding in check(folder, [engine]))
                assert is_refused == (column == "no"), (layout, engine)


@pytest.fixture(scope="module")
def bundled_report() -> EvalReport:
    """Of the bundled pair, which pages quote."""
    file = ROOT / "examples" / "smollm2-135m-dflash" / "eval_report.json"
    return EvalReport.from_json(file.read_text(encoding="utf-8"))


def test_guide_quotes_the_bundled_report(bundled_report):
    text = (ROOT / "examples" / "guides" / "reading_a_report.md").read_text(encoding="utf-8")
    quoted = next(fence[3] for fence in FENCE.finditer(text) if fence[2] == "text")
    lines = [line.rstrip() for line in summary_lines(bundled_report)]
    assert [line for line in quoted.splitlines() if line and line not in lines] == []
