"""Names of the decoding methods that are compared. Imports no torch: the command line's help reads it."""

TARGET = "target"
TARGET_PACKED = "target_packed"
PROMPT_LOOKUP = "prompt_lookup"
MTP = "mtp"
DFLASH = "dflash"
TREE = "dflash_tree"
COMPILED = "dflash_compiled"
AUTO = "dflash_auto"  # the plain call: unchanged settings, so sizes are chosen unless they are set
METHODS = (TARGET, DFLASH, PROMPT_LOOKUP)
TREE_NODES = 15
LOOKUP_TOKENS = 10  # candidates of prompt lookup
# Without a drafter, by what `generate` is given.
ALONE = {
    TARGET: {},
    TARGET_PACKED: {},
    PROMPT_LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
    MTP: {"use_mtp": True},
}

# With blocks or trees of fixed size, by the fields of the drafter's `decoding_config` that are switched on.
FIXED_SIZE = {
    DFLASH: (),
    COMPILED: ("compile",),
    TREE: ("tree_nodes",),
    f"{TREE}_compiled": ("tree_nodes", "compile"),
}
DRAFTED = (*FIXED_SIZE, AUTO)
TREE_METHODS = {name for name, fields in FIXED_SIZE.items() if "tree_nodes" in fields}


def methods_of_eval(packed: bool, trees: bool, lookup: bool, mtp: bool) -> list[str]:
    """
    Those that `dflash eval` measures: the plain call and whole blocks, with what its options add. If the drafter packs
    weights, so does the target that it is compared with.
    """
    methods = [TARGET]
    if packed:
        methods.append(TARGET_PACKED)
    methods += [AUTO, DFLASH]
    if trees:
        methods.append(TREE)
    if lookup:
        methods.append(PROMPT_LOOKUP)
    if mtp:
        methods.append(MTP)
    return methods
