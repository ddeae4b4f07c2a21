"""
The decoding methods that are compared: one table of their names in reports, their labels, and how each decodes.
Imports no torch: the command line's help reads it.
"""

from typing import NamedTuple


# Names in reports, whose files stay readable; labels say what they are.
TARGET_ALONE = "target"
TARGET_PACKED = "target_packed"
PROMPT_LOOKUP = "prompt_lookup"
MTP = "mtp"
WHOLE_BLOCKS = "dflash"
WHOLE_BLOCKS_COMPILED = "dflash_compiled"
DRAFT_TREES = "dflash_tree"
DRAFT_TREES_COMPILED = "dflash_tree_compiled"
PLAIN_CALL = "dflash_auto"

DEFAULT_METHODS = (TARGET_ALONE, WHOLE_BLOCKS, PROMPT_LOOKUP)  # of `evaluate`
TREE_NODES = 15
LOOKUP_TOKENS = 10  # candidates of prompt lookup


class Method(NamedTuple):
    """
    A decoding method.

    Args:
        label (`str`): Its name for readers of a report.
        arguments (`dict`, *optional*): Without a drafter, the arguments of `generate`.
        decoding_fields (`tuple[str, ...]`, *optional*): With blocks or trees of a fixed size, the fields of the
            drafter's `decoding_config` that are switched on.

    A method that has neither is the call of `generate` with the drafter and its unchanged settings, so draft sizes are
    chosen round by round unless they are set.
    """

    label: str
    arguments: dict | None = None
    decoding_fields: tuple[str, ...] | None = None


TABLE = {
    TARGET_ALONE: Method("target alone", arguments={}),
    TARGET_PACKED: Method("target alone, packed", arguments={}),
    PROMPT_LOOKUP: Method("prompt lookup", arguments={"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
    MTP: Method("multi-token prediction", arguments={"use_mtp": True}),
    WHOLE_BLOCKS: Method("whole blocks", decoding_fields=()),
    WHOLE_BLOCKS_COMPILED: Method("whole blocks, compiled", decoding_fields=("compile",)),
    DRAFT_TREES: Method("draft trees", decoding_fields=("tree_nodes",)),
    DRAFT_TREES_COMPILED: Method("draft trees, compiled", decoding_fields=("tree_nodes", "compile")),
    PLAIN_CALL: Method("plain call"),
}
LABELS = {name: method.label for name, method in TABLE.items()}
WITHOUT_DRAFTER = {name: method.arguments for name, method in TABLE.items() if method.arguments is not None}
FIXED_SIZE = {name: method.decoding_fields for name, method in TABLE.items() if method.decoding_fields is not None}
DRAFTED = (*FIXED_SIZE, PLAIN_CALL)
TREE_METHODS = {name for name, fields in FIXED_SIZE.items() if "tree_nodes" in fields}


def methods_of_eval(packed: bool, trees: bool, lookup: bool, mtp: bool) -> list[str]:
    """
    The methods that `dflash eval` measures: the plain call and whole blocks, with what its options add. If the drafter
    packs weights, so does the target that it is compared with.
    """
    methods = [TARGET_ALONE]
    if packed:
        methods.append(TARGET_PACKED)
    methods += [PLAIN_CALL, WHOLE_BLOCKS]
    if trees:
        methods.append(DRAFT_TREES)
    if lookup:
        methods.append(PROMPT_LOOKUP)
    if mtp:
        methods.append(MTP)
    return methods
