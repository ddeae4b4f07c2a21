"""
Results for this machine, kept on disk for later processes: the cost of rounds, how a target is rolled back.

Small JSON files in `$DFLASH_HF_HOME`, else `$XDG_CACHE_HOME/dflash_hf`, else `~/.cache/dflash_hf`; each contains its
key. They only save time: a file that is missing, damaged or for another key is ignored, and a file that cannot be
written is skipped. `DFLASH_HF_REMEMBER=0` disables reading and writing.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path


def default_cache_dir() -> Path:
    """`$DFLASH_HF_HOME`, else `$XDG_CACHE_HOME/dflash_hf`, else `~/.cache/dflash_hf`."""
    if home := os.environ.get("DFLASH_HF_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dflash_hf"


def _path(kind: str, key: dict) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return default_cache_dir() / kind / f"{digest}.json"


def read(path: Path) -> dict | None:
    """The content of a file, `{"key": ..., "found": ...}`; `None` if it is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and {"key", "found"} <= content.keys():
            return content
    return None


def recall(kind: str, key: dict):
    """The stored result for `key`, or `None`."""
    if os.environ.get("DFLASH_HF_REMEMBER") == "0":
        return None
    with contextlib.suppress(RuntimeError):  # no home directory
        content = read(_path(kind, key))
        if content is not None and content["key"] == json.loads(json.dumps(key)):
            return content["found"]
    return None


def remember(kind: str, key: dict, found) -> None:
    """Store a result for later processes, atomically."""
    if os.environ.get("DFLASH_HF_REMEMBER") == "0":
        return
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({"key": key, "found": found}, file, indent=1)
            os.replace(name, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


def remembered(kind: str) -> list[Path]:
    """The files of a kind."""
    return sorted((default_cache_dir() / kind).glob("*.json"))
