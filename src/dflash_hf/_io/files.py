"""Files that are complete or absent, with one writer at a time, and digests of contents."""

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
    A path next to `path` to write to, which replaces `path` when the block ends; after an exception, Ctrl-C included,
    it is removed and `path` is unchanged.
    """
    half = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.half")
    try:
        yield half
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    """Write a JSON file atomically."""
    with atomic(path) as half:
        half.write_text(json_text(value) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> dict:
    """
    The JSON object in a file.

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
    """A value as JSON. Numbers that are not finite, which JSON does not have, become null; unknown objects text."""
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
    """The error for a file in another encoding."""
    with open(path, "rb") as file:
        encoding = "UTF-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "LATIN1"
    return f"Line {line} of {path} is not UTF-8; convert the file: iconv -f {encoding} -t UTF-8 {path} > converted"


def digest_of(value) -> str:
    """A digest of a text or any JSON value: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 22), b""):
            digest.update(chunk)
    return digest.hexdigest()


def differences(before: dict, now: dict) -> list[str]:
    """Values that differ between `before` and `now`, in words; names that only one of them has are ignored."""
    return [
        f"{name}={before[name]!r}, not {value!r}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """
    Exclusive write access to a file or to a folder that exists, by a hidden file beside it or in it, which is there
    as long as it is held; a killed process holds nothing.

    Raises:
        `ValueError`: another process writes there.
    """
    real = path.resolve()  # whatever its links are called
    file = real / LOCK_FILE if real.is_dir() else real.with_name(f".{real.name}{LOCK_FILE}")
    lock = FileLock(file, timeout=0, fallback_to_soft=False)  # a soft lock outlives a killed process
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"{path} is being written by another process; wait for it, or stop it.") from error
    except PermissionError:
        raise
    except OSError as error:  # of a network file system without locks
        from transformers.utils import logging

        logging.get_logger(__name__).warning(
            f"{path} cannot be locked ({error.strerror}): make sure that no other process writes to it."
        )
    try:
        yield
    finally:
        with suppress(PermissionError):  # Windows keeps a file that is open
            file.unlink(missing_ok=True)  # first: nobody holds a file without a name
        lock.release()


def default_cache_dir() -> Path:
    """`$DFLASH_HF_HOME`, else `$XDG_CACHE_HOME/dflash_hf`, else `~/.cache/dflash_hf`."""
    home = os.environ.get("DFLASH_HF_HOME")
    if home:
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dflash_hf"
