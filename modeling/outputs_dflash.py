"""Hidden states and attentions of each generated token, cut out of the forwards that verified whole blocks."""

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from .target_dflash import input_device, uncompiled
from .verify_dflash import cache_argument


class TokenOutputs:
    """
    Lists `hidden_states` and `attentions` as `generate` does without a drafter: one entry for each generated token,
    the first of them that of the prompt, each with one tensor for each layer.

    While it is open it sees every forward of the target; where nothing was asked for, it sees none and lists nothing.

    Args:
        target (`PreTrainedModel`): The target.
        generation_config (`GenerationConfig`): Its `return_dict_in_generate`, `output_hidden_states` and
            `output_attentions` say what is asked for.
    """

    def __init__(self, target, generation_config):
        keep = generation_config.return_dict_in_generate
        self.target = target
        self.hidden_states: tuple | None = () if keep and generation_config.output_hidden_states else None
        self.attentions: tuple | None = () if keep and generation_config.output_attentions else None
        # What a forward has to be told.
        names = [name for name in ("hidden_states", "attentions") if getattr(self, name) is not None]
        self.arguments = {f"output_{name}": getattr(generation_config, f"output_{name}") for name in names}
        self.asked = bool(names)
        self.hidden, self.weights = None, None  # of the last forward
        self.handle = None

    def __enter__(self):
        if self.asked:
            self.handle = self.target.register_forward_hook(self._see)
        return self

    def __exit__(self, *exc):
        if self.handle is not None:
            self.handle.remove()
        self.hidden, self.weights = None, None

    def _see(self, module, args, output):
        self.hidden = None if self.hidden_states is None else output.hidden_states
        self.weights = None if self.attentions is None else output.attentions

    def add_prompt(self, cache, columns: int) -> None:
        """The prompt's forward, after which `cache` holds so many columns, is the entry of the first token."""
        self.columns = columns
        if self.hidden_states is not None:
            self.hidden_states += (self.hidden,)
        if self.attentions is not None:
            self.attentions += (self.weights,)
            self.windows = attention_windows(self.target, cache, len(self.weights))

    def add_block(self, session, size: int, count: int) -> None:
        """The first `count` tokens of the block of `size` that `session` verified last are one entry each."""
        if self.hidden_states is not None:
            layers = [layer[..., :count, :].clone().split(1, dim=-2) for layer in self.hidden]
            self.hidden_states += tuple(tuple(layer[step] for layer in layers) for step in range(count))
        if self.attentions is not None:
            first = [session.first_columns(layer.shape[-1], self.columns + size) for layer in self.weights]
            for step in range(count):
                self.columns += 1  # a token sees its own column too
                self.attentions += (tuple(map(self._cut, self.weights, first, self.windows, [step] * len(first))),)

    def _cut(self, weights: torch.Tensor, first: list[int], window: int | None, step: int) -> torch.Tensor:
        """
        Of one layer's attention `[R, heads, n, keys]` that of token `step` over the columns that exist, `[R, heads, 1,
        columns]`. The first key of a row is column `first[row]`; what comes before is padding, which has no weight.
        """
        columns = self.columns if window is None else min(self.columns, window)
        start = self.columns - columns
        cut = weights.new_zeros(*weights.shape[:2], 1, columns)
        for row, column in enumerate(first):
            held = max(start, column)
            cut[row, :, 0, held - start :] = weights[row, :, step, held - column : self.columns - column]
        return cut


def attention_windows(target, cache, listed: int) -> list[int | None] | None:
    """
    For each of the `listed` attentions of a target's forward how many columns its layer of the cache keeps, the new
    one included; `None` for all. `None` altogether where it cannot be told which layer is which.
    """
    windows = {
        idx: layer.sliding_window if layer.is_sliding else None
        for idx, layer in enumerate(cache.layers)
        if isinstance(layer, CacheLayerMixin)
    }
    if not any(windows.values()):
        return [None] * listed
    if len(windows) == listed:
        return list(windows.values())
    types = getattr(target.config.get_text_config(decoder=True), "layer_types", None) or []
    known = {types[idx]: window for idx, window in windows.items() if idx < len(types)}
    if len(types) == listed and known.keys() == set(types):  # some layers share the keys of another one of their type
        return [known[kind] for kind in types]
    return None


@torch.no_grad()
def lists_attentions(target, cache) -> bool:
    """Whether a target's attentions can be listed by token; tried with one token where layers keep a window."""
    if attention_windows(target, cache, 0) is not None:
        return True
    name, config = cache_argument(target), target.config.get_text_config(decoder=True)
    token = torch.zeros(1, 1, dtype=torch.long, device=input_device(target))
    with uncompiled(target):
        output = target(input_ids=token, output_attentions=True, use_cache=True, **{name: DynamicCache(config=config)})
    return attention_windows(target, cache, len(output.attentions)) is not None
