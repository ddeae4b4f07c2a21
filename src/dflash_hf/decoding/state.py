"""The generation state: the text of all rows, what is committed to it, and streaming."""

import torch

from dflash_hf.decoding.acceptance import Acceptance, Block, acceptance_of
from dflash_hf.decoding.selection import TokenSelector


class GenerationState:
    """
    The rows of a text, and how they grow.

    Args:
        prompt (`torch.LongTensor`): `[R, S]`.
        selector (`TokenSelector`): How tokens are chosen, and where rows end.

    Attributes:
        lengths (`list[int]`): Tokens generated in each row.
        alive (`list[bool]`): Rows that have not ended.
        last (`torch.LongTensor`): `[R]`, the last committed token of each row: the anchors of the next draft.
        acceptance_lengths (`list[list[int]]`): For each row, the tokens that each verification committed.
        outputs (`dict[str, list]`): The outputs of each token that were requested.
        interrupted (`Acceptance`, *optional*): The accepted part of a round that an error of the caller's code ended,
            as far as the cache of plain decoding would hold it.
    """

    def __init__(self, prompt: torch.LongTensor, selector: TokenSelector):
        rows = len(prompt)
        self.selector = selector
        self.buffer = prompt  # which grows: the limit may be far away
        self.lengths = [0] * rows
        self.alive = [True] * rows
        self.last = prompt.new_zeros(rows)
        self.acceptance_lengths: list[list[int]] = [[] for _ in range(rows)]
        self.outputs: dict[str, list[torch.Tensor]] = {name: [] for name in selector.requested_outputs}
        self.interrupted: Acceptance | None = None

    @property
    def done(self) -> bool:
        return not any(self.alive)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row that has not ended."""
        return min((length for length, alive in zip(self.lengths, self.alive) if alive), default=0)

    @property
    def left(self) -> int:
        """Maximum number of tokens that any row may still generate."""
        return self.selector.max_new - self.shortest

    @property
    def sequences(self) -> torch.LongTensor:
        """`[R, S + longest]`, finished rows padded."""
        return self.buffer[:, : self.selector.prompt_length + self.longest].contiguous()

    @property
    def next_draws(self) -> list[int]:
        """The number of each row's next sample; ended rows repeat the shortest active row's."""
        shortest = self.shortest
        return [length if alive else shortest for length, alive in zip(self.lengths, self.alive)]

    def begin(self, logits: torch.Tensor) -> None:
        """Choose the first token of each row, from the logits `[R, 1, V]` after the prompt."""
        self._commit(Block(self.last[:, None]), logits, [[] for _ in self.lengths])

    def accept(self, draft, logits: torch.Tensor) -> Acceptance:
        """
        Write the longest path of a draft that the target agrees with, and the target's next token.

        Args:
            draft (`Block` or the like): `[R, n]` tokens.
            logits (`torch.Tensor`): `[R, n, V]`, the target's logits after each of these tokens.
        """
        if hasattr(self.selector.streamer, "next_round"):  # for streamers that mark drafted tokens
            self.selector.streamer.next_round(draft.tokens.shape[1] - 1)
        paths: list[list[int]] = [[] for _ in self.lengths]
        try:
            acceptance = self._commit(draft, logits, paths)
        except BaseException:
            self.interrupted = acceptance_of(paths, self.buffer.device)
            raise
        for lengths, count in zip(self.acceptance_lengths, acceptance.counts):
            if count > 0:
                lengths.append(count)
        return acceptance

    def _commit(self, draft, logits: torch.Tensor, paths: list[list[int]]) -> Acceptance:
        logits = logits.to(self.buffer.device)
        self._reserve(self.longest + logits.shape[1])
        if self.selector.tokenwise:
            acceptance = self._token_by_token(draft, logits, paths)
        else:
            acceptance = self._at_once(draft, logits)
        if self.selector.noise is not None:
            self.selector.noise.forget(min(self.next_draws))
        return acceptance

    def _at_once(self, draft, logits: torch.Tensor) -> Acceptance:
        selector = self.selector
        device = self.buffer.device
        # 1. The target's own token after each drafted one, and how far the draft agrees.
        depths = draft.depths
        if depths is None:
            depths = torch.arange(logits.shape[1], device=device).expand(logits.shape[:2])
        chosen = selector.choose(logits, depths, self.next_draws)
        counts, path = draft.agree(chosen)
        tokens = chosen if path is None else chosen.gather(1, path)  # [R, m]
        # 2. Where rows end on that path.
        lengths, alive = torch.tensor([self.lengths, self.alive], device=device)
        left = (selector.max_new - lengths) * alive
        counts = counts.minimum(left)
        ended = counts >= left
        if selector.eos is not None:
            is_eos = torch.isin(tokens, selector.eos.to(device))
            first = torch.where(is_eos.any(dim=1), is_eos.long().argmax(dim=1) + 1, tokens.shape[1] + 1)
            ended = ended | (first <= counts)
            counts = counts.minimum(first)
        # 3. Write them; what the next draft rejects is overwritten.
        places = torch.arange(tokens.shape[1], device=device)
        tokens = torch.where(places < counts[:, None], tokens, selector.pad)
        self.buffer.scatter_(1, (selector.prompt_length + lengths)[:, None] + places, tokens)
        last = tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        self.last = torch.where(counts > 0, last, self.last)
        host_counts, host_ended = torch.stack([counts, ended.long()]).tolist()  # the host waits for the device
        self.lengths = [length + count for length, count in zip(self.lengths, host_counts)]
        self.alive = [alive and not ended for alive, ended in zip(self.alive, host_ended)]
        return Acceptance(host_counts, path)

    def _token_by_token(self, draft, logits: torch.Tensor, paths: list[list[int]]) -> Acceptance:
        """Each row by itself: its tokens go on as long as they agree with the draft; extends their `paths`."""
        for row, alive in enumerate(self.alive):
            if alive:
                self._follow(row, draft.children(row), logits[row], paths[row])
        columns = [self.selector.prompt_length + length - 1 for length in self.lengths]
        self.last = self.buffer[range(len(paths)), columns]
        return acceptance_of(paths, self.buffer.device)

    def _follow(self, row: int, children: dict, logits: torch.Tensor, path: list[int]) -> None:
        """Choose, write and stream one token of a row after another, from logits `[n, V]`; extends `path`."""
        selector = self.selector
        place: int | None = 0
        while place is not None:
            path.append(place)
            end = selector.prompt_length + self.lengths[row]
            raw = logits[place, None].to(torch.float32, copy=True)  # processors may write to it
            token, scores = selector.next_token(row, self.buffer[row : row + 1, :end], raw)
            self.buffer[row, end] = token
            token_outputs = {"scores": scores, "logits": raw}
            for name, outputs in self.outputs.items():
                outputs.append(token_outputs[name])
            self.lengths[row] += 1
            if selector.streamer is not None:
                selector.streamer.put(self.buffer[row, end : end + 1].cpu())
            text = self.buffer[row : row + 1, : end + 1]
            stopped = bool(selector.criteria(text, self.outputs.get("scores")))
            ended = stopped or self.lengths[row] >= selector.max_new
            self.alive[row] = not ended
            # Read again: a criterion may have written another token.
            place = None if ended else children.get((place, int(self.buffer[row, end])))

    def _reserve(self, generated: int) -> None:
        """Make room for `generated` tokens after the prompt."""
        missing = self.selector.prompt_length + generated - self.buffer.shape[1]
        if missing > 0:
            columns = max(missing, self.buffer.shape[1] // 2)
            with torch.inference_mode(False):
                room = self.buffer.new_full((len(self.buffer), columns), self.selector.pad)
                self.buffer = torch.cat([self.buffer, room], dim=1)
