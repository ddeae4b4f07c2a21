"""Checks that the files of a checkpoint are complete, before the target is run."""

import json
from pathlib import Path

from transformers.utils import logging

from dflash_hf.files import write_json


logger = logging.get_logger(__name__)
FILES = "files.json"  # written last into a checkpoint: the sizes of its files


def seal(folder: Path) -> None:
    """Write the sizes of a checkpoint's files into it, for [`check_whole`]."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILES)
    write_json(folder / FILES, {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths})


def check_whole(checkpoint: str | Path) -> None:
    """
    Compare the files of a checkpoint with those it was saved with. A checkpoint of another trainer has no list of them
    and is not checked.

    Args:
        checkpoint (`str` or `Path`): A folder `checkpoint-N`.

    Raises:
        `FileNotFoundError`: there is no such folder.
        `ValueError`: a file is missing or has another size; names it, and the previous checkpoint.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise FileNotFoundError(f"resume_from_checkpoint={checkpoint}: there is no such folder.")
    if (damage := _damage(folder)) is not None:
        earlier = next((one for one in checkpoints_of(folder.parent) if _number(one) < _number(folder)), None)
        remedy = f"resume from {earlier} (resume_from_checkpoint={earlier})" if earlier else "start the run over"
        raise ValueError(f"{damage}: remove {folder}, and {remedy}.")


def last_whole_checkpoint(folder: Path) -> str | None:
    """
    The last complete checkpoint of a run; warns about damaged later checkpoints.

    Raises:
        `ValueError`: there are checkpoints, but none is complete; names a file.
    """
    damage = None
    for checkpoint in checkpoints_of(folder):
        if (damage := _damage(checkpoint)) is None:
            return str(checkpoint)
        logger.warning(f"{damage}: trying the previous checkpoint.")
    if damage is not None:
        raise ValueError(
            f"{damage}, and no other checkpoint is complete: start the run over (overwrite_output_dir=true)."
        )
    return None


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints of a run, latest first."""
    found = [one for one in folder.glob("checkpoint-*") if one.is_dir() and _number(one)]
    return sorted(found, key=_number, reverse=True)


def _damage(folder: Path) -> str | None:
    listed = folder / FILES
    if not listed.is_file():
        return None
    try:
        for name, size in json.loads(listed.read_text(encoding="utf-8")).items():
            path = folder / name
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != (size[0] if isinstance(size, list) else size):  # with a digest, in 0.1.0
                return f"{path} is cut off or damaged"
    except (ValueError, TypeError, AttributeError):
        return f"{listed} is cut off or damaged"
    return None


def _number(folder: Path) -> int:
    tail = folder.name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0
