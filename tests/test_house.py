"""Rules of the project: the contents of a build, imports between folders, one statement per line."""

import ast
import configparser
import functools
import graphlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dflash_hf


ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "dflash_hf"
MODELING = ROOT / "modeling"
CARDS = ROOT / "hub_cards"
EXAMPLES = ROOT / "examples"
LIBRARY = sorted([*SOURCE.rglob("*.py"), *MODELING.rglob("*.py"), *CARDS.rglob("*.py")])
REMOTE_CODE = sorted(MODELING.rglob("*.py"))
EVERYTHING = sorted([*LIBRARY, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])

# The folders of src/dflash_hf, and which others each may import: a folder of `SHARED_FOLDERS` only those listed, the
# others the shared folders as well. Of the files beside the folders, only `cli` imports folders that are not shared.
SHARED_FOLDERS = {"_io", "decoding", "layouts", "targets", "_registration", "pairs", "conversion"}
FOLDERS: dict[str, set[str]] = {
    "_io": set(),
    "targets": set(),
    "layouts": set(),
    "decoding": {"targets"},
    "_registration": {"drafter", "layouts"},
    "pairs": {"_io", "targets", "layouts", "decoding", "drafter"},
    "conversion": {"_io", "targets", "layouts", "drafter", "pairs"},
    "data": set(),
    "synthetic": {"data"},
    "evaluation": {"data", "synthetic"},
    "hub": {"evaluation"},
    "training": {"data", "evaluation", "hub"},
    "doctor": {"data", "synthetic", "evaluation", "training"},
    "demo": {"data", "evaluation"},
    "serving": {"evaluation"},
    "commands": {"data", "synthetic", "evaluation", "hub", "training", "doctor", "demo", "serving"},
}
# Imported inside the functions that need them: `import dflash_hf` stays quick and works without the extras.
OPTIONAL = ("datasets", "peft", "matplotlib")
# Names on the package index that differ from the name to import.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path), filename=str(path))


def imports(tree: ast.AST) -> set[str]:
    """Dotted names of what a tree imports absolutely: `a.b` for `import a.b`, `a` and `a.b` for `from a import b`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def relative_imports(path: Path) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom) and node.level > 0]


def third_party(tree: ast.AST) -> set[str]:
    """Normalised distribution names of imported modules, without the standard library and ourselves."""
    roots = {name.partition(".")[0] for name in imports(tree)} - set(sys.stdlib_module_names) - {"dflash_hf"}
    return {DISTRIBUTIONS.get(root, root).replace("_", "-").lower() for root in roots}


def ours(path: Path) -> set[str]:
    """What a file imports of the package, without its name."""
    return {name.removeprefix("dflash_hf.") for name in imports(tree_of(path)) if name.startswith("dflash_hf.")}


# ---------------------------------------------------------------------------------------------------------- packaging


@functools.cache
def configuration() -> configparser.ConfigParser:
    """setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def requirement_names(lines: str) -> set[str]:
    names = [re.match(r"[A-Za-z0-9._-]+", line.strip()) for line in lines.splitlines() if line.strip()]
    return {name.group().replace("_", "-").lower() for name in names}


