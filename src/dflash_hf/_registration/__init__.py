"""Registration with transformers, without slowing the import."""
