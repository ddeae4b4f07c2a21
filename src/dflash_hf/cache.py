"""The package's cache: folders that are complete or absent."""

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


_MANIFEST = "manifest.json"
_ABANDONED_SECONDS = 3600  # a temporary sibling this old was left by a killed process


class DamagedFolderError(ValueError):
    """A folder of the cache that has changed since it was written."""


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """
    A temporary sibling to write into. It replaces `folder` when the block ends; an exception, Ctrl-C included, removes
    it and leaves `folder` unchanged.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}-"
    for sibling in folder.parent.glob(f"{prefix}*"):
        if time.time() - sibling.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(sibling, ignore_errors=True)
    building = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        yield building
        _write_manifest(building)
        building.chmod(0o755)
        if folder.exists():
            with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as old:
                folder.rename(Path(old) / folder.name)
                building.rename(folder)
        else:
            building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _MANIFEST
    }


def _write_manifest(folder: Path) -> None:
    (folder / _MANIFEST).write_text(json.dumps(_files(folder), indent=1), encoding="utf-8")


def check_whole(folder: Path) -> None:
    """
    Compare a folder with its manifest.

    Raises:
        `FileNotFoundError`: the folder does not exist.
        [`DamagedFolderError`]: a file is missing, was added or has changed.
    """
    if not folder.exists():
        raise FileNotFoundError(folder)
    try:
        expected = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedFolderError(f"{folder} has no readable {_MANIFEST}") from error
    actual = _files(folder)
    if actual != expected:
        names = sorted(name for name in {*actual, *expected} if actual.get(name) != expected.get(name))
        raise DamagedFolderError(f"{folder}: {', '.join(names[:3])} missing or changed")
