"""How a drafter decodes: what a user may set on `draft.decoding_config`."""

import difflib
from dataclasses import dataclass, fields


@dataclass
class DFlashDecodingConfig:
    """
    How a drafter decodes; lives on `draft.decoding_config`.

    With neither `block_size` nor `tree_nodes`, the package lets each round verify the number of tokens expected to be
    fastest: the likeliest tokens of a tree, a single path, a copy of earlier text, or nothing, in which case the
    target decodes alone for a while. Without the package, or with `compile`, each round verifies a whole block.

    Args:
        block_size (`int`, *optional*): Verify the first `block_size` tokens of a drafted block in every round, anchor
            included. The block is always drafted at the trained size.
        tree_nodes (`int`, *optional*): Draft a tree of N tokens, the likeliest paths through the likely tokens of each
            slot (DDTree, arXiv 2604.12989), and verify it with one forward. More tokens are accepted; a forward over
            more tokens costs more, least if it is memory-bound. Targets with recurrent layers get single blocks.
            Needs the package.
        compile (`bool` or `str`): Compile the forwards of both models, for drafts of fixed size and each bucket of
            256, 512, 1024, ... slots; a string names a mode or backend of `torch.compile`. The first use of a bucket
            takes a while. Not compiled: targets with recurrent layers. Needs the package.
        window (`int`, *optional*): The drafter keeps and sees only the last N tokens before a block, and the first 4
            that it read. A drafter that was trained on short texts then drafts better after long ones. Default: all.
    """

    block_size: int | None = None
    tree_nodes: int | None = None
    compile: bool | str = False
    window: int | None = None

    def __setattr__(self, name, value):
        known = [field.name for field in fields(self)]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(known)}."
            raise AttributeError(f"decoding_config has no field {name!r}: {hint}")
        super().__setattr__(name, value)

    def check(self, trained: int) -> None:
        """
        Args:
            trained (`int`): The block size of the drafter.

        Raises:
            `ValueError`: a field is invalid for a drafter of that block size.
        """
        tokens = f"a number of tokens from 1 to {trained}, the trained block size, or None for that"
        self._require("block_size", _is_count(self.block_size, trained), tokens)
        self._require("tree_nodes", _is_count(self.tree_nodes), "a positive number of tokens, or None for blocks")
        known = isinstance(self.compile, bool | str)
        self._require("compile", known, "True, False, or a mode or backend of torch.compile")
        self._require("window", _is_count(self.window), "a positive number of tokens, or None for all")

    def _require(self, name: str, fits: bool, what: str) -> None:
        value = getattr(self, name)
        if value is not None and not fits:
            raise ValueError(f"decoding_config.{name}={value!r} must be {what}.")


def _is_count(value, most: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most
