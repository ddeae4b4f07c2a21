"""What a user may set about decoding."""

from collections.abc import Callable
from dataclasses import dataclass, fields


@dataclass
class DFlashDecodingConfig:
    """
    How a drafter decodes: the value of `draft.decoding_config`, which all calls with this drafter share.

    With neither `block_size` nor `tree_nodes`, each round verifies what is expected to be fastest: the likeliest
    tokens of a tree or of a single path, a copy of earlier text, or nothing: then the target decodes a token as
    without a drafter. With `compile`, each round verifies a whole block.

    Args:
        block_size (`int`, *optional*): Draft and verify blocks of `block_size` tokens in every round, anchor included;
            at most the block size of training.
        window (`int` or `"trained"`, *optional*): The drafter keeps and attends to only the last N tokens before a
            block, and the first 4 tokens that it read. "trained": the length of its longest training text, if known;
            beyond it acceptance falls. `None`: all.
        tree_nodes (`int`, *optional*): Draft a tree of N tokens besides the anchor, the likeliest paths through the
            likely tokens of each slot (DDTree, arXiv 2604.12989), and verify it with one forward. More tokens are
            accepted; a forward over more tokens costs more, least if it is memory-bound. Targets with recurrent layers
            get single blocks.
        compile (`bool` or `str`): Compile the forwards of both models, for drafts of fixed size and each bucket of
            256, 512, 1024, ... slots; a string names a mode or backend of `torch.compile`. The first use of a bucket
            takes a while. Not compiled: targets with recurrent layers.
        cuda_graphs (`bool`): Capture the forwards of both models in CUDA graphs, for each size of draft, and replay
            them: fewer launches, if both models are on one CUDA device. Each call captures its own. Not for targets
            with recurrent layers; not together with `compile`.
        policy (`type[DraftPolicy]`, *optional*): Your own class, which decides what to verify in each round; see
            [`~dflash_hf.decoding.policies.DraftPolicy`]. Default: the policy for the settings above.
    """

    block_size: int | None = None
    window: int | str | None = "trained"
    tree_nodes: int | None = None
    compile: bool | str = False
    cuda_graphs: bool = False
    policy: Callable | None = None

    def __setattr__(self, name, value):
        names = [field.name for field in fields(self)]
        if name not in names:
            raise AttributeError(f"decoding_config has no field {name!r}; its fields are {', '.join(names)}.")
        super().__setattr__(name, value)

    def check(self, block_tokens: int) -> None:
        """
        Args:
            block_tokens (`int`): Tokens of the drafter's block, anchor included.

        Raises:
            `ValueError`: a field is invalid for a drafter of that block size.
        """
        chosen = "None to choose in each round"
        tokens = f"a number of tokens from 1 to {block_tokens}, the trained block size, or {chosen}"
        nodes = f"a positive number of tokens, or {chosen}"
        windows = 'a positive number of tokens, "trained", or None for all'
        modes = "True, False, or a mode or backend of torch.compile"
        self._check("block_size", _is_count(self.block_size, block_tokens), tokens)
        self._check("window", _is_count(self.window) or self.window == "trained", windows)
        self._check("tree_nodes", _is_count(self.tree_nodes), nodes)
        self._check("compile", isinstance(self.compile, bool | str), modes)
        self._check("cuda_graphs", isinstance(self.cuda_graphs, bool), "True or False")
        if self.cuda_graphs and self.compile:
            raise ValueError(f"decoding_config.cuda_graphs=True needs compile=False, and compile={self.compile!r}.")
        self._check("policy", callable(self.policy), "a subclass of DraftPolicy, or None for the package's own")

    def _check(self, name: str, is_valid: bool, values: str) -> None:
        value = getattr(self, name)
        if value is not None and not is_valid:
            raise ValueError(f"decoding_config.{name}={value!r} must be {values}.")


def _is_count(value, maximum: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= maximum
