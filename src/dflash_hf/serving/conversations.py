"""The caches of the latest conversations: their next turns read only what is new."""

from os.path import commonprefix

from transformers import DynamicCache

from dflash_hf.configs import positions_of
from dflash_hf.modeling.cache_dflash import cached_columns


_MOST = 4  # conversations, which together are no longer than one that fills the context


class Conversations:
    """
    Caches of texts, the latest last. A drafter's context goes along with the cache.

    Args:
        target (`PreTrainedModel`): Whose caches.
    """

    def __init__(self, target):
        self.longest = positions_of(target.config.get_text_config(decoder=True).to_dict())
        self.kept: list[tuple[list[int], DynamicCache]] = []

    def take(self, ids: list[int]) -> tuple[DynamicCache | None, int]:
        """
        The cache whose text has the longest beginning in common with `ids`, cut to that beginning, and its length. A
        text of which less than half is wanted stays for the conversation that it belongs to.
        """
        common = [len(commonprefix([read, ids[:-1]])) for read, _ in self.kept]  # one token is left to be read
        best = max(range(len(common)), key=common.__getitem__, default=None)
        if best is None or 2 * common[best] < len(self.kept[best][0]) or not common[best]:
            return None, 0
        (read, cache), length = self.kept.pop(best), common[best]
        if length < len(read):
            try:
                cache.crop(length - len(read))
            except RuntimeError:  # sliding windows and recurrent states have forgotten what came before
                return None, 0
        return cache, length

    def keep(self, text: list[int], cache) -> None:
        """Keep the cache of a text, as far as it was read."""
        if not isinstance(cache, DynamicCache):
            return
        self.kept.append((text[: cached_columns(cache)], cache))
        total = 0
        for number, (read, _) in enumerate(reversed(self.kept)):
            total += len(read)
            if number == _MOST or (number and self.longest is not None and total > self.longest):
                del self.kept[: len(self.kept) - number]
                break
