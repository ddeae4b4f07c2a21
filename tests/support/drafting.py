"""Drafts of a generator, outside of a loop."""

import torch

from dflash_hf.modeling.accept_dflash import Draft
from dflash_hf.modeling.drafting_dflash import DFlashCandidateGenerator
from dflash_hf.modeling.plan_dflash import Plan


def proposed(
    generator: DFlashCandidateGenerator,
    anchors: torch.LongTensor,
    start: torch.LongTensor,
    plan: Plan | None = None,
    features: tuple | None = None,
) -> Draft:
    """
    What a generator drafts.

    Args:
        generator (`DFlashCandidateGenerator`): Opened, with room for a block.
        anchors (`torch.LongTensor`): `[R]`.
        start (`torch.LongTensor`): `[R]`, their places.
        plan (`Plan`, *optional*): Default: a whole block.
        features (`tuple`, *optional*): Features of the last block, and where it starts. Default: none, as in the first
            round.
    """
    size = generator.config.block_tokens
    features = generator.no_features(start, size)[:2] if features is None else features
    return generator.propose(plan or generator.plan(size), anchors, start, *features)
