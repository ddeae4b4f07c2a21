"""Atomic writes, locks, JSON and text files with clear errors, and digests."""

import codecs
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dflash_hf._io.errors import one_line


LOCK_FILE = ".lock"


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """
    A temporary path next to `path` to write to. At the end of the block it replaces `path`, or the file that `path` is
    a link to; after an exception, Ctrl-C included, it is removed, and `path` is unchanged.
    """
    path = path.resolve()
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.half")
    try:
        yield temporary_path
        temporary_path.replace(path)
    finally:
        temporary_path.unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    """Write a JSON file atomically."""
    with atomic(path) as temporary_path:
        temporary_path.write_text(json_text(value) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> dict:
    """
    Read a file that holds a JSON object.

    Raises:
        `ValueError`: it holds something else, or cannot be read.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be a configuration.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {one_line(error)}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must contain one JSON object.")
    return value


def json_text(value) -> str:
    """A value as JSON text. Numbers that are not finite, which JSON lacks, become null, and unknown objects text."""
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
    return json.dumps(plain, indent=1, allow_nan=False)


def read_text(path: Path) -> str:
    """
    A text file in UTF-8, with or without a byte order mark.

    Raises:
        `ValueError`: it has another encoding; names file and line.
    """
    content = Path(path).read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(path, content.count(b"\n", 0, error.start) + 1)) from error


def not_utf8(path, line: int) -> str:
    """The message of the error for a file in another encoding, with the command that converts it."""
    with open(path, "rb") as file:
        encoding = "UTF-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "LATIN1"
    return f"Line {line} of {path} is not UTF-8; convert the file: iconv -f {encoding} -t UTF-8 {path} > converted"


def digest_of(value) -> str:
    """A digest of a text or another JSON value: the first 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 22), b""):
            digest.update(chunk)
    return digest.hexdigest()


def differences(before: dict, now: dict) -> list[str]:
    """Values that differ between `before` and `now`, as `name=old, not new`; names in only one of them are ignored."""
    return [
        f"{name}={before[name]!r}, not {value!r}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """
    Exclusive write access to a file, or to an existing folder, for the time of the block. The lock is a hidden file
    beside the file or in the folder, which is removed at the end; the lock of a killed process is released.

    Raises:
        `ValueError`: another process holds the lock.
    """
    real = path.resolve()  # two links to one file share its lock
    file = real / LOCK_FILE if real.is_dir() else real.with_name(f".{real.name}{LOCK_FILE}")
    lock = FileLock(file, timeout=0, fallback_to_soft=False)  # a soft lock outlives a killed process
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"{path} is being written by another process; wait for it, or stop it.") from error
    except PermissionError:
        raise
    except OSError as error:  # network file systems without locks
        from transformers.utils import logging

        logging.get_logger(__name__).warning(
            f"{path} cannot be locked ({error.strerror}): make sure that no other process writes to it."
        )
    try:
        yield
    finally:
        with suppress(PermissionError):  # Windows keeps a file that is open
            # Removed while the lock is held. A process that is waiting for this file then locks a file without a name,
            # which filelock (4.0 and newer) notices after locking, and starts again with a new file.
            file.unlink(missing_ok=True)
        lock.release()


def default_cache_dir() -> Path:
    """`$DFLASH_HF_HOME`, else `$XDG_CACHE_HOME/dflash_hf`, else `~/.cache/dflash_hf`."""
    home = os.environ.get("DFLASH_HF_HOME")
    if home:
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dflash_hf"
