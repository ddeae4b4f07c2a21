"""The caches of the latest conversations: their next turns read only what is new."""

import copy
from os.path import commonprefix
from typing import NamedTuple

from torch import Tensor
from transformers import DynamicCache

from dflash_hf.modeling.cache_dflash import cached_columns
from dflash_hf.modeling.drafting_dflash import CONTEXTS
from dflash_hf.responses import context_of, free_memory


_SHARE = 0.1  # of the free memory that all caches together may take
_OPENING = 8  # tokens at the end of a prompt that open the answer, which the next turn may write otherwise
_WORTH_SHARING = 64  # tokens; shorter beginnings are read with the rest


class Conversation(NamedTuple):
    """What the cache of a text holds, and how much of it was the prompt. A drafter's context goes with the cache."""

    text: list[int]
    prompt: int
    cache: DynamicCache

    @property
    def memory(self) -> int:
        """Bytes, with what drafters have read."""
        contexts = [*CONTEXTS.get(self.cache, {}).values()]
        layers = [layer for cache in (self.cache, *(one.cache for one in contexts)) for layer in cache.layers]
        states = [state for layer in layers for state in vars(layer).values()]
        states += [features for one in contexts for features, _ in one.unread]
        states += [part for state in states if isinstance(state, list) for part in state]
        return sum(state.nbytes for state in states if isinstance(state, Tensor))


class Conversations:
    """
    Caches of texts, the latest last: together no longer than one that fills the context, and no larger than a tenth of
    the memory that was free.

    Args:
        target (`PreTrainedModel`): Whose caches.
    """

    def __init__(self, target):
        self.longest = context_of(target)
        self.memory = _SHARE * free_memory(target.device)
        self.kept: list[Conversation] = []

    def take(self, ids: list[int]) -> tuple[DynamicCache | None, int]:
        """
        A cache that holds as many as possible of the first of these tokens, and how many.

        The next turn of a conversation takes its cache. A conversation that only begins like another one, as with the
        same instructions, shares the tensors of this beginning: what follows is written into new ones.
        """
        common = [len(commonprefix([one.text, ids[:-1]])) for one in self.kept]  # one token is left to be read
        length = max(common, default=0)
        if not length:
            return None, 0
        found = self.kept[common.index(length)]
        cache, whole = found.cache, length == len(found.text)
        taken = whole or (length >= found.prompt - _OPENING and len(ids) > found.prompt)
        if not taken and length < _WORTH_SHARING:
            return None, 0
        if not whole:
            cache = copy.copy(found.cache)
            cache.layers = [copy.copy(layer) for layer in cache.layers]
            try:
                cache.crop(length - len(found.text))
            except RuntimeError:  # sliding windows and recurrent states have forgotten what came before
                return None, 0
            if found.cache in CONTEXTS:  # drafters write into them; without 850 tokens of it, tau was 15 % lower
                contexts = CONTEXTS[found.cache]
                CONTEXTS[cache] = contexts if taken else copy.deepcopy(contexts)
        if taken:
            self.kept.remove(found)
        return cache, length

    def keep(self, text: list[int], prompt: int, cache) -> None:
        """Keep the cache of a text that begins with a prompt of so many tokens, as far as it was read."""
        if not isinstance(cache, DynamicCache) or not (length := cached_columns(cache)):
            return
        self.kept.append(Conversation(text[:length], prompt, cache))
        while len(self.kept) > 1 and self._too_many():
            del self.kept[0]

    def _too_many(self) -> bool:
        tokens, memory = (sum(one) for one in zip(*((len(one.text), one.memory) for one in self.kept), strict=True))
        return memory > self.memory or (self.longest is not None and tokens > self.longest)
