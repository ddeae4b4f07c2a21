"""The caches of the latest conversations: the next turn of one reads only its new tokens."""

import copy
from typing import NamedTuple

from torch import Tensor
from transformers import DynamicCache

from dflash_hf.decoding.draft_context import KEPT_CONTEXTS
from dflash_hf.decoding.slots import cached_length, common_prefix_length
from dflash_hf.targets.generation import context_length_of, eos_ids
from dflash_hf.targets.memory import free_memory


_MEMORY_SHARE = 0.1  # share of the free memory that all caches together may take
# Tokens at the end of a prompt, after its last message, that open the answer: Qwen3 without thinking has 8. The
# template may render them differently in the next turn.
_MAX_OPENING_TOKENS = 8
_MIN_SHARED_TOKENS = 64  # shorter common prefixes are read with the rest


class CachedPrefix(NamedTuple):
    """
    The cache of a prompt and its answer, which later prompts may begin with.

    Args:
        token_ids (`list[int]`): The tokens in the cache.
        prompt_length (`int`): How many of them were the prompt.
        message_end (`int`): How many of them were the prompt without the tokens that opened the answer.
        cache (`DynamicCache`): The target's cache. A drafter's context goes with it.
    """

    token_ids: list[int]
    prompt_length: int
    message_end: int
    cache: DynamicCache

    @property
    def storages(self) -> dict[int, int]:
        """
        Bytes of each storage that the cache and the drafters' contexts keep alive, by its address. A cropped tensor is
        a view, and keeps the storage of what was cropped.
        """
        states = _states_of(self.cache)
        for context in KEPT_CONTEXTS.of_cache(self.cache):
            states += _states_of(context.cache)
            states += [features for features, _ in context.pending]
        storages: dict[int, int] = {}
        for state in states:
            for part in state if isinstance(state, list) else [state]:
                if isinstance(part, Tensor):
                    storage = part.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        return storages


def _states_of(cache) -> list:
    """The attributes of a cache's layers: tensors, lists of tensors, and others."""
    states: list = []
    for layer in cache.layers:
        states += vars(layer).values()
    return states


class PrefixCaches:
    """
    The caches of conversations, the latest last: together they hold no more tokens than the target's context, and no
    more than a tenth of the memory that was free.

    A cache that is taken belongs to the call of `generate` that it is passed to, which changes it; the one that this
    call returns is kept in its place.

    Args:
        target (`PreTrainedModel`): The target whose caches are kept.
    """

    def __init__(self, target):
        self.max_tokens = context_length_of(target)
        self.max_memory = _MEMORY_SHARE * free_memory(target.device)  # bytes
        self.eos_ids = eos_ids(target.generation_config)
        self.entries: list[CachedPrefix] = []

    def clear(self) -> None:
        """Drop all caches."""
        self.entries.clear()

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
        # 1. The entry with the longest common prefix; of several, the oldest.
        readable = token_ids[:-1]
        common_lengths = [common_prefix_length(entry.token_ids, readable) for entry in self.entries]
        length = max(common_lengths, default=0)
        if not length:
            return None, 0
        entry = self.entries[common_lengths.index(length)]
        # 2. Is it the same conversation? Then its last message is in the prefix. If in doubt it is not: the tensors
        #    are shared, and the entry stays.
        is_whole = length == len(entry.token_ids)
        has_last_message = length >= entry.message_end and len(token_ids) > entry.prompt_length
        is_next_turn = is_whole or has_last_message
        if not is_next_turn and length < _MIN_SHARED_TOKENS:
            return None, 0
        # 3. Its cache, or a copy that is cropped.
        cache = entry.cache
        if not is_whole:
            cache = _cropped(entry, length)
            if cache is None:
                return None, 0
            # Without 850 tokens of a drafter's context, tau was 15 % lower. Drafters write into it: copy a shared one.
            if is_next_turn:
                KEPT_CONTEXTS.move(entry.cache, cache)
            else:
                KEPT_CONTEXTS.copy(entry.cache, cache)
        if is_next_turn:
            self.entries.remove(entry)
        return cache, length

    def keep(self, token_ids: list[int], prompt_length: int, cache) -> None:
        """
        Keep a cache, and drop the oldest ones where they become too large together.

        Args:
            token_ids (`list[int]`): Prompt and answer; the last of them may not be in the cache.
            prompt_length (`int`): How many of them are the prompt.
            cache (`Cache`): The target's cache after the answer; ignored if it is not a `DynamicCache`.
        """
        if not isinstance(cache, DynamicCache):
            return
        length = cached_length(cache)
        if not length:
            return
        message_end = self._message_end(token_ids[:prompt_length])
        self.entries.append(CachedPrefix(token_ids[:length], prompt_length, message_end, cache))
        while len(self.entries) > 1 and self._are_too_large():
            del self.entries[0]

    def _message_end(self, prompt: list[int]) -> int:
        """
        Where the last message of a prompt ends: after an end-of-sequence token, which most templates put there, if
        only what opens the answer follows it; else the prompt's length.
        """
        for opening_length in range(min(_MAX_OPENING_TOKENS + 1, len(prompt))):
            if prompt[len(prompt) - 1 - opening_length] in self.eos_ids:
                return len(prompt) - opening_length
        return len(prompt)

    def _are_too_large(self) -> bool:
        num_tokens = sum(len(entry.token_ids) for entry in self.entries)
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            return True
        storages: dict[int, int] = {}  # one that several caches share is counted once
        for entry in self.entries:
            storages |= entry.storages
        return sum(storages.values()) > self.max_memory


def _cropped(entry: CachedPrefix, length: int) -> DynamicCache | None:
    """A copy of an entry's cache with its first `length` tokens, as views; `None` if it cannot be cropped."""
    cache = copy.copy(entry.cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    try:
        cache.crop(length - len(entry.token_ids))
    except RuntimeError:  # sliding windows and recurrent states have forgotten what came before
        return None
    return cache
