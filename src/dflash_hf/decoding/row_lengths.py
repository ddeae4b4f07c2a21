"""Lengths of rows, known to the host and to the device."""

import torch

from dflash_hf.decoding.acceptance import Acceptance


class RowLengths:
    """
    How many tokens each row has. The host makes room by these numbers, the device computes indices from them; both
    count for themselves, so that a round copies nothing to the device.

    Args:
        lengths (`list[int]`): One for each row.
        device (`torch.device`): Where indices are computed.

    Attributes:
        on_host (`list[int]`): The lengths.
        on_device (`torch.LongTensor`): The same, `[R]`.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        self.on_host = lengths
        self.on_device = torch.tensor(lengths, dtype=torch.long, device=device)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.on_host)

    @property
    def starts(self) -> torch.LongTensor:
        """`[R, 1]`, the index of each row's next token."""
        return self.on_device[:, None]

    def add(self, acceptance: Acceptance) -> None:
        """Count the tokens that a round has committed."""
        self.on_host = [length + count for length, count in zip(self.on_host, acceptance.counts, strict=True)]
        self.on_device = self.on_device + acceptance.device_counts.to(self.on_device.device)
