"""What a target's `config.json` says, without loading it."""


def text_part(config: dict) -> dict:
    """Of a multimodal model, the configuration of its text part."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def vocab_size_of(config: dict) -> int | None:
    """Rows of a target's embedding, as far as its configuration says."""
    return text_part(config).get("vocab_size", config.get("vocab_size"))


def positions_of(config: dict) -> int | None:
    """A target's context length, as far as its configuration says, including rope scaling."""
    text = text_part(config)
    length = text.get("max_position_embeddings", text.get("n_positions"))
    if not length or length < 0:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # Some give the length before scaling (Qwen's YaRN), some after it (Llama 3.1), which then name the original.
    trained = rope.get("original_max_position_embeddings") or length
    return int(max(length, trained * (rope.get("factor") or 1.0)))
