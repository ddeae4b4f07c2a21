"""The pair that is taken where none is named: SmolLM2-135M-Instruct, and the drafter that comes along."""

import importlib.util
from pathlib import Path

from dflash_hf.demo.smollm2 import smollm2_folder


def default_pair() -> tuple[Path, Path]:
    """
    Folders of target and drafter.

    Raises:
        `FileNotFoundError`: one of them is not here.
    """
    examples = importlib.util.find_spec("dflash_hf.examples").submodule_search_locations
    draft = next((Path(place) / "smollm2-135m-dflash" for place in examples), None)
    if draft is None or not (draft / "config.json").is_file():
        raise FileNotFoundError("the drafter of SmolLM2-135M is not here; name a pair with --target and --draft.")
    return smollm2_folder(), draft
