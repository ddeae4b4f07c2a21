"""The blocks of one training forward: their inputs, positions and labels. Which keys they see: `block_mask.py`."""

from dataclasses import dataclass

import torch


@dataclass
class Blocks:
    """
    The tensors of `A` blocks of `B` slots for each of `N` sequences of `S` tokens. `T` is the number of tokens of a
    block: `B`, or `B + 1` if the anchor's slot predicts a token, too.
    """

    input_ids: torch.LongTensor  # [N, A*B]  anchor token, then masks
    position_ids: torch.LongTensor  # [N, S + A*B]  context p at p, slot k at a + k
    labels: torch.LongTensor  # [N, A, T]  token at a + k, the anchor first
    counted: torch.BoolTensor  # [N, A, T]  tokens that the loss counts; never the anchor
    previous_index: torch.LongTensor  # [N, A, T]  of the token before, whose state predicts it; in [N*S]


def build_blocks(
    input_ids: torch.LongTensor,
    loss_mask: torch.Tensor,
    anchors: torch.LongTensor,
    valid: torch.BoolTensor,
    block_size: int,
    mask_token_id: int,
    anchor_first: bool = False,
    contiguous_only: bool = False,
) -> Blocks:
    """
    Inputs, positions and labels of the blocks at `anchors`.

    Slot `k` predicts the token at `a + k`, without a shift; slot 0 is the known anchor and predicts nothing. In an
    anchor-first block slot `k` predicts the token at `a + 1 + k`, so the block has one more token.

    Args:
        input_ids (`torch.LongTensor`): `[N, S]`.
        loss_mask (`torch.Tensor`): `[N, S]`, nonzero at tokens that may be labels.
        anchors, valid: `[N, A]`, from [`~dflash_hf.training.anchors.sample_anchors`].
        block_size (`int`): Slots `B` of a block.
        mask_token_id (`int`): Fills slots 1..B-1.
        anchor_first (`bool`): Whether the anchor's slot predicts a token, too: `sample_from_anchor` of the drafter.
        contiguous_only (`bool`): Whether a block counts only up to its first token that may not be a label.
    """
    batch_size, length = input_ids.shape
    num_anchors = anchors.shape[1]
    num_tokens = block_size + 1 if anchor_first else block_size
    token = torch.arange(num_tokens, device=input_ids.device)  # [T]
    position = anchors[..., None] + token  # [N, A, T], a + k
    inside = position.clamp(max=length - 1).flatten(1)  # [N, A*T]

    def at_tokens(values):
        """The entries `[N, A, T]` of values `[N, S]` at the tokens of the blocks."""
        return values.gather(1, inside).view(position.shape)

    counted = at_tokens(loss_mask).bool() & valid[..., None] & (position < length) & (token > 0)
    if contiguous_only:
        counted = counted & (counted | (token == 0)).long().cumprod(-1).bool()

    block_ids = input_ids.new_full((batch_size, num_anchors, block_size), mask_token_id)
    block_ids[..., 0] = input_ids.gather(1, anchors)
    context_positions = torch.arange(length, device=input_ids.device).expand(batch_size, length)
    slot_positions = position[..., :block_size].flatten(1)  # run past the end of the sequence
    row_starts = length * torch.arange(batch_size, device=input_ids.device)[:, None, None]  # in the flattened batch
    return Blocks(
        input_ids=block_ids.flatten(1),
        position_ids=torch.cat([context_positions, slot_positions], dim=1),
        labels=at_tokens(input_ids),
        counted=counted,
        previous_index=row_starts + (position - 1).clamp(0, length - 1),
    )


def by_token(hidden: torch.Tensor, block_size: int, anchor_first: bool = False) -> torch.Tensor:
    """
    The hidden state that predicts each token of a block, `[N, A, T, H]`, from those of its slots, `[N, A*B, H]`; the
    anchor's entry predicts nothing.
    """
    hidden = hidden.unflatten(1, (-1, block_size))
    return torch.nn.functional.pad(hidden, (0, 0, 1, 0)) if anchor_first else hidden