def build(kind: str, folder: Path, out: Path) -> Path:
    """Call the build backend as pip does, with the setuptools of this environment; returns the archive."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The unpacked sdist, and the unpacked wheel that was built from it, so that the sdist is known to be complete."""
    scratch = tmp_path_factory.mktemp("build")
    # A copy, because setuptools leaves build/ and *.egg-info behind.
    tree = scratch / "tree"
    shutil.copytree(SOURCE, tree / "src" / "dflash_hf", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (MODELING, CARDS, EXAMPLES, ROOT / "tests", ROOT / ".ci", ROOT / ".gpu"):
        shutil.copytree(folder, tree / folder.name, ignore=shutil.ignore_patterns("__pycache__", "cache", "results"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)

    with tarfile.open(build("sdist", tree, scratch)) as archive:
        archive.extractall(scratch / "sdist", filter="data")
    (sdist,) = (scratch / "sdist").iterdir()
    with zipfile.ZipFile(build("wheel", sdist, scratch)) as archive:
        archive.extractall(scratch / "wheel")
    return sdist, scratch / "wheel"


def wheel_metadata(wheel: Path, file: str) -> str:
    (folder,) = wheel.glob("*.dist-info")
    return (folder / file).read_text(encoding="utf-8")


def test_wheel_holds_only_the_package(built):
    _, wheel = built
    expected = set()
    for folder, inside in ((SOURCE, "dflash_hf"), (MODELING, "dflash_hf/modeling"), (CARDS, "dflash_hf/hub_cards")):
        files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        expected |= {f"{inside}/{path.relative_to(folder).as_posix()}" for path in files}
    pair = ("smollm2*/*.json", "smollm2*/model.safetensors", "smollm2*/data/*", "smollm2*/custom_generate/*.py")
    patterns = ("*.py", "recipes/*.*", "recipes/mixtures/*", "accelerate/*", *pair)
    shipped = [path for pattern in patterns for path in EXAMPLES.glob(pattern)]
    expected |= {f"dflash_hf/examples/{path.relative_to(EXAMPLES).as_posix()}" for path in shipped}
    packaged = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    packaged = {name for name in packaged if ".dist-info/" not in name}
    assert packaged == expected, "declare new folders in `packages` and new data in `package_data` of setup.cfg"


def test_sdist_can_be_tested(built):
    sdist, wheel = built
    for name in ("constraints.txt", "Makefile", "LICENSE", "setup.cfg", "tests/test_house.py", ".ci/quick"):
        assert (sdist / name).is_file(), name
    assert "dflash = dflash_hf.cli:main" in wheel_metadata(wheel, "entry_points.txt")


def test_wheel_imports_without_its_extras(built, tmp_path):
    """In a fresh interpreter: the version is the declared one, and no optional package was imported."""
    _, wheel = built
    code = (
        "import json, sys, dflash_hf, dflash_hf.modeling\n"
        "print(json.dumps([dflash_hf.__version__, dflash_hf.modeling.__file__, sorted(sys.modules)]))"
    )
    env = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version, modeling, modules = json.loads(done.stdout.splitlines()[-1])
    assert Path(modeling).is_relative_to(wheel)
    assert not set(OPTIONAL) & set(modules)
    assert f"\nVersion: {version}\n" in wheel_metadata(wheel, "METADATA")


def test_version_is_the_same_everywhere():
    version = configuration()["metadata"]["version"]
    assert f'\n__version__ = "{version}"\n' in text_of(SOURCE / "__init__.py")
    assert f"\nversion: {version}\n" in text_of(ROOT / "CITATION.cff")
    assert f'\nVERSION = "{version}"' in text_of(MODELING / "configuration_dflash.py")


def test_commits_are_checked_by_the_ruff_of_ci():
    pinned = re.search(r"^ruff==(\S+)", text_of(ROOT / "constraints.txt"), re.MULTILINE)
    assert f"rev: v{pinned[1]}\n" in text_of(ROOT / ".pre-commit-config.yaml")


def test_public_names_have_their_pages():
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    listed = [name for names in build.REFERENCE.values() for name in names]
    assert sorted(["__version__", *listed]) == sorted(dflash_hf.__all__)
    guides = {path.stem for path in (ROOT / "examples" / "guides").glob("*.md")} - {"README"}
    assert sorted(name for names in build.GUIDES.values() for name in names) == sorted(guides)


def test_tested_floor_is_the_declared_one():
    floor = text_of(ROOT / ".ci" / "floor.txt")
    declared = re.findall(r"^(\S+)>=([\d.]+)$", configuration()["options"]["install_requires"], re.MULTILINE)
    assert declared and all(re.search(rf"^{name}=={version}\b", floor, re.MULTILINE) for name, version in declared)


def test_every_requirement_has_an_exact_pin():
    """Without a pin, CI would use changing versions, and pip might download a CUDA build of torch."""
    required = requirement_names(configuration()["options"]["install_requires"])
    for extra in configuration()["options.extras_require"].values():
        required |= requirement_names(extra)
    pins = re.findall(r"^([a-z0-9.-]+)==\S+", text_of(ROOT / "constraints.txt"), re.MULTILINE)
    assert not required - set(pins), "add them to constraints.txt"


# -------------------------------------------------------------------------------------------------------------- rules

# A rule is named by what it requires. It is a function of a file, and returns the violations.


def imports_only_declared_requirements(path: Path) -> set[str]:
    """
    At the top of a module only requirements and those of the extra with the folder's name are imported, inside
    functions also those of all extras.
    """
    parser = configuration()
    tree = tree_of(path)
    folder_extra = parser["options.extras_require"].get(path.parent.name, "")
    required = requirement_names(parser["options"]["install_requires"]) | requirement_names(folder_extra)
    optional = set().union(*map(requirement_names, parser["options.extras_require"].values()))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    at_import = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and id(node) not in inside]
    at_import = [node for node in at_import if isinstance(node, ast.Import | ast.ImportFrom)]
    return (third_party(ast.Module(at_import, [])) - required) | (third_party(tree) - required - optional)


def imports_only_what_remote_code_may(path: Path) -> set[str]:
    """
    These files are also loaded by `trust_remote_code=True`, where every absolute import becomes a requirement, and
    relative imports are found by a regular expression, which recognises only the form with one dot and one name.
    """
    violations = (third_party(tree_of(path)) - {"torch", "transformers", "safetensors"}) | ours(path)
    for node in relative_imports(path):
        plain = node.level == 1 and node.module and (path.parent / f"{node.module}.py").is_file()
        if not plain:
            violations.add(f"line {node.lineno}: write `from .x import y` for a file beside this one")
    return violations


def relative_imports_are_found_by_scanners(path: Path) -> set[str]:
    """transformers does not parse a file: a line of a docstring that looks like an import makes it miss a file."""
    from transformers.dynamic_module_utils import get_relative_imports

    imported = {node.module for node in relative_imports(path)}
    # Other scanners take any number of dots.
    scanned = set(re.findall(r"^\s*(?:from|import)\s+\.+\s*([\w.]*)\s*(?:import\b|$)", text_of(path), re.MULTILINE))
    return imported ^ set(get_relative_imports(path)) | imported ^ scanned


def imports_only_torch(path: Path) -> set[str]:
    return (third_party(tree_of(path)) - {"torch"}) | ours(path)


def does_not_import_the_command_line(path: Path) -> set[str]:
    return ours(path) & {"cli"}


def imports_folders_as_parts_of_the_package(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(tree_of(path))} & {"modeling", "hub_cards", "src"}


def imports_are_absolute(path: Path) -> list[str]:
    return [f"line {node.lineno}: write `from dflash_hf.folder.file import x`" for node in relative_imports(path)]


def imports_only_allowed_folders(path: Path) -> set[str]:
    here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    allowed = {here, *SHARED_FOLDERS, *FOLDERS.get(here, set())}
    return {name.partition(".")[0] for name in ours(path)} & (set(FOLDERS) - allowed)


def shared_folder_imports_only_listed_names(path: Path) -> set[str]:
    folder = path.parent.name
    return {name for name in ours(path) if name.partition(".")[0] not in {"modeling", folder, *FOLDERS[folder]}}


def does_not_import_other_tests(path: Path) -> set[str]:
    """This includes scripts in strings, which tests run in a process of their own."""
    names = {test.stem for test in (ROOT / "tests").rglob("test_*.py")} | {"conftest"}
    return names & set(re.findall(r"^\s*(?:from|import) (\w+)", text_of(path), re.MULTILINE)) - {path.stem}


# Names that do not tell what a variable holds.
VAGUE_NAMES = {"one", "found", "known", "given", "kept", "held", "said", "ours", "theirs", "thing"}


def has_one_statement_per_line(path: Path) -> list[str]:
    """Nor are there conditional expressions in one another, unpacked tuples, or comparisons as factors."""
    violations = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            targets = node.targets[0]
            if isinstance(targets, ast.Tuple) and not _swaps(targets.elts, node.value.elts):
                violations.append(f"line {node.lineno}: {len(targets.elts)} assignments in one")
        if isinstance(node, ast.IfExp) and isinstance(node.body, ast.IfExp) | isinstance(node.orelse, ast.IfExp):
            violations.append(f"line {node.lineno}: a conditional expression in another")
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple):
            violations.append(f"line {node.lineno}: a tuple is written out with a star")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if any(isinstance(side, ast.Compare) for side in (node.left, node.right)):
                violations.append(f"line {node.lineno}: a comparison is a factor")
    return violations


