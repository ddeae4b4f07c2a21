"""The code that is published beside a drafter's weights: its files, its version, and defects of older versions."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

from dflash_hf import __version__
from dflash_hf.hub.commits import PublishError
from dflash_hf.modeling.modeling_dflash import code_files


CODE_MODULES = "*_dflash.py"  # pattern of the modules
CODE_ENTRY = "custom_generate/generate.py"
# Defects of older code beside the weights, by the version that fixed them.
DEFECTS = {
    "0.1.1": "transformers 5.24 fails with a KeyError",
    "0.3.0": "targets with recurrent layers keep the graph of every round",
}
PACKAGE_MODEL = "modeling_dflash.DFlashDraftModel"  # `auto_map["AutoModel"]` of drafters with this package's code
FIRST_VERSION = "0.1.0"  # the code of a drafter that names no version


def uses_package_code(config: Mapping) -> bool:
    """Whether a `config.json` names this package's code as the drafter's own."""
    auto_map = config.get("auto_map")
    return isinstance(auto_map, dict) and auto_map.get("AutoModel") == PACKAGE_MODEL


def version_of(config: Mapping) -> str:
    """The version of the code beside the weights, as `config.json` names it; version 0.1.0 did not write any."""
    return str(config.get("dflash_hf_version") or FIRST_VERSION)


def is_older(version: str, than: str) -> bool:
    """Whether a version comes before another, `0.3.0.dev0` before `0.3.0`; one that cannot be read comes first."""
    return _parsed(version) < _parsed(than)


def is_current(folder: Path) -> bool:
    """Whether the code in a drafter's folder is this package's, byte for byte, whatever version is named."""
    for name, current_file in code_files().items():
        published_file = folder / name
        if not published_file.is_file() or published_file.read_bytes() != current_file.read_bytes():
            return False
    return True


def defects_of(version: str) -> list[str]:
    """Defects of the code of a version that later versions fixed."""
    return [defect for fixed_in, defect in DEFECTS.items() if is_older(version, than=fixed_in)]


def check_not_newer(config: dict, where: str | Path) -> None:
    """
    Check that this package's code would not replace newer code.

    Raises:
        `PublishError`: a drafter has code of a newer version than this package.
    """
    version = version_of(config)
    if is_older(__version__, than=version):
        raise PublishError(f"{where} has code of {version}; this is {__version__}: install the newer version.")


def with_version(text: str) -> str:
    """The text of a `config.json` with this package's version in it; its formatting is kept where possible."""
    config = json.loads(text)
    expected = {**config, "dflash_hf_version": __version__}
    entry = f'"dflash_hf_version": {json.dumps(__version__)}'
    if "dflash_hf_version" in config:
        edited = re.sub(r'"dflash_hf_version":\s*("[^"]*"|null)', entry, text, count=1)
    else:
        edited = text.replace("{", "{\n  " + entry + ",", 1)
    try:
        is_expected = json.loads(edited) == expected
    except ValueError:  # an object that was empty
        is_expected = False
    return edited if is_expected else json.dumps(expected, indent=2) + "\n"


def _parsed(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return Version("0.dev0")
