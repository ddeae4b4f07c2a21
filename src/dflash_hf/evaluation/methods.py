"""Names of the decoding methods that are compared. Imports no torch: the command line's help reads it."""

from dataclasses import dataclass
from itertools import product


TARGET, TARGET_PACKED, PROMPT_LOOKUP = "target", "target_packed", "prompt_lookup"
DFLASH, TREE, COMPILED = "dflash", "dflash_tree", "dflash_compiled"
AUTO = "dflash_auto"  # the plain call: unchanged settings, so sizes are chosen unless they are set
METHODS = (TARGET, DFLASH, PROMPT_LOOKUP)
TREE_NODES = 15
LOOKUP_TOKENS = 10  # candidates of prompt lookup


@dataclass(frozen=True)
class Way:
    """A method of decoding with a drafter: the features that are switched on."""

    tree: bool
    compiled: bool

    def __str__(self) -> str:
        return "_".join([DFLASH, *[name for name, switch in vars(self).items() if switch]])

    def changes(self, tree_nodes: int = TREE_NODES) -> dict:
        """Changes to the drafter's `decoding_config`."""
        return ({"tree_nodes": tree_nodes} if self.tree else {}) | ({"compile": True} if self.compiled else {})


# "dflash", "dflash_compiled", "dflash_tree", "dflash_tree_compiled": of fixed size
OURS = {str(way): way for way in (Way(*switches) for switches in product((False, True), repeat=2))}
DRAFTED = (*OURS, AUTO)
TREE_METHODS = {name for name, way in OURS.items() if way.tree}


def methods_of_eval(packed: bool, trees: bool, lookup: bool) -> list[str]:
    """
    Those that `dflash eval` measures: the plain call and whole blocks, with what its options add. If the drafter packs
    weights, so does the target that it is compared with.
    """
    return [TARGET, *[TARGET_PACKED] * packed, AUTO, DFLASH, *[TREE] * trees, *[PROMPT_LOOKUP] * lookup]
