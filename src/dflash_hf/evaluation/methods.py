"""Names of the decoding methods that are compared. Imports no torch: the command line's help reads it."""

from dataclasses import dataclass
from itertools import product


TARGET, TARGET_PACKED, PROMPT_LOOKUP = "target", "target_packed", "prompt_lookup"
DFLASH, TREE, COMPILED, PACKED = "dflash", "dflash_tree", "dflash_compiled", "dflash_packed"
TREE_PACKED = f"{TREE}_packed"
AUTO, AUTO_PACKED = "dflash_auto", "dflash_auto_packed"  # unchanged settings: sizes are chosen unless they are set
METHODS = (TARGET, DFLASH, PROMPT_LOOKUP)
TREE_NODES = 15
LOOKUP_TOKENS = 10  # candidates of prompt lookup


@dataclass(frozen=True)
class Way:
    """A method of decoding with a drafter: the features that are switched on."""

    tree: bool
    compiled: bool
    packed: bool

    def __str__(self) -> str:
        return "_".join([DFLASH, *[name for name, switch in vars(self).items() if switch]])

    def changes(self, tree_nodes: int = TREE_NODES) -> dict:
        """Changes to the drafter's `decoding_config`."""
        trees = {"tree_nodes": tree_nodes} if self.tree else {}
        return trees | ({"compile": True} if self.compiled else {}) | {"packed": self.packed}


# "dflash", "dflash_packed", "dflash_compiled", ..., "dflash_tree_compiled_packed"
OURS = {str(way): way for way in (Way(*switches) for switches in product((False, True), repeat=3))}
DRAFTED = (*OURS, AUTO, AUTO_PACKED)
PACKED_METHODS = {TARGET_PACKED, AUTO_PACKED, *(name for name, way in OURS.items() if way.packed)}
TREE_METHODS = {name for name, way in OURS.items() if way.tree}


def methods_of_eval(packed: bool, trees: bool, lookup: bool) -> list[str]:
    """Those that `dflash eval` measures: blocks, and sizes that are chosen, with what its options add."""
    methods = [TARGET, TARGET_PACKED, DFLASH, PACKED, AUTO, AUTO_PACKED, *[TREE, TREE_PACKED] * trees]
    methods = [name for name in methods if packed or name not in PACKED_METHODS]
    return methods + [PROMPT_LOOKUP] * lookup
