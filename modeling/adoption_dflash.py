"""
Assistants of other classes: an object of the published remote class is adopted without copying weights; a language
model that was loaded from a drafter's folder by mistake is rejected.
"""

import weakref

import torch
from torch import nn

from .configuration_dflash import DFlashDraftConfig
from .layouts_dflash import canonical_name, is_drafter_config, is_left_out
from .modeling_dflash import DFlashDraftModel


_PARTS = ("fc", "hidden_norm", "layers", "norm", "target_layer_ids", "block_size")
_adopted: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()  # foreign object -> our drafter with its tensors


def adopted(assistant) -> DFlashDraftModel | None:
    """
    A drafter with the tensors of a foreign DFlash object; `None` if the object is not a drafter.

    Raises:
        `ValueError`: the object was built from a drafter's folder, but is not a drafter; says how to load one.
    """
    if not isinstance(assistant, nn.Module) or not hasattr(getattr(assistant, "config", None), "to_dict"):
        return None
    config = assistant.config.to_dict()
    if not all(hasattr(assistant, part) for part in _PARTS):
        if config.get("dflash_config") is None:
            return None
        raise ValueError(
            f"assistant_model is a {type(assistant).__name__} built from a DFlash drafter's folder: its embeddings "
            "are random, and it reads none of the target's features. Load the drafter with "
            "`DFlashDraftModel.from_pretrained(folder)`, or with `AutoModel.from_pretrained(folder)` after "
            "`import dflash_hf`."
        )
    if not is_drafter_config(config):
        return None
    ours = _adopted.get(assistant)
    # Moving or casting a model replaces its tensors.
    if ours is None or ours.fc.weight.data_ptr() != assistant.fc.weight.data_ptr():
        ours = _adopted[assistant] = adopt(assistant)
    return ours


def adopt(assistant: nn.Module) -> DFlashDraftModel:
    """
    A [`DFlashDraftModel`] that shares the memory of a foreign DFlash object's parameters.

    Args:
        assistant (`nn.Module`): Has `config`, `target_layer_ids`, `block_size` and tensors of a published layout.

    Raises:
        `ValueError`: its tensors do not match its configuration, or are ordered differently.
    """
    # 1. Attributes of the live object override its configuration.
    live = {"target_layer_ids": list(assistant.target_layer_ids), "block_size": int(assistant.block_size)}
    config = DFlashDraftConfig.from_dict(assistant.config.to_dict(), **live)
    if config.interleaved_rotary:
        raise ValueError(
            f"assistant_model, a {type(assistant).__name__}, has rope_is_neox_style=False: its query and key weights "
            "must be permuted, but an adopted drafter shares them. Load it with "
            "`DFlashDraftModel.from_pretrained(folder)`."
        )

    # 2. Our class with the same tensors.
    tensors = {canonical_name(name): tensor for name, tensor in assistant.state_dict().items()}
    kept = {name: tensor for name, tensor in tensors.items() if not is_left_out(name, None, config.has_own_head)}
    try:
        return of_tensors(config, kept)
    except RuntimeError as error:
        raise ValueError(f"assistant_model, a {type(assistant).__name__}, cannot be adopted: {error}") from error


def of_tensors(config: DFlashDraftConfig, tensors: dict[str, torch.Tensor]) -> DFlashDraftModel:
    """
    A frozen drafter with these tensors, which are not copied.

    Raises:
        `RuntimeError`: they do not match `config`.
    """
    with torch.device("meta"):
        draft = DFlashDraftModel(config)
    draft.load_state_dict(tensors, assign=True)
    for name in ("rotary_emb", "context_rotary_emb"):  # not stored
        table = getattr(draft, name)
        if table is not None:
            setattr(draft, name, type(table)(table.config).to(draft.fc.weight.device))
    return draft.requires_grad_(False).eval()
