"""
The reduced vocabulary of a drafter: how many tokens, which ones, and their ids.

A small drafter spends most of its time in the target's head; restricted to the few thousand tokens that the target
actually generates, the head costs a fraction (FR-Spec, arXiv 2502.14856).
"""

import math

import torch

from dflash_hf.training.arguments import ScriptArguments


MAX_DRAFT_VOCABULARY = 8192  # tokens that `draft_vocab_size=-1` chooses at most
# Heaps' law: text of `n` tokens has about `factor * sqrt(n)` distinct ones.
_HEAPS_FACTOR = 16
_SIZE_STEP = 1024  # sizes are multiples of it, for the matrix products of the head


def vocabulary_size(script: ScriptArguments, counts: torch.LongTensor, vocab_size: int) -> int | None:
    """
    `draft_vocab_size` of a run; for -1, about the number of distinct tokens that its data are expected to have
    (Heaps' law), at most 8,192, and the target's own vocabulary if that is less than twice as large.
    """
    if script.draft_vocab_size != -1:
        return script.draft_vocab_size
    distinct_tokens = _HEAPS_FACTOR * math.sqrt(int(counts.sum()))
    size = _SIZE_STEP * math.ceil(distinct_tokens / _SIZE_STEP)
    size = min(size, MAX_DRAFT_VOCABULARY)
    return size if size < vocab_size / 2 else None


@torch.no_grad()
def set_draft_vocabulary(draft, target, counts: torch.LongTensor) -> float:
    """
    Give a drafter with `draft_vocab_size` the most frequent tokens, and their rows of the target's head as its own.

    Args:
        draft (`DFlashDraftModel`): Changed in place.
        target (`PreTrainedModel`): Its target, with head.
        counts (`torch.LongTensor`): How often each token is supervised, see
            [`~dflash_hf.training.rows.validate_and_count`].

    Returns:
        `float`: Share of the counted tokens that it can draft.
    """
    head = target.get_output_embeddings()
    size = draft.config.draft_vocab_size
    head_rows = head.weight.shape[0]
    counts = torch.nn.functional.pad(counts, (0, max(head_rows - len(counts), 0)))[:head_rows]
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values  # ties go to the lowest ids
    draft.d2t.copy_(ids - torch.arange(size))
    draft.lm_head.weight.copy_(head.weight[ids.to(head.weight.device)])
    return (counts[ids].sum() / counts.sum().clamp(min=1)).item()


def draft_ids(draft, embedding_rows: int = 0) -> torch.LongTensor | None:
    """
    The drafter's id of each of the target's tokens, `[V]`, -1 for tokens that it cannot draft; `None` if it has all
    tokens of a target with `embedding_rows` rows in its embedding.

    Raises:
        `ValueError`: its vocabulary was never chosen.
    """
    size = draft.config.vocab_size
    reduced = draft.config.has_own_lm_head
    if not reduced and (size is None or embedding_rows <= size):
        return None
    # d2t is 0 for the first tokens of the target, too.
    if reduced and draft.lm_head.weight.numel() > 0 and not draft.lm_head.weight.any():
        raise ValueError(
            f"draft_vocab_size={draft.config.draft_vocab_size}, but the drafter's tokens were not chosen (its head "
            "is 0): call `dflash_hf.training.draft_vocabulary.set_draft_vocabulary(draft, target, counts)` before "
            "training."
        )
    ids = torch.full((max(embedding_rows, size),), -1, device=draft.device)
    own = torch.arange(draft.config.draft_vocab_size or size, device=draft.device)
    return ids.index_put((draft.target_ids(own),), own)
