"""Target and drafter by name: from the arguments of a command, or of a trainer."""

from pathlib import Path

import torch


def load_target(arguments):
    """
    The target of a command, ready to decode.

    Args:
        arguments: With `target`, a folder or a name on the Hub; `dtype`; and `device`, by default a GPU if any.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(arguments.target, **_loading(arguments)).eval()


def load_pair(arguments) -> tuple:
    """[`load_target`] and the drafter that `arguments.draft` names, or `None`."""
    from dflash_hf.modeling.modeling_dflash import DFlashDraftModel

    target = load_target(arguments)
    if not arguments.draft:
        return target, None
    return target, DFlashDraftModel.from_pretrained(arguments.draft, **_loading(arguments)).eval()


def loaded(model, target) -> tuple:
    """Drafter, in fp32 to be trained, and target; those that are a folder or a name on the Hub are loaded."""
    from transformers import AutoModelForCausalLM

    from dflash_hf.modeling.modeling_dflash import DFlashDraftModel

    if isinstance(model, str | Path):
        model = DFlashDraftModel.from_pretrained(model, dtype=torch.float32)
    if isinstance(target, str | Path):
        target = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    return model, target


def _loading(arguments) -> dict:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return {"dtype": arguments.dtype, "device_map": device}
