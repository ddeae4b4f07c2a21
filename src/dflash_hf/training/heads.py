"""How heads learn from whole blocks whose tokens are known; each head has its own loss, `Head.loss`."""

import torch

from dflash_hf.modeling.head_dflash import Head


def forced_queries(
    head: Head, before: torch.LongTensor, hidden: torch.Tensor, draftable: torch.BoolTensor
) -> torch.Tensor:
    """
    The queries of whole blocks whose tokens are known.

    Args:
        head (`Head`): The drafter's head.
        before (`torch.LongTensor`): `[..., B]`, the token before each slot; slot 0 is the anchor's own.
        hidden (`torch.Tensor`): `[..., B, H]`.
        draftable (`torch.BoolTensor`): `[..., B]`, the slots to learn from, never slot 0.

    Returns:
        `torch.Tensor` `[M, q]`, the queries of these slots.
    """
    if head.order <= 1:
        return head.step(None, before[draftable], hidden[draftable])[0]
    before = before.flatten(0, -2)  # [R, B]
    hidden = hidden.flatten(0, -3)  # [R, B, H]
    state = head.start(before[:, 1])
    queries = []
    for slot in range(1, before.shape[1]):
        query, state = head.step(state, before[:, slot], hidden[:, slot])
        queries.append(query)
    return torch.stack(queries, dim=1).unflatten(0, draftable.shape[:-1])[draftable[..., 1:]]
