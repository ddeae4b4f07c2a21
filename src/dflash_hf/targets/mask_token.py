"""Which token of a target can be its drafter's mask token."""

from transformers import PreTrainedModel


def spare_token_id(target: PreTrainedModel, tokenizer) -> int | None:
    """
    The first unused row of a target's embedding, past the tokens of its tokenizer: a natural mask token. `None` if
    there is none.
    """
    rows = target.get_input_embeddings().weight.shape[0]
    return len(tokenizer) if len(tokenizer) < rows else None


def mask_token_remedy(tokenizer, name: str = "mask_token_id") -> str:
    """What to do if [`spare_token_id`] finds none, for an error: `name` is the argument to set."""
    added = ", ".join(f"{i} ({tokenizer.decode([i])})" for i in sorted(tokenizer.added_tokens_decoder)[-3:])
    remedy = f"set {name} to an id that its text never uses, such as a reserved token"
    return f"{remedy}. Its last added tokens: {added}" if added else remedy
