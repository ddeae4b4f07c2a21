"""One call of `generate` with a drafter, as its caller made it."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from dflash_hf.decoding.generate_hook import REQUESTED_TOKENS
from dflash_hf.decoding.probe import TargetCapabilities, capabilities_of
from dflash_hf.decoding.selection import TokenSelector
from dflash_hf.decoding.slots import cached_length
from dflash_hf.modeling.candidates_dflash import UPSTREAM_ASSISTANT_TOKENS
from dflash_hf.targets.features import cache_argument


@dataclass(frozen=True)
class GenerateCall:
    """
    The models and arguments of a call. It only refers to them; they are not changed during the call.

    Args:
        target (`PreTrainedModel`), draft (`DFlashDraftModel`): Both models, which other calls may be using too.
        prompt (`torch.LongTensor`): `[R, S]`, `input_ids`.
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
    def padding(self) -> list[int]:
        """Padding columns at the start of each row."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            return [0] * self.rows
        return (mask.shape[1] - mask.long().sum(dim=1)).tolist()

    @functools.cached_property
    def prompt_length(self) -> int:
        """
        Tokens of a row before the first generated one: padding and what the cache already holds included, unlike
        [`TokenSelector.input_length`], which counts the columns of `input_ids`.
        """
        mask = self.model_kwargs.get("attention_mask")
        embeds = self.model_kwargs.get("inputs_embeds")
        given_length = self.prompt.shape[1]
        if embeds is not None:
            given_length = max(given_length, embeds.shape[1])
        # Upstream drops a mask of ones and stores its length: `input_ids` may or may not repeat the cached tokens.
        mask_length = getattr(self.config, "_mask_length", None) if mask is None else mask.shape[1]
        return max(mask_length or cached_length(self.cache) + given_length, given_length)

    @functools.cached_property
    def positions_after_prompt(self) -> float:
        """Positions after the prompt, up to `max_position_embeddings`; infinite if the target has no such limit."""
        text_config = self.target.config.get_text_config(decoder=True)
        max_positions = getattr(text_config, "max_position_embeddings", None) or math.inf
        return max_positions - self.prompt_length

    @functools.cached_property
    def capabilities(self) -> TargetCapabilities:
        """What the target supports."""
        return capabilities_of(self.target)

    @property
    def requested_tokens(self) -> int | None:
        """`num_assistant_tokens`, if the caller or the target's generation config sets it."""
        number = self.config.num_assistant_tokens
        if hasattr(self.config, REQUESTED_TOKENS):
            number = getattr(self.config, REQUESTED_TOKENS)
        elif number == UPSTREAM_ASSISTANT_TOKENS:  # without the hook, indistinguishable from a request for as many
            number = None
        return None if number is None else max(int(number), 0)

    @property
    def block_tokens(self) -> int:
        """Tokens of a drafted block, anchor included: the trained size, or fewer if the caller asks for fewer."""
        trained = self.draft.config.max_block_tokens
        size = self.draft.decoding_config.block_size or trained
        requested = self.requested_tokens
        return min(size, trained if requested is None else requested + 1)
