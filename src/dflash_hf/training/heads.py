"""How heads learn from whole blocks whose tokens are known; each head has its own loss, `TokenHead.loss`."""

import torch

from dflash_hf.modeling.head_dflash import TokenHead


def forced_queries(
    head: TokenHead, previous_ids: torch.LongTensor, hidden: torch.Tensor, draftable: torch.BoolTensor
) -> torch.Tensor:
    """
    The queries of whole blocks whose tokens are known.

    Args:
        head (`TokenHead`): The drafter's head.
        previous_ids (`torch.LongTensor`): `[..., B]`, the token before each slot; slot 0 is the anchor's own.
        hidden (`torch.Tensor`): `[..., B, H]`.
        draftable (`torch.BoolTensor`): `[..., B]`, the slots to learn from, never slot 0.

    Returns:
        `torch.Tensor` `[M, q]`, the queries of these slots.
    """
    if head.order <= 1:
        return head.step(None, previous_ids[draftable], hidden[draftable])[0]
    previous_ids = previous_ids.flatten(0, -2)  # [R, B]
    hidden = hidden.flatten(0, -3)  # [R, B, H]
    state = head.start(previous_ids[:, 1])
    queries = []
    for slot in range(1, previous_ids.shape[1]):
        query, state = head.step(state, previous_ids[:, slot], hidden[:, slot])
        queries.append(query)
    return torch.stack(queries, dim=1).unflatten(0, draftable.shape[:-1])[draftable[..., 1:]]
