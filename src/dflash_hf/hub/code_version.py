"""Versions of the code that is published beside a drafter's weights."""

from collections.abc import Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

from dflash_hf.modeling.modeling_dflash import code_files


# What older code beside the weights does wrong, by the version without the defect.
DEFECTS = {
    "0.1.1": "transformers 5.24 fails with a KeyError",
    "0.3.0": "targets with recurrent layers keep the graph of every round",
}
PACKAGE_MODEL = "modeling_dflash.DFlashDraftModel"  # `auto_map["AutoModel"]` of drafters with this package's code
FIRST_VERSION = "0.1.0"  # of drafters that name no version


def uses_package_code(config: Mapping) -> bool:
    """Whether a `config.json` names this package's code as the drafter's own."""
    auto_map = config.get("auto_map")
    return isinstance(auto_map, dict) and auto_map.get("AutoModel") == PACKAGE_MODEL


def version_of(config: Mapping) -> str:
    """The version of the code beside the weights that a `config.json` names; drafters of 0.1.0 name none."""
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
    """What the code of a version does wrong that later versions do right."""
    return [defect for fixed_in, defect in DEFECTS.items() if is_older(version, than=fixed_in)]


def _parsed(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return Version("0.dev0")
