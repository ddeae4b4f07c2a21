"""DFlash 2's grouped dynamic causal convolution along a block, around the attention and the MLP of every layer."""

import torch
from torch import nn


class BlockConvolution(nn.Module):
    """
    Mixes each slot of a block with the slots before it; one instance is applied to a sublayer's input and to its
    output.

    With `x` the sublayer's input after its norm, a projection of `x_t` gives the corrections `delta` of *both*
    applications, and each computes `y_t[c] = sum_o (base[o, c] + delta_t[o, group(c)]) * x_{t-o}[c]`. Slots before the
    anchor are zeros: a convolution never crosses the edge of a block. At initialisation it is the identity, bit for
    bit.

    Args:
        config (`DFlashDraftConfig`): `conv_kernel_size` taps, `conv_group_size` channels that share a correction.
    """

    def __init__(self, config):
        super().__init__()
        self.block_size, self.taps, self.group_size = (
            config.block_size,
            config.conv_kernel_size,
            config.conv_group_size,
        )
        self.groups = config.hidden_size // self.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))  # before, after the sublayer
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def corrections(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`delta` before and after the sublayer, each `[N, Q, taps, G]`, from the sublayer's input `[N, Q, H]`."""
        delta = self.kernel_projection(hidden_states).unflatten(-1, (2, self.taps, self.groups))
        return delta[:, :, 0], delta[:, :, 1]

    def forward(self, hidden_states: torch.Tensor, delta: torch.Tensor, after: bool) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor`): `[N, Q, H]`, `Q` a single block or a whole number of them side by side.
            delta (`torch.Tensor`): `[N, Q, taps, G]`.
            after (`bool`): Whether this is the sublayer's output.

        Raises:
            `ValueError`: a length that is not a whole number of blocks.
        """
        length = hidden_states.shape[1]
        size = min(self.block_size, length)
        if length % size:
            raise ValueError(
                f"noise_embeds has {length} slots, which are not whole blocks of block_size={self.block_size}: the "
                "convolution would run across the edge of a block."
            )
        blocks = hidden_states.unflatten(-1, (self.groups, self.group_size))  # [N, Q, G, C/G]
        blocks = blocks.unflatten(1, (-1, size))  # [N, blocks, B, G, C/G]
        delta = delta.unflatten(1, (-1, size)).unsqueeze(-1)  # [N, blocks, B, taps, G, 1]
        base = self.base_kernel[int(after)].unflatten(-1, (self.groups, self.group_size))  # [taps, G, C/G]
        output = (base[0] + delta[:, :, :, 0]) * blocks
        for tap in range(1, self.taps):
            earlier = nn.functional.pad(blocks[:, :, :-tap], (0, 0, 0, 0, tap, 0))  # slot t - tap, zeros at the edge
            output = output + (base[tap] + delta[:, :, :, tap]) * earlier
        return output.flatten(1, 2).flatten(-2)
