"""The heads that a drafter may have, and their configuration fields."""

from .domino_dflash import DominoHead
from .head_dflash import Head
from .markov_dflash import MarkovHead
from .selector_dflash import PathSelector


HEADS: tuple[type[Head], ...] = (PathSelector, MarkovHead, DominoHead)


def head_of(config) -> type[Head]:
    """The head class of the drafter that a configuration describes."""
    return next((head for head in HEADS if head.is_set(lambda field: getattr(config, field, None))), Head)


def head_fields() -> dict:
    """Configuration fields of all heads, and their defaults."""
    return {field: default for head in HEADS for field, default in head.fields.items()}
