"""The house: what a build holds, who may import whom, and that no function outgrows its page."""

import ast
import configparser
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
from collections.abc import Iterator
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

# The folders of src/dflash_hf and `doctor.py`, and which others each may import; all may import the ground floor. Of
# the other files only `cli` imports a wing.
GROUND = {"decoding", "layouts"}
WINGS: dict[str, set[str]] = {
    "decoding": set(),
    "layouts": set(),
    "data": set(),
    "evaluation": {"data"},
    "hub": {"evaluation"},
    "training": {"data", "evaluation", "hub"},
    "doctor": {"data", "evaluation", "training"},
    "demo": {"data", "evaluation", "training"},
    "serving": {"data", "evaluation"},
    "commands": {"data", "evaluation", "hub", "training", "doctor", "demo", "serving"},
}
MAX_LINES = 60
# Imported inside the functions that need them: `import dflash_hf` stays quick and works without the extras.
OPTIONAL = ("datasets", "peft", "matplotlib")
# Names on the package index that differ from the name to import.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def absolute_imports(tree: ast.AST) -> set[str]:
    """Dotted names of the modules that a tree imports absolutely: `a.b` for `import a.b` and `from a.b import c`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
    return names


def relative_imports(tree: ast.AST) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level > 0]


def third_party(names: set[str]) -> set[str]:
    """Normalised distribution names of imported modules, without the standard library and ourselves."""
    roots = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"dflash_hf"}
    return {DISTRIBUTIONS.get(root, root).replace("_", "-").lower() for root in roots}


def imports_module(path: Path, module: str) -> bool:
    """Whether a file imports the package's own `module`, in any spelling."""
    tree = tree_of(path)
    if any(f"{name}.".startswith(f"dflash_hf.{module}.") for name in absolute_imports(tree)):
        return True
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            ours = node.level > 0 or node.module == "dflash_hf"
            if ours and (node.module == module or module in [alias.name for alias in node.names]):
                return True
    return False


# ---------------------------------------------------------------------------------------------------------- packaging


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
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
    for folder in (MODELING, CARDS, EXAMPLES, ROOT / "tests"):
        shutil.copytree(folder, tree / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
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


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built):
    _, wheel = built
    expected = set()
    for folder, inside in ((SOURCE, "dflash_hf"), (MODELING, "dflash_hf/modeling"), (CARDS, "dflash_hf/hub_cards")):
        files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        expected |= {f"{inside}/{path.relative_to(folder).as_posix()}" for path in files}
    pair = ("smollm2*/*.json", "smollm2*/model.safetensors", "smollm2*/data/*")
    shipped = [path for one in ("*.py", "recipes/*", "accelerate/*", *pair) for path in EXAMPLES.glob(one)]
    expected |= {f"dflash_hf/examples/{path.relative_to(EXAMPLES).as_posix()}" for path in shipped}
    found = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    found = {name for name in found if ".dist-info/" not in name}
    assert found == expected, "declare new folders in `packages` and new data in `package_data` of setup.cfg"


def test_the_sdist_can_be_tested(built):
    sdist, _ = built
    for name in ("constraints.txt", "Makefile", "LICENSE", "setup.cfg", "tests/test_house.py"):
        assert (sdist / name).is_file(), name


def test_the_command_line_is_an_entry_point(built):
    _, wheel = built
    assert "dflash = dflash_hf.cli:main" in wheel_metadata(wheel, "entry_points.txt")


def test_the_wheel_imports_without_its_extras(built, tmp_path):
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


def test_the_citation_names_the_version(setup_cfg):
    version = setup_cfg["metadata"]["version"]
    assert f'\n__version__ = "{version}"\n' in (SOURCE / "__init__.py").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_commits_are_checked_by_the_ruff_of_ci():
    pinned = re.search(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"rev: v{pinned[1]}\n" in (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")


def test_every_public_name_has_its_page_in_the_documentation():
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    listed = [name for names in build.REFERENCE.values() for name in names]
    assert sorted(["__version__", *listed]) == sorted(dflash_hf.__all__)
    guides = {path.stem for path in (ROOT / "examples" / "guides").glob("*.md")} - {"README"}
    assert sorted(name for names in build.GUIDES.values() for name in names) == sorted(guides)


def test_the_floor_that_is_tested_is_the_declared_one(setup_cfg):
    floor = (ROOT / ".ci" / "floor.txt").read_text(encoding="utf-8")
    declared = re.findall(r"^(\S+)>=([\d.]+)$", setup_cfg["options"]["install_requires"], re.MULTILINE)
    assert declared and all(re.search(rf"^{name}=={version}\b", floor, re.MULTILINE) for name, version in declared)


def test_every_requirement_has_an_exact_pin(setup_cfg):
    """A forgotten pin would let CI drift, or let pip fetch a CUDA build of torch."""
    required = requirement_names(setup_cfg["options"]["install_requires"])
    for extra in setup_cfg["options.extras_require"].values():
        required |= requirement_names(extra)
    pins = re.findall(r"^([a-z0-9.-]+)==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert not required - set(pins), "add them to constraints.txt"


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_imports_are_declared(path, setup_cfg):
    """Imported with the module: a requirement. Imported inside a function: a requirement or one of the extras."""
    tree = tree_of(path)
    required = requirement_names(setup_cfg["options"]["install_requires"])
    optional = set().union(*map(requirement_names, setup_cfg["options.extras_require"].values()))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    at_import = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and id(node) not in inside]
    at_import = [node for node in at_import if isinstance(node, ast.Import | ast.ImportFrom)]
    assert third_party(absolute_imports(ast.Module(at_import, []))) <= required
    assert third_party(absolute_imports(tree)) <= required | optional


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documented_make_targets_exist(document):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE))
    assert named and named <= targets


