"""
The pair that needs no Hub; its name is `smollm2` wherever a target or a drafter is named.

The target is SmolLM2-135M-Instruct, of [`~dflash_hf.pairs.packaged_targets.SMOLLM2`]. Its drafter is in `examples/`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dflash_hf.pairs.packaged_targets import PACKAGED_TARGETS, SMOLLM2


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dflash_hf.drafter import DFlashDraftModel


def smollm2_folder() -> Path:
    """
    The folder of SmolLM2-135M-Instruct, for `from_pretrained`.

    Raises:
        `FileNotFoundError`, `ImportError`, `ValueError`: as
            [`~dflash_hf.pairs.packaged_targets.PackagedTarget.folder`].
    """
    return SMOLLM2.folder()


def data_folder() -> Path:
    """The folder with the drafter's training answers and the held-out answers."""
    from dflash_hf import examples

    return Path(examples.__file__).parent / "smollm2-135m-dflash" / "data"


def drafter_folder() -> Path:
    """
    The folder of the bundled drafter.

    Raises:
        `FileNotFoundError`: its weights are missing.
    """
    folder = data_folder().parent
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"The drafter smollm2 is not in {folder}: install the package again.")
    return folder


def draft_folder_of(name: str | None) -> str | None:
    """
    A drafter's name, unchanged, or for `smollm2` the folder of the bundled drafter.

    Raises:
        `FileNotFoundError`: the name is that of a target in a package without a drafter.
    """
    if name is None or name not in PACKAGED_TARGETS or Path(name).exists():
        return name
    if name != SMOLLM2.name:
        raise FileNotFoundError(
            f'draft={name}: no drafter for it is published; train one as the guide "A second target" shows.'
        )
    return str(drafter_folder())


class LoadedPair(NamedTuple):
    """A target with its drafter, and its tokenizer."""

    target: "PreTrainedModel"
    draft: "DFlashDraftModel"
    tokenizer: "PreTrainedTokenizerBase"


def load_pair(dtype: str = "auto", draft: str | Path | None = None) -> LoadedPair:
    """
    The pair that needs no Hub, on the CPU.

    Args:
        dtype (`str`): Dtype of both models, as in [`~dflash_hf.pairs.loading.Loading`].
        draft (`str` or `Path`, *optional*): Another drafter's folder.

    Raises:
        `FileNotFoundError`: one of the models is missing; says how to get it.
    """
    from transformers import AutoTokenizer

    from dflash_hf.pairs.loading import Loading, load_draft, load_target

    folder = str(smollm2_folder())
    loading = Loading(dtype, device="cpu")
    draft = load_draft(str(draft or drafter_folder()), loading)
    return LoadedPair(load_target(folder, loading), draft, AutoTokenizer.from_pretrained(folder))
