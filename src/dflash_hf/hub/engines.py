"""
The versions of the engines that a drafter is checked for: the version that the user named, else the installed one,
else the newest of `CHECKED_VERSIONS` in `limits`. A version newer than all of these is checked as the newest, with a
warning.
"""

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from dflash_hf._io.names import ENGINES, LLAMA_CPP
from dflash_hf.hub.limits import CHECKED_VERSIONS


@dataclass(frozen=True)
class EngineVersion:
    """
    The version of an engine that a drafter is checked for.

    Args:
        engine (`str`): `"vllm"`, `"sglang"` or `"transformers"`.
        version (`str`): The version.
        source (`str`): Why this version: `"named"` by the user, `"installed"`, or `"newest checked"` where the engine
            is not installed.
    """

    engine: str
    version: str
    source: str

    @property
    def checked_as(self) -> str:
        """The version whose limits apply: this one, or the newest of `CHECKED_VERSIONS` if this one is newer."""
        newest = CHECKED_VERSIONS[self.engine][-1]
        return newest if self.is_newer else min(self.version, newest, key=Version)

    @property
    def is_newer(self) -> bool:
        """Whether it was released after all of `CHECKED_VERSIONS`; builds of the newest of them are not newer."""
        return _release(self.version) > Version(CHECKED_VERSIONS[self.engine][-1])

    @property
    def is_older(self) -> bool:
        """Whether it was released before every version of `CHECKED_VERSIONS`."""
        return _release(self.version) < Version(CHECKED_VERSIONS[self.engine][0])

    @property
    def warning(self) -> str | None:
        """A sentence about a version whose limits are not known; `None` for a version whose limits are."""
        oldest = CHECKED_VERSIONS[self.engine][0]
        newest = CHECKED_VERSIONS[self.engine][-1]
        known_versions = f"{oldest} to {newest}, whose limits are known"
        version = f"{self.engine} {self.version} ({self.source})"
        if self.is_newer:
            return f"{version} is newer than {known_versions}; it is checked as {newest}."
        if self.is_older:
            return f"{version} is older than {known_versions}; it may have more."
        return None

    def __str__(self) -> str:
        if self.source == "newest checked":
            return f"{self.engine} {self.version} (not installed: the newest known)"
        return f"{self.engine} {self.version} ({self.source})"


def split_engine(engine: str) -> tuple[str, str | None]:
    """
    Split an engine as the user names it, `"vllm"` or `"vllm==0.26.0"`, into its name and the version, if there is one.

    Raises:
        `ValueError`: an unknown engine, or something that is not a version of it.
    """
    name, equals, version = engine.partition("==")
    if name not in (*ENGINES, LLAMA_CPP):
        raise ValueError(f"engine={engine!r} is unknown; choose from {', '.join((*ENGINES, LLAMA_CPP))}.")
    if not equals:
        return name, None
    if name == LLAMA_CPP:
        raise ValueError(
            f"engine={engine!r}: the limits of {LLAMA_CPP} have no versions; leave out {equals}{version}."
        )
    try:
        return name, str(Version(version))
    except InvalidVersion as error:
        raise ValueError(f"engine={engine!r}: {version!r} is not a version; write e.g. {name}==1.2.3.") from error


def engine_versions(engines: Iterable[str]) -> list[EngineVersion]:
    """
    The versions that a drafter is checked for.

    Args:
        engines (`Iterable[str]`): Engines, each with or without a version (`"vllm==0.26.0"`). llama.cpp is left out:
            its limits have no versions.

    Raises:
        `ValueError`: an unknown engine, or something that is not a version of it.
    """
    versions = []
    for engine in engines:
        name, named_version = split_engine(engine)
        if name == LLAMA_CPP:
            continue
        installed = _installed_version(name)
        if named_version is not None:
            version = EngineVersion(name, named_version, "named")
        elif installed is not None:
            version = EngineVersion(name, installed, "installed")
        else:
            version = EngineVersion(name, CHECKED_VERSIONS[name][-1], "newest checked")
        versions.append(version)
    return versions


def _installed_version(engine: str) -> str | None:
    """The version of an engine that is installed in this environment; `None` if it is unknown."""
    try:
        return str(Version(importlib.metadata.version(engine)))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion, TypeError):
        return None


def _release(version: str) -> Version:
    """A version without pre-release and build suffixes: `0.33.0` for `0.33.0rc1` and `0.33.0+cu130`."""
    return Version(Version(version).base_version)
