"""All token heads: to add one, write a file beside this one and list its class in `TOKEN_HEADS`."""

from .head_dflash import TokenHead
from .head_domino_dflash import DominoHead
from .head_markov_dflash import MarkovHead
from .head_selector_dflash import PathSelector


TOKEN_HEADS: tuple[type[TokenHead], ...] = (PathSelector, MarkovHead, DominoHead)


def head_fields() -> dict:
    """Configuration fields of all token heads, and their defaults."""
    fields = {}
    for head in TOKEN_HEADS:
        fields |= head.fields
    return fields
