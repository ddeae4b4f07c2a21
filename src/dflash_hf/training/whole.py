"""Whether the files of a checkpoint are whole, asked before the target is run rather than told by torch's reader."""

import json
import zipfile
from pathlib import Path


_ARCHIVES = ("*.pt", "*.pth", "*.bin")


def check_whole(checkpoint: str | Path) -> None:
    """
    Open each file of a checkpoint as far as its table of contents.

    Args:
        checkpoint (`str` or `Path`): A folder `checkpoint-N`.

    Raises:
        `FileNotFoundError`: there is no such folder.
        `ValueError`: a file of it was cut off; names it, and the checkpoint before.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise FileNotFoundError(f"resume_from_checkpoint={checkpoint}: there is no such folder.")
    for pattern in _ARCHIVES:
        for path in sorted(folder.glob(pattern)):
            if not zipfile.is_zipfile(path):
                raise ValueError(_damaged(path))
    for path in sorted(folder.glob("*.safetensors")):
        from dflash_hf.modeling.checkpoint_dflash import read_header

        try:
            read_header(str(path))
        except (ValueError, OSError) as error:
            raise ValueError(_damaged(path)) from error
    for path in sorted(folder.glob("trainer_state.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(_damaged(path)) from error


def _damaged(path: Path) -> str:
    number = _number(path.parent)
    before = [one for one in path.parent.parent.glob("checkpoint-*") if one.is_dir() and _number(one) < number]
    earlier = max(before, key=_number, default=None)
    remedy = f"go on from {earlier} (resume_from_checkpoint={earlier})" if earlier else "start the run anew"
    return f"{path} is cut off or damaged: remove {path.parent}, and {remedy}."


def _number(folder: Path) -> int:
    tail = folder.name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0
