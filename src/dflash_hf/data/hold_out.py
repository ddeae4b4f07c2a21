"""Which conversations of a dataset are held out of training: the same in every run with the same seed."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np


MIN_CONVERSATIONS = 20  # if there are fewer, none is held out
MAX_HELD_OUT = 256  # enough to measure tau to about a hundredth, with 16 blocks of each row


def conversation_key(ids: np.ndarray, mask: np.ndarray, images: Sequence[str] = ()) -> int:
    """
    A 64-bit number that rows of the same prompt share, so that no answer to a prompt is trained on while another one
    is held out: a digest of the ids before the first supervised token, and of the images. Text without a prompt, whose
    first token alone is not supervised, is identified by all of its ids.

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
    if conversations < MIN_CONVERSATIONS:
        return 0
    if conversations < 80:
        return conversations // 10
    return min(max(8, conversations // 20), MAX_HELD_OUT)


def hold_out(keys: Sequence[int], count: int | None, seed: int) -> tuple[list[int], list[int], int]:
    """
    Choose which rows are held out, by the seed and the conversations' content, not by their indices: the same rows in
    another order give the same choice.

    Args:
        keys (`Sequence[int]`): The conversation of each row, see [`conversation_key`]. One with more than a tenth of
            the rows is never held out.
        count (`int`, *optional*): Conversations to hold out; default: [`default_held_out`].
        seed (`int`): Seed of the choice.

    Returns:
        The indices of the rows to train on, those of the rows that are held out, and the number of conversations among
        the latter.

    Raises:
        `ValueError`: `count` is negative, more than half of the conversations, or more than may be held out.
    """
    row_counts = Counter(keys)
    is_default = count is None
    if count is None:
        count = default_held_out(len(row_counts))
    elif not 0 <= count <= len(row_counts) / 2:
        raise ValueError(
            f"held_out_rows={count} must be from 0, for none, to half of the {len(row_counts):,} rows with different "
            "prompts."
        )
    shuffled = sorted(row_counts, key=lambda key: hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest())
    eligible = [key for key in shuffled if row_counts[key] == 1 or 10 * row_counts[key] <= len(keys)]
    if not is_default and count > len(eligible):
        raise ValueError(
            f"held_out_rows={count}, but only {len(eligible):,} of the {len(row_counts):,} different prompts have at "
            "most a tenth of the rows, and the others are never held out; ask for fewer, or leave it out."
        )
    chosen = set(eligible[:count])
    trained = [index for index, key in enumerate(keys) if key not in chosen]
    held_out = [index for index, key in enumerate(keys) if key in chosen]
    return trained, held_out, len(chosen)
