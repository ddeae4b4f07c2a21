"""What a drafter needs of its target: that it fits, how many layers it has, and where they are."""

from torch import nn


def check_pair(target, config) -> None:
    """
    Check that a drafter fits a target, as far as shapes show. An embedding that has grown or shrunk by a few rows is
    still that of the same target: its drafter drafts the tokens that both know.

    Args:
        target (`PreTrainedModel`): The target.
        config (`DFlashDraftConfig`): The drafter's configuration.

    Raises:
        `ValueError`: names every mismatch, both values and the remedy.
    """
    name = type(target).__name__
    table = target.get_input_embeddings()
    head = target.get_output_embeddings()
    width = table.weight.shape[1] if hasattr(table, "weight") and hasattr(head, "weight") else None
    if target.config.is_encoder_decoder or width is None or getattr(head, "in_features", width) != width:
        raise ValueError(
            f"{name} cannot have a drafter, which shares the embedding and the head of a decoder-only target, single "
            f"layers of one width; here they are {table} and {head}. Load the target with `AutoModelForCausalLM`, or "
            "call `generate` without `assistant_model`."
        )
    text = target.config.get_text_config()
    rows = len(table.weight)
    depth = num_decoder_layers(target.config)
    vocab_size = config.vocab_size or rows
    resized = vocab_size == text.vocab_size or abs(vocab_size - rows) <= vocab_size * 0.1
    mismatches = []
    if config.target_hidden_size != text.hidden_size:
        mismatches.append(f"target_hidden_size={config.target_hidden_size}, not {text.hidden_size}")
    if config.hidden_size != width:
        mismatches.append(f"hidden_size={config.hidden_size}, not {width} as its embedding")
    if not resized:
        mismatches.append(f"vocab_size={vocab_size}, not {rows}")
    if config.mask_token_id >= rows:
        mismatches.append(f"mask_token_id={config.mask_token_id} of {rows} embeddings")
    if max(config.target_layer_ids) >= depth:
        mismatches.append(f"target_layer_ids={config.target_layer_ids} of {depth} layers")
    if config.num_target_layers not in (None, depth):
        mismatches.append(f"num_target_layers={config.num_target_layers}, not {depth}")
    if mismatches:
        raise ValueError(
            f"The drafter does not fit this {name}: {'; '.join(mismatches)}. Load the drafter that was trained for it."
        )


def num_decoder_layers(target_config) -> int:
    """Decoder layers of a target, of its language model if it is multimodal."""
    text_config = target_config.get_text_config()
    # LongCat's `num_hidden_layers` counts attentions, of which a layer has two.
    return getattr(text_config, "num_layers", None) or text_config.num_hidden_layers


def decoder_layers(target) -> nn.ModuleList:
    """
    The decoder layers of a target's text stack (of a multimodal wrapper too).

    Raises:
        `ValueError`: no list with as many layers as the configuration counts is found.
    """
    depth = num_decoder_layers(target.config)
    for stack in (target.get_decoder(), target.base_model):  # ModernBERT's decoder is part of its head
        for module in stack.modules():
            if isinstance(module, nn.ModuleList) and len(module) == depth:
                return module
    raise ValueError(
        f"{type(target).__name__} has no list of {depth} decoder layers, so its features cannot be read; use a "
        "decoder-only transformer as the target."
    )
