"""
Checks of a pair's configurations, before any weights are read.

What needs torch or transformers is imported inside functions: a command first checks the names that it was given.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflash_hf._io.errors import one_line
from dflash_hf._io.files import read_json
from dflash_hf._io.repositories import small_file
from dflash_hf.targets.config_fields import num_layers_of, vocab_size_of


if TYPE_CHECKING:
    from dflash_hf.pairs.loading import Loading

TRUST_REMEDY = "pass `trust_remote_code=True`"
# Fields that extend Qwen3-style layers unless they have their default; see `non_default_fields`.
_EXTENSION_FIELDS = (
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
        argument (`str`): The argument with its value, such as `"target=my-model"`, for messages.
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


def check_pair_configs(target: str, draft: str | None, loading: "Loading", target_argument: str = "target") -> dict:
    """
    Check both configurations, before any weights are read.

    Args:
        target, draft (`str`): Folders, or repositories on the Hub.
        loading (`Loading`): Names the revisions.
        target_argument (`str`): The argument that names the target, for messages.

    Returns:
        `dict`: The target's configuration.

    Raises:
        `ValueError`, `OSError`: as [`read_config`]; also if the two are swapped.
    """
    config = read_config(target, f"{target_argument}={target}", loading.revision)
    draft_config = None if draft is None else read_config(draft, f"draft={draft}", loading.draft_revision)
    from dflash_hf.layouts.read import is_drafter_config

    if is_drafter_config(config):
        swapped = draft_config is not None and not is_drafter_config(draft_config)
        remedy = "target and drafter are swapped" if swapped else "name the model that it drafts for"
        raise ValueError(f"{target_argument}={target} is a DFlash drafter: {remedy}.")
    if draft_config is not None:
        check_is_drafter(draft_config, f"draft={draft}")
    return config


def is_multimodal(config: dict) -> bool:
    """
    Whether a model with this configuration is loaded with the part that reads images or sound: if it was saved with
    it, or if transformers has no other class for it.
    """
    from transformers.models.auto import modeling_auto

    model_type = config.get("model_type")
    multimodal = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(model_type)
    text_only = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, multimodal)
    return multimodal is not None and multimodal in (text_only, *(config.get("architectures") or ()))


def damaged_config(argument: str, error: Exception) -> str:
    """A readable message for a `StrictDataclassError`."""
    return f"{argument}: its config.json is damaged ({one_line(error, 160)}); correct it, or download it again."


def check_is_drafter(config: dict, argument: str) -> None:
    """
    Raises:
        `ValueError`: the configuration, read by [`read_config`] as `argument`, is another model's.
    """
    from dflash_hf.layouts.read import is_drafter_config

    if not is_drafter_config(config):
        kind = ", ".join(map(str, config.get("architectures") or [config.get("model_type")]))
        raise ValueError(f"{argument} is not a DFlash drafter but {kind}; `dflash train` trains one.")


def check_mask_token_id(token_id: int | None, target_config: dict) -> None:
    """
    Raises:
        `ValueError`: the target's embedding has no such row.
    """
    rows = vocab_size_of(target_config)
    if token_id is not None and rows is not None and not 0 <= token_id < rows:
        raise ValueError(
            f"mask_token_id={token_id} is outside the target's embedding of {rows} rows, ids 0 to {rows - 1}."
        )


def incompatibilities(config, target: dict) -> Iterator[tuple[str, str]]:
    """
    The fields by which a drafter belongs to another target, each with the reason. Loaded models are compared by the
    same function, [`~dflash_hf.modeling.target_dflash.pair_mismatches`].

    Args:
        config (`DFlashDraftConfig`): The drafter's configuration.
        target (`dict`): The configuration of the target's text model; fields that it lacks are not compared.
    """
    from dflash_hf.modeling.target_dflash import TargetSizes, pair_mismatches

    vocab_size = target.get("vocab_size")
    sizes = TargetSizes(
        hidden_size=target.get("hidden_size"),
        num_layers=num_layers_of(target),
        vocab_size=vocab_size,
        embedding_rows=vocab_size,  # `resize_token_embeddings` changes both
    )
    for field, difference in pair_mismatches(config, sizes):
        yield field, f"{difference} in the target: the drafter belongs to another target."


def resized_vocabulary(config, target: dict) -> str | None:
    """
    How the vocabulary of a target whose embedding was resized differs from the one that its drafter was trained with.
    `None` if they are equal, or if they differ so much that [`incompatibilities`] names the difference.
    """
    vocab_size = target.get("vocab_size")
    if vocab_size in (None, config.vocab_size) or config.vocab_size is None:
        return None
    if any(field == "vocab_size" for field, _ in incompatibilities(config, target)):
        return None
    return f"{config.vocab_size}, not {vocab_size} in the target, whose embedding was resized"


def non_default_fields(config) -> Iterator[tuple[str, object, object]]:
    """
    The fields by which a drafter differs from bidirectional Qwen3-style layers with the target's embedding and head:
    field, value, and the value of such layers.

    Args:
        config (`DFlashDraftConfig`): The drafter's configuration.
    """
    defaults = dict(config.token_head_class.fields)
    defaults |= {name: getattr(type(config), name) for name in _EXTENSION_FIELDS}
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