def _swaps(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    """Whether an assignment only gives the same variables each other's values."""
    return {ast.unparse(target) for target in targets} == {ast.unparse(value) for value in values}


def names_say_what_variables_hold(path: Path) -> list[str]:
    names = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)]
    stored = [node for node in names if isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES]
    return [f"line {node.lineno}: {node.id!r} does not tell what it holds" for node in stored]


def names_no_option_of_a_command(path: Path) -> list[str]:
    """
    Messages of the library name arguments as in Python; `cli` writes options in their place. A command to run, such as
    `dflash eval --raw`, may be named.
    """
    tree = tree_of(path)
    is_described = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, is_described)}
    violations = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        text = ast.unparse(node) if isinstance(node, ast.JoinedStr) else node.value
        if not isinstance(text, str) or text in docstrings or "`dflash " in text or "pip install" in text:
            continue
        options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)
        if options and not _is_in_a_command(node, tree):
            violations.append(f"line {node.lineno}: write `argument=value` for {options[0]}")
    return violations


def _is_in_a_command(node: ast.AST, tree: ast.Module) -> bool:
    """Whether a string is a part of a longer one that names a command."""
    longer = [other for other in ast.walk(tree) if isinstance(other, ast.JoinedStr) and other is not node]
    return any("`dflash " in ast.unparse(other) and node in ast.walk(other) for other in longer)


