"""How a drafter decodes, and what a call of `generate` asks for: whether, and with which cache, it can be drafted."""

from dataclasses import dataclass

import torch
from transformers import DynamicCache

from .outputs_dflash import lists_attentions
from .tree_dflash import MOST_NODES
from .verify_dflash import cache_argument


@dataclass
class DFlashDecodingConfig:
    """
    How a drafter decodes; lives on `draft.decoding_config`.

    Args:
        block_size (`int`, *optional*): Verify only the first so many tokens of a drafted block, anchor included. The
            block is always drafted at the trained size.
        draft_temperature (`float`, *optional*): Temperature at which drafts are drawn when the target samples; 0 takes
            the likeliest tokens. Default: that of `generate` for a drafter with a path selector, 0 for others.
        tree_nodes (`int`, *optional*): Draft a tree of so many tokens, the likeliest of all paths through the likely
            tokens of each slot (DDTree, arXiv 2604.12989), and verify it with one forward. More tokens are accepted;
            a forward over more tokens costs more, least where memory is the limit. Single blocks are drafted where a
            target's cache is not kept in slots, where rows must advance in step, and where attentions or hidden states
            are asked for. Trees hold the likeliest tokens: nothing is drawn. Default: a block, which is a single path.
        compile (`bool` or `str`): Compile draft, verification and acceptance as one graph of fixed shape, for each
            bucket of 256, 512, 1024, ... slots; a string names a mode or a backend of `torch.compile`. The first use
            of a bucket takes a while, and the slots stay in memory for the next call. Rounds whose attentions or
            hidden states are asked for, or that draw by `generators`, are not compiled.
        pack_weights (`bool`): On a CPU, let the linear layers of target and drafter multiply by copies of their
            weights that are laid out for the processor, in eager and in compiled rounds. Takes as much memory again as
            those weights, as long as the models live. Changed weights are noticed at the next call, and packed again.
        look_ahead (`int`, *optional*): Rounds that are started before the host looks at what they committed. At the
            end of a text up to so many less one are computed in vain. Default: 1 on a CPU, else 4. Always 1 where each
            token is asked for as it comes: with a streamer, a time limit, processors and criteria that read the text.
        generators (`list[torch.Generator]`, *optional*): Where the target samples, one for each row, those of
            `num_return_sequences` included. Rows then advance in step, each token of a row is one draw of its
            generator, and a row's text is the one that its generator gives for its prompt alone. Drafts that are drawn
            too (`draft_temperature`) are drawn by the same generators: then equal calls give equal texts, but a row's
            draws depend on how far the batch has come. Default: torch's own generator for all rows.
    """

    block_size: int | None = None
    draft_temperature: float | None = None
    tree_nodes: int | None = None
    compile: bool | str = False
    pack_weights: bool = False
    look_ahead: int | None = None
    generators: list[torch.Generator] | None = None

    def rounds_ahead(self, device: torch.device) -> int:
        """`look_ahead`, or its default for a device."""
        return self.look_ahead or (1 if device.type == "cpu" else 4)

    def check(self, trained: int) -> None:
        """
        Args:
            trained (`int`): The block size of the drafter.

        Raises:
            `ValueError`: a field that no drafter of that block size can follow.
        """
        if not (self.block_size is None or _is_count(self.block_size) and self.block_size <= trained):
            raise ValueError(
                f"decoding_config.block_size={self.block_size!r} must be a number of tokens from 1 to {trained}, the "
                "trained block size, or None for that."
            )
        temperature = self.draft_temperature
        if not (temperature is None or 0 <= temperature < float("inf")):
            raise ValueError(
                f"decoding_config.draft_temperature={temperature!r} must be 0, for the likeliest tokens, or positive."
            )
        nodes = self.tree_nodes
        if not (nodes is None or _is_count(nodes) and nodes <= MOST_NODES):
            raise ValueError(
                f"decoding_config.tree_nodes={nodes!r} must be a number of tokens from 1 to {MOST_NODES}, or None for "
                "single blocks."
            )
        if nodes is not None and temperature:
            raise ValueError(
                f"decoding_config.tree_nodes={nodes} holds the likeliest tokens, so that none are drawn at "
                f"draft_temperature={temperature}: set one of them to None."
            )
        if not (self.look_ahead is None or _is_count(self.look_ahead)):
            raise ValueError(
                f"decoding_config.look_ahead={self.look_ahead!r} must be a positive number of rounds, or None."
            )

    def check_generators(self, rows: int, device: torch.device) -> None:
        """
        Args:
            rows (`int`): Rows of a batch to sample.
            device (`torch.device`): Where they are sampled.

        Raises:
            `ValueError`: there is not one generator for each row, on that device.
        """
        given = self.generators
        if len(given) != rows or len(set(map(id, given))) != rows:
            raise ValueError(
                f"decoding_config.generators holds {len(set(map(id, given)))} generators, but {rows} rows are sampled "
                "(num_return_sequences of each prompt): pass a generator of its own for each row, or None."
            )
        elsewhere = {str(generator.device) for generator in given if generator.device != device}
        if elsewhere:
            raise ValueError(
                f"decoding_config.generators on {', '.join(sorted(elsewhere))}, but tokens are sampled on {device}: "
                f'make them with `torch.Generator("{device}")`.'
            )


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def plain_reason(target, session_class, generation_config, model_kwargs, synced_gpus) -> str | None:
    """Why this call decodes without the drafter, or `None`."""
    positions = model_kwargs.get("position_ids")
    if synced_gpus:
        return "the ranks of a sharded target must run the same number of forwards"
    if session_class is None:
        return f"the cache of {type(target).__name__} cannot be rolled back"
    if positions is not None and positions.shape[-1] == 0:
        return "the prompt is empty"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or bool((mask.long().diff(dim=1) < 0).any())):
        return "attention_mask leaves out tokens that are not padding on the left"
    if generation_config.return_dict_in_generate and generation_config.output_attentions:
        cache = model_kwargs[cache_argument(target)]
        if not session_class.takes(cache):
            return f"in a {type(cache).__name__} attentions have a column for each token that it could hold"
        if not lists_attentions(target, cache):
            return f"the attentions of {type(target).__name__} cannot be told apart by layer"
    return None


