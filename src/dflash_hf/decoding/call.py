"""One call of `generate` with a drafter, as its caller made it."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from dflash_hf.decoding.generate_hook import ASKED
from dflash_hf.decoding.probe import TargetCapabilities, capabilities_of
from dflash_hf.decoding.selection import TokenSelector
from dflash_hf.decoding.slots import cached_columns
from dflash_hf.modeling.candidates_dflash import UPSTREAM_DEFAULT
from dflash_hf.targets.features import cache_argument


@dataclass(frozen=True)
class GenerateCall:
    """
    Args:
        target (`PreTrainedModel`), draft (`DFlashDraftModel`): Both models, which other calls may be using too.
        prompt (`torch.LongTensor`): `[R, S]`.
        selector (`TokenSelector`): How tokens are chosen.
        config (`GenerationConfig`): The settings.
        model_kwargs (`dict`): Arguments of the target's forward.
    """

    target: Any
    draft: Any
    prompt: torch.LongTensor
    selector: TokenSelector
    config: Any
    model_kwargs: dict

    @property
    def rows(self) -> int:
        return len(self.prompt)

    @property
    def cache(self):
        """The cache that the prompt is read into."""
        return self.model_kwargs.get(cache_argument(self.target))

    @functools.cached_property
    def columns(self) -> int:
        """Columns of the prompt, those that a cache holds included."""
        mask = self.model_kwargs.get("attention_mask")
        embeds = self.model_kwargs.get("inputs_embeds")
        new = self.prompt.shape[1]
        if embeds is not None:
            new = max(new, embeds.shape[1])
        # Upstream drops a mask of ones, and notes its length: the ids may be those of the cache, too.
        length = getattr(self.config, "_mask_length", None) if mask is None else mask.shape[1]
        return max(length or cached_columns(self.cache) + new, new)

    @functools.cached_property
    def positions_left(self) -> float:
        """Positions of the target's table that are left for new tokens; infinite if it does not say."""
        text_config = self.target.config.get_text_config(decoder=True)
        longest = getattr(text_config, "max_position_embeddings", None) or math.inf
        return longest - self.columns

    @functools.cached_property
    def capabilities(self) -> TargetCapabilities:
        """What the target supports."""
        return capabilities_of(self.target)

    @property
    def asked_tokens(self) -> int | None:
        """`num_assistant_tokens`, if the caller or the target's settings name it."""
        asked = self.config.num_assistant_tokens
        # Without the hook nobody knows whether upstream's default was asked for.
        asked = getattr(self.config, ASKED, None if asked == UPSTREAM_DEFAULT else asked)
        return None if asked is None else max(int(asked), 0)

    @property
    def block_tokens(self) -> int:
        """Tokens of a drafted block, anchor included: the trained size, or fewer if the caller asks for fewer."""
        trained = self.draft.config.max_block_tokens
        size = self.draft.decoding_config.block_size or trained
        asked = self.asked_tokens
        return min(size, trained if asked is None else asked + 1)
