"""Names of tensors in the files of other projects, and which tensors are not loaded."""

import re

from dflash_hf.layouts.all_layouts import layout_named
from dflash_hf.layouts.head_schemas import head_schemas


# Prefixes that trainers add to every name: the module that wraps the drafter.
_TRAINER_PREFIXES = {r"^(?:(?:logit_head|dflash_module|draft_model|model)\.)+": ""}
_ROTARY_TABLE = r"(?:^|\.)rotary_emb\."  # computed from the configuration


def tensor_names(config) -> dict[str, str]:
    """
    Regular expressions and replacements that turn the tensor names in a drafter's files into the published names, in
    order of application.

    Args:
        config (`DFlashDraftConfig`): The drafter's configuration, whose `source_layout` names the layout.
    """
    names = {**_TRAINER_PREFIXES, **layout_named(config.source_layout).tensor_names}
    for schema in head_schemas():
        names |= schema.tensor_names
    return names


def published_name(name: str, names: dict[str, str]) -> str:
    """The published name of a tensor, by the renamings of [`tensor_names`]."""
    for pattern, replacement in names.items():
        name = re.sub(pattern, replacement, name)
    return name


def is_ignored(name: str, config) -> bool:
    """
    Whether a tensor in a drafter's files is ignored: a rotary table, or a copy of the target's weights.

    Args:
        name (`str`): Published name.
        config (`DFlashDraftConfig`): The drafter's configuration.
    """
    if re.search(_ROTARY_TABLE, name):
        return True
    copies = layout_named(config.source_layout).ignored_target_tensors
    if copies is None or (config.has_own_lm_head and name in ("lm_head.weight", "d2t")):
        return False
    return re.search(copies, name) is not None
