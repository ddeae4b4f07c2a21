"""
Which version of an engine a drafter is checked for: one that was named, else the installed one, else the newest that
the limits were read in.

The limits stand in `limits`, each with the versions that it holds for. `READ` lists the versions in whose source they
were read: all of them in the newest, and where each begins or ends in the others. A version newer than all of them is
checked as the newest, and a warning says so.
"""

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dflash_hf._io.names import ENGINES, LLAMA_CPP


# The versions of each engine whose source was read, oldest first.
READ = {
    "vllm": (
        "0.20.2",
        "0.22.0",
        "0.23.0",
        "0.24.0",
        "0.25.1",
        "0.26.0",
        "0.27.1",
        "0.28.0",
        "0.30.0",
        "0.31.0",
        "0.32.0",
        "0.33.0",
    ),
    "sglang": (
        "0.5.11",
        "0.5.12",
        "0.5.14",
        "0.5.15",
        "0.5.16",
        "0.5.17",
        "0.5.18",
        "0.5.19",
        "0.5.20",
        "0.5.23",
    ),
    "transformers": ("5.20.0", "5.24.0"),
}


@dataclass(frozen=True)
class EngineVersion:
    """
    The version of an engine that a drafter is checked for.

    Args:
        engine (`str`): `"vllm"`, `"sglang"` or `"transformers"`.
        version (`str`): The version.
        origin (`str`): `"named"`, `"installed"` or `"not installed"`, where the version is the newest of `READ`.
    """

    engine: str
    version: str
    origin: str

    @property
    def checked_as(self) -> str:
        """The version whose limits apply: this one, or the newest of `READ` if this one is newer."""
        newest = READ[self.engine][-1]
        return newest if self.is_newer else min(self.version, newest, key=Version)

    @property
    def is_newer(self) -> bool:
        """Whether it was released after every version of `READ`; builds of the same release are not newer."""
        return _release(self.version) > Version(READ[self.engine][-1])

    @property
    def is_older(self) -> bool:
        """Whether it was released before every version of `READ`."""
        return _release(self.version) < Version(READ[self.engine][0])

    @property
    def warning(self) -> str | None:
        """What the limits do not know of it, in a sentence; `None` if its version is within those that were read."""
        oldest = READ[self.engine][0]
        newest = READ[self.engine][-1]
        read = f"{oldest} to {newest}, whose limits are known"
        if self.is_newer:
            return f"{self.engine} {self.version} ({self.origin}) is newer than {read}; it is checked as {newest}."
        if self.is_older:
            return f"{self.engine} {self.version} ({self.origin}) is older than {read}; it may have more."
        return None

    def __str__(self) -> str:
        if self.origin == "not installed":
            return f"{self.engine} {self.version} (not installed: the newest known)"
        return f"{self.engine} {self.version} ({self.origin})"


def split_engine(engine: str) -> tuple[str, str | None]:
    """
    An engine as the user names it, `"vllm"` or `"vllm==0.26.0"`: its name, and the version if there is one.

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
            version = EngineVersion(name, READ[name][-1], "not installed")
        versions.append(version)
    return versions


def holds_for(version: str, specifier: str) -> bool:
    """Whether a version is in a range such as `">=0.25,<0.28"`; release candidates and nightly builds count."""
    return SpecifierSet(specifier).contains(version, prereleases=True)


def _installed_version(engine: str) -> str | None:
    """The version of an engine in this environment, if it is there and says which it is."""
    try:
        return str(Version(importlib.metadata.version(engine)))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion, TypeError):
        return None


def _release(version: str) -> Version:
    """A version without what marks its builds: `0.33.0` for `0.33.0rc1` and `0.33.0+cu130`."""
    return Version(Version(version).base_version)
