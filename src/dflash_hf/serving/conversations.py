"""The caches of the latest conversations: the next turn of one reads only its new tokens."""

import copy
from os.path import commonprefix
from typing import NamedTuple

from torch import Tensor
from transformers import DynamicCache

from dflash_hf.decoding.draft_context import KEPT_CONTEXTS
from dflash_hf.decoding.slots import cached_length
from dflash_hf.targets.generation import context_length_of
from dflash_hf.targets.memory import free_memory


_MEMORY_SHARE = 0.1  # of the free memory, which all caches together may take
_MAX_OPENING_TOKENS = 8  # tokens at the end of a prompt that open the answer, which the next turn may write otherwise
_MIN_SHARED_TOKENS = 64  # shorter common prefixes are read with the rest


class Conversation(NamedTuple):
    """
    The cache of one conversation.

    Args:
        token_ids (`list[int]`): The tokens in the cache.
        prompt_length (`int`): How many of them were the prompt.
        cache (`DynamicCache`): The target's cache. A drafter's context goes with it.
    """

    token_ids: list[int]
    prompt_length: int
    cache: DynamicCache

    @property
    def memory(self) -> int:
        """Bytes of the cache and of the drafters' contexts."""
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
    The caches of conversations, the latest last: together they hold no more tokens than the target's context, and no
    more than a tenth of the memory that was free.

    Args:
        target (`PreTrainedModel`): The target whose caches are kept.
    """

    def __init__(self, target):
        self.max_tokens = context_length_of(target)
        self.max_memory = _MEMORY_SHARE * free_memory(target.device)  # bytes
        self.entries: list[Conversation] = []

    def take(self, token_ids: list[int]) -> tuple[DynamicCache | None, int]:
        """
        The cache with the longest common prefix with a prompt, cropped to this prefix.

        The next turn of a conversation takes its cache away. A conversation that only begins like another one, as with
        the same instructions, shares the tensors of the prefix: what follows is written into new ones.

        Args:
            token_ids (`list[int]`): The prompt. Its last token is never in the cache: the target must read one.

        Returns:
            The cache, and the number of tokens in it; `None` and 0 if none is worth taking.
        """
        readable = token_ids[:-1]
        common_lengths = [len(commonprefix([entry.token_ids, readable])) for entry in self.entries]
        length = max(common_lengths, default=0)
        if not length:
            return None, 0
        conversation = self.entries[common_lengths.index(length)]
        cache = conversation.cache
        is_whole = length == len(conversation.token_ids)
        is_next_turn = is_whole or (
            length >= conversation.prompt_length - _MAX_OPENING_TOKENS and len(token_ids) > conversation.prompt_length
        )
        if not is_next_turn and length < _MIN_SHARED_TOKENS:
            return None, 0
        if not is_whole:
            cache = copy.copy(conversation.cache)
            cache.layers = [copy.copy(layer) for layer in cache.layers]
            try:
                cache.crop(length - len(conversation.token_ids))
            except RuntimeError:  # sliding windows and recurrent states have forgotten what came before
                return None, 0
            # Drafters write into them; without 850 tokens of it, tau was 15 % lower.
            if conversation.cache in KEPT_CONTEXTS:
                contexts = KEPT_CONTEXTS[conversation.cache]
                KEPT_CONTEXTS[cache] = contexts if is_next_turn else copy.deepcopy(contexts)
        if is_next_turn:
            self.entries.remove(conversation)
        return cache, length

    def keep(self, token_ids: list[int], prompt_length: int, cache) -> None:
        """
        Keep a cache, and drop the oldest ones where they become too large together.

        Args:
            token_ids (`list[int]`): Prompt and answer; the last of them may not be in the cache.
            prompt_length (`int`): How many of them are the prompt.
            cache (`Cache`): The target's cache after the answer; ignored if it is no `DynamicCache`.
        """
        if not isinstance(cache, DynamicCache):
            return
        length = cached_length(cache)
        if not length:
            return
        self.entries.append(Conversation(token_ids[:length], prompt_length, cache))
        while len(self.entries) > 1 and self._are_too_large():
            del self.entries[0]

    def _are_too_large(self) -> bool:
        tokens = sum(len(entry.token_ids) for entry in self.entries)
        memory = sum(entry.memory for entry in self.entries)
        return memory > self.max_memory or (self.max_tokens is not None and tokens > self.max_tokens)
