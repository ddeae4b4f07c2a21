"""What a target's `config.json` says, without loading it."""


def text_part(config: dict) -> dict:
    """The configuration of the text part of a multimodal model; of another model, its configuration."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def vocab_size_of(config: dict) -> int | None:
    """The number of rows of a target's embedding; `None` if its configuration does not say."""
    return text_part(config).get("vocab_size", config.get("vocab_size"))


def num_layers_of(text_config: dict) -> int | None:
    """
    The number of decoder layers in the configuration of a text model; `None` if it does not say.

    LongCat's `num_hidden_layers` counts attentions, of which a layer has two; see
    [`~dflash_hf.modeling.target_dflash.num_decoder_layers`], the same for a loaded target.
    """
    return text_config.get("num_layers") or text_config.get("num_hidden_layers")


def stated_context_length(config: dict) -> int | None:
    """A target's context length in tokens, rope scaling included; `None` if its configuration does not say."""
    text = text_part(config)
    length = text.get("max_position_embeddings", text.get("n_positions"))
    if not length or length < 0:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # Some give the length before scaling (Qwen's YaRN), some after it (Llama 3.1), which then name the original.
    trained = rope.get("original_max_position_embeddings") or length
    return int(max(length, trained * (rope.get("factor") or 1.0)))
