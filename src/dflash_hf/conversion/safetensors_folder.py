"""Writing a drafter's folder without `save_pretrained`, which knows the published layout only."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from dflash_hf._io.files import write_json


def save_folder(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a new folder with a drafter's `config.json` and all its weights in one file; returns it."""
    folder.mkdir()
    write_json(folder / "config.json", dict(sorted(config.items())))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
