"""
The vocabulary of a drafter: all tokens of its target, with the target's LM head, or a reduced one, the target's most
frequent `draft_vocab_size` tokens, with an LM head of its own and the table `d2t` from its ids to the target's.
"""

import copy

import torch

from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.targets.weights import plain_weight


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
    weight = plain_weight(target.get_output_embeddings())  # [V, H]
    size = draft.config.draft_vocab_size
    num_tokens = weight.shape[0]
    counts = torch.nn.functional.pad(counts, (0, max(num_tokens - len(counts), 0)))[:num_tokens]
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values  # ties go to the lowest ids
    draft.d2t.copy_(ids - torch.arange(size))
    draft.lm_head.weight.copy_(weight[ids.to(weight.device)])
    return (counts[ids].sum() / counts.sum().clamp(min=1)).item()


def draft_ids(draft, embedding_rows: int = 0) -> torch.LongTensor | None:
    """
    The drafter's id of each of the target's tokens, `[V]`, -1 for tokens that it cannot draft; `None` if it drafts all
    tokens of a target whose embedding has this many rows.

    Raises:
        `ValueError`: its vocabulary was never chosen.
    """
    size = draft.config.vocab_size
    is_reduced = draft.config.has_own_lm_head
    if not is_reduced and (size is None or embedding_rows <= size):
        return None
    # Not visible in `d2t`, which is also 0 for a vocabulary of the target's first tokens.
    if is_reduced and draft.lm_head.weight.numel() > 0 and not draft.lm_head.weight.any():
        raise ValueError(
            f"draft_vocab_size={draft.config.draft_vocab_size}, but the drafter's tokens were not chosen (its head is "
            "0): call `dflash_hf.pairs.draft_vocabulary.set_draft_vocabulary(draft, target, counts)` before training."
        )
    ids = torch.full((max(embedding_rows, size),), -1, device=draft.device)
    own = torch.arange(draft.config.draft_vocab_size or size, device=draft.device)
    return ids.index_put((draft.target_ids(own),), own)


def with_shared_head(draft: DFlashDraftModel) -> DFlashDraftModel:
    """
    The same drafter over the target's whole vocabulary, with the target's head.

    Args:
        draft (`DFlashDraftModel`): A drafter with a reduced vocabulary; it is not changed.

    Raises:
        `ValueError`: its token head only covers its own tokens.
    """
    config = copy.deepcopy(draft.config)
    config.draft_vocab_size = None
    shared = DFlashDraftModel(config).to(draft.dtype)
    tensors = draft.state_dict()
    for name in ("lm_head.weight", "d2t"):
        tensors.pop(name, None)
    for name, tensor in shared.state_dict().items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(
                f"share_head=True: {name} only covers the {draft.config.draft_vocab_size} tokens of the drafter, and "
                f"is part of its {draft.config.token_head_class.name}; train it over the whole vocabulary instead."
            )
    shared.load_state_dict(tensors)
    return shared
