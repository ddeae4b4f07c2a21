"""The heads that a drafter may have, and their configuration fields."""

from .domino_dflash import DominoHead
from .head_dflash import Head
from .markov_dflash import MarkovHead
from .selector_dflash import PathSelector


HEADS: tuple[type[Head], ...] = (PathSelector, MarkovHead, DominoHead)


def head_fields() -> dict:
    """Configuration fields of all heads, and their defaults."""
    return {field: default for head in HEADS for field, default in head.fields.items()}
