"""The caches of the latest conversations: their next turns read only what is new."""

import copy
from os.path import commonprefix
from typing import NamedTuple

from torch import Tensor
from transformers import DynamicCache

from dflash_hf.decoding.draft_context import KEPT_CONTEXTS
from dflash_hf.decoding.slots import cached_length
from dflash_hf.targets.generation import context_of
from dflash_hf.targets.memory import free_memory


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
        states: list = []
        states += _states_of(self.cache)
        for context in KEPT_CONTEXTS.get(self.cache, {}).values():
            states += _states_of(context.cache)
            states += [features for features, _ in context.pending]
        tensors = []
        for state in states:
            parts = state if isinstance(state, list) else [state]
            tensors += [part for part in parts if isinstance(part, Tensor)]
        return sum(tensor.nbytes for tensor in tensors)


def _states_of(cache) -> list:
    """The attributes of a cache's layers: tensors, lists of tensors, and others."""
    states: list = []
    for layer in cache.layers:
        states += vars(layer).values()
    return states


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
        self.entries: list[Conversation] = []

    def take(self, ids: list[int]) -> tuple[DynamicCache | None, int]:
        """
        A cache that holds as many as possible of the first of these tokens, and how many.

        The next turn of a conversation takes its cache. A conversation that only begins like another one, as with the
        same instructions, shares the tensors of this beginning: what follows is written into new ones.
        """
        readable = ids[:-1]  # one token is left to be read
        common_lengths = [len(commonprefix([entry.text, readable])) for entry in self.entries]
        length = max(common_lengths, default=0)
        if not length:
            return None, 0
        conversation = self.entries[common_lengths.index(length)]
        cache = conversation.cache
        is_whole = length == len(conversation.text)
        is_next_turn = is_whole or (length >= conversation.prompt - _OPENING and len(ids) > conversation.prompt)
        if not is_next_turn and length < _WORTH_SHARING:
            return None, 0
        if not is_whole:
            cache = copy.copy(conversation.cache)
            cache.layers = [copy.copy(layer) for layer in cache.layers]
            try:
                cache.crop(length - len(conversation.text))
            except RuntimeError:  # sliding windows and recurrent states have forgotten what came before
                return None, 0
            # Drafters write into them; without 850 tokens of it, tau was 15 % lower.
            if conversation.cache in KEPT_CONTEXTS:
                contexts = KEPT_CONTEXTS[conversation.cache]
                KEPT_CONTEXTS[cache] = contexts if is_next_turn else copy.deepcopy(contexts)
        if is_next_turn:
            self.entries.remove(conversation)
        return cache, length

    def keep(self, text: list[int], prompt: int, cache) -> None:
        """Keep the cache of a text that begins with a prompt of so many tokens, as far as it was read."""
        if not isinstance(cache, DynamicCache):
            return
        length = cached_length(cache)
        if not length:
            return
        self.entries.append(Conversation(text[:length], prompt, cache))
        while len(self.entries) > 1 and self._are_too_large():
            del self.entries[0]

    def _are_too_large(self) -> bool:
        tokens = sum(len(entry.text) for entry in self.entries)
        memory = sum(entry.memory for entry in self.entries)
        return memory > self.memory or (self.longest is not None and tokens > self.longest)
