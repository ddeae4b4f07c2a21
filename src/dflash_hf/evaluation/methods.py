"""
The decoding methods that are compared: one table of their names in reports, their labels, and how each decodes.
Imports no torch: the command line's help reads it.
"""

from dataclasses import dataclass, field


# Names in reports. They stay as they are, so that files of earlier versions can be read; labels say what they are.
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


@dataclass(frozen=True)
class Method:
    """
    A decoding method.

    Args:
        label (`str`): Its name for readers of a report.
        drafts (`bool`): Whether it decodes with the drafter.
        fixed_size (`bool`): With the drafter: whether every round verifies a block or tree of the same size. If not,
            the drafter's own settings apply, which choose draft sizes round by round unless a size is set.
        trees (`bool`): Whether it verifies draft trees.
        compiles (`bool`): Whether it compiles the rounds; other methods do if the drafter's settings say so.
        packs (`bool`): Whether it decodes with packed weights where the packed target is measured, too.
        arguments (`dict`): Without the drafter, its arguments of `generate`.
    """

    label: str
    drafts: bool = False
    fixed_size: bool = False
    trees: bool = False
    compiles: bool = False
    packs: bool = False
    arguments: dict = field(default_factory=dict)


METHODS = {
    TARGET_ALONE: Method("target alone"),
    TARGET_PACKED: Method("target alone, packed", packs=True),
    PROMPT_LOOKUP: Method("prompt lookup", arguments={"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
    MTP: Method("multi-token prediction", packs=True, arguments={"use_mtp": True}),
    WHOLE_BLOCKS: Method("whole blocks", drafts=True, fixed_size=True, packs=True),
    WHOLE_BLOCKS_COMPILED: Method("whole blocks, compiled", drafts=True, fixed_size=True, compiles=True, packs=True),
    DRAFT_TREES: Method("draft trees", drafts=True, fixed_size=True, trees=True, packs=True),
    DRAFT_TREES_COMPILED: Method(
        "draft trees, compiled", drafts=True, fixed_size=True, trees=True, compiles=True, packs=True
    ),
    PLAIN_CALL: Method("plain call", drafts=True, packs=True),
}
LABELS = {name: method.label for name, method in METHODS.items()}
DRAFTED = tuple(name for name, method in METHODS.items() if method.drafts)


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
