"""
A round's candidates, and what the target accepts of them: the longest path of its own choices, and one more token.
"""

import math
from typing import NamedTuple

import torch


ARGMAX_CHUNK = 256  # ids whose scores are reduced at once on a CPU; see `argmax_token`
MIN_ARGMAX_CHUNK = 32  # below, `argmax_token` does without chunks


class Block(NamedTuple):
    """
    One path of candidate tokens for each row. A [`~dflash_hf.decoding.trees.Tree`] also has these attributes and
    methods. Throughout, a *node* is the number of a token among the candidates; node 0 is the anchor.

    Attributes:
        tokens (`torch.LongTensor`): `[R, n]` token ids, the anchor first: the last committed token of each row.
        depths (`torch.LongTensor`, *optional*): `[R, n]`, each node's distance from the anchor; `None`: its number.
        ancestors (`torch.BoolTensor`, *optional*): `[R, n, n]`, whether a node attends to another, itself included;
            `None`: to all before it.
    """

    tokens: torch.LongTensor
    depths: torch.LongTensor | None = None
    ancestors: torch.BoolTensor | None = None

    @property
    def max_depth(self) -> int:
        """The largest depth of a node."""
        return self.tokens.shape[1] - 1

    def longest_match(self, target_tokens: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor | None]:
        """
        The longest path on which every drafted token is the target's own choice.

        Args:
            target_tokens (`torch.LongTensor`): `[R, n]`, the target's choice after each candidate.

        Returns:
            The number of tokens of the path `[R]`, anchor included; and its nodes `[R, m]`, or `None` if every row's
            are 0, 1, 2, ...
        """
        matches = target_tokens[:, :-1] == self.tokens[:, 1:]
        return 1 + matches.long().cumprod(dim=1).sum(dim=1), None

    def child_by_token(self, row: int) -> dict[tuple[int, int], int]:
        """The nodes of a row, by (parent node, token id)."""
        return {(parent, token): parent + 1 for parent, token in enumerate(self.tokens[row, 1:].tolist())}


class Acceptance(NamedTuple):
    """
    What the target accepts of a round's candidates: lists for the host, tensors for the device. A round copies its
    result to the host once, and nothing back.

    Attributes:
        paths (`list[list[int]]`): The accepted candidates of each row, by number, the anchor first. The row commits
            the target's choice after each of them, the last of which is the bonus token. Empty for rows that had ended
            before.
        device_counts (`torch.LongTensor`): `[R]`, the lengths of the paths.
        device_path (`torch.LongTensor`, *optional*): `[R, m]`, the paths, and any numbers behind them; `None`: they
            are 0, 1, 2, ... in every row.
    """

    paths: list[list[int]]
    device_counts: torch.LongTensor
    device_path: torch.LongTensor | None = None

    @classmethod
    def from_paths(cls, paths: list[list[int]], device: torch.device | str = "cpu") -> "Acceptance":
        """From the accepted candidates of each row."""
        counts = torch.tensor([len(path) for path in paths], device=device)
        if all(path == list(range(len(path))) for path in paths):
            return cls(paths, counts)
        longest = max(map(len, paths))
        padded = [path + [0] * (longest - len(path)) for path in paths]
        return cls(paths, counts, torch.tensor(padded, device=device))

    @classmethod
    def from_counts(cls, counts: list[int], device: torch.device | str = "cpu") -> "Acceptance":
        """The first candidates of each row, so many."""
        return cls.from_paths([list(range(count)) for count in counts], device)

    @property
    def counts(self) -> list[int]:
        """Tokens that each row commits, the bonus token included."""
        return [len(path) for path in self.paths]

    def select(self, states: torch.Tensor) -> torch.Tensor:
        """`[R, max(counts), F]` of the accepted path, from `[R, n, F]` of all candidates."""
        longest = max(self.counts)
        if self.device_path is None:
            return states[:, :longest]
        path = self.device_path[:, :longest].to(states.device)
        rows = torch.arange(len(states), device=states.device)[:, None]
        return states[rows, path]


def argmax_token(scores: torch.Tensor) -> torch.LongTensor:
    """
    As `argmax` over the vocabulary; ties go to the lowest id.

    On a CPU `amax` alone is vectorised: it finds the chunk with the likeliest token, five to nine times as fast in
    fp32. `argmax` takes four times as long as `max` in bfloat16.
    """
    chunk = math.gcd(scores.shape[-1], ARGMAX_CHUNK)
    if scores.device.type != "cpu" or chunk < MIN_ARGMAX_CHUNK:
        return scores.max(dim=-1).indices
    chunks = scores.unflatten(-1, (-1, chunk))  # [..., C, chunk]
    best = chunks.amax(dim=-1).max(dim=-1, keepdim=True).indices  # [..., 1]
    inside = chunks.take_along_dim(best[..., None], dim=-2)[..., 0, :]  # [..., chunk]
    return best[..., 0] * chunk + inside.max(dim=-1).indices
