"""How a drafter decodes: what a user may set on `draft.decoding_config`."""

import difflib
from dataclasses import dataclass, fields

import torch

from .tree_dflash import MOST_NODES


@dataclass
class DFlashDecodingConfig:
    """
    How a drafter decodes; lives on `draft.decoding_config`.

    With neither `block_size` nor `tree_nodes`, each round verifies as much as is fastest: the likeliest tokens of a
    tree, a single path, or nothing, in which case the target decodes alone for a while. The choice follows from the
    measured cost of rounds on this machine and from what the target accepts; see `plan_dflash`. Rounds that are
    compiled, or run ahead of the host, choose among a few sizes.

    Args:
        block_size (`int`, *optional*): Verify the first `block_size` tokens of a drafted block in every round, anchor
            included. The block is always drafted at the trained size.
        draft_temperature (`float`, *optional*): Temperature at which drafts are drawn when the target samples; 0 takes
            the likeliest tokens. Default: the tokens that are likeliest given the noise of the target's next samples
            (see `noise_dflash`), which changes no text. In compiled rounds, and batches that run ahead of the host,
            the temperature of `generate` for drafters whose head requests it, such as a path selector, and 0 for
            others. Trees are never drawn, nor are drafts whose size is chosen round by round.
        tree_nodes (`int`, *optional*): Draft a tree of N tokens, the likeliest paths through the likely tokens of each
            slot (DDTree, arXiv 2604.12989), and verify it with one forward. More tokens are accepted; a forward over
            more tokens costs more, least if it is memory-bound. Targets with recurrent layers, and rows that must
            advance in step, get single blocks. Trees hold the likeliest tokens: nothing is drawn.
        compile (`bool` or `str`): Compile draft, verification and acceptance as one graph of fixed shape, for each
            bucket of 256, 512, 1024, ... slots; a string names a mode or backend of `torch.compile`. The first use of
            a bucket takes a while, and the slots stay in memory for the next call; concurrent calls have separate
            slots. Not compiled: targets with recurrent layers, calls that return hidden states, and calls with
            `generators`.
        packed (`bool`): On a CPU, multiply by copies of the weights laid out for it: faster, for as much memory
            again. They are made by the first call of 32 or more tokens if they take less than a third of the free
            memory, kept for later calls, and made again after any change of the weights.
        look_ahead (`int`, *optional*): Number of rounds started before the host reads what they committed. At the end
            of a text up to `look_ahead - 1` rounds are wasted. Default: 1 on a CPU, else 4. Always 1 if each token is
            needed immediately: with a streamer, a time limit, processors and criteria that read the text, scores, one
            sampled row, `generators`; and for targets with recurrent layers.
        generators (`list[torch.Generator]`, *optional*): If the target samples, one generator per row, including those
            of `num_return_sequences`. Each token of a row then takes one draw of its generator, and a row's text is
            what its generator gives for its prompt alone. If drafts are drawn too (`draft_temperature`), they use the
            same generators: equal calls give equal texts, but a row's draws depend on how far the batch has come.
            Default: torch's global generator for all rows.
        costs (`str`, *optional*): A file with the cost of rounds, one of those listed by `dflash env`, from which
            sizes are chosen; nothing is measured then. With it, a prompt and a seed give the same text in every
            process, even in half precision. Default: the environment variable `DFLASH_HF_COSTS`, else the costs
            measured on this machine.
        window (`int`, *optional*): The drafter keeps and sees only the last N tokens before a block, and the first 4
            that it read. A drafter that was trained on short texts then drafts better after long ones. Default: all.
    """

    block_size: int | None = None
    draft_temperature: float | None = None
    tree_nodes: int | None = None
    compile: bool | str = False
    packed: bool = True
    look_ahead: int | None = None
    generators: list[torch.Generator] | None = None
    costs: str | None = None
    window: int | None = None

    def __setattr__(self, name, value):
        known = [field.name for field in fields(self)]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(known)}."
            raise AttributeError(f"decoding_config has no field {name!r}: {hint}")
        super().__setattr__(name, value)

    @property
    def is_open(self) -> bool:
        """Whether no setting fixes how much a round drafts."""
        return self.block_size is None and self.tree_nodes is None and not self.draft_temperature

    def rounds_ahead(self, device: torch.device) -> int:
        """`look_ahead`, or its default for a device."""
        return self.look_ahead or (1 if device.type == "cpu" else 4)

    def check(self, trained: int) -> None:
        """
        Args:
            trained (`int`): The block size of the drafter.

        Raises:
            `ValueError`: a field is invalid for a drafter of that block size.
        """
        temperature = self.draft_temperature
        tokens = f"a number of tokens from 1 to {trained}, the trained block size, or None for that"
        self._require("block_size", _is_count(self.block_size, trained), tokens)
        drawn = _is_number(temperature) and 0 <= temperature < float("inf")
        self._require("draft_temperature", drawn, "0, for the likeliest tokens, or positive")
        tokens = f"a number of tokens from 1 to {MOST_NODES}, or None for single blocks"
        self._require("tree_nodes", _is_count(self.tree_nodes, MOST_NODES), tokens)
        known = isinstance(self.compile, bool | str)
        self._require("compile", known, "True, False, or a mode or backend of torch.compile")
        self._require("packed", isinstance(self.packed, bool), "True or False")
        self._require("look_ahead", _is_count(self.look_ahead), "a positive number of rounds, or None")
        self._require("costs", isinstance(self.costs, str), "the path of a file of costs, or None")
        listed = isinstance(self.generators, list | tuple)
        self._require("generators", listed, "a list of a torch.Generator for each row, or None")
        self._require("window", _is_count(self.window), "a positive number of tokens, or None for all")
        if self.tree_nodes is not None and temperature:
            raise ValueError(
                f"decoding_config.tree_nodes={self.tree_nodes} drafts the likeliest tokens, so none can be drawn at "
                f"draft_temperature={temperature}: set one of them to None."
            )

    def _require(self, name: str, fits: bool, what: str) -> None:
        value = getattr(self, name)
        if value is not None and not fits:
            raise ValueError(f"decoding_config.{name}={value!r} must be {what}.")

    def check_generators(self, rows: int, device: torch.device) -> None:
        """
        Args:
            rows (`int`): Number of rows to sample.
            device (`torch.device`): Device on which they are sampled.

        Raises:
            `ValueError`: there is not one generator per row, on that device.
        """
        given = self.generators
        if len(given) != rows or len(set(map(id, given))) != rows:
            raise ValueError(
                f"decoding_config.generators holds {len(set(map(id, given)))} generators, but {rows} rows are sampled "
                "(num_return_sequences of each prompt): pass a separate generator for each row, or None."
            )
        elsewhere = {str(generator.device) for generator in given if generator.device != device}
        if elsewhere:
            raise ValueError(
                f"decoding_config.generators on {', '.join(sorted(elsewhere))}, but tokens are sampled on {device}: "
                f'make them with `torch.Generator("{device}")`.'
            )


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value, most: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most
