"""All heads that a drafter may have: a new head is a file beside this one, and a name in `HEADS`."""

from .head_dflash import Head
from .head_domino_dflash import DominoHead
from .head_markov_dflash import MarkovHead
from .head_selector_dflash import PathSelector


HEADS: tuple[type[Head], ...] = (PathSelector, MarkovHead, DominoHead)


def head_fields() -> dict:
    """Configuration fields of all heads, and their defaults."""
    fields = {}
    for head in HEADS:
        fields |= head.fields
    return fields