def usable_cache(target, cache, session_class, implementation: str | None):
    """
    The cache to prefill: what `generate` made, or a dynamic one in place of a static one, whose shapes slots replace.

    Raises:
        `ValueError`: a static cache that the caller passed, a quantised or an offloaded one: their tokens cannot be
            moved into slots.
    """
    if session_class.takes(cache) and not cache.offloading:
        return cache
    from_caller = getattr(cache, "_is_user_defined", False)
    if cache.is_compileable and not from_caller and not cache.offloading:
        return DynamicCache(config=target.config.get_text_config(decoder=True))
    argument = "past_key_values is" if from_caller else f"cache_implementation={implementation!r} makes"
    kind = f"a {type(cache).__name__} of {type(cache.layers[0]).__name__}" if cache.layers else type(cache).__name__
    raise ValueError(
        f"{argument} {kind}{', offloaded to the CPU' * cache.offloading}, which a drafter cannot decode with: pass a "
        "`DynamicCache` that is not offloaded, leave `past_key_values` and `cache_implementation` out, or drop "
        "`assistant_model`."
    )


def tree_nodes(config: DFlashDecodingConfig, session_class, text, listed) -> int:
    """Nodes of the trees to draft, 0 where this call drafts single blocks."""
    in_step = text.step_by_step and len(text.lengths) > 1
    blocks = in_step or listed.asked or not session_class.free or text.block_size == 1
    return 0 if blocks else config.tree_nodes or 0


def draft_temperature(draft, generation_config) -> float:
    """The temperature at which a drafter draws its tokens; 0 when it takes the likeliest."""
    if not generation_config.do_sample:
        return 0.0
    temperature = draft.decoding_config.draft_temperature
    if temperature is None:
        samples = draft.config.selector_rank is not None
        temperature = 1.0 if generation_config.temperature is None else generation_config.temperature
        return float(temperature) if samples else 0.0
    return float(temperature)
