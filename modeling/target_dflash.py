"""The target, as far as a drafter needs it: whether both fit, its decoder layers, and its rotary frequencies."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn


# Adding tokens or padding rows changes an embedding by less; a larger difference means another target.
MAX_RESIZED_SHARE = 0.1
# Rotary types of transformers whose frequencies depend on the length of the text.
_LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")
FEATURE_HOOK_MARK = "is_dflash_feature_hook"  # attribute of a hook, see `feature_hook`


def check_pair(target, config) -> None:
    """
    Check that a drafter fits a target, as far as shapes show. An embedding that was resized by up to a tenth still
    belongs to the same target; the drafter then drafts only the tokens that both vocabularies have.

    Args:
        target (`PreTrainedModel`): The target.
        config (`DFlashDraftConfig`): The drafter's configuration.

    Raises:
        `ValueError`: names every mismatch, both values and the remedy.
    """
    name = type(target).__name__
    embedding = target.get_input_embeddings()
    lm_head = target.get_output_embeddings()
    table = getattr(embedding, "weight", None)
    if isinstance(table, torch.Tensor) and not table.dtype.is_floating_point:
        raise ValueError(
            f"{name}'s embedding is quantised ({embedding}), and a drafter reads its rows: load the target with a "
            "plain embedding, such as with torchao's include_input_output_embeddings=False."
        )
    width = None
    if hasattr(embedding, "weight") and hasattr(lm_head, "weight"):
        width = embedding.weight.shape[1]
    if target.config.is_encoder_decoder or width is None or getattr(lm_head, "in_features", width) != width:
        raise ValueError(
            f"{name} cannot have a drafter: that needs a decoder-only target whose embedding and LM head are single "
            f"layers of equal width, but they are {embedding} and {lm_head}. Load the target with "
            "`AutoModelForCausalLM`, or call `generate` without `assistant_model`."
        )
    text_config = target.config.get_text_config()
    sizes = TargetSizes(
        hidden_size=text_config.hidden_size,
        num_layers=num_decoder_layers(target.config),
        vocab_size=text_config.vocab_size,
        embedding_rows=len(embedding.weight),
    )
    mismatches = [f"{field}={difference}" for field, difference in pair_mismatches(config, sizes)]
    if config.hidden_size != width:
        mismatches.append(f"hidden_size={config.hidden_size}, not {width} as its embedding")
    if mismatches:
        raise ValueError(
            f"The drafter does not fit this {name}: {'; '.join(mismatches)}. Load the drafter that was trained for it."
        )


class TargetSizes(NamedTuple):
    """
    The sizes of a target that a drafter is made for; `None` where they are not known.

    Args:
        hidden_size (`int`): Width of the decoder layers' outputs.
        num_layers (`int`): Number of decoder layers.
        vocab_size (`int`): Vocabulary size in its configuration.
        embedding_rows (`int`): Rows of its embedding, which may have been padded or resized.
    """

    hidden_size: int | None
    num_layers: int | None
    vocab_size: int | None
    embedding_rows: int | None


def pair_mismatches(config, target: TargetSizes) -> Iterator[tuple[str, str]]:
    """
    Where a drafter's configuration shows that it belongs to another target. This is the only comparison of a pair:
    [`check_pair`] makes it for loaded models, `dflash check` for configurations.

    Args:
        config (`DFlashDraftConfig`): The drafter's configuration.
        target (`TargetSizes`): What is known of the target.

    Yields:
        A field of the drafter, and its value with that of the target, such as `"64, not 32"`.
    """
    if target.hidden_size not in (None, config.target_hidden_size):
        yield "target_hidden_size", f"{config.target_hidden_size}, not {target.hidden_size}"
    rows = target.embedding_rows
    if rows is not None:
        vocab_size = config.vocab_size or rows
        is_within_resize = abs(vocab_size - rows) <= vocab_size * MAX_RESIZED_SHARE
        if vocab_size != target.vocab_size and not is_within_resize:
            yield "vocab_size", f"{vocab_size}, not {rows}"
        if config.mask_token_id >= rows:
            yield "mask_token_id", f"{config.mask_token_id} of {rows} embeddings"
    if target.num_layers is not None:
        if max(config.target_layer_ids) >= target.num_layers:
            yield "target_layer_ids", f"{config.target_layer_ids} of {target.num_layers} layers"
        if config.num_target_layers not in (None, target.num_layers):
            yield "num_target_layers", f"{config.num_target_layers}, not {target.num_layers}"


def num_decoder_layers(target_config) -> int:
    """Decoder layers of a target, of its language model if it is multimodal."""
    text_config = target_config.get_text_config()
    # LongCat's `num_hidden_layers` counts attentions, of which a layer has two.
    return getattr(text_config, "num_layers", None) or text_config.num_hidden_layers


def decoder_layers(target) -> nn.ModuleList:
    """
    The decoder layers of a target, of its language model if it is multimodal: the first `nn.ModuleList` of
    [`num_decoder_layers`] modules.

    Raises:
        `ValueError`: there is no such list.
    """
    num_layers = num_decoder_layers(target.config)
    for stack in (target.get_decoder(), target.base_model):  # ModernBERT's `get_decoder` returns part of its head
        for module in stack.modules():
            if isinstance(module, nn.ModuleList) and len(module) == num_layers:
                return module
    raise ValueError(
        f"{type(target).__name__} has no list of {num_layers} decoder layers, so its features cannot be read; use a "
        "decoder-only transformer as the target."
    )


def length_dependent_rope(target_config) -> dict[str, dict]:
    """
    A target's rotary parameters whose frequencies depend on the length of the text, by `rope_type`. A draft lengthens
    the text, so that its verification may use other frequencies than decoding token by token.
    """
    parameters = getattr(target_config.get_text_config(decoder=True), "rope_parameters", None) or {}
    # Some targets, such as Gemma 3, have a table for each layer type.
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    tables = {table.get("rope_type"): table for table in (parameters, *by_layer_type)}
    return {rope_type: tables[rope_type] for rope_type in _LENGTH_DEPENDENT_ROPE_TYPES if rope_type in tables}


def feature_hook(hook: Callable) -> Callable:
    """
    Decorator of forward hooks that only copy references to a layer's inputs or outputs. The package decodes without
    the drafter under any other hook, which might read or change drafted tokens.
    """
    setattr(hook, FEATURE_HOOK_MARK, True)
    return hook
