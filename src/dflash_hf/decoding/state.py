"""The generation state: the sequences of all rows, what is committed to them, and streaming."""

import torch

from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.selection import TokenSelector


class GenerationState:
    """
    The sequences of a call, and how they grow.

    Args:
        prompt (`torch.LongTensor`): `[R, S]`.
        selector (`TokenSelector`): How tokens are chosen, and where rows end.

    Attributes:
        lengths (`list[int]`): Tokens generated in each row.
        unfinished (`list[bool]`): Rows that have not ended.
        anchors (`torch.LongTensor`): `[R]`, the last committed token of each row, after which the next draft begins.
        committed (`list[list[int]]`): The tokens that the last round has committed to each row.
        acceptance_lengths (`list[list[int]]`): For each row, the tokens that each verification committed.
        outputs (`dict[str, list]`): The outputs of each token that were requested.
        interrupted (`Acceptance`, *optional*): Set if an error of the caller's code ends a round: what was accepted
            until then, as far as the cache of plain decoding would hold it.
    """

    def __init__(self, prompt: torch.LongTensor, selector: TokenSelector):
        rows = len(prompt)
        self.selector = selector
        self.buffer = prompt  # grows, since the limit may be far away
        self.lengths = [0] * rows
        self.unfinished = [True] * rows
        # The same on the device, for tokens that are committed at once.
        self._device_lengths = prompt.new_zeros(rows)
        self._device_unfinished = torch.ones(rows, dtype=torch.bool, device=prompt.device)
        self.anchors = prompt.new_zeros(rows)
        self.committed: list[list[int]] = [[] for _ in range(rows)]
        self.acceptance_lengths: list[list[int]] = [[] for _ in range(rows)]
        self.outputs: dict[str, list[torch.Tensor]] = {name: [] for name in selector.requested_outputs}
        self.interrupted: Acceptance | None = None

    @property
    def done(self) -> bool:
        return not any(self.unfinished)

    @property
    def longest(self) -> int:
        """Tokens generated in the longest row."""
        return max(self.lengths)

    @property
    def shortest(self) -> int:
        """Tokens generated in the shortest unfinished row; 0 if all have ended."""
        lengths = [length for length, unfinished in zip(self.lengths, self.unfinished) if unfinished]
        return min(lengths, default=0)

    @property
    def remaining_tokens(self) -> int:
        """Maximum number of tokens that any row may still generate."""
        return self.selector.max_new_tokens - self.shortest

    @property
    def sequences(self) -> torch.LongTensor:
        """`[R, S + longest]`, finished rows padded."""
        return self.buffer[:, : self.selector.input_length + self.longest].contiguous()

    def _next_draws(self) -> list[int]:
        """
        The index of each row's next draw of the [`SamplingNoise`], which is the number of tokens it has generated.
        Rows that have ended sample nothing; they repeat the shortest unfinished row's, so that no draw is kept for
        them.
        """
        shortest = self.shortest
        return [length if unfinished else shortest for length, unfinished in zip(self.lengths, self.unfinished)]

    def begin(self, logits: torch.Tensor) -> None:
        """Choose the first token of each row, from the logits `[R, 1, V]` after the prompt."""
        self._commit(Block(self.anchors[:, None]), logits, [[] for _ in self.lengths])

    def accept(self, candidates, logits: torch.Tensor) -> Acceptance:
        """
        Write the longest path of candidates on which the target agrees, and the target's next token.

        A streamer may have a method `next_round(num_drafted)`, to mark drafted tokens. It is called before the tokens
        of each round with the number of candidates, anchor excluded. It may also have a method
        `end_round(num_accepted)`, which is called after them with the number of these tokens that were drafted.

        Args:
            candidates (`Block` or `Tree`): `[R, n]` tokens.
            logits (`torch.Tensor`): `[R, n, V]`, the target's logits after each of these tokens.
        """
        if hasattr(self.selector.streamer, "next_round"):
            self.selector.streamer.next_round(candidates.tokens.shape[1] - 1)
        paths: list[list[int]] = [[] for _ in self.lengths]
        try:
            acceptance = self._commit(candidates, logits, paths)
            if hasattr(self.selector.streamer, "end_round"):
                self.selector.streamer.end_round(self._num_accepted(candidates, paths))
        except BaseException:
            self.interrupted = Acceptance.from_paths(paths, self.buffer.device)
            raise
        for lengths, count in zip(self.acceptance_lengths, acceptance.counts):
            if count > 0:
                lengths.append(count)
        return acceptance

    def _num_accepted(self, candidates, paths: list[list[int]]) -> int:
        """
        How many of the tokens that a round has committed were drafted, in all rows. The last token of a row is the
        target's own, unless the row has ended at a drafted one.
        """
        num_accepted = 0
        for row, path in enumerate(paths):
            if path:
                num_accepted += len(path) - 1
                if not self.unfinished[row]:
                    num_accepted += (path[-1], int(self.anchors[row])) in candidates.child_by_token(row)
        return num_accepted

    def _commit(self, candidates, logits: torch.Tensor, paths: list[list[int]]) -> Acceptance:
        """Choose and write tokens; `paths` receives the accepted nodes of each row, one after another."""
        logits = logits.to(self.buffer.device)
        self.committed = [[] for _ in paths]
        self._reserve(self.longest + logits.shape[1])
        if self.selector.chooses_token_by_token:
            acceptance = self._commit_token_by_token(candidates, logits, paths)
        else:
            acceptance = self._commit_at_once(candidates, logits, paths)
        if self.selector.noise is not None:
            self.selector.noise.advance(self._next_draws())
        return acceptance

    def _commit_at_once(self, candidates, logits: torch.Tensor, paths: list[list[int]]) -> Acceptance:
        """All rows together; extends their `paths`."""
        selector = self.selector
        device = self.buffer.device
        # 1. The target's choice after each candidate, and the longest path on which they agree.
        depths = candidates.depths
        if depths is None:
            depths = torch.arange(logits.shape[1], device=device).expand(logits.shape[:2])
        target_tokens = selector.choose(logits, depths, candidates.max_depth)
        counts, path = candidates.longest_match(target_tokens)
        tokens = target_tokens if path is None else target_tokens.gather(1, path)  # [R, m]
        # 2. Where rows end on that path.
        remaining = (selector.max_new_tokens - self._device_lengths) * self._device_unfinished
        counts = counts.minimum(remaining)
        ended = counts >= remaining
        if selector.eos_token_ids is not None:
            is_eos = torch.isin(tokens, selector.eos_token_ids.to(device))
            past_end = tokens.shape[1] + 1
            count_to_eos = torch.where(is_eos.any(dim=1), is_eos.long().argmax(dim=1) + 1, past_end)
            ended = ended | (count_to_eos <= counts)
            counts = counts.minimum(count_to_eos)
        # 3. Write all tokens of the path, padding past `counts`: the next round overwrites it.
        steps = torch.arange(tokens.shape[1], device=device)
        tokens = torch.where(steps < counts[:, None], tokens, selector.pad_token_id)
        self.buffer.scatter_(1, (selector.input_length + self._device_lengths)[:, None] + steps, tokens)
        last_tokens = tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        self.anchors = torch.where(counts > 0, last_tokens, self.anchors)
        self._device_lengths = self._device_lengths + counts
        self._device_unfinished = self._device_unfinished & ~ended
        # 4. All that the host needs, in one copy, for which it waits.
        columns = [counts[:, None], ended[:, None], tokens]
        if path is not None:
            columns.append(path)
        host_rows = torch.cat(columns, dim=1).tolist()
        num_tokens = tokens.shape[1]
        # 5. What the caller sees: one token after another, since a streamer may raise at each.
        for row, (count, has_ended, *values) in enumerate(host_rows):
            nodes = range(count) if path is None else values[num_tokens:][:count]
            for node, token in zip(nodes, values[:count], strict=True):
                paths[row].append(node)
                self.committed[row].append(token)
                self.lengths[row] += 1
                if selector.streamer is not None:
                    selector.streamer.put(torch.tensor([token]))
            if has_ended:
                self.unfinished[row] = False
        return Acceptance(paths, counts, path)

    def _commit_token_by_token(self, candidates, logits: torch.Tensor, paths: list[list[int]]) -> Acceptance:
        """Each row separately: its tokens go on as long as they agree with the candidates; extends their `paths`."""
        for row, unfinished in enumerate(self.unfinished):
            if unfinished:
                self._commit_row(row, candidates.child_by_token(row), logits[row], paths[row])
        columns = [self.selector.input_length + length - 1 for length in self.lengths]
        self.anchors = self.buffer[range(len(paths)), columns]
        return Acceptance.from_paths(paths, self.buffer.device)

    def _commit_row(self, row: int, child_by_token: dict, logits: torch.Tensor, path: list[int]) -> None:
        """Choose, write and stream one token of a row after another, from logits `[n, V]`; extends `path`."""
        selector = self.selector
        node: int | None = 0
        while node is not None:
            path.append(node)
            end = selector.input_length + self.lengths[row]
            raw_logits = logits[node, None].to(torch.float32, copy=True)  # processors may write to it
            token, scores = selector.next_token(row, self.buffer[row : row + 1, :end], raw_logits)
            self.buffer[row, end] = token
            token_outputs = {"scores": scores, "logits": raw_logits}
            for name, outputs in self.outputs.items():
                outputs.append(token_outputs[name])
            self.lengths[row] += 1
            if selector.streamer is not None:
                selector.streamer.put(self.buffer[row, end : end + 1].cpu())
            sequence = self.buffer[row : row + 1, : end + 1]
            is_stopped = bool(selector.criteria(sequence, self.outputs.get("scores")))
            has_ended = is_stopped or self.lengths[row] >= selector.max_new_tokens
            self.unfinished[row] = not has_ended
            committed = int(self.buffer[row, end])  # read again: a criterion may have written another token
            self.committed[row].append(committed)
            node = None if has_ended else child_by_token.get((node, committed))

    def _reserve(self, generated: int) -> None:
        """Make room for `generated` tokens after the prompt."""
        missing = self.selector.input_length + generated - self.buffer.shape[1]
        if missing > 0:
            columns = max(missing, self.buffer.shape[1] // 2)
            with torch.inference_mode(False):
                room = self.buffer.new_full((len(self.buffer), columns), self.selector.pad_token_id)
                self.buffer = torch.cat([self.buffer, room], dim=1)
