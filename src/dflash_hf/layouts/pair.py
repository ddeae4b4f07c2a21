"""Whether a drafter fits a target, as far as shapes show."""

from dflash_hf.modeling.target_dflash import text_depth


def check_pair(target, draft_config) -> None:
    """
    Check that a drafter fits a target, as far as shapes show.

    Raises:
        `ValueError`: names the mismatch, both values and the remedy.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder model; DFlash drafts for decoder-only targets. Call "
            "`generate` without `assistant_model`."
        )
    text = target.config.get_text_config()
    name = f"target {type(target).__name__}"
    if draft_config.target_hidden_size != text.hidden_size:
        raise ValueError(
            f"The drafter reads features of width target_hidden_size={draft_config.target_hidden_size}, but {name} "
            f"has hidden_size={text.hidden_size}: load the drafter that was trained for this target."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(
            f"{name} has no language-model head, which the drafter needs; load it with `AutoModelForCausalLM`."
        )
    for part, module in (("embedding", target.get_input_embeddings()), ("head", target.get_output_embeddings())):
        if not hasattr(module, "weight"):
            raise ValueError(
                f"The {part} of {name} is a {type(module).__name__} without a weight, but a drafter shares it: put a "
                "single layer in its place, or call `generate` without `assistant_model`."
            )
    rows, width = target.get_input_embeddings().weight.shape
    head_width = getattr(target.get_output_embeddings(), "in_features", width)
    if head_width != width:
        raise ValueError(
            f"The embedding of {name} has width {width} and its head {head_width}, but a drafter shares both: this "
            "target cannot have a drafter. Call `generate` without `assistant_model`."
        )
    if draft_config.hidden_size != width:
        raise ValueError(
            f"The drafter has hidden_size={draft_config.hidden_size}, but the embedding of {name}, which it shares, "
            f"has width {width}: load the drafter that was trained for this target."
        )
    # A target whose embedding has grown or shrunk by a few rows is still the same target: its drafter drafts the
    # tokens that both know.
    known = draft_config.vocab_size
    if known not in (None, text.vocab_size) and abs(known - rows) > known * 0.1:
        raise ValueError(
            f"The drafter was trained with vocab_size={draft_config.vocab_size}, but {name} has "
            f"vocab_size={text.vocab_size}: load the drafter that was trained for this target."
        )
    if draft_config.mask_token_id >= rows:
        raise ValueError(
            f"mask_token_id={draft_config.mask_token_id} lies outside the embedding of {name} ({rows} rows): resize "
            "that embedding, or load the drafter that was trained for this target."
        )
    depth = text_depth(target.config)
    if max(draft_config.target_layer_ids) >= depth:
        raise ValueError(
            f"target_layer_ids={draft_config.target_layer_ids} reach past the {depth} layers of {name}: this drafter "
            "belongs to a deeper target."
        )
    if draft_config.num_target_layers not in (None, depth):
        raise ValueError(
            f"The drafter was trained for a target with num_target_layers={draft_config.num_target_layers}, but "
            f"{name} has {depth} layers: load the drafter that was trained for this target."
        )
