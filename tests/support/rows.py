"""Prompts of different lengths, and rows to train on."""

import torch

from dflash_hf.data.examples import make_example
from support.pairs import VOCAB


def ragged_prompts(rows: int, longest: int = 11, seed: int = 0):
    """Left-padded prompts `[rows, longest]` of different lengths, and their padding."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB - 1, (rows, longest), generator=random)
    pads = [0] + [int(torch.randint(0, longest - 2, (1,), generator=random)) for _ in range(rows - 1)]
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}, pads


def counting_rows(count, length=24, prompt=4, modulus=90):
    """
    So many examples of `length` tokens, of which the first `prompt` have no loss. Every token is its predecessor plus
    3, modulo `modulus`: the anchor alone tells the block.
    """
    starts = torch.randint(0, 90, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    examples = []
    for start in starts:
        tokens = [(start + 3 * j) % modulus for j in range(length)]
        examples.append(make_example(tokens[:prompt], tokens[prompt:]))
    return examples


def uneven_rows():
    """Four rows with very different numbers of supervised tokens; the second has no anchor at all."""
    rows = [counting_rows(4, length)[i] for i, length in enumerate((24, 5, 9, 16))]
    assert sum(rows[1]["loss_mask"]) == 1
    return rows
