"""Which conversations of a dataset are held out of training: the same in every run with the same seed."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np


FEWEST = 20  # conversations of which any are held out
MOST_HELD_OUT = 256  # with 16 blocks of each row, tau is known to about a hundredth; more are only missing in training


def conversation_key(ids: np.ndarray, mask: np.ndarray, images: Sequence[str] = ()) -> int:
    """
    A 64-bit number that rows of the same prompt share, so that no answer to a prompt is learned while another one is
    held out: a digest of the ids before the first supervised token, and of the images. Text without a prompt, whose
    first token alone is not supervised, is told apart by all of its ids.

    Args:
        ids, mask (`np.ndarray`): `[T]`, of the first example of a row.
        images (`Sequence[str]`): Paths or URIs of its images.
    """
    start = int(np.argmax(mask != 0))
    prompt = ids[:start] if start > 1 else ids
    digest = hashlib.blake2b(np.asarray(prompt, dtype=np.int32).tobytes(), digest_size=8)
    for image in images:
        digest.update(image.encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def default_held_out(conversations: int) -> int:
    """How many conversations are held out: 5 %, of 80 or more at least 8, at most 256; a tenth of 20 or more."""
    if conversations < FEWEST:
        return 0
    if conversations < 80:
        return conversations // 10
    return min(max(8, conversations // 20), MOST_HELD_OUT)


def hold_out(keys: Sequence[int], count: int | None, seed: int) -> tuple[list[int], list[int], int]:
    """
    Choose what is held out, by the seed and by what a conversation says: not by its place, so that the choice is the
    same for the same rows in another order.

    Args:
        keys (`Sequence[int]`): The conversation of each row, see [`conversation_key`]. One with more than a tenth of
            the rows is never held out.
        count (`int`, *optional*): Conversations to hold out; default: [`default_held_out`].
        seed (`int`): Seed of the choice.

    Returns:
        The places of the rows to train on, those of the rows that are held out, and the number of conversations among
        the latter.

    Raises:
        `ValueError`: `count` is negative, more than half of the conversations, or more than may be held out.
    """
    rows_of = Counter(keys)
    is_default = count is None
    if count is None:
        count = default_held_out(len(rows_of))
    elif not 0 <= count <= len(rows_of) / 2:
        raise ValueError(
            f"held_out_rows={count} must be from 0, for none, to half of the {len(rows_of):,} rows with different "
            "prompts."
        )
    order = sorted(rows_of, key=lambda key: hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest())
    small = [key for key in order if rows_of[key] == 1 or 10 * rows_of[key] <= len(keys)]
    if not is_default and count > len(small):
        raise ValueError(
            f"held_out_rows={count}, but only {len(small):,} of the {len(rows_of):,} different prompts have at most "
            "a tenth of the rows, and the others are never held out; ask for fewer, or leave it out."
        )
    chosen = set(small[:count])
    trained = [place for place, key in enumerate(keys) if key not in chosen]
    held_out = [place for place, key in enumerate(keys) if key in chosen]
    return trained, held_out, len(chosen)
