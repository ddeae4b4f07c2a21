"""Checks of a pair's configurations, before any weights are read."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflash_hf._io.files import read_json
from dflash_hf._io.repositories import small_file
from dflash_hf.targets.config_fields import vocab_size_of


if TYPE_CHECKING:
    from dflash_hf.pairs.loading import Loading

# Fields whose defaults are a plain drafter's.
_PLAIN_BY_DEFAULT = (
    "draft_vocab_size",
    "sample_from_anchor",
    "conv_kernel_size",
    "attention_sink_bias",
    "attention_value_scale",
    "input_embedding_scale",
    "own_mask_embedding",
    "has_embed_tokens",
)


def read_config(name: str, argument: str, revision: str | None = None) -> dict:
    """
    The `config.json` of a model.

    Args:
        name (`str`): A folder, or a repository on the Hub.
        argument (`str`): The argument with its value, for messages.
        revision (`str`, *optional*): Branch, tag or commit of the repository.

    Raises:
        `OSError`: there is no such folder or repository, or the Hub cannot be reached.
        `ValueError`: it is not a model, `config.json` is damaged, or a local folder is given a revision.
    """
    path = small_file(name, argument, revision)
    if path.parent.is_file():
        raise ValueError(f"{argument} is a file; name the folder of the model.")
    if not path.is_file():
        raise ValueError(f"{argument}: the folder has no config.json; name a folder written by `save_pretrained`.")
    return read_json(path)


def check_pair_configs(target: str, draft: str | None, loading: "Loading", argument_format: str = "--{} {}") -> dict:
    """
    Check both configurations, before any weights are read.

    Args:
        target, draft (`str`): Their names.
        loading (`Loading`): Names the revisions.
        argument_format (`str`): Format of an argument and its value in messages.

    Returns:
        `dict`: The target's configuration.

    Raises:
        `ValueError`, `OSError`: as [`read_config`]; also if the two are swapped.
    """
    target_argument = argument_format.format("target", target)
    draft_argument = argument_format.format("draft", draft)
    config = read_config(target, target_argument, loading.revision)
    draft_config = None if draft is None else read_config(draft, draft_argument, loading.draft_revision)
    from dflash_hf.layouts.read import is_drafter_config

    if is_drafter_config(config):
        swapped = draft_config is not None and not is_drafter_config(draft_config)
        remedy = "target and drafter are swapped" if swapped else "name the model that it drafts for"
        raise ValueError(f"{target_argument} is a DFlash drafter: {remedy}.")
    if draft_config is not None:
        check_is_drafter(draft_config, draft_argument)
    return config


def check_is_drafter(config: dict, argument: str) -> None:
    """
    Raises:
        `ValueError`: the configuration, read by [`read_config`] as `argument`, is another model's.
    """
    from dflash_hf.layouts.read import is_drafter_config

    if not is_drafter_config(config):
        kind = ", ".join(map(str, config.get("architectures") or [config.get("model_type")]))
        raise ValueError(f"{argument} is not a DFlash drafter but {kind}; `dflash train` trains one.")


def check_token_id(token_id: int | None, config: dict, argument: str | None = None) -> None:
    """
    Raises:
        `ValueError`: the target's embedding has no such row.
    """
    rows = vocab_size_of(config)
    if token_id is not None and rows is not None and not 0 <= token_id < rows:
        argument = argument or f"--mask-token-id {token_id}"
        raise ValueError(f"{argument} is outside the target's embedding of {rows} rows, ids 0 to {rows - 1}.")


def incompatibilities(config, target: dict) -> Iterator[tuple[str, str]]:
    """
    Where a drafter shows that it belongs to another target: field, and reason.

    Args:
        config (`DFlashDraftConfig`): The drafter's configuration.
        target (`dict`): The target's, without that of other parts than its text; what it lacks is not compared.
    """
    sizes = {"target_hidden_size": "hidden_size", "num_target_layers": "num_hidden_layers", "vocab_size": "vocab_size"}
    for field, target_field in sizes.items():
        size = getattr(config, field)
        target_size = target.get(target_field)
        if size is not None and target_size is not None and size != target_size:
            reason = f"{size} is not the target's {target_field}={target_size}: the drafter belongs to another target."
            yield field, reason
    ids = config.target_layer_ids
    if max(ids) >= (target.get("num_hidden_layers") or math.inf):
        yield "target_layer_ids", f"{ids} reach past the target's {target['num_hidden_layers']} layers."
    if config.mask_token_id >= (target.get("vocab_size") or math.inf):
        yield "mask_token_id", f"{config.mask_token_id} is not one of the target's {target['vocab_size']} ids."


def non_default_fields(config) -> Iterator[tuple[str, object, object]]:
    """
    What a drafter has beyond bidirectional Qwen3-style layers with the target's embedding and head: field, value, and
    the value without it.

    Args:
        config (`DFlashDraftConfig`): The drafter's configuration.
    """
    defaults = dict(config.token_head_class.fields)
    defaults |= {name: getattr(type(config), name) for name in _PLAIN_BY_DEFAULT}
    defaults |= {"v_head_dim": config.head_dim, "target_hidden_size": config.hidden_size}
    for key, default in defaults.items():
        value = getattr(config, key)
        if value != default:
            yield key, value, default
    rope = config.rope_parameters
    if config.backbone_rotary_base not in (None, rope["rope_theta"]):
        yield "backbone_rotary_base", config.backbone_rotary_base, rope["rope_theta"]
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor", rope["partial_rotary_factor"], 1.0
