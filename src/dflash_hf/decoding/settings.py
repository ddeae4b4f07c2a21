"""What a user may set about decoding with the package."""

from dataclasses import dataclass

from dflash_hf.modeling import configuration_dflash
from dflash_hf.modeling.configuration_dflash import is_count


@dataclass
class DFlashDecodingConfig(configuration_dflash.DFlashDecodingConfig):
    """
    How a drafter decodes; lives on `draft.decoding_config`.

    With neither `block_size` nor `tree_nodes`, each round verifies the number of tokens expected to be fastest: the
    likeliest tokens of a tree, a single path, a copy of earlier text, or nothing, in which case the target decodes
    alone for a while. With `compile`, each round verifies a whole block.

    Args:
        block_size (`int`, *optional*): Draft and verify blocks of so many tokens in every round, anchor included; at
            most the trained size, which may be larger.
        window (`int` or `"trained"`, *optional*): The drafter keeps and sees only the last N tokens before a block,
            and the first 4 that it read. "trained": the length of its longest training text, if known; beyond it
            acceptance falls. `None`: all.
        tree_nodes (`int`, *optional*): Draft a tree of N tokens, the likeliest paths through the likely tokens of each
            slot (DDTree, arXiv 2604.12989), and verify it with one forward. More tokens are accepted; a forward over
            more tokens costs more, least if it is memory-bound. Targets with recurrent layers get single blocks.
        compile (`bool` or `str`): Compile the forwards of both models, for drafts of fixed size and each bucket of
            256, 512, 1024, ... slots; a string names a mode or backend of `torch.compile`. The first use of a bucket
            takes a while. Not compiled: targets with recurrent layers.
    """

    tree_nodes: int | None = None
    compile: bool | str = False

    def check(self, trained: int) -> None:
        super().check(trained)
        self._require("tree_nodes", is_count(self.tree_nodes), "a positive number of tokens, or None for blocks")
        known = isinstance(self.compile, bool | str)
        self._require("compile", known, "True, False, or a mode or backend of torch.compile")