PACKAGE = sorted(SOURCE.rglob("*.py"))
# The folders whose messages name no options; some messages of the others still do.
WITHOUT_OPTIONS = {"targets", "pairs", "layouts", "decoding", "conversion", "data", "evaluation", "synthetic"}
RULES = {
    imports_only_declared_requirements: LIBRARY,
    imports_only_what_remote_code_may: REMOTE_CODE,
    relative_imports_are_found_by_scanners: REMOTE_CODE,
    imports_only_torch: [SOURCE / "training" / f"{name}.py" for name in ("blocks", "losses", "metrics")],
    does_not_import_the_command_line: LIBRARY,
    imports_folders_as_parts_of_the_package: EVERYTHING,
    imports_are_absolute: PACKAGE,
    imports_only_allowed_folders: [path for path in PACKAGE if path != SOURCE / "cli.py"],
    shared_folder_imports_only_listed_names: [path for path in PACKAGE if path.parent.name in SHARED_FOLDERS],
    does_not_import_other_tests: EVERYTHING,
    has_one_statement_per_line: EVERYTHING,
    names_say_what_variables_hold: EVERYTHING,
    names_no_option_of_a_command: [path for path in PACKAGE if path.parent.name in WITHOUT_OPTIONS],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_file_keeps_the_rule(rule):
    assert RULES[rule]
    violations = {name_of(path): rule(path) for path in RULES[rule]}
    assert not {name: in_file for name, in_file in violations.items() if in_file}


def test_root_holds_only_what_users_import():
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "cli.py", "drafter.py", "smollm2.py"}


def test_allowed_imports_have_no_cycle():
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(FOLDERS)
    graphlib.TopologicalSorter(FOLDERS).prepare()  # raises if there is a cycle


def test_allowed_imports_are_made():
    """A permission that nobody uses would let a new import pass unseen."""
    unused = {}
    for folder, allowed in FOLDERS.items():
        imported = set()
        for path in (SOURCE / folder).rglob("*.py"):
            imported |= {name.partition(".")[0] for name in ours(path)}
        unused[folder] = allowed - imported
    assert not {folder: names for folder, names in unused.items() if names}


def test_remote_code_is_in_one_folder():
    """transformers' loader finds only files beside each other."""
    assert all(path.parent == MODELING for path in REMOTE_CODE)


def test_no_file_names_a_machine():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of tracked files")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    # In two parts, so that this file does not find itself.
    forbidden = ["/wo" + "rk/", "/.lib" + "rary", "/ro" + "ot/", "/opt/wh" + "eels"]
    violations = []
    for path in [ROOT / name for name in listed if name]:
        if path.is_file():
            text = path.read_bytes().decode("utf-8", errors="ignore")
            violations += [f"{name_of(path)}: {words}" for words in forbidden if words in text]
    assert not violations