# -------------------------------------------------------------------------------------------------------------- rooms


@pytest.mark.parametrize("path", REMOTE_CODE, ids=name_of)
def test_remote_code_imports_torch_transformers_and_its_own_folder(path):
    """
    These files are also loaded by `trust_remote_code=True`, where every absolute import becomes a requirement and
    relative imports are found by a regular expression: only the form with one dot and one name survives it.
    """
    tree = tree_of(path)
    assert third_party(absolute_imports(tree)) <= {"torch", "transformers", "safetensors"}
    assert not any(name.partition(".")[0] == "dflash_hf" for name in absolute_imports(tree))
    for node in relative_imports(tree):
        where = f"{name_of(path)}:{node.lineno}"
        assert node.level == 1 and node.module and "." not in node.module, f"{where}: write `from .x import y`"
        assert (path.parent / f"{node.module}.py").is_file(), f"{where}: no {node.module}.py beside this file"


@pytest.mark.parametrize("path", REMOTE_CODE, ids=name_of)
def test_remote_code_scanner_finds_what_python_imports(path):
    """`transformers` does not parse: a line of a docstring that reads like an import sends it after a missing file."""
    from transformers.dynamic_module_utils import get_relative_imports

    meant = {node.module for node in relative_imports(tree_of(path))}
    assert set(get_relative_imports(path)) == meant
    # Other scanners take any number of dots.
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"^\s*(?:from|import)\s+\.+\s*([\w.]*)\s*(?:import\b|$)", text, re.MULTILINE)) == meant


@pytest.mark.parametrize("name", ["blocks", "losses", "metrics"])
def test_the_maths_imports_torch_alone(name):
    tree = tree_of(SOURCE / "training" / f"{name}.py")
    assert third_party(absolute_imports(tree)) <= {"torch"}
    assert not any(imported.startswith("dflash_hf") for imported in absolute_imports(tree))
    assert not relative_imports(tree)


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_nobody_imports_the_command_line(path):
    # `__main__` is the entry point's other name.
    assert path.name == "__main__.py" or not imports_module(path, "cli")


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_modeling_is_never_a_top_level_package(path):
    tops = {name.partition(".")[0] for name in absolute_imports(tree_of(path))}
    assert not tops & {"modeling", "hub_cards", "src"}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=name_of)
def test_the_package_imports_absolutely(path):
    assert not relative_imports(tree_of(path)), "write `from dflash_hf.wing.room import name`"


def test_the_wings_have_an_order():
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(WINGS) - {"doctor"}
    graphlib.TopologicalSorter(WINGS).prepare()  # raises where there is a circle


@pytest.mark.parametrize("path", sorted(set(SOURCE.rglob("*.py")) - {SOURCE / "cli.py"}), ids=name_of)
def test_wings_import_one_way(path):
    here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    allowed = {here} | GROUND | WINGS.get(here, set())
    assert not [wing for wing in set(WINGS) - allowed if imports_module(path, wing)]


@pytest.mark.parametrize("path", sorted(path for one in GROUND for path in (SOURCE / one).glob("*.py")), ids=name_of)
def test_the_ground_floor_imports_modeling_alone(path):
    ours = {name for name in absolute_imports(tree_of(path)) if name.startswith("dflash_hf")}
    assert all(f"{name}.".startswith(("dflash_hf.modeling.", f"dflash_hf.{path.parent.name}.")) for name in ours)


def test_what_lies_beside_the_weights_is_read_in_one_sitting():
    files = [path for path in REMOTE_CODE if path.name != "__init__.py"]
    assert len(files) <= 13 and all(path.parent == MODELING for path in files)
    assert sum(len(code_of(path)) for path in files) <= 2200


def test_the_core_says_the_version(setup_cfg):
    text = (MODELING / "configuration_dflash.py").read_text(encoding="utf-8")
    assert f'\nVERSION = "{setup_cfg["metadata"]["version"]}"' in text


def test_no_test_file_imports_another():
    """Nor does a script that a test writes for a process of its own, except for the test itself."""
    names = {path.stem for path in (ROOT / "tests").rglob("test_*.py")} | {"conftest"}
    for path in EVERYTHING:
        found = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not names & set(found) - {path.stem}, f"{name_of(path)}: share it in tests/support"


def code_of(path: Path) -> set[int]:
    """The numbers of a file's lines that are neither blank nor comments nor docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = [node for node in ast.walk(tree_of(path)) if isinstance(node, kinds) and ast.get_docstring(node)]
    prose = {line for node in documented for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    return {number for number, line in lines if line.strip() and not line.strip().startswith("#")} - prose


def code_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of each function, its body without docstring, comments and blank lines."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = node.body[ast.get_docstring(node) is not None :][:1]
            body = lines[start[0].lineno - 1 : node.end_lineno] if start else []
            yield f"{name_of(path)}: {node.name}", sum(1 for line in body if line and not line.startswith("#"))


def test_a_function_fits_on_its_page():
    too_long = {name for path in LIBRARY for name, lines in code_lines(path) if lines > MAX_LINES}
    assert not too_long, f"split a function of more than {MAX_LINES} lines"


def test_no_file_names_the_machine_it_was_written_on():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of tracked files")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    # In two parts, so that this file does not find itself.
    forbidden = ["/wo" + "rk/", "/.lib" + "rary", "/ro" + "ot/", "/opt/wh" + "eels"]
    guilty = []
    for path in [ROOT / name for name in listed if name]:
        if path.is_file():
            text = path.read_bytes().decode("utf-8", errors="ignore")
            guilty += [f"{name_of(path)}: {words}" for words in forbidden if words in text]
    assert not guilty
